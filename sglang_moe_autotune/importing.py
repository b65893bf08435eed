"""The command ``import``: rows from files of others, as seeds for the search or as pins."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from sglang_moe_autotune import document, edit, imports, records, selection, shell, summary
from sglang_moe_autotune.errors import ImportedError, ShapeNotFoundError
from sglang_moe_autotune.shapes import shape_of_slug

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_moe_autotune.imports import ConfigTable
    from sglang_moe_autotune.records import Contents, Record
    from sglang_moe_autotune.shapes import ConfigPair, MoeShape

_MAX_BYTES = 8 << 20
"""of a config file; SGLang's have a few KB"""


@click.command(
    "import",
    short_help="Take rows from config files of SGLang or vLLM, or from another store.",
    epilog=shell.example(
        "import configs/triton_3_4_0/E=128*.json",
        "import other-host.json --dry-run",
    ),
)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--shape", "slug", metavar="SHAPE", help="The shape that the files are for.", shell_complete=shell.slugs)
@click.option("--trust", is_flag=True, help="Pin the rows: they are served without a race.")
@edit.dry_option
@shell.options("dir", "environment", "json")
def import_command(
    files: tuple[Path, ...],
    slug: str | None,
    folder: Path | None,
    environment: str | None,
    *,
    trust: bool,
    dry: bool,
    as_json: bool,
) -> None:
    """Take rows from config files of SGLang or vLLM, or from a file of another store.

    Imported rows are not served: a server races them first and keeps what wins. --trust pins them, if the files are
    for this very GPU. A config file's name says neither K nor top-k, so its rows go to every stored shape that it
    fits, or to --shape. What could not run here is refused, row by row.
    """
    target = selection.only(selection.opened(shell.root(folder), environment), "the store holds")
    found = [row for source in _sources(files) for row in _rows(source, target, slug, trust=trust)]
    made = [record for one in found for record in one.records]
    refused = [line for one in found for line in one.refused]
    if not made:
        raise ImportedError(f"none of the rows can be used here: {refused[0]}")
    notes, fresh = [], made
    if not trust:
        fresh = [r for r in made if not _settled(target.contents, r)]
        if same := len(made) - len(fresh):
            notes = [f"{edit.rows_of(same)} left out: measured here already, pinned, or what SGLang does anyway."]

    def take(contents: Contents) -> Contents:
        for record in fresh:
            if trust:
                contents = records.pin(contents, record.shape, record.M, record.pair, time.time())
            else:
                contents = records.with_changes(contents, record)
        return contents

    done = edit.apply(target.path, take, dry=dry, notes=notes)
    edit.show([done], as_json=as_json, dry=dry, refused=refused)


def _settled(contents: Contents, record: Record) -> bool:
    """Is there nothing to race: an answer that was measured, or SGLang's own pair?"""
    held, note = contents.records.get((record.shape, record.M)), contents.notes.get(record.shape)
    measured = held is not None and held.source in {"learned", "pinned"}
    return measured or (note is not None and note.baselines.get(record.M) == record.pair)


class _Source(NamedTuple):
    """A config file with its down file, or a file of another store."""

    path: Path
    up: ConfigTable | None
    down: ConfigTable | None
    stored: Contents | None


def _sources(files: Iterable[Path]) -> list[_Source]:
    """Read all of them before anything is changed. Raises ImportedError."""
    ups = dict.fromkeys(path.with_name(path.name.replace("_down.json", ".json")) for path in files)
    return [_source(path) for path in ups]


def _source(path: Path) -> _Source:
    data = _read(path)
    if b'"schema"' in data[:4096] and not path.name.startswith("E="):
        found = document.decode(data)
        if isinstance(found, document.Unreadable):
            raise ImportedError(f"{path} is no file of a store ({found.reason}): name one, or a config file")
        return _Source(path, None, None, found)
    below = path.with_name(f"{path.stem}_down.json")
    return _Source(path, _table(path, data), _table(below, _read(below)) if below.is_file() else None, None)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(document.MAX_BYTES + 1)
    except OSError as error:
        cure = "name the file of the up GEMM, beside its _down file"
        raise ImportedError(f"{path} cannot be read ({error.strerror}): {cure}") from error
    return data


def _table(path: Path, data: bytes) -> ConfigTable:
    try:
        text = data.decode() if len(data) <= _MAX_BYTES else None
    except UnicodeDecodeError:
        text = None
    found = "it is no short text" if text is None else imports.read_table(path.name, path.absolute().parent.name, text)
    if isinstance(found, str):
        raise ImportedError(f"{path} is no config file that can be imported: {found}")
    return found


def _rows(source: _Source, target: selection.Opened, slug: str | None, *, trust: bool) -> list[imports.Imported]:
    about = target.contents.environment
    if source.stored is not None:
        return _stored_rows(source, target, slug, trust=trust)
    table = source.up
    assert table is not None  # noqa: S101 - a source is one or the other
    shapes = imports.matching(table, target.shapes if slug is None else _named(slug, target))
    if not shapes:
        what = f"the name says {', '.join(source.path.name.removesuffix('.json').split(',')[:2])}"
        cure = "name the shape with --shape, as E128-N768-K2048-top8-bf16" if slug is None else "check --shape"
        raise ImportedError(f"{source.path} fits no shape here ({what}): {cure}")
    if trust and table.name.device_name != about.device_name.replace(" ", "_"):
        raise ImportedError(f"{source.path} is for another GPU than {about.device_name}: import it without --trust")
    if trust and table.triton is not None and table.triton != about.triton:
        versions = f"{table.triton}, and this is {about.triton}"
        raise ImportedError(f"{source.path} was tuned with Triton {versions}: import it without --trust")
    return [imports.from_tables(table, source.down, shape, about) for shape in shapes]


def _named(slug: str, target: selection.Opened) -> tuple[MoeShape, ...]:
    try:
        return summary.find(slug, target.shapes)
    except ShapeNotFoundError:
        if (shape := shape_of_slug(slug)) is None:
            raise
        return (shape,)


def _stored_rows(source: _Source, target: selection.Opened, slug: str | None, *, trust: bool) -> list[imports.Imported]:
    if trust:
        raise ImportedError(f"{source.path} is a file of a store: take it over as it is with `merge`, not with --trust")
    assert source.stored is not None  # noqa: S101 - checked by the caller
    wanted = None if slug is None else set(summary.find(slug, {shape for shape, _ in source.stored.records}))
    by_shape: dict[MoeShape, dict[int, ConfigPair]] = {}
    for (shape, m), record in source.stored.records.items():
        if record.verdict == "faster" and (wanted is None or shape in wanted):
            by_shape.setdefault(shape, {})[m] = record.pair
    if not by_shape:
        raise ImportedError(f"{source.path} has no row that was faster: there is nothing to import")
    return [imports.from_pairs(pairs, shape, target.contents.environment) for shape, pairs in by_shape.items()]
