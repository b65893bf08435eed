#!/usr/bin/env python3
"""Tune SGLang's real layers on this GPU, a dtype after the other, and measure what was learned again.

    gpu_coverage.py --out DIR [--rows bf16,fp8-block-128,...] [--m 1,8,64,...] [--budget-s 540] [--processes 14]
    gpu_coverage.py --out DIR --real-server bf16,fp8-block [--idle-s 90] [--budget-s 540]
    gpu_coverage.py --tables docs/coverage_gpu.json

For each row: four layers with SGLang's own quantisation, tuned at each M within the row's share of the budget; then,
with fresh samples and in one run, the learned row and the row of the file that SGLang ships for this GPU and shape
(if it does) against SGLang's heuristic; then the output of whole layers, heuristic against learned row, the latter
served through the plugin's own lookup hook. DIR/coverage_gpu.json has what was found, DIR/gains.md its tables, and
DIR/coverage_run.json the seconds of each row and the traceback of one that failed; the others go on. Rows of an earlier
call stay in DIR/coverage_gpu.json. Run it with an interpreter that has SGLang and this package. Exits with 1 where a
row failed, its outputs differ, or it learned nothing at all.
"""
# ruff: noqa: PLC0415 - the tables are made without torch and SGLang

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import coverage_rows
from coverage_rows import LARGE, Case, Size
from gpu_parts import Parts, of_this_checkout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_moe_autotune.bench import BenchmarkProvider
    from sglang_moe_autotune.prior import Prior
    from sglang_moe_autotune.records import Environment, Record
    from sglang_moe_autotune.shapes import ConfigPair, MoeShape

DEFAULT_ROWS: Final = "bf16,fp8-block-128,fp8-channel,int8-channel,int4-w4a16"
DEFAULT_M: Final = "1,8,64,512,2048,8192"
LAYERS: Final = 4
SLICE_US: Final = 20_000.0
TUNING_SHARE: Final = 0.75
"""of a row's time; the rest is for measuring again and for comparing outputs"""
MAX_FAULTS: Final = 10
"""of benches in a row: a lost device fails each step at once, for as long as one likes"""
SIZES: Final[dict[str, Size]] = {"fp8-channel": Size(161, 5120, 192, 9)}
"""shapes of models for which SGLang ships a file; the others take ``LARGE``, for which it ships bf16 and fp8 blocks"""


class Row(NamedTuple):
    """What is needed of a row once its layers are there; a test puts a recording in their place."""

    shape: MoeShape
    provider: BenchmarkProvider
    prior: Prior
    environment: Environment
    baseline: Callable[[MoeShape, int], ConfigPair | None]
    """SGLang's heuristic, whatever files it ships"""
    shipped: Callable[[MoeShape, int], tuple[ConfigPair, str] | None]
    """what SGLang's files say, and which"""
    whole: Callable[[int, ConfigPair], tuple[float, bool]] | None = None
    """by how much whole layers differ with a pair, ||out - ref|| / ||ref|| of the worst row, and whether the hook
    served it"""


def tune(row: Row, ms: Sequence[int], until_s: float) -> dict[int, Record]:
    """The records of the M that were settled in time."""
    from sglang_moe_autotune.tuner import Tuner, TunerOptions

    learned: dict[int, Record] = {}

    def keep(record: Record) -> None:
        learned[record.M] = record

    limit = row.environment.shared_memory_bytes
    tuner = Tuner(
        row.provider, keep, row.prior, TunerOptions(slice_us=SLICE_US), shared_memory_bytes=limit
    )  # fmt: skip
    for m in ms:
        if (baseline := row.baseline(row.shape, m)) is None:
            print(f"    M={m}: SGLang's own answer is no pair of plain configs", flush=True)
        else:
            tuner.add(row.shape, m, baseline)
    faults = 0
    while time.monotonic() < until_s:
        try:
            step = tuner.step(deep_idle=True)
        except Exception as error:  # the tuner has put this M off; the others must not pay for it
            print(f"    a bench failed: {type(error).__name__}: {error}", flush=True)
            faults += 1
            if faults >= MAX_FAULTS:
                raise
            continue
        faults = 0
        if step == "nothing":
            break
        if step == "waiting":
            time.sleep(0.005)
    tuner.abandon()
    for (_, m), deferral in tuner.deferred.items():
        print(f"    M={m}: {deferral.reason}", flush=True)
    return learned


