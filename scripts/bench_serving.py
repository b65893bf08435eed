#!/usr/bin/env python3
"""What tuning costs the requests of a real SGLang server on a GPU: a JSON file, a table of targets, and a plot.

    bench_serving.py --out DIR [--part ttft] [--part steady] [--part micro] [-- MORE SERVER FLAGS]

Run it with the Python that SGLang is installed in. One server is started, tuning is switched on and off in it in
turn: ``ttft`` sends sparse requests (Poisson), the same ones on and off, ``steady`` runs a closed loop of streams all
the while and switches between steps, inside the scheduler, ``micro`` times the hooks inside the server. Before a turn
of sparse requests with tuning on the tuner forgets what it learned where too little is left to learn, and requests are
sent from its first pass on: binaries are there from the time of warming up, so that it does not wait for them. Without
--part: these three, in the time of --budget-s: turns that do not fit are left out.

DIR/store.tar.gz is what it learned, for ``bench_startup.py``. ``bench_serving.py --plot DIR/serving.json`` draws a run
again.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import http.client
import importlib.metadata
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bench_pairs as pairs
import serving_probe as probe
import steady_probe
from bench_figures import (
    Check,
    Piece,
    Request,
    Slices,
    added_latency,
    by_length,
    latency_checks,
    slices_by_m,
    stretch,
    within,
)
from gpu_parts import BUDGET_S, Parts, end_on_terminate
from gpu_server import FEWER_SIZES, Model, Server, install

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PARTS = ("ttft", "steady", "micro")
FLAGS = FEWER_SIZES[: FEWER_SIZES.index("--cuda-graph-bs-prefill")]
"""44 captured sizes, the prefill ones as SGLang has them: first searches of some 40 s, in which little must be compiled
that was not compiled for the same searches before"""
VOCABULARY = 31_000
FEW_LEFT = 18
"""M in the queue below which the tuner forgets, so that the next turn has work: a first search takes 0.8 s on an H200,
and a turn of 15 s has 13 s without requests"""
FIRST_PASS_S = 5.0
"""for which a turn waits for its first pass of tuning; then it begins without"""
PAIR_S = 1.2
"""beside its requests, of a turn on and off"""
LEAST_TURNS = 5
RAMP_S = 1.5
"""of steady load before tuning is switched"""
LEAST_STEADY_S = 60.0
ORDERED_S = 8.0
"""for which steady load waits for tuning to order a binary; then it begins without"""
LEFT_OUT = (
    "What is compared: decode steps of all streams, from one batch's begin to the next, with such a step before and"
    f" after it in its block. Left out: the first {steady_probe.DROPPED} steps of each block, steps beside a prefill,"
    " steps of fewer streams, and what SGLang's hook registry puts around a hooked function, which is there in both."
    " Threads of the plugin stand still in blocks without tuning and do all their work in those with it, twice their"
    " share. Compile processes are stopped there, and where one was busy in a block with tuning the four count for"
    " `while_compiling` alone: its figures are those of the plugin and of compiling together. The value is the centre"
    " of the differences of four neighbouring blocks (Hodges-Lehmann, Wilcoxon's interval); `mean` is their plain mean,"
    " in which what is rare and long counts."
)
STEADY = 0.005
"""within which throughput and inter-token latency stay"""
_TOKENS = re.compile(rb'"completion_tokens": ?(\d+)')


def arguments() -> argparse.ArgumentParser:
    """The options; ``scripts/bench serving`` passes its own on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for serving.json, serving.png and the servers' logs")
    parser.add_argument("--part", action="append", choices=PARTS, help="run this part only; may be repeated")
    parser.add_argument("--turns", type=int, default=10, help="of sparse requests, on and off, at most")
    parser.add_argument("--turn-s", type=float, default=15.0, help="of sparse requests a turn")
    parser.add_argument("--rate", type=float, default=2.0, help="sparse requests a second, Poisson")
    parser.add_argument("--steady-s", type=float, default=100.0, help="of steady load, at most")
    parser.add_argument("--steady-tokens", type=int, default=2048, help="of a request under steady load, at least")
    parser.add_argument("--streams", type=int, default=8, help="requests that run at a time under steady load")
    parser.add_argument("--warm-s", type=float, default=50.0, help="of idle learning first, to have binaries compiled")
    parser.add_argument("--store", type=Path, help="learned store to start with, store.tar.gz of another run")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="parts that cannot end in time are left out")
    parser.add_argument("--port", type=int, default=31300)
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and prompts")
    parser.add_argument("--compile-processes", type=int, default=max(1, (os.cpu_count() or 2) - 4))
    parser.add_argument("--plot", type=Path, help="draw this JSON file again and end")
    for name, value in Model()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("flags", nargs="*", help="more server flags, after --")
    return parser


