"""Measures the search on recorded landscapes, beside other ways to choose configs with the same budget.

    scripts/bench search                      # all shipped landscapes, 20 seeds: about ten minutes
    scripts/bench search --quick              # 3 seeds
    scripts/bench search --landscapes FILE... --seeds 5 --out /tmp/bench --no-rivals

The heat, and so the order of M, is another one with each seed. ``search`` is the tuner that ships, without the config
files of the landscape's own (E, N): what it finds on a shape that nobody has tuned. ``search, own files`` has those
of other Triton versions and GPUs too, ``search, no files`` none at all. The others stop when they have compiled as many
configs, or spent as many GPU seconds, as ``search`` has with that seed. An M without an answer has the baseline.

Wants `pip install optuna matplotlib` (the extra `bench`), and SGLang's config files: those of the installed SGLang,
or of --configs FOLDER. Writes search.json and search.png to docs/, or to --out.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sglang_moe_autotune.landscape import Landscape, load, shipped
from sglang_moe_autotune.prior import Prior, find_files
from sglang_moe_autotune.simulate import installed_files, simulate
from sglang_moe_autotune.tuner import TunerOptions

sys.path.insert(0, str(Path(__file__).resolve().parent))

import bench_rivals as rivals
from bench_rivals import Point

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sglang_moe_autotune.prior import ConfigFile
    from sglang_moe_autotune.records import Record
    from sglang_moe_autotune.replay import ReplayProvider
    from sglang_moe_autotune.shapes import ConfigPair

DOCS = Path(__file__).resolve().parent.parent / "docs"
CAPTURED = (
    1, 2, 3, *range(4, 33, 4), *range(40, 257, 8), *range(288, 513, 32), *range(576, 1025, 64),
    *range(1280, 4097, 256), *range(4608, 8193, 512),
)  # fmt: skip
"""token counts that SGLang captures graphs for: decode sizes and prefill sizes"""
COMPILED_GRID = tuple(range(0, 81, 4))
GPU_S_GRID = tuple(round(0.02 * 1.35**n, 3) for n in range(25))


class Run(NamedTuple):
    """One run of one way to choose."""

    trace: list[Point]
    accepted: int
    not_faster: int
    """accepted rows that are truly not faster than the baseline"""
    slower: int
    """by more than 1 %"""


_BEST: dict[int, tuple[Landscape, dict[int, float]]] = {}
"""by id, each with its landscape so that no other one gets the id"""


def regrets(landscape: Landscape, pairs: dict[int, ConfigPair]) -> list[float]:
    if id(landscape) not in _BEST:
        _BEST[id(landscape)] = landscape, {M: landscape.best(M)[1] for M in landscape.ms}
    best_us = _BEST[id(landscape)][1]
    return [landscape.pair_us(M, pairs[M]) / best_us[M] - 1 for M in landscape.ms]


def geomean(values: Iterable[float]) -> float:
    """Of regrets."""
    return math.exp(fmean(map(math.log1p, values))) - 1


def p95(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[max(0, math.ceil(0.95 * len(ordered)) - 1)]


def ours(landscape: Landscape, seed: int, files: Sequence[ConfigFile], options: argparse.Namespace) -> Run:
    prior = Prior(files, landscape.device_name)  # a new one: it learns while it is used
    pairs = {M: b.pair for M, b in landscape.baselines.items()}
    trace = [Point(0, 0.0, dict(pairs))]
    faster: set[int] = set()

    def learned(record: Record, provider: ReplayProvider) -> None:
        pairs[record.M] = record.pair
        (faster.add if record.verdict == "faster" else faster.discard)(record.M)
        trace.append(Point(len(provider.compiled), provider.gpu_s, dict(pairs)))

    order = list(landscape.ms)
    random.Random(seed).shuffle(order)  # noqa: S311 - no secrets
    result = simulate(
        landscape, seed, options.noise, noise_model=options.noise_model, prior=prior, order=order, learned=learned,
        options=TunerOptions(seed=seed, source="replayed"),
    )  # fmt: skip
    trace.append(Point(result["compiled"], result["gpu_s"], dict(pairs)))
    return Run(trace, *accepted(landscape, {M: pairs[M] for M in faster}))


def accepted(landscape: Landscape, pairs: dict[int, ConfigPair]) -> tuple[int, int, int]:
    ratios = []
    for M, pair in pairs.items():  # noqa: N806
        baseline = landscape.baselines[M]
        ratios.append(landscape.pair_us(M, pair) / (baseline.up_us + baseline.down_us))
    return len(ratios), sum(r >= 1 for r in ratios), sum(r > 1.01 for r in ratios)


def theirs(landscape: Landscape, trace: list[Point]) -> Run:
    changed = {M: p for M, p in trace[-1].pairs.items() if p != landscape.baselines[M].pair}
    return Run(trace, *accepted(landscape, changed))


def at(trace: list[Point], *, compiled: float = math.inf, gpu_s: float = math.inf) -> dict[int, ConfigPair]:
    """What was chosen when so much was spent."""
    return next(p for p in reversed(trace) if p.compiled <= compiled and p.gpu_s <= gpu_s).pairs


def summary(landscape: Landscape, runs: list[Run]) -> dict[str, Any]:
    last = [regrets(landscape, run.trace[-1].pairs) for run in runs]
    early = [regrets(landscape, at(run.trace, compiled=20)) for run in runs]
    winners = [len({c for p in run.trace[-1].pairs.values() for c in (p.up, p.down)}) for run in runs]
    return {
        "regret_geomean": round(geomean(r for row in last for r in row), 5),
        "regret_p95": round(p95(r for row in last for r in row), 5),
        "worst_run_geomean": round(max(map(geomean, last)), 5),
        "after_20_compiled": round(geomean(r for row in early for r in row), 5),
        "gpu_s": round(fmean(run.trace[-1].gpu_s for run in runs), 3),
        "most_gpu_s": round(max(run.trace[-1].gpu_s for run in runs), 3),
        "compiled": round(fmean(run.trace[-1].compiled for run in runs), 1),
        "most_compiled": max(run.trace[-1].compiled for run in runs),
        "winners": round(fmean(winners), 1),
        "most_winners": max(winners),
        "accepted": sum(run.accepted for run in runs),
        "not_faster": sum(run.not_faster for run in runs),
        "slower_by_1_percent": sum(run.slower for run in runs),
        "per_m": {str(m): round(geomean(row[n] for row in last), 5) for n, m in enumerate(landscape.ms)},
        "per_m_p95": {str(m): round(p95(row[n] for row in last), 5) for n, m in enumerate(landscape.ms)},
    }


def curves(landscape: Landscape, runs: list[Run]) -> dict[str, list[float]]:
    """The mean regret on two grids; a run that has ended stays where it ended."""
    def line(**where: float) -> float:
        return round(geomean(r for run in runs for r in regrets(landscape, at(run.trace, **where))), 5)

    return {"compiled": [line(compiled=n) for n in COMPILED_GRID], "gpu_s": [line(gpu_s=s) for s in GPU_S_GRID]}


def between(landscape: Landscape, ms: Iterable[int]) -> Landscape:
    """The same device at M that were not recorded: times between two recorded M, on a line in the logarithms.

    The baseline between two M is that of the lower one (SGLang's heuristic changes at one M, not gradually).
    """
    known = landscape.ms
    wanted = tuple(m for m in ms if known[0] <= m <= known[-1])
    tables: dict[str, dict[int, dict[Any, float]]] = {"up": {}, "down": {}}
    baselines = {}
    for m in wanted:
        low, high = max(k for k in known if k <= m), min(k for k in known if k >= m)
        part = 0.0 if low == high else math.log(m / low) / math.log(high / low)
        for gemm, table in (("up", landscape.up_us), ("down", landscape.down_us)):
            tables[gemm][m] = {
                c: math.exp((1 - part) * math.log(us) + part * math.log(table[high][c]))
                for c, us in table[low].items()
                if c in table[high]
            }
        a, b = landscape.baselines[low], landscape.baselines[high]
        grown = [math.exp((1 - part) * math.log(x) + part * math.log(y))
                 for x, y in ((a.up_us, b.up_us), (a.down_us, b.down_us))]  # fmt: skip
        baselines[m] = msgspec.structs.replace(a, up_us=grown[0], down_us=grown[1])
    return msgspec.structs.replace(landscape, up_us=tables["up"], down_us=tables["down"], baselines=baselines)


def bench(landscape: Landscape, files: Sequence[ConfigFile], options: argparse.Namespace) -> dict[str, Any]:
    own = (landscape.shape.E, landscape.shape.N)
    priors: dict[str, Sequence[ConfigFile]] = {
        "search": [f for f in files if own != (f.E, f.N)],
        "search, own files": files,
        "search, no files": [],
    }
    runs: dict[str, list[Run]] = {}
    for seed in range(options.seeds):
        begun = time.perf_counter()
        for name, its_files in priors.items():
            runs.setdefault(name, []).append(ours(landscape, seed, its_files, options))
        if options.rivals:
            _, gpu_s, _ = runs["search"][-1].trace[-1]
            compiled = runs["search"][-1].trace[-1].compiled
            left_out = Prior(priors["search"], landscape.device_name)
            alone = rivals.prior_alone(landscape, left_out)
            first = list(islice(rivals.prior_alone(landscape, left_out).configs, 20))
            for name, rival in (
                ("random", rivals.by_chance(landscape, seed)),
                ("grid", rivals.plain_grid(landscape, compiled, seed)),
                ("prior alone", alone),
                ("TPE", rivals.tpe(landscape, seed)),
                ("TPE after 20 of the prior", rivals.tpe(landscape, seed, first)),
            ):
                field = rivals.Field(landscape, seed, options.noise, options.noise_model)
                runs.setdefault(name, []).append(theirs(landscape, rivals.run(rival, field, compiled, gpu_s)))
        print(f"{landscape.shape.slug} seed {seed}: {time.perf_counter() - begun:.1f} s", file=sys.stderr)
    result: dict[str, Any] = {name: summary(landscape, found) for name, found in runs.items()}
    for name, found in runs.items():
        result[name]["curves"] = curves(landscape, found)
    if options.captured:
        dense = between(landscape, CAPTURED)
        found = [ours(dense, seed, priors["search"], options) for seed in range(min(options.seeds, options.captured))]
        result["search, all captured sizes"] = summary(dense, found)
    return result


def table(results: dict[str, Any]) -> str:
    lines = []
    for slug, one in results.items():
        lines += ["", slug, f"{'':28}regret    p95  at 20  GPU s compiled winners not faster/accepted"]
        for name, r in one.items():
            lines.append(
                f"{name:28}{r['regret_geomean']:6.2%} {r['regret_p95']:6.2%} {r['after_20_compiled']:6.2%} "
                f"{r['gpu_s']:6.2f} {r['compiled']:8.1f} {r['winners']:7.1f} {r['not_faster']}/{r['accepted']}"
            )
        lines.append("per M: " + ", ".join(f"{m} {r:.2%}" for m, r in one["search"]["per_m"].items()))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--landscapes", type=Path, nargs="+", default=shipped(), metavar="FILE")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="3 seeds")
    parser.add_argument("--noise", type=float, default=2.0, metavar="PERCENT")
    parser.add_argument("--noise-model", choices=("launch", "idle"), default="launch")
    parser.add_argument("--captured", type=int, default=5, metavar="SEEDS", help="with all captured sizes; 0 for none")
    parser.add_argument("--configs", type=Path, help="SGLang's folder of triton_X_Y_Z folders")
    parser.add_argument("--no-rivals", dest="rivals", action="store_false")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="FOLDER")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.captured = 3, 1
    missing = [name for name in ("optuna", "matplotlib") if find_spec(name) is None]
    if options.rivals and missing:
        parser.error(f"{' and '.join(missing)} missing: pip install {' '.join(missing)}, or give --no-rivals")
    files = find_files(options.configs) if options.configs else installed_files()
    if not files:
        print("no config files of SGLang: install sglang, or give --configs; the prior is empty now", file=sys.stderr)
    about = {
        "seeds": options.seeds, "noise_percent": options.noise, "noise_model": options.noise_model,
        "config_files": len(files), "compiled_grid": COMPILED_GRID, "gpu_s_grid": GPU_S_GRID,
    }  # fmt: skip
    results = {}
    for path in options.landscapes:
        landscape = load(path)
        results[landscape.shape.slug] = bench(landscape, files, options)
        print(table({landscape.shape.slug: results[landscape.shape.slug]}), flush=True)
        if options.rivals:
            write({"about": about, "landscapes": results}, options.out)
    return 0


def write(found: dict[str, Any], folder: Path) -> None:
    """After each landscape, so that an interrupted run leaves what it has. One line a way to choose."""
    import bench_plot  # noqa: PLC0415 - draws with an extra

    folder.mkdir(parents=True, exist_ok=True)
    lines = [f'"about": {json.dumps(found["about"])}']
    for slug, ways in found["landscapes"].items():
        rows = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(way)}" for name, way in ways.items())
        lines.append(f"{json.dumps(slug)}: {{\n  {rows}\n }}")
    about, *landscapes = lines
    text = "{" + about + ',\n"landscapes": {\n ' + ",\n ".join(landscapes) + "\n}}\n"
    (folder / "search.json").write_text(text, encoding="utf-8")
    bench_plot.draw(found, folder / "search.png")


if __name__ == "__main__":
    sys.exit(main())
