#!/usr/bin/env python3
"""The search on a real GPU: a live server with two unlike shapes, what it chose against the best there is, and whether
it can be fooled.

    gpu_search.py --out DIR [--part live,twins] [--idle-s 240] [--budget-s 540] [-- server flags]
    gpu_search.py --out DIR --part regret,script --landscapes FILE ...
    gpu_search.py --tables DIR/search.json

``live``: a server whose layers have two shapes in turn tunes both while idle. ``twins``: then, in its idle slices, one
config under two names, a thousand decisions with pauses in which the clocks fall. ``regret``: for both shapes, the
fastest candidates of their recorded landscapes and what the server chose are timed again, side by side. ``script``:
what SGLang's tuning script does with one candidate, timed. ``noise``: as ``twins``, without a server.

All of it with SGLang's shipped files hidden, so that both shapes are true misses. A later call finds the rows that
``live`` learned in --state, and adds to DIR/search.json if it is there. Run it with an interpreter that has SGLang and
this package. Exits with 1 where a part failed or a check did not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING, Any

import gpu_acceptance
import record_landscape
from demo_gpu import ROOT, site_folder
from gpu_acceptance import Run, wait_until_learned
from gpu_parts import Parts, of_this_checkout
from gpu_server import Model, install
from twins import Twins

from sglang_moe_autotune import landscape, machine, records, releases, store, trials
from sglang_moe_autotune.errand import Errand
from sglang_moe_autotune.search_space import full_space
from sglang_moe_autotune.shapes import GEMMS, ConfigPair, Gemm, KernelConfig, MoeShape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sglang_moe_autotune.bench import Bench

PARTS = ("live", "twins", "regret", "noise", "script")
MODEL = Model(256, 256, 4096, 8, 4)
OTHER = "8,7168,2"
DECODED, PREFILLED = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256), (512, 1024, 1536, 2048, 3072, 4096)
CAPTURED = (
    *("--chunked-prefill-size", str(PREFILLED[-1])),
    *("--cuda-graph-bs-decode", *map(str, DECODED)),
    *("--cuda-graph-bs-prefill", *map(str, PREFILLED)),
)
"""The graphs that are captured, and so the M that are tuned: the 18 of SGLang's own tuning script."""
STATE = Path(tempfile.gettempdir()) / "moe-autotune-search"
FASTEST = ((32, 12), (10, 48), (1, 96))
"""of each GEMM: how many of a landscape's fastest are timed again, from nothing, with how many launches. The last ones
are the best pair alone: the least of many noisy medians is too low, fresh samples of it are not."""
SLOWER = 1.01
PAUSE_SHARE, PAUSE_S = 0.01, 0.3
BINARY_WAIT_S = 60.0
TWIN_MS = (16, 64, 256, 1024)
START_S, END_S, TWINS_S = 170.0, 25.0, 130.0
"""of a server with an empty cache; of its end; and what is left for the twins where the learning takes its time"""


# -- the live server -------------------------------------------------------------------------------------------


def live(run: Run, parts: Parts, *, twins: bool) -> None:
    """Both shapes of the mixed model, learned by one server; then the twins in its idle slices."""
    site = site_folder(run.work)
    path = [str(run.probe), str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]
    run.environ["PYTHONPATH"] = os.pathsep.join(path)
    install(run.probe, "mixed_model", "mixed_model")
    run.environ["MIXED_MODEL"] = run.options.other
    if twins:
        install(run.probe, "twin_probe", "twin_probe", "twins")
        run.environ["TWIN_PROBE"] = str(run.work)
    # A cache of its own: what the search orders is what it compiled.
    run.environ["TRITON_CACHE_DIR"] = str(run.work / "triton")
    with run.serve("1_mixed") as server:
        server.generate(gpu_acceptance.prompts(), 8)
        idle_s = min(run.options.idle_s, parts.left_s - END_S - (TWINS_S if twins else 0.0))
        told = wait_until_learned(run, max(10.0, idle_s))
        server.generate(gpu_acceptance.prompts(), 8)
        time.sleep(4.0)
        log = server.text()
        counts = told.compile
        run.findings["compile"] = {"ordered": counts.ordered, "ready": counts.ready, "failed": counts.failed}
        run.findings["live"] = {
            "gpu_s": round(told.gpu_s, 2), "slices": told.slices, "queue_left": len(told.queue),
            "deferred": dict(told.deferred), "pass_p99_us": told.pass_p99_us, "pass_longest_us": told.pass_longest_us,
        }  # fmt: skip
        parts.write()
        learned(run)
        parts.write()
        run.check("no fault in the server's log", "Traceback" not in log, f"{log.count('Traceback')} tracebacks")
        run.check("nothing compiled in the server", told.serving_compiles_for_tuning == 0, "by the listener")
        if twins:
            in_idle_slices(run, parts)
            server.generate(gpu_acceptance.prompts(), 8)  # it lives, and serves


