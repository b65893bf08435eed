#!/usr/bin/env python3
"""What the plugin adds to the start of a real SGLang server on a GPU: starts with and without it, side by side.

    bench_startup.py --out DIR --store STORE.tar.gz [--rounds 4] [--budget-s 540] [-- more server flags]

A host's starts differ by seconds from one minute to the next. So those of a round begin together, each server with a
Triton cache and a store of its own, and starts of one round are compared: ``stock-cold`` and ``plugin-cold`` with an
empty Triton cache (the plugin with an empty store), ``plugin-store`` with an empty cache and the learned store, as in a
fresh container, ``stock-warm`` and ``plugin-warm`` (with that store) with the cache of an earlier start. A first round,
which counts for nothing, fills the caches of the warm ones and what a machine's first start compiles.

``--store`` is the store.tar.gz that ``bench_serving.py`` leaves. DIR/startup.json has the seconds until the log says
that the server is ready, those of its graph captures (where configs are compiled: a part that wanders little), and the
differences of both by round; exits with 1 where a target is missed or a server failed.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench_figures import Check
from bench_serving import FLAGS, machine
from gpu_parts import BUDGET_S, Parts, end_on_terminate, of_this_checkout
from gpu_server import Model, Server, rows_at_start

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STOCK_COLD, STOCK_WARM = "stock-cold", "stock-warm"
PLUGIN_COLD, PLUGIN_STORE, PLUGIN_WARM = "plugin-cold", "plugin-store", "plugin-warm"
AGAINST = {PLUGIN_COLD: STOCK_COLD, PLUGIN_STORE: STOCK_COLD, PLUGIN_WARM: STOCK_WARM}
KINDS = (STOCK_COLD, *AGAINST, STOCK_WARM)
TARGET_S = 1.0
_CAPTURE = re.compile(r"apture .*graph end\..*?elapsed[=:] ?([\d.]+) s")
ROOM = ("--mem-fraction-static", "0.5", "--max-total-tokens", "32768")
"""five servers have one GPU: each takes what it needs, and no share of what is free"""
PORTS = 20
"""between the ports of two servers; NCCL's lies half way"""
ROUND_S = 75.0
"""of a round, for what is left to begin another one"""
TOGETHER_S = 240.0
"""for which a server that is ready waits for the slowest one of its round"""


