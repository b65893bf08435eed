"""Consolidation: few distinct winners serve all M of a shape. Which one is given up next, and for what. Pure.

Each winner is a binary that every start loads and the disk cache keeps. Where a shape has more than it should, the one
that the fewest M use makes way: each of its M is asked once, after all searches, whether a pair of other winners does
as well there. Such a pair may be slower than the one it replaces by a stated tolerance and no more, and together with
what is known of that one it must still be faster than SGLang's own answer, as any row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_moe_autotune.agenda import Entry
    from sglang_moe_autotune.experience import Experience
    from sglang_moe_autotune.records import Evidence
    from sglang_moe_autotune.shapes import KernelConfig

MOST_WINNERS: Final = 12
"""configs of a shape with which all its M are served, as far as that costs little"""
TOLERANCE: Final = 0.003
"""what an M may lose, as a fraction of its pair's time"""
MOST_LOST: Final = 0.02
"""what it may lose at most, by the error rate of the test: few samples bound a loss no better"""


class Bar(NamedTuple):
    """What a paired test against the present pair must show. Gains are fractions, losses below zero."""

    min_gain: float
    floor: float
    """the lower bound of the gain must be above it"""


def given_up(experience: Experience, entries: Iterable[Entry]) -> KernelConfig | None:
    """The winner to do without: of those whose M may all be asked, the one that the fewest use. None where there are few
    enough. entries: of this shape."""
    users: dict[KernelConfig, set[int]] = {}
    for M, pair in experience.chosen.items():  # noqa: N806
        for config in (pair.up, pair.down):
            users.setdefault(config, set()).add(M)
    if len(users) <= MOST_WINNERS:
        return None
    free = {entry.M for entry in entries if may_be_asked(entry)}
    candidates = [config for config, ms in users.items() if ms <= free]
    return min(candidates, key=lambda config: (len(users[config]), min(users[config]), str(config)), default=None)


def may_be_asked(entry: Entry) -> bool:
    """Has it a row of its own that is faster, and was it not asked before?"""
    if entry.consolidated or (record := entry.record) is None or record.verdict != "faster":
        return False
    return record.source != "pinned" and max(record.evidence.gain, record.evidence.gain_low) < 1


def bar(before: Evidence, min_gain: float) -> Bar:
    """before: of the pair that would be replaced, against SGLang's own. The gains of both tests multiply, and what comes
    out must be ``min_gain`` at least, with a lower bound above zero."""
    needed = 1 - (1 - min_gain) / (1 - before.gain)
    bounded = 1 - 1 / (1 - before.gain_low)
    return Bar(max(-TOLERANCE, needed), max(-MOST_LOST, bounded))
