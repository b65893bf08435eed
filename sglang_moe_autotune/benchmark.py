"""The real bench: the launches that serve, on the live layers' weights, timed and compared on the GPU."""

from __future__ import annotations

import logging
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_moe_autotune import correctness, launch
from sglang_moe_autotune.bench import Bench, Comparison, Declined, Readiness, Sample
from sglang_moe_autotune.layers import Buffers, LiveLayer, gemm_call, quant_info
from sglang_moe_autotune.shapes import GEMMS, ConfigPair, Gemm, KernelConfig, MoeShape
from sglang_moe_autotune.timing import PairTimer, Thunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from sglang_moe_autotune.compiler import Compiler

logger = logging.getLogger(__name__)

_SLOT_ROUTINGS = ("uniform", "uniform", "skewed", "uniform")
_BLOCK_SIZES_M = (16, 32, 64, 128, 256)
_SEED = 20
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_MARGIN_BYTES = 64 << 20
"""for routings, aligned ids and the temporaries of a comparison"""


class Lent(NamedTuple):
    """What the process that serves lends to a bench."""

    layers: Callable[[MoeShape], Sequence[LiveLayer]]
    """the live layers of a shape"""
    invoke: Callable[..., Any]
    """SGLang's invoke_fused_moe_kernel"""
    align: Callable[[torch.Tensor, int, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """SGLang's moe_align_block_size"""
    compiled_here: Callable[[], int]
    """how many Triton compiles this process has made"""


class _Candidate(NamedTuple):
    """One config of one GEMM, ready to be ordered and launched over the rotation."""

    binary: launch.Binary
    launches: list[launch.Launch]
    bound: list[tuple[Any, ...]]


class DeviceProvider:
    """Opens benches on the GPU that this process serves from."""

    def __init__(self, serving: Lent, compiler: Compiler, reserve_bytes: int, slice_us: float) -> None:
        self.serving, self.compiler = serving, compiler
        self.recorder = launch.LaunchRecorder(serving.invoke)
        self.reserve_bytes, self.slice_us = reserve_bytes, slice_us
        self.timer = PairTimer()
        self.kernels: dict[str, Any] = {}
        """binaries that this object loaded, by hash; serving's own stay in the kernels' device caches"""
        self.scratch_bytes = 0
        self.peak_scratch_bytes = 0

    def open(self, shape: MoeShape, M: int, baseline: ConfigPair) -> Bench | str:  # noqa: N803
        self.compiler.recover()
        layers = self.serving.layers(shape)
        if not layers:
            return "no live layer of this shape"
        for block in {baseline.up.BLOCK_SIZE_M, baseline.down.BLOCK_SIZE_M}:
            if block not in _BLOCK_SIZES_M:
                return f"SGLang's own BLOCK_SIZE_M of {block} is not one of {_BLOCK_SIZES_M}"
        need = scratch_bytes(shape, M)
        free, _ = torch.cuda.mem_get_info()
        if need > free - self.reserve_bytes:
            return (
                f"needs {need >> 20} MiB of scratch, and {free >> 20} MiB are free with"
                f" {self.reserve_bytes >> 20} MiB kept in reserve"
            )
        return DeviceBench(self, shape, M, baseline, layers)


def scratch_bytes(shape: MoeShape, M: int) -> int:  # noqa: N803
    """Device memory a bench takes: activations of both GEMMs, two copies of the larger output, a margin."""
    width = 4 if shape.activation_dtype == "float32" else 2
    rows, up_n = M * shape.top_k, shape.w1_shape[1]
    output = rows * max(up_n, shape.K)
    return width * (M * shape.K + rows * up_n + 2 * output) + _MARGIN_BYTES


class DeviceBench:
    """One (shape, M) on the GPU; see ``tuner.Bench`` for the contract."""

    def __init__(
        self, provider: DeviceProvider, shape: MoeShape, M: int, baseline: ConfigPair, layers: Sequence[LiveLayer]  # noqa: N803
    ) -> None:
        self._provider, self._shape, self._M, self._baseline = provider, shape, M, baseline
        self._layers = layers
        self._device = torch.cuda.current_device()
        self._pool: Any = torch.cuda.MemPool()
        self._candidates: dict[tuple[Gemm, KernelConfig], _Candidate | str] = {}
        self._expected_us: dict[tuple[Gemm, KernelConfig], float] = {}
        self._aligned: dict[tuple[str, int], tuple[torch.Tensor, ...]] = {}
        self._ids: dict[str, torch.Tensor] = {}
        self._comparing: tuple[ConfigPair, int, Iterator[float | None]] | None = None
        self._setup: Iterator[None] | None = self._set_up()
        self._device_us = 0.0

    # -- the contract -----------------------------------------------------------------------------------------

    def prepare(self) -> bool:
        if self._setup is None:
            return True
        try:
            next(self._setup)
        except StopIteration:
            self._setup = None
        torch.cuda.current_stream().synchronize()
        return self._setup is None

    def readiness(self, gemm: Gemm, config: KernelConfig) -> Readiness:
        candidate = self._candidate(gemm, config)
        return "failed" if isinstance(candidate, str) else self._provider.compiler.readiness(candidate.binary)

    def reason(self, gemm: Gemm, config: KernelConfig) -> str:
        candidate = self._candidate(gemm, config)
        return candidate if isinstance(candidate, str) else self._provider.compiler.reason(candidate.binary)

    def measure(self, gemm: Gemm, config: KernelConfig, count: int) -> list[Sample]:
        incumbent = self._baseline.of(gemm)
        fresh = self._load(gemm, config)
        if fresh:
            return []
        thunks = self._thunks(gemm, config), self._thunks(gemm, incumbent)
        expected = self._expected_us.get((gemm, config), float("inf")), self._expected_us[gemm, incumbent]
        timed = self._provider.timer.time(*thunks, expected, count, self._provider.slice_us)
        self._device_us += timed.device_us
        if timed.samples:
            self._expected_us[gemm, config] = statistics.median(s.candidate_us for s in timed.samples)
            self._expected_us[gemm, incumbent] = statistics.median(s.baseline_us for s in timed.samples)
        return timed.samples

    @property
    def compare_cases(self) -> int:
        return len(correctness.ROUTINGS)

    def compare(self, pair: ConfigPair, case: int) -> Comparison | None:
        if self._comparing is None or self._comparing[:2] != (pair, case):
            self._comparing = (pair, case, self._compare_steps(pair, correctness.ROUTINGS[case]))
        error = self._clocked(lambda: next(self._comparing[2]))  # type: ignore[index]
        if error is None:
            return None
        self._comparing = None
        return correctness.judge(error, self._shape.activation_dtype)

    def adopt(self, pair: ConfigPair) -> Readiness:
        for gemm in GEMMS:
            if self.readiness(gemm, pair.of(gemm)) != "ready":
                return self.readiness(gemm, pair.of(gemm))
        before = self._provider.serving.compiled_here()
        for gemm in GEMMS:
            args, named = self._call(gemm, pair.of(gemm), 0, _SLOT_ROUTINGS[0])
            self._provider.serving.invoke(*args, **named)
        torch.cuda.current_stream().synchronize()
        return "ready" if self._provider.serving.compiled_here() == before else "failed"

    @property
    def launch_us(self) -> float:
        return max(self._expected_us.get((gemm, self._baseline.of(gemm)), 0.0) for gemm in GEMMS)

    @property
    def gpu_s(self) -> float:
        return self._device_us * 1e-6

    def close(self) -> None:
        # Views and recorded launches hold the tensors; the pool gives its memory back when the last is gone.
        self._candidates.clear()
        self._aligned.clear()
        self._ids.clear()
        self._comparing = self._setup = None
        for name in ("_a", "_output", "_reference"):
            self.__dict__.pop(name, None)
        self._pool = None
        self._provider.scratch_bytes = 0

    # -- set-up -----------------------------------------------------------------------------------------------

    def _set_up(self) -> Iterator[None]:
        shape, device = self._shape, f"cuda:{self._device}"
        dtype = _DTYPES[shape.activation_dtype]
        rows, up_n = self._M * shape.top_k, shape.w1_shape[1]
        down_k = up_n if "ungated" in shape.variant or "fused-swiglu" in shape.variant else up_n // 2
        free, _ = torch.cuda.mem_get_info()
        with torch.cuda.use_mem_pool(self._pool):
            self._a = {
                "up": torch.empty(self._M, shape.K, dtype=dtype, device=device),
                "down": torch.empty(rows, down_k, dtype=dtype, device=device),
            }
            self._output = torch.empty(rows * max(up_n, shape.K), dtype=dtype, device=device)
            self._reference = torch.empty_like(self._output)
        yield
        self._generator = torch.Generator(device=device).manual_seed(_SEED + self._M)
        for activation in self._a.values():
            activation.normal_(generator=self._generator)
            yield
        for name in dict.fromkeys((*_SLOT_ROUTINGS, *correctness.ROUTINGS)):
            with torch.cuda.use_mem_pool(self._pool):
                self._routing(name)
            yield
        provider = self._provider
        provider.scratch_bytes = free - torch.cuda.mem_get_info()[0]
        provider.peak_scratch_bytes = max(provider.peak_scratch_bytes, provider.scratch_bytes)
        for gemm in GEMMS:
            config = self._baseline.of(gemm)
            candidate = self._candidate(gemm, config)
            if isinstance(candidate, str):
                raise Declined(f"SGLang's own {gemm} config cannot be rebuilt: {candidate}")
            if launch.loaded(candidate.launches[0], self._device, candidate.binary) is None:
                raise Declined(f"the {gemm} launch rebuilt for this M is not one that serving has made")
            yield
            self._expected_us[gemm, config] = 0.0
            self._load(gemm, config)
            # The first launch of all tells how long this M takes; the second one is warm.
            for _ in range(2):
                thunks = self._thunks(gemm, config)
                timed = provider.timer.time(thunks, thunks, (float("inf"), 1e3), 1, provider.slice_us)
                self._device_us += timed.device_us
                if timed.samples:
                    self._expected_us[gemm, config] = timed.samples[0].baseline_us
                yield

    def _routing(self, name: str) -> torch.Tensor:
        if name not in self._ids:
            shape = self._shape
            self._ids[name] = correctness.topk_ids(
                name, self._M, shape.E, shape.top_k, self._local_share(), self._generator
            )
        return self._ids[name]

    def _local_share(self) -> float:
        config = getattr(self._layers[0].module, "moe_runner_config", None)
        experts, local = getattr(config, "num_experts", None), getattr(config, "num_local_experts", None)
        return local / experts if self._shape.ep and experts and local else 1.0

    # -- launches ---------------------------------------------------------------------------------------------

    def _buffers(self, gemm: Gemm, block_m: int, routing: str, output: torch.Tensor) -> Buffers:
        shape, ids = self._shape, self._routing(routing)
        if (routing, block_m) not in self._aligned:
            self._aligned[routing, block_m] = self._provider.serving.align(ids, block_m, shape.E)
        sorted_ids, experts, post_padded = self._aligned[routing, block_m][:3]
        if "weights" not in self.__dict__:
            self.weights = torch.rand(ids.shape, device=ids.device, generator=self._generator)
        columns = self._columns(gemm)
        c = output[: self._M * shape.top_k * columns].view(self._M, shape.top_k, columns)
        return Buffers(self._a[gemm], c if gemm == "down" else c.view(-1, columns), self.weights, ids,
                       sorted_ids, experts, post_padded)  # fmt: skip

    def _columns(self, gemm: Gemm) -> int:
        return self._shape.w1_shape[1] if gemm == "up" else self._shape.K

    def _call(
        self, gemm: Gemm, config: KernelConfig, slot: int, routing: str, output: torch.Tensor | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        layer = self._layers[slot % len(self._layers)]
        quant = quant_info(layer.module)
        if quant is None or not quant.w13_weight.is_cuda:
            raise Declined("a layer's weights are not on the GPU now")
        buffers = self._buffers(gemm, config.BLOCK_SIZE_M, routing, self._output if output is None else output)
        args, named = gemm_call(gemm, layer, quant, buffers, self._shape.top_k, config.to_dict())
        return args, {k: v for k, v in named.items() if k in self._provider.recorder.parameters}

    def _record(self, gemm: Gemm, config: KernelConfig, slot: int, routing: str, output: Any = None) -> launch.Launch:
        args, named = self._call(gemm, config, slot, routing, output)
        return self._provider.recorder.record(*args, **named)

    def _candidate(self, gemm: Gemm, config: KernelConfig) -> _Candidate | str:
        place = (gemm, config)
        if place not in self._candidates:
            try:
                launches = [self._record(gemm, config, s, r) for s, r in enumerate(_SLOT_ROUTINGS)]
                binaries = [launch.binary_of(made, self._device) for made in launches]
            except (AssertionError, ValueError, TypeError, KeyError) as error:
                self._candidates[place] = f"SGLang refuses this launch: {type(error).__name__}: {error}"
            else:
                same = [b.bound for b in binaries if b.hash == binaries[0].hash]
                self._candidates[place] = _Candidate(binaries[0], launches, same)
        return self._candidates[place]

    def _load(self, gemm: Gemm, config: KernelConfig) -> bool:
        """Make the binary launchable; True if that took work, which is a slice of its own."""
        candidate = self._candidate(gemm, config)
        assert not isinstance(candidate, str)  # noqa: S101 - only ready configs are measured
        kernels, name = self._provider.kernels, candidate.binary.hash
        if name in kernels:
            return False
        kernel = launch.loaded(candidate.launches[0], self._device, candidate.binary)
        kernels[name] = launch.load(candidate.binary) if kernel is None else kernel
        kernels[name]._init_handles()
        return kernel is None

    def _thunks(self, gemm: Gemm, config: KernelConfig) -> list[Thunk]:
        candidate = self._candidate(gemm, config)
        assert not isinstance(candidate, str)  # noqa: S101 - as above
        return [self._thunk(candidate, bound) for bound in candidate.bound]

    def _thunk(self, candidate: _Candidate, bound: tuple[Any, ...]) -> Thunk:
        grid = (*candidate.launches[0].grid, 1, 1)[:3]
        run = self._provider.kernels[candidate.binary.hash][grid]
        stream = torch.cuda.current_stream().cuda_stream
        return lambda: run(*bound, stream=stream)

    # -- comparison -------------------------------------------------------------------------------------------

    def _compare_steps(self, pair: ConfigPair, routing: str) -> Iterator[float | None]:
        """One launch or one reduction a step; at the end the largest error of both GEMMs."""
        worst = 0.0
        slot = correctness.ROUTINGS.index(routing)
        for gemm in GEMMS:
            size = self._M * self._shape.top_k * self._columns(gemm)
            reference, output = self._reference[:size], self._output[:size]
            self._run_once(gemm, self._baseline.of(gemm), slot, routing, reference)
            yield None
            for _ in range(2):  # twice: a race need not show on one run
                self._run_once(gemm, pair.of(gemm), slot, routing, output)
                yield None
                shape = (self._M, self._shape.top_k, self._columns(gemm))
                worst = max(worst, float(correctness.row_error(output.view(shape), reference.view(shape))))
                yield None
        yield worst

    def _run_once(self, gemm: Gemm, config: KernelConfig, slot: int, routing: str, output: torch.Tensor) -> None:
        made = self._record(gemm, config, slot, routing, output)
        binary = launch.binary_of(made, self._device)
        self._load(gemm, config)
        kernel = self._provider.kernels.get(binary.hash)
        if kernel is None:
            raise Declined(f"the {gemm} launch of routing {routing} needs another binary than the one measured")
        correctness.poison(output)
        kernel[(*made.grid, 1, 1)[:3]](*binary.bound)

    def _clocked(self, step: Callable[[], float | None]) -> float | None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        result = step()
        end.record()
        end.synchronize()
        self._device_us += begin.elapsed_time(end) * 1e3
        return result
