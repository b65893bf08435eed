"""What is kept on disk: records with their evidence, notes on shapes, and how two copies merge.

Pure. ``document`` writes and reads their text, ``validity`` says which may be used, ``store`` opens files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from sglang_moe_autotune.breath import no_breath
from sglang_moe_autotune.shapes import ConfigPair, MoeShape

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

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


class Evidence(msgspec.Struct, frozen=True, gc=False):
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
    """largest |out - baseline_out| / (|baseline_out| + rms of its row) over the comparisons made, 0 only where all bits
    were the same; None for baseline"""
    tolerance: float | None = None
    looks: int = 0
    """searches that this M had: after less than three a restarted server goes on with the next; 0: not said"""
    firm: bool = False
    """was it found, after all searches of the shape, that winners of other M do not do as well here?"""
    runs: int = 0
    """launches of each GEMM whose output was compared, all ranks of the server together; 0: not said, or baseline"""

    def without_gain(self) -> Evidence:
        """The same measurements, for a record of SGLang's own answer."""
        changes = {"chosen_us": self.baseline_us, "gain": 0.0, "gain_low": 0.0, "gain_high": 0.0}
        return msgspec.structs.replace(self, **changes, max_error=None, tolerance=None, runs=0)


class Record(msgspec.Struct, frozen=True, gc=False):
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
    generation: int = 0
    """user decisions (pin, forget, demote) on this (shape, M) that the record comes after; a later one wins"""
    revision: int = 0
    """earlier records of its own kind that a later measurement did not confirm; see ``succeeding``"""

    @property
    def sure_gain(self) -> float:
        """What it surely brings, as a fraction: the lower bound of its gain, nothing for SGLang's own answer."""
        return self.evidence.gain_low if self.verdict == "faster" else 0.0


class ShapeNote(msgspec.Struct, frozen=True):
    """What was seen of a shape: SGLang's own answers by M, and how often each M was served."""

    shape: MoeShape
    baselines: dict[int, ConfigPair] = {}
    served: dict[int, int] = {}
    origin: Origin = "miss"
    unfit: dict[int, ConfigPair] = {}
    """SGLang's own answers that this GPU cannot launch; ``baselines`` has them as they were made to fit"""


class Forgotten(msgspec.Struct, frozen=True):
    """Records of one (shape, M) below this generation are gone, wherever a copy of one turns up again."""

    shape: MoeShape
    M: int
    generation: int


Kind = Literal["record", "shape", "forgotten", "unread"]


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
    forgotten: dict[Key, int] = {}
    """records of a key below this generation are gone"""
    unread: tuple[Unread, ...] = ()
    record_text: dict[Key, bytes] = {}
    note_text: dict[MoeShape, dict[str, bytes]] = {}
    document_text: dict[str, bytes] = {}
    environment_text: bytes | None = None


def with_changes(contents: Contents, record: Record | None = None, note: ShapeNote | None = None) -> Contents:
    """The contents with one more record or note, by the rules of ``merge``.

    A record made now comes after every decision known now, so it competes with what was decided by its evidence.
    """
    news = Contents(contents.environment, notes={} if note is None else {note.shape: note})
    if record is not None:
        news = merge(news, lifted(contents, [record]))
    return merge(contents, news)


def lifted(contents: Contents, made_now: Collection[Record]) -> Contents:
    """Only these records, raised to the generation that the contents know."""
    records = {}
    for record in made_now:
        key = (record.shape, record.M)
        known = generation(contents, key)
        records[key] = record if record.generation >= known else msgspec.structs.replace(record, generation=known)
    return Contents(contents.environment, records)


