"""Looks: which M of a shape is worth another search, and how many new configs a search may compile. Pure.

Every M has a first, quick look with few configs of the prior before any has its second. Then those that came early try
what the others compiled. Then they go round by round, each with a fair share of the configs that may still be
compiled, until a look finds nothing better. In the end each M tries what others have compiled since.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from sglang_moe_autotune.experience import octaves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_moe_autotune.agenda import Entry
    from sglang_moe_autotune.experience import Experience
    from sglang_moe_autotune.search import SearchOptions

_NEW_PER_OCTAVE: Final = 1.5
"""configs that a first look may compile however many the shape has, by the distance of the nearest M"""
_MOST_FOR_DISTANCE: Final = 2.0
_LEAST_SHARE: Final = 2


def worth_another(entry: Entry, peers: Sequence[Entry], experience: Experience, options: SearchOptions) -> bool:
    """Should this M, settled here, be searched again? ``peers``: itself and the M of its shape that may run."""
    if entry.record is None or entry.looks >= options.looks:
        return False
    if len(experience.ordered) < options.compiled_per_shape:
        going_on = [e.looks for e in peers if _goes_on(e, options)]
        if going_on:  # what others compile is worth a look when they are done
            return _goes_on(entry, options) and entry.looks == min(going_on)
    return bool(experience.promising(entry.M))


def allowance(
    entry: Entry, peers: Sequence[Entry], experience: Experience, options: SearchOptions, sharing: int = 1
) -> int:
    """New configs that a search of this M may compile. sharing: processes that search the shape at the same time, each
    some of its M, and hear of what the others compiled."""
    ordered = len(experience.ordered)
    left = math.ceil(max(0, options.compiled_per_shape - ordered) / sharing)
    if entry.looks == 0:
        nearest = experience.nearest(entry.M)
        distance = _NEW_PER_OCTAVE * octaves(nearest[0], entry.M) if nearest else _MOST_FOR_DISTANCE
        answered = sum(e.looks > 0 for e in peers)
        due = math.ceil(options.first_configs * (answered + 1) / len(peers)) - ordered
        if answered + 1 < len(peers):
            left = min(left, max(0, options.first_configs - ordered))
        return min(left, max(due, round(min(_MOST_FOR_DISTANCE, distance))))
    if entry.looks == 1 or entry.barren >= options.patience:
        return 0
    waiting = sum(e.looks == entry.looks and _goes_on(e, options) for e in peers)
    return min(left, max(_LEAST_SHARE, math.ceil(left / max(1, waiting))))


def _goes_on(entry: Entry, options: SearchOptions) -> bool:
    """Is it in the round?"""
    return entry.record is not None and entry.looks < options.looks and entry.barren < options.patience
