"""The command ``quarantine``: candidates that are never tried again, and how a person lets them go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from sglang_moe_autotune import held as held_files
from sglang_moe_autotune import objects, shell
from sglang_moe_autotune.held import FOLDER, Held
from sglang_moe_autotune.selection import NothingFound, Unusable

if TYPE_CHECKING:
    from pathlib import Path


@click.command(
    "quarantine",
    short_help="Configs that took a server down or held it up.",
    epilog=shell.example("quarantine", "quarantine E128 --clear --yes"),
)
@click.argument("text", metavar="[TEXT]", required=False, default="")
@click.option("--clear", is_flag=True, help="Let servers that start from now on try them again.")
@shell.options("yes", "dir", "json")
def quarantine_command(text: str, folder: Path | None, *, clear: bool, yes: bool, as_json: bool) -> None:
    """Configs that no server tries again, because one ended or was held up in their first launch.

    With TEXT those whose shape, GEMM, config or environment it is a part of. They stay until --clear takes them out;
    servers that run keep them until their next start.
    """
    place = shell.root(folder) / FOLDER
    found = held_files.read(place)
    for path in found.unread:
        click.echo(f"{path} cannot be read, and holds nothing: remove it", err=True)
    held = [one for one in found.held if text.casefold() in f"{one.candidate} {one.candidate.environment}".casefold()]
    if clear and held:
        _clear(place, held, yes=yes, as_json=as_json)
    if as_json:
        shell.emit({"quarantine": objects.held(held), "cleared": clear and bool(held)})
    elif held and not clear:
        from sglang_moe_autotune import tables  # noqa: PLC0415 - rich, which --json does without

        shell.show(*tables.quarantine(held))
    if text and not held:
        raise NothingFound(f"nothing in quarantine is called {text!r}")
    if not held and not as_json:
        click.echo("Nothing is in quarantine: no config took a server down or held it up.")


def _clear(place: Path, held: list[Held], *, yes: bool, as_json: bool) -> None:
    if as_json and not yes:
        raise click.UsageError("--json does not ask: add --yes")
    for one in held:
        click.echo(f"{one.candidate} (M={one.M}):\n  {one.reason}", err=True)
    if not yes:
        click.confirm("Let servers try this again?", abort=True, err=True)
    for one in held:
        try:
            held_files.clear(place, one.candidate)
        except OSError as error:
            raise Unusable(f"{place} cannot be written to ({error.strerror}): check its permissions") from error