def learned(run: Run) -> None:
    """The rows of the server's store, by shape, into the findings; the store itself into --state, for later calls."""
    target = run.options.state / "store"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path in (run.work / "store").glob("*.json"):  # beside them files come and go: a server writes there
        shutil.copy(path, target)
    contents = run.contents()
    tried = trials.read(run.work / "store", contents.environment)
    rows = contents.records.values()
    run.check("M were settled live", bool(rows), f"{len(rows)} of them")
    for shape in sorted({r.shape for r in rows}, key=lambda s: s.slug):
        mine = sorted((r for r in rows if r.shape == shape), key=lambda r: r.M)
        faster = [r for r in mine if r.verdict == "faster"]
        found = [row for ms in tried.get(shape, {}).values() for row in ms]
        summary = {
            "M": len(mine), "faster": len(faster),
            "gpu_s": round(sum(r.evidence.gpu_s for r in mine), 3),
            "candidates_measured": len({row.config for row in found}),
            "distinct_winners": len({c for r in faster for c in (r.pair.up, r.pair.down)}),
            "gain_geomean": 1 - geometric_mean(1 - r.evidence.gain for r in mine),
        }  # fmt: skip
        run.findings.setdefault("learned", {})[shape.slug] = summary | {"rows": [row_of(r) for r in mine]}
        run.check(f"{shape.slug} tuned live", bool(faster), json.dumps(summary))


def row_of(record: records.Record) -> dict[str, Any]:
    """A record for JSON; times in microseconds, gains as fractions."""
    e = record.evidence
    return {
        "M": record.M, "verdict": record.verdict, "baseline_us": e.baseline_us, "chosen_us": e.chosen_us,
        "gain": e.gain, "gain_low": e.gain_low, "gain_high": e.gain_high, "samples": e.samples,
        "measured": e.measured, "gpu_s": e.gpu_s, "max_error": e.max_error, "tolerance": e.tolerance,
        "up": str(record.pair.up), "down": str(record.pair.down), "baseline": str(record.baseline.up),
    }  # fmt: skip


def in_idle_slices(run: Run, parts: Parts) -> None:
    """Give the idle passes of the server to the twins until they are done or the time is over."""
    order = {"ms": list(TWIN_MS), "decisions": run.options.decisions}
    (run.work / "order.json").write_text(json.dumps(order))
    path, until_s = run.work / "twins.json", time.monotonic() + max(20.0, parts.left_s - END_S)
    told: dict[str, Any] = {}
    while time.monotonic() < until_s and not (told.get("ended") or told.get("error")):
        time.sleep(2.0)
        if path.exists():
            told = json.loads(path.read_text())
    judge_twins(run, "twins", told or {"error": "the server's idle passes told nothing"})


def judge_twins(run: Run, name: str, told: dict[str, Any]) -> None:
    """At most one decision in a hundred may take one of the names for faster, and most must have been made."""
    run.findings[name] = told
    made, fooled = told.get("decisions", 0), told.get("both_tests_faster", 0)
    ok = made >= 0.5 * told.get("wanted", math.inf) and fooled <= 0.01 * made and not told.get("error")
    short = {k: v for k, v in told.items() if k != "places"}
    whys = [f"{place}: {p['why']}" for place, p in told.get("places", {}).items() if p["why"]]
    run.check(f"one config under two names ({name})", ok, "; ".join([json.dumps(short)[-600:], *whys]))


