"""The real bench: the launches that serve, on the live layers' weights, timed and compared on the GPU."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_moe_autotune import correctness, launch
from sglang_moe_autotune.bench import ALONE, DIRTY, Bench, Comparison, Declined, Readiness, Sample
from sglang_moe_autotune.kernels import Kernels
from sglang_moe_autotune.launches import NO_MEMORY, REFUSALS, Candidate, Launches
from sglang_moe_autotune.quarantine import Quarantine
from sglang_moe_autotune.routings import HOPELESS, Round, sampling
from sglang_moe_autotune.scratch import Align, Scratch, scratch_bytes
from sglang_moe_autotune.search_space import AXES
from sglang_moe_autotune.shapes import GEMMS, ConfigPair, Gemm, KernelConfig, MoeShape
from sglang_moe_autotune.timing import PairTimer, Timed, clocked, inner_launches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang_moe_autotune.compiler import Compiler
    from sglang_moe_autotune.journal import Launch
    from sglang_moe_autotune.layers import LiveLayer

_RUNS_AT_ONCE = 16
_RUN_US_PER_BYTE = 5 / 2e6
"""poisoning writes an output, a comparison reads two and writes bytes; at 2 TB/s"""
_OPERATIONS_PER_RUN = 8
"""of a comparison, each of which takes the host about as long as a launch does"""
_WARM_TRIES = 12
"""launches of SGLang's own config, of which two must be timed"""
_FORGOTTEN_AT_ONCE = 8
"""of some hundred recorded candidates, each of which has its arguments by routing and layer"""
_ENDLESS = 100.0
_ENDLESS_US = 5000.0
"""Launches this many times the baseline's are not made twice; those that are this long too not after a restart either:
a request would wait for them, and nothing but the kernel itself takes as long."""



class Lent(NamedTuple):
    """What the process that serves lends to a bench."""

    layers: Callable[[MoeShape], Sequence[LiveLayer]]
    """the live layers of a shape"""
    invoke: Callable[..., Any]
    """SGLang's invoke_fused_moe_kernel"""
    align: Align
    compiled_here: Callable[[], int]
    """how many Triton compiles this process has made"""


class DeviceProvider:
    """Opens benches on the GPU that this process serves from."""

    def __init__(
        self,
        serving: Lent,
        compiler: Compiler,
        reserve_bytes: int,
        slice_us: float,
        quarantine: Quarantine | None = None,
        *,
        bit_equal: bool = False,
    ) -> None:
        """bit_equal: take only candidates whose every bit is the baseline's, on the inputs of the comparison."""
        self.bit_equal = bit_equal
        self.share = ALONE
        self.quarantine = quarantine or Quarantine()
        self.serving, self.compiler = serving, compiler
        self.recorder = launch.LaunchRecorder(serving.invoke)
        self.reserve_bytes, self.slice_us = reserve_bytes, slice_us
        self.timer = PairTimer()
        self.kernels = Kernels()
        self.scratch_bytes = 0

    def open(self, shape: MoeShape, M: int, baseline: ConfigPair) -> Bench | str:  # noqa: N803
        if "fused-swiglu" in shape.variant:
            return "layers with a fused epilogue are not tuned yet: it writes other columns"
        self.compiler.recover()
        layers = self.serving.layers(shape)
        if not layers:
            return "no live layer of this shape"
        for block in {baseline.up.BLOCK_SIZE_M, baseline.down.BLOCK_SIZE_M}:
            if block not in AXES["BLOCK_SIZE_M"]:
                return f"SGLang's own BLOCK_SIZE_M of {block} is not one of {AXES['BLOCK_SIZE_M']}"
        need = scratch_bytes(shape, M, flush=len(layers) == 1)
        free, _ = torch.cuda.mem_get_info()
        if need > free - self.reserve_bytes:
            return (
                f"needs {need >> 20} MiB of scratch, and {free >> 20} MiB are free with"
                f" {self.reserve_bytes >> 20} MiB kept in reserve"
            )
        return DeviceBench(self, shape, M, baseline, layers)