def arrivals(rate: float, span_s: float, seed: int) -> list[float]:
    """Seconds from the start at which requests are sent: the same ones with tuning on and off."""
    random_ = random.Random(seed)  # noqa: S311 - no secret
    times, at = [], 0.0
    while (at := at + random_.expovariate(rate)) < span_s:
        times.append(at)
    return times


def prompt(number: int, tokens: int) -> list[int]:
    """Tokens that no cache has seen."""
    random_ = random.Random(f"prompt {number}")  # noqa: S311 - no secret
    return [random_.randrange(5, VOCABULARY) for _ in range(tokens)]


class Client:
    """Streams completions from the server and notes when what came, on the clock that all processes share."""

    def __init__(self, port: int) -> None:
        self.port = port

    def stream(self, number: int, tokens: int, new_tokens: int) -> list[Piece]:
        """Send one request; the sending and each piece of the answer. A server that is behind leaves pieces out, and
        the next one brings their tokens too.

        Raises RuntimeError where the answer is none, or not as long as asked for.
        """
        body = json.dumps({
            "rid": f"{probe.PREFIX}{number}",
            "input_ids": prompt(number, tokens),
            "stream": True,
            "sampling_params": {"max_new_tokens": new_tokens, "temperature": 0.0, "ignore_eos": True},
        })  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.connect()
            pieces = [Piece(time.monotonic_ns(), 0)]
            connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise RuntimeError(f"the server answered {answer.status}: {answer.read()[:300]!r}")
            while line := answer.readline():
                if line.startswith(b"data:") and not line.startswith(b"data: [DONE]"):
                    told = _TOKENS.search(line)
                    pieces.append(Piece(time.monotonic_ns(), int(told[1]) if told else pieces[-1].tokens + 1))
        finally:
            connection.close()
        if pieces[-1].tokens != new_tokens:
            raise RuntimeError(f"the server's answer had {pieces[-1].tokens} tokens, and {new_tokens} were asked for")
        return pieces


def sparse_turn(client: Client, turn: int, *, tuning: bool, first: int, options: argparse.Namespace) -> list[Request]:
    """Poisson requests of one turn; each waits in a thread of its own."""
    found: list[Request] = []
    faults: list[BaseException] = []

    def one(number: int) -> None:
        try:
            pieces = client.stream(number, 24, 8)
            found.append(Request(number, turn, tuning, pieces[0].at_ns, pieces[1].at_ns, pieces[-1].at_ns))
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            faults.append(error)

    begun, threads = time.monotonic(), []
    for i, at in enumerate(arrivals(options.rate, options.turn_s, options.seed + turn)):
        time.sleep(max(0.0, begun + at - time.monotonic()))
        threads.append(threading.Thread(target=one, args=(first + i,)))
        threads[-1].start()
    time.sleep(max(0.0, begun + options.turn_s - time.monotonic()))
    for thread in threads:
        thread.join()
    if faults:
        raise RuntimeError(f"{len(faults)} of {len(threads)} requests failed: {faults[0]}") from faults[0]
    return sorted(found)


class Load:
    """A closed loop of streams while the block lasts; then each comes to the end of its request.

    Requests are of unlike lengths, from ``tokens`` to twice that, the same in each run, or all streams would begin and
    end together; and long: the blocks in which one begins are left out. Raises RuntimeError at the end where one
    failed.
    """

    def __init__(self, client: Client, first: int, streams: int, tokens: int) -> None:
        self.requests: list[list[Piece]] = []
        self._client, self._first, self._tokens = client, first, tokens
        self._ended = threading.Event()
        self._faults: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(place,)) for place in range(streams)]

    def __enter__(self) -> Load:  # noqa: PYI034 - Self is in typing from Python 3.11 on
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        if self._faults and kind is None:
            words = f"{len(self._faults)} of {len(self._threads)} streams failed: {self._faults[0]}"
            raise RuntimeError(words) from self._faults[0]

    def _run(self, place: int) -> None:
        number = self._first + place * 10_000
        try:
            while not self._ended.is_set():
                tokens = self._tokens + number * 37 % 129 * self._tokens // 128
                self.requests.append(self._client.stream(number, 64, tokens))
                number += 1
        except (OSError, RuntimeError, http.client.HTTPException) as error:
            self._faults.append(error)


