#!/usr/bin/env python3
"""The search on a real GPU: a live server with two unlike shapes, what it chose against the best there is, and whether
it can be fooled.

    gpu_search.py --out DIR [--part live,regret,noise,script] [--landscapes FILE ...] [--idle-s 200] [-- server flags]

``live``: a server whose layers have two shapes in turn tunes both while idle. ``regret``: for both, the fastest
candidates of the recorded landscapes and what the server chose are timed again, side by side. ``noise``: one config
under two names, a thousand decisions with pauses in which the clocks fall. ``script``: what SGLang's tuning script does
with one candidate, timed. Run it with an interpreter that has SGLang and this package.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import sys
import time
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any

import gpu_acceptance
import record_landscape
from gpu_acceptance import Run, wait_until_learned
from gpu_server import Model

from sglang_moe_autotune import landscape, machine, records, store
from sglang_moe_autotune.decision import PairedTest
from sglang_moe_autotune.errand import Errand
from sglang_moe_autotune.job import JobOptions
from sglang_moe_autotune.search_space import filled
from sglang_moe_autotune.shapes import GEMMS, ConfigPair, Gemm, KernelConfig, MoeShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_moe_autotune.bench import Bench

PARTS = ("live", "regret", "noise", "script")
MODEL = Model(256, 256, 4096, 8, 4)
OTHER = (8, 7168, 2)
FASTEST = ((32, 12), (10, 48))
"""of each GEMM: how many of a landscape's fastest are timed again, with how many samples"""
PAUSE_S = 0.3


def live(run: Run) -> None:
    """Both shapes of the mixed model, learned by one server."""
    info = run.probe / "mixed_model-0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(gpu_acceptance.HERE / "mixed_model.py", run.probe)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mixed-model\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nmixed_model = mixed_model:register\n")
    run.environ["MIXED_MODEL"] = ",".join(map(str, OTHER))
    with run.serve("1_mixed") as server:
        server.generate(gpu_acceptance.prompts(), 8)
        told = wait_until_learned(run, run.options.idle_s)
        time.sleep(4.0)
        log = server.text()
    shutil.copytree(run.work / "store", run.out / "store", dirs_exist_ok=True)
    rows = run.contents().records.values()
    for shape in sorted({r.shape for r in rows}, key=lambda s: s.slug):
        mine = [r for r in rows if r.shape == shape]
        faster = [r for r in mine if r.verdict == "faster"]
        winners = {c for r in faster for c in (r.pair.up, r.pair.down)}
        spent_s = sum(r.evidence.gpu_s for r in mine)
        summary = {
            "M": len(mine), "faster": len(faster), "gpu_s": spent_s, "distinct_winners": len(winners),
            "gain_geomean": 1 - geometric_mean(1 - r.evidence.gain for r in mine) if mine else 0.0,
        }  # fmt: skip
        run.findings.setdefault("learned", {})[shape.slug] = summary
        run.check(f"{shape.slug} tuned live", bool(faster), json.dumps(summary))
    run.findings["compile"] = {"ordered": told.compile.ordered, "failed": told.compile.failed}
    run.findings["gpu_s"] = told.gpu_s
    run.check("no fault in the server's log", "Traceback" not in log, f"{log.count('Traceback')} tracebacks")
    run.check("nothing compiled in the server", told.serving_compiles_for_tuning == 0, "by the listener")


def stored(run: Run) -> dict[tuple[MoeShape, int], records.Record]:
    found = [e.path for e in store.environments(run.out / "store") if e.environment]
    return {k: r for path in found for k, r in store.read(path).records.items()}


class Bed:
    """This GPU with made-up weights, without a server."""

    def __init__(self, run: Run) -> None:
        order = Errand("verify", (), None, slice_us=500.0, compile_processes=run.options.compile_processes)
        self.machine = machine.gpu_machine(order)
        self._held: MoeShape | None = None

    def open(self, shape: MoeShape, m: int) -> tuple[ConfigPair, Bench]:
        if shape != self._held:
            if reason := self.machine.load(shape):
                sys.exit(reason)
            self._held = shape
        baseline = self.machine.baseline(shape, m)
        if baseline is None:
            sys.exit(f"{shape.slug} at M={m}: SGLang's own answer is no pair of plain configs")
        bench = self.machine.provider.open(shape, m, baseline)
        if isinstance(bench, str):
            sys.exit(f"{shape.slug} at M={m}: {bench}")
        while not bench.prepare():
            pass
        return baseline, bench


