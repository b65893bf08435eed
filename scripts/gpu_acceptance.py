#!/usr/bin/env python3
"""The main job on a real SGLang server and a real GPU, observed from outside; a table and a JSON file at the end.

    gpu_acceptance.py --out DIR [--idle-s 240] [--experts 256 ...] [-- more server flags]

Run it with an interpreter that has SGLang and this package installed. Three servers, one after the other:
(1) cold, with the plugin: serves at once, learns while idle; (2) without the plugin, on the exported files;
(3) with the plugin and its store. Served kernels are read from SGLang's own profiler in (1) and (3).
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from gpu_server import Model, Server, install, rows_at_start, with_checkout

from sglang_moe_autotune import records, status, store
from sglang_moe_autotune.shapes import GEMMS, KernelConfig, MoeShape

PREFILL_TOKENS, DECODE_BATCH, DECODE_STEPS = 1024, 16, 12


class Run:
    """Folders, environment and findings of one acceptance run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.out: Path = options.out.resolve()
        self.work = Path(tempfile.mkdtemp(prefix="moe-autotune-acceptance-"))
        self.options = options
        self.findings: dict[str, Any] = {}
        self.checks: list[tuple[str, bool, str]] = []
        self.out.mkdir(parents=True, exist_ok=True)
        self.model = Model(options.experts, options.intermediate, options.hidden, options.top_k, options.layers)
        self.folder = self.model.write(self.work / "model")
        self.probe = self.work / "probe"
        install(self.probe, "acceptance_probe", "acceptance_probe")
        self.environ = {
            "PYTHONPATH": os.pathsep.join([str(self.probe), os.environ.get("PYTHONPATH", "")]),
            "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(self.work / "triton")),
            "TRITON_CACHE_MANAGER": "acceptance_probe:LoggingCacheManager",
            "ACCEPTANCE_CACHE_LOG": str(self.work / "cache.log"),
            "ACCEPTANCE_PROBE": str(self.work / "probe.json"),
            "SGLANG_MOE_AUTOTUNE_DIR": str(self.work / "store"),
            "SGLANG_MOE_AUTOTUNE_BUDGET_S": "3600",
            "SGLANG_MOE_AUTOTUNE_DEEP_IDLE_S": "2",
            "SGLANG_MOE_AUTOTUNE_COMPILE_PROCESSES": str(options.compile_processes),
        }

    def check(self, name: str, ok: bool, told: str) -> None:
        self.checks.append((name, ok, told))
        print(f"[{'ok' if ok else 'FAIL'}] {name}: {told}", flush=True)

    def serve(self, name: str, **environ: str) -> Server:
        """Start a server whose name begins with its number."""
        print(f"--- starting server {name}", flush=True)
        flags = tuple(self.options.flags)
        port = self.options.port + int(name[0])
        server = Server(self.folder, port, self.out / f"server_{name}.log", {**self.environ, **environ}, flags)
        self.findings.setdefault("started_s", {})[name] = round(server.started_s, 1)
        print(f"    healthy after {server.started_s:.1f} s", flush=True)
        return server

    def observed(self) -> dict[str, Any]:
        """The probe's latest observation, at most a second old."""
        time.sleep(1.2)
        seen: dict[str, Any] = json.loads((self.work / "probe.json").read_text())
        return seen

    def contents(self) -> records.Contents:
        """What the store holds. Raises SystemExit where it holds not exactly one environment."""
        found = store.environments(self.work / "store")
        if len(found) != 1:
            sys.exit(f"the store holds {len(found)} environments, not one")
        return store.read(found[0].path)

    def live(self) -> status.LiveStatus | None:
        servers = status.read(self.work / "store").servers
        running = [s.live for s in servers if s.presence == "running"]
        return running[0] if running else None


def prompts() -> list[list[int]]:
    return [[(7 * i + 13 * j) % 31000 + 5 for j in range(24)] for i in range(DECODE_BATCH)]


