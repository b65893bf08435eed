#!/usr/bin/env python3
"""Graphs captured again inside a live server, on a real GPU, observed from outside; a table and a JSON file at the end.

    gpu_recapture.py --out DIR [--hybrid] [--idle-s 75] [--rounds 4] [-- more server flags]

Run it with an interpreter that has SGLang and this package; about five minutes. One server with the plugin and SGLang's
radix cache learns a few captured sizes and captures their graphs again by itself; then graphs are captured again on
command (many times, beside requests, with planted faults, without clearing). A second one starts warm. The
log-probabilities of a fixed set of requests behind one long cached prefix say whether the cache was hurt. ``--hybrid``:
a Qwen3-Next of gated-delta-net layers instead of a Qwen3-MoE. ``scripts/plot_life.py`` draws the latencies.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import gpu_acceptance
import gpu_answers
import msgspec
from gpu_answers import agree, difference, told, unchanged
from gpu_parts import BUDGET_S, Parts, end_on_terminate
from gpu_server import Model, Server, install, rows_at_start

from sglang_moe_autotune import records, status
from sglang_moe_autotune.shapes import GEMMS

if TYPE_CHECKING:
    from gpu_answers import Answer

DECODE_SIZES, PREFILL_SIZES = (1, 8, 16), (128, 512, 1024, 2048)
EAGER_TOKENS = 3000
PREFIX_TOKENS, SUFFIX_TOKENS, FIXED = 1500, 100, 8
LIFE = (("prefill 1024, graph", 1024, 10), ("prefill 3000, eager", EAGER_TOKENS, 6))
DECODE_STEPS = 48
FLAGS = (
    *("--cuda-graph-bs-decode", *map(str, DECODE_SIZES)),
    *("--cuda-graph-bs-prefill", *map(str, PREFILL_SIZES)),
    *("--chunked-prefill-size", "4096"),
)


class HybridModel(NamedTuple):
    """A Qwen3-Next of few layers, every fourth with full attention."""

    experts: int = 128
    intermediate: int = 512
    hidden: int = 2048
    top_k: int = 8
    layers: int = 8

    def write(self, folder: Path) -> Path:
        config = {
            "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "torch_dtype": "bfloat16",
            "vocab_size": 32000, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": self.hidden,
            "num_hidden_layers": self.layers, "full_attention_interval": 4, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256, "hidden_act": "silu", "intermediate_size": 5120,
            "moe_intermediate_size": self.intermediate, "shared_expert_intermediate_size": self.intermediate,
            "num_experts": self.experts, "num_experts_per_tok": self.top_k, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "partial_rotary_factor": 0.25,
            "max_position_embeddings": 40960, "rope_theta": 10000000, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
            "tie_word_embeddings": False, "attention_bias": False,
        }  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        return folder


class Run(gpu_acceptance.Run):
    """The folders and checks of an acceptance run, with the driver inside the server and the life's latencies."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        if options.hybrid:
            self.folder = HybridModel().write(self.work / "hybrid")
        self.commands = self.work / "commands"
        self.commands.mkdir()
        install(self.probe, "recapture_probe", "recapture_probe")
        shutil.rmtree(self.probe / "acceptance_probe-0.dist-info")  # its thread asks the device for its memory
        del self.environ["TRITON_CACHE_MANAGER"]
        self.environ["RECAPTURE_PROBE"] = str(self.commands)
        self.environ["SGLANG_MOE_AUTOTUNE_RECAPTURE"] = "idle"
        self.environ["SGLANG_MOE_AUTOTUNE_MAX_M"] = "4096"
        self.life: list[dict[str, Any]] = []
        self.answers: dict[str, list[Answer]] = {}
        """to the fixed set, by when it was asked"""
        self.noise: dict[str, float] = {}
        """between two times that the fixed set was asked of the same server"""
        self.stock: dict[str, float] = {}
        """between the fixed set in other batches, on SGLang's own configs"""
        self.kernels: dict[int, list[dict[str, Any]]] = {}
        self.free: list[int] = []
        self.random = random.Random(7)  # noqa: S311 - the same prompts each time

    def command(self, wait_s: float = 90.0, **asked: Any) -> dict[str, Any]:
        """What the driver made of a command. Raises TimeoutError."""
        result = self.commands / "result.json"
        result.unlink(missing_ok=True)
        (self.commands / "command.part").write_text(json.dumps(asked))
        (self.commands / "command.part").replace(self.commands / "command.json")
        end = time.monotonic() + wait_s
        while not result.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"no answer to {asked} in {wait_s:.0f} s")
            time.sleep(0.02)
        found: dict[str, Any] = json.loads(result.read_text())
        return found

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(5, 31000) for _ in range(count)]

    def burst(self, server: Server, phase: str) -> None:
        """Latencies of prefill and decode as a client sees them; each prompt is new, so that nothing is cached."""
        for kind, count, turns in LIFE:
            for _ in range(turns):
                self.timed(phase, kind, 1, server, [self.tokens(count)], 1)
        for _ in range(4):
            prompts = [self.tokens(24) for _ in range(max(DECODE_SIZES))]
            kind = f"decode step, batch of {max(DECODE_SIZES)}, graph"
            self.timed(phase, kind, DECODE_STEPS, server, prompts, DECODE_STEPS)

    def timed(self, phase: str, kind: str, divisor: int, server: Server, prompts: list[list[int]], new: int) -> None:
        begun_s = time.perf_counter()
        server.generate(prompts, new)
        ms = (time.perf_counter() - begun_s) * 1e3 / divisor
        self.life.append({"phase": phase, "kind": kind, "unix_s": time.time(), "ms": ms})

    def free_mib(self) -> int:
        """Free memory of the device by the driver's own count, asked from this process."""
        import torch  # noqa: PLC0415 - makes a context on the device: not before the server has its memory

        return int(torch.cuda.mem_get_info()[0] >> 20)

    def graphs(self) -> status.GraphCounts:
        live = self.live()
        return live.graphs if live is not None else status.GraphCounts()


