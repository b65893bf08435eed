#!/usr/bin/env python3
"""Several ranks on GPUs: a real SGLang server on two of them, observed from outside.

    gpu_ranks.py --out DIR --part tp differ    (9 minutes, of which the first start of a fresh machine takes 3)
    gpu_ranks.py --out DIR --part two one      (6)
    gpu_ranks.py --out DIR --part ep           (5)    [--work DIR] [--idle-s 60] [-- more server flags]
    gpu_ranks.py --out DIR --part first        (3)

``tp``: a TP=2 server learns; tuning switched on and off in turn beside requests, rank 1 stopped for 3 s while it tunes
and again in the middle of a vote, rows and epochs of both; then both capture graphs together on that vote. ``differ``:
TP=2 with those rows on one rank only, with custom all-reduce and with NCCL: the same log-probabilities. ``two`` and
``one``: nothing but learning, the same local shape on two GPUs and on one, for the speed-up; each begins with the
kernels that a start compiles and no others. ``ep``: an EP=2 server, all that ``tp`` does. ``first``: of ``tp`` the
times to first token alone. Later parts find what earlier ones left in the work folder (Triton's cache, the store, the
first answers), if it is the same machine. Within a part what cannot end in time is left out; what was found is kept.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gpu_acceptance
import gpu_answers
import gpu_soak
from bench_figures import difference, quantile
from gpu_answers import Answer, agree, told
from gpu_parts import BUDGET_S, Parts, end_on_terminate
from gpu_server import FEWER_SIZES, Model, Server, install, long_passes, rows_at_start

from sglang_moe_autotune import records, status, store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_moe_autotune.shapes import ConfigPair

PARTS = ("tp", "differ", "two", "one", "ep", "first")
NEEDED_S = {"tp": 200.0, "differ": 100.0, "two": 120.0, "one": 120.0, "ep": 150.0, "first": 95.0}
COLD = ("two", "one", "first")
MEMORY = ("--mem-fraction-static", "0.6")
SHORT = (*FEWER_SIZES, *MEMORY)
MANY = ("--chunked-prefill-size", "2048", "--cuda-graph-max-bs-decode", "16", *MEMORY)
"""44 M, so that what comes once (the first binaries) is the lesser part of the time to learn all of them"""
STOP_S = 3.0
TURNS, TURN_S, RATE = 5, 6.0, 7.0
AT_WORK: tuple[status.State, ...] = ("tuning", "waiting")
LEAST_MET = 0.3
"""of the requests, below which times to first token say nothing of tuning"""
SAME_ROWS = 0.9
"""of the M that one GPU or two found something faster for: a gain near the least one is a matter of chance"""
SETTLED_S = 12.0
"""without a first answer for an M, with nothing queued: what follows are further looks"""
LIMITS_MS = {"p50": 0.5, "p99": 2.0, "max": 5.0}
"""what tuning may add to a time to first token"""
HALVED = Model(intermediate=512)
MODELS = {"tp": HALVED, "differ": HALVED, "two": HALVED, "one": Model(), "ep": Model(experts=512), "first": HALVED}
# The fusion that SGLang turns on by itself compiles FlashInfer's kernels at the start, for minutes.
TWO = ("--tp-size", "2", "--enforce-disable-flashinfer-allreduce-fusion")
PAIR = (*SHORT, *TWO)
FLAGS = {
    "tp": PAIR, "differ": PAIR, "two": (*MANY, *TWO), "one": MANY, "ep": (*PAIR, "--ep-size", "2"), "first": PAIR,
}  # fmt: skip
WAYS = {"custom": (), "nccl": ("--disable-custom-all-reduce",), "symmetric": ("--enable-symm-mem",)}
SIZES = (24, 500, 1000, 2000)
"""tokens of the prompts whose log-probabilities are compared; their graphs are some of ``FEWER_SIZES``"""
PREFILL_SIZES = tuple(map(int, FEWER_SIZES[FEWER_SIZES.index("--cuda-graph-bs-prefill") + 1 :]))
MULTICAST = "NCCL_NVLS_ENABLE"
"""``--enable-symm-mem`` sets it to 1 whatever it was: NVLink multicast, which not every machine may use"""


class Run:
    """Folders, findings and checks of one part."""

    def __init__(self, part: str, options: argparse.Namespace) -> None:
        self.part, self.options = part, options
        self.out: Path = options.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.work = options.work.resolve()
        self.store = self.work / f"store-{'tp' if part == 'differ' else part}"
        self.notes = self.work / "notes"
        self.found: dict[str, Any] = {}
        self.starts = 0
        self.checks: list[tuple[str, bool, str]] = []
        self.answers: dict[int, tuple[float, float, ConfigPair]] = {}
        if part != "differ":
            shutil.rmtree(self.store, ignore_errors=True)
        shutil.rmtree(self.notes, ignore_errors=True)
        self.notes.mkdir(parents=True)
        self.triton = self.work / (f"triton-{part}" if part in COLD else "triton")
        if part in COLD:
            shutil.rmtree(self.triton, ignore_errors=True)
            if (started := self.work / "triton-started").is_dir():
                shutil.copytree(started, self.triton)
        self.found["cache"] = "what a start compiles" if self.triton.is_dir() else "empty"
        self.model = MODELS[part].write(self.work / f"model-{part}")
        probe = self.work / "probe"
        shutil.rmtree(probe, ignore_errors=True)
        install(probe, "ranks_probe", "ranks_probe")
        self.environ = {
            "PYTHONPATH": os.pathsep.join([str(probe), os.environ.get("PYTHONPATH", "")]),
            "PASS_PROBE_NOTES": str(self.notes),
            "TRITON_CACHE_DIR": str(self.triton),
            "SGLANG_CACHE_DIR": str(self.work / "cache"),
            "SGLANG_MOE_AUTOTUNE_DIR": str(self.store),
            "SGLANG_MOE_AUTOTUNE_BUDGET_S": "3600",
            "SGLANG_MOE_AUTOTUNE_DEEP_IDLE_S": "2",
            "SGLANG_MOE_AUTOTUNE_COMPILE_PROCESSES": str(options.compile_processes),
        }

    def check(self, name: str, ok: bool, told: str) -> None:
        self.checks.append((name, ok, told))
        print(f"[{'ok' if ok else 'FAIL'}] {self.part}: {name}: {told}", flush=True)

    def serve(self, name: str, *flags: str, **environ: str) -> Server:
        log = self.out / f"ranks_{self.part}_{name}.log"
        print(f"--- {self.part}: starting server {name}", flush=True)
        every = (*FLAGS[self.part], *flags, *self.options.flags)
        environ = {**self.environ, **environ}
        self.starts += 2  # no port is used twice
        port = self.options.port + 10 * PARTS.index(self.part) + self.starts
        try:
            server = Server(self.model, port, log, environ, every, wait_s=self.options.start_s)
        except RuntimeError:
            # A custom all-reduce that the machine does not bear is no matter of tuning: once more, by NCCL.
            if self.part == "one" or "--disable-custom-all-reduce" in every:
                raise
            traceback.print_exc()
            self.found.setdefault("started_by_nccl", []).append(name)
            every, log = (*every, "--disable-custom-all-reduce"), log.with_name(f"{log.stem}_by_nccl.log")
            server = Server(self.model, port + 1, log, environ, every, wait_s=self.options.start_s)
        self.found.setdefault("started_s", {})[name] = round(server.started_s, 1)
        self.found.setdefault("all_reduce", {})[name] = all_reduce(server.text())
        print(f"    healthy after {server.started_s:.1f} s", flush=True)
        return server

    def live(self) -> dict[int, status.LiveStatus]:
        """What each rank says of itself."""
        servers = status.read(self.store).servers
        return {s.live.rank: s.live for s in servers if s.presence == "running"}

    def live_ranks(self, ranks: int, wait_s: float = 10.0) -> dict[int, status.LiveStatus]:
        """The same, once so many ranks have said something; what there is after a while."""
        end = time.monotonic() + wait_s
        while len(live := self.live()) < ranks and time.monotonic() < end:
            time.sleep(0.2)
        return live

    def rows(self) -> dict[int, records.Record]:
        found = [listed for listed in store.environments(self.store) if listed.environment is not None]
        if len(found) != 1:
            return {}
        return {record.M: record for record in store.read(found[0].path).records.values()}

    def note_answers(self, taken_s: float) -> None:
        """When each M had its first accepted record, and its last one. A row that waits for the other rank to measure
        it is in the store as a candidate, with another source."""
        for M, record in self.rows().items():  # noqa: N806
            if record.source == "learned" and self.answers.get(M, (0.0, 0.0, None))[2] != record.pair:
                first_s = self.answers[M][0] if M in self.answers else taken_s
                self.answers[M] = (round(first_s, 1), round(taken_s, 1), record.pair)

    def begin(self) -> float:
        """Learning begins: a moment of the monotonic clock."""
        self.answers.clear()
        return time.monotonic()

    def met(self) -> collections.Counter[str]:
        """Requests that each rank received, and those of them that came while one of its slices ran."""
        found = collections.Counter[str]()
        for path in self.notes.glob("met-*.json"):
            found.update(json.loads(path.read_text()))
        return found

    def keep_stock(self, answers: list[Answer], noise: dict[str, float]) -> None:
        """For part ``differ``: what this machine's server answered before it had learned anything."""
        (self.work / f"stock-{self.part}.json").write_text(json.dumps({"answers": answers, "noise": noise}))

    def board(self) -> list[dict[str, Any]]:
        """The posts of the running server's ranks."""
        posts = []
        for path in sorted(self.store.glob("*.ranks/*/rank-*.json"), key=lambda path: path.name):
            posts.append(json.loads(path.read_bytes()))
        return posts