def tokens_of(answer: Any) -> list[list[int]]:
    return [item["output_ids"] for item in (answer if isinstance(answer, list) else [answer])]


def profile(server: Server, folder: Path) -> dict[int, list[dict[str, Any]]]:
    """The fused-MoE kernels that graphs replayed for one prefill and some decode steps, by M."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    long_prompt = [[(11 * j) % 31000 + 5 for j in range(PREFILL_TOKENS)]]
    for M, request, new in ((PREFILL_TOKENS, long_prompt, 1), (DECODE_BATCH, prompts(), DECODE_STEPS)):  # noqa: N806
        server.flush()
        before = set(folder.rglob("*.json.gz"))
        server.post("/start_profile", {"output_dir": str(folder), "activities": ["CPU", "GPU"]})
        server.generate(request, new)
        server.post("/stop_profile", {})
        end = time.monotonic() + 60
        while not (fresh := set(folder.rglob("*.json.gz")) - before) and time.monotonic() < end:
            time.sleep(0.5)
        time.sleep(1.0)
        found[M] = replayed_kernels(fresh.pop()) if fresh else []
    return found


def replayed_kernels(trace: Path) -> list[dict[str, Any]]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    launches = {
        e["args"].get("correlation") for e in events if "args" in e and "GraphLaunch" in str(e.get("name"))
    }
    return [
        {"us": e["dur"], "grid": e["args"]["grid"][0], "shared": e["args"].get("shared memory", 0)}
        for e in events
        if e.get("cat") == "kernel"
        and e["name"].startswith("fused_moe_kernel")
        and e["args"].get("correlation") in launches
    ]


def grid_of(shape: MoeShape, M: int, gemm: str, config: KernelConfig) -> int:  # noqa: N803
    """Blocks of a launch, from SGLang's alignment of ids (``moe_align_block_size``)."""
    pairs, tile = M * shape.top_k, config.BLOCK_SIZE_M
    ids = pairs * tile if pairs < shape.E + 1 else pairs + (shape.E + 1) * (tile - 1)
    columns = shape.w1_shape[1] if gemm == "up" else shape.K
    return -(-ids // tile) * -(-columns // config.BLOCK_SIZE_N)


def wait_until_learned(run: Run, idle_s: float) -> status.LiveStatus:
    begun, last = time.monotonic(), 0.0
    while True:
        time.sleep(2.0)
        live = run.live()
        taken_s = time.monotonic() - begun
        if live is not None and taken_s - last > 15:
            last = taken_s
            counts = live.compile
            print(
                f"    {taken_s:4.0f} s: {live.state} {live.reason} rows {live.rows} queue {len(live.queue)}"
                f" at {live.current} slices {live.slices} gpu {live.gpu_s:.1f} s"
                f" binaries {counts.ready}/{counts.ordered} failed {counts.failed} deferred {len(live.deferred)}",
                flush=True,
            )
        if live is None and taken_s > idle_s:
            raise RuntimeError(f"no scheduler with the plugin has told anything of itself in {taken_s:.0f} s")
        done = live is not None and live.slices > 0 and live.state == "idle" and not live.queue
        if live is not None and (done or taken_s > idle_s):
            run.findings["learning_s"] = round(taken_s, 1)
            run.findings["finished"] = done
            return live


def first_server(run: Run) -> None:
    with run.serve("1_cold") as server:
        begun = time.monotonic()
        answer = tokens_of(server.generate(prompts(), 16))
        served_ms = (time.monotonic() - begun) * 1e3
        run.check("(a) a request at once, on the heuristic", all(len(t) == 16 for t in answer), f"{served_ms:.0f} ms")
        run.findings["tokens_heuristic"] = answer
        ready_unix_s = time.time()
        before = run.observed()
        run.findings["served_heuristic"] = profile(server, run.work / "profile_1")
        threading.Timer(30.0, watch, (run,)).start()
        live = wait_until_learned(run, run.options.idle_s)
        time.sleep(4.0)
        after = run.observed()
        live = run.live() or live
        server.generate(prompts(), 16)
        told = [s.get("moe_autotune") for s in server.get("/server_info").get("internal_states", [])]
        run.findings["server_info"] = told
        run.check("/server_info shows the plugin", any(told), json.dumps(told)[:160])
        log = server.text()
        pids = {before["pid"]}
        report_learning(run, live, before, after, log)
        report_compiles(run, live, pids, ready_unix_s, log)


def config_of(kernel: dict[str, Any]) -> str:
    """A kernel of the device caches in the words of the log."""
    keys = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
    return str(KernelConfig(*(kernel[key] for key in keys)))


def report_learning(
    run: Run, live: status.LiveStatus, before: dict[str, Any], after: dict[str, Any], log: str
) -> None:
    contents = run.contents()
    rows = sorted(contents.records.values(), key=lambda r: r.M)
    faster = [r for r in rows if r.verdict == "faster"]
    run.findings["rows"] = [
        {
            "M": r.M, "verdict": r.verdict, "baseline_us": r.evidence.baseline_us, "chosen_us": r.evidence.chosen_us,
            "gain": r.evidence.gain, "gain_low": r.evidence.gain_low, "gain_high": r.evidence.gain_high,
            "samples": r.evidence.samples, "measured": r.evidence.measured, "gpu_s": r.evidence.gpu_s,
            "max_error": r.evidence.max_error, "tolerance": r.evidence.tolerance,
            "up": r.pair.up.to_dict(), "down": r.pair.down.to_dict(), "baseline": r.baseline.up.to_dict(),
        }
        for r in rows
    ]  # fmt: skip
    run.findings["deferred"] = dict(live.deferred)
    run.findings["gpu_s"] = live.gpu_s
    run.findings["slices"] = live.slices
    run.findings["watch"] = watched = {
        "passes_over": live.passes_over, "pauses": live.pauses, "pass_longest_us": round(live.pass_longest_us),
        "pass_p99_us": live.pass_p99_us,
    }  # fmt: skip
    run.check("tuning never paused itself", live.pauses == 0, str(watched))
    counts = live.compile
    run.findings["compile"] = {"ordered": counts.ordered, "ready": counts.ready, "failed": counts.failed}
    run.check("(b) rows learned for captured M", bool(faster), f"{len(faster)} faster, {len(rows) - len(faster)} kept,"
              f" {len(live.deferred)} deferred, {len(live.queue)} left in {run.findings['learning_s']} s")  # fmt: skip
    known = {k["hash"] for k in before["kernels"]}
    fresh = [k for k in after["kernels"] if k["hash"] not in known]
    # A row can be replaced by a better one later: every pair that was ever adopted is in the log.
    pairs = [x.partition("%), ")[2].partition(" instead of ")[0] for x in log.splitlines() if " learned " in x]
    adopted = {text for pair in pairs for text in pair.split(" / ")}
    strangers = [k for k in fresh if config_of(k) not in adopted]
    run.findings["device_cache"] = {"before": len(known), "fresh": len(fresh), "not_learned": strangers}
    run.check("(g) the tuner's launches add nothing to the device caches but adopted rows", not strangers,
              f"{len(known)} before, {len(fresh)} adopted, {len(strangers)} others")  # fmt: skip
    run.findings["memory"] = {"free_before": before["free"], "free_after": after["free"], "total": before["total"]}
    lost_mib = (before["free"] - after["free"]) / 2**20
    run.check("(c) device memory", True, f"{before['free'] >> 20} MiB free before, {lost_mib:.0f} MiB less after")


def matches(config: KernelConfig, kernel: dict[str, Any]) -> bool:
    keys = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M")
    options = (config.num_warps or 4, config.num_stages or 3)
    return all(kernel[k] == getattr(config, k) for k in keys) and options == (kernel["num_warps"], kernel["num_stages"])


def report_compiles(run: Run, live: status.LiveStatus, pids: set[int], ready_unix_s: float, log: str) -> None:
    lines = [json.loads(x) for x in (run.work / "cache.log").read_text().splitlines()]
    # SGLang's own first requests may compile kernels that capture did not need; tuning's begin with the idle time.
    mine = [x for x in lines if x[1] in pids and x[0] > ready_unix_s]
    fused = [x for x in mine if "fused_moe" in x[2] or "launcher" in x[2]]
    other = collections.Counter(x[2] for x in mine if x not in fused)
    elsewhere = {x[3] for x in lines if x[1] not in pids and x[2].endswith(".cubin")}
    run.findings["compiles"] = {
        "listener_for_tuning": live.serving_compiles_for_tuning,
        "cache_files_of_the_server_after_start": len(mine),
        "of_them_fused_moe_or_launcher": len(fused),
        "others": dict(other),
        "binaries_made_by_the_compile_process": len(elsewhere),
    }
    run.check("(c) 0 compiles for tuning in the serving process", live.serving_compiles_for_tuning == 0 and not fused,
              f"listener {live.serving_compiles_for_tuning}, fused-MoE or launcher files {len(fused)};"
              f" {len(elsewhere)} binaries made in the compile process")  # fmt: skip
    errors = [x for x in log.splitlines() if "MoE autotune failed" in x or "Traceback" in x]
    run.check("(a) no error in the server's log", not errors, "; ".join(errors[:3]) or "none")


def watch(run: Run) -> None:
    """What a person sees who watches the server: some seconds of ``status --watch``, kept beside the figures."""
    command = [sys.executable, "-m", "sglang_moe_autotune.cli", "status", "--watch", "--dir", str(run.work / "store")]
    with (run.out / "status_watch.txt").open("wb") as out:
        environ = with_checkout({**os.environ})
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ)
        time.sleep(6.0)
        process.send_signal(signal.SIGINT)
        code = process.wait(20)
    shown = (run.out / "status_watch.txt").read_text(errors="replace")
    told = f"code {code}, {len(shown)} bytes"
    run.check("status --watch beside the live server", code == 0 and "tuning" in shown, told)


