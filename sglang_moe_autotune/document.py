"""The text of one file of the store: a JSON document with one record a line.

    {"schema": 1, "environment": {...}, "shapes": [...], "table": {...}, "records": [...], "forgotten": [...],
     "unread": [...]}

Pure: bytes in, values out. Unknown fields pass through, a malformed entry is kept in ``unread`` with the
reason why, a malformed document is a value.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from sglang_moe_autotune import record_rows
from sglang_moe_autotune.breath import no_breath
from sglang_moe_autotune.record_rows import Table
from sglang_moe_autotune.records import (
    Contents,
    Environment,
    Forgotten,
    Kind,
    Record,
    ShapeNote,
    Unread,
    add_forgotten,
    add_note,
    add_record,
    merge,
)
from sglang_moe_autotune.validity import problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCHEMA = 1
MAX_BYTES = 64 << 20


class Unreadable(msgspec.Struct, frozen=True):
    """Why a file gives no contents. ``newer``: leave it alone. ``broken``: it can be set aside."""

    state: Literal["broken", "newer"]
    reason: str


def encode(contents: Contents, breathe: Callable[[], None] = no_breath) -> bytes:
    """The file's text: one record a line, sorted, so that equal contents give equal bytes."""
    head = {
        "schema": b"%d" % SCHEMA,
        "environment": contents.environment_text or msgspec.json.encode(contents.environment),
    }
    shapes, pairs, rows = record_rows.lines(contents, breathe)
    breathe()
    lists = {
        "shapes": sorted(_note_lines(contents, breathe)),
        "table": [],
        "records": rows,
        "forgotten": sorted(msgspec.json.encode(Forgotten(*key, floor)) for key, floor in contents.forgotten.items()),
        "unread": [_unread_line(u) for u in sorted(contents.unread)],
    }
    fields = [b"%s: %s" % (_quoted(key), text) for key, text in head.items()]
    for key, lines in lists.items():
        breathe()
        body = b'{"shapes": %s, "pairs": %s}' % (_list(shapes), _list(pairs)) if key == "table" else _list(lines)
        if lines or key != "forgotten":
            fields.append(b"%s: %s" % (_quoted(key), body))
    fields += [b"%s: %s" % (_quoted(key), text) for key, text in sorted(contents.document_text.items())]
    breathe()
    return b"{\n%s\n}\n" % b",\n".join(fields)


def _quoted(key: str) -> bytes:
    return msgspec.json.encode(key)


def _list(lines: list[bytes]) -> bytes:
    return b"[\n  %s\n]" % b",\n  ".join(lines) if lines else b"[]"


def _note_lines(contents: Contents, breathe: Callable[[], None]) -> Iterator[bytes]:
    for shape, note in contents.notes.items():
        breathe()
        extra = sorted(contents.note_text.get(shape, {}).items())
        yield msgspec.json.encode(_note_fields(note) | {key: msgspec.Raw(text) for key, text in extra})


def _note_fields(note: ShapeNote) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.structs.asdict(note)
    for name in ("baselines", "served", "unfit"):
        fields[name] = dict(sorted(fields[name].items()))
    if not note.unfit:
        del fields["unfit"]  # most notes have none
    return fields


def _unread_line(unread: Unread) -> bytes:
    return msgspec.json.encode({"kind": unread.kind, "reason": unread.reason, "raw": msgspec.Raw(unread.raw)})


class _Read(NamedTuple):
    value: Any
    text: bytes | None
    """the entry's own text where it says more than ``value`` does"""


