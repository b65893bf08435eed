#!/usr/bin/env python3
"""The main job without a GPU: the real SGLang code and the shipped plugin, on a recorded device.

A process that SGLang's plugins take for a scheduler loads them with SGLang's own loader. Its config lookup is
asked for a shape without a config file, its idle loop runs, and the tuner learns. Only the device is
replaced: latencies come from a recording of an H200, with noise, in place of kernel launches. Then the rows
are exported, and a fresh process with a stock SGLang reads the files back.

SGLang ships no config file for the shape of the default recording. For a recording whose shape has one, the file
is hidden, and a line says so.

    demo_cpu.py [--out DIR] [--landscape FILE] [--noise PERCENT] [--seed N] [--json]
"""

# ruff: noqa: PLC0415 - each process imports what it is about: a stock SGLang must not see the package
from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
LOOKUP = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config"
LANDSCAPE = ROOT / "sglang_moe_autotune" / "landscapes" / "h200_e256_n256_k3072_top8_bf16.json.gz"
MAX_PASSES = 2_000_000
"""A tuner that still has work after so many idle passes is taken for stuck."""
IDLE_AT_END = 200
"""Passes with nothing to do after which everything is learned."""


class Row(NamedTuple):
    """What was served at one M, timed on the recording without noise."""

    M: int
    heuristic_us: float
    served_us: float
    learned: bool


class Outcome(NamedTuple):
    rows: list[Row]
    served: dict[str, Any]
    """learned M -> [up config, down config] as the hooked lookup answers"""
    passes: int
    seconds: float


# --- in the scheduler-like process


class IdleScheduler:
    """As much of a scheduler as an idle pass touches; its idle method is SGLang's own, hooked one."""

    def __init__(self, server_args: Any) -> None:
        from sglang.srt.managers.scheduler import Scheduler

        self.server_args = server_args
        self.idle_sleeper = None
        self._engine_paused = False
        self.offload_tags: set[str] = set()
        self.profile_in_progress = False
        # Where the plugin looks for captured graphs: it finds pools that it does not know, and leaves graphs alone.
        runner = SimpleNamespace(req_to_token_pool=None, token_to_kv_pool=None)
        self.tp_worker = SimpleNamespace(model_runner=runner)
        self.maybe_sleep_on_idle = Scheduler.maybe_sleep_on_idle.__get__(self)


def lookup_module(device_name: str) -> tuple[Any, Any]:
    """SGLang's config module with a published configuration, and that configuration."""
    from sglang_moe_autotune import releases

    server_args = releases.publish_server_args()
    return named(device_name), server_args


def named(device_name: str) -> Any:
    """SGLang's config module. The one thing put in its place is the name of the GPU, which a machine without one
    cannot tell."""
    import importlib

    module = importlib.import_module(LOOKUP)
    module.get_device_name = lambda *_: device_name
    return module


def ask(module: Any, shape: Any, M: int) -> tuple[dict[str, Any], dict[str, Any]]:  # noqa: N803
    """What a forward pass of M tokens is told: the configs of the up and the down GEMM."""
    config, (down, _) = module.try_get_optimal_moe_config(
        shape.w1_shape, shape.w2_shape, shape.top_k, shape.dtype, M,
        block_shape=list(shape.block_shape) if shape.block_shape else None,
        per_channel_quant=shape.per_channel_quant, return_down_config=True,
    )  # fmt: skip
    return config, down or config


def device_of(landscape: Any, noise_percent: float, seed: int) -> Any:
    """The recorded device in place of a GPU; what it learns is marked as replayed in the store."""
    import triton

    from sglang_moe_autotune import releases
    from sglang_moe_autotune.device import Device
    from sglang_moe_autotune.records import Environment
    from sglang_moe_autotune.replay import ReplayProvider

    environment = Environment(
        device_name=landscape.device_name,
        capability=(9, 0),
        sm_count=132,
        shared_memory_bytes=landscape.max_shared_memory_bytes or 232_448,
        l2_bytes=50 << 20,
        triton=triton.__version__,  # of this process, so that the stock SGLang finds the exported folder
        kernel_hash=releases.kernel_hash(releases.invoke_function()),
    )
    return Device(environment, ReplayProvider(landscape, seed=seed, noise_percent=noise_percent), "replayed")