def prompts() -> list[list[int]]:
    return [[(7 * i + 13 * j) % 31000 + 5 for j in range(24)] for i in range(8)]


def first_token_ms(server: Server, rng: random.Random) -> float:
    """Of a prompt that no cache has seen; one token, so that the first is the last."""
    prompt = [rng.randrange(5, 31000) for _ in range(24)]
    begun = time.perf_counter()
    server.generate(prompt, 1)
    return 1e3 * (time.perf_counter() - begun)


def some_requests(server: Server, seed: int, texts: random.Random) -> list[float]:
    """Times to first token of requests at random moments, the same ones for the same seed. texts: of their prompts."""
    rng, end = random.Random(seed), time.monotonic() + TURN_S  # noqa: S311 - moments
    found = []
    while time.monotonic() < end:
        time.sleep(rng.expovariate(RATE))
        found.append(first_token_ms(server, texts))
    return found


def first_tokens(run: Run, server: Server, turns: int) -> None:
    """Requests at random moments, tuning switched on and off in turn: what it adds to the time to first token."""
    times: dict[bool, list[float]] = {True: [], False: []}
    slices: list[int] = []
    met, rows_before = collections.Counter[str](), len(run.rows())
    texts = random.Random(99)  # noqa: S311 - one for all turns: a prompt that comes again would be answered by the cache
    try:
        for turn in range(turns):
            for tuning in (turn % 2 == 0, turn % 2 == 1):  # a drift meets both alike
                server.post("/set_internal_state", {"server_args": {"moe_autotune": 2 if tuning else 1}})
                time.sleep(0.5)  # the probe's counts are written a few times a second
                before, met_before = told_state(server), run.met()
                times[tuning] += some_requests(server, turn, texts)
                time.sleep(0.5)
                after = told_state(server)
                if after["switch"] != ("on" if tuning else "rows"):
                    raise RuntimeError(f"the switch says {after['switch']!r}, tuning {tuning}")
                if tuning:
                    slices.append(after["slices"] - before["slices"])
                    met += run.met() - met_before
    finally:
        server.post("/set_internal_state", {"server_args": {"moe_autotune": 2}})
    on, off, learned = times[True], times[False], len(run.rows()) - rows_before
    found: dict[str, Any] = {"requests": {"on": len(on), "off": len(off)}, "slices_of_rank_0_in_on_turns": slices,
                             "met": dict(met), "M_settled": learned}  # fmt: skip
    for name, of in (("p50", lambda v: quantile(v, 0.5)), ("p99", lambda v: quantile(v, 0.99)), ("max", max)):
        added = difference(on, off, of)
        found[name] = {"on_ms": of(on), "off_ms": of(off), "added_ms": added}
        run.check(f"added time to first token, {name} <= {LIMITS_MS[name]} ms", added["value"] <= LIMITS_MS[name],
                  f"{added['value']:+.2f} ms ({added['low']:+.2f} to {added['high']:+.2f}), off {of(off):.2f} ms,"
                  f" {len(on)} requests")  # fmt: skip
    found["times_ms"] = {"on": on, "off": off}
    run.found["first_token"] = found
    shares = {rank: met[f"met {rank}"] / max(1, met[f"requests {rank}"]) for rank in (0, 1)}
    run.check("the turns count: enough requests met a slice, and M were settled",
              max(shares.values()) >= LEAST_MET and learned > 0 and sum(slices) > 0,
              f"share by rank {shares} of {met['requests 0']}, {learned} M settled, slices {slices}")  # fmt: skip


