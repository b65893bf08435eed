"""The search of one (shape, M): which trials to measure next, and in the end which pairs to propose. Pure.

A field of configs races: what other M of the shape suggest, then the prior, then one-step neighbours of the
leaders. A stage gives each trial in the race a few more samples than the stage before, and what is slower than
the leading pair beyond its own uncertainty drops out. Up and down GEMM are measured apart; the value of a pair
(one BLOCK_SIZE_M for both) is the sum of their times.
"""

from __future__ import annotations

import math
import zlib
from itertools import zip_longest
from operator import itemgetter
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from sglang_moe_autotune.experience import Experience, Trial
from sglang_moe_autotune.lags import OTHER, SHARE, lags, least_by_tile
from sglang_moe_autotune.lags import best as best_of
from sglang_moe_autotune.measurement import Measurement
from sglang_moe_autotune.routings import sampling
from sglang_moe_autotune.search_space import AXES, filled, neighbours
from sglang_moe_autotune.shapes import GEMMS, ConfigPair, Gemm, KernelConfig, MoeShape

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from sglang_moe_autotune.prior import Prior


class SearchOptions(msgspec.Struct, frozen=True):
    """How much a search may spend."""

    compiled_per_shape: int = 80
    """distinct configs of a shape, over all M: compiles are the cost that users feel"""
    first_configs: int = 20
    """of them: with these all M of the shape shall have a first answer"""
    looks: int = 6
    """searches of an M at most"""
    patience: int = 2
    """rounds of neighbours without progress after which a search ends, and searches of an M after which it has all"""
    progress: float = 0.001
    """what counts as progress, as a fraction of the best pair's time"""
    leaders: int = 3
    """configs of a GEMM whose neighbours are tried in a round"""
    stages: tuple[int, ...] = (1, 3, 8)
    """launches that a trial has after each stage of a race, at least: a sample may hold several"""
    final_stages: tuple[int, ...] = (24, 64)
    finalists: tuple[int, ...] = (5, 3)
    """trials of a GEMM in each final stage"""
    final_s: float = 0.15
    """about what the launches of a final stage may take; long launches then get fewer samples"""
    finals_s: float = 3.5
    """and of all M of a shape together: many M learn from each other"""
    cut_sigmas: float = 2.0
    seed: int = 0
    """the order in which equals are tried"""
    tie: float = 0.002
    """a config that no other M uses must be better than one in use by this fraction of its time"""
    most_winners: int = 12
    """configs with which all M of a shape are served, as far as that costs little: see ``consolidation``"""
    few_winners: int = 4
    """with each config in use beyond these the tie grows by half"""


_PRIOR_SIGMA: Final = 0.03  # of one pair of launches, until enough were seen to tell
_PER_RANK: Final = 0.0005  # what a place in the prior's order is worth, in log time


class Ranked(NamedTuple):
    """A pair and its estimated time in units of the baseline's."""

    pair: ConfigPair
    relative: float


