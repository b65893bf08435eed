"""The routings that launches are timed with, and how many launches of each side make one sample. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from sglang_moe_autotune.bench import Sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_moe_autotune.shapes import MoeShape

FEW: Final = ("uniform", "uniform-2", "skewed", "uniform-3")
"""Three draws of even loads, and one in which some experts are eight times as popular as the mean."""
MANY: Final = (*FEW, "uniform-4", "uniform-5", "skewed-2", "uniform-6")

HOPELESS: Final = 3.0
"""A launch this many times its baseline's says enough by itself."""

_SPARSE: Final = 4
"""Tokens an expert, on average, below which some experts have none in one routing and some in another."""


def timed(shape: MoeShape, M: int) -> tuple[str, ...]:  # noqa: N803
    """The routings of this M, in the order in which each trial meets them."""
    return MANY if _is_sparse(shape, M) else FEW


def sampling(shape: MoeShape, M: int) -> Sampling:  # noqa: N803
    """How the launches of this M are put together.

    Where tokens are few, the experts that have any are another number with each routing, and with it the number of
    tiles: on an H200 one config took 75 us with one routing and 110 with another, and two configs changed places. A
    sample then holds a launch with each. Where every expert has tokens, one launch says nearly as much as another, and
    a race is run with single ones; what is decided and stored is the mean over all routings there too.
    """
    return Sampling(len(MANY), 1) if _is_sparse(shape, M) else Sampling(1, len(FEW))


def _is_sparse(shape: MoeShape, M: int) -> bool:  # noqa: N803
    # With expert parallelism half of the tokens' choices or less fall to the experts of this rank, which E counts.
    return M * shape.top_k < _SPARSE * shape.E * (2 if shape.ep else 1)


class Sampling(NamedTuple):
    """How the launches of an M are put together."""

    per_sample: int = 1
    """launches of each side in a sample"""
    per_round: int = 1
    """samples of a trial in a row that meet each routing once"""


class Round:
    """Puts the launches of one trial together to samples."""

    def __init__(self, sampling: Sampling) -> None:
        self._size = sampling.per_sample
        self.launched = 0
        """of each side so far: says which routing is next"""
        self._slices = 0
        self._held: list[tuple[Sample, int]] = []

    def pairs(self, samples: int, inner: int = 1) -> int:
        """Pairs of times, each over ``inner`` launches of a side, that so many samples need."""
        return math.ceil(self._lacks / inner) + (samples - 1) * math.ceil(self._size / inner)

    @property
    def begins(self) -> bool:
        """Does the candidate begin the next slice? The first launches of a slice may be slower than the others, so each
        side begins as many slices, in the order of Thue and Morse (A B B A, B A A B, ...), which has no period that the
        number of slices in a round could share: it would tie sides to routings, or to the longer slices of a round."""
        return self._slices.bit_count() % 2 == 0

    def add(self, times: Sequence[Sample], inner: int = 1) -> list[Sample]:
        """The samples that are complete with a slice's times, which are means over ``inner`` launches of a side, or
        that need no more of them."""
        found = []
        self._slices += bool(times)
        for time in times:
            self.launched += inner
            self._held.append((time, inner))
            if self._lacks <= 0 or time.candidate_us >= HOPELESS * time.baseline_us:
                total = sum(count for _, count in self._held)
                candidate_us, baseline_us = (sum(t[side] * count for t, count in self._held) for side in (0, 1))
                found.append(Sample(candidate_us / total, baseline_us / total))
                self._held.clear()
        return found

    @property
    def _lacks(self) -> int:
        """Launches of each side that the sample begun still lacks; those of a whole one where none was begun."""
        return self._size - sum(count for _, count in self._held)
