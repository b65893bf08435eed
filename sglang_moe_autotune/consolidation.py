"""Consolidation: few distinct winners serve all M of a shape. Which one is given up next, and for what. Pure.

Each winner is a binary that every start loads and the disk cache keeps. Where a shape has more than it should, one that
few M use makes way: after all searches each of its M is asked whether a pair of other winners does as well there. Such
a pair may be slower than the one it replaces by a stated tolerance and no more, and together with what is known of that
one it must still be faster than SGLang's own answer, as any row. An M that refuses is not asked again: so it ends.
"""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

from sglang_moe_autotune.experience import Trial
from sglang_moe_autotune.lags import SHARE, least_by_tile
from sglang_moe_autotune.shapes import GEMMS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from sglang_moe_autotune.agenda import Entry
    from sglang_moe_autotune.experience import Experience
    from sglang_moe_autotune.records import Evidence
    from sglang_moe_autotune.shapes import KernelConfig

TOLERANCE: Final = 0.01
"""what an M may lose, as a fraction of its pair's time: the least gain for which a row is made"""
MOST_LOST: Final = 0.02
"""what it may lose at most, by the error rate of the test: few samples bound a loss no better"""


class Bar(NamedTuple):
    """What a paired test against the present pair must show. Gains are fractions, losses below zero."""

    min_gain: float
    floor: float = 0.0
    """the lower bound of the gain must be above it"""


class Turn(NamedTuple):
    """Who is asked next."""

    M: int
    given_up: KernelConfig
    """the one of its configs that it shall do without"""


def weigh(entry: Entry, experience: Experience, most: int) -> None:
    """Note what this M would lose without either of its configs, for ``next_turn``: 0.1 ms, so that the
    M are weighed one after the other. most: winners that a shape may have."""
    winners = experience.winners()
    if len(winners) > most and may_be_asked(entry):
        pair = experience.chosen[entry.M]
        experience.losses[entry.M] = {c: loss(experience, entry.M, winners - {c}) for c in (pair.up, pair.down)}


def next_turn(experience: Experience, entries: Iterable[Entry], most: int) -> Turn | None:
    """Of the winners that could be missed at all M that use them, the one that the fewest use; and of those M the one
    that would lose most, so that a refusal comes before anything was moved in vain. entries: of this shape, that may be
    begun. None where there are no more winners than ``most``, or none can be missed."""
    users: dict[KernelConfig, dict[int, float]] = {}
    free = {entry.M for entry in entries if may_be_asked(entry)}
    for M, pair in experience.chosen.items():  # noqa: N806
        losses = experience.losses.get(M, {}) if M in free else {}
        for config in (pair.up, pair.down):
            users.setdefault(config, {})[M] = losses.get(config, math.inf)
    if len(users) <= most:
        return None
    missed = [config for config, losses in users.items() if max(losses.values()) <= TOLERANCE]
    if not missed:
        return None
    config = min(missed, key=lambda c: (len(users[c]), min(users[c]), str(c)))
    its_m = users[config]
    return Turn(max(its_m, key=its_m.__getitem__), config)


def may_be_asked(entry: Entry) -> bool:
    """Has it a row of its own that is faster, and has it refused nothing yet?"""
    if entry.firm or (record := entry.record) is None or record.verdict != "faster":
        return False
    return record.source != "pinned" and max(record.evidence.gain, record.evidence.gain_low) < 1


def loss(experience: Experience, M: int, configs: Collection[KernelConfig]) -> float:  # noqa: N803
    """By how much an M's best pair of these seems slower than the pair it has, as a fraction; 0 where nothing is known,
    infinite where nothing else was found fit for it."""
    rows, present = experience.measured.get(M), experience.chosen[M]
    if not rows:
        return 0.0
    reference, times = experience.reference[M], experience.reference_us[M]
    whole_us = {gemm: median(us) for gemm, us in times.items() if us} if all(times.values()) else dict(SHARE)
    costs = {
        trial: whole_us[trial.gemm] * math.exp(row.centre)
        for gemm in GEMMS
        for config in (*configs, present.of(gemm))
        if (row := rows.get(trial := Trial(gemm, config))) and row.logs
    } | {Trial(gemm, reference.of(gemm)): whole_us[gemm] for gemm in GEMMS}
    now = [costs.get(Trial(gemm, present.of(gemm)), math.nan) for gemm in GEMMS]
    allowed = least_by_tile({trial: cost for trial, cost in costs.items() if trial.config in configs})
    best = min((sum(tile.values()) for tile in allowed.values()), default=math.inf)
    return 0.0 if math.isnan(sum(now)) else best / sum(now) - 1


def bar(before: Evidence, min_gain: float) -> Bar:
    """before: of the pair that would be replaced, against SGLang's own. The gains of both tests multiply, and what is
    left must be ``min_gain`` at least, with a lower bound above zero."""
    needed = 1 - (1 - min_gain) / (1 - before.gain)
    bounded = 1 - 1 / (1 - before.gain_low)
    return Bar(max(-TOLERANCE, needed), max(-MOST_LOST, bounded))