def retimed(bench: Bench, wanted: dict[Gemm, list[KernelConfig]], count: int) -> dict[tuple[Gemm, KernelConfig], float]:
    """The ratio to SGLang's own config of each launch, from fresh samples."""
    found = {}
    for gemm in GEMMS:
        for config in wanted[gemm]:
            while (state := bench.readiness(gemm, config)) == "waiting":
                time.sleep(0.005)
            samples = record_landscape.measure(bench, gemm, config, count) if state == "ready" else []
            if samples:
                found[gemm, config] = math.exp(median(map(record_landscape.log_ratio, samples)))
    return found


def regret(run: Run, bed: Bed, files: Sequence[Path]) -> None:
    """What was chosen against the fastest pair, both timed in this run."""
    rows = stored(run)
    for path in files:
        recorded = landscape.load(path)
        ms = [m for m in recorded.ms if (recorded.shape, m) in rows]
        for m in ms:
            record = rows[recorded.shape, m]
            baseline, bench = bed.open(recorded.shape, m)
            try:
                figures = _regret_at(bench, recorded, m, baseline, record.pair)
            finally:
                bench.close()
            run.findings.setdefault("regret", {}).setdefault(recorded.shape.slug, {})[str(m)] = figures
            print(f"    {recorded.shape.slug} M={m}: regret {100 * figures['regret']:.2f} %", flush=True)
        if ms:
            found = [f["regret"] for f in run.findings["regret"][recorded.shape.slug].values()]
            mean = math.exp(sum(map(math.log1p, found)) / len(found)) - 1
            told = f"geometric mean {100 * mean:.2f} %, worst {100 * max(found):.2f} % over {len(found)} M"
            run.check(f"regret of {recorded.shape.slug}", mean <= 0.02, told)


def _regret_at(
    bench: Bench, recorded: landscape.Landscape, m: int, baseline: ConfigPair, chosen: ConfigPair
) -> dict[str, Any]:
    times = {"up": recorded.up_us[m], "down": recorded.down_us[m]}
    wanted = {g: sorted(times[g], key=times[g].__getitem__) for g in GEMMS}
    ratios: dict[tuple[Gemm, KernelConfig], float] = {}
    for best, count in FASTEST:
        few = {g: list(dict.fromkeys([*wanted[g][:best], chosen.of(g)])) for g in GEMMS}
        ratios = retimed(bench, few, count)
        wanted = {g: sorted((c for h, c in ratios if h == g), key=lambda c, g=g: ratios[g, c]) for g in GEMMS}
    base = recorded.baselines[m]
    share = {"up": base.up_us / (base.up_us + base.down_us), "down": base.down_us / (base.up_us + base.down_us)}
    ratios |= {(gemm, baseline.of(gemm)): 1.0 for gemm in GEMMS}
    total = {(gemm, config): share[gemm] * ratio for (gemm, config), ratio in ratios.items()}
    ups, downs = ([config for g, config in total if g == gemm] for gemm in GEMMS)
    pairs = {
        (up, down): total["up", up] + total["down", down]
        for up in ups
        for down in downs
        if up.BLOCK_SIZE_M == down.BLOCK_SIZE_M
    }
    (up, down), least = min(pairs.items(), key=lambda item: item[1])
    mine = total["up", chosen.up] + total["down", chosen.down]
    return {
        "baseline_us": base.up_us + base.down_us, "chosen": mine, "best": least, "regret": mine / least - 1,
        "chosen_pair": str(chosen), "best_pair": f"{up} / {down}", "kept": chosen == baseline,
    }  # fmt: skip