class DeviceBench:
    """One (shape, M) on the GPU; see ``bench.Bench`` for the contract."""

    def __init__(
        self, provider: DeviceProvider, shape: MoeShape, M: int, baseline: ConfigPair, layers: Sequence[LiveLayer]  # noqa: N803
    ) -> None:
        self._provider, self._shape, self._M, self._baseline = provider, shape, M, baseline
        self._layers, self._share = layers, provider.share
        self._device = torch.cuda.current_device()
        self._scratch: Scratch | None = None
        self._held: Launches | None = None
        self._expected_us: dict[tuple[Gemm, KernelConfig], float] = {}
        self.sampling = sampling(shape, M)
        self._rounds: dict[tuple[Gemm, KernelConfig], Round] = {}
        self._comparing: tuple[ConfigPair, int, Iterator[Comparison | None]] | None = None
        self._due: tuple[Gemm, KernelConfig] | None = None
        """the candidate that a comparison launches soon, with this routing for the first time"""
        self._adopted: set[tuple[Gemm, KernelConfig]] = set()
        self._setup: Iterator[None] | None = self._set_up()
        self._device_us = 0.0

    def prepare(self) -> bool:
        if self._setup is None:
            return True
        try:
            next(self._setup)
        except StopIteration:
            self._setup = None
        except torch.OutOfMemoryError as error:
            raise Declined(NO_MEMORY) from error
        torch.cuda.current_stream().synchronize()
        return self._setup is None

    def readiness(self, gemm: Gemm, config: KernelConfig) -> Readiness:
        """One step towards it a call: to record it, to order it, to read its binary, to load that."""
        fresh = not self._launches.knows(gemm, config)
        candidate = self._candidate(gemm, config)
        if isinstance(candidate, str):
            return "failed"
        state = "waiting" if fresh else self._provider.compiler.readiness(candidate.binary)
        if state != "ready":
            return state
        known = (gemm, config) in self._expected_us or self._announced(gemm, config)
        try:
            loaded = self._launches.ready(gemm, config)
        except REFUSALS as error:
            self._launches.refuse(gemm, config, f"cannot be loaded: {type(error).__name__}: {error}")
            return "failed"
        # Loading takes milliseconds, in which the journal's writer is mostly done.
        return "ready" if loaded and (known or self._announced(gemm, config)) else "waiting"

    def reason(self, gemm: Gemm, config: KernelConfig) -> str:
        candidate = self._candidate(gemm, config)
        return candidate if isinstance(candidate, str) else self._provider.compiler.reason(candidate.binary)

    def measure(self, gemm: Gemm, config: KernelConfig, count: int) -> list[Sample]:
        if isinstance(self._candidate(gemm, config), str):
            return []
        incumbent, journal = self._baseline.of(gemm), self._provider.quarantine.journal
        expected = self._expected_us.get((gemm, config), float("inf")), self._expected_us[gemm, incumbent]
        first = expected[0] == float("inf")
        try:
            sides = self._launches.side(gemm, config), self._launches.side(gemm, incumbent)
            if first and not journal.begin(self._first(gemm, config)):
                return []
            turns = self._rounds.setdefault((gemm, config), Round(self.sampling))
            pairs = turns.pairs(count, inner_launches(expected))
            rotation, slice_us = self._launches.rotation, self._provider.slice_us
            timed = self._provider.timer.time(
                *sides, rotation, expected, pairs, slice_us, turns.launched, begins=turns.begins
            )
        except REFUSALS as error:
            torch.cuda.current_stream().synchronize()  # raises where the device is lost: then nothing helps
            journal.end()
            self._launches.refuse(gemm, config, f"cannot be launched: {type(error).__name__}: {error}")
            return []
        journal.end()
        self._device_us += timed.device_us
        if first and self._endless(gemm, config, timed, expected[1]):
            return []
        if timed.samples:
            self._expected_us[gemm, config] = statistics.median(s.candidate_us for s in timed.samples)
            self._expected_us[gemm, incumbent] = statistics.median(s.baseline_us for s in timed.samples)
        if first:  # its instructions were cold; now its length is known, and the next slice can hold more
            return [s for s in timed.samples if s.candidate_us >= HOPELESS * s.baseline_us]
        return turns.add(timed.samples, timed.inner)[:count]

    def _endless(self, gemm: Gemm, config: KernelConfig, timed: Timed, baseline_us: float) -> bool:
        """Refuse what took so long in its one launch that it must not have a second one."""
        took_us = timed.samples[0].candidate_us if timed.samples else timed.launched_us
        if took_us < _ENDLESS * baseline_us or (not timed.samples and took_us < _ENDLESS_US):
            return False
        words = f"its first launch took {took_us / baseline_us:,.0f} times as long as SGLang's own"
        self._launches.refuse(gemm, config, words)
        if took_us > _ENDLESS_US:
            self._provider.quarantine.hold(self._shape, self._M, gemm, config, words)
        return True

    @property
    def compare_cases(self) -> int:
        return len(correctness.ROUTINGS)

    def compare(self, pair: ConfigPair, case: int) -> Comparison | None:
        if self._comparing is None or self._comparing[:2] != (pair, case):
            self._comparing = (pair, case, self._compare_steps(pair, correctness.ROUTINGS[case]))
            self._due = None
        if self._due is not None and not self._announced(*self._due):
            return None
        found, device_us = clocked(self._comparing[2].__next__)
        self._provider.quarantine.journal.end()
        self._device_us += device_us
        if found is not None:
            self._comparing = None
        return found

    def adopt(self, pair: ConfigPair) -> Readiness:
        for gemm in GEMMS:
            config = pair.of(gemm)
            if (gemm, config) in self._adopted:
                continue
            if (state := self.readiness(gemm, config)) != "ready":
                return state
            before = self._provider.serving.compiled_here()
            args, named = self._launches.call(gemm, config, 0, self._launches.routings[0])
            self._provider.serving.invoke(*args, **named)
            torch.cuda.current_stream().synchronize()
            if self._provider.serving.compiled_here() != before:
                return "failed"
            self._adopted.add((gemm, config))
            return "ready" if gemm == GEMMS[-1] else "waiting"
        return "ready"

    @property
    def launch_us(self) -> float:
        return max(self._expected_us.get((gemm, self._baseline.of(gemm)), 0.0) for gemm in GEMMS)

    @property
    def gpu_s(self) -> float:
        return self._device_us * 1e-6

    def wind_down(self) -> bool:
        self._comparing = self._setup = None
        return self._held is None or self._held.forget(_FORGOTTEN_AT_ONCE)

    def close(self) -> None:
        self._provider.quarantine.journal.withdraw()
        self._held = self._comparing = self._setup = None  # recorded launches hold tensors of the scratch
        if self._scratch is not None:
            self._scratch.close()
        self._scratch = None
        self._provider.scratch_bytes = 0

    def _set_up(self) -> Iterator[None]:
        provider = self._provider
        flush = len(self._layers) == 1
        operands = self._shape, self._M, provider.serving.align, self._local_share()
        scratch = Scratch(*operands, flush=flush, rank=self._share.rank)
        self._scratch = scratch
        self._held = Launches(scratch, self._layers, provider.recorder, provider.kernels)
        provider.scratch_bytes = scratch.taken_bytes
        yield
        yield from scratch.fill((*self._held.routings, *correctness.ROUTINGS))
        for gemm in GEMMS:
            config = self._baseline.of(gemm)
            candidate = self._candidate(gemm, config)
            if isinstance(candidate, str):
                raise Declined(f"SGLang's own {gemm} config cannot be rebuilt: {candidate}")
            yield
            self._launches.check_table(gemm, config)
            if launch.loaded(candidate.recorded, self._device, candidate.binary) is None:
                raise Declined(f"the {gemm} launch rebuilt for this M is not one that serving has made")
            yield
            self._launches.load(gemm, config)
            yield from self._time_baseline(gemm, config)

    def _time_baseline(self, gemm: Gemm, config: KernelConfig) -> Iterator[None]:
        """The first launch of all tells how long this M takes; the second one is warm. Raises Declined."""
        clean = 0
        for _ in range(_WARM_TRIES):
            side, timer = self._launches.side(gemm, config), self._provider.timer
            timed = timer.time(side, side, self._launches.rotation, (float("inf"), 1e3), 1, self._provider.slice_us)
            self._device_us += timed.device_us
            took_us = timed.samples[0].baseline_us if timed.samples else timed.launched_us
            self._expected_us[gemm, config] = max(took_us, 1.0)
            clean += bool(timed.samples)
            yield
            if clean == 2:
                return
        raise Declined(DIRTY)

    def _local_share(self) -> float:
        config = getattr(self._layers[0].module, "moe_runner_config", None)
        experts, local = getattr(config, "num_experts", None), getattr(config, "num_local_experts", None)
        return local / experts if self._shape.ep and experts and local else 1.0

    def _candidate(self, gemm: Gemm, config: KernelConfig) -> Candidate | str:
        if config != self._baseline.of(gemm) and (held := self._provider.quarantine.reason(self._shape, gemm, config)):
            return held
        return self._launches.candidate(gemm, config)

    def _first(self, gemm: Gemm, config: KernelConfig) -> Launch:
        return self._provider.quarantine.launch(self._shape, self._M, gemm, config)

    def _announced(self, gemm: Gemm, config: KernelConfig) -> bool:
        """May it be launched for the first time? See ``journal``."""
        return self._provider.quarantine.journal.announced(self._first(gemm, config))

    @property
    def _launches(self) -> Launches:
        assert self._held is not None  # noqa: S101 - for the type checker
        return self._held

    @property
    def scratch(self) -> Scratch:
        """The buffers; there from the first step of the set-up on."""
        assert self._scratch is not None  # noqa: S101 - for the type checker
        return self._scratch

    def _compare_steps(self, pair: ConfigPair, routing: str) -> Iterator[Comparison | None]:
        def launches(gemm: Gemm) -> tuple[correctness.Launch, correctness.Launch]:
            candidate = self._launches.into(gemm, pair.of(gemm), routing)
            self._due = gemm, pair.of(gemm)
            return self._launches.into(gemm, self._baseline.of(gemm), routing), self._journalled(gemm, pair, candidate)

        gemms = pair.unlike(self._baseline) or GEMMS  # a binary beside itself says nothing
        return correctness.case_steps(self.scratch, launches, lambda gemm: self._terms(gemm, pair.of(gemm)), gemms)

    def _journalled(self, gemm: Gemm, pair: ConfigPair, launch: correctness.Launch) -> correctness.Launch:
        """The first of these launches is in the journal: a kernel can fail on one routing only."""
        first = [True]

        def write(written: correctness.Written) -> None:
            if first:
                if not self._provider.quarantine.journal.begin(self._first(gemm, pair.of(gemm))):
                    raise Declined("the journal of first launches was held up")
                first.clear()
                self._due = None
            launch(written)

        return write

    def _terms(self, gemm: Gemm, config: KernelConfig) -> correctness.Terms:
        """As many runs a step as fit a slice, each with the poisoning before it and the comparison after it."""
        written_bytes = self.scratch.view(gemm, self.scratch.output).nbytes
        host_us = _OPERATIONS_PER_RUN * self._provider.timer.host_us
        device_us = self._expected_us.get((gemm, config), self.launch_us) + _RUN_US_PER_BYTE * written_bytes
        run_us = max(host_us, device_us + 20.0)
        at_once = max(1, min(_RUNS_AT_ONCE, int(0.6 * self._provider.slice_us / run_us)))
        allowed = correctness.tolerance(self._shape.activation_dtype, self._shape.dtype)
        return correctness.Terms(allowed, self._share.runs, at_once, self._provider.bit_equal)
