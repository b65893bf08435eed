"""Which answer a server gives for a shape at one M, and why: every source in its order, from what is on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from sglang_moe_autotune.fitting import Limit, fit, limit_of
from sglang_moe_autotune.search_space import illegal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_moe_autotune.config_folder import StockAnswer
    from sglang_moe_autotune.records import Contents, Record, ShapeNote
    from sglang_moe_autotune.shapes import ConfigPair, MoeShape

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


class _Claim(NamedTuple):
    source: Source
    says: str
    pair: ConfigPair | None = None
    unknown: bool = False


def explain(
    shape: MoeShape,
    M: int,  # noqa: N803
    contents: Contents,
    mode: str,
    files: Files,
    *,
    deterministic: bool = False,
) -> tuple[Step, ...]:
    """Every source in its order; at most one ``answers``. None does where SGLang's heuristic was never seen.

    mode: as in the settings; a server of a newer version may have another one. deterministic: a running server
    says that deterministic inference is on.
    """
    record, note = contents.records.get((shape, M)), contents.notes.get(shape)
    steps = [Step("override", "unknown", "override_config and deterministic inference: only the server knows them")]
    if deterministic:
        steps = [Step("override", "answers", "deterministic inference is on: SGLang's fixed config, and nothing else")]
    answered = deterministic
    for claim in _claims(shape, M, contents, mode, files, record, note):
        standing: Standing = "unknown" if claim.unknown else "no"
        if claim.pair is not None:
            standing = "behind" if answered else "answers"
            answered = True
        steps.append(Step(claim.source, standing, claim.says, claim.pair))
    return tuple(steps)


def answer(steps: tuple[Step, ...]) -> Step | None:
    """The step that answers."""
    return next((step for step in steps if step.standing == "answers"), None)


def _claims(
    shape: MoeShape,
    m: int,
    contents: Contents,
    mode: str,
    files: Files,
    record: Record | None,
    note: ShapeNote | None,
) -> Iterator[_Claim]:
    yield _pinned(record, mode)
    exact, fallback = _file(files, note, m, "exact"), _file(files, note, m, "fallback")
    heuristic = _heuristic(files, note, record, m)
    limit = limit_of(contents.environment)
    exact, fallback = (_as_served(claim, shape, limit) for claim in (exact, fallback))
    stock = next((claim.pair for claim in (exact, fallback, heuristic) if claim.pair is not None), None)
    learned = _learned(shape, contents, record, stock, mode)
    # Mode `all` challenges SGLang's own file, and what was faster than it is asked first.
    yield from (learned, exact) if mode == "all" else (exact, learned)
    yield fallback
    yield heuristic


def _pinned(record: Record | None, mode: str) -> _Claim:
    if record is None or record.source != "pinned":
        return _Claim("pinned", "nobody pinned a pair here")
    if mode == "off":
        return _Claim("pinned", "a pair is pinned, and mode off leaves it unused")
    return _Claim("pinned", "pinned by a user: it stands until it is forgotten", record.pair)


def _file(files: Files, note: ShapeNote | None, m: int, origin: Literal["exact", "fallback"]) -> _Claim:
    source: Source = "exact file" if origin == "exact" else "fallback file"
    whose = "this Triton" if origin == "exact" else "another Triton"
    if files.readable:
        found = files.answer
        if found is None or found.origin != origin:
            return _Claim(source, f"SGLang has none of {whose} for this shape and GPU")
        row = "its row" if found.key == m else f"extrapolated from M={found.key}, the nearest row"
        return _Claim(source, f"{row} in {found.path}", found.pair)
    if note is None:
        return _Claim(source, "SGLang's files are not on this machine", unknown=True)
    if note.origin != origin:
        return _Claim(source, f"a server saw none of {whose}")
    if (pair := note.baselines.get(m)) is not None:
        return _Claim(source, f"a server saw one of {whose}", pair)
    return _Claim(source, f"a server saw one of {whose}, and never asked it for this M", unknown=True)


def _as_served(claim: _Claim, shape: MoeShape, limit: Limit) -> _Claim:
    """A file's row as a server serves it: made to fit where this GPU cannot launch it."""
    fitted = None if claim.pair is None else fit(claim.pair, shape, limit)
    if fitted is None:
        return claim
    return claim._replace(says=f"{claim.says}, made to fit: this GPU cannot launch its {claim.pair}", pair=fitted)


def _heuristic(files: Files, note: ShapeNote | None, record: Record | None, m: int) -> _Claim:
    from_file = files.answer is not None if files.readable else note is not None and note.origin != "miss"
    if from_file:
        return _Claim("heuristic", "not asked: there is a file")
    pair = note.baselines.get(m) if note is not None else None
    if pair is None and record is not None and record.source in {"learned", "replayed"}:
        pair = record.baseline
    if pair is None:
        return _Claim("heuristic", "SGLang computes it; no server has recorded it for this M", unknown=True)
    return _Claim("heuristic", f"as a server recorded it{_made_to_fit(note, m)}", pair)


def _made_to_fit(note: ShapeNote | None, m: int) -> str:
    own = None if note is None else note.unfit.get(m)
    return "" if own is None else f", made to fit: this GPU cannot launch SGLang's own {own}"


def _learned(
    shape: MoeShape, contents: Contents, record: Record | None, stock: ConfigPair | None, mode: str
) -> _Claim:
    if record is None:
        return _Claim("learned", f"no search has ended at this M{_others(shape, contents)}")
    if (given := _GIVEN.get(record.source)) is not None:
        return _Claim("learned", given)
    samples = record.evidence.samples
    if record.verdict == "baseline":
        return _Claim("learned", f"the search ended: nothing beat SGLang's own answer (n={samples})")
    says = f"{100 * record.evidence.gain:.1f} % faster than {record.baseline} (n={samples})"
    rules = (illegal(config, shape) for config in (record.pair.up, record.pair.down))
    if (rule := next(filter(None, rules), None)) is not None:
        says = f"not legal for this shape: {rule}"
    elif stock is not None and stock != record.baseline:
        says += ", but SGLang's own answer is another now: it is measured anew first"
    elif mode == "off":
        says += "; mode off leaves it unused"
    else:
        return _Claim("learned", says, record.pair)
    return _Claim("learned", says)


_GIVEN = {
    "pinned": "the pinned pair stands in its place",
    "imported": "imported, and not served: it is raced first",
    "replayed": "replayed from a recording: never served where a GPU is",
}


def _others(shape: MoeShape, contents: Contents) -> str:
    known = sorted(m for (owner, m), r in contents.records.items() if owner == shape and r.verdict == "faster")
    if not known:
        return ""
    shown = ", ".join(map(str, known[:6])) + (", ..." if len(known) > 6 else "")
    return f"; a row answers for its own M only, and those are {shown}"