def the_prefix() -> list[int]:
    return [(17 * j + 3) % 31000 + 5 for j in range(PREFIX_TOKENS)]


def cache_prefix(server: Server, *lengths: int) -> None:
    """Cache the prefix and the suffixes. Alone at first: a hybrid model keeps its state only where a request ended.

    lengths: of parts of the prefix that are cached before it, each by a request of its own.
    """
    for length in (*lengths, PREFIX_TOKENS):
        server.generate([the_prefix()[:length]], 1)


def fixed_set(server: Server, *, together: bool = False) -> list[Answer]:
    """Log-probabilities of suffixes behind one long prefix, and of what is generated after them."""
    suffixes = [[(29 * j + 101 * i) % 31000 + 5 for j in range(SUFFIX_TOKENS)] for i in range(FIXED)]
    prompts = [the_prefix() + suffix for suffix in suffixes]
    return gpu_answers.ask(server, prompts, 12, PREFIX_TOKENS, together=together)


def learn(run: Run, server: Server, idle_s: float) -> None:
    """Let the server learn between single requests that keep it from capturing: it may only do so 10 s after one."""
    end, last = time.monotonic() + idle_s, 0.0
    while time.monotonic() < end:
        if time.monotonic() - last > 5.0:
            server.generate([run.tokens(20)], 2)
            last = time.monotonic()
        live = run.live()
        if live is not None and live.slices > 0 and live.state == "idle" and not live.queue:
            break
        time.sleep(1.0)
    server.generate([run.tokens(20)], 2)
    # No new row from here on: each one would make its graphs wait again until it has stood for a while.
    server.post("/set_internal_state", {"server_args": {"moe_autotune": 1}})
    live = run.live()
    if live is not None:
        run.findings["tuning"] = {"passes_over": live.passes_over, "pauses": live.pauses,
                                  "pass_longest_us": live.pass_longest_us, "pass_p99_us": live.pass_p99_us,
                                  "slices": live.slices, "gpu_s": live.gpu_s, "left": len(live.queue)}  # fmt: skip
    contents = run.contents()
    rows = sorted(contents.records.values(), key=lambda r: r.M)
    run.findings["rows"] = [
        {"M": r.M, "verdict": r.verdict, "gain": r.evidence.gain, "pair": str(r.pair), "baseline": str(r.baseline)}
        for r in rows
    ]
    faster = [r.M for r in rows if r.verdict == "faster"]
    run.check("rows learned for captured sizes", bool({*DECODE_SIZES, *PREFILL_SIZES} & {*faster}), f"M = {faster}")
    early = run.graphs().outcomes
    run.check("no capture within 10 s of a request", not early, f"while requests came every 5 s: {early or 'none'}")