def later_servers(run: Run) -> None:
    """Export, then a stock server on the files, then a warm one with the plugin."""
    export = run.work / "export"
    command = [sys.executable, "-m", "sglang_moe_autotune.cli", "export", str(export), "--dir", str(run.work / "store")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=with_checkout({**os.environ}))
    run.check("(d) export", done.returncode == 0, (done.stderr or done.stdout).strip()[-300:])
    for file in export.rglob("*.json"):
        shutil.copy(file, run.out / f"export_{'down' if file.stem.endswith('_down') else 'up'}.json")
    stock = {"SGLANG_PLUGINS": "acceptance_probe,lively_weights", "SGLANG_MOE_CONFIG_DIR": str(export)}
    with run.serve("2_exported", **stock) as server:
        run.findings["tokens_exported"] = tokens_of(server.generate(prompts(), 16))
        log = server.text()
    used, plugged = log.count("Using MoE kernel config from"), "MoE autotune" in log
    run.check("(d) stock SGLang reads the export", used > 0 and not plugged, f"{used} x 'Using MoE kernel config from'")
    third_server(run)


def third_server(run: Run) -> None:
    with run.serve("3_warm", SGLANG_MOE_AUTOTUNE_MODE="read-only") as server:
        run.findings["tokens_learned"] = tokens_of(server.generate(prompts(), 16))
        run.findings["served_learned"] = profile(server, run.work / "profile_3")
        seen, log = run.observed(), server.text()
    started = rows_at_start(log)
    told = f"{started[0]} rows at the start" if started else "no start line in the log"
    run.check("(e) answers from the store before capture", started.get(0, 0) > 0, told)
    contents = run.contents()
    shape = next(iter({s for s, _ in contents.records}))
    table = []
    for M in (DECODE_BATCH, PREFILL_TOKENS):  # noqa: N806
        record = contents.records.get((shape, M))
        if record is None:
            run.check(f"(f) replayed kernels at M={M}", False, "no record at this M")
            continue
        table += served_rows(run, shape, M, record, seen["kernels"])
    run.findings["served"] = table