class Bench:
    """One run: its folders, its server's environment, and what was found."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.work = Path(tempfile.mkdtemp(prefix="moe-autotune-serving-"))
        self.probe = self.work / "probe"
        self.findings: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}}
        self.checks: list[Check] = []
        shape = (options.experts, options.intermediate, options.hidden, options.top_k, options.layers)
        self.model = Model(*shape).write(self.work / "model")
        self.site = self.work / "site"
        install(self.site, "serving_probe", "serving_probe", "steady_probe")
        self.findings["flags"] = [*FLAGS, *options.flags]
        self.parts = Parts(self.out / "serving.json", options.budget_s, self.findings)
        if options.store:
            shutil.unpack_archive(options.store, self.work / "store", filter="data")
        self._numbers = self._asked = 0

    def environ(self) -> dict[str, str]:
        return {
            "PYTHONPATH": os.pathsep.join([str(self.site), os.environ.get("PYTHONPATH", "")]),
            "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(self.work / "triton")),
            "SERVING_PROBE": str(self.probe),
            "SGLANG_MOE_AUTOTUNE_DIR": str(self.work / "store"),
            "SGLANG_MOE_AUTOTUNE_BUDGET_S": "3600",
            "SGLANG_MOE_AUTOTUNE_COMPILE_PROCESSES": str(self.options.compile_processes),
        }

    def serve(self, name: str) -> Server:
        self.probe.mkdir(exist_ok=True)
        print(f"--- starting server {name}", flush=True)
        port, log = self.options.port, self.work / f"{name}.log"
        try:
            server = Server(self.model, port, log, self.environ(), tuple(self.findings["flags"]))
        finally:
            shutil.copy(log, self.out / "server.log")
        print(f"    ready after {server.ready_s:.1f} s, healthy after {server.started_s:.1f} s", flush=True)
        return server

    def take_numbers(self, count: int) -> int:
        self._numbers += count
        return self._numbers - count

    def ask(self, command: str, timeout_s: float = 60.0) -> Any:
        """Give the probe a command and wait for its answer. Raises RuntimeError without one, or with a fault in it."""
        self._asked += 1
        answer = self.probe / f"{command}-{self._asked}.json"
        answer.with_suffix(".ask").touch()
        end = time.monotonic() + timeout_s
        while not answer.exists():
            if time.monotonic() > end:
                raise RuntimeError(f"the probe gave no answer to {command} within {timeout_s:.0f} s")
            time.sleep(0.02)
        told = json.loads(answer.read_text())
        if "error" in told:
            raise RuntimeError(f"the probe could not do {command}: {told['error']}")
        return told

    def events(self) -> list[tuple[int, int, int, int]]:
        time.sleep(0.5)  # the probe writes five times a second
        return [e for path in sorted(self.probe.glob("*.events")) for e in probe.decode(path.read_bytes())]

    @contextlib.contextmanager
    def watch_compiling(self, server: Server) -> Iterator[None]:
        """Have a process count the busy compile processes of each block, and stop them in those without tuning."""
        os.mkfifo(pipe := self.probe / probe.FLIPS)
        script = Path(__file__).resolve().parent / "compile_watch.py"
        command = [sys.executable, str(script), str(server.process.pid), str(pipe), str(self.work / "busy")]
        watching = subprocess.Popen(command)
        try:
            yield
        finally:
            watching.terminate()
            watching.wait(20)
            pipe.unlink()

    def busy(self) -> dict[int, tuple[int, float]]:
        """Compile processes that were busy and the seconds of a core that they took, by block; those of which nothing
        was told are missing."""
        path = self.work / "busy"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return {int(number): (int(count), float(core_s)) for number, count, core_s in rows}

    def switch(self, server: Server, *, tuning: bool) -> None:
        """By request, and looked at: a switch that does nothing would compare off with off."""
        level = 2 if tuning else 1
        answer = server.post("/set_internal_state", {"server_args": {"moe_autotune": level}})
        told = state_of(server)["switch"]
        if told != ("on" if tuning else "rows"):
            raise RuntimeError(f"the switch says {told!r} after {level} was asked for: {answer}")


def state_of(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/server_info")["internal_states"][0]["moe_autotune"]
    return found


def live_parts(bench: Bench, parts: Sequence[str]) -> None:
    """ttft, steady and micro, in one server."""
    with bench.serve("tuning") as server:
        try:
            run_live(bench, server, parts)
            server.rest()
        finally:
            log = server.text()
            (bench.out / "tuning.log").write_text(log[-8_000_000:])
    faults = [line for line in log.splitlines() if "MoE autotune failed" in line or "Traceback" in line]
    bench.checks.append(Check("faults in the server's log", "0", str(len(faults)), not faults))
    shutil.make_archive(str(bench.out / "store"), "gztar", bench.work / "store")  # for bench_startup.py


def run_live(bench: Bench, server: Server, parts: Sequence[str]) -> None:
    options, run = bench.options, bench.parts.run
    client = Client(server.port)
    for _ in range(3):  # what a first request costs is no matter of tuning
        client.stream(bench.take_numbers(1), 24, 8)
    if {"ttft", "steady"} & set(parts):
        warm_up(bench, server)
    bench.switch(server, tuning=False)
    before = bench.ask("memory")
    if "ttft" in parts:
        pair_s = 2 * options.turn_s + PAIR_S
        later_s = 25.0 if "steady" not in parts else 50.0 + min(options.steady_s, LEAST_STEADY_S)
        fitting = int((bench.parts.left_s - later_s) / pair_s)
        turns = min(options.turns, max(fitting, LEAST_TURNS))
        run("ttft", lambda: run_sparse(bench, server, client, turns), need_s=turns * pair_s)
    if "micro" in parts:
        run("micro", lambda: run_micro(bench, server))
    if "steady" in parts:
        span_s = min(options.steady_s, max(bench.parts.left_s - 45.0, LEAST_STEADY_S))
        run("steady", lambda: run_steady(bench, server, client, span_s), need_s=span_s + 30.0)
    bench.switch(server, tuning=False)
    bench.findings["watch"] = watch(bench.work / "store")
    after = bench.ask("memory")
    bench.findings["memory"] = {"before": before, "after": after}
    grown = (before["free"] - after["free"]) / 2**20
    bench.checks.append(Check("device memory, by the driver's count", "stated", f"{grown:+.0f} MiB", True))


def warm_up(bench: Bench, server: Server) -> None:
    """Let it learn for a while, so that the binaries of its searches exist. A pause that tuning makes is cut short."""
    begun, rows = time.monotonic(), []
    while (passed_s := time.monotonic() - begun) < bench.options.warm_s:
        renewed, told = bench.ask("renew"), state_of(server)
        known = {name: told.get(name) for name in ("state", "rows", "queue", "compile", "gpu_s")}
        rows.append({"after_s": round(passed_s, 1), "paused": bool(renewed["lifted"]), **known})
        time.sleep(min(2.0, max(0.0, begun + bench.options.warm_s - time.monotonic())))
    bench.findings["warming"], bench.findings["warmed"] = rows, state_of(server)


def watch(root: Path) -> dict[str, Any]:
    """What the plugin's own watch over its passes says, by its live file."""
    from sglang_moe_autotune import status  # noqa: PLC0415 - of this checkout, where it is not installed

    lives = [found.live for found in status.read(root).servers if found.presence == "running"]
    names = ("passes_over", "pauses", "pass_longest_us", "pass_p99_us", "slices", "gpu_s", "rows")
    return {name: getattr(lives[0], name) for name in names} if lives else {}