def measure(row: Row, record: Record) -> dict[str, Any]:
    """A pair against the heuristic with fresh samples; gains are fractions, negative where it is slower."""
    from sglang_moe_autotune import inspection
    from sglang_moe_autotune.bench import Declined

    bench = row.provider.open(record.shape, record.M, record.baseline)
    if isinstance(bench, str):
        return {"why": bench}
    steps = inspection.inspect(bench, record)
    try:
        while True:
            if next(steps) == "waiting":
                time.sleep(0.005)
    except StopIteration as done:
        found = done.value
    except Declined as declined:
        return {"why": str(declined)}
    finally:
        bench.close()
    told: dict[str, Any] = {"outcome": found.outcome, "pair": str(record.pair), "why": found.reason}
    if found.outcome in ("holds", "slower", "differs") and math.isfinite(found.estimate.low):
        gain, low, high = found.estimate
        baseline_us = found.evidence.baseline_us
        told |= {"gain": round(gain, 4), "low": round(low, 4), "high": round(high, 4)}
        told |= {"baseline_us": round(baseline_us, 2), "us": round(baseline_us * (1 - gain), 2)}
    if found.evidence.max_error is not None:
        told |= {"error": found.evidence.max_error, "tolerance": found.evidence.tolerance}
    return told


def run_row(
    of: Case, row: Row, ms: Sequence[int], seconds: float, keep: Callable[[dict[str, Any]], object] = lambda _: None
) -> dict[str, Any]:
    """Tune, measure again, compare whole layers; what was found by M. keep: told after each M of what is there so far,
    with ``equal`` false until all M are through."""
    from sglang_moe_autotune.correctness import tolerance
    from sglang_moe_autotune.records import Evidence, Record

    begun_s = time.monotonic()
    learned = tune(row, ms, begun_s + TUNING_SHARE * seconds)
    allowed = tolerance(row.shape.activation_dtype, row.shape.dtype)
    rows: dict[str, Any] = {}
    for m in ms:
        told: dict[str, Any] = {}
        if (record := learned.get(m)) is not None:
            told["verdict"] = record.verdict
            if record.verdict == "faster":
                told["learned"] = measure(row, record)
                if row.whole is not None:
                    error, served = row.whole(m, record.pair)
                    told |= {"whole_error": error, "whole_tolerance": allowed, "served": served}
        shipped, baseline = row.shipped(row.shape, m), row.baseline(row.shape, m)
        if shipped is not None and baseline is not None:
            nothing = Evidence(0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0.0)
            made = Record(row.shape, m, "faster", shipped[0], baseline, nothing)
            told["file"] = {"name": shipped[1], **measure(row, made)}
        rows[str(m)] = told
        print(f"    M={m}: {_line(told)}", flush=True)
        found = {
            "shape": row.shape.slug,
            "device": row.environment.device_name,
            "triton": row.environment.triton,
            "taken_s": round(time.monotonic() - begun_s, 1),
            "settled": len(learned),
            "equal": False,
            "rows": rows,
            "says": of.says,
        }
        keep(found)
    served = [told for told in rows.values() if "whole_error" in told]
    equal = bool(served) and all(t["whole_error"] <= t["whole_tolerance"] and t["served"] for t in served)
    return found | {"equal": equal}


def _line(told: dict[str, Any]) -> str:
    learned, file = told.get("learned", {}), told.get("file", {})
    words = [told.get("verdict", "not settled")]
    words += [f"learned {100 * learned['gain']:.1f} %"] if "gain" in learned else []
    words += [f"file {100 * file['gain']:.1f} %"] if "gain" in file else []
    words += [f"whole layer differs by {told['whole_error']:.2g}"] if "whole_error" in told else []
    return ", ".join(words)


# -- tables -----------------------------------------------------------------------------------------------------