class Search:
    """Ask and tell for one M. Deterministic: the same answers give the same questions."""

    def __init__(
        self,
        shape: MoeShape,
        M: int,  # noqa: N803
        baseline: ConfigPair,
        experience: Experience,
        prior: Prior,
        options: SearchOptions | None = None,
        *,
        allowance: int,
        quick: bool = False,
        only: frozenset[KernelConfig] | None = None,
    ) -> None:
        """allowance: new configs that this search may compile. quick: take them from the prior alone, and look at no
        neighbours. only: race and propose these, as far as they are compiled, and leave the baseline out."""
        self.shape, self.M, self.baseline = shape, M, baseline
        self.experience = experience
        self.options = options or SearchOptions()
        self.done = False
        self._prior = prior
        self._rows = experience.at(M, baseline)
        self._baseline_us = experience.reference_us[M]
        self._share: dict[Gemm, float] = dict(SHARE)
        self._race: dict[Trial, None] = {}
        self._target = 0
        self._per_sample = sampling(shape, M).per_sample
        self._promise: dict[KernelConfig, int] = {}
        self._allowance, self._quick, self._only = allowance, quick, only
        self._left = max(0, self.options.compiled_per_shape - len(experience.ordered))
        self._compiled = 0
        self._plan = self._stages()

    def ask(self) -> list[Trial]:
        """The trials wanted now: order their binaries, measure those that are ready, in any order, then ask again.

        Empty with ``done`` unset means that it only thought; it never thinks for longer than a slice.
        """
        wanted = next(self._plan, None)
        self.done = wanted is None
        return wanted or []

    def count(self, trial: Trial) -> int:
        """How many samples this trial lacks in the present stage; 0 where it left the race."""
        row = self._rows.get(trial)
        return max(0, self._target - (len(row.logs) if row else 0)) if trial in self._race else 0

    def tell(self, trial: Trial, samples: Iterable[tuple[float, float]]) -> None:
        """Add (candidate_us, baseline_us) samples of a trial."""
        samples = list(samples)
        self._baseline_us[trial.gemm].extend(us for _, us in samples)
        self._rows.setdefault(trial, Measurement()).extend(math.log(ours / theirs) for ours, theirs in samples)

    def fail(self, trial: Trial, reason: str) -> None:
        """The trial cannot be launched: it leaves this race and is not tried at other M."""
        self.experience.failed[trial] = reason
        self.drop(trial)

    def drop(self, trial: Trial) -> None:
        """Take a trial out of this race only."""
        self._race.pop(trial, None)

    def ranked(self, count: int = 8) -> list[Ranked]:
        """The best pairs, the best first, the baseline (1.0) among them.

        Within ``tie`` a config that serves another M goes first: distinct winners cost compiles at every start.
        """
        costs, winners = self._costs(), self.experience.winners(but=self.M)
        tie = self.options.tie * (1 + max(0, len(winners) - self.options.few_winners) / 2)
        by_tile: dict[int, dict[Gemm, list[KernelConfig]]] = {}
        for trial in sorted((t for t in costs if self._only is None or t.config in self._only), key=costs.__getitem__):
            by_tile.setdefault(trial.config.BLOCK_SIZE_M, {gemm: [] for gemm in GEMMS})[trial.gemm].append(trial.config)
        free = winners | {self.baseline.up, self.baseline.down}
        found = [(1.0, Ranked(self.baseline, 1.0))] if self._only is None else []
        for tile in by_tile.values():
            for up in tile["up"][:5]:
                for down in tile["down"][:5]:
                    if (pair := ConfigPair(up, down)) != self.baseline:
                        relative = costs[Trial("up", up)] + costs[Trial("down", down)]
                        new = len({up, down} - free)
                        found.append((relative * (1 + tie * new / 2), Ranked(pair, relative)))
        found.sort(key=itemgetter(0))
        return [ranked for _, ranked in found[:count]]

    @property
    def measured(self) -> int:
        """Configs measured at this M."""
        return len({trial.config for trial in self._rows})

    @property
    def baseline_us(self) -> float:
        """The baseline's up + down in microseconds; 0 before anything was measured."""
        return sum(map(self.reference_us, GEMMS))

    def reference_us(self, gemm: Gemm) -> float:
        """Of the baseline's launch of one GEMM, in microseconds; 0 before anything was measured."""
        return median(us) if (us := self._baseline_us[gemm]) else 0.0

    # -- the race --------------------------------------------------------------------------------------------------

    def _stages(self) -> Iterator[list[Trial]]:
        orders = []
        for gemm in GEMMS if self._allowance and self._left else ():
            orders.append(self._prior.rank(self.shape, self.M, gemm, self.experience.space))
            yield []
        merged = dict.fromkeys(c for both in zip_longest(*orders) for c in both if c is not None)
        self._promise = {config: place for place, config in enumerate(merged)}
        yield []
        fresh, best, fruitless = self._field(), math.inf, 0
        while fresh:
            yield []
            self._enter(fresh)
            for target in self.options.stages:
                yield self._wanted(target)
                self._cut()
                yield []
            before, best = best, min(best, best_of(least_by_tile(self._costs())))
            fruitless = 0 if best < before * (1 - self.options.progress) else fruitless + 1
            fresh = []
            if not self._quick and fruitless < self.options.patience:
                fresh = yield from self._fresh_neighbours()
        for target, finalists in zip(self.options.final_stages, self.options.finalists, strict=True):
            self._race = dict.fromkeys(self._finalists(finalists))
            yield []
            self._cut()
            affordable = self.options.final_s * 1e6 / max(1.0, self.baseline_us * len(self._race))
            yield self._wanted(min(target, max(self.options.stages[-1], int(affordable))))
        yield []
        self.experience.conclude(self.M, lags(self._costs()))

    def _wanted(self, launches: int) -> list[Trial]:
        self._target = math.ceil(launches / self._per_sample)
        return [trial for trial in self._race if self.count(trial)]

    def _enter(self, configs: Iterable[KernelConfig]) -> None:
        for config in configs:
            if config not in self.experience.ordered:
                self.experience.ordered[config] = None
                self._compiled += 1
                self._left -= 1
            self._race |= {t: None for gemm in GEMMS if (t := Trial(gemm, config)) not in self.experience.failed}

    def _cut(self) -> None:
        """Drop trials whose best possible pair is slower than the leading pair beyond the uncertainty of both."""
        costs, sigma = self._costs(), self._sigma()
        least = least_by_tile(costs)
        best = best_of(least)
        for trial in list(self._race):
            if trial in costs:
                slack = self.options.cut_sigmas * sigma / math.sqrt(len(self._rows[trial].logs))
                other = least[trial.config.BLOCK_SIZE_M][OTHER[trial.gemm]]
                if costs[trial] * (1 - slack) + other > best * (1 + slack / 2):
                    del self._race[trial]

    def _finalists(self, per_gemm: int) -> list[Trial]:
        """Trials that take part in the leading pairs."""
        keep: dict[Gemm, dict[Trial, None]] = {gemm: {} for gemm in GEMMS}
        for pair, _ in self.ranked(per_gemm * per_gemm):
            for gemm in GEMMS:
                trial = Trial(gemm, pair.of(gemm))
                if trial in self._rows and len(keep[gemm]) < per_gemm:
                    keep[gemm][trial] = None
        return [*keep["up"], *keep["down"]]

    # -- what to try -----------------------------------------------------------------------------------------------

    def _field(self) -> list[KernelConfig]:
        """Who starts: winners of other M, whatever is compiled and not hopeless, then new ones of the prior."""
        if self._only is not None:
            return [c for c in self.experience.ordered if c in self._only and self._may_try(c)]
        nearest = self.experience.nearest(self.M)
        field = dict.fromkeys(
            c for m in nearest[:8] if (p := self.experience.chosen.get(m)) for c in (p.up, p.down) if self._may_try(c)
        )
        known = dict.fromkeys(trial.config for trial in self._rows)  # a set's order is another one in each process
        field |= dict.fromkeys(c for c in self.experience.promising(self.M) if self._may_try(c))
        field |= dict.fromkeys(c for c in known if c in self.experience.ordered and self._may_try(c))
        new = [c for c in self._promise if c not in field and c not in self.experience.ordered and self._may_try(c)]
        part = self._allowance if self._quick else math.ceil(self._allowance / 2)
        return [*field, *new[: min(part, self._left)]]

    def _fresh_neighbours(self) -> Generator[list[Trial], None, list[KernelConfig]]:
        """New configs one step from the leaders, the most promising first, as many as this round may compile. Thinks
        about one leader at a time."""
        size = min(max(2, math.ceil(self._allowance / 4)), self._allowance - self._compiled, self._left)
        if size <= 0:
            return []
        costs = self._costs()
        least = least_by_tile(costs)
        steps = _Steps()
        scores: dict[KernelConfig, float] = {}
        for gemm in GEMMS:
            steps.see(t for t in self._rows.items() if t[0].gemm == gemm)
            yield []
        for gemm in GEMMS:
            pair_costs = {
                t.config: cost + least[t.config.BLOCK_SIZE_M][OTHER[gemm]]
                for t, cost in costs.items()
                if t.gemm == gemm
            }
            for leader in sorted(pair_costs, key=pair_costs.__getitem__)[: self.options.leaders]:
                for near in neighbours(leader, self.experience.axes):
                    if near in self.experience.ordered or near not in self.experience.space or not self._may_try(near):
                        continue
                    place = self._promise.get(near, len(self._promise))
                    score = math.log(pair_costs[leader]) + steps.expected(leader, near) + _PER_RANK * place
                    scores[near] = min(score, scores.get(near, math.inf))
                yield []
        return sorted(scores, key=lambda c: (scores[c], self._lot(c)))[:size]

    def _lot(self, config: KernelConfig) -> int:
        """The order of equals, by the seed."""
        return zlib.crc32(f"{self.options.seed} {config}".encode())

    def _may_try(self, config: KernelConfig) -> bool:
        """Not the baseline under another spelling, and not what can be launched for no GEMM."""
        if all(Trial(gemm, config) in self.experience.failed for gemm in GEMMS):
            return False
        return not filled(self.baseline.up) == filled(self.baseline.down) == config

    # -- estimates -------------------------------------------------------------------------------------------------

    def _costs(self) -> dict[Trial, float]:
        """Trials with an estimate in units of the baseline pair's time, the baseline's own two among them."""
        if all(self._baseline_us.values()):
            up, down = (median(self._baseline_us[gemm]) for gemm in GEMMS)
            self._share = {"up": up / (up + down), "down": down / (up + down)}
        costs = {t: self._share[t.gemm] * math.exp(row.centre) for t, row in self._rows.items() if row.logs}
        if self.baseline.up.extra or self.baseline.down.extra:
            return costs  # its keys (USE_TMA, ...) tie its two launches together: half of it goes with nothing else
        return costs | {Trial(gemm, self.baseline.of(gemm)): self._share[gemm] for gemm in GEMMS}

    def _sigma(self) -> float:
        """The spread of one paired log-ratio, from the repeated trials in the race."""
        repeated = [row for t in self._race if (row := self._rows.get(t)) and len(row.logs) >= 3]
        spreads = [abs(log - row.centre) for row in repeated for log in row.logs[:8]]
        return _PRIOR_SIGMA / math.sqrt(self._per_sample) if len(spreads) < 24 else 1.48 * median(spreads) * 1.2 + 1e-4