def wait_for_graphs(run: Run, wait_s: float) -> None:
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < wait_s:
        graphs = run.graphs()
        if graphs.outcomes.get("recaptured", 0) and not graphs.stale:
            break
        time.sleep(0.5)
    graphs = run.graphs()
    run.findings["recaptured_after_s"] = round(time.monotonic() - begun_s, 1)
    run.findings["graphs"] = msgspec.to_builtins(graphs)
    done = graphs.outcomes.get("recaptured", 0)
    now = f"{graphs.outcomes}, stale {graphs.stale}, put off {graphs.put_off}, {graphs.recapture} {graphs.reason}"
    run.check("stale graphs were captured again by the server itself", done > 0 and not graphs.stale, now)


def served(run: Run, name: str, found: dict[int, list[dict[str, Any]]], *, learned: bool) -> None:
    """Do the replayed kernels have the grid of the learned pair (or of SGLang's own)?"""
    contents = run.contents()
    shape = next((s for s, _ in contents.records), None)
    if shape is None:
        run.check(f"{name}: graphs replay the kernels", False, "no row was learned")
        return
    for M, kernels in found.items():  # noqa: N806
        record: records.Record | None = contents.records.get((shape, M))
        if record is None or record.verdict != "faster":
            continue
        pair, other = (record.pair, record.baseline) if learned else (record.baseline, record.pair)
        wanted = {gemm: gpu_acceptance.grid_of(shape, M, gemm, pair.of(gemm)) for gemm in GEMMS}
        unwanted = {gpu_acceptance.grid_of(shape, M, gemm, other.of(gemm)) for gemm in GEMMS} - {*wanted.values()}
        us = {gemm: [k["us"] for k in kernels if k["grid"] == grid] for gemm, grid in wanted.items()}
        wrong = [k for k in kernels if k["grid"] in unwanted]
        median_us = {gemm: round(statistics.median(found), 1) for gemm, found in us.items() if found}
        run.findings.setdefault("replayed", []).append({"when": name, "M": M, "grids": wanted, "us": median_us})
        words = f"grids {wanted}, median us {median_us}; {len(wrong)} of {len(kernels)} with the other grids"
        whose = "learned" if learned else "stock"
        good = len(median_us) == len(GEMMS) and not wrong
        run.check(f"{name}: graphs replay the {whose} kernels at M={M}", good, words)


def first_server(run: Run, parts: Parts) -> None:
    with run.serve("1_learning") as server:
        parts.run("heuristic", lambda: heuristic(run, server))
        parts.run("learning", lambda: learning(run, server), need_s=run.options.idle_s + 60)
        parts.run("captured by itself", lambda: by_itself(run, server), need_s=75)
        parts.run("captured on command", lambda: on_command(run, server), need_s=30)
        parts.run("beside requests", lambda: beside_requests(run, server), need_s=30)
        parts.run("faults", lambda: faults(run, server), need_s=30)
        parts.run("replayed", lambda: replayed(run, server), need_s=40)
        parts.run("without clearing", lambda: uncleared(run, server), need_s=20)
        log = server.text()
    errors = [x for x in log.splitlines() if "MoE autotune failed" in x or "MoE autotune could not" in x]
    run.check("no fault of the plugin in the server's log", not errors, "; ".join(errors[:3]) or "none")