def stored(run: Run) -> dict[tuple[MoeShape, int], records.Record]:
    """What ``live`` learned. Raises RuntimeError where that is nothing."""
    root = run.options.state / "store"
    found = [e.path for e in store.environments(root) if e.environment]
    rows = {k: r for path in found for k, r in store.read(path).records.items()}
    if not rows:
        raise RuntimeError(f"{root} holds no rows: run --part live first, on this machine and with the same --state")
    return rows


# -- without a server ------------------------------------------------------------------------------------------


def wait_for_memory(wait_s: float = 20.0) -> None:
    """A server that was ended a moment ago may still hold the device's memory."""
    import torch  # noqa: PLC0415 - with a GPU only

    until_s = time.monotonic() + wait_s
    while torch.cuda.is_available() and time.monotonic() < until_s:
        free, total = torch.cuda.mem_get_info()
        if free > total / 2:
            return
        time.sleep(0.5)


class Bed:
    """This GPU with made-up weights, without a server."""

    def __init__(self, run: Run) -> None:
        wait_for_memory()
        order = Errand("verify", (), None, compile_processes=run.options.compile_processes)
        self.machine = machine.gpu_machine(order)
        self._held: MoeShape | None = None

    def load(self, shape: MoeShape) -> None:
        """Get weights of a shape in place of those before. Raises RuntimeError where that is impossible."""
        if shape != self._held:
            self._held = None
            if reason := self.machine.load(shape):
                raise RuntimeError(f"{shape.slug}: {reason}")
            self._held = shape

    def open(self, shape: MoeShape, m: int, slice_us: float) -> tuple[ConfigPair, Bench]:
        """A bench that is not prepared yet. Raises RuntimeError where there is none."""
        self.load(shape)
        self.machine.provider.inner.slice_us = slice_us  # type: ignore[attr-defined]  # a WarmProvider
        baseline = self.machine.baseline(shape, m)
        if baseline is None:
            raise RuntimeError(f"{shape.slug} at M={m}: SGLang's own answer is no pair of plain configs")
        bench = self.machine.provider.open(shape, m, baseline)
        if isinstance(bench, str):
            raise RuntimeError(f"{shape.slug} at M={m}: {bench}")  # noqa: TRY004 - an answer, not a type
        return baseline, bench

    def close(self) -> None:
        self.machine.provider.compiler.close()  # type: ignore[attr-defined]  # a WarmProvider


Ratios = dict[tuple[Gemm, KernelConfig], float]


class Retimed:
    """Launches in turn with SGLang's own config, from fresh samples."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.baseline_us: dict[Gemm, float] = {}

    def ratios(self, wanted: dict[Gemm, list[KernelConfig]], launches: int) -> Ratios:
        """Of each launch to SGLang's own; those that cannot be launched are left out."""
        found: Ratios = {}
        own: dict[Gemm, list[float]] = {gemm: [] for gemm in GEMMS}
        until_s = time.monotonic() + BINARY_WAIT_S
        for gemm in GEMMS:
            for config in wanted[gemm]:
                record_landscape.asked(self._bench, gemm, config)  # all are ordered before the first is waited for
        for gemm in GEMMS:
            for config in wanted[gemm]:
                while (state := self._bench.readiness(gemm, config)) == "waiting" and time.monotonic() < until_s:
                    time.sleep(0.005)
                samples = record_landscape.measure(self._bench, gemm, config, launches) if state == "ready" else []
                if samples:
                    found[gemm, config] = math.exp(median(map(record_landscape.log_ratio, samples)))
                    own[gemm] += [s.baseline_us for s in samples]
        self.baseline_us |= {gemm: median(us) for gemm, us in own.items() if us}
        return found