def tables(found: dict[str, Any]) -> str:
    """docs/gains.md of what was found."""
    parts = []
    for row in found.values():
        parts.append(
            f"## {row['says']}\n\n`{row['shape']}` on {row['device']}{_versions(row)};\nmicroseconds of both GEMMs of a"
            " layer, medians of launches in turn with the heuristic's.\n\n"
            "| M | heuristic | learned | gain (bounds) | SGLang's file | file's gain | learned against file |\n"
            "|---|---|---|---|---|---|---|"
        )
        parts[-1] += "".join(f"\n{_table_row(m, told)}" for m, told in row["rows"].items())
        errors = [told["whole_error"] for told in row["rows"].values() if "whole_error" in told]
        if errors:
            verdict = "equal" if row["equal"] else "NOT equal"
            allowed = next(t["whole_tolerance"] for t in row["rows"].values() if "whole_error" in t)
            parts.append(
                f"Whole layers, learned rows served through the lookup hook: outputs {verdict}; largest relative"
                f" error of a row {max(errors):.1e}, allowed {allowed:.1e}."
            )
        if row.get("file"):
            parts.append(f"File: `{row['file']}`.")
    return "\n\n".join(parts) + "\n"


def _versions(row: dict[str, Any]) -> str:
    on = row.get("machine", {})
    words = {"driver": on.get("driver"), "SGLang": row.get("sglang"), "torch": on.get("torch"), "Triton": row["triton"]}
    return "".join(f", {name} {version}" for name, version in words.items() if version)


def _table_row(m: str, told: dict[str, Any]) -> str:
    learned, file = told.get("learned", {}), told.get("file", {})
    baseline_us = learned.get("baseline_us", file.get("baseline_us"))
    cells = [m, "-" if baseline_us is None else f"{baseline_us:.1f}"]
    if "gain" in learned:
        bounds = f"{100 * learned['low']:.1f} to {100 * learned['high']:.1f}"
        cells += [f"{learned['us']:.1f}", f"{100 * learned['gain']:.1f} % ({bounds})"]
    else:
        cells += ["as the heuristic" if told.get("verdict") == "baseline" else "-", "-"]
    cells += [f"{file['us']:.1f}", f"{100 * file['gain']:.1f} %"] if "gain" in file else ["-", "-"]
    if "gain" in file and ("gain" in learned or told.get("verdict") == "baseline"):
        ratio = (1 - learned.get("gain", 0.0)) / (1 - file["gain"])
        cells.append(f"{100 * (1 - ratio):+.1f} %")
    else:
        cells.append("-")
    return "| " + " | ".join(cells) + " |"


# -- the GPU ----------------------------------------------------------------------------------------------------