def succeeding(made: Record, earlier: Record | None) -> Record:
    """A record made by one who knew the earlier one of its (shape, M), so that it replaces that one in every copy: it
    counts up the revision, but where it wins by its gain and samples against the same answer of SGLang's anyhow."""
    if earlier is None or earlier.source != made.source:
        return made
    ours, theirs = ((record.sure_gain, record.evidence.samples) for record in (made, earlier))
    confirms = made.baseline == earlier.baseline and ours > theirs
    revision = max(made.revision, earlier.revision + (not confirms))
    return msgspec.structs.replace(made, revision=revision)


def generation(contents: Contents, key: Key) -> int:
    """How many user decisions on this (shape, M) are known."""
    record = contents.records.get(key)
    return max(contents.forgotten.get(key, 0), 0 if record is None else record.generation)


def forget(contents: Contents, shape: MoeShape, M: int) -> Contents:  # noqa: N803
    """Without the record of this (shape, M), whatever its source: no older copy brings it back, a new search may."""
    key = (shape, M)
    floor = generation(contents, key) + 1
    return merge(contents, Contents(contents.environment, forgotten={key: floor}))


def demote(contents: Contents, record: Record, evidence: Evidence) -> Contents:
    """Take back a record that did not hold when it was measured again, here and in every older copy.

    Its M is settled with SGLang's own answer, for the reason in ``evidence``. Unchanged where the contents
    hold another pair for that M by now, or one that a user pinned.
    """
    key = (record.shape, record.M)
    held = contents.records.get(key)
    if held is None or held.source == "pinned" or (held.pair, held.baseline) != (record.pair, record.baseline):
        return contents
    changes = {"verdict": "baseline", "pair": held.baseline, "evidence": evidence, "source": "learned"}
    demoted = msgspec.structs.replace(held, **changes, generation=generation(contents, key) + 1)
    return with_changes(contents, demoted)


def pin(contents: Contents, shape: MoeShape, M: int, pair: ConfigPair, unix_s: float = 0.0) -> Contents:  # noqa: N803
    """Serve this pair by the user's word, until it is forgotten or another one is pinned."""
    key = (shape, M)
    held, note = contents.records.get(key), contents.notes.get(shape)
    known = {} if note is None else note.baselines
    baseline = known.get(M, pair) if held is None else held.baseline
    evidence = held.evidence if held is not None and held.pair == pair else _NO_EVIDENCE
    pinned = Record(shape, M, "faster", pair, baseline, evidence, "pinned", unix_s=unix_s)
    return with_changes(contents, msgspec.structs.replace(pinned, generation=generation(contents, key) + 1))


_NO_EVIDENCE = Evidence(0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0.0)


def merge(a: Contents, b: Contents, breathe: Callable[[], None] = no_breath) -> Contents:
    """Both in one: nothing is lost, and order, grouping and repetition of merges do not matter.

    Of two records for one (shape, M): the later generation, then the better source (pinned, learned, imported,
    replayed), then the later revision, then the larger ``sure_gain``, then more samples, then the larger text. Samples
    do not rank gains: a sequential test takes most of them where there is least to find. What was forgotten stays so.
    Baselines unite (the larger text where they differ), ``served`` takes the maximum. Raises ValueError for two
    environments.
    """
    if a.environment != b.environment:
        both = f"{a.environment} and {b.environment}"
        raise ValueError(f"records of two environments must not mix; keep one file for each of {both}")
    merged = Contents(
        a.environment,
        dict(a.records),
        dict(a.notes),
        dict(a.forgotten),
        tuple(sorted({u.raw: u for u in sorted((*a.unread, *b.unread))}.values())),
        dict(a.record_text),
        dict(a.note_text),
        _larger(a.document_text, b.document_text),
        max(a.environment_text or b"", b.environment_text or b"") or None,
    )
    for key, floor in b.forgotten.items():
        breathe()
        add_forgotten(merged, key, floor)
    for key, record in b.records.items():
        breathe()
        add_record(merged, record, b.record_text.get(key))
    for shape, note in b.notes.items():
        breathe()
        add_note(merged, note, b.note_text.get(shape, {}))
    return merged