def told_state(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/server_info")["internal_states"][0]["moe_autotune"]
    return found


def at_work(run: Run, states: Sequence[status.State], wait_s: float = 45.0) -> dict[int, status.LiveStatus]:
    """What both ranks say once they are in one of these states; what there is after a while. Tuning may have paused
    itself for some time, and then no rank votes."""
    end = time.monotonic() + wait_s
    while True:
        live = run.live()
        if (len(live) == 2 and all(x.state in states for x in live.values())) or time.monotonic() > end:
            return live
        time.sleep(0.2)


def stop_a_rank(run: Run, server: Server, rank: int, name: str, *, tuning: bool = False) -> None:
    """SIGSTOP for 3 s: the others wait in SGLang's broadcast, as for any slow rank, and all goes on afterwards.

    tuning: it must be tuning when it is stopped, and do so again afterwards."""
    live = (at_work(run, AT_WORK) if tuning else run.live_ranks(2)).get(rank)
    if live is None:
        run.check(name, False, f"rank {rank} has no live status")
        return
    os.kill(live.pid, signal.SIGSTOP)
    try:
        time.sleep(STOP_S)
    finally:
        os.kill(live.pid, signal.SIGCONT)
    begun = time.monotonic()
    answer = server.generate(prompts()[0], 4)
    taken_ms = 1e3 * (time.monotonic() - begun)
    good, told = len(answer["output_ids"]) == 4, f"answers {taken_ms:.0f} ms after rank {rank} goes on"
    if tuning:
        since_s, end = time.time(), time.monotonic() + 20.0
        after: status.LiveStatus | None = None
        while time.monotonic() < end and not (after and after.unix_s > since_s and after.slices > live.slices):
            time.sleep(0.5)
            after = run.live().get(rank)
        slices = after.slices if after is not None else -1
        good = good and live.state in AT_WORK and slices > live.slices
        told += f"; it was {live.state}, slices {live.slices}, then {slices}"
    run.check(name, good, told)


def wait_until_learned(run: Run, most_s: float, begun: float, ranks: int = 2) -> float:
    """Seconds until every rank has nothing queued and no M had its first answer for a while, or ``most_s``. Further
    looks go on for minutes, and are not waited for."""
    last, quiet_since_s, answered = 0.0, begun, 0
    while True:
        time.sleep(0.5)
        now = time.monotonic()
        taken_s = now - begun
        live = run.live()
        run.note_answers(taken_s)
        if taken_s - last > 15:
            last = taken_s
            print(f"    {taken_s:4.0f} s: " + "; ".join(
                f"rank {r}: {x.state} {x.reason} rows {x.rows} epoch {x.epoch} queue {len(x.queue)} gpu {x.gpu_s:.1f} s"
                f" {' / '.join(x.waits)}" for r, x in sorted(live.items())), flush=True)  # fmt: skip
        done = len(live) == ranks and all(not x.queue and x.slices for x in live.values())
        if not done or len(run.answers) != answered:
            quiet_since_s, answered = now, len(run.answers)
        if now - quiet_since_s >= SETTLED_S or taken_s > most_s:  # a live file may be 3 s old
            return taken_s - (now - quiet_since_s) if done else taken_s


def agreed(run: Run, server: Server, ranks: int, wait_s: float = 20.0) -> dict[int, status.LiveStatus]:
    """What each rank says once nothing is tuned any more and all serve one epoch; what there is after a while. Tuning
    goes on afterwards."""
    server.post("/set_internal_state", {"server_args": {"moe_autotune": 1}})
    end, since_s = time.monotonic() + wait_s, time.time()
    while True:
        time.sleep(0.5)
        live = run.live()
        fresh = [x for x in live.values() if x.unix_s > since_s and x.switch == "rows"]
        if len(fresh) == ranks and len({(x.epoch, x.rows) for x in fresh}) == 1 and not any(map(differs_in, fresh)):
            break
        if time.monotonic() > end:
            break
    server.post("/set_internal_state", {"server_args": {"moe_autotune": 2}})
    return live


def differs_in(live: status.LiveStatus) -> list[str]:
    """What a rank says of differences, but for the switch that was just thrown."""
    return [why for why in live.waits if "measures nothing now (switched to" not in why]


def report(run: Run, server: Server, taken_s: float, ranks: int) -> None:
    run.live_ranks(ranks)
    live, rows = agreed(run, server, ranks), run.rows()
    faster = {M: r for M, r in rows.items() if r.verdict == "faster" and r.source == "learned"}
    run.found["learning_s"] = round(taken_s, 1)
    run.found["rows"] = {
        str(M): {"verdict": r.verdict, "source": r.source, "gain": r.evidence.gain, "low": r.evidence.gain_low,
                 "baseline_us": r.evidence.baseline_us, "pair": str(r.pair)} for M, r in sorted(rows.items())
    }  # fmt: skip
    run.found["live"] = {
        str(rank): {"epoch": x.epoch, "rows": x.rows, "gpu_s": x.gpu_s, "slices": x.slices, "waits": x.waits,
                    "passes_over": x.passes_over, "pauses": x.pauses, "pass_longest_us": x.pass_longest_us,
                    "pass_longest_did": x.pass_longest_did,
                    "pass_p99_us": x.pass_p99_us, "left": len(x.queue),
                    "compile": [x.compile.ordered, x.compile.ready, x.compile.failed],
                    "compiles_for_tuning": x.serving_compiles_for_tuning, "deferred": dict(x.deferred)}
        for rank, x in sorted(live.items())
    }  # fmt: skip
    run.found["long_passes"] = long_passes(run.notes)
    log = server.text()
    run.found["answered_s"] = {str(M): [first, last] for M, (first, last, _) in sorted(run.answers.items())}
    run.found["epoch_log"] = [x[-260:] for x in log.splitlines() if "MoE autotune, epoch" in x]
    run.check("every rank is there", sorted(live) == list(range(ranks)), str(sorted(live)))
    run.check("rows were learned", bool(faster), f"{len(faster)} faster of {len(rows)} in {taken_s:.1f} s")
    epochs, served = {x.epoch for x in live.values()}, {x.rows for x in live.values()}
    run.check("one epoch, one table", len(epochs) == len(served) == 1, f"epochs {epochs}, rows {served}")
    if ranks > 1:
        by_rank = {rank: sum(f" TP{rank}" in x for x in run.found["epoch_log"]) for rank in range(ranks)}
        run.check("every rank logs its epochs", all(by_rank.values()), f"lines by rank {by_rank}")
    waits = [why for x in live.values() for why in differs_in(x)]
    run.check("nothing differs", not waits, "; ".join(waits) or "nothing")
    compiled = {x.serving_compiles_for_tuning for x in live.values()}
    run.check("0 compiles for tuning in the serving processes", compiled == {0}, str(compiled))
    log_is_clean(run, server, "after learning")


def log_is_clean(run: Run, server: Server, when: str) -> None:
    errors = gpu_soak.faults(server.text())
    run.check(f"no error in the server's log {when}", not errors, "; ".join(errors[:3]) or "none")


def part_tp(run: Run, parts: Parts) -> None:
    whole_life(run, parts, TURNS)


def part_ep(run: Run, parts: Parts) -> None:
    whole_life(run, parts, TURNS - 1)
    shapes = slugs(run)
    local = any(x.startswith("E256-") and "-ep" in x for x in shapes)
    run.check("keyed on local experts, with ids of -1", local, str(shapes))


def whole_life(run: Run, parts: Parts, turns: int) -> None:
    """A server of two ranks from its first request on."""
    # Without ``idle`` no message is put to all ranks.
    environ = {"RANKS_PROBE_GRAPHS": str(run.notes), "SGLANG_MOE_AUTOTUNE_RECAPTURE": "idle"}
    name, stock, noise = run.part, [], {}
    with run.serve("learns", **environ) as server:
        if name == "tp":
            parts.run("tp: cache", lambda: keep_cache(run))
        begun = run.begin()
        answer = server.generate(prompts(), 8)
        run.check("a request at once", all(len(x["output_ids"]) == 8 for x in answer), f"{len(answer)} answers")
        stock = log_probabilities(server)
        noise = gpu_answers.difference(stock, log_probabilities(server, together=True))
        run.keep_stock(stock, noise)
        parts.run(f"{name}: first tokens", lambda: first_tokens(run, server, turns), need_s=2 * turns * TURN_S + 60)
        words = "rank 1 stopped for 3 s while it tunes"
        parts.run(f"{name}: stopped", lambda: stop_a_rank(run, server, 1, words, tuning=True), need_s=60)
        since_s = time.monotonic() - begun
        taken_s = wait_until_learned(run, since_s + max(5.0, min(run.options.idle_s, parts.left_s - 110)), begun)
        parts.run(f"{name}: report", lambda: report(run, server, taken_s, 2))
        parts.run(f"{name}: vote", lambda: vote(run, server), need_s=60)
        parts.run(f"{name}: together", lambda: together(run, server, stock, noise), need_s=20)
        server.rest()
        log_is_clean(run, server, "at the end")


def keep_cache(run: Run) -> None:
    """What a start compiles, for the parts that begin with it; a few candidates' binaries may be among it."""
    kept = run.work / "triton-started"
    shutil.rmtree(kept, ignore_errors=True)
    if run.triton.is_dir():
        shutil.copytree(run.triton, kept, ignore=shutil.ignore_patterns("tmp.*"))


def vote(run: Run, server: Server) -> None:
    """A ballot is open: rank 0 is ready, rank 1 is stopped for 3 s and says that it is ready afterwards."""
    states = {rank: [x.state, x.reason] for rank, x in at_work(run, (*AT_WORK, "idle")).items()}
    (run.notes / "ready-0").touch()
    end = time.monotonic() + 20
    while time.monotonic() < end and not any(post.get("vote") for post in run.board()):
        time.sleep(0.2)
    posts = run.board()
    voted = [post.get("vote") for post in posts]
    alone = len(voted) == 2 and sum(bool(one) for one in voted) == 1 and not (run.notes / "captured.jsonl").exists()
    run.check("one vote of two starts nothing", alone, f"votes {voted}; before it {states}")
    stop_a_rank(run, server, 1, "rank 1 stopped for 3 s in the middle of a vote")
    (run.notes / "ready-1").touch()
    end = time.monotonic() + 20
    lines: list[dict[str, Any]] = []
    while time.monotonic() < end and len(lines) < 2:
        time.sleep(0.2)
        path = run.notes / "captured.jsonl"
        lines = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    run.found["captured"] = lines
    apart_ms = 1e3 * abs(lines[0]["unix_s"] - lines[1]["unix_s"]) if len(lines) >= 2 else -1.0
    same = len(lines) >= 2 and lines[0]["sizes"] == lines[1]["sizes"] and {x["rank"] for x in lines[:2]} == {0, 1}
    run.check("both ranks start together", same, f"{lines[:1]}, {apart_ms:.2f} ms apart")
    answer = server.generate(prompts()[0], 4)
    run.check("requests after the message", len(answer["output_ids"]) == 4, "answered")


def together(run: Run, server: Server, stock: list[Answer], noise: dict[str, float]) -> None:
    """What the two ranks made of the vote: the graphs of its sizes captured anew on both, and answers as before."""
    path, seen, end, quiet_s = run.notes / "recaptured.jsonl", "", time.monotonic() + 60, 0.0
    while time.monotonic() < end and quiet_s < 5.0:  # one ballot may follow another
        time.sleep(0.5)
        now = path.read_text() if path.exists() else ""
        quiet_s = quiet_s + 0.5 if now and now == seen else 0.0
        seen = now
    server.rest()  # no row from here on, so no further ballot
    time.sleep(1.0)
    lines = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    run.found["recaptured"] = lines
    by_rank = {rank: [x["done"] for x in lines if x["rank"] == rank] for rank in (0, 1)}
    done = {rank: [list(one) for one in of if one] for rank, of in by_rank.items()}
    failed = [found for of in by_rank.values() for one in of for found in one.items() if found[1]["reason"]]
    run.check("both ranks captured the same graphs anew", bool(done[0]) and done[0] == done[1] and not failed,
              f"{done[0]}; rank 1 {'the same' if done[0] == done[1] else done[1]}; failed {failed[:2]}")  # fmt: skip
    found = gpu_answers.difference(stock, log_probabilities(server))
    run.found["log_probabilities"] = {"stock, alone and in a batch": noise, "stock and captured anew": found}
    run.check("answers agree as two stock runs do", agree(found, noise), f"{told(found)}; stock {told(noise)}")


def part_first(run: Run, parts: Parts) -> None:
    with run.serve("learns", RANKS_PROBE_GRAPHS=str(run.notes)) as server:  # nobody is ready: it only counts
        server.generate(prompts(), 8)
        turns = max(2, min(TURNS, int((parts.left_s - 20) / (2 * (TURN_S + 1)))))
        first_tokens(run, server, turns)
        run.found["compile_processes"] = run.options.compile_processes
        log_is_clean(run, server, "at the end")


def part_two(run: Run, parts: Parts) -> None:
    learn_only(run, parts, 2)


def part_one(run: Run, parts: Parts) -> None:
    learn_only(run, parts, 1)
    for place in (run.out, run.work):
        if (other := place / "ranks_two.json").exists():
            compare(run, json.loads(other.read_text()))
            return
    run.check("two ranks tune in less time", False, "part two left no results here")


def learn_only(run: Run, parts: Parts, ranks: int) -> None:
    with run.serve("learns") as server:
        if run.found["cache"] == "empty":
            keep_cache(run)  # the next part begins with what this one began with
        begun = run.begin()
        server.generate(prompts(), 8)
        taken_s = wait_until_learned(run, min(run.options.cold_s, parts.left_s - 40), begun, ranks)
        run.found["compile_processes"] = {"of each rank": run.options.compile_processes, "ranks": ranks}
        report(run, server, taken_s, ranks)
        server.rest()


def compare(run: Run, two: dict[str, Any]) -> None:
    """The time until every M that both learned had an accepted record, and until its last one."""
    ours, theirs = run.found["answered_s"], two["answered_s"]
    both = ours.keys() & theirs.keys()
    first = [max((of[M][0] for M in both), default=0.0) for of in (ours, theirs)]
    last = [max((of[M][1] for M in both), default=0.0) for of in (ours, theirs)]
    times = first[0] / max(0.1, first[1])
    run.found["speed_up"] = {"first_record_s": first, "last_record_s": last, "times": times, "M": len(both),
                             "times_of_last": last[0] / max(0.1, last[1])}  # fmt: skip
    faster = [{M for M, r in rows.items() if r["verdict"] == "faster" and r["source"] == "learned"}
              for rows in (run.found["rows"], two["rows"])]  # fmt: skip
    same = len(faster[0] & faster[1]) >= SAME_ROWS * len(faster[0] | faster[1])
    run.check("two ranks tune in less time", times >= 1.7 and len(both) == len(ours) > 0 and same,
              f"{times:.2f} times: all of {len(both)} M answered after {first[0]:.1f} s and {first[1]:.1f} s (the last"
              f" change after {last[0]:.1f} and {last[1]:.1f}); faster rows {len(faster[0])} and {len(faster[1])},"
              f" {len(faster[0] & faster[1])} at the same M")  # fmt: skip


def log_probabilities(server: Server, *, together: bool = False) -> list[Answer]:
    long = [[(11 * i + 17 * j) % 31000 + 5 for j in range(size)] for i, size in enumerate(SIZES)]
    return gpu_answers.ask(server, long, 1, together=together)


def part_differ(run: Run, parts: Parts) -> None:
    """The rows of ``tp`` on rank 0 only, against a server that serves SGLang's own configs on both."""
    run.check("rows of part tp are there", bool(run.rows()), f"{len(run.rows())} in {run.store}")
    kept = run.work / "stock-tp.json"
    if kept.exists():
        found = json.loads(kept.read_text())
        stock, noise = found["answers"], found["noise"]
        run.found["stock"] = {"alone and in a batch": noise, "of": "part tp, before it learned"}
    else:
        with run.serve("stock", SGLANG_MOE_AUTOTUNE_MODE="off") as server:
            stock = log_probabilities(server)
            noise = gpu_answers.difference(stock, log_probabilities(server, together=True))
            again = gpu_answers.difference(stock, log_probabilities(server))
        run.found["stock"] = {"alone and in a batch": noise, "twice": again}
    for name in run.options.ways:
        if name == "symmetric" and os.environ.get(MULTICAST) == "0":
            run.found[name] = f"left out: --enable-symm-mem turns NVLink multicast on, and {MULTICAST}=0 forbids it"
            print(f"    {run.found[name]}", flush=True)
            continue
        parts.run(f"differ: {name}", lambda name=name: differ(run, name, stock, noise), need_s=80)


def differ(run: Run, name: str, stock: list[Answer], noise: dict[str, float]) -> None:
    with run.serve(name, *WAYS[name], SGLANG_MOE_AUTOTUNE_MODE="read-only", RANKS_PROBE_DIFFER="1") as server:
        mixed = log_probabilities(server)
        answer = server.generate(prompts(), 8)
        rows = rows_at_start(server.text())
    apart = gpu_answers.difference(stock, mixed)
    run.found[name] = {"rows": rows, "apart": apart}
    counts = sorted(rows.values())
    asked = {next(M for M in PREFILL_SIZES if tokens <= M) for tokens in SIZES}
    used = sorted(asked & {M for M, row in run.rows().items() if row.verdict == "faster"})
    differs = len(rows) == 2 and counts[0] == 0 < counts[1] and bool(used)
    run.check(f"{name}: the tables differ", differs, f"rows by rank {rows}; the prompts' graphs hold those of M {used}")
    if name == "custom":
        words = run.found["all_reduce"][name]
        without = any("is disabled" in x or "llreduce failed" in x for x in words)
        own = not without and name not in run.found.get("started_by_nccl", ())
        run.check("custom: the all-reduce is SGLang's own", own, str(words)[-300:])
    whole = all(len(x["output_ids"]) == 8 for x in answer)
    run.check(f"{name}: the same log-probabilities", agree(apart, noise) and whole,
              f"{told(apart)}; stock in other batches {told(noise)}")  # fmt: skip


def slugs(run: Run) -> list[str]:
    listed = [found for found in store.environments(run.store) if found.environment is not None]
    return sorted({shape.slug for found in listed for shape, _ in store.read(found.path).records})


def all_reduce(log: str) -> list[str]:
    """What SGLang says of its all-reduce; it goes on by NCCL where its own cannot be set up."""
    lines = [x for x in log.splitlines() if re.search("all[- ]?reduce", x, re.IGNORECASE) and "ServerArgs(" not in x]
    return [x[-300:] for x in lines[:12]]


def links() -> str:
    """How the GPUs are linked, as the driver's own tool says."""
    done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, check=False, timeout=30)
    return done.stdout or done.stderr


