#!/usr/bin/env python3
"""Several ranks on GPUs: a real SGLang server on two of them, observed from outside.

    gpu_ranks.py --out DIR --part tp differ    (about 5 minutes)
    gpu_ranks.py --out DIR --part two one      (about 6)
    gpu_ranks.py --out DIR --part ep           (about 3) [--work DIR] [--idle-s 120] [-- more server flags]

``tp``: a TP=2 server learns; requests in between, rank 1 stopped for 3 s while it tunes and again in the middle of a
vote; rows and epochs of both. ``differ``: TP=2 with those rows on one rank only, with custom all-reduce, NCCL and
symmetric memory: the same log-probabilities. ``two`` and ``one``: nothing but learning, the same local shape on two
GPUs and on one, each from an empty cache, for the speed-up. ``ep``: an EP=2 server learns. Later parts find what
earlier ones left in the work folder (Triton's cache, the store).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from gpu_server import Model, Server

from sglang_moe_autotune import records, status, store

HERE = Path(__file__).resolve().parent
PARTS = ("tp", "differ", "two", "one", "ep")
COLD = ("two", "one")
SHORT = ("--chunked-prefill-size", "2048", "--cuda-graph-max-bs", "16", "--mem-fraction-static", "0.6")
STOP_S = 3.0
TOLERANCE = 0.1
"""of a log-probability: other tiles add in another order, in bf16"""
HALVED = Model(intermediate=512)
MODELS = {"tp": HALVED, "differ": HALVED, "two": HALVED, "one": Model(), "ep": Model(experts=512)}
FLAGS = {
    "tp": ("--tp-size", "2"),
    "one": (),
    "differ": ("--tp-size", "2"),
    "two": ("--tp-size", "2"),
    "ep": ("--tp-size", "2", "--ep-size", "2"),
}


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
        self.checks: list[tuple[str, bool, str]] = []
        if part != "differ":
            shutil.rmtree(self.store, ignore_errors=True)
        shutil.rmtree(self.notes, ignore_errors=True)
        self.notes.mkdir(parents=True)
        self.triton = self.work / (f"triton-{part}" if part in COLD else "triton")
        if part in COLD:
            shutil.rmtree(self.triton, ignore_errors=True)
        self.model = MODELS[part].write(self.work / f"model-{part}")
        probe = self.work / "probe"
        shutil.rmtree(probe, ignore_errors=True)
        info = probe / "ranks_probe-0.dist-info"
        info.mkdir(parents=True)
        shutil.copy(HERE / "ranks_probe.py", probe)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ranks-probe\nVersion: 0\n")
        (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nranks_probe = ranks_probe:register\n")
        self.environ = {
            "PYTHONPATH": os.pathsep.join([str(probe), os.environ.get("PYTHONPATH", "")]),
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
        port = self.options.port + PARTS.index(self.part)
        every = (*SHORT, *FLAGS[self.part], *flags, *self.options.flags)
        server = Server(self.model, port, log, {**self.environ, **environ}, every)
        self.found.setdefault("started_s", {})[name] = round(server.started_s, 1)
        print(f"    healthy after {server.started_s:.1f} s", flush=True)
        return server

    def live(self) -> dict[int, status.LiveStatus]:
        """What each rank says of itself."""
        servers = status.read(self.store).servers
        return {s.live.rank: s.live for s in servers if s.presence == "running"}

    def rows(self) -> dict[int, records.Record]:
        found = [listed for listed in store.environments(self.store) if listed.environment is not None]
        if len(found) != 1:
            return {}
        return {record.M: record for record in store.read(found[0].path).records.values()}

    def board(self) -> list[dict[str, Any]]:
        """The posts of the running server's ranks."""
        posts = []
        for path in sorted(self.store.glob("*.ranks/*/rank-*.json"), key=lambda path: path.name):
            posts.append(json.loads(path.read_bytes()))
        return posts


def prompts() -> list[list[int]]:
    return [[(7 * i + 13 * j) % 31000 + 5 for j in range(24)] for i in range(8)]


def first_token_ms(server: Server) -> float:
    begun = time.monotonic()
    server.generate(prompts()[0], 1)
    return 1e3 * (time.monotonic() - begun)