def learn(landscape_path: str, noise_percent: float, seed: int, report: Callable[[int, int], None]) -> Outcome:
    """Ask for every recorded M, idle until nothing is left to learn, ask again.

    Runs in a process in which SGLang's plugins are loaded. ``report(done, of)`` is called now and then.
    """
    from sglang_moe_autotune import landscape as recording
    from sglang_moe_autotune import plugin
    from sglang_moe_autotune.shapes import ConfigPair, KernelConfig

    landscape = recording.load(Path(landscape_path))
    module, server_args = lookup_module(landscape.device_name)
    serving = plugin.serving()
    serving.start(device_of(landscape, noise_percent, seed))
    scheduler = IdleScheduler(server_args)
    for M in landscape.ms:  # noqa: N806 - what a server does while it captures its graphs
        ask(module, landscape.shape, M)
    started = time.monotonic()
    passes = idle = 0
    while idle < IDLE_AT_END and passes < MAX_PASSES:
        scheduler.maybe_sleep_on_idle()
        passes += 1
        idle = idle + 1 if serving.state == "idle" else 0
        if serving.state in {"idle", "waiting"}:
            time.sleep(0.001)  # passes with nothing to do rest for as long, and threads that lease and write get on
        if passes % 200 == 0:
            report(len(serving.store.contents.records), len(landscape.ms))
    report(len(serving.store.contents.records), len(landscape.ms))
    if not serving.store.flush(30.0):
        raise RuntimeError(f"the store in {serving.root} was not written within 30 s")
    rows, served = [], {}
    for M in landscape.ms:  # noqa: N806
        up, down = ask(module, landscape.shape, M)
        pair = ConfigPair(KernelConfig.from_dict(up), KernelConfig.from_dict(down))
        baseline = landscape.baselines[M].pair
        rows.append(Row(M, landscape.pair_us(M, baseline), landscape.pair_us(M, pair), pair != baseline))
        if pair != baseline:
            served[str(M)] = [up, down]
    return Outcome(rows, served, passes, time.monotonic() - started)


def as_scheduler(pipe: Any, arguments: tuple[Any, ...]) -> None:
    """The spawned child: like a scheduler it imports SGLang's scheduler first and loads the plugins then."""
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.srt.plugins import load_plugins

    load_plugins()
    outcome = learn(*arguments, lambda done, of: pipe.send(("progress", done, of)))
    pipe.send(("outcome", outcome))


# --- in the stock process


def read_back(pipe: Any, device_name: str, arguments: dict[str, Any], ms: list[int]) -> None:
    """A stock SGLang, no plugin loaded: what its own ``get_moe_configs`` finds in the exported folder."""
    import sglang.srt.managers.scheduler  # noqa: F401

    module = named(device_name)
    stock_server_args()
    tables = [module.get_moe_configs(**arguments, down_moe=down) for down in (False, True)]
    found = {str(M): [table.get(M) if table else None for table in tables] for M in ms}
    pipe.send(("found", found, "sglang_moe_autotune" in sys.modules))


def stock_server_args() -> None:
    """Publish an empty server's arguments without this package, by the function that all releases have for it."""
    from sglang.srt import server_args

    arguments = server_args.ServerArgs(model_path="dummy")
    if hasattr(arguments, "resolve_once"):  # newer releases publish resolved arguments only
        arguments.resolve_once()
    server_args.set_global_server_args_for_scheduler(arguments)


# --- in the process that the user started


def spawn(log: Path, target: Callable[..., None], *arguments: Any, environ: dict[str, str]) -> Any:
    """Start ``target(pipe, *arguments)`` in a fresh process and yield what it sends; it prints to ``log``.

    Raises SystemExit with the end of the log when the process fails.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=logged, args=(log, target, theirs, *arguments), daemon=True)
    os.environ.update(environ)  # a spawned process starts with this one's variables
    process.start()
    theirs.close()  # so that the end of the process ends the reading
    while True:
        try:
            yield ours.recv()
        except EOFError:
            break
    process.join()
    if process.exitcode != 0:
        end = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        sys.exit(f"{end}\nthe process ended with code {process.exitcode}; its whole output is in {log}")


def logged(log: Path, target: Callable[..., None], pipe: Any, *arguments: Any) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    target(pipe, *arguments)


def shipped_file(landscape: Any) -> Path | None:
    """The config file that the SGLang installed here would use for the landscape's shape, for any of its M."""
    from sglang_moe_autotune import config_folder, doctor

    folder, triton = config_folder.where({}), doctor.version_of("triton")
    if folder is None or triton is None:
        sys.exit("SGLang and Triton are not in this Python: start scripts/demo, which installs them")
    answers = (config_folder.answer(folder, triton, landscape.shape, landscape.device_name, m) for m in landscape.ms)
    return next((answer.path for answer in answers if answer is not None), None)


def environ_of(out: Path, *, hidden: bool) -> dict[str, str]:
    """Folders of the run's own. hidden: SGLang's config files are, by an empty folder in their place."""
    out.mkdir(parents=True, exist_ok=True)
    environ = {
        "SGLANG_MOE_AUTOTUNE_DIR": str(out / "store"),
        "SGLANG_CACHE_DIR": str(out / "cache"),
        "SGLANG_MOE_AUTOTUNE_DEEP_IDLE_S": "0",  # no user is kept waiting here: long launches may run at once
    }
    if hidden:
        (out / "empty" / "configs").mkdir(parents=True, exist_ok=True)
        environ["SGLANG_MOE_CONFIG_DIR"] = str(out / "empty")
    return environ


def shell_command() -> str:
    """The shell of this package as it can be typed here: its full path where that is known."""
    script = Path(sys.executable).parent / "sglang-moe-autotune"
    return str(script) if script.exists() else f"{sys.executable} -m sglang_moe_autotune"


