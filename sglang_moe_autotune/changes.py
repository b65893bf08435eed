"""What differs between two states of one file of the store, row by row. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from sglang_moe_autotune.records import Contents, Record
    from sglang_moe_autotune.shapes import MoeShape

Kind = Literal["added", "replaced", "removed"]


class Change(NamedTuple):
    """One row that is another now."""

    shape: MoeShape
    M: int
    kind: Kind
    before: Record | None
    after: Record | None


def between(before: Contents | None, after: Contents) -> tuple[Change, ...]:
    """The rows that differ, by shape and M. ``before`` is None where there was no file."""
    old = {} if before is None else before.records
    changes = []
    for key in sorted({*old, *after.records}, key=lambda key: (key[0].slug, repr(key[0]), key[1])):
        was, now = old.get(key), after.records.get(key)
        if was != now:
            kind: Kind = "added" if was is None else "removed" if now is None else "replaced"
            changes.append(Change(*key, kind, was, now))
    return tuple(changes)
