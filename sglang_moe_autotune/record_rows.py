"""Records as rows of a file: what many of them share, shapes and config pairs, stands once in a table.

    "table": {"shapes": [...], "pairs": [...]}, "records": [{"shape": 0, "M": 64, "pair": 3, "baseline": 1, ...}]

A row that spells out its shape or its pairs is as good. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from sglang_moe_autotune.breath import no_breath
from sglang_moe_autotune.records import Evidence, Record, Source, Verdict
from sglang_moe_autotune.shapes import ConfigPair, MoeShape
from sglang_moe_autotune.validity import figures_are_sound, pair_is_sound, shape_is_sound

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_moe_autotune.records import Contents


class Row(msgspec.Struct, frozen=True, gc=False):
    """A record, with places in the table for its shape and pairs."""

    shape: int
    M: int
    verdict: Verdict
    pair: int
    baseline: int
    evidence: Evidence
    source: Source = "learned"
    sglang: str = ""
    driver: str = ""
    unix_s: float = 0.0
    generation: int = 0
    revision: int = 0


class Lines(NamedTuple):
    """The texts of a table and of the rows that refer to it, in order."""

    shapes: list[bytes]
    pairs: list[bytes]
    rows: list[bytes]


def lines(contents: Contents, breathe: Callable[[], None] = no_breath) -> Lines:
    """Rows sorted by shape and M. A record with a text of its own is that text, and needs no table."""
    by_shape: dict[MoeShape, list[int]] = {}
    for shape, m in contents.records:
        breathe()
        by_shape.setdefault(shape, []).append(m)
    texts = {shape: msgspec.json.encode(shape) for shape in by_shape}
    order = sorted(texts, key=lambda shape: (shape.slug, texts[shape]))
    rows: list[bytes] = []
    pairs: dict[ConfigPair, int] = {}
    encode = msgspec.json.Encoder().encode
    for place, shape in enumerate(order):
        for m in sorted(by_shape[shape]):
            breathe()
            if (text := contents.record_text.get((shape, m))) is None:
                record = contents.records[shape, m]
                pair = pairs.setdefault(record.pair, len(pairs))
                baseline = pairs.setdefault(record.baseline, len(pairs))
                text = encode(Row(place, m, record.verdict, pair, baseline, *_about(record)))
            rows.append(text)
    breathe()
    return Lines([texts[shape] for shape in order], [encode(pair) for pair in pairs], rows)


class Table:
    """The table of a file that is read. Entries that this version would not write so are kept as text only."""

    def __init__(
        self,
        shapes: Sequence[msgspec.Raw] = (),
        pairs: Sequence[msgspec.Raw] = (),
        breathe: Callable[[], None] = no_breath,
    ) -> None:
        self._texts = {"shape": shapes, "pair": pairs, "baseline": pairs}
        known = _known(pairs, ConfigPair, breathe)
        self._shapes = {place: s for place, s in _known(shapes, MoeShape, breathe).items() if shape_is_sound(s)}
        self._served: dict[int, ConfigPair] = {}
        self._baselines: dict[int, ConfigPair] = {}
        for place, pair in known.items():
            breathe()
            if pair_is_sound(pair, served=True):
                self._served[place] = pair
            if pair_is_sound(pair, served=False):
                self._baselines[place] = pair

    def records(self, raws: Sequence[bytes | msgspec.Raw]) -> list[Record] | None:
        """These rows, where all are sound, and exactly what this version writes: nothing unknown is in them."""
        text = b"[%s]" % b",".join(raws)
        shapes, served, baselines = self._shapes, self._served, self._baselines
        found = []
        try:
            rows = _ROWS.decode(text)
            for row in rows:
                shape, pair, baseline = shapes[row.shape], served[row.pair], baselines[row.baseline]
                found.append(Record(shape, row.M, row.verdict, pair, baseline, *_about(row)))
            as_written = msgspec.json.encode(rows) == text
        except (msgspec.MsgspecError, RecursionError, KeyError):
            return None
        return found if as_written and all(map(figures_are_sound, found)) else None

    def spelt_out(self, raw: bytes) -> bytes:
        """A row's text without places; a place that is not in the table stays, for the reader to refuse."""
        try:
            fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, RecursionError):
            return raw
        changed = False
        for name, texts in self._texts.items():
            place = bytes(fields.get(name, b""))
            if place.isdigit() and len(place) < 10 and int(place) < len(texts):
                fields[name] = texts[int(place)]
                changed = True
        return msgspec.json.encode(fields) if changed else raw


def _about(row: Row | Record) -> tuple[Evidence, Source, str, str, float, int, int]:
    """The fields that both have, in their order."""
    return row.evidence, row.source, row.sglang, row.driver, row.unix_s, row.generation, row.revision


_ROWS = msgspec.json.Decoder(list[Row])
_T = TypeVar("_T")


def _known(texts: Sequence[msgspec.Raw], kind: type[_T], breathe: Callable[[], None]) -> dict[int, _T]:
    found = {}
    for place, text in enumerate(texts):
        breathe()
        try:
            value = msgspec.json.decode(text, type=kind)
        except (msgspec.MsgspecError, RecursionError):
            continue
        if msgspec.json.encode(value) == bytes(text):
            found[place] = value
    return found
