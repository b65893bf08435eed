"""An edit: one file of the store before and after a user's change, and how it is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click

from sglang_moe_autotune import changes, objects, records, shell, store, summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from sglang_moe_autotune.records import Contents


class Edit(NamedTuple):
    """One file of the store before and after a change."""

    path: Path
    title: str
    changed: tuple[changes.Change, ...]
    notes: tuple[str, ...] = ()


def apply(
    path: Path,
    function: Callable[[Contents], Contents],
    *,
    new: Contents | None = None,
    dry: bool = False,
    notes: Iterable[str] = (),
) -> Edit:
    """Apply ``function`` to one file; what it is then is read back. Raises StoreError.

    new: what a file that is missing is made for. dry: write nothing. notes: what else a person should know.
    """
    before = store.read(path) if path.exists() else None
    if dry:
        after = function(before or records.Contents(_of(new).environment))
    else:
        after = store.change(path, function, None if new is None else new.environment)
    return Edit(path, summary.title(after.environment), changes.between(before, after), tuple(notes))


def _of(new: Contents | None) -> Contents:
    assert new is not None  # noqa: S101 - a file that is missing is only ever made from contents
    return new


def show(edits: Iterable[Edit], *, as_json: bool, dry: bool, refused: Iterable[str] = ()) -> None:
    """Tell what was changed, as tables or as one object; refused rows go to standard error."""
    edits, refused = list(edits), list(refused)
    for line in refused:
        click.echo(f"refused: {line}", err=True)
    if as_json:
        files = [
            {
                "path": str(e.path),
                "environment": e.title,
                "changes": [objects.change(c) for c in e.changed],
                "notes": list(e.notes),
            }
            for e in edits
        ]
        shell.emit({"dry_run": dry, "files": files, "refused": refused})
        return
    from sglang_moe_autotune import tables  # noqa: PLC0415 - rich, which --json does without

    for e in edits:
        shell.show(*tables.changes(e.title, e.changed), *e.notes)
    if dry:
        click.echo("Nothing was written (--dry-run).", err=True)


dry_option = click.option("--dry-run", "dry", is_flag=True, help="Say what would change, and write nothing.")


def rows_of(count: int) -> str:
    """A count of rows in words."""
    return f"{count} row" if count == 1 else f"{count} rows"