def served_rows(
    run: Run, shape: MoeShape, M: int, record: records.Record, kernels: list[dict[str, Any]]  # noqa: N803
) -> list[dict[str, Any]]:
    """Compare grid and shared memory of what the graphs replayed with the learned config, and the durations."""
    found = []
    before, after = run.findings["served_heuristic"][M], run.findings["served_learned"][M]
    for gemm in GEMMS:
        config, base = record.pair.of(gemm), record.baseline.of(gemm)
        grid = grid_of(shape, M, gemm, config)
        routed = gemm == "down"
        shared = {k["shared"] for k in kernels if matches(config, k) and bool(k["MUL_ROUTED_WEIGHT"]) == routed}
        now = [k for k in after if k["grid"] == grid and k["shared"] in shared]
        old = [k for k in before if k["grid"] == grid_of(shape, M, gemm, base)]
        if now and old and grid_of(shape, M, "up", config) != grid_of(shape, M, "down", config):
            found.append({
                "M": M, "gemm": gemm, "grid": grid, "shared": sorted(shared), "replays": len(now),
                "heuristic_us": statistics.median(k["us"] for k in old),
                "learned_us": statistics.median(k["us"] for k in now),
            })  # fmt: skip
        run.check(f"(f) replayed {gemm} kernel at M={M} has the learned grid and shared memory", bool(now),
                  f"grid {grid}, shared {sorted(shared)}: {len(now)} of {len(after)} replays")  # fmt: skip
    return found