def beyond(contents: Contents, known: Contents, breathe: Callable[[], None] = no_breath) -> Contents | None:
    """What the contents hold that ``known``, from which they grew by merges, does not; None for nothing."""
    texts = contents.record_text
    records = {}
    for key, record in contents.records.items():
        breathe()
        if record is not (old := known.records.get(key)) and (
            record != old or texts.get(key) != known.record_text.get(key)
        ):
            records[key] = record
    notes = {shape: note for shape, note in contents.notes.items() if note != known.notes.get(shape)}
    grown = (shape for shape, text in contents.note_text.items() if text != known.note_text.get(shape))
    notes.update({shape: contents.notes[shape] for shape in grown})
    news = Contents(
        contents.environment,
        records,
        notes,
        {key: floor for key, floor in contents.forgotten.items() if floor != known.forgotten.get(key)},
        tuple(u for u in contents.unread if u not in known.unread),
        {key: texts[key] for key in records if key in texts},
        {shape: contents.note_text[shape] for shape in notes if shape in contents.note_text},
        contents.document_text if contents.document_text != known.document_text else {},
        contents.environment_text,
    )
    return news if news != Contents(contents.environment, environment_text=known.environment_text) else None


def add_record(contents: Contents, record: Record, text: bytes | None) -> None:
    """Add to contents that nobody else has seen yet."""
    key = (record.shape, record.M)
    old = contents.records.get(key)
    if record.generation < contents.forgotten.get(key, 0):
        return
    if old is record and text == contents.record_text.get(key):
        return
    if old is None or _rank(old, contents.record_text.get(key)) < _rank(record, text):
        contents.records[key] = record
        contents.record_text.pop(key, None)
        if text is not None:
            contents.record_text[key] = text


def add_forgotten(contents: Contents, key: Key, floor: int) -> None:
    """Add to contents that nobody else has seen yet."""
    contents.forgotten[key] = floor = max(floor, contents.forgotten.get(key, 0))
    if (old := contents.records.get(key)) is not None and old.generation < floor:
        del contents.records[key]
        contents.record_text.pop(key, None)


def add_note(contents: Contents, note: ShapeNote, extra: dict[str, bytes]) -> None:
    """Add to contents that nobody else has seen yet."""
    old = contents.notes.get(note.shape)
    if old is not note:
        contents.notes[note.shape] = note if old is None else _merge_notes(old, note)
    if extra:
        contents.note_text[note.shape] = _larger(contents.note_text.get(note.shape, {}), extra)


_SOURCES: tuple[Source, ...] = ("replayed", "imported", "learned", "pinned")
"""A replayed record was never measured on this device, and an imported one says of itself how good it is."""


def _rank(record: Record, text: bytes | None) -> tuple[int, int, int, float, int, bytes]:
    content = msgspec.json.encode(record) if text is None else text
    decided = record.generation, _SOURCES.index(record.source), record.revision
    return *decided, record.sure_gain, record.evidence.samples, content


_ORIGINS: tuple[Origin, ...] = ("miss", "fallback", "exact")


def _merge_notes(a: ShapeNote, b: ShapeNote) -> ShapeNote:
    baselines, unfit = dict(a.baselines), dict(a.unfit)
    for merged, more in ((baselines, b.baselines), (unfit, b.unfit)):
        for m, pair in more.items():
            if (held := merged.setdefault(m, pair)) != pair:
                merged[m] = max(held, pair, key=msgspec.json.encode)
    served = dict(a.served)
    for m, count in b.served.items():
        served[m] = max(served.get(m, 0), count)
    return ShapeNote(a.shape, baselines, served, max(a.origin, b.origin, key=_ORIGINS.index), unfit)


def _larger(a: dict[str, bytes], b: dict[str, bytes]) -> dict[str, bytes]:
    return {key: max(a.get(key, b""), b.get(key, b"")) for key in {**a, **b}} if b else a
