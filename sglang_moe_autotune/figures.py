"""The figures of a report: what one file of the store says of each shape, ready to be drawn. Pure."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

from sglang_moe_autotune import summary

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sglang_moe_autotune.records import Contents, Record, ShapeNote
    from sglang_moe_autotune.shapes import ConfigPair, MoeShape
    from sglang_moe_autotune.tried import Tried

    Trials = Mapping[MoeShape, Mapping[int, Sequence[Tried]]]


class ShapeFigures(NamedTuple):
    """One shape: the records of searches that ended and were measured, by M, and what they add up to."""

    shape: MoeShape
    summary: summary.ShapeSummary
    measured: tuple[Record, ...]
    """learned or replayed, ascending by M"""
    given: tuple[Record, ...]
    """imported and pinned ones: they carry no measurement of their own"""
    configs: tuple[tuple[ConfigPair, tuple[int, ...]], ...]
    """distinct learned pairs with the M that each serves, the busiest first"""
    gpu_s: float
    """without that of replayed ones, which no GPU has spent"""
    candidates: int
    """trials measured, over all M"""
    tried: tuple[tuple[int, tuple[Tried, ...]], ...] = ()
    """by M, ascending, what was measured there and is still known"""
    sliced: tuple[int, ...] = ()
    """M among them, three at most, whose landscape is worth a look: the hottest, and those with the largest gains"""


class PageFigures(NamedTuple):
    """One file of the store."""

    title: str
    kernel_hash: str
    shapes: tuple[ShapeFigures, ...]
    history: tuple[tuple[float, int, float], ...]
    """(unix_s, rows that had an answer by then, GPU seconds spent by then)"""


def gather(title: str, contents: Contents, trials: Trials | None = None) -> PageFigures:
    """Everything that a report shows of one file; ``trials``: what ``trials.read`` found beside it."""
    found = summary.summarise(contents.records, contents.notes)
    shapes = tuple(_shape(one, contents, (trials or {}).get(one.shape, {})) for one in found)
    real = (r for one in shapes for r in one.measured if r.source != "replayed")
    dated = sorted((r.unix_s, r.evidence.gpu_s) for r in real if r.unix_s > 0)
    history, spent_s = [], 0.0
    for number, (unix_s, gpu_s) in enumerate(dated, 1):
        spent_s += gpu_s
        history.append((unix_s, number, spent_s))
    return PageFigures(title, contents.environment.kernel_hash, shapes, tuple(history))


def _shape(one: summary.ShapeSummary, contents: Contents, trials: Mapping[int, Sequence[Tried]]) -> ShapeFigures:
    mine = sorted((r for r in contents.records.values() if r.shape == one.shape), key=lambda r: r.M)
    measured = tuple(r for r in mine if r.source not in summary.GIVEN)
    chosen: dict[ConfigPair, list[int]] = {}
    for record in measured:
        if record.verdict == "faster":
            chosen.setdefault(record.pair, []).append(record.M)
    count = Counter({pair: len(ms) for pair, ms in chosen.items()})
    return ShapeFigures(
        one.shape,
        one,
        measured,
        tuple(r for r in mine if r.source in summary.GIVEN),
        tuple((pair, tuple(chosen[pair])) for pair, _ in count.most_common()),
        sum(r.evidence.gpu_s for r in measured if r.source != "replayed"),
        sum(r.evidence.measured for r in measured),
        tuple((m, tuple(rows)) for m, rows in sorted(trials.items()) if rows),
        _sliced([m for m, rows in trials.items() if rows], contents.notes.get(one.shape), measured),
    )


def _sliced(ms: Sequence[int], note: ShapeNote | None, measured: Sequence[Record]) -> tuple[int, ...]:
    served = {} if note is None else note.served
    gains = {r.M: r.evidence.gain for r in measured if r.verdict == "faster"}
    hottest = sorted((m for m in ms if served.get(m)), key=lambda m: (-served[m], m))
    best = sorted(ms, key=lambda m: (-gains.get(m, 0.0), m))
    turns = (m for both in zip_longest(hottest, best) for m in both if m is not None)
    return tuple(sorted(list(dict.fromkeys(turns))[:3]))
