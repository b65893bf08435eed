"""What is kept on disk: records with their evidence, notes on shapes, and how two copies merge.

Pure. ``document`` writes and reads their text, ``validity`` says which may be used, ``store`` opens files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from sglang_moe_autotune.shapes import ConfigPair, MoeShape

if TYPE_CHECKING:
    from collections.abc import Callable

Verdict = Literal["faster", "baseline"]
"""``faster``: the pair was measured faster than the baseline and is served. ``baseline``: the search
ended and nothing beat what SGLang uses; nothing is served, and the M is not searched again."""

Source = Literal["learned", "imported", "pinned", "replayed"]

Origin = Literal["miss", "fallback", "exact"]
"""Where SGLang's own answer for a shape comes from: its heuristic, another Triton's file, an exact file."""


class Environment(msgspec.Struct, frozen=True):
    """Where a latency holds. Two environments that differ in a field never share records."""

    device_name: str
    capability: tuple[int, int]
    sm_count: int
    shared_memory_bytes: int
    l2_bytes: int
    triton: str
    kernel_hash: str


class Evidence(msgspec.Struct, frozen=True):
    """Why a record says what it says. Gains are 1 - chosen/baseline over up + down, as fractions."""

    baseline_us: float
    chosen_us: float
    gain: float
    gain_low: float
    gain_high: float
    samples: int
    measured: int
    """candidates measured, both GEMMs counted once"""
    gpu_s: float
    max_error: float | None = None
    """largest ||out - baseline_out|| / ||baseline_out|| over the comparisons made; None for baseline"""
    tolerance: float | None = None


class Record(msgspec.Struct, frozen=True):
    """The outcome for one (shape, M)."""

    shape: MoeShape
    M: int
    verdict: Verdict
    pair: ConfigPair
    """what is served (the baseline pair where the verdict is ``baseline``)"""
    baseline: ConfigPair
    evidence: Evidence
    source: Source = "learned"
    sglang: str = ""
    driver: str = ""
    unix_s: float = 0.0


class ShapeNote(msgspec.Struct, frozen=True):
    """What was seen of a shape: SGLang's own answers by M, and how often each M was served."""

    shape: MoeShape
    baselines: dict[int, ConfigPair] = {}
    served: dict[int, int] = {}
    origin: Origin = "miss"


Kind = Literal["record", "shape", "unread"]


class Unread(msgspec.Struct, frozen=True, order=True):
    """An entry that this version cannot use, kept in the file as it is for a version that can."""

    kind: Kind
    raw: bytes
    reason: str = ""


Key = tuple[MoeShape, int]


class Contents(msgspec.Struct, frozen=True):
    """All that one file holds. The dicts are never changed in place: a merge makes new ones.

    The ``*_text`` fields keep what a newer version wrote beyond our fields: the whole text of a record (or of
    the environment), which stands for it in the file, and the unknown fields of a note or of the document.
    """

    environment: Environment
    records: dict[Key, Record] = {}
    notes: dict[MoeShape, ShapeNote] = {}
    unread: tuple[Unread, ...] = ()
    record_text: dict[Key, bytes] = {}
    note_text: dict[MoeShape, dict[str, bytes]] = {}
    document_text: dict[str, bytes] = {}
    environment_text: bytes | None = None


def with_changes(contents: Contents, record: Record | None = None, note: ShapeNote | None = None) -> Contents:
    """The contents with one more record or note, by the rules of ``merge``."""
    one = Contents(
        contents.environment,
        {} if record is None else {(record.shape, record.M): record},
        {} if note is None else {note.shape: note},
    )
    return merge(contents, one)


def no_breath() -> None:
    """The default of ``breathe``, which a long call makes now and then so that other threads can run."""


def merge(a: Contents, b: Contents, breathe: Callable[[], None] = no_breath) -> Contents:
    """Both in one: nothing is lost, and order, grouping and repetition of merges do not matter.

    Of two records for one (shape, M): pinned by the user, then more samples, then the larger ``gain_low``,
    then the larger text. Baselines unite (the larger text where they differ), ``served`` takes the maximum.
    To take a record back, submit one with more samples. Raises ValueError for two environments.
    """
    if a.environment != b.environment:
        both = f"{a.environment} and {b.environment}"
        raise ValueError(f"records of two environments must not mix; keep one file for each of {both}")
    merged = Contents(
        a.environment,
        dict(a.records),
        dict(a.notes),
        tuple(sorted({u.raw: u for u in sorted((*a.unread, *b.unread))}.values())),
        dict(a.record_text),
        dict(a.note_text),
        _larger(a.document_text, b.document_text),
        max(a.environment_text or b"", b.environment_text or b"") or None,
    )
    for key, record in b.records.items():
        breathe()
        add_record(merged, record, b.record_text.get(key))
    for shape, note in b.notes.items():
        add_note(merged, note, b.note_text.get(shape, {}))
    return merged


def add_record(contents: Contents, record: Record, text: bytes | None) -> None:
    """Add to contents that nobody else has seen yet."""
    key = (record.shape, record.M)
    old = contents.records.get(key)
    if old is record and text == contents.record_text.get(key):
        return
    if old is None or _rank(old, contents.record_text.get(key)) < _rank(record, text):
        contents.records[key] = record
        contents.record_text.pop(key, None)
        if text is not None:
            contents.record_text[key] = text


def add_note(contents: Contents, note: ShapeNote, extra: dict[str, bytes]) -> None:
    """Add to contents that nobody else has seen yet."""
    old = contents.notes.get(note.shape)
    contents.notes[note.shape] = note if old is None else _merge_notes(old, note)
    if extra:
        contents.note_text[note.shape] = _larger(contents.note_text.get(note.shape, {}), extra)


def _rank(record: Record, text: bytes | None) -> tuple[bool, int, float, bytes]:
    evidence = record.evidence
    content = msgspec.json.encode(record) if text is None else text
    return record.source == "pinned", evidence.samples, evidence.gain_low, content


_ORIGINS: tuple[Origin, ...] = ("miss", "fallback", "exact")


def _merge_notes(a: ShapeNote, b: ShapeNote) -> ShapeNote:
    baselines = dict(a.baselines)
    for m, pair in b.baselines.items():
        baselines[m] = max(baselines.get(m, pair), pair, key=msgspec.json.encode)
    served = dict(a.served)
    for m, count in b.served.items():
        served[m] = max(served.get(m, 0), count)
    return ShapeNote(a.shape, baselines, served, max(a.origin, b.origin, key=_ORIGINS.index))


def _larger(a: dict[str, bytes], b: dict[str, bytes]) -> dict[str, bytes]:
    return {key: max(a.get(key, b""), b.get(key, b"")) for key in {**a, **b}} if b else a
