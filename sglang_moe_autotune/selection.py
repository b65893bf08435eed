"""Which files of the store a command works on: all that can be read, or what ``--environment`` names."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click

from sglang_moe_autotune import store, summary

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_moe_autotune.records import Contents
    from sglang_moe_autotune.shapes import MoeShape


class NothingFound(click.ClickException):
    """Ends a command that found nothing to work on, or something unhealthy."""

    exit_code = 1


class Unusable(click.ClickException):
    """Ends a command that met a file or folder which cannot be read or written as it must."""

    exit_code = 3


class Opened(NamedTuple):
    """One readable file of the store."""

    path: Path
    contents: Contents

    @property
    def title(self) -> str:
        return summary.title(self.contents.environment)

    @property
    def shapes(self) -> set[MoeShape]:
        return {*(shape for shape, _ in self.contents.records), *self.contents.notes}


def opened(root: Path, name: str | None) -> list[Opened]:
    """The files below ``root`` that ``name`` is a part of, by file name or title; all without a name.

    Says on standard error what cannot be read. Ends the command where nothing is left.
    """
    files, unreadable = [], 0
    for entry in store.environments(root):
        for problem in entry.problems:
            click.echo(f"{entry.path.name}: {problem}", err=True)
        if entry.environment is None:
            unreadable += 1
        else:
            files.append(Opened(entry.path, store.read(entry.path)))
    if not files and unreadable:
        raise Unusable(
            f"no file in {root} can be read: mend what is named above, or choose another with --dir"
        )
    if not files:
        raise NothingFound(
            f"nothing is stored in {root}: let a server run with the plugin, or check --dir"
        )
    if name is None:
        return files
    chosen = [f for f in files if name.casefold() in f"{f.path.name} {f.title}".casefold()]
    if not chosen:
        raise NothingFound(
            f"no stored environment has {name!r} in its name: there are {_listed(files)}"
        )
    return chosen


def only(files: list[Opened], what: str) -> Opened:
    """The one file; a usage error where there are several."""
    if len(files) > 1:
        count = f"{len(files)} environments"
        raise click.UsageError(f"{what} {count}, choose with --environment: {_listed(files)}")
    return files[0]


def find(files: list[Opened], name: str) -> tuple[Opened, tuple[MoeShape, ...]]:
    """The one file that has the shape, and the shapes of that name. Raises ShapeNotFoundError."""
    shapes = summary.find(name, {shape for file in files for shape in file.shapes})
    holders = [file for file in files if file.shapes.intersection(shapes)]
    holder = only(holders, f"{shapes[0].slug} is stored for")
    return holder, tuple(shape for shape in shapes if shape in holder.shapes)


def single(shapes: tuple[MoeShape, ...]) -> MoeShape:
    """The one shape of a name; a usage error for exotic ones that share it."""
    if len(shapes) > 1:
        raise click.UsageError(f"{len(shapes)} stored shapes are called {shapes[0].slug}: use --json on `show`")
    return shapes[0]


def _listed(files: list[Opened]) -> str:
    return "; ".join(f"{file.title} ({file.path.name})" for file in files)