def first_tokens(server: Server, seconds: float, seed: int) -> dict[str, float]:
    """Time to first token of requests that arrive at random moments."""
    rng, found, end = random.Random(seed), [], time.monotonic() + seconds  # noqa: S311 - moments, no secrets
    while time.monotonic() < end:
        time.sleep(rng.uniform(0.1, 0.4))
        found.append(first_token_ms(server))
    found.sort()
    p99 = found[min(len(found) - 1, int(len(found) * 0.99))]
    return {"count": len(found), "median": statistics.median(found), "p99": p99, "max": found[-1]}


def stop_a_rank(run: Run, server: Server, rank: int, name: str) -> None:
    """SIGSTOP for 3 s: the others wait in SGLang's broadcast, as for any slow rank, and all goes on afterwards."""
    live = run.live().get(rank)
    if live is None:
        run.check(name, False, f"rank {rank} has no live status")
        return
    os.kill(live.pid, signal.SIGSTOP)
    time.sleep(STOP_S)
    os.kill(live.pid, signal.SIGCONT)
    begun = time.monotonic()
    answer = server.generate(prompts()[0], 4)
    taken_ms = 1e3 * (time.monotonic() - begun)
    run.check(name, len(answer["output_ids"]) == 4, f"answers {taken_ms:.0f} ms after rank {rank} goes on")


def wait_until_learned(run: Run, most_s: float, begun: float) -> float:
    """Seconds until every rank is idle with nothing queued, or ``most_s``."""
    last = quiet = 0.0
    while True:
        time.sleep(0.5)
        taken_s = time.monotonic() - begun
        live = run.live()
        if taken_s - last > 15:
            last = taken_s
            print(f"    {taken_s:4.0f} s: " + "; ".join(
                f"rank {r}: {x.state} {x.reason} rows {x.rows} epoch {x.epoch} queue {len(x.queue)} gpu {x.gpu_s:.1f} s"
                f" {' / '.join(x.waits)}" for r, x in sorted(live.items())), flush=True)  # fmt: skip
        done = live and all(x.state == "idle" and not x.queue and x.slices for x in live.values())
        quiet = quiet + 0.5 if done else 0.0
        if quiet >= 8.0 or taken_s > most_s:  # a live file may be 3 s old
            return taken_s - quiet if done else taken_s


def report(run: Run, server: Server, taken_s: float, ranks: int) -> None:
    time.sleep(4.0)
    live, rows = run.live(), run.rows()
    faster = {M: r for M, r in rows.items() if r.verdict == "faster" and r.source == "learned"}
    run.found["learning_s"] = round(taken_s, 1)
    run.found["rows"] = {
        str(M): {"verdict": r.verdict, "source": r.source, "gain": r.evidence.gain, "low": r.evidence.gain_low,
                 "baseline_us": r.evidence.baseline_us, "pair": str(r.pair)} for M, r in sorted(rows.items())
    }  # fmt: skip
    run.found["live"] = {
        str(rank): {"epoch": x.epoch, "rows": x.rows, "gpu_s": x.gpu_s, "slices": x.slices, "waits": x.waits,
                    "compile": [x.compile.ordered, x.compile.ready, x.compile.failed],
                    "compiles_for_tuning": x.serving_compiles_for_tuning, "deferred": dict(x.deferred)}
        for rank, x in sorted(live.items())
    }  # fmt: skip
    log = server.text()
    run.found["epoch_log"] = [x[-200:] for x in log.splitlines() if "MoE autotune, epoch" in x]
    run.check("every rank is there", sorted(live) == list(range(ranks)), str(sorted(live)))
    run.check("rows were learned", bool(faster), f"{len(faster)} faster of {len(rows)} in {taken_s:.1f} s")
    epochs, served = {x.epoch for x in live.values()}, {x.rows for x in live.values()}
    run.check("one epoch, one table", len(epochs) == len(served) == 1, f"epochs {epochs}, rows {served}")
    waits = [why for x in live.values() for why in x.waits]
    run.check("nothing differs", not waits, "; ".join(waits) or "nothing")
    compiled = {x.serving_compiles_for_tuning for x in live.values()}
    run.check("0 compiles for tuning in the serving processes", compiled == {0}, str(compiled))
    told = ("MoE autotune failed", "MoE autotune could", "Traceback")
    errors = [x for x in log.splitlines() if any(words in x for words in told)]
    run.check("no error in the server's log", not errors, "; ".join(errors[:3]) or "none")


