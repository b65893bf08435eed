"""Which answer a server gives for a shape at one M, and why: every source in its order, from what is on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from sglang_moe_autotune.fitting import Limit, fit, limit_of
from sglang_moe_autotune.held import deadly
from sglang_moe_autotune.hindrance import Terms, hindrance

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from sglang_moe_autotune.config_folder import StockAnswer
    from sglang_moe_autotune.held import Held
    from sglang_moe_autotune.records import Contents, Record, ShapeNote
    from sglang_moe_autotune.shapes import ConfigPair, MoeShape
    from sglang_moe_autotune.switch import Level

Source = Literal["override", "pinned", "exact file", "learned", "fallback file", "heuristic"]
"""In the order in which they are asked."""

Standing = Literal["answers", "behind", "no", "unknown"]
"""``answers``: this is what is served. ``behind``: it has an answer, and one before it was asked first.
``no``: it has none. ``unknown``: only the server can tell."""


DETERMINISTIC = "deterministic inference"
"""What the reason of a server that stands aside for it says."""


class Step(NamedTuple):
    """One source: how it stands, why, and the pair that it has."""

    source: Source
    standing: Standing
    says: str
    pair: ConfigPair | None = None


class Files(NamedTuple):
    """What SGLang's config files say. ``readable`` is False where they are not on this machine."""

    readable: bool
    answer: StockAnswer | None = None


class Manner(NamedTuple):
    """How servers on the store run, as far as it can be told from outside."""

    mode: str = "miss"
    """as in the settings; a server of a newer version may have another one"""
    level: Level = "on"
    """of the switch"""
    bit_equal: bool = False
    deterministic: bool = False
    """a running server says that deterministic inference is on"""
    held: tuple[Held, ...] = ()
    """in quarantine, of the environment"""

    @property
    def off(self) -> str:
        """Why nothing stored is used, and nothing made to fit; "" where it is."""
        if self.mode == "off":
            return "mode off leaves it unused"
        return "switched off: `sglang-moe-autotune on` takes it up again" if self.level == "off" else ""


class _Claim(NamedTuple):
    source: Source
    says: str
    pair: ConfigPair | None = None
    unknown: bool = False


def explain(
    shape: MoeShape,
    M: int,  # noqa: N803
    contents: Contents,
    manner: Manner,
    files: Files,
) -> tuple[Step, ...]:
    """Every source in its order; at most one ``answers``. None does where SGLang's heuristic was never seen."""
    steps = [Step("override", "unknown", "override_config and deterministic inference: only the server knows them")]
    if manner.deterministic:
        steps = [Step("override", "answers", "deterministic inference is on: SGLang's fixed config, and nothing else")]
    answered = manner.deterministic
    for claim in _claims(shape, M, contents, manner, files):
        standing: Standing = "unknown" if claim.unknown else "no"
        if claim.pair is not None:
            standing = "behind" if answered else "answers"
            answered = True
        steps.append(Step(claim.source, standing, claim.says, claim.pair))
    return tuple(steps)


def answer(steps: tuple[Step, ...]) -> Step | None:
    """The step that answers."""
    return next((step for step in steps if step.standing == "answers"), None)


def kept_back(shape: MoeShape, M: int, contents: Contents, manner: Manner, files: Files) -> str:  # noqa: N803
    """Why a stored row that is faster, or was given by a user, is not served; "" where it is, or there is none."""
    record = contents.records.get((shape, M))
    if record is None or record.verdict == "baseline":
        return ""
    if manner.deterministic:
        return f"{DETERMINISTIC} is on"
    return _why_not(record, contents, manner, files, _stock(shape, M, contents, manner, files))


class _Stock(NamedTuple):
    """What SGLang answers without a row, by its source."""

    exact: _Claim
    fallback: _Claim
    heuristic: _Claim

    @property
    def pair(self) -> ConfigPair | None:
        return next((claim.pair for claim in self if claim.pair is not None), None)


def _stock(shape: MoeShape, m: int, contents: Contents, manner: Manner, files: Files) -> _Stock:
    record, note = contents.records.get((shape, m)), contents.notes.get(shape)
    seen = None if note is None else dict(note.baselines)
    if note is not None and seen is not None and manner.off:
        seen |= note.unfit
    exact, fallback = _file(files, note, seen, m, "exact"), _file(files, note, seen, m, "fallback")
    heuristic = _heuristic(files, note, seen, record, m, fits=not manner.off)
    if manner.off:
        return _Stock(exact, fallback, heuristic)
    limit = limit_of(contents.environment)
    return _Stock(_as_served(exact, shape, limit), _as_served(fallback, shape, limit), heuristic)