def noise(run: Run, bed: Bed, files: Sequence[Path], decisions: int) -> None:
    """One config under two names: whoever calls it faster is fooled."""
    options, rng = JobOptions(), random.Random(0)  # noqa: S311 - pauses, not secrets
    places = [(landscape.load(f).shape, m) for f in files for m in (16, 64, 256, 1024)]
    counts = {"decisions": 0, "first_test_faster": 0, "both_tests_faster": 0, "samples": 0}
    begun_s = time.monotonic()
    for place, (shape, m) in enumerate(places):
        baseline, bench = bed.open(shape, m)
        twin = ConfigPair(*(filled(baseline.of(g)) for g in GEMMS))
        try:
            for gemm in GEMMS:
                while bench.readiness(gemm, twin.of(gemm)) == "waiting":
                    time.sleep(0.005)
            while counts["decisions"] < decisions * (place + 1) / len(places):
                verdicts = []
                for _ in range(2):
                    test = PairedTest(options.min_gain, options.error_rate)
                    while test.outcome == "undecided":
                        for gemm, count in zip(GEMMS, test.wanted, strict=True):
                            if count:
                                test.add(**{gemm: bench.measure(gemm, twin.of(gemm), count)})
                        if rng.random() < 0.01:
                            time.sleep(rng.random() * PAUSE_S)  # an idle GPU lets its clocks fall
                    counts["samples"] += test.samples
                    verdicts.append(test.outcome == "faster")
                    if not verdicts[0]:
                        break
                counts["decisions"] += 1
                counts["first_test_faster"] += verdicts[0]
                counts["both_tests_faster"] += len(verdicts) == 2 and all(verdicts)
        finally:
            bench.close()
    run.findings["noise"] = {**counts, "seconds": time.monotonic() - begun_s}
    fooled = counts["both_tests_faster"]
    run.check("one config under two names", fooled <= 0.01 * counts["decisions"], json.dumps(counts))


def script(run: Run, bed: Bed, path: Path, candidates: int) -> None:
    """SGLang's tuning procedure on some candidates of the space: compile here, then ten graphs of ten launches."""
    import torch  # noqa: PLC0415 - with a GPU only

    shape, m = landscape.load(path).shape, 64
    configs = random.Random(1).sample(landscape.load(path).candidates, candidates)  # noqa: S311 - a sample
    _, bench = bed.open(shape, m)
    begun_s, gpu_ms, done = time.monotonic(), 0.0, 0
    try:
        for config in configs:
            try:
                for gemm in GEMMS:
                    args, named = bench._launches.call(gemm, config, 0, "uniform")  # type: ignore[attr-defined]
                    invoke = bed.machine.provider.inner.serving.invoke  # type: ignore[attr-defined]
                    invoke(*args, **named)
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        for _ in range(10):
                            invoke(*args, **named)
                    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                    events[0].record()
                    for _ in range(10):
                        graph.replay()
                    events[1].record()
                    events[1].synchronize()
                    gpu_ms += events[0].elapsed_time(events[1])
                done += 1
            except Exception as error:  # noqa: BLE001 - the script, too, goes on after a candidate that does not fit
                print(f"    {config}: {type(error).__name__}", flush=True)
    finally:
        bench.close()
    each_s = (time.monotonic() - begun_s) / candidates
    whole = {"seconds_per_candidate": each_s, "gpu_ms_per_candidate": gpu_ms / max(1, done), "candidates": candidates}
    run.findings["script"] = {**whole, "hours_for_1920_at_18_M": each_s * 1920 * 18 / 3600}
    run.check("the tuning script's way", True, json.dumps(run.findings["script"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", default=",".join(PARTS))
    parser.add_argument("--landscapes", type=Path, nargs="*", default=list(landscape.shipped()))
    parser.add_argument("--idle-s", type=float, default=200.0)
    parser.add_argument("--port", type=int, default=31300)
    parser.add_argument("--compile-processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--decisions", type=int, default=1000)
    parser.add_argument("--candidates", type=int, default=16)
    for name, value in MODEL._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("flags", nargs="*", help="more server flags, after --")
    options = parser.parse_args()
    if odd := set(options.part.split(",")) - set(PARTS):
        parser.error(f"--part has {', '.join(sorted(odd))}; there are {', '.join(PARTS)}")
    run = Run(options)
    run.findings["machine"] = gpu_acceptance.machine()
    parts = options.part.split(",")
    try:
        if "live" in parts:
            live(run)
        bed = Bed(run) if set(parts) - {"live"} else None
        if bed is not None and "regret" in parts:
            regret(run, bed, options.landscapes)
        if bed is not None and "noise" in parts:
            noise(run, bed, options.landscapes, options.decisions)
        if bed is not None and "script" in parts:
            script(run, bed, options.landscapes[0], options.candidates)
    finally:
        run.findings["checks"] = [list(c) for c in run.checks]
        (run.out / "search.json").write_text(json.dumps(run.findings, indent=1, default=str))
        for name, ok, told in run.checks:
            print(f"[{'ok' if ok else 'FAIL'}] {name}: {told}")
        shutil.rmtree(run.work, ignore_errors=True)
    return 0 if run.checks and all(ok for _, ok, _ in run.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