def part_tp(run: Run) -> None:
    with run.serve("learns", RANKS_PROBE_GRAPHS=str(run.notes)) as server:
        begun = time.monotonic()
        answer = server.generate(prompts(), 8)
        run.check("a request at once", all(len(x["output_ids"]) == 8 for x in answer), f"{len(answer)} answers")
        time.sleep(8.0)
        run.found["first_token_ms_tuning"] = first_tokens(server, 12.0, 1)
        at_s = time.monotonic()
        stop_a_rank(run, server, 1, "rank 1 stopped for 3 s while it tunes")
        run.found["stopped_s"] = round(time.monotonic() - at_s, 1)
        taken_s = wait_until_learned(run, run.options.idle_s, begun)
        vote(run, server)
        run.found["first_token_ms_idle"] = first_tokens(server, 8.0, 2)
        during, after = run.found["first_token_ms_tuning"], run.found["first_token_ms_idle"]
        run.check("time to first token while it tunes", during["median"] < after["median"] + 2.0,
                  f"median {during['median']:.1f} ms, p99 {during['p99']:.1f}, max {during['max']:.1f};"
                  f" idle {after['median']:.1f}, {after['p99']:.1f}, {after['max']:.1f}")  # fmt: skip
        report(run, server, taken_s, 2)


def vote(run: Run, server: Server) -> None:
    """A ballot is open: rank 0 is ready, rank 1 is stopped for 3 s and says that it is ready afterwards."""
    (run.notes / "ready-0").touch()
    end = time.monotonic() + 20
    while time.monotonic() < end and not any(post.get("vote") for post in run.board()):
        time.sleep(0.2)
    posts = run.board()
    voted = [post.get("vote") for post in posts]
    run.check("one vote of two starts nothing", not (run.notes / "captured.jsonl").exists(), f"votes {voted}")
    stop_a_rank(run, server, 1, "rank 1 stopped for 3 s in the middle of a vote")
    (run.notes / "ready-1").touch()
    end = time.monotonic() + 20
    lines: list[dict[str, Any]] = []
    while time.monotonic() < end and len(lines) < 2:
        time.sleep(0.2)
        path = run.notes / "captured.jsonl"
        lines = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
    run.found["captured"] = lines
    apart_ms = 1e3 * abs(lines[0]["unix_s"] - lines[1]["unix_s"]) if len(lines) == 2 else -1.0
    same = len(lines) == 2 and lines[0]["sizes"] == lines[1]["sizes"]
    run.check("both ranks start together", same, f"{lines[:1]}, {apart_ms:.2f} ms apart")
    answer = server.generate(prompts()[0], 4)
    run.check("requests after the message", len(answer["output_ids"]) == 4, "answered")


def part_two(run: Run) -> None:
    with run.serve("learns") as server:
        begun = time.monotonic()
        server.generate(prompts(), 8)
        taken_s = wait_until_learned(run, run.options.idle_s, begun)
        report(run, server, taken_s, 2)


def part_one(run: Run) -> None:
    with run.serve("learns") as server:
        begun = time.monotonic()
        server.generate(prompts(), 8)
        taken_s = wait_until_learned(run, run.options.idle_s, begun)
        report(run, server, taken_s, 1)
    other = run.out / "ranks_two.json"
    if other.exists():
        two = json.loads(other.read_text())
        mine = {M for M, r in run.found["rows"].items() if r["verdict"] == "faster"}
        theirs = {M for M, r in two["rows"].items() if r["verdict"] == "faster" and r["source"] == "learned"}
        times = run.found["learning_s"] / max(0.1, two["learning_s"])
        run.found["speed_up"] = times
        run.check("two ranks tune in less time", times >= 1.7, f"{times:.2f} times ({run.found['learning_s']} s and"
                  f" {two['learning_s']} s); faster rows {len(mine)} and {len(theirs)}, {len(mine & theirs)} at the"
                  " same M")  # fmt: skip