def open_rows(processes: int, device: str = "cuda") -> Callable[[Case], Row]:
    """A function that builds the layers of a case on this GPU. device: a test has none."""
    import torch

    from sglang_moe_autotune import config_folder, plugin, releases
    from sglang_moe_autotune.benchmark import DeviceProvider, Lent
    from sglang_moe_autotune.compiler import Compiler
    from sglang_moe_autotune.correctness import ROUTINGS, topk_ids
    from sglang_moe_autotune.fitting import fit, limit_of
    from sglang_moe_autotune.layers import LiveLayers, find_layers
    from sglang_moe_autotune.listener import CompileCount
    from sglang_moe_autotune.lookup import read_answer
    from sglang_moe_autotune.prior import Prior, find_files
    from sglang_moe_autotune.serving import Serving
    from sglang_moe_autotune.settings import Settings
    from sglang_moe_autotune.targets import LOOKUP
    from sglang_moe_autotune.warm import WarmProvider

    coverage_rows.set_up()
    torch.set_grad_enabled(False)
    invoke = releases.invoke_function()
    environment = releases.environment(invoke)
    compiles = CompileCount()
    compiles.install()
    compiler = Compiler(processes, environment.shared_memory_bytes)
    files = find_files(releases.shipped_folder())
    limit = limit_of(environment)

    # The lookup hook, put in place as SGLang's plugin loader does; nothing else of the plugin runs here.
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    serving = Serving(Settings(mode="read-only"), hooks=dict)
    plugin._serving = serving
    HookRegistry.register(LOOKUP.path, plugin.on_lookup, HookType.AROUND)
    HookRegistry.apply_hooks()

    def baseline(shape: MoeShape, m: int) -> ConfigPair | None:
        own = read_answer(releases.ask_stock(shape, m))
        return None if own is None else fit(own, shape, limit) or own

    def shipped(shape: MoeShape, m: int) -> tuple[ConfigPair, str] | None:
        said = config_folder.answer(releases.shipped_folder(), environment.triton, shape, environment.device_name, m)
        return None if said is None else (said.pair, f"{said.path.parent.name}/{said.path.name}, row of {said.key}")

    def build(of: Case) -> Row:
        size = SIZES.get(of.name, LARGE)
        modules = [coverage_rows.build(of, size, device, layer_id=n) for n in range(LAYERS)]
        live = LiveLayers()
        dtype = getattr(torch, of.dtype)
        found = list(find_layers(torch.nn.ModuleList(modules), dtype, of.padding))
        live.add(found)
        if len(found) != LAYERS:
            raise RuntimeError(f"{of.name}: {len(found)} of {LAYERS} layers are found on the Triton path")
        key = found[0].key
        shape = live.shape_of(key)
        if shape is None:
            raise RuntimeError(f"{of.name}: its layers are of unlike kinds")
        lent = Lent(live.of, invoke, releases.fused_module().moe_align_block_size, lambda: compiles.compiled)
        provider = WarmProvider(DeviceProvider(lent, compiler, 1 << 30, SLICE_US))
        draw = torch.Generator(device=device).manual_seed(3)

        def whole(m: int, pair: ConfigPair) -> tuple[float, bool]:
            worst, served = 0.0, True
            for module, routing in zip(modules, (*ROUTINGS, ROUTINGS[0]), strict=False):
                hidden = torch.randn(m, size.hidden, device=device, generator=draw).to(dtype)
                weights = torch.rand(m, shape.top_k, device=device, generator=draw)
                ids = topk_ids(routing, m, shape.E, shape.top_k, 1 / of.ep, draw)
                outputs = []
                for answer in (None, pair):
                    serving.lookup.publish([(key, m, answer)])
                    before = serving.lookup.missed.get((key, m), 0)
                    outputs.append(coverage_rows.forward(module, hidden.clone(), weights, ids).clone())
                    missed = serving.lookup.missed.get((key, m), 0) > before
                    served = served and missed == (answer is None)
                base, learned = (output.float().flatten(0, -2) for output in outputs)
                error = (learned - base).norm(dim=1) / base.norm(dim=1).clamp_min(1e-6)
                worst = max(worst, float(error.nan_to_num(nan=math.inf).max()))
            serving.lookup.publish([(key, m, None)])
            return worst, served

        return Row(shape, provider, Prior(files, environment.device_name), environment, baseline, shipped, whole)

    return build


def cover(options: argparse.Namespace) -> int:
    """Every row that is asked for; 0 where all learned something and all outputs are equal."""
    out: Path = options.out
    empty = Path(tempfile.mkdtemp(prefix="moe-autotune-no-configs-"))
    (empty / "configs").mkdir()
    os.environ["SGLANG_MOE_CONFIG_DIR"] = str(empty)  # SGLang answers with its heuristic
    # SGLang compiles a reduction with Inductor at small M, which takes longer than tuning that M.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    cases = [coverage_rows.case(name) for name in options.rows.split(",")]
    ms = [int(m) for m in options.m.split(",")]
    parts = Parts(out / "coverage_run.json", options.budget_s)
    import torch

    if not torch.cuda.is_available():
        sys.exit("no GPU is visible to this process: see nvidia-smi and CUDA_VISIBLE_DEVICES")
    import gpu_acceptance

    build: list[Callable[[Case], Row]] = []
    parts.run("start", lambda: build.append(open_rows(options.processes)))
    parts.found["machine"] = machine = gpu_acceptance.machine()
    for place, of in enumerate(cases):
        if build:
            share_s = parts.left_s / (len(cases) - place)
            parts.run(of.name, lambda of=of, share_s=share_s: cover_one(of, build[0], ms, share_s, out, machine))
            torch.cuda.empty_cache()
    known = json.loads((out / "coverage_gpu.json").read_text()) if (out / "coverage_gpu.json").exists() else {}
    unequal = [of.name for of in cases if not known.get(of.name, {}).get("equal")]
    failed = sorted({*parts.failed, *unequal})
    print(json.dumps({"failed": failed, "seconds": parts.found["seconds"]}), flush=True)
    return 1 if failed else 0