def machine() -> dict[str, str]:
    """What the figures hold for. Ends the process where there is no GPU."""
    import torch  # noqa: PLC0415 - only for the versions
    import triton  # noqa: PLC0415 - as above

    from sglang_moe_autotune import releases  # noqa: PLC0415 - as above

    if not torch.cuda.is_available():
        sys.exit("no GPU is visible to this process: see nvidia-smi and CUDA_VISIBLE_DEVICES")
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": releases.driver_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "sglang": releases.version(),
        "python": sys.version.split()[0],
    }


def print_table(run: Run) -> None:
    print(f"\n{run.findings['machine']}")
    print(f"{'M':>6} {'heuristic us':>13} {'learned us':>11} {'gain':>7} {'interval':>16}  configs up / down")
    for r in run.findings.get("rows", []):
        up, down = KernelConfig.from_dict(r["up"]), KernelConfig.from_dict(r["down"])
        print(f"{r['M']:>6} {r['baseline_us']:>13.1f} {r['chosen_us']:>11.1f} {100 * r['gain']:>6.1f}%"
              f" [{100 * r['gain_low']:>5.1f}, {100 * r['gain_high']:>5.1f}]%  {up} / {down}")  # fmt: skip
    for r in run.findings.get("served", []):
        print(f"served M={r['M']} {r['gemm']}: heuristic {r['heuristic_us']:.1f} us, learned {r['learned_us']:.1f} us")
    found = run.findings
    print(f"starts: {found['started_s']}; GPU seconds {found.get('gpu_s')}; {found.get('compile')}")
    for name, ok, told in run.checks:
        print(f"[{'ok' if ok else 'FAIL'}] {name}: {told}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--idle-s", type=float, default=240.0, help="longest idle time of the first server")
    parser.add_argument("--port", type=int, default=31200)
    parser.add_argument("--compile-processes", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--only-first", action="store_true", help="stop after the first server")
    for name, value in Model()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("flags", nargs="*", help="more server flags, after --")
    run = Run(parser.parse_args())
    run.findings["machine"] = machine()
    try:
        first_server(run)
        if not run.options.only_first:
            later_servers(run)
    finally:
        run.findings["checks"] = [list(c) for c in run.checks]
        (run.out / "acceptance.json").write_text(json.dumps(run.findings, indent=1, default=str))
        print_table(run)
        shutil.rmtree(run.work, ignore_errors=True)
    return 0 if run.checks and all(ok for _, ok, _ in run.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