def regret(run: Run, parts: Parts, bed: Bed, files: Sequence[Path]) -> None:
    """What was chosen against the fastest pair, both timed in this run."""
    rows = stored(run)
    recorded = [landscape.load(path) for path in files]
    places = [(one, m) for one in recorded for m in one.ms if (one.shape, m) in rows]
    if not places:
        known = sorted({(s.slug, m) for s, m in rows})
        raise RuntimeError(f"no landscape of --landscapes has a shape and an M that was learned: {known}")
    found: dict[str, dict[str, Any]] = run.findings.setdefault("regret", {})
    for one, m in places:
        if parts.left_s < 1:
            print(f"    {one.shape.slug} M={m}: no time left", flush=True)
            continue
        begun_s, record = time.monotonic(), rows[one.shape, m]
        try:
            baseline, bench = bed.open(one.shape, m, record_landscape.SLICE_US)
            try:
                while not bench.prepare():
                    pass
                figures = _regret_at(bench, one, m, baseline, record.pair)
            finally:
                bench.close()
        except (RuntimeError, ArithmeticError, KeyError) as error:
            figures = {"why": f"{type(error).__name__}: {error}"}
        figures["taken_s"] = round(time.monotonic() - begun_s, 1)
        found.setdefault(one.shape.slug, {})[str(m)] = figures
        told = figures.get("why") or f"regret {100 * figures['regret']:.2f} %"
        print(f"    {one.shape.slug} M={m}: {told} ({figures['taken_s']} s)", flush=True)
        parts.write()
    for slug, by_m in found.items():
        summary = summed([f["regret"] for f in by_m.values() if "regret" in f])
        run.findings.setdefault("regret_summary", {})[slug] = summary
        run.check(f"regret of {slug}", summary["M"] > 0 and summary["geomean"] <= 0.02, json.dumps(summary))
    timed = [(slug, m, f) for slug, by_m in found.items() for m, f in by_m.items() if "regret" in f and not f["kept"]]
    slower = [f"{slug} M={m}" for slug, m, f in timed if f["chosen_us"] > SLOWER * f["baseline_us"]]
    told = "; ".join(slower) or f"none of {len(timed)} rows"
    run.check("no accepted row is over 1 % slower than SGLang's own", not slower, told)
    lost = [f"{slug} M={m}: {f['why']}" for slug, by_m in found.items() for m, f in by_m.items() if "why" in f]
    run.check("every M that was learned and recorded is timed again", not lost, "; ".join(lost) or f"{len(places)} M")


def summed(regrets: list[float]) -> dict[str, float]:
    """Geometric mean, 95th percentile (the next value above it) and worst; infinite where there are none."""
    if not regrets:
        return {"M": 0, "geomean": math.inf, "p95": math.inf, "worst": math.inf}
    ordered = sorted(regrets)
    geomean = math.exp(sum(map(math.log1p, ordered)) / len(ordered)) - 1
    p95 = ordered[min(len(ordered) - 1, math.ceil(0.95 * len(ordered)) - 1)]
    return {"M": len(ordered), "geomean": round(geomean, 5), "p95": round(p95, 5), "worst": round(ordered[-1], 5)}


def _regret_at(
    bench: Bench, recorded: landscape.Landscape, m: int, baseline: ConfigPair, chosen: ConfigPair
) -> dict[str, Any]:
    times = {"up": recorded.up_us[m], "down": recorded.down_us[m]}
    wanted = {g: sorted(times[g], key=times[g].__getitem__) for g in GEMMS}
    timer, pair = Retimed(bench), baseline
    for best, count in FASTEST:
        few = {g: list(dict.fromkeys([*wanted[g][:best], chosen.of(g)])) for g in GEMMS}
        if best == 1:
            few = {g: list(dict.fromkeys([pair.of(g), chosen.of(g)])) for g in GEMMS}
        few = {g: [c for c in few[g] if c != baseline.of(g)] for g in GEMMS}
        ratios = timer.ratios(few, count) | {(g, baseline.of(g)): 1.0 for g in GEMMS}
        wanted = {g: sorted((c for h, c in ratios if h == g), key=lambda c, g=g: ratios[g, c]) for g in GEMMS}
        total = {(g, c): timer.baseline_us[g] * ratio for (g, c), ratio in ratios.items() if g in timer.baseline_us}
        pair = _fastest(total) or baseline
    mine, least = (total["up", p.up] + total["down", p.down] for p in (chosen, pair))
    base_us = sum(timer.baseline_us.values())
    return {
        "baseline_us": round(base_us, 2), "chosen_us": round(mine, 2), "best_us": round(least, 2),
        "regret": mine / least - 1, "chosen_pair": str(chosen), "best_pair": str(pair), "kept": chosen == baseline,
    }  # fmt: skip


