"""The tally: how far the M of each shape are, from what is stored and what the tuner has before it. Pure."""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING, Final, Literal, get_args

import msgspec

from sglang_moe_autotune.breath import no_breath
from sglang_moe_autotune.summary import mean_gain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from sglang_moe_autotune.records import Key, Record
    from sglang_moe_autotune.shapes import MoeShape
    from sglang_moe_autotune.snapshot import Snapshot

Progress = Literal["learned", "baseline", "queued", "deferred", "failed"]
"""Of one M. ``learned``: a faster pair is stored. ``baseline``: searched, SGLang's answer stays. ``queued``: not
searched yet. ``deferred``: cannot be tuned now. ``failed``: its bench raised too often, it is left alone."""

State = Literal["tuning", "queued", "deferred", "settled"]
"""Of a shape: one of its M is on the bench; one waits; all that wait are deferred; none waits."""

_CHUNK: Final = 100
"""records between two breaths: some 0.1 ms of own ones"""

PROGRESS: tuple[Progress, ...] = get_args(Progress)
STATES: tuple[State, ...] = get_args(State)


class ShapeTally(msgspec.Struct, frozen=True):
    """How many M of a shape are how far; gains are fractions, None where nothing was learned."""

    state: State
    learned: int = 0
    baseline: int = 0
    queued: int = 0
    deferred: int = 0
    failed: int = 0
    best_gain: float | None = None
    mean_gain: float | None = None


def tally(
    shapes: Iterable[MoeShape],
    records: Mapping[Key, Record],
    snapshot: Snapshot | None,
    breathe: Callable[[], None] = no_breath,
) -> dict[str, ShapeTally]:
    """By slug, for the shapes given and those that the tuner knows. Microseconds a shape, 0.15 us a record."""
    mine = set(shapes)
    # Hashing a whole shape for each of 10,000 records of other models would cost a request 10 ms.
    widths = {shape.w1_shape for shape in mine}
    counts: dict[str, collections.Counter[Progress]] = {shape.slug: collections.Counter() for shape in mine}
    gains: dict[str, list[float]] = {}
    left = iter(records.items())
    while some := list(itertools.islice(left, _CHUNK)):
        breathe()
        for (shape, _), record in some:
            if shape.w1_shape in widths and shape in mine:
                learned = record.verdict == "faster"
                counts[shape.slug]["learned" if learned else "baseline"] += 1
                if learned:
                    gains.setdefault(shape.slug, []).append(record.evidence.gain)
    if snapshot is not None:
        for slug, M in snapshot.queue:  # noqa: N806
            breathe()
            if (slug, M) not in snapshot.deferred:
                counts.setdefault(slug, collections.Counter())["queued"] += 1
        for progress, keys in (("deferred", snapshot.deferred), ("failed", snapshot.failed)):
            for slug, _ in keys:
                counts.setdefault(slug, collections.Counter())[progress] += 1  # type: ignore[index]
    current = snapshot.current[0] if snapshot is not None and snapshot.current is not None else None
    return {
        slug: ShapeTally(
            _state(count, on_bench=slug == current),
            **{progress: count[progress] for progress in PROGRESS},
            best_gain=max(gains.get(slug, ()), default=None),
            mean_gain=mean_gain(gains.get(slug, ())),
        )
        for slug, count in sorted(counts.items())
    }


def _state(count: Mapping[Progress, int], *, on_bench: bool) -> State:
    if on_bench:
        return "tuning"
    if count["queued"]:
        return "queued"
    return "deferred" if count["deferred"] else "settled"
