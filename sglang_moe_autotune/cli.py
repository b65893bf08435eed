"""The command ``sglang-moe-autotune``: what was learned, what servers are doing, and export.

Tables or one JSON object go to standard output, messages to standard error. rich is imported where a table
is printed, since ``--json`` does without it.
"""

from __future__ import annotations

import math
import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from sglang_moe_autotune import __version__, doctor, objects, selection, sglang_json, status, store, summary
from sglang_moe_autotune.errors import AutotuneError, ShapeNotFoundError
from sglang_moe_autotune.selection import NothingFound, Unusable
from sglang_moe_autotune.settings import Settings, cache_root

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

_Command = TypeVar("_Command", bound="Callable[..., None]")


class _Commands(click.Group):
    """Turns the errors of the package into one line and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ShapeNotFoundError as error:
            raise NothingFound(str(error)) from error
        except AutotuneError as error:
            raise Unusable(str(error)) from error


class _Number(click.FloatRange):
    """A range that "nan" is not in: no comparison with it is true, so click lets it pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def _options(*names: str) -> Callable[[_Command], _Command]:
    """The options of that name, as every command has them."""
    known = {
        "dir": click.option(
            "--dir",
            "folder",
            type=click.Path(path_type=Path, file_okay=False),
            help="Folder of the store, in place of SGLANG_MOE_AUTOTUNE_DIR.",
        ),
        "environment": click.option(
            "--environment",
            metavar="NAME",
            help="Part of the environment's title or file name, such as H200 or 3.8.0.",
        ),
        "json": click.option("--json", "as_json", is_flag=True, help="Print one JSON object, nothing else."),
    }

    def decorate(command: _Command) -> _Command:
        for name in reversed(names):
            command = known[name](command)
        return command

    return decorate


def _example(*lines: str) -> str:
    return "\b\nExample:\n" + "\n".join(f"  sglang-moe-autotune {line}" for line in lines)


def _environ(folder: Path | None) -> dict[str, str]:
    chosen = {} if folder is None else {"SGLANG_MOE_AUTOTUNE_DIR": str(folder)}
    return {**os.environ, **chosen}


def _root(folder: Path | None) -> Path:
    environ = _environ(folder)
    settings, complaints = Settings.from_environ(environ)
    for complaint in complaints:
        click.echo(complaint, err=True)
    root = cache_root(settings, environ)
    if root is None:
        raise click.UsageError("no folder can be named for the store, as there is no home: give --dir")
    return root


def _console() -> Console:
    from rich.console import Console  # noqa: PLC0415 - see the module's docstring

    return Console(highlight=False, markup=False, emoji=False)


def _emit(value: objects.Json) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


@click.group(
    doctor.DISTRIBUTION,
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExit codes: 0 ok; 1 nothing found, or not healthy; 2 wrong usage;\n"
    "3 a file or folder cannot be read or written.",
)
@click.version_option(__version__)
def main() -> None:
    """What sglang-moe-autotune has learned on this machine, and what its servers are doing."""


@main.command("status", epilog=_example("status", "status --json"))
@click.option("--all", "everything", is_flag=True, help="Also processes that are gone.")
@_options("dir", "json")
def status_command(folder: Path | None, *, as_json: bool, everything: bool) -> None:
    """Running servers and the store. Exits with 1 where there is neither, with 3 where no file can be read."""
    root = _root(folder)
    try:
        found = status.read(root)
    except OSError as error:
        folder = root / status.FOLDER
        message = f"{folder} cannot be listed ({error.strerror}): choose another store with --dir"
        raise Unusable(message) from error
    entries = store.environments(root)
    for path, reason in found.unread:
        click.echo(f"{path}: {reason}", err=True)
    if as_json:
        stored = [objects.entry(entry) for entry in entries]
        _emit({"root": str(root), **objects.servers(found), "environments": stored})
    else:
        from sglang_moe_autotune import tables  # noqa: PLC0415

        console = _console()
        for line in tables.status(root, found, entries, time.time(), everything=everything):
            console.print(line)
    if entries and all(entry.environment is None for entry in entries):
        sys.exit(Unusable.exit_code)
    if not entries and all(server.presence == "gone" for server in found.servers):
        sys.exit(NothingFound.exit_code)


@main.command(
    "list",
    short_help="Stored shapes, a line each, with their gains.",
    epilog=_example("list", "list --environment H200 --json"),
)
@_options("dir", "environment", "json")
def list_command(folder: Path | None, environment: str | None, *, as_json: bool) -> None:
    """Stored shapes, a line each: the counts of M by outcome, and gains.

    \b
    faster    a pair was measured faster than SGLang's answer, and is served
    baseline  the search has ended, and SGLang's own answer stays
    untuned   served, but no search has ended there yet
    best      the largest gain in the time of up + down, where faster
    mean      the geometric mean of those gains
    """
    found = [
        (file, summary.summarise(file.contents.records, file.contents.notes))
        for file in selection.opened(_root(folder), environment)
    ]
    if as_json:
        listed = [objects.environment_summary(f.path, f.contents.environment, s) for f, s in found]
        _emit({"environments": listed})
    else:
        from sglang_moe_autotune import tables  # noqa: PLC0415

        console = _console()
        for file, summaries in found:
            console.print(file.title, tables.shapes(summaries), sep="\n")
    if not any(summaries for _, summaries in found):
        raise NothingFound("no shape is stored yet: let a server run with the plugin")