def _fastest(total_us: dict[tuple[Gemm, KernelConfig], float]) -> ConfigPair | None:
    """The pair with one BLOCK_SIZE_M that takes least."""
    ups, downs = ([config for g, config in total_us if g == gemm] for gemm in GEMMS)
    pairs = {
        ConfigPair(up, down): total_us["up", up] + total_us["down", down]
        for up in ups
        for down in downs
        if up.BLOCK_SIZE_M == down.BLOCK_SIZE_M
    }
    return min(pairs, key=pairs.__getitem__, default=None)


def noise(run: Run, parts: Parts, bed: Bed, shapes: Sequence[MoeShape]) -> None:
    """The twins without a server, in slices of a server's length."""
    rng = random.Random(0)  # noqa: S311 - pauses, not secrets
    places = [(f"{s.slug} M={m}", lambda s=s, m=m: bed.open(s, m, 500.0)) for s in shapes for m in TWIN_MS]
    twins, begun_s = Twins(places, run.options.decisions), time.monotonic()
    for step in twins.steps():
        if step == "waiting":
            time.sleep(0.005)
        if rng.random() < PAUSE_SHARE:
            time.sleep(rng.random() * PAUSE_S)  # an idle GPU lets its clocks fall
        if parts.left_s < 1:
            break
    judge_twins(run, "noise", {**twins.told, "seconds": round(time.monotonic() - begun_s, 1)})


@contextlib.contextmanager
def overridden(config: KernelConfig) -> Iterator[None]:
    """SGLang's own ``override_config``, which ends also where its body raises."""
    utils = importlib.import_module("sglang.srt.layers.moe.moe_runner.triton_utils")
    utils._config = config.to_dict()
    try:
        yield
    finally:
        utils._config = None


