"""The replay of a landscape: a bench that answers from recorded latencies, with noise, in place of a device."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from sglang_moe_autotune import noise
from sglang_moe_autotune.bench import ALONE, COMPARE_CASES, Bench, Comparison, Readiness, Sample
from sglang_moe_autotune.routings import Round, sampling
from sglang_moe_autotune.shapes import GEMMS, ConfigPair, Gemm, KernelConfig, MoeShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_moe_autotune.landscape import Landscape
    from sglang_moe_autotune.noise import NoiseModel

SLICE_US: Final = 500.0


class ReplayProvider:
    """Opens benches on a landscape. Deterministic for a seed and a sequence of calls.

    noise_percent: the standard deviation of one launch. noise_model: what else a device adds. compile_s: of one
    config, one after the other; without it a binary is ready when it was asked for ``polls`` times. clock: real time
    for demonstrations; without one, time is virtual: it moves by the simulated launches and by ``wait``.
    """

    def __init__(
        self,
        landscape: Landscape,
        seed: int = 0,
        noise_percent: float = 2.0,
        *,
        noise_model: NoiseModel = "launch",
        compile_s: float = 0.0,
        polls: int = 2,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.landscape = landscape
        self.share = ALONE
        self.polls, self.compile_s = polls, compile_s
        self.gpu_s = 0.0
        """of all benches, every simulated launch counted"""
        self.compiled: dict[KernelConfig, None] = {}
        """configs whose binaries were asked for and exist"""
        self.noise = noise.make(noise_model, noise_percent / 100, random.Random(seed))  # noqa: S311 - no secrets
        self._clock = clock
        self._waited_s = 0.0
        self._asked: dict[tuple[Gemm, KernelConfig], int] = {}
        self._ready_at_s: dict[KernelConfig, float] = {}

    @property
    def now_s(self) -> float:
        return self._clock() if self._clock else self.gpu_s + self._waited_s

    def clock(self) -> float:
        """For the tuner."""
        return self.now_s

    def wait(self, seconds: float) -> None:
        """Let virtual time pass."""
        self._waited_s += seconds

    def open(self, shape: MoeShape, M: int, baseline: ConfigPair) -> Bench | str:  # noqa: N803
        if shape != self.landscape.shape:
            return f"{shape.slug} is not the recorded shape {self.landscape.shape.slug}"
        if M not in self.landscape.baselines:
            return f"M={M} was not recorded; the landscape has {', '.join(map(str, self.landscape.ms))}"
        if any(self.landscape.latency_us(M, gemm, baseline.of(gemm)) is None for gemm in GEMMS):
            return f"the baseline {baseline} was not recorded at M={M}"
        return ReplayBench(self, M, baseline)

    def readiness(self, M: int, gemm: Gemm, config: KernelConfig) -> Readiness:  # noqa: N803
        """Of a binary; a config that did not fit the device or was not recorded fails when it would be ready."""
        if config == self.landscape.baselines[M].pair.of(gemm):
            return "ready"
        if config in self.landscape.candidates:
            self.compiled[config] = None
        asked = self._asked[gemm, config] = self._asked.get((gemm, config), 0) + 1
        if self.compile_s:
            queue_s = max([self.now_s, *self._ready_at_s.values()])
            if self.now_s < self._ready_at_s.setdefault(config, queue_s + self.compile_s):
                return "waiting"
        elif asked < self.polls:
            return "waiting"
        return "failed" if self.landscape.latency_us(M, gemm, config) is None else "ready"


class ReplayBench:
    """One M of the landscape; see ``bench.Bench`` for the contract."""

    compare_cases = COMPARE_CASES

    def __init__(self, provider: ReplayProvider, M: int, baseline: ConfigPair) -> None:  # noqa: N803
        self._provider, self._M, self._baseline = provider, M, baseline
        self._share = provider.share
        self._loaded: set[tuple[Gemm, KernelConfig]] = set()
        self.sampling = sampling(provider.landscape.shape, M)
        self._rounds: dict[tuple[Gemm, KernelConfig], Round] = {}
        self._spent_us = 0.0

    def prepare(self) -> bool:
        return True

    def readiness(self, gemm: Gemm, config: KernelConfig) -> Readiness:
        return self._provider.readiness(self._M, gemm, config)

    def reason(self, gemm: Gemm, config: KernelConfig) -> str:  # noqa: ARG002 - the recording does not tell them apart
        return self._provider.landscape.out_of_resources.get(config, "not recorded")

    def measure(self, gemm: Gemm, config: KernelConfig, count: int) -> list[Sample]:
        ours_us, theirs_us = self._us(gemm, config), self._us(gemm, self._baseline.of(gemm))
        if (gemm, config) not in self._loaded:  # loading a binary is a slice of its own, with one warm launch
            self._loaded.add((gemm, config))
            self._spend(ours_us)
            return []
        turns = self._rounds.setdefault((gemm, config), Round(self.sampling))
        fitting = max(1, min(turns.pairs(count), int(SLICE_US / (ours_us + theirs_us))))
        times = self._provider.noise.slice(ours_us, theirs_us, fitting, begins=turns.begins)
        self._spend(sum(map(sum, times)))
        return turns.add(times)[:count]

    def compare(self, pair: ConfigPair, case: int) -> Comparison | None:  # noqa: ARG002 - outputs were not recorded
        runs = self._share.runs
        for gemm in pair.unlike(self._baseline) or GEMMS:
            self._spend(runs * self._us(gemm, pair.of(gemm)) + self._us(gemm, self._baseline.of(gemm)))
        return Comparison(ok=True, error=0.0, tolerance=0.0, runs=runs)

    def adopt(self, pair: ConfigPair) -> Readiness:
        for gemm in GEMMS:
            self._spend(self._us(gemm, pair.of(gemm)))
        return "ready"

    @property
    def launch_us(self) -> float:
        return max(self._us(gemm, self._baseline.of(gemm)) for gemm in GEMMS)

    @property
    def gpu_s(self) -> float:
        return self._spent_us * 1e-6

    def wind_down(self) -> bool:
        return True

    def close(self) -> None:
        """Nothing is held."""

    def _us(self, gemm: Gemm, config: KernelConfig) -> float:
        us = self._provider.landscape.latency_us(self._M, gemm, config)
        if us is None:
            raise ValueError(f"{config} was launched and is not in the recording; only ready configs may be measured")
        return us

    def _spend(self, us: float) -> None:
        self._spent_us += us
        self._provider.gpu_s += us * 1e-6
