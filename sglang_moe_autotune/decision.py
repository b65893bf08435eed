"""The decision: a sequential paired test of a pair against the baseline, with a stated error rate.

Each round of samples gives the ratio of (up + down) candidate to (up + down) baseline, measured in turn, so that a
drift of the clocks that both feel cancels, and with the same routings. The test asks for the median ratio and bounds it
by order statistics: exact whatever the shape of the noise, as long as rounds are independent. It looks at a few fixed
counts and spends its error rate in equal parts over them. ``faster`` needs a lower bound of the gain above zero and an
estimate of at least the minimum gain; everything else is a ``tie``, and a tie keeps the incumbent.
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import fmean, median
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from sglang_moe_autotune.bench import Sample

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_moe_autotune.routings import Sampling

Outcome = Literal["undecided", "faster", "tie"]

LOOKS: Final = (12, 24, 48, 96, 192)
"""Counts of rounds at which the test may end."""
MOST_LAUNCHES: Final = 384
"""of each side; where a round holds many, the later looks are left out"""

_HOPE: Final = 0.75
"""how far above its estimate a gain may lie, in units of the distance to its lower bound"""


class Estimate(NamedTuple):
    """The gain 1 - candidate/baseline with its bounds, as fractions."""

    gain: float
    low: float
    high: float


class PairedTest:
    """Feed it samples of both GEMMs; read ``outcome``. For a confirmation start a second one from nothing."""

    def __init__(
        self, min_gain: float, error_rate: float = 0.005, floor: float = 0.0, *, sampling: Sampling | None = None
    ) -> None:
        """min_gain, error_rate, floor: fractions; the rate is of saying ``faster`` of a pair whose gain is below the
        floor. A floor below zero, and a least gain below zero, allow a loss. sampling: of the bench that makes the
        samples; those of a round count as one."""
        self._min_gain, self._floor = min_gain, floor
        per_sample, self._per_round = sampling or (1, 1)
        self._looks = looks(per_sample * self._per_round)
        self._error_per_look = error_rate / len(self._looks)
        self._up: list[Sample] = []
        self._down: list[Sample] = []
        self._looked = 0
        self.outcome: Outcome = "undecided"
        self.estimate = Estimate(0.0, -math.inf, 1.0)

    @property
    def samples(self) -> int:
        """Rounds of up and down so far."""
        return min(len(self._up), len(self._down)) // self._per_round

    @property
    def wanted(self) -> tuple[int, int]:
        """How many more samples of (up, down) the next look needs; (0, 0) when it has decided."""
        if self.outcome != "undecided":
            return 0, 0
        goal = self._looks[self._looked] * self._per_round
        return max(0, goal - len(self._up)), max(0, goal - len(self._down))

    @property
    def most(self) -> int:
        """Samples of either GEMM at the last look."""
        return self._looks[-1] * self._per_round

    @property
    def baseline_us(self) -> float:
        """The median of the baseline's up + down, in microseconds; 0 before the first look."""
        return median(u.baseline_us + d.baseline_us for u, d in self._both()) if self.samples else 0.0

    def add(self, up: Iterable[Sample] = (), down: Iterable[Sample] = ()) -> Outcome:
        """Add samples of either GEMM and look if a count is reached."""
        self._up.extend(up)
        self._down.extend(down)
        while self.outcome == "undecided" and self.samples >= self._looks[self._looked]:
            self._look(self._looks[self._looked])
        return self.outcome

    def _look(self, count: int) -> None:
        logs = sorted(
            math.log((u.candidate_us + d.candidate_us) / (u.baseline_us + d.baseline_us))
            for u, d in self._both()[:count]
        )
        trimmed = beyond(count, self._error_per_look)
        gain, low, high = (1 - math.exp(log) for log in (median(logs), logs[-1 - trimmed], logs[trimmed]))
        self.estimate = Estimate(gain, low, high)
        self._looked += 1
        if low > self._floor and gain >= self._min_gain:
            self.outcome = "faster"
        elif high < self._min_gain or self._looked == len(self._looks) or self._is_futile(count):
            self.outcome = "tie"

    def _is_futile(self, count: int) -> bool:
        """Could the last look say ``faster`` only if the gain were well above what it seems? Giving up says ``tie``, so
        the error rate is not touched."""
        gain, low, _ = self.estimate
        needed = max(self._min_gain, self._floor + (gain - low) * math.sqrt(count / self._looks[-1]))
        return gain + _HOPE * (gain - low) < needed

    def _both(self) -> list[tuple[Sample, Sample]]:
        return list(zip(self._rounds(self._up), self._rounds(self._down), strict=False))

    def _rounds(self, samples: list[Sample]) -> Iterable[Sample]:
        """The means of whole rounds."""
        size = self._per_round
        for begin in range(0, len(samples) - size + 1, size):
            candidate_us, baseline_us = map(fmean, zip(*samples[begin : begin + size], strict=True))
            yield Sample(candidate_us, baseline_us)


def looks(launches: int) -> tuple[int, ...]:
    """Counts of rounds, each of so many launches of a side, at which a test may end."""
    return tuple(count for count in LOOKS if count * launches <= MOST_LAUNCHES or count == LOOKS[0])


@lru_cache
def beyond(count: int, error_rate: float) -> int:
    """How many order statistics may be left out on a side so that the median exceeds the bound with at most this rate.

    The largest k with P(Binomial(count, 1/2) <= k) <= error_rate (Conover, the sign test inverted). Raises
    ValueError where even the outermost sample is no bound.
    """
    tail = 0.0
    for k in range(count):
        tail += math.comb(count, k) / 2**count
        if tail > error_rate:
            if k == 0:
                raise ValueError(f"{count} samples cannot bound a median at an error rate of {error_rate:g}; raise it")
            return k - 1
    return count - 1