def table_of(outcome: Outcome, title: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", min_width=len(title))
    for heading in ("M", "heuristic us", "learned us", "gain"):
        table.add_column(heading, justify="right")
    for row in outcome.rows:
        gain = f"{1 - row.served_us / row.heuristic_us:.1%}"
        learned = (f"{row.served_us:.1f}", gain) if row.learned else ("kept", "-")
        table.add_row(str(row.M), f"{row.heuristic_us:.1f}", *learned)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of the run (default: a fresh one)")
    parser.add_argument("--landscape", type=Path, help=f"a recorded device (default: {LANDSCAPE.name})")
    parser.add_argument("--noise", type=float, default=2.0, metavar="PERCENT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one object on stdout in place of the table")
    options = parser.parse_args()

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from sglang_moe_autotune import landscape as recording

    path = options.landscape or LANDSCAPE
    landscape = recording.load(path)
    shape = landscape.shape
    out = (options.out or Path(tempfile.mkdtemp(prefix="moe-autotune-demo-"))).absolute()
    if (out / "store").exists():
        sys.exit(f"{out} holds an earlier run, which would be warm: name a fresh folder or remove it")
    console = Console(stderr=options.json)
    console.print("SGLang's own code on the CPU, with the shipped plugin in it; launches are")
    console.print(f"replayed from a recording of one {landscape.device_name}, with {options.noise:g} % noise.")
    os.environ.pop("SGLANG_MOE_CONFIG_DIR", None)  # the caller's files are no part of the show
    file = shipped_file(landscape)
    if file is None:
        console.print(f"SGLang {version('sglang')} ships no config file for {shape.slug}: a true miss.")
    else:
        console.print(
            f"SGLang {version('sglang')} ships {file.parent.name}/{file.name} for this shape: it is hidden here,"
            " so the gains below are over SGLang's heuristic, not over that file.",
            markup=False,  # a name can have brackets
            highlight=False,
        )
    environ = environ_of(out, hidden=file is not None)
    console.print("Importing SGLang ...")
    outcome: Outcome | None = None
    columns = (TextColumn("learning"), BarColumn(), MofNCompleteColumn(), TextColumn("token counts"))
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("learning", total=len(landscape.ms))
        arguments = (str(path), options.noise, options.seed)
        for message in spawn(out / "scheduler.log", as_scheduler, arguments, environ=environ):
            if message[0] == "progress":
                progress.update(task, completed=message[1], total=message[2])
            else:
                outcome = message[1]
    if outcome is None:
        sys.exit(f"the scheduler process ended without a result; its output is in {out / 'scheduler.log'}")
    export = out / "export"
    matches = export_and_read_back(export, landscape, outcome, console) if outcome.served else None
    if options.json:
        gains = [row._asdict() for row in outcome.rows]
        summary = {"rows": gains, "export": str(export) if outcome.served else None, "read_back": matches}
        sys.stdout.write(json.dumps(summary) + "\n")
        return 0 if matches in (True, None) else 1
    console.print(table_of(outcome, f"{shape.slug}, up + down, replayed: {landscape.device_name}"))
    learned = sum(row.learned for row in outcome.rows)
    console.print(f"{learned} of {len(outcome.rows)} token counts learned in {outcome.passes:,} idle passes.")
    if matches is None:
        console.print("Nothing was faster than SGLang's heuristic by more than the noise: nothing to export.")
        return 0
    for file in sorted(export.glob("configs/*/*.json")):
        console.print(f"Exported: {file}", soft_wrap=True, highlight=False)
    if not matches:
        console.print("A stock SGLang reads OTHER configs from it: this is a bug, please report it.")
        return 1
    console.print("A fresh process with a stock SGLang read the same configs back from it.")
    look = f"{shell_command()} list --dir {out / 'store'}"
    console.print(f"Look at what was kept: {look}", soft_wrap=True, highlight=False)
    return 0


def export_and_read_back(export: Path, landscape: Any, outcome: Outcome, console: Any) -> bool:
    """Export with the shell's own command; whether a stock SGLang finds the learned rows in the files."""
    out = export.parent
    shell = [
        sys.executable,
        "-m",
        "sglang_moe_autotune",
        "export",
        "--replayed",
        str(export),
        "--dir",
        str(out / "store"),
    ]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{done.stderr}\nexport failed with code {done.returncode}: {' '.join(shell)}")
    console.print("Exported; a stock SGLang reads it back in a fresh process ...")
    shape = landscape.shape
    block_n, block_k = shape.block_shape or (0, 0)
    arguments = {
        "E": shape.E, "N": shape.N, "dtype": shape.dtype, "block_n": block_n, "block_k": block_k,
        "per_channel_quant": shape.per_channel_quant,
    }  # fmt: skip
    ms = [row.M for row in outcome.rows if row.learned]
    stock = {"SGLANG_MOE_CONFIG_DIR": str(export)}
    (message,) = spawn(out / "stock.log", read_back, landscape.device_name, arguments, ms, environ=stock)
    _, found, plugged = message
    return bool(found == outcome.served and not plugged)


if __name__ == "__main__":
    sys.exit(main())