class Starts:
    """The folders of all rounds, and the seconds that each start took."""

    def __init__(self, options: argparse.Namespace, make: Callable[..., Any] = Server) -> None:
        self.options, self._make = options, make
        self.out: Path = options.out.resolve()
        self.work = Path(tempfile.mkdtemp(prefix="moe-autotune-startup-"))
        self.model = Model().write(self.work / "model")
        self.flags = (*FLAGS, *ROOM, *options.flags)
        self.found: dict[str, Any] = {"flags": list(self.flags), "rounds": []}
        self.parts = Parts(self.out / "startup.json", options.budget_s, self.found)
        self.checks: list[Check] = []
        shutil.unpack_archive(options.store, self.work / "learned", filter="data")

    def one_round(self, kinds: Sequence[str], number: int, *, counts: bool = True) -> None:
        """Start a server of each kind at the same time, and end all when the slowest is ready. Raises RuntimeError
        where one did not start."""
        order = random.Random(number).sample(kinds, len(kinds))  # noqa: S311 - no secret
        told: dict[str, dict[str, Any]] = {}
        faults: dict[str, str] = {}
        together = threading.Barrier(len(order))

        def one(kind: str, port: int) -> None:
            try:
                self._start(kind, port, told, together)
            except Exception as error:  # noqa: BLE001 - told, and the others end too
                faults[kind] = (str(error) or repr(error))[-2000:]
                together.abort()

        # A server dies with the thread that began it, so each thread lives as long as its server. One that is still
        # starting when the time is over dies with the script, which does not wait for it.
        base = self.options.port + number * PORTS * len(KINDS)
        threads = [
            threading.Thread(target=one, args=(kind, base + PORTS * i), daemon=True) for i, kind in enumerate(order)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:  # the clock's, or that of a SIGTERM
            together.abort()
            raise
        if counts:
            self.found["rounds"].append({kind: told[kind] for kind in kinds if kind in told})
        self.parts.write()
        print(f"    {'' if counts else 'not counted: '}{ {k: v['ready_s'] for k, v in told.items()} }", flush=True)
        if faults:
            raise RuntimeError("; ".join(f"{kind}: {why}" for kind, why in faults.items()))

    def _start(self, kind: str, port: int, told: dict[str, dict[str, Any]], together: threading.Barrier) -> None:
        log = self.work / f"{kind}.log"
        flags = (*self.flags, "--nccl-port", str(port + PORTS // 2))
        try:
            with self._make(self.model, port, log, self._environ(kind), flags) as server:
                if kind in AGAINST:
                    server.rest()  # it would tune beside those that are still starting
                text = server.text()
                told[kind] = {"ready_s": round(server.ready_s, 2), "capture_s": capture_s(text),
                              "rows": rows_at_start(text).get(0)}  # fmt: skip
                try:
                    together.wait(TOGETHER_S)
                except threading.BrokenBarrierError:
                    return  # another server says why
        finally:
            if log.exists():
                with (self.out / "starts.log").open("ab") as logs:
                    logs.write(f"=== {kind}\n".encode() + log.read_bytes()[-300_000:])

    def _environ(self, kind: str) -> dict[str, str]:
        cache, store = self.work / f"triton-{kind}", self.work / f"store-{kind}"
        if kind not in {STOCK_WARM, PLUGIN_WARM}:
            shutil.rmtree(cache, ignore_errors=True)
        environ = {"TRITON_CACHE_DIR": str(cache)}
        if kind not in AGAINST:
            return {**environ, "SGLANG_PLUGINS": "lively_weights,pass_probe"}
        shutil.rmtree(store, ignore_errors=True)
        if kind != PLUGIN_COLD:
            shutil.copytree(self.work / "learned", store)
        return {**environ, "SGLANG_MOE_AUTOTUNE_DIR": str(store)}


def capture_s(log: str) -> float:
    """Seconds of all graph captures that a log tells of."""
    return round(sum(map(float, _CAPTURE.findall(log))), 2)


def added(rounds: Sequence[dict[str, Any]], what: str) -> dict[str, dict[str, Any]]:
    """By kind, seconds that starts with the plugin took longer than those without it in the same round."""
    found: dict[str, dict[str, Any]] = {}
    for kind, stock in AGAINST.items():
        if longer := [round(r[kind][what] - r[stock][what], 2) for r in rounds if kind in r and stock in r]:
            found[kind] = {"median": round(statistics.median(longer), 2), "rounds": longer}
    return found


def judge(starts: Starts) -> None:
    """Differences of starts of one round against the target, into the findings and checks."""
    rounds, target = starts.found["rounds"], f"<= {TARGET_S:.0f} s"
    for words, what in (("start", "ready_s"), ("captures", "capture_s")):
        found = starts.found[f"added_{what}"] = added(rounds, what)
        for kind, stock in AGAINST.items():
            name = f"{words}, {kind} - {stock}"
            if kind not in found:
                starts.checks.append(Check(name, target, "no round", False))
                continue
            middle, longer = found[kind]["median"], found[kind]["rounds"]
            told = f"{middle:+.2f} s ({min(longer):+.2f} to {max(longer):+.2f} in {len(longer)} rounds)"
            starts.checks.append(Check(name, target, told, middle <= TARGET_S))
    for kind in (PLUGIN_STORE, PLUGIN_WARM):
        rows = [r[kind]["rows"] for r in rounds if kind in r]
        starts.checks.append(Check(f"learned rows ready, {kind}", "> 0", str(rows), bool(rows) and all(rows)))


def run(starts: Starts) -> None:
    """All rounds that fit."""
    starts.found["machine"] = machine()
    done = starts.parts.run("not counted", lambda: starts.one_round((STOCK_WARM, PLUGIN_WARM), 0, counts=False))
    for number in range(1, starts.options.rounds + 1):
        if not done or starts.parts.left_s < ROUND_S:
            break
        done = starts.parts.run(f"round {number}", lambda number=number: starts.one_round(KINDS, number))


def main(argv: Sequence[str] | None = None, make: Callable[..., Any] = Server) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True, help="store.tar.gz of bench_serving.py")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="a round that cannot end in time is left out")
    parser.add_argument("--port", type=int, default=32000)
    parser.add_argument("flags", nargs="*", help="more server flags, after --")
    options = parser.parse_args(argv)
    if not options.store.is_file():
        parser.error(f"--store {options.store} is no file: take store.tar.gz from the --out of bench_serving.py")
    of_this_checkout()
    starts = Starts(options, make)
    begun = time.monotonic()
    try:
        run(starts)
    finally:
        judge(starts)
        starts.found["checks"] = [check._asdict() for check in starts.checks]
        starts.parts.write()
        shutil.rmtree(starts.work, ignore_errors=True)
    print(f"\n{starts.found['machine']}, {os.cpu_count()} processors, {time.monotonic() - begun:.0f} s")
    for check in starts.checks:
        print(f"[{'ok' if check.holds else 'MISSED'}] {check.name}: {check.measured} (target {check.target})")
    return 0 if all(check.holds for check in starts.checks) and not starts.parts.failed else 1


if __name__ == "__main__":
    end_on_terminate()
    sys.exit(main())
