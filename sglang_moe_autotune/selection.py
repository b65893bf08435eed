"""Which files of the store a command works on: all that can be read, or what ``--environment`` names."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, NamedTuple

import click

from sglang_moe_autotune import doctor, store, summary
from sglang_moe_autotune.contract import LAUNCH
from sglang_moe_autotune.kernel_source import kernel_hash
from sglang_moe_autotune.source import Source, UnreadError

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
            named = str(entry.path) in problem
            click.echo(f"passed over: {problem}" if named else f"{entry.path.name}: {problem}", err=True)
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


def preferred(files: list[Opened]) -> Opened:
    """The file that a server started with this Python would use, where that can be told, else the one with the newest
    record. With several, says on standard error which it is: for commands that only read."""
    if len(files) == 1:
        return files[0]
    fitting = files
    for field, here in (("triton", _triton_here), ("kernel_hash", _kernel_here), ("device_name", _gpus_here)):
        if len(fitting) > 1:
            known = here()
            fitting = [file for file in fitting if getattr(file.contents.environment, field) in known] or fitting
    why = "the one for what is installed here" if len(fitting) < len(files) else "the newest"
    why += ", the newest of those" if 1 < len(fitting) < len(files) else ""
    chosen = max(fitting, key=_age)
    click.echo(
        f"of {len(files)} environments this is {why}: {chosen.title} ({chosen.path.name})."
        f" Choose another with --environment: {_listed([f for f in files if f is not chosen])}",
        err=True,
    )
    return chosen


def _triton_here() -> set[str]:
    version = doctor.version_of("triton")
    return set() if version is None else {version}


def _kernel_here() -> set[str]:
    root = doctor.sglang_root()
    try:
        return set() if root is None else {kernel_hash(Source(root), *LAUNCH)}
    except UnreadError:
        return set()


def _gpus_here() -> set[str]:
    return doctor.gpu_names(shutil.which("nvidia-smi"))


def _age(file: Opened) -> tuple[float, str]:
    return max((record.unix_s for record in file.contents.records.values()), default=0.0), file.path.name


def find(files: list[Opened], name: str, *, changes: bool = True) -> tuple[Opened, tuple[MoeShape, ...]]:
    """The one file that has the shape, and the shapes of that name. Where several have it: a usage error for what
    ``changes`` one, the ``preferred`` one for what only reads. Raises ShapeNotFoundError."""
    shapes = summary.find(name, {shape for file in files for shape in file.shapes})
    holders = [file for file in files if file.shapes.intersection(shapes)]
    holder = only(holders, f"{shapes[0].slug} is stored for") if changes else preferred(holders)
    return holder, tuple(shape for shape in shapes if shape in holder.shapes)


def single(shapes: tuple[MoeShape, ...]) -> MoeShape:
    """The one shape of a name; a usage error for exotic ones that share it."""
    if len(shapes) > 1:
        raise click.UsageError(f"{len(shapes)} stored shapes are called {shapes[0].slug}: use --json on `show`")
    return shapes[0]


def _listed(files: list[Opened]) -> str:
    return "; ".join(f"{file.title} ({file.path.name})" for file in files)