def _why_not(record: Record, contents: Contents, manner: Manner, files: Files, stock: _Stock) -> str:
    note, pair = contents.notes.get(record.shape), stock.pair
    origin = (files.answer and files.answer.origin) if files.readable else (note and note.origin)
    terms = Terms(
        limit_of(contents.environment),
        "learned",
        manner.bit_equal,
        lambda _: manner.mode == "all" or origin != "exact",
        lambda *_: record.baseline if pair is None else pair,  # nobody knows that it is another one
        lambda record: deadly(record, manner.held),
    )
    return manner.off or hindrance(record, terms)


def _claims(shape: MoeShape, m: int, contents: Contents, manner: Manner, files: Files) -> Iterator[_Claim]:
    record, stock = contents.records.get((shape, m)), _stock(shape, m, contents, manner, files)
    why = "" if record is None else _why_not(record, contents, manner, files, stock)
    yield _pinned(record, why)
    learned = _learned(shape, contents, record, why)
    # Mode `all` challenges SGLang's own file, and what was faster than it is asked first.
    yield from (learned, stock.exact) if manner.mode == "all" else (stock.exact, learned)
    yield stock.fallback
    yield stock.heuristic


def _pinned(record: Record | None, why: str) -> _Claim:
    if record is None or record.source != "pinned":
        return _Claim("pinned", "nobody pinned a pair here")
    if why:
        return _Claim("pinned", f"a pair is pinned, and not served: {why}")
    return _Claim("pinned", "pinned by a user: it stands until it is forgotten", record.pair)


def _file(
    files: Files,
    note: ShapeNote | None,
    seen: Mapping[int, ConfigPair] | None,
    m: int,
    origin: Literal["exact", "fallback"],
) -> _Claim:
    source: Source = "exact file" if origin == "exact" else "fallback file"
    whose = "this Triton" if origin == "exact" else "another Triton"
    if files.readable:
        found = files.answer
        if found is None or found.origin != origin:
            return _Claim(source, f"SGLang has none of {whose} for this shape and GPU")
        row = "its row" if found.key == m else f"extrapolated from M={found.key}, the nearest row"
        return _Claim(source, f"{row} in {found.path}", found.pair)
    if note is None or seen is None:
        return _Claim(source, "SGLang's files are not on this machine", unknown=True)
    if note.origin != origin:
        return _Claim(source, f"a server saw none of {whose}")
    if (pair := seen.get(m)) is not None:
        return _Claim(source, f"a server saw one of {whose}", pair)
    return _Claim(source, f"a server saw one of {whose}, and never asked it for this M", unknown=True)


def _as_served(claim: _Claim, shape: MoeShape, limit: Limit) -> _Claim:
    """A file's row as a server serves it: made to fit where this GPU cannot launch it."""
    fitted = None if claim.pair is None else fit(claim.pair, shape, limit)
    if fitted is None:
        return claim
    return claim._replace(says=f"{claim.says}, made to fit: this GPU cannot launch its {claim.pair}", pair=fitted)


def _heuristic(
    files: Files,
    note: ShapeNote | None,
    seen: Mapping[int, ConfigPair] | None,
    record: Record | None,
    m: int,
    *,
    fits: bool,
) -> _Claim:
    from_file = files.answer is not None if files.readable else note is not None and note.origin != "miss"
    if from_file:
        return _Claim("heuristic", "not asked: there is a file")
    pair = None if seen is None else seen.get(m)
    if pair is None and record is not None and record.source in {"learned", "replayed"}:
        pair = record.baseline
    if pair is None:
        return _Claim("heuristic", "SGLang computes it; no server has recorded it for this M", unknown=True)
    return _Claim("heuristic", f"as a server recorded it{_made_to_fit(note, m) if fits else ''}", pair)


def _made_to_fit(note: ShapeNote | None, m: int) -> str:
    own = None if note is None else note.unfit.get(m)
    return "" if own is None else f", made to fit: this GPU cannot launch SGLang's own {own}"


def _learned(shape: MoeShape, contents: Contents, record: Record | None, why: str) -> _Claim:
    if record is None:
        return _Claim("learned", f"no search has ended at this M{_others(shape, contents)}")
    if record.source == "pinned":
        return _Claim("learned", "the pinned pair stands in its place")
    if record.source != "learned":
        return _Claim("learned", why)
    samples = record.evidence.samples
    if record.verdict == "baseline":
        return _Claim("learned", f"the search ended: nothing beat SGLang's own answer (n={samples})")
    says = f"{100 * record.evidence.gain:.1f} % faster than {record.baseline} (n={samples})"
    return _Claim("learned", f"{says}, and not served: {why}") if why else _Claim("learned", says, record.pair)


def _others(shape: MoeShape, contents: Contents) -> str:
    known = sorted(m for (owner, m), r in contents.records.items() if owner == shape and r.verdict == "faster")
    if not known:
        return ""
    shown = ", ".join(map(str, known[:6])) + (", ..." if len(known) > 6 else "")
    return f"; a row answers for its own M only, and those are {shown}"