def log_probabilities(server: Server) -> list[list[float]]:
    parameters = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    long = [[(11 * i + 17 * j) % 31000 + 5 for j in range(size)] for i, size in enumerate((24, 200, 700, 1500))]
    found = []
    for prompt in long:
        body = {"input_ids": prompt, "sampling_params": parameters, "return_logprob": True, "logprob_start_len": 0}
        answer = server.post("/generate", body)
        found.append([x[0] for x in answer["meta_info"]["input_token_logprobs"] if x[0] is not None])
    return found


def part_differ(run: Run) -> None:
    """The rows of ``tp`` on rank 0 only, against a server that serves SGLang's own configs on both."""
    ways = {"custom": (), "nccl": ("--disable-custom-all-reduce",), "symmetric": ("--enable-symm-mem",)}
    chosen = {name: flags for name, flags in ways.items() if name in run.options.ways}
    run.check("rows of part tp are there", bool(run.rows()), f"{len(run.rows())} in {run.store}")
    with run.serve("stock", SGLANG_MOE_AUTOTUNE_MODE="off") as server:
        stock = log_probabilities(server)
    for name, flags in chosen.items():
        differ = {"SGLANG_MOE_AUTOTUNE_MODE": "read-only", "RANKS_PROBE_DIFFER": "1"}
        with run.serve(name, *flags, **differ) as server:
            mixed = log_probabilities(server)
            answer = server.generate(prompts(), 8)
            time.sleep(4.0)
            rows = {rank: live.rows for rank, live in sorted(run.live().items())}
        pairs = [pair for one, other in zip(stock, mixed, strict=True) for pair in zip(one, other, strict=True)]
        apart = max(abs(a - b) for a, b in pairs)
        run.found[name] = {"rows": rows, "apart": apart}
        counts = sorted(rows.values())
        differs = len(rows) == 2 and counts[0] == 0 < counts[1]
        run.check(f"{name}: the tables differ", differs, f"rows by rank {rows}")
        finite = all(len(x["output_ids"]) == 8 for x in answer)
        run.check(f"{name}: the same log-probabilities", apart <= TOLERANCE and finite, f"at most {apart:.4f} apart")


def part_ep(run: Run) -> None:
    with run.serve("learns") as server:
        begun = time.monotonic()
        answer = server.generate(prompts(), 8)
        run.check("a request at once", all(len(x["output_ids"]) == 8 for x in answer), f"{len(answer)} answers")
        time.sleep(10.0)
        stop_a_rank(run, server, 1, "rank 1 stopped for 3 s while it tunes")
        taken_s = wait_until_learned(run, run.options.ep_idle_s, begun)
        report(run, server, taken_s, 2)
        shapes = slugs(run)
        local = any(x.startswith("E256-") and "-ep" in x for x in shapes)
        run.check("keyed on local experts, with ids of -1", local, str(shapes))
        again = server.generate(prompts(), 8)
        run.check("requests on learned rows", all(len(x["output_ids"]) == 8 for x in again), "answered")


def slugs(run: Run) -> list[str]:
    listed = [found for found in store.environments(run.store) if found.environment is not None]
    return sorted({shape.slug for found in listed for shape, _ in store.read(found.path).records})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", nargs="+", choices=PARTS, required=True)
    parser.add_argument("--ways", nargs="+", default=["custom", "symmetric"], help="differ: custom nccl symmetric")
    parser.add_argument("--work", type=Path, default=Path("/tmp/moe-autotune-gpu-ranks"))  # noqa: S108 - kept for parts
    parser.add_argument("--idle-s", type=float, default=120.0, help="longest time to learn in parts tp and one")
    parser.add_argument("--ep-idle-s", type=float, default=60.0)
    parser.add_argument("--port", type=int, default=31400)
    parser.add_argument("--compile-processes", type=int, default=6)
    parser.add_argument("flags", nargs="*", help="more server flags, after --")
    options = parser.parse_args()
    good, begun = True, time.monotonic()
    parts = {"tp": part_tp, "differ": part_differ, "two": part_two, "one": part_one, "ep": part_ep}
    for name in PARTS:
        if name not in options.part:
            continue
        run = Run(name, options)
        try:
            parts[name](run)
        finally:
            run.found["checks"] = [list(check) for check in run.checks]
            (run.out / f"ranks_{name}.json").write_text(json.dumps(run.found, indent=1, default=str))
        good = good and all(ok for _, ok, _ in run.checks)
        print(f"--- {name} ended after {time.monotonic() - begun:.0f} s", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