def heuristic(run: Run, server: Server) -> None:
    """SGLang's own configs: latencies, kernels, and answers to the fixed set, asked in several ways."""
    run.burst(server, "heuristic")
    cache_prefix(server)
    fixed_set(server)
    alone, again = fixed_set(server), fixed_set(server)
    batch = fixed_set(server, together=True)
    run.answers["stock"] = alone
    run.noise, run.stock = difference(alone, again), difference(alone, batch)
    run.findings["log_probabilities"] = {"same run twice": run.noise, "stock, alone and in a batch": run.stock}
    cached = min(x["cached"] for x in alone)
    run.check("the shared prefix is served from the cache", cached >= PREFIX_TOKENS // 2, f"{cached} tokens cached")
    run.kernels = gpu_acceptance.profile(server, run.work / "profile_stock")
    cache_prefix(server)  # profiling flushed the cache


def learning(run: Run, server: Server) -> None:
    learn(run, server, run.options.idle_s)
    run.burst(server, "tuned, graphs as before")
    served(run, "before", run.kernels, learned=False)
    run.answers["learned"] = fixed_set(server)
    run.free = [run.free_mib()]


def by_itself(run: Run, server: Server) -> None:
    """The plugin's own captures, in idle time. Before them graphs serve as at the start; after them other tiles sum in
    another order, as other batches do."""
    wait_for_graphs(run, 70.0)
    run.free.append(run.free_mib())
    run.answers["captured"] = fixed_set(server)
    run.burst(server, "re-captured")
    unlearned = difference(run.answers["stock"], run.answers["learned"])
    learned = difference(run.answers["learned"], run.answers["captured"])
    run.findings["log_probabilities"] |= {"before and after learning": unlearned, "before and after capture": learned}
    run.check("learning changes no answer before the captures", unchanged(unlearned, run.noise), told(unlearned))
    run.check("log-probabilities before and after the captures agree as two stock runs do",
              agree(learned, run.stock, run.noise), f"{told(learned)}; stock {told(run.stock)}")  # fmt: skip
    cached = [min(x["cached"] for x in run.answers[name]) for name in ("learned", "captured")]
    run.check("the same prefix is continued from the cache", cached[0] == cached[1] > 0, f"{cached} tokens cached")


def on_command(run: Run, server: Server) -> None:
    """Every size, several times over, with the same configs: not a bit of an answer may change, and no memory go."""
    reference = fixed_set(server)
    run.answers["reference"] = reference
    captures: list[dict[str, Any]] = []
    for _ in range(run.options.rounds):
        captures += run.command(count=1)["captures"]
        run.free.append(run.free_mib())
    failed = [c for c in captures if c["reason"]]
    pauses: dict[str, list[float]] = {}
    for capture in captures:
        pauses.setdefault(capture["size"], []).append(capture["ms"])
    run.findings["pauses_ms"] = {size: [round(ms, 1) for ms in all_ms] for size, all_ms in pauses.items()}
    run.findings["free_mib"] = run.free
    run.check("every graph captured again on command", bool(captures) and not failed,
              f"{len(captures)} captures of {len(pauses)} sizes; failed: {failed[:2]}")  # fmt: skip
    lost = [earlier - later for earlier, later in itertools.pairwise(run.free)]
    run.check("device memory by the driver's count", lost[-1] <= 2, f"MiB lost at each turn: {lost}, free {run.free}")
    found = difference(reference, fixed_set(server))
    run.findings["log_probabilities"]["same configs, captured again"] = found
    run.check("captures with the same configs change no answer", unchanged(found, run.noise), told(found))


def beside_requests(run: Run, server: Server) -> None:
    """How long a request waits that arrives while the longest graphs are captured."""

    def latencies(stop: threading.Event, least: int) -> list[float]:
        found: list[float] = []
        while not stop.is_set() or len(found) < least:
            begun_s = time.perf_counter()
            server.generate([run.tokens(20)], 1)
            found.append((time.perf_counter() - begun_s) * 1e3)
            time.sleep(0.02)
        return found

    over = threading.Event()
    over.set()
    quiet = latencies(over, 40)
    over.clear()
    result: dict[str, Any] = {}

    def capture() -> None:
        try:
            result.update(run.command(count=25, sizes=[f"prefill {max(PREFILL_SIZES)}"]))
        finally:
            over.set()

    thread = threading.Thread(target=capture)
    thread.start()
    busy = latencies(over, 1)
    thread.join()
    if not result.get("captures"):
        raise RuntimeError(f"nothing was captured beside requests: {result}")
    longest = max(c["ms"] for c in result["captures"])
    added = max(busy) - statistics.median(quiet)
    run.findings["beside_requests"] = {"quiet_ms": quiet, "busy_ms": busy, "longest_capture_ms": longest}
    run.check("a request waits for one capture at most", added <= longest + 20,
              f"{len(busy)} requests: at most {added:.0f} ms more than the median of {statistics.median(quiet):.1f} ms;"
              f" the longest capture took {longest:.0f} ms")  # fmt: skip


def faults(run: Run, server: Server) -> None:
    sizes = [f"decode {max(DECODE_SIZES)}", "prefill 128"]
    reference = fixed_set(server)
    for fault in ("warm-up", "capture"):
        failed = run.command(sizes=sizes, fault=fault)["captures"]
        run.findings.setdefault("faults_planted", []).extend(failed)
        found = difference(reference, fixed_set(server))
        planted = [c for c in failed if "planted" in c["reason"]]
        run.check(f"a fault in the {fault} keeps the server and the old graphs",
                  len(planted) == len(sizes) and unchanged(found, run.noise), told(found))  # fmt: skip
    healed = run.command(sizes=sizes)["captures"]
    run.check("and the same graphs are captured afterwards", not any(c["reason"] for c in healed), f"{healed}"[:200])


def replayed(run: Run, server: Server) -> None:
    served(run, "after", gpu_acceptance.profile(server, run.work / "profile_learned"), learned=True)


def uncleared(run: Run, server: Server) -> None:
    """The trap, shown: without clearing, a capture writes into the slots of the last batch, which the cache holds.

    The last batch is the second half of the prefix, behind a first half that the cache holds: a capture computes it
    without the first half, and writes other keys and values. (All of the prefix would come out as it was.)
    """
    found = {}
    for name, clear in (("first", True), ("again", True), ("uncleared", False)):
        server.flush()
        cache_prefix(server, PREFIX_TOKENS // 2)
        run.command(sizes=[f"prefill {max(PREFILL_SIZES)}"], clear=clear)
        found[name] = fixed_set(server)
    cleared, hurt = difference(found["first"], found["again"]), difference(found["first"], found["uncleared"])
    run.findings["log_probabilities"] |= {"captured with clearing": cleared, "captured without clearing": hurt}
    run.check("a capture right behind a batch changes no answer", unchanged(cleared, run.noise), told(cleared))
    run.check("the fault that clearing prevents would have been seen", not agree(hurt, run.stock, cleared), told(hurt))


def second_server(run: Run) -> None:
    with run.serve("2_restarted", SGLANG_MOE_AUTOTUNE_MODE="read-only") as server:
        run.burst(server, "restarted")
        rows = rows_at_start(server.text())
    run.check("the restarted server begins with the learned rows", rows.get(0, 0) > 0, f"rows by rank {rows}")


def medians(life: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Median latency by kind and phase."""
    found: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(x["kind"] for x in life):
        phases = dict.fromkeys(x["phase"] for x in life)
        found[kind] = {
            phase: round(statistics.median([x["ms"] for x in life if x["kind"] == kind and x["phase"] == phase]), 3)
            for phase in phases
            if any(x["kind"] == kind and x["phase"] == phase for x in life)
        }
    return found


def print_table(run: Run) -> None:
    print(f"\n{run.findings.get('machine')}")
    for size, pauses in run.findings.get("pauses_ms", {}).items():
        print(f"pause of {size:>14}: median {statistics.median(pauses):6.1f} ms, longest {max(pauses):6.1f} ms")
    print(f"pauses of the server's own captures: {run.findings.get('graphs', {}).get('pause_ms')}")
    for kind, phases in run.findings.get("life_medians_ms", {}).items():
        print(f"{kind}: " + ", ".join(f"{phase} {ms:.2f} ms" for phase, ms in phases.items()))
    for name, found in run.findings.get("log_probabilities", {}).items():
        print(f"log-probabilities, {name}: {told(found)}")
    print(f"free MiB: {run.findings.get('free_mib')}; starts: {run.findings.get('started_s')}")
    for name, ok, words in run.checks:
        print(f"[{'ok' if ok else 'FAIL'}] {name}: {words}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--hybrid", action="store_true", help="a Qwen3-Next with gated-delta-net layers")
    parser.add_argument("--idle-s", type=float, default=75.0, help="longest time for learning")
    parser.add_argument("--rounds", type=int, default=4, help="times that every graph is captured again on command")
    parser.add_argument("--port", type=int, default=31300)
    parser.add_argument("--compile-processes", type=int, default=12)
    for name, value in Model(layers=12)._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("flags", nargs="*", help="more server flags, after --")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="parts that cannot end in time are left out")
    options = parser.parse_args()
    options.flags = [*FLAGS, *options.flags]
    end_on_terminate()
    run = Run(options)
    parts = Parts(run.out / f"recapture{'_hybrid' if options.hybrid else ''}.json", options.budget_s, run.findings)
    run.findings |= {"life": run.life, "checks": run.checks, "flags": options.flags}
    try:
        parts.run("first server", lambda: first_server(run, parts))
        parts.run("restarted", lambda: second_server(run), need_s=100)
        parts.run("machine", lambda: run.findings.update(machine=gpu_acceptance.machine()))
    finally:
        run.findings["life_medians_ms"] = medians(run.life)
        parts.write()
        print_table(run)
        shutil.rmtree(run.work, ignore_errors=True)
    return 0 if run.checks and all(ok for _, ok, _ in run.checks) and not parts.failed else 1


if __name__ == "__main__":
    sys.exit(main())