@main.command(
    "show",
    short_help="Each M of a shape: SGLang's answer and what was learned.",
    epilog=_example("show E128-N768-K2048-top8-bf16", "show E128 --json"),
)
@click.argument("shape")
@_options("dir", "environment", "json")
def show_command(shape: str, folder: Path | None, environment: str | None, *, as_json: bool) -> None:
    """Each M of SHAPE: SGLang's answer above, what was learned below.

    SHAPE is a name that `list` prints, or the beginning of one. The columns up and down are the configs of
    the two GEMMs (BLOCK_SIZE_M x N x K, g GROUP_SIZE_M, w warps, s stages), us their time together, n the
    paired samples; the gain stands above its interval, both in percent.
    """
    file, shapes = selection.find(selection.opened(_root(folder), environment), shape)
    rows = [(s, summary.rows(s, file.contents.records, file.contents.notes.get(s))) for s in shapes]
    if as_json:
        described = [objects.shape_rows(owner, found) for owner, found in rows]
        _emit({"environment": objects.environment(file.contents.environment), "shapes": described})
    else:
        from sglang_moe_autotune import tables  # noqa: PLC0415

        console = _console()
        for owner, found in rows:
            console.print(f"{owner.slug} on {file.title}", tables.shape_rows(found), sep="\n")


@main.command(
    "export",
    short_help="Write config files that stock SGLang reads.",
    epilog=_example("export ./moe-configs"),
)
@click.argument("target", metavar="DIR", type=click.Path(path_type=Path, file_okay=False))
@_options("dir", "environment", "json")
def export_command(target: Path, folder: Path | None, environment: str | None, *, as_json: bool) -> None:
    """Write what was learned as config files that stock SGLang reads, below DIR.

    SGLang takes DIR in place of its own folder, so the configs that it ships are not read then.
    """
    file = selection.only(selection.opened(_root(folder), environment), "the store holds")
    done = sglang_json.export(file.contents, target)
    for note in done.notes:
        click.echo(note, err=True)
    if as_json:
        written = {"files": [str(path) for path in done.paths], "notes": list(done.notes)}
        _emit({**written, "set": {"SGLANG_MOE_CONFIG_DIR": str(target.absolute())}})
    else:
        for path in done.paths:
            click.echo(path)
        if done.paths:
            click.echo("With this set SGLang reads them, and none of the configs that it ships:", err=True)
            click.echo(f"export SGLANG_MOE_CONFIG_DIR={shlex.quote(str(target.absolute()))}")
    if not done.paths:
        raise NothingFound(f"nothing that was learned for {file.title} can be exported: see `list`")


@main.command(
    "doctor",
    short_help="Can a server that is started here tune?",
    epilog=_example("doctor", "doctor --json"),
)
@_options("dir", "json")
def doctor_command(folder: Path | None, *, as_json: bool) -> None:
    """Check this machine and this Python: can a server started from here tune?

    Imports neither SGLang nor torch. Exits with 1 if a check fails; warnings are no failure.
    """
    rows = doctor.examine(_environ(folder))
    if as_json:
        _emit(objects.checks(rows))
    else:
        from sglang_moe_autotune import tables  # noqa: PLC0415

        _console().print(tables.checks(rows))
    if any(row.health == "fail" for row in rows):
        sys.exit(NothingFound.exit_code)


@main.command(
    "simulate",
    short_help="Run the real search on a recorded landscape.",
    epilog=_example("simulate landscape.json.gz --seed 7 --noise 2"),
)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--noise",
    "noise_percent",
    metavar="PERCENT",
    type=_Number(0, 100),
    default=2.0,
    show_default=True,
    help="Noise that is put on the recorded times.",
)
@click.option(
    "--budget-s", type=_Number(min=0, min_open=True), help="GPU seconds to spend; no cap without it."
)
@_options("json")
def simulate_command(
    file: Path, seed: int, noise_percent: float, budget_s: float | None, *, as_json: bool
) -> None:
    """Run the real search on FILE, a recorded landscape, in place of a GPU."""
    from sglang_moe_autotune import landscape, simulate  # noqa: PLC0415

    try:
        recorded = landscape.load(file)
    except OSError as error:
        raise Unusable(f"{file} cannot be read ({error.strerror}): check its permissions") from error
    except ValueError as error:
        raise Unusable(str(error)) from error
    result = simulate.simulate(recorded, seed=seed, noise_percent=noise_percent, budget_s=budget_s)
    if as_json:
        _emit(result)
    else:
        from sglang_moe_autotune import tables  # noqa: PLC0415

        console = _console()
        for part in tables.simulation(result):
            console.print(part)


if __name__ == "__main__":
    main()