def decode(data: bytes, breathe: Callable[[], None] = no_breath) -> Contents | Unreadable:
    """Read a file's text. A bad entry lands in ``unread`` with its reason and spoils nothing else.

    What an earlier reader could not use is tried again.
    """
    if len(data) > MAX_BYTES:
        return Unreadable("broken", f"it has {len(data)} bytes, more than the {MAX_BYTES} that are read")
    try:
        data.decode()  # msgspec.Raw does not look into strings: a bad byte would be written back
        breathe()
        top = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        breathe()
        schema = msgspec.json.decode(top.pop("schema", b"0"), type=int)
        lists = {}
        for name in _LISTS:
            breathe()
            lists[name] = msgspec.json.decode(top.pop(name, b"[]"), type=list[msgspec.Raw])
        table = msgspec.json.decode(top.pop("table", b"{}"), type=dict[str, list[msgspec.Raw]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return Unreadable("broken", str(error))
    if schema > SCHEMA:
        reason = f"it has schema {schema} and this version reads {SCHEMA}: upgrade sglang-moe-autotune"
        return Unreadable("newer", reason)
    if schema < 1:
        return Unreadable("broken", "it has no field schema of at least 1")
    environment = _read(top.pop("environment", b"null"), Environment)
    if isinstance(environment, str):
        return Unreadable("broken", f"environment: {environment}")
    document_text = {key: bytes(raw) for key, raw in top.items()}
    contents = Contents(environment.value, environment_text=environment.text, document_text=document_text)
    places = Table(table.get("shapes", ()), table.get("pairs", ()), breathe)
    rest = _add_rows(contents, lists["records"], places, breathe)
    unread: list[Unread] = []
    for kind, raw in itertools.chain(rest, _entries(lists)):
        breathe()
        read = _read(raw, _TYPES[kind], breathe) if kind in _TYPES else "its kind is not known"
        if isinstance(read, str):
            unread.append(Unread(kind, _compact(raw), read))
        elif isinstance(read.value, Record):
            add_record(contents, read.value, read.text)
        elif isinstance(read.value, Forgotten):
            add_forgotten(contents, (read.value.shape, read.value.M), read.value.generation)
        else:
            add_note(contents, read.value, _unknown_in_note(read.text))
    return merge(contents, Contents(environment.value, unread=tuple(unread))) if unread else contents


_LISTS = ("shapes", "records", "forgotten", "unread")
_TYPES: dict[Kind, type[Record | ShapeNote | Forgotten]] = {
    "record": Record,
    "shape": ShapeNote,
    "forgotten": Forgotten,
}


def _add_rows(
    contents: Contents, raws: list[msgspec.Raw], table: Table, breathe: Callable[[], None]
) -> list[tuple[Kind, bytes]]:
    """Add, to empty contents, rows that are exactly as this version writes them. Returns the rest, spelt out."""
    rest: list[tuple[Kind, bytes]] = []
    for start in range(0, len(raws), _CHUNK):
        breathe()
        chunk = raws[start : start + _CHUNK]
        records = table.records(chunk)
        if records is None:
            rest += [("record", table.spelt_out(bytes(raw))) for raw in chunk]
            continue
        for record in records:
            key = (record.shape, record.M)
            if key in contents.records:
                add_record(contents, record, None)
            else:
                contents.records[key] = record
    return rest


_CHUNK = 32
"""rows read at once: some 0.2 ms, so that other threads need not wait longer"""


def _entries(lists: dict[str, list[msgspec.Raw]]) -> Iterator[tuple[Kind, bytes]]:
    yield from (("shape", bytes(raw)) for raw in lists["shapes"])
    yield from (("forgotten", bytes(raw)) for raw in lists["forgotten"])
    for raw in lists["unread"]:
        try:
            fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            yield msgspec.json.decode(fields["kind"], type=Kind), bytes(fields["raw"])
        except (msgspec.MsgspecError, KeyError, RecursionError):
            yield "unread", bytes(raw)


def _unknown_in_note(text: bytes | None) -> dict[str, bytes]:
    fields = {} if text is None else msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    return {key: bytes(raw) for key, raw in fields.items() if key not in ShapeNote.__struct_fields__}


def _read(
    raw: bytes, kind: type[Environment | Record | ShapeNote | Forgotten], breathe: Callable[[], None] = no_breath
) -> _Read | str:
    try:
        value = msgspec.json.decode(raw, type=kind)
        breathe()
        if reason := problem(value):
            return reason
        breathe()
        text = _compact(raw)
        if text == msgspec.json.encode(_note_fields(value) if isinstance(value, ShapeNote) else value):
            return _Read(value, None)
        unknown = _unknown_fields(msgspec.json.decode(raw), msgspec.to_builtins(value))
    except (msgspec.MsgspecError, RecursionError) as error:
        return str(error)
    # An unknown field in a shape or a config changes what the entry is about: served without it, a row
    # would answer for another layer.
    inner = sorted(name for name in unknown if name.partition(".")[0] in _MEANING)
    if inner and kind is not Environment:
        return f"{', '.join(inner)} is not known to this version: upgrade sglang-moe-autotune to use it"
    return _Read(value, text)


_MEANING = frozenset({"shape", "pair", "baseline", "baselines"})


def _compact(raw: bytes) -> bytes:
    try:
        return msgspec.json.format(raw, indent=-1)
    except (msgspec.MsgspecError, RecursionError):
        return bytes(raw)


def _unknown_fields(found: object, known: object, path: str = "") -> Iterator[str]:
    if isinstance(found, dict) and isinstance(known, dict):
        named = {str(key): value for key, value in known.items()}
        for key, value in found.items():
            if key in named:
                yield from _unknown_fields(value, named[key], f"{path}{key}.")
            else:
                yield f"{path}{key}"
