"""Which M are served: one count a batch, turned into the M of the MoE layers when there is time.

Pure. Config lookups cannot tell: with captured graphs they happen at capture only.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sglang_moe_autotune.beat import Beat

BatchKind = Literal["decode", "prefill"]


class Heat:
    """Counts of batches by kind and tokens since they were last taken."""

    def __init__(self, beat: Beat) -> None:
        """beat: its steps count for the batch that was counted last."""
        self._beat = beat
        self._batches: dict[tuple[BatchKind, int], int] = {}
        self._last: tuple[BatchKind, int] | None = None

    def batch(self, found: tuple[BatchKind, int]) -> None:
        """Count one batch, by its kind and its tokens."""
        self._count_steps()
        self._last = found
        self._batches[found] = self._batches.get(found, 0) + 1

    def take(self, captured: Mapping[BatchKind, Sequence[int]]) -> dict[int, int]:
        """Batches by the M that the MoE layers saw: the smallest captured size that holds the batch, or its
        own tokens where it ran eagerly. ``captured``: sizes of the graphs, in tokens, ascending."""
        self._count_steps()
        if not self._batches:
            return {}
        batches, self._batches = self._batches, {}
        served: dict[int, int] = {}
        for (kind, tokens), count in batches.items():
            sizes = captured.get(kind, ())
            place = bisect.bisect_left(sizes, tokens)
            M = sizes[place] if place < len(sizes) else tokens  # noqa: N806 - the field's name for it
            served[M] = served.get(M, 0) + count
        return served

    def _count_steps(self) -> None:
        if (steps := self._beat.take()) and self._last is not None:
            self._batches[self._last] = self._batches.get(self._last, 0) + steps