def run_micro(bench: Bench, server: Server) -> None:
    bench.switch(server, tuning=False)
    bench.findings["micro"] = bench.ask("micro")
    bench.checks += micro_checks(bench.findings["micro"])


def begin_tuning(bench: Bench, server: Server) -> dict[str, Any]:
    """Switch tuning on with a turn's work before it; back after its first pass, or ``FIRST_PASS_S``."""
    forgot = state_of(server)["queue"] < FEW_LEFT
    began, before = bench.ask("forget" if forgot else "renew"), bench.ask("passes")
    begun = time.monotonic()
    bench.switch(server, tuning=True)
    while (told := bench.ask("passes"))["passes"] == before["passes"] and time.monotonic() < begun + FIRST_PASS_S:
        pass
    first_s = time.monotonic() - begun if told["passes"] > before["passes"] else None
    return {"queued": began["queued"], "forgot": forgot, "pause_lifted": bool(began["lifted"]),
            "first_pass_s": first_s, "pauses": before["pauses"]}  # fmt: skip


def run_sparse(bench: Bench, server: Server, client: Client, turns: int) -> None:
    options = bench.options
    requests: list[Request] = []
    rows: list[dict[str, Any]] = []
    begun, spans = time.monotonic_ns(), []
    for turn in range(turns):
        for tuning in (turn % 2 == 0, turn % 2 == 1):  # a drift meets both alike
            if tuning:
                rows.append({"turn": turn, **begin_tuning(bench, server)})
            else:
                bench.switch(server, tuning=False)
                time.sleep(0.3)
            first = bench.take_numbers(10_000)
            at = time.monotonic_ns()
            requests += sparse_turn(client, turn, tuning=tuning, first=first, options=options)
            if tuning:
                spans.append((at, time.monotonic_ns()))
                told = state_of(server)
                rows[-1]["pauses"] = bench.ask("passes")["pauses"] - rows[-1]["pauses"]
                rows[-1] |= {"left": told["queue"], "compile": told.get("compile")}
        print(f"    turn {turn + 1} of {turns}: {len(requests)} requests", flush=True)
    bench.findings["ttft"] = sparse_figures(bench, begun, requests, spans, rows)
    bench.checks += latency_checks(bench.findings["ttft"], [row["faster"] for row in rows])
    count = bench.findings["ttft"]["slices_while_a_batch_ran"]
    bench.checks.append(Check("slices while a batch was on the GPU", "0", str(count), count == 0))


