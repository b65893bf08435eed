"""The command ``export``: what was learned as config files that stock SGLang reads."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from sglang_moe_autotune import export, held, selection, shell
from sglang_moe_autotune.selection import NothingFound
from sglang_moe_autotune.trials import environment_key


@click.command(
    "export",
    short_help="Write config files that stock SGLang reads.",
    epilog=shell.example("export ./moe-configs", "export --merge-into ./moe-configs"),
)
@click.argument("target", metavar="[DIR]", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--merge-into",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    help="A folder with files of others, such as SGLang's own: they stay, and what collides is said.",
)
@click.option("--replayed", is_flag=True, help="Also rows that were learned on a recording, as in the demo.")
@shell.options("dir", "environment", "json")
def export_command(
    target: Path | None,
    merge_into: Path | None,
    folder: Path | None,
    environment: str | None,
    *,
    replayed: bool,
    as_json: bool,
) -> None:
    """Write what was learned as config files that stock SGLang reads, below DIR.

    SGLang takes DIR in place of its own folder, so the configs that it ships are not read then. The evidence of each
    row lies beside them, in sglang-moe-autotune-evidence.json.
    """
    place = target or merge_into
    if place is None or (target is not None and merge_into is not None):
        raise click.UsageError("name one folder: DIR, or --merge-into DIR to keep files of others in it")
    if merge_into is not None and not place.is_dir():
        raise click.UsageError(f"there is no folder {place} to merge into: make it, or name another one")
    if any(place.glob("triton_*")):
        above = place.absolute().parent
        if merge_into is None or place.absolute().name != "configs":
            raise click.UsageError(f"{place} holds the files themselves (triton_*): name its parent, {above}")
        place = above  # SGLang's variable names the folder above, people often the one that holds the files
    root = shell.root(folder)
    file = selection.preferred(selection.opened(root, environment))
    key = environment_key(file.contents.environment)
    never = [one for one in held.read(root / held.FOLDER).held if one.candidate.environment == key]
    done = export.export(file.contents, place, keep_foreign=merge_into is not None, replayed=replayed, held=never)
    for note in done.notes:
        click.echo(note, err=True)
    if replayed and any(r.source == "replayed" for r in file.contents.records.values()):
        click.echo("replayed rows are of a recording and were measured on no GPU here: not for serving", err=True)
    if as_json:
        written = {"files": [str(path) for path in done.paths], "notes": list(done.notes)}
        shell.emit({**written, "set": {"SGLANG_MOE_CONFIG_DIR": str(place.absolute())}})
    else:
        for path in done.paths:
            click.echo(path)
        if done.paths:
            also = "and what was in the folder" if merge_into is not None else "and none of the configs that it ships"
            click.echo(f"With this set SGLang reads them, {also}:", err=True)
            click.echo(f"export SGLANG_MOE_CONFIG_DIR={shlex.quote(str(place.absolute()))}")
    if not done.paths:
        why = "see above" if done.notes else "see `list`"
        raise NothingFound(f"nothing that was learned for {file.title} can be exported: {why}")