def cover_one(
    of: Case, build: Callable[[Case], Row], ms: Sequence[int], seconds: float, out: Path, machine: dict[str, str]
) -> None:
    """One row into the files, after each M. What an earlier call found of it goes when the first M is there."""
    path = out / "coverage_gpu.json"

    def keep(told: dict[str, Any]) -> None:
        found = json.loads(path.read_text()) if path.exists() else {}
        file = next((t["file"]["name"] for t in told["rows"].values() if "file" in t), "")
        found[of.name] = told | {"sglang": machine["sglang"], "machine": machine, "file": file.partition(", row")[0]}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(found, indent=1) + "\n")
        part.replace(path)
        (out / "gains.md").write_text(tables(found))

    print(f"{of.name}: {seconds:.0f} s", flush=True)
    with coverage_rows.padded(of):
        keep(run_row(of, build(of), ms, seconds, keep))


# -- real servers -----------------------------------------------------------------------------------------------

SERVERS: Final = {
    "bf16": ((), None),
    "fp8": (("--quantization", "fp8"), None),
    "fp8-block": (
        (),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
    ),
}


def serve(options: argparse.Namespace) -> int:
    """Real servers that learn while they idle: rows, gains, and equal tokens before and after."""
    from demo_gpu import site_folder

    parts = Parts(options.out / "servers.json", options.budget_s)
    work = Path(tempfile.mkdtemp(prefix="moe-autotune-servers-"))
    site = site_folder(work)
    names = options.real_server.split(",")
    for name in names:
        parts.run(name, lambda name=name: serve_one(name, options, parts, work, site), options.idle_s + 60)
    shutil.rmtree(work, ignore_errors=True)
    results = [parts.found[name] for name in names if name in parts.found]
    return 0 if not parts.failed and all(r["settled"] and r["same_tokens"] for r in results) else 1


def serve_one(name: str, options: argparse.Namespace, parts: Parts, work: Path, site: Path) -> None:
    from demo_gpu import free_port
    from gpu_server import Model, Server

    from sglang_moe_autotune import store

    flags, quantisation = SERVERS[name]
    model = Model(experts=128, intermediate=768, hidden=2048).write(work / f"model-{name}")
    if quantisation is not None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}, indent=2))
    root = work / f"store-{name}"
    environ = {
        "PYTHONPATH": os.pathsep.join([str(site), str(coverage_rows.ROOT), os.environ.get("PYTHONPATH", "")]),
        "SGLANG_MOE_AUTOTUNE_DIR": str(root),
        "SGLANG_MOE_AUTOTUNE_BUDGET_S": "3600",
        "SGLANG_MOE_AUTOTUNE_DEEP_IDLE_S": "2",
        "SGLANG_MOE_AUTOTUNE_COMPILE_PROCESSES": str(options.processes),
        "SGLANG_MOE_AUTOTUNE_MODE": "all",
    }
    short = ("--chunked-prefill-size", "2048", "--cuda-graph-max-bs", "16")
    prompts = [[(7 * n + k) % 30_000 + 1 for k in range(24)] for n in range(4)]
    with Server(model, free_port(), options.out / f"{name}.log", environ, (*flags, *short)) as server:
        before = [answer.get("output_ids") for answer in server.generate(prompts, 16)]
        time.sleep(max(1.0, min(options.idle_s, parts.left_s - 20)))
        after = [answer.get("output_ids") for answer in server.generate(prompts, 16)]
        started_s = server.started_s
    records = [
        record
        for entry in store.environments(root)
        if entry.environment
        for record in store.read(entry.path).records.values()
    ]
    faster = sorted((r for r in records if r.verdict == "faster"), key=lambda r: r.M)
    parts.found[name] = {
        "started_s": round(started_s, 1),
        "settled": len(records),
        "faster": [[r.shape.slug, r.M, round(r.evidence.gain, 4), str(r.pair)] for r in faster],
        "same_tokens": before == after,
    }
    print(json.dumps({name: parts.found[name]}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=DEFAULT_ROWS)
    parser.add_argument("--m", default=DEFAULT_M)
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--real-server", metavar="NAMES")
    parser.add_argument("--idle-s", type=float, default=90.0)
    parser.add_argument("--tables", type=Path)
    options = parser.parse_args()
    if options.tables:
        sys.stdout.write(tables(json.loads(options.tables.read_text())))
        return 0
    if options.out is None:
        parser.error("--out DIR is needed: name a folder for what is found")
    options.out.mkdir(parents=True, exist_ok=True)
    of_this_checkout()
    return serve(options) if options.real_server else cover(options)


if __name__ == "__main__":
    sys.exit(main())
