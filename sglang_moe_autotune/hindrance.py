"""The hindrance: what keeps a stored row from being served. Pure; a server and the shell ask the same one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sglang_moe_autotune.fitting import Limit, unfit

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_moe_autotune.records import Record, Source
    from sglang_moe_autotune.shapes import ConfigPair, MoeShape

_OF_NO_SEARCH_HERE: dict[Source, str] = {
    "imported": "imported, and not served: it is raced first",
    "replayed": "replayed from a recording: never served where a GPU is",
}


class Terms(NamedTuple):
    """On what a process serves rows."""

    limit: Limit
    source: Source | None
    """of the records that it makes; None while it has no device: then pins alone are served"""
    bit_equal: bool
    tunable: Callable[[MoeShape], bool]
    """may a learned row answer for the shape, as the mode and SGLang's files have it?"""
    stock: Callable[[MoeShape, int], ConfigPair | None]
    """SGLang's answer of today, made to fit; asked last, as it may read files"""
    deadly: Callable[[Record], str] = lambda _: ""
    """why a config of the row is too dangerous to be launched, "" where none is"""


def hindrance(record: Record, terms: Terms) -> str:
    """Why the row is not served, "" where it is. A legal pin that can be launched is, unless a config of it has killed.
    A learned row needs SGLang's answer of today as its baseline, or its gain says nothing; and a file that SGLang ships
    for this Triton stands before it unless the user says otherwise. Imported rows are candidates, and replayed ones are
    of a recording."""
    if (reason := unfit(record.pair, record.shape, terms.limit)) is not None:
        return f"it cannot be launched here: {reason}"
    if reason := terms.deadly(record):
        return reason
    return "" if record.source == "pinned" else _of_a_learned_one(record, terms)


def _of_a_learned_one(record: Record, terms: Terms) -> str:
    if record.source != terms.source:
        return _OF_NO_SEARCH_HERE.get(record.source, "measured on a GPU, and there is none here")
    if not terms.tunable(record.shape):
        return "SGLang's own file for this Triton stands before it; mode all challenges it"
    if not bits_hold(record, bit_equal=terms.bit_equal):
        return "its output is not SGLang's own in every bit, as SGLANG_MOE_AUTOTUNE_BIT_EQUAL asks"
    if terms.stock(record.shape, record.M) != record.baseline:
        return "SGLang's own answer is another now: it is measured anew first"
    return ""


def bits_hold(record: Record, *, bit_equal: bool) -> bool:
    """Is the row as equal to SGLang's answer as the user asks? bit_equal: in every bit."""
    proven = record.verdict == "baseline" or record.evidence.max_error == 0.0
    return proven or not bit_equal or record.source == "pinned"