class _Steps:
    """What one step on one axis brought where both ends were measured, in log time."""

    def __init__(self) -> None:
        self._seen: dict[tuple[object, int, int], list[float]] = {}

    def see(self, rows: Iterable[tuple[Trial, Measurement]]) -> None:
        """Add what was measured of one GEMM, or of several."""
        lines: dict[tuple[object, ...], list[tuple[int, float]]] = {}
        for (gemm, config), row in rows:
            if row.logs:
                values = _values(config)
                for axis, value in enumerate(values):
                    lines.setdefault((gemm, axis, *values[:axis], *values[axis + 1 :]), []).append((value, row.centre))
        for key, line in lines.items():
            for old, before in line:
                for new, after in line:
                    self._seen.setdefault((key[1], old, new), []).append(after - before)

    def expected(self, here: KernelConfig, there: KernelConfig) -> float:
        """The mean over the pairs seen, drawn towards no change."""
        axis, old, new = next(
            (n, a, b) for n, (a, b) in enumerate(zip(_values(here), _values(there), strict=True)) if a != b
        )
        changes = self._seen.get((axis, old, new), [])
        return sum(changes) / (len(changes) + 2)


def _values(config: KernelConfig) -> tuple[int, ...]:
    return tuple(getattr(filled(config), axis) for axis in AXES)
