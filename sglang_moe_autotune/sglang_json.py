"""SGLang's config files: their names, their text, and the rows that say what was learned and nothing else.

SGLang answers an M with the row of the nearest key, so a table of learned rows alone would serve them at
every M. ``table`` fences each learned row in. Pure; ``export`` writes files.
"""

from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from sglang_moe_autotune.shapes import ConfigPair, KernelConfig
from sglang_moe_autotune.summary import GIVEN

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sglang_moe_autotune.records import Record, ShapeNote
    from sglang_moe_autotune.shapes import MoeShape

Rows = dict[int, KernelConfig]
"""one GEMM's config by M"""

GRID = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
"""The M that SGLang's own tuning script writes."""


def file_name(shape: MoeShape, device_name: str, *, down: bool = False) -> str:
    """The name under which SGLang looks for this shape, by its own grammar."""
    name = f"E={shape.E},N={shape.N},device_name={device_name.replace(' ', '_')}"
    if shape.dtype:
        name += f",dtype={shape.dtype}"
    if shape.block_shape is not None and all(shape.block_shape):
        name += f",block_shape=[{shape.block_shape[0]}, {shape.block_shape[1]}]"
    if shape.per_channel_quant:
        name += ",per_channel_quant=True"
    return name + ("_down.json" if down else ".json")


class FileName(NamedTuple):
    """What a config file's name says, whether SGLang or vLLM wrote it."""

    E: int
    N: int
    device_name: str
    """with underscores where the GPU's name has blanks"""
    dtype: str | None
    block_shape: tuple[int, int] | None
    per_channel_quant: bool
    down: bool


_NAME = re.compile(
    r"E=(?P<E>[1-9]\d{0,8}),N=(?P<N>[1-9]\d{0,8}),device_name=(?P<device>[^/]*?)(?:,dtype=(?P<dtype>\w+?))?"
    r"(?:,block_shape=\[(?P<n>\d{1,6}), ?(?P<k>\d{1,6})\])?(?P<channel>,per_channel_quant=True)?"
    r"(?P<down>_down)?\.json",
    re.ASCII,
)


def parse_name(name: str) -> FileName | None:
    """The name read back, None for one that is no config file's. vLLM writes no blank in the block shape."""
    if (match := _NAME.fullmatch(name)) is None:
        return None
    block = None if match["n"] is None else (int(match["n"]), int(match["k"]))
    sizes = int(match["E"]), int(match["N"])
    return FileName(
        *sizes, match["device"], match["dtype"], block, match["channel"] is not None, match["down"] is not None
    )


def folder_name(triton_version: str) -> str:
    """The folder of a Triton version below ``configs``."""
    return f"triton_{triton_version.replace('.', '_')}"


def parse(text: str) -> Rows | str:
    """One file's rows by M, or the reason why the text is no such file."""
    try:
        table = json.loads(text)
        if not isinstance(table, dict):
            return f"it holds a {type(table).__name__} where an object of rows by M belongs"
        return {int(m): KernelConfig.from_dict(_row(config, m)) for m, config in table.items()}
    except (ValueError, RecursionError) as error:
        return str(error)


def _row(config: object, m: str) -> dict[str, object]:
    if not isinstance(config, dict):
        raise ValueError(f"the row of M={m} is {config!r} where an object belongs")  # noqa: TRY004 - a bad value
    return config


def encode(rows: Mapping[int, KernelConfig]) -> str:
    """A file's text as SGLang writes it: keys in order, indented by 4."""
    return json.dumps({str(m): rows[m].to_dict() for m in sorted(rows)}, indent=4) + "\n"


def table(shape: MoeShape, records: Iterable[Record], note: ShapeNote | None) -> tuple[Rows, Rows]:
    """The rows of both GEMMs: (up, down), with equal keys and equal BLOCK_SIZE_M in each row.

    Keys are SGLang's grid, every M whose answer was seen, and every learned M. A learned M has its learned
    pair, any other what SGLang itself uses there. Where a learned key has a neighbour that is not learned,
    the M next to it is pinned to SGLang's answer, so that a learned row answers for its own M and, at most,
    for those between it and the next key if that is learned too. SGLang's heuristic changes at M > E, so its
    two sides are pinned at E and E + 1. Both tables are empty where nothing was learned, or where SGLang's
    answer was never seen at all: nothing could keep a learned row to its own M then.

    SGLang's answer for an M where it was never seen is taken from the nearest M where it was, on the same
    side of E if there is one (``unseen`` says where there is none).
    """
    mine = [r for r in records if r.shape == shape]
    learned = {r.M: r.pair for r in mine if is_learned(r)}
    seen = _seen(mine, note)
    if not learned or not seen:
        return {}, {}
    rows = {m: _baseline(seen, shape.E, m) for m in {*GRID, *seen, *learned}}
    rows.update(learned)
    for low, high in itertools.pairwise([0, *sorted(rows), max(rows) + 2]):
        pins = {low + 1} if low in learned and high not in learned else set()
        if high in learned and low not in learned:
            pins.add(high - 1)
        if low <= shape.E < high and not {low, high} <= learned.keys():
            pins |= {shape.E, shape.E + 1}
        rows.update({m: _baseline(seen, shape.E, m) for m in pins if low < m < high})
    return {m: pair.up for m, pair in rows.items()}, {m: pair.down for m, pair in rows.items()}


def unseen(shape: MoeShape, records: Iterable[Record], note: ShapeNote | None) -> str | None:
    """Where SGLang's answer was not seen and what follows, in a sentence; None where both sides of E were."""
    seen = _seen([r for r in records if r.shape == shape], note)
    sides = {m > shape.E for m in seen}
    if not sides:
        return f"{shape.slug} is left out: SGLang's own answer was never seen, so nothing can fence its rows in"
    if len(sides) == 2:
        return None
    side = f"M {'<=' if sides == {True} else '>'} {shape.E}"
    return f"{shape.slug}: SGLang's own answer for {side} was never seen, so its rows there are a guess"


def is_learned(record: Record) -> bool:
    """May the row be exported? What was merely imported was not measured, and both GEMMs share one sort."""
    one_sort = record.pair.up.BLOCK_SIZE_M == record.pair.down.BLOCK_SIZE_M
    return record.verdict == "faster" and record.source != "imported" and one_sort


def _seen(records: Iterable[Record], note: ShapeNote | None) -> dict[int, ConfigPair]:
    """SGLang's own answers by M. It forces the down GEMM to the up GEMM's BLOCK_SIZE_M, and so does this."""
    # The baseline of a row that nobody measured is a stand-in for an answer that nobody asked for.
    seen = {r.M: r.baseline for r in records if r.source not in GIVEN}
    seen |= {} if note is None else note.baselines
    return {
        m: ConfigPair(p.up, msgspec.structs.replace(p.down, BLOCK_SIZE_M=p.up.BLOCK_SIZE_M))
        for m, p in seen.items()
    }


def _baseline(seen: Mapping[int, ConfigPair], experts: int, m: int) -> ConfigPair:
    return seen[min(seen, key=lambda known: ((known > experts) != (m > experts), abs(known - m), known))]
