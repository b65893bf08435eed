"""What a store holds, put for people: a summary of each shape, the rows of one, a shape found by its name.

Pure: the values come in.
"""

from __future__ import annotations

import difflib
import math
from typing import TYPE_CHECKING, Final, NamedTuple

from sglang_moe_autotune.errors import ShapeNotFoundError
from sglang_moe_autotune.records import Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sglang_moe_autotune.records import Environment, Record, ShapeNote
    from sglang_moe_autotune.shapes import ConfigPair, MoeShape


GIVEN: Final = frozenset[Source]({"pinned", "imported"})
"""Sources of records that no search here has measured."""


class ShapeSummary(NamedTuple):
    """One shape: its M by outcome, ascending, and the gains of the faster ones as fractions."""

    shape: MoeShape
    origin: str
    faster: tuple[int, ...]
    baseline: tuple[int, ...]
    untuned: tuple[int, ...]
    """served, but no search has ended there"""
    best_gain: float | None
    mean_gain: float | None
    """1 - geometric mean of chosen/baseline"""
    given: tuple[int, ...] = ()
    """pinned or imported, not measured by a search here"""
    replayed: tuple[int, ...] = ()
    """of a recording, whatever came out of it: no GPU here has measured them, and none is served"""


class Row(NamedTuple):
    """One M of a shape: what SGLang answers, the record if a search has ended, how often it was served."""

    M: int
    baseline: ConfigPair | None
    record: Record | None
    served: int


def title(environment: Environment) -> str:
    """An environment in a few words; two can share them."""
    return f"{environment.device_name}, Triton {environment.triton}"


def mean_gain(gains: Iterable[float]) -> float | None:
    """1 - geometric mean of (1 - gain); None for no gains. A gain of 1 is no time at all and is left out."""
    logs = [math.log1p(-gain) for gain in gains if gain < 1]
    return -math.expm1(math.fsum(logs) / len(logs)) if logs else None


def rows(
    shape: MoeShape, records: Mapping[tuple[MoeShape, int], Record], note: ShapeNote | None
) -> tuple[Row, ...]:
    """Every M that is known of the shape, ascending."""
    mine = {m: record for (owner, m), record in records.items() if owner == shape}
    baselines = note.baselines if note else {}
    served = note.served if note else {}
    # The baseline of a record that nobody measured is a stand-in.
    known = baselines | {m: record.baseline for m, record in mine.items() if record.source not in GIVEN}
    return tuple(Row(m, known.get(m), mine.get(m), served.get(m, 0)) for m in sorted({*mine, *known, *served}))


def summarise(
    records: Mapping[tuple[MoeShape, int], Record], notes: Mapping[MoeShape, ShapeNote]
) -> tuple[ShapeSummary, ...]:
    """A summary of each shape that has a record or a note, by name."""
    # Grouped first: a store of 50 shapes with 200 M each would be walked 50 times otherwise.
    by_shape: dict[MoeShape, dict[tuple[MoeShape, int], Record]] = {shape: {} for shape in notes}
    for key, record in records.items():
        by_shape.setdefault(key[0], {})[key] = record
    summaries = []
    for shape, mine in by_shape.items():
        note = notes.get(shape)
        known = rows(shape, mine, note)
        measured = [r.record for r in known if r.record and r.record.source not in {*GIVEN, "replayed"}]
        faster = [record for record in measured if record.verdict == "faster"]
        gains = [record.evidence.gain for record in faster]
        summaries.append(
            ShapeSummary(
                shape,
                note.origin if note else "miss",
                tuple(record.M for record in faster),
                tuple(record.M for record in measured if record.verdict == "baseline"),
                tuple(r.M for r in known if r.record is None and r.served),
                max(gains, default=None),
                mean_gain(gains),
                tuple(r.M for r in known if r.record and r.record.source in GIVEN),
                tuple(r.M for r in known if r.record and r.record.source == "replayed"),
            )
        )
    return tuple(sorted(summaries, key=lambda s: (s.shape.E, s.shape.N, s.shape.K, repr(s.shape))))


def find(name: str, shapes: Iterable[MoeShape]) -> tuple[MoeShape, ...]:
    """The shapes of that name, or of the one name that begins so (exotic shapes can share a name).

    Raises ShapeNotFoundError, with the names that are near.
    """
    by_slug: dict[str, list[MoeShape]] = {}
    for shape in shapes:
        by_slug.setdefault(shape.slug, []).append(shape)
    folded = name.casefold()
    begins = [slug for slug in by_slug if slug.casefold().startswith(folded)]
    exact = [slug for slug in begins if slug.casefold() == folded]
    chosen = exact or begins
    if len(chosen) == 1:
        return tuple(sorted(by_slug[chosen[0]], key=repr))
    if chosen:
        listed = ", ".join(sorted(chosen)[:8])
        raise ShapeNotFoundError(f"{name!r} begins {len(chosen)} stored names: write more of {listed}")
    if not by_slug:
        raise ShapeNotFoundError(
            f"no shape is stored, so none is {name!r}: let a server run, check --dir, or (`tune`) give the whole name"
        )
    near = difflib.get_close_matches(name, by_slug, n=3, cutoff=0.0)
    raise ShapeNotFoundError(f"no stored shape is named {name!r}: the nearest are {', '.join(near)}")
