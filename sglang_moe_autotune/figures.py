"""The figures of a report: what one file of the store says of each shape, ready to be drawn. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from sglang_moe_autotune import summary

if TYPE_CHECKING:
    from sglang_moe_autotune.records import Contents, Record
    from sglang_moe_autotune.shapes import ConfigPair, MoeShape


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
    candidates: int
    """trials measured, over all M"""


class PageFigures(NamedTuple):
    """One file of the store."""

    title: str
    kernel_hash: str
    shapes: tuple[ShapeFigures, ...]
    history: tuple[tuple[float, int, float], ...]
    """(unix_s, rows that had an answer by then, GPU seconds spent by then)"""


def gather(title: str, contents: Contents) -> PageFigures:
    """Everything that a report shows of one file."""
    shapes = tuple(_shape(one, contents) for one in summary.summarise(contents.records, contents.notes))
    dated = sorted((r.unix_s, r.evidence.gpu_s) for one in shapes for r in one.measured if r.unix_s > 0)
    history, spent_s = [], 0.0
    for number, (unix_s, gpu_s) in enumerate(dated, 1):
        spent_s += gpu_s
        history.append((unix_s, number, spent_s))
    return PageFigures(title, contents.environment.kernel_hash, shapes, tuple(history))


def _shape(one: summary.ShapeSummary, contents: Contents) -> ShapeFigures:
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
        sum(r.evidence.gpu_s for r in measured),
        sum(r.evidence.measured for r in measured),
    )
