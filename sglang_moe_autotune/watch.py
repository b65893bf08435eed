"""The command ``status``: running servers and the store, once or again every second, or a server by its address."""

from __future__ import annotations

import sys
import time
from pathlib import Path  # noqa: TC003 - click reads the annotations of a command
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import msgspec

from sglang_moe_autotune import objects, remote, shell, status, store, switch
from sglang_moe_autotune.errors import AutotuneError, ServerError
from sglang_moe_autotune.selection import NothingFound, Unusable

if TYPE_CHECKING:
    from rich.console import RenderableType


class View(NamedTuple):
    """All that ``status`` shows at a moment."""

    root: Path
    found: status.Servers
    entries: list[store.StoredEnvironment]
    remote: remote.RemoteStatus | None
    switch: switch.Level
    """of the store's file"""
    unreached: str = ""
    """why the server that was named gave no answer, where that is no error"""

    @property
    def exit_code(self) -> int:
        """0: there is something to see. A server that was named must speak."""
        if self.entries and all(entry.environment is None for entry in self.entries):
            return Unusable.exit_code
        if self.remote is not None:
            return 0 if self.remote.active else NothingFound.exit_code
        alone = all(server.presence == "gone" for server in self.found.servers)
        return NothingFound.exit_code if not self.entries and alone else 0


def look(root: Path, url: str | None, *, patient: bool = False) -> View:
    """Read everything anew. Ends the command where the folder cannot be listed. patient: a server that gives no answer
    is shown as not reached, otherwise ServerError is raised."""
    answer, unreached = None, ""
    if url is not None:
        try:
            answer = remote.ask(url)
        except ServerError as error:
            if not patient:
                raise
            unreached = str(error)
    try:
        found = status.read(root)
    except OSError as error:
        folder = root / status.FOLDER
        message = f"{folder} cannot be listed ({error.strerror}): choose another store with --dir"
        raise Unusable(message) from error
    return View(root, found, store.environments(root), answer, switch.read(root), unreached)


def running(root: Path, *, silent: bool = False) -> list[status.LiveStatus]:
    """What the servers that live say of themselves; none where the folder cannot be listed. silent: also those whose
    last word is old, as they may just be busy."""
    try:
        found = status.read(root)
    except OSError:
        return []
    wanted = {"running", "elsewhere"} | ({"silent"} if silent else set())
    return [server.live for server in found.servers if server.presence in wanted]


def as_object(view: View) -> objects.Json:
    """The object of ``status --json``."""
    seen: objects.Json = {} if view.remote is None else {"server_info": objects.remote(view.remote)}
    if view.unreached:
        seen = {"server_info": None, "not_reached": view.unreached}
    return {
        "root": str(view.root),
        "switch": view.switch,
        **seen,
        **objects.servers(view.found),
        "environments": [objects.entry(entry) for entry in view.entries],
    }


def lines(view: View, *, everything: bool) -> list[RenderableType]:
    """The lines of ``status``."""
    from sglang_moe_autotune import tables  # noqa: PLC0415 - rich, which --json does without

    above = [] if view.remote is None else [*tables.remote(view.remote), ""]
    if view.unreached:
        above += [f"not reached: {view.unreached}", ""]
    if view.switch != "on":
        above += [f"Switched to {view.switch!r} for all servers on this store: `sglang-moe-autotune on` takes it back"]
    return [*above, *tables.status(view.root, view.found, view.entries, time.time(), everything=everything)]


@click.command(
    "status",
    epilog=shell.example("status", "status --watch", "status --url http://127.0.0.1:30000 --json"),
)
@click.option("--all", "everything", is_flag=True, help="Also processes that are gone.")
@click.option("--watch", is_flag=True, help="Look again every second, until Ctrl-C.")
@click.option("--url", metavar="URL", help="Also ask a server at its address, such as http://127.0.0.1:30000.")
@shell.options("dir", "json")
def status_command(folder: Path | None, *, as_json: bool, everything: bool, watch: bool, url: str | None) -> None:
    """Running servers, how they differ, and the store.

    Exits with 1 where there is neither a server nor a store (or the server at --url does not have the plugin), with
    3 where no file can be read. --watch prints block after block in a pipe, and with --json an object a line.
    """
    root = shell.root(folder)
    if watch:
        _watch(root, url, as_json=as_json, everything=everything)
        return
    view = look(root, url)
    for path, reason in view.found.unread:
        click.echo(f"{path}: {reason}", err=True)
    if as_json:
        shell.emit(as_object(view))
    else:
        shell.show(*lines(view, everything=everything))
    sys.exit(view.exit_code)


def _watch(root: Path, url: str | None, *, as_json: bool, everything: bool, every_s: float = 1.0) -> None:
    """Show the view again and again; ends with 0 on Ctrl-C."""
    # What is wrong from the start is an error, not a screen that repeats it; a server may still be starting.
    if url is not None:
        remote.address(url)
    look(root, url, patient=True)
    try:
        if as_json:
            while True:
                click.echo(msgspec.json.encode(_try(root, url, as_object)).decode())
                sys.stdout.flush()
                time.sleep(every_s)
        _watch_people(root, url, every_s, everything=everything)
    except KeyboardInterrupt:
        sys.exit(0)


def _watch_people(root: Path, url: str | None, every_s: float, *, everything: bool) -> None:
    from rich.console import Group  # noqa: PLC0415 - rich, which --json does without
    from rich.live import Live  # noqa: PLC0415 - as above

    console = shell.console()

    def picture() -> Group:
        shown = _try(root, url, lambda view: lines(view, everything=everything))
        # A mishap between two looks (a server that is just restarting) is shown, and the next look may succeed.
        return Group(*([shown["error"]] if isinstance(shown, dict) else shown))

    if not console.is_terminal:
        while True:
            console.print(time.strftime("-- %H:%M:%S"), picture(), sep="\n")
            sys.stdout.flush()
            time.sleep(every_s)
    with Live(picture(), console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            live.update(picture(), refresh=True)
            time.sleep(every_s)


def _try(root: Path, url: str | None, draw: Any) -> Any:
    """``draw`` of a fresh view, or an object with the reason why there is none."""
    try:
        return draw(look(root, url, patient=True))
    except (AutotuneError, Unusable) as error:
        return {"error": str(error)}
