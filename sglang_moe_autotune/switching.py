"""The commands ``off`` and ``on``: the switch of every server on a store."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - click reads the annotations of a command

import click

from sglang_moe_autotune import deaths, shell, switch, watch
from sglang_moe_autotune.selection import NothingFound, Unusable


@click.command(
    "off",
    short_help="Stop tuning, and serve no learned row, in all servers on a store.",
    epilog=shell.example("off", "off --keep-rows"),
)
@click.option("--keep-rows", is_flag=True, help="Go on serving what was learned; only the tuning stops.")
@shell.options("dir", "json")
def off_command(folder: Path | None, *, as_json: bool, keep_rows: bool) -> None:
    """Stop tuning in all servers on the store, running ones within a few seconds, and serve SGLang's own configs.

    CUDA graphs keep the configs that they were captured with until they are captured again or the server starts
    anew. What was learned is kept; `on` takes it up again. Exits with 1 where no server runs on the store: then nothing
    was stopped.
    """
    _turn(folder, "rows" if keep_rows else "off", as_json=as_json)


@click.command(
    "on", short_help="Take back `off`, in all servers on a store.", epilog=shell.example("on", "on --json")
)
@shell.options("dir", "json")
def on_command(folder: Path | None, *, as_json: bool) -> None:
    """Take back `off`: running servers serve learned rows again, and tune, within a few seconds.

    Deaths in first launches are forgotten too: after two of them servers start read-only, and tune again from their
    next start on.
    """
    _turn(folder, "on", as_json=as_json)


_SAYS: dict[switch.Level, str] = {
    "off": "off: nothing is tuned, SGLang's own configs are served; captured graphs keep theirs until captured again",
    "rows": "rows: nothing is tuned, and what was learned is served",
    "on": "on: learned rows are served, and idle time is used to tune",
}


def _turn(folder: Path | None, level: switch.Level, *, as_json: bool) -> None:
    root = shell.root(folder)
    nobody = f"no server writes to {root}: if yours runs, name its folder with --dir or SGLANG_MOE_AUTOTUNE_DIR"
    # A typo must not look like a switch that was thrown.
    if not root.is_dir():
        raise NothingFound(f"{nobody}. There is no such folder, and nothing was written.")
    try:
        path = switch.write(root, level)
        forgotten = deaths.clear(root) if level == "on" else 0
    except OSError as error:
        raise Unusable(f"{root / switch.FILE} cannot be written ({error.strerror}): write the word by hand") from error
    servers = watch.running(root, silent=True)
    if as_json:
        shell.emit({"switch": level, "path": str(path), "servers": len(servers), "deaths_forgotten": forgotten})
    else:
        click.echo(_SAYS[level] if servers else f"{level}: is set in {root} for servers that start there from now on")
        if forgotten:
            click.echo(f"deaths in a first launch, forgotten: {forgotten}; a server that started read-only stays so")
        if servers:
            click.echo(f"running servers on {root}: {len(servers)}, within a few seconds")
    if not servers and level != "on":
        raise NothingFound(f"{nobody}.")
