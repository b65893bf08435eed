#!/usr/bin/env python3
"""The main job on a GPU: a real SGLang server on a random-weight MoE model learns its configs while it idles.

Run it with the Python that SGLang is installed in. Nothing is installed there: the server gets this checkout,
with its entry point, through PYTHONPATH. Packages the plugin needs and that Python lacks are put beside it.

    demo_gpu.py [--minutes N] [--out DIR] [--port P] [-- MORE SERVER ARGUMENTS]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_server import Model, Server

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ("msgspec", "filelock", "platformdirs", "click", "rich")
IDLE_AT_END_S = 15
SHORT_START = ("--chunked-prefill-size", "2048")
"""Fewer prefill graphs to capture and so fewer kernels to compile at the first start."""


def site_folder(out: Path) -> Path:
    """A folder for PYTHONPATH that makes this checkout look installed: entry point and missing packages."""
    # Without an entry point that importlib.metadata can see, SGLang does not find the plugin.
    site = out / "site"
    init = (ROOT / "sglang_moe_autotune" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', init, re.MULTILINE)
    folder = site / f"sglang_moe_autotune-{version}.dist-info"
    folder.mkdir(parents=True)
    metadata = f"Metadata-Version: 2.1\nName: sglang-moe-autotune\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")
    entry = "[sglang.srt.plugins]\nmoe_autotune = sglang_moe_autotune.plugin:register\n"
    (folder / "entry_points.txt").write_text(entry, encoding="utf-8")
    if lacking := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"Installing {', '.join(lacking)} into {site} (about 1 MB)", flush=True)
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(site), *lacking]
        if subprocess.run(command, check=False).returncode != 0:
            sys.exit(f"the plugin needs {', '.join(lacking)}: install them beside SGLang and start again")
    return site


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def states(store: Path, seconds: float) -> Iterator[Any]:
    """The live status of the scheduler process, once a second, until all is learned or time is up."""
    from sglang_moe_autotune import status  # noqa: PLC0415 - found on the path that main() sets

    deadline = time.monotonic() + seconds
    idle = 0
    while time.monotonic() < deadline and idle < IDLE_AT_END_S:
        servers = [s.live for s in status.read(store).servers if s.presence == "running"]
        if servers:
            yield servers[0]
            idle = idle + 1 if servers[0].state in ("idle", "off") else 0
        time.sleep(1.0)


def show_learning(store: Path, seconds: float) -> None:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415 - as above

    columns = (TextColumn("{task.fields[state]:>14}"), BarColumn(20), TextColumn("{task.fields[what]}"))
    with Progress(*columns, TimeElapsedColumn()) as progress:
        task = progress.add_task("", total=None, state="starting", what="")
        most = 1
        for live in states(store, seconds):
            left = len(live.queue) + (live.current is not None)
            most = max(most, left)
            now = f", now M={live.current[1]}" if live.current else ""
            what = f"{live.rows} rows in use, {left} M to go{now}, {live.gpu_s:.1f} GPU s"
            progress.update(task, total=most, completed=most - left, state=live.state, what=what)


def shell(store: Path, *arguments: str) -> int:
    """Run a command of the shell on the demo's store, shown as a user would type it."""
    command = [sys.executable, "-m", "sglang_moe_autotune", *arguments, "--dir", str(store)]
    print(f"\n$ sglang-moe-autotune {' '.join(arguments)}", flush=True)
    return subprocess.run(command, check=False).returncode


def main() -> int:
    description = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=description)
    parser.add_argument("--minutes", type=float, default=4.0, help="idle time to learn in (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder of the run (default: a fresh one)")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("more", nargs="*", help="more arguments for the server, after --")
    options = parser.parse_args()
    out = (options.out or Path(tempfile.mkdtemp(prefix="moe-autotune-demo-"))).absolute()
    store = out / "store"
    if store.exists():
        sys.exit(f"{out} holds an earlier run, which would be warm: name a fresh folder or remove it")

    path = [str(site_folder(out)), str(ROOT)]
    sys.path[:0] = path
    os.environ["PYTHONPATH"] = os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {"SGLANG_MOE_AUTOTUNE_DIR": str(store)}
    flags = (*SHORT_START, *options.more)
    log = out / "server.log"
    print(f"Starting a server with the plugin (log: {log}); the first start takes a minute or two", flush=True)
    with Server(Model().write(out / "model"), options.port or free_port(), log, environ, flags) as server:
        server.generate(list(range(1, 33)), 16)
        print(
            f"Healthy after {server.started_s:.0f} s and one request answered, on SGLang's heuristic.",
            flush=True,
        )
        print(f"Now it idles for at most {options.minutes:g} minutes.", flush=True)
        show_learning(store, options.minutes * 60)
        server.generate(list(range(1, 33)), 16)
        print("Another request was answered, by the same server.", flush=True)
    codes = [
        shell(store, "list"),
        shell(store, "show", "E256-N256"),
        shell(store, "export", str(out / "export")),
    ]
    again = f"{sys.executable} -m sglang_moe_autotune list --dir {store}"
    print(f"\nLook again: PYTHONPATH={os.environ['PYTHONPATH']} {again}", flush=True)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