def sparse_figures(
    bench: Bench, begun: int, requests: list[Request], spans: list[tuple[int, int]], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """begun, spans: the whole and the turns with tuning on, in ns. rows: of these turns, to be completed."""
    events = [e for e in bench.events() if e[1] >= begun]
    sent, received, handed = (
        {value: at for kind, at, _, value in events if kind == wanted and value >= 0}
        for wanted in (probe.SENT, probe.RECEIVED, probe.HANDED)
    )
    requests = [
        r._replace(**{f"{name}_ns": seen.get(r.number, 0)
                      for name, seen in (("sent", sent), ("received", received), ("handed", handed))})
        for r in requests
    ]  # fmt: skip
    passes = [e for e in events if e[0] == probe.SLICE]
    slices = Slices((begin, end) for _, begin, end, _ in passes)
    learned = [(at, value) for kind, at, _, value in events if kind == probe.LEARNED]
    for row, span in zip(rows, spans, strict=True):
        mine = [r for r in requests if r.tuning and r.turn == row["turn"]]
        faster = [value for at, value in learned if span[0] <= at < span[1]]
        row |= {
            "requests": len(mine),
            "share_met": sum(slices.met_by(r) is not None for r in mine) / max(1, len(mine)),
            "share_of_time_in_passes": slices.busy_share(*span),
            "records": len(faster),
            "faster": sum(faster),
        }
    figures = added_latency(requests, slices)
    figures["turns"] = rows
    figures["by_length_of_the_pass"] = by_length([r for r in requests if r.tuning], slices, spans)
    figures["passes"] = slices_by_m(passes, 500.0)
    figures["learned"] = {"records": len(learned), "faster": sum(value for _, value in learned)}
    figures["slices_while_a_batch_ran"] = sum(e[0] == probe.INTRUDED for e in events)
    figures["times_ms"] = [
        [r.turn, r.tuning, r.ttft_ms, r.wait_ms if r.received_ns and r.sent_ns else None, slices.met_by(r) is not None]
        for r in requests
    ]
    return figures


def run_steady(bench: Bench, server: Server, client: Client, span_s: float) -> None:
    """The probe switches between steps while the streams go on: what starting and ending them costs is in neither side.
    Tuning has work, if it were to find the time, and what it ordered before is being compiled."""
    options = bench.options
    bench.ask("forget")
    bench.switch(server, tuning=True)
    ordered = wait_for_order(server)
    with bench.watch_compiling(server), Load(
        client, bench.take_numbers(1_000_000), options.streams, options.steady_tokens
    ) as load:  # fmt: skip
        time.sleep(min(RAMP_S, span_s))
        before = bench.ask("passes")["passes"]
        began = time.monotonic_ns()
        watched = bench.ask("alternate")["compile_processes_watched"]
        try:
            time.sleep(span_s)
        finally:
            bench.ask("settle")
        ended = time.monotonic_ns()
        passes = bench.ask("passes")["passes"] - before
    found = steady_figures(bench, load.requests, (began, ended))
    found |= {"passes_of_tuning": passes, "ordered_before": ordered, "compile_processes_watched": watched}
    for label in ("throughput", "inter-token latency", "median step"):
        if label in found:
            bench.checks.append(within(f"steady load, {label}", found[label], STEADY))
        else:
            told = f"no figure of {found['blocks_that_count']} blocks"
            bench.checks.append(Check(f"steady load, {label}", "measured", told, False))
    known = found["compiling"]["known"]
    told = f"{100 * known:.0f} %"
    bench.checks.append(Check("steady load, blocks whose compiling is known", ">= 90 %", told, known >= 0.9))
    bench.checks.append(Check("passes of tuning under steady load", "0", str(passes), passes == 0))
    bench.findings["steady"] = found


def wait_for_order(server: Server) -> dict[str, Any]:
    """The counts of binaries, as soon as one is ordered that is not there, or after ``ORDERED_S``."""
    end, first = time.monotonic() + ORDERED_S, None
    while True:
        told: dict[str, Any] = state_of(server).get("compile") or {}
        ordered = told.get("ordered", 0)
        first = ordered if first is None else first
        # What was found on the disk counts as ready too: then only a new order tells.
        if ordered > min(first, told.get("ready", 0) + told.get("failed", 0)) or time.monotonic() > end:
            return told
        time.sleep(0.1)


def steady_figures(bench: Bench, requests: list[list[Piece]], span: tuple[int, int]) -> dict[str, Any]:
    """On against off, by neighbouring blocks of steps. span: in ns."""
    events = bench.events()
    steps = [pairs.Step(at, block, size) for kind, at, block, size in events if kind == probe.STEP]
    turns = [(begin, end) for kind, begin, end, _ in events if kind == probe.TURN and span[0] <= begin < span[1]]
    blocks = pairs.blocks_of(
        steps, bench.options.streams, steady_probe.DROPPED, lambda block: steady_probe.tuning_in(block, probe.SEED)
    )
    busy = bench.busy()
    blocks = pairs.with_compiling(pairs.with_gaps(blocks, requests), {number: of[0] for number, of in busy.items()})
    sides = pairs.by_compiling(blocks)
    counted = sum(block.compiling is not None for block in blocks)
    decoding = sum(step.size == bench.options.streams for step in steps)
    kept = sum(len(block.spans_ms) for block in blocks)
    return {
        "definition": LEFT_OUT,
        "seconds": (span[1] - span[0]) / 1e9,
        "blocks": len(blocks),
        "blocks_that_count": sum(block.counts for block in blocks),
        "steps": {"all": len(steps), "decode_of_all_streams": decoding, "compared": kept},
        "requests": len(requests),
        "whole_span": stretch(requests, *span),
        **pairs.compared(sides["none"] if counted else blocks, STEADY),
        "compiling": {
            "known": counted / max(1, len(blocks)),
            "fours": {name: len(of) // 4 for name, of in sides.items()},
            "busy_at_most": max((block.compiling or 0 for block in blocks), default=0),
            "core_s": {
                state: sum(of[1] for number, of in busy.items() if steady_probe.tuning_in(number, probe.SEED) is tuning)
                for state, tuning in (("on", True), ("off", False))
            },
            "while_compiling": pairs.compared(sides["some"], STEADY),
        },
        "all": pairs.compared(blocks, STEADY),
        "threads": pairs.beside_turns(blocks, steps, turns),
        "columns": "block tuning step_p50_ms step_mean_ms itl_p50_ms itl_mean_ms steps compiling",
        "series": [in_a_line(block) for block in blocks if block.counts],
    }


def in_a_line(block: pairs.Block) -> str:
    """A block's figures for the file; "-" is not known."""
    of = pairs.step_p50(block), statistics.fmean(block.spans_ms), pairs.itl_p50(block), pairs.itl_mean(block)
    times = ("-" if ms is None else f"{ms:.4f}" for ms in of)
    compiling = "-" if block.compiling is None else str(block.compiling)
    return " ".join([str(block.number), str(int(block.tuning)), *times, str(len(block.spans_ms)), compiling])


def micro_checks(found: dict[str, Any]) -> list[Check]:
    checks = []
    for state, cost in found.get("idle_ns", {}).items():
        extra = (cost["hooked"] - cost["stock"]) / 1e3
        told = f"{extra:.2f} us, {(cost['looking'] - cost['stock']) / 1e3:.2f} us once a millisecond"
        checks.append(Check(f"idle pass, {state}", "<= 5 us", told, extra <= 5))
    look = found["lookup_ns"]
    share = look["hooked hit"] / look["stock on the same M"]
    checks.append(Check("lookup, hit against stock", "<= 1.0x", f"{share:.2f}x", share <= 1.0))
    extra = (look["hooked miss"] - look["stock on a miss"]) / 1e3
    checks.append(Check("lookup, miss against stock", "<= +2 us", f"{extra:+.2f} us", extra <= 2))
    return checks


def draw(findings: dict[str, Any], path: Path) -> str:
    """The distributions of the time to first token as a PNG; says what it did, also where matplotlib is not there."""
    times = findings.get("ttft", {}).get("times_ms", [])
    if not times:
        return "no plot: no sparse requests were measured"
    try:
        import matplotlib as mpl  # noqa: PLC0415 - not needed for the figures
    except ImportError:
        return f"no plot: matplotlib is not installed; {Path(__file__).name} --plot FILE draws one later"
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after use()

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    groups = {
        "tuning off": [row for row in times if not row[1]],
        "tuning on": [row for row in times if row[1]],
        "on, met a slice": [row for row in times if row[1] and row[4]],
    }
    for axes, column, label in ((left, 2, "time to first token, ms"), (right, 3, "wait for the scheduler, ms")):
        for name, rows in groups.items():
            values = sorted(row[column] for row in rows if row[column] is not None)
            shares = [(i + 1) / len(values) for i in range(len(values))]
            axes.step(values, shares, where="post", label=f"{name} (n={len(values)})")
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    right.set_xscale("log")
    right.set_xticks([0.3, 0.5, 1, 2, 5, 10])
    right.xaxis.set_major_formatter("{x:g}")
    right.xaxis.set_minor_formatter("")
    left.set_ylabel("share of requests")
    left.legend(loc="lower right", fontsize=8)
    share = findings["ttft"]["share_met"]
    figure.suptitle(f"Sparse requests; {100 * share:.0f} % of those with tuning on met a running slice", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return f"plot: {path}"


def machine() -> dict[str, str]:
    import torch  # noqa: PLC0415 - only for the versions
    import triton  # noqa: PLC0415 - as above

    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "sglang": importlib.metadata.version("sglang"),
        "python": sys.version.split()[0],
        "driver": driver_version(),
    }


def driver_version() -> str:
    from sglang_moe_autotune import releases  # noqa: PLC0415 - of this checkout, where it is not installed

    return releases.driver_version()


def report(bench: Bench) -> None:
    bench.findings["checks"] = [check._asdict() for check in bench.checks]
    bench.parts.write()
    path = bench.parts.path
    print(f"\n{bench.findings.get('machine')}")
    for check in bench.checks:
        print(f"[{'ok' if check.holds else 'MISSED'}] {check.name}: {check.measured} (target {check.target})")
    print(f"figures: {path}\n{draw(bench.findings, bench.out / 'serving.png')}")


def main(argv: Sequence[str] | None = None, make: Callable[[argparse.Namespace], Bench] = Bench) -> int:
    parser = arguments()
    options = parser.parse_args(argv)
    if options.plot:
        print(draw(json.loads(options.plot.read_text()), options.plot.with_suffix(".png")))
        return 0
    if options.out is None:
        parser.error("--out is needed")
    parts = options.part or PARTS
    bench = make(options)
    run = bench.parts.run
    run("machine", lambda: bench.findings.update(machine=machine()))
    gc.disable()  # a collection of this process would look like a slow token
    try:
        run("one server", lambda: live_parts(bench, parts))
    finally:
        gc.enable()
        report(bench)
        shutil.rmtree(bench.work, ignore_errors=True)
    good = bench.checks and all(check.holds for check in bench.checks)
    return 0 if good and not bench.parts.failed else 1


if __name__ == "__main__":
    end_on_terminate()
    sys.exit(main())
