"""What all commands share: errors as exit codes, options, the folder of the store, and the two kinds of output.

Tables or JSON go to standard output, messages to standard error. rich is imported where a table is printed,
since ``--json`` does without it.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from sglang_moe_autotune import store
from sglang_moe_autotune.errors import AutotuneError, ShapeNotFoundError
from sglang_moe_autotune.selection import NothingFound, Unusable
from sglang_moe_autotune.settings import Settings, cache_root

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from sglang_moe_autotune.objects import Json

_PIPE_COLUMNS = 10_000

_JSON, _EMITTED = f"{__name__}.json", f"{__name__}.emitted"
"""in a call's context: an object was asked for; it was printed"""

_Command = TypeVar("_Command", bound="Callable[..., None]")


class Commands(click.Group):
    """Turns the errors of the package into one line and an exit code; with ``--json`` also into one object."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # Asked of the words, since what is wrong may be the words of the command itself.
        ctx.meta[_JSON] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return self._invoke(ctx)
        except click.ClickException as error:
            if ctx.meta[_JSON] and not ctx.meta.get(_EMITTED, False):
                emit({"error": error.format_message(), "exit_code": error.exit_code})
            raise

    def _invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ShapeNotFoundError as error:
            raise NothingFound(str(error)) from error
        except AutotuneError as error:
            raise Unusable(str(error)) from error


class Number(click.FloatRange):
    """A range that "nan" is not in: no comparison with it is true, so click lets it pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number


def options(*names: str) -> Callable[[_Command], _Command]:
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
        "yes": click.option("--yes", "-y", is_flag=True, help="Do not ask."),
    }

    def decorate(command: _Command) -> _Command:
        for name in reversed(names):
            command = known[name](command)
        return command

    return decorate


def slugs(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """The stored names that begin so, for the completion of SHAPE. Never raises: it runs at each Tab."""
    try:
        found = store.environments(root(ctx.params.get("folder"), quiet=True))
        contents = [store.read(entry.path) for entry in found if entry.environment is not None]
    except (AutotuneError, OSError, click.ClickException):
        return []
    names = {shape.slug for one in contents for shape in {*one.notes, *(shape for shape, _ in one.records)}}
    return sorted(name for name in names if name.casefold().startswith(incomplete.casefold()))


def shape_argument(*, many: bool = False) -> Callable[[_Command], _Command]:
    """The argument SHAPE, completed from the store."""
    if many:
        return click.argument("shapes", metavar="[SHAPE]...", nargs=-1, shell_complete=slugs)
    return click.argument("shape", shell_complete=slugs)


def example(*lines: str) -> str:
    """The end of a command's help."""
    return "\b\nExample:\n" + "\n".join(f"  sglang-moe-autotune {line}" for line in lines)


def environ(folder: Path | None) -> dict[str, str]:
    """The process's environment with ``--dir`` in it."""
    chosen = {} if folder is None else {"SGLANG_MOE_AUTOTUNE_DIR": str(folder)}
    return {**os.environ, **chosen}


def settings(folder: Path | None, *, quiet: bool = False) -> Settings:
    """The settings, with a line on standard error for each value that is not understood."""
    found, complaints = Settings.from_environ(environ(folder))
    for complaint in () if quiet else complaints:
        click.echo(complaint, err=True)
    return found


def root(folder: Path | None, *, quiet: bool = False) -> Path:
    """The folder of the store. Wrong usage where none can be named."""
    found = cache_root(settings(folder, quiet=quiet), environ(folder))
    if found is None:
        raise click.UsageError("no folder can be named for the store, as there is no home: give --dir")
    return found


def new_root(folder: Path | None) -> Path:
    """The folder of a store that may have to be made. Wrong usage where more than its last part is missing, as after a
    slip of the pen in ``--dir``."""
    if folder is not None and not folder.absolute().parent.is_dir():
        raise click.UsageError(f"there is no folder {folder.absolute().parent} to make {folder.name} in: check --dir")
    return root(folder)


def console() -> Console:
    """Standard output for tables; brackets in a name are printed, not obeyed. In a pipe no line is broken."""
    from rich.console import Console  # noqa: PLC0415 - see the module's docstring

    wide = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else _PIPE_COLUMNS
    return Console(highlight=False, markup=False, emoji=False, width=wide)


def emit(value: Json) -> None:
    """Print one JSON object."""
    if (ctx := click.get_current_context(silent=True)) is not None:
        ctx.meta[_EMITTED] = True
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def show(*parts: Any) -> None:
    """Print tables and lines; in a pipe without the blanks that fill a table's last column."""
    from sglang_moe_autotune.tables import Whole  # noqa: PLC0415 - it imports rich

    printed = console()

    def put() -> None:
        for part in parts:
            printed.print(part, soft_wrap=isinstance(part, Whole))

    if printed.is_terminal:
        put()
        return
    with printed.capture() as captured:
        put()
    click.echo("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()), nl=False)
