"""Other ways to choose configs, on the budget and with the noise that the search had. Used by bench_search.py.

Each gives configs one after the other. A config is measured at every M and in both GEMMs, against the baseline,
once, and twice more where it is within a fifth of the leader. What is chosen at an M is the best pair by these
measurements, the baseline included: no test, no confirmation, which is cheaper than what a server can allow itself.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_moe_autotune import noise
from sglang_moe_autotune.replay import SLICE_US
from sglang_moe_autotune.routings import Round, sampling
from sglang_moe_autotune.search_space import AXES, full_space, tiles
from sglang_moe_autotune.shapes import GEMMS, ConfigPair, Gemm, KernelConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_moe_autotune.bench import Sample
    from sglang_moe_autotune.landscape import Landscape
    from sglang_moe_autotune.noise import NoiseModel
    from sglang_moe_autotune.prior import Prior

Tell = Callable[[KernelConfig, dict[int, float]], object]
"""told each config's log-time in units of the baseline's, by M, both GEMMs together"""

_NEAR = 0.2
_FAILED = 2.0
"""the log-time of what cannot be launched"""


class Point(NamedTuple):
    """The state after some compiled configs."""

    compiled: int
    gpu_s: float
    pairs: dict[int, ConfigPair]


class Field:
    """What a rival knows, and what it chooses by it."""

    def __init__(self, landscape: Landscape, seed: int, percent: float, model: NoiseModel) -> None:
        self.landscape, self.gpu_s, self.compiled = landscape, 0.0, 0
        self._noise = noise.make(model, percent / 100, random.Random(seed))  # noqa: S311 - no secrets
        self._least: dict[tuple[int, Gemm, int], tuple[float, KernelConfig]] = {}
        """by M, GEMM and BLOCK_SIZE_M the fastest by measurement, as a share of the baseline pair's time"""
        self._lead: dict[tuple[int, Gemm], float] = {}
        self.pairs = {M: b.pair for M, b in landscape.baselines.items()}
        for M, baseline in landscape.baselines.items():  # noqa: N806
            for gemm in GEMMS:
                self._note(M, gemm, baseline.pair.of(gemm), 0.0)

    def measure(self, config: KernelConfig) -> dict[int, float]:
        """Compile and measure one config everywhere; its log-times by M."""
        self.compiled += 1
        return {M: self._at(M, config) for M in self.landscape.ms}

    def _at(self, M: int, config: KernelConfig) -> float:  # noqa: N803
        total, failed = 0.0, False
        for gemm in GEMMS:
            us = self.landscape.latency_us(M, gemm, config)
            if us is None:
                failed = True
                continue
            log = self._paired(M, gemm, us, 1)
            if log < self._lead[M, gemm] + _NEAR:
                log = (log + 2 * self._paired(M, gemm, us, 2)) / 3
            self._note(M, gemm, config, log)
            total += self._share(M, gemm) * math.exp(log)
        self._choose(M)
        return _FAILED if failed else math.log(total)

    def _paired(self, M: int, gemm: Gemm, us: float, count: int) -> float:  # noqa: N803
        """The mean of so many samples, each as large as the search's."""
        baseline = self.landscape.baselines[M]
        theirs_us = baseline.up_us if gemm == "up" else baseline.down_us
        turns = Round(sampling(self.landscape.shape, M))
        samples: list[Sample] = []
        while len(samples) < count:
            fitting = max(1, min(turns.pairs(count - len(samples)), int(SLICE_US / (us + theirs_us))))
            times = self._noise.slice(us, theirs_us, fitting, begins=turns.begins)
            self.gpu_s += sum(map(sum, times)) * 1e-6
            samples += turns.add(times)
        return sum(math.log(ours / theirs) for ours, theirs in samples) / len(samples)

    def _note(self, M: int, gemm: Gemm, config: KernelConfig, log: float) -> None:  # noqa: N803
        key, cost = (M, gemm, config.BLOCK_SIZE_M), self._share(M, gemm) * math.exp(log)
        self._lead[M, gemm] = min(log, self._lead.get((M, gemm), math.inf))
        if key not in self._least or cost < self._least[key][0]:
            self._least[key] = (cost, config)

    def _choose(self, M: int) -> None:  # noqa: N803
        best, pair = 1.0, self.landscape.baselines[M].pair
        for tile in AXES["BLOCK_SIZE_M"]:
            up, down = (self._least.get((M, gemm, tile)) for gemm in GEMMS)
            if up and down and up[0] + down[0] < best:
                best, pair = up[0] + down[0], ConfigPair(up[1], down[1])
        self.pairs[M] = pair

    def _share(self, M: int, gemm: Gemm) -> float:  # noqa: N803
        baseline = self.landscape.baselines[M]
        return (baseline.up_us if gemm == "up" else baseline.down_us) / (baseline.up_us + baseline.down_us)