def script(run: Run, parts: Parts, bed: Bed, shapes: Sequence[MoeShape]) -> None:
    """SGLang's tuning procedure on some candidates of the space: compile, a graph of ten layers, five replays to warm
    up and ten that are timed, one after the other. What it would take for all of them follows."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    before = os.environ.get("TRITON_CACHE_DIR")
    for shape in shapes:
        bed.load(shape)
        configs = random.Random(1).sample(full_space(), run.options.candidates)  # noqa: S311 - a sample
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TRITON_CACHE_DIR"] = folder  # as a first run of the script finds it
            try:
                told = _procedure(bed, shape, run.options.script_m, configs, parts)
            finally:
                os.environ.pop("TRITON_CACHE_DIR")
                if before is not None:
                    os.environ["TRITON_CACHE_DIR"] = before
        run.findings.setdefault("script", {})[shape.slug] = told
        parts.write()
        ok, short = told["candidates"] > len(told["refused"]), {k: v for k, v in told.items() if k != "refused"}
        run.check(f"the tuning script's way, {shape.slug}", ok, json.dumps(short))


def _procedure(
    bed: Bed, shape: MoeShape, m: int, configs: Sequence[KernelConfig], parts: Parts
) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - with a GPU only
    from triton.errors import TritonError  # noqa: PLC0415 - as above

    layer = bed.machine.provider.inner.serving.layers(shape)[0]  # type: ignore[attr-defined]  # a WarmProvider
    quant = layer.module.quant_method.get_triton_quant_info(layer.module)
    device = quant.w13_weight.device
    draw = torch.Generator(device=device).manual_seed(0)
    hidden = torch.empty(m, shape.K, dtype=quant.w13_weight.dtype, device=device).normal_(generator=draw)
    gate = torch.empty(m, shape.E, dtype=torch.float32, device=device).normal_(generator=draw)
    weights, chosen = gate.softmax(dim=1).topk(shape.top_k, dim=1)
    ids, fused = chosen.to(torch.int32), releases.fused_module()

    def layer_once() -> None:
        fused.fused_experts_impl(
            hidden_states=hidden, w1=quant.w13_weight, w2=quant.w2_weight, topk_weights=weights, topk_ids=ids,
            inplace=True, filter_expert=False,
        )  # fmt: skip

    layer_once()  # what is compiled once, whatever the candidate
    torch.cuda.synchronize()
    begun_s, gpu_ms, compile_s, done, refused = time.monotonic(), 0.0, 0.0, 0, []
    for config in configs:
        if parts.left_s < 1:
            break
        try:
            with overridden(config):
                one_s = time.monotonic()
                layer_once()
                torch.cuda.synchronize()
                compile_s += time.monotonic() - one_s
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(10):
                        layer_once()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            for _ in range(15):
                graph.replay()
            events[1].record()
            events[1].synchronize()
            gpu_ms += events[0].elapsed_time(events[1])
        except (TritonError, RuntimeError) as error:  # the script, too, goes on after one that does not fit
            refused.append(f"{config}: {type(error).__name__}")
        done += 1
    each_s = (time.monotonic() - begun_s) / max(1, done)
    return {
        "M": m, "candidates": done, "seconds_per_candidate": round(each_s, 3),
        "compile_s_per_candidate": round(compile_s / max(1, done), 3),
        "gpu_ms_per_candidate": round(gpu_ms / max(1, done - len(refused)), 2),
        "hours_for_1920_at_one_M": round(each_s * 1920 / 3600, 2),
        "hours_for_1920_at_18_M": round((each_s * 18 - 17 * compile_s / max(1, done)) * 1920 / 3600, 2),
        "refused": refused,
    }  # fmt: skip


# -- tables ----------------------------------------------------------------------------------------------------


ROWS_HEAD = """\
| M | heuristic us | learned us | gain | interval | samples | up | down |
|---|---|---|---|---|---|---|---|"""
REGRET_HEAD = """\
| M | heuristic us | chosen us | best us | regret | chosen | best |
|---|---|---|---|---|---|---|"""


def tables(found: dict[str, Any]) -> str:
    """What was found, as a page shows it."""
    lines = [_words(found.get("machine", {})), ""]
    if "live" in found:
        compiled = _words(found.get("compile", {}))
        lines += [f"Learned in {found.get('learning_s')} s: {_words(found['live'])}; binaries: {compiled}.", ""]
    for slug, one in found.get("learned", {}).items():
        short = _words({k: v for k, v in one.items() if k != "rows"})
        lines += [f"## {slug}", "", short, "", ROWS_HEAD, *map(_row, one["rows"]), ""]
    for slug, by_m in found.get("regret", {}).items():
        lines += [f"## Regret of {slug}", "", _words(found.get("regret_summary", {}).get(slug, {})), ""]
        lines += [REGRET_HEAD, *(_regret_row(m, f) for m, f in by_m.items()), ""]
    for name in ("twins", "noise", "script"):
        if name in found:
            lines += [f"## {name}", "", "```", json.dumps(found[name], indent=1), "```", ""]
    lines += [f"- {'ok' if ok else 'FAILED'}: {name}: {told}" for name, ok, told in found.get("checks", ())]
    return "\n".join(lines) + "\n"


def _words(told: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in told.items())


def _row(r: dict[str, Any]) -> str:
    if r["verdict"] != "faster":
        return f"| {r['M']} | {r['baseline_us']:.1f} | kept | | | {r['samples']} | {r['up']} | {r['down']} |"
    gain = f"{100 * r['gain']:.1f} % | {100 * r['gain_low']:.1f} to {100 * r['gain_high']:.1f} %"
    return (f"| {r['M']} | {r['baseline_us']:.1f} | {r['chosen_us']:.1f} | {gain} | {r['samples']} | {r['up']} |"
            f" {r['down']} |")  # fmt: skip


def _regret_row(m: str, f: dict[str, Any]) -> str:
    if "why" in f:
        return f"| {m} | | | | {f['why']} | | |"
    times = " | ".join(f"{f[name]:.1f}" for name in ("baseline_us", "chosen_us", "best_us"))
    return f"| {m} | {times} | {100 * f['regret']:.2f} % | {f['chosen_pair']} | {f['best_pair']} |"


def shapes_of(options: argparse.Namespace) -> tuple[MoeShape, MoeShape]:
    """Those of the mixed model."""
    def shape(experts: int, width: int, top_k: int) -> MoeShape:
        return MoeShape((experts, 2 * width, options.hidden), (experts, options.hidden, width), top_k)

    return shape(options.experts, options.intermediate, options.top_k), shape(*map(int, options.other.split(",")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", default="live,twins,regret,script", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--landscapes", type=Path, nargs="*", default=list(landscape.shipped()))
    parser.add_argument("--state", type=Path, default=STATE, help="keeps the learned rows between calls")
    parser.add_argument("--budget-s", type=float, default=540.0, help="for all parts of this call")
    parser.add_argument("--idle-s", type=float, default=240.0, help="longest idle time of the server")
    parser.add_argument("--port", type=int, default=31300)
    parser.add_argument("--compile-processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--decisions", type=int, default=1000)
    parser.add_argument("--candidates", type=int, default=12, help="of the tuning script's way, for each shape")
    parser.add_argument("--script-m", type=int, default=64)
    parser.add_argument("--other", default=OTHER, help="EXPERTS,WIDTH,TOP_K of every other layer")
    parser.add_argument("--tables", type=Path)
    for name, value in MODEL._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("flags", nargs="*", help="more server flags, after --")
    options = parser.parse_args()
    if options.tables:
        sys.stdout.write(tables(json.loads(options.tables.read_text())))
        return 0
    if options.out is None:
        parser.error("--out DIR is needed: name a folder for what is found")
    names = options.part.split(",")
    if odd := set(names) - set(PARTS):
        parser.error(f"--part has {', '.join(sorted(odd))}; there are {', '.join(PARTS)}")
    if "twins" in names and "live" not in names:
        parser.error("--part twins needs live beside it: it has the idle slices of that server")
    shapes = shapes_of(options)
    if "regret" in names:
        here = {landscape.load(path).shape for path in options.landscapes}
        if lacking := [s.slug for s in shapes if s not in here]:
            parser.error(f"--part regret needs a landscape of {' and '.join(lacking)}: record it, or leave regret out")
    of_this_checkout()
    options.flags = [*CAPTURED, *options.flags]
    return measure(options, names, shapes)


def measure(options: argparse.Namespace, names: Sequence[str], shapes: Sequence[MoeShape]) -> int:
    """Every part that is asked for; 0 where none failed and all checks hold."""
    options.state.mkdir(parents=True, exist_ok=True)
    record_landscape.hide_files(options.state / "no-files")
    path = options.out / "search.json"
    parts = Parts(path, options.budget_s, json.loads(path.read_text()) if path.exists() else None)
    run = Run(options)
    run.findings = parts.found
    run.findings["machine"] = gpu_acceptance.machine()
    bed: list[Bed] = []
    try:
        if "live" in names:
            parts.run("live", lambda: live(run, parts, twins="twins" in names), START_S)
        if set(names) - {"live", "twins"}:
            parts.run("a GPU without a server", lambda: bed.append(Bed(run)))
        if bed:
            for name, part in (
                ("regret", lambda: regret(run, parts, bed[0], options.landscapes)),
                ("script", lambda: script(run, parts, bed[0], shapes)),
                ("noise", lambda: noise(run, parts, bed[0], shapes)),
            ):
                if name in names:
                    parts.run(name, part)
    finally:
        for one in bed:
            one.close()
        known = {name: [name, *rest] for name, *rest in run.findings.get("checks", ())}
        run.findings["checks"] = list((known | {check[0]: list(check) for check in run.checks}).values())
        parts.write()
        (options.out / "search.md").write_text(tables(run.findings))
        for name, ok, told in run.checks:
            print(f"[{'ok' if ok else 'FAIL'}] {name}: {told[:400]}")
        shutil.rmtree(run.work, ignore_errors=True)
    return 0 if run.checks and not parts.failed and all(ok for _, ok, _ in run.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
