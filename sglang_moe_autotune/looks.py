"""Looks: which M of a shape is worth another search, and how many new configs a search may compile. Pure.

Every M has a first, quick look with few configs of the prior before any has its second. Then those that came early try
what the others compiled. Then they go round by round, each with a fair share of the configs that may still be
compiled, until a look finds nothing better. In the end each M tries what others have compiled since. When no M is worth
another search, winners that few M use may be given up: see ``consolidation``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from sglang_moe_autotune import consolidation
from sglang_moe_autotune.consolidation import Bar
from sglang_moe_autotune.experience import octaves

if TYPE_CHECKING:
    from sglang_moe_autotune.agenda import Agenda, Entry
    from sglang_moe_autotune.experience import Experience
    from sglang_moe_autotune.search import SearchOptions
    from sglang_moe_autotune.shapes import ConfigPair, KernelConfig

_NEW_PER_OCTAVE: Final = 1.5
"""configs that a first look may compile however many the shape has, by the distance of the nearest M"""
_MOST_FOR_DISTANCE: Final = 2.0
_LEAST_SHARE: Final = 2


class Look(NamedTuple):
    """What a search of an M is to be."""

    baseline: ConfigPair
    """what it measures against: SGLang's own answer, later what the M is served with"""
    bar: Bar
    final_s: float
    """what the launches of a final stage may take"""
    allowance: int = 0
    """new configs that it may compile"""
    only: frozenset[KernelConfig] | None = None
    """the winners to choose from, where it is asked to do with those of other M"""


def plan(
    entry: Entry, agenda: Agenda, experience: Experience, options: SearchOptions, min_gain: float
) -> Look | None:
    """The next look of this M; None where it needs none. min_gain: of a row, against SGLang's own answer."""
    sharers = agenda.sharers(entry)
    final_s = min(options.final_s, options.finals_s / len(sharers))
    if entry.state == "settled" and entry.record is not None and not worth_another(entry, agenda, experience, options):
        if (given_up := to_give_up(entry, agenda, experience, options)) is None:
            return None
        bar = consolidation.bar(entry.record.evidence, min_gain)
        return Look(experience.chosen[entry.M], bar, final_s, only=experience.winners() - {given_up})
    present = experience.chosen[entry.M] if entry.state == "settled" else entry.baseline
    new = allowance(entry, agenda, experience, options)
    return Look(present, Bar(min_gain if present == entry.baseline else min_gain / 2), final_s, new)


def to_give_up(
    entry: Entry, agenda: Agenda, experience: Experience, options: SearchOptions
) -> KernelConfig | None:
    """The winner that this M shall be asked to do without now. None where several processes share the searches: all of
    them decide each row there, as faster than the one before."""
    if agenda.sharing > 1 or not consolidation.may_be_asked(entry):
        return None
    turn = consolidation.next_turn(experience, agenda.of(entry.shape), options.most_winners)
    return turn.given_up if turn is not None and entry.M == turn.M else None


def worth_another(entry: Entry, agenda: Agenda, experience: Experience, options: SearchOptions) -> bool:
    """Should this M, settled here, be searched again?"""
    if entry.record is None or entry.finished or entry.looks >= options.looks:
        return False
    if left(entry, agenda, experience, options):
        peers = [e for e in agenda.peers(entry) if e is entry or agenda.admits(e)]
        going_on = [e.looks for e in peers if _goes_on(e, options)]
        if going_on:  # what others compile is worth a look when they are done
            return _goes_on(entry, options) and entry.looks == min(going_on)
    return bool(experience.promising(entry.M))


def left(entry: Entry, agenda: Agenda, experience: Experience, options: SearchOptions) -> int:
    """New configs that this M and those that it waits for may compile. An M that waits for deeper idle has its share
    kept for it: launches of many tokens gain most."""
    sharers = agenda.sharers(entry)
    later = sum(e.record is None or _goes_on(e, options) for e in sharers if agenda.is_later(e, entry))
    kept = later * options.compiled_per_shape // len(sharers)
    return max(0, options.compiled_per_shape - len(experience.ordered) - kept)


def allowance(entry: Entry, agenda: Agenda, experience: Experience, options: SearchOptions) -> int:
    """New configs that a search of this M may compile. Where several processes search the shape at the same time, each
    some of its M, they hear of what the others compiled."""
    sharers, ordered = agenda.sharers(entry), len(experience.ordered)
    most = math.ceil(left(entry, agenda, experience, options) / agenda.sharing)
    if entry.looks == 0:
        nearest = experience.nearest(entry.M)
        distance = _NEW_PER_OCTAVE * octaves(nearest[0], entry.M) if nearest else _MOST_FOR_DISTANCE
        answered = sum(e.looks > 0 for e in sharers)
        due = math.ceil(options.first_configs * (answered + 1) / len(sharers)) - ordered
        if answered + 1 < len(sharers):
            most = min(most, max(0, options.first_configs - ordered))
        return min(most, max(due, round(min(_MOST_FOR_DISTANCE, distance))))
    if entry.looks == 1 or entry.barren >= options.patience:
        return 0
    mine = (e for e in agenda.peers(entry) if e.key not in agenda.elsewhere)
    waiting = sum(e.looks <= entry.looks and (e.record is None or _goes_on(e, options)) for e in mine)
    return min(most, max(_LEAST_SHARE, math.ceil(most / max(1, waiting))))


def _goes_on(entry: Entry, options: SearchOptions) -> bool:
    """Is it in the round?"""
    return entry.record is not None and entry.looks < options.looks and entry.barren < options.patience