BODIES = {
    "tp": part_tp, "differ": part_differ, "two": part_two, "one": part_one, "ep": part_ep, "first": part_first,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", nargs="+", choices=PARTS, required=True)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["custom", "nccl"], help="of part differ")
    parser.add_argument("--work", type=Path, default=Path("/tmp/moe-autotune-gpu-ranks"))  # noqa: S108 - kept for parts
    parser.add_argument("--idle-s", type=float, default=60.0, help="longest time to learn on in parts tp and ep")
    parser.add_argument("--cold-s", type=float, default=120.0, help="longest time to learn in parts two and one")
    parser.add_argument("--start-s", type=int, default=270, help="longest time that a server may take to start")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="parts that cannot end in time are left out")
    parser.add_argument("--port", type=int, default=31400)
    parser.add_argument("--compile-processes", type=int, default=10, help="of each rank")
    parser.add_argument("flags", nargs="*", help="more server flags, after --")
    options = parser.parse_args()
    end_on_terminate()
    options.out.mkdir(parents=True, exist_ok=True)
    parts = Parts(options.out / "ranks_run.json", options.budget_s, {"options": vars(options)})
    parts.run("machine", lambda: parts.found.update(machine=gpu_acceptance.machine() | {"links": links()}))
    good = True
    for name in PARTS:
        if name not in options.part:
            continue
        run = Run(name, options)
        run.found["checks"], run.found["machine"] = run.checks, parts.found.get("machine")
        try:
            parts.run(name, lambda run=run: BODIES[run.part](run, parts), need_s=NEEDED_S[name])
        finally:
            if not run.checks:
                run.check("it was begun", False, "no check was made")
            text = json.dumps(run.found, indent=1, default=str)
            for place in (run.out, run.work):  # also for a later call on the same machine, with another --out
                (place / f"ranks_{name}.json").write_text(text)
        good = good and all(ok for _, ok, _ in run.checks)
    return 0 if good and not parts.failed else 1


if __name__ == "__main__":
    sys.exit(main())