class Rival:
    """Gives configs until it has no more; learns from what it is told."""

    def __init__(self, configs: Iterator[KernelConfig], tell: Tell = lambda *_: None) -> None:
        self.configs, self.tell = configs, tell


def run(rival: Rival, field: Field, compiled: int, gpu_s: float) -> list[Point]:
    """Let a rival go on until either part of the budget is spent."""
    trace = [Point(0, 0.0, dict(field.pairs))]
    for config in rival.configs:
        rival.tell(config, field.measure(config))
        trace.append(Point(field.compiled, field.gpu_s, dict(field.pairs)))
        if field.compiled >= compiled or field.gpu_s >= gpu_s:
            break
    return trace


def by_chance(landscape: Landscape, seed: int) -> Rival:
    """Uniform over the candidates, none twice."""
    drawn = random.Random(seed).sample(landscape.candidates, len(landscape.candidates))  # noqa: S311 - no secrets
    return Rival(iter(drawn))


def plain_grid(landscape: Landscape, compiled: int, seed: int) -> Rival:
    """Every n-th of the grid in the order of SGLang's tuner, beginning somewhere."""
    order = [c for c in full_space() if c in set(landscape.candidates)]
    step = max(1, len(order) // compiled)
    return Rival(iter(order[seed % step :: step]))


def prior_alone(landscape: Landscape, prior: Prior) -> Rival:
    """What the installed config files suggest, the best of each M and GEMM in turn, and nothing else."""
    space = frozenset(landscape.candidates)
    orders = [prior.rank(landscape.shape, M, gemm, space) for M in landscape.ms for gemm in GEMMS]
    return Rival(iter(dict.fromkeys(c for place in zip_longest(*orders) for c in place if c is not None)))


def tpe(landscape: Landscape, seed: int, first: Sequence[KernelConfig] = ()) -> Rival:
    """Optuna's TPE: a study an M, asked in turn, each told of all configs. ``first`` are tried before it is asked."""
    import optuna  # noqa: PLC0415 - an extra

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = set(landscape.candidates)
    axes = {name: values for name, values in AXES.items() if len({getattr(c, name) for c in space}) > 1}
    fixed = {name: getattr(next(iter(space)), name) for name in AXES if name not in axes}
    distributions: dict[str, Any] = {n: optuna.distributions.IntDistribution(0, len(v) - 1) for n, v in axes.items()}
    sampler = optuna.samplers.TPESampler
    studies = {M: optuna.create_study(sampler=sampler(seed=seed + M, multivariate=True)) for M in landscape.ms}
    told: dict[KernelConfig, None] = {}

    def tell(config: KernelConfig, logs: dict[int, float]) -> None:
        told[config] = None
        where = {name: values.index(getattr(config, name)) for name, values in axes.items()}
        for M, study in studies.items():  # noqa: N806
            done = optuna.trial.create_trial(params=where, distributions=distributions, value=logs[M])
            study.add_trial(done)

    def configs() -> Iterator[KernelConfig]:
        yield from first
        spare = random.Random(seed)  # noqa: S311 - no secrets
        while len(told) < len(space):
            for study in studies.values():
                for _ in range(8):
                    trial = study.ask(distributions)
                    values = fixed | {name: axes[name][place] for name, place in trial.params.items()}
                    config = tiles(*(values[name] for name in AXES))
                    study.tell(trial, state=optuna.trial.TrialState.FAIL)  # its value is added with all others
                    if config in space and config not in told:
                        break
                else:
                    left = [c for c in landscape.candidates if c not in told]
                    if not left:
                        return
                    config = spare.choice(left)
                yield config

    return Rival(configs(), tell)
