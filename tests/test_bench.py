"""The benches: few false improvements in the noise of an idle GPU, rivals on the same budget, figures that add up."""

from __future__ import annotations

import argparse
import gzip
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import synthetic

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import bench_decisions
import bench_rivals
import bench_search

from sglang_moe_autotune.landscape import Landscape, load, shipped
from sglang_moe_autotune.routings import sampling

SCRIPTS = Path(bench_search.__file__).resolve().parent
LANDSCAPE = synthetic.landscape(ms=(8, 512), ruggedness=0.02)
OPTIONS = argparse.Namespace(noise=2.0, noise_model="launch", seeds=2, rivals=False, captured=0)


def test_one_config_under_two_names_in_a_thousand_decisions_on_an_idle_gpu() -> None:
    """At most 1 % with 95 % confidence takes at most 4 of 1,002; the first test alone may fail 1 in 200 times."""
    found = bench_decisions.decisions(1002, 0.0, 2.0, "idle")
    assert found["decisions"] == 1002
    assert found["faster_in_the_first_test"] <= 12
    assert found["accepted"] <= 4
    assert found["rate_at_most"] <= 0.01


def test_a_config_that_is_one_percent_slower_is_never_accepted_on_an_idle_gpu() -> None:
    assert bench_decisions.decisions(300, 0.01, 2.0, "idle")["accepted"] == 0


def test_a_config_that_is_faster_by_a_tenth_is_accepted_on_an_idle_gpu() -> None:
    assert bench_decisions.decisions(30, -0.1, 2.0, "idle")["accepted"] == 30


def test_whole_searches_among_equals_accept_nothing() -> None:
    assert bench_decisions.searches(12, 2.0, "idle")["accepted"] == 0


@pytest.mark.parametrize(("found", "of", "bound"), [(0, 1000, 0.00299), (0, 300, 0.00994), (4, 1000, 0.00913)])
def test_the_bound_is_that_of_the_binomial(found: int, of: int, bound: float) -> None:
    assert bench_decisions.upper_bound(found, of) == pytest.approx(bound, rel=0.01)


def test_a_run_begins_with_the_baseline_and_ends_as_the_simulation_says() -> None:
    run = bench_search.ours(LANDSCAPE, 0, (), OPTIONS)
    assert run.trace[0] == bench_rivals.Point(0, 0.0, {M: b.pair for M, b in LANDSCAPE.baselines.items()})
    assert [p.gpu_s for p in run.trace] == sorted(p.gpu_s for p in run.trace)
    assert bench_search.at(run.trace, compiled=0) == run.trace[0].pairs
    assert bench_search.at(run.trace) == run.trace[-1].pairs
    one = bench_search.summary(LANDSCAPE, [run])
    assert one["regret_geomean"] < one["after_20_compiled"] + 1e-9
    assert one["accepted"] == 2
    assert one["not_faster"] == 0


def test_an_accepted_row_that_is_not_faster_is_counted() -> None:
    worst = {M: max(row, key=row.__getitem__) for M, row in LANDSCAPE.up_us.items()}
    pairs = {M: synthetic.ConfigPair(c, c) for M, c in worst.items()}
    assert bench_search.accepted(LANDSCAPE, pairs) == (2, 2, 2)


@pytest.mark.parametrize("budget", [(10, 1e9), (10_000, 0.05)], ids=["compiled", "gpu-seconds"])
def test_a_rival_keeps_to_its_budget(budget: tuple[int, float]) -> None:
    field = bench_rivals.Field(LANDSCAPE, 0, 2.0, "launch")
    trace = bench_rivals.run(bench_rivals.by_chance(LANDSCAPE, 0), field, *budget)
    assert trace[-1].compiled <= budget[0]
    assert trace[-2].gpu_s < budget[1]
    assert trace[-1].compiled == budget[0] or trace[-1].gpu_s >= budget[1]


def test_a_rival_pays_for_a_sample_what_the_search_pays() -> None:
    sizes = set()
    for M, own in LANDSCAPE.baselines.items():  # noqa: N806
        field = bench_rivals.Field(LANDSCAPE, 0, 0.0, "launch")
        assert field._paired(M, "up", 0.9 * own.up_us, 2) == pytest.approx(math.log(0.9))
        sizes.add(size := sampling(LANDSCAPE.shape, M).per_sample)
        assert field.gpu_s * 1e6 == pytest.approx(2 * size * 1.9 * own.up_us)
    assert sizes == {1, 8}


def test_a_rival_that_sees_all_without_noise_chooses_the_best() -> None:
    field = bench_rivals.Field(LANDSCAPE, 0, 0.0, "launch")
    last = bench_rivals.run(bench_rivals.by_chance(LANDSCAPE, 0), field, 10_000, 1e9)[-1]
    assert bench_search.regrets(LANDSCAPE, last.pairs) == pytest.approx([0.0, 0.0])


def test_the_grid_has_as_many_as_may_be_compiled() -> None:
    rows = [list(bench_rivals.plain_grid(LANDSCAPE, 80, seed).configs) for seed in range(3)]
    assert all(80 <= len(row) < 100 for row in rows)
    assert not set(rows[0]) & set(rows[1])


def test_a_public_optimiser_comes_nearer_than_chance() -> None:
    pytest.importorskip("optuna")
    last = []
    for rival in (bench_rivals.tpe(LANDSCAPE, 1), bench_rivals.by_chance(LANDSCAPE, 1)):
        trace = bench_rivals.run(rival, bench_rivals.Field(LANDSCAPE, 1, 1.0, "launch"), 60, 1e9)
        assert trace[-1].compiled == 60
        last.append(bench_search.geomean(bench_search.regrets(LANDSCAPE, trace[-1].pairs)))
    assert last[0] < last[1]


def test_between_two_m_times_lie_between_and_recorded_ones_stay() -> None:
    recorded = load(shipped()[0])
    dense = bench_search.between(recorded, (2, 3, 16, 4096, 8192))
    assert dense.ms == (2, 3, 16, 4096)
    assert dense.best(16)[0] == recorded.best(16)[0]
    assert dense.best(16)[1] == pytest.approx(recorded.best(16)[1])
    for config, us in dense.up_us[3].items():
        ends = sorted((recorded.up_us[2][config], recorded.up_us[16][config]))
        assert ends[0] <= us <= ends[1]


def written(landscape: Landscape, path: Path) -> Path:
    """A file of that landscape."""
    number = {config: str(n) for n, config in enumerate(landscape.candidates)}
    tables = {
        name: {str(m): {number[c]: us for c, us in row.items()} for m, row in table.items()}
        for name, table in (("up_us", landscape.up_us), ("down_us", landscape.down_us))
    }
    shape = landscape.shape
    content = {
        "E": shape.E, "N": shape.N, "K": shape.K, "topk": shape.top_k, **tables,
        "candidates": [c.to_dict() for c in landscape.candidates],
        "default": {
            str(m): {"config": b.pair.up.to_dict(), "up_us": b.up_us, "down_us": b.down_us}
            for m, b in landscape.baselines.items()
        },
    }  # fmt: skip
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


def bench(*arguments: object, code: str = "pass") -> subprocess.CompletedProcess[str]:
    """``scripts/bench`` in a process, after some code of a test."""
    start = f"import runpy, sys; {code}; sys.argv = {['bench', *map(str, arguments)]!r}; "
    start += f"runpy.run_path({str(SCRIPTS / 'bench')!r}, run_name='__main__')"
    return subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, timeout=120, check=False)


def test_the_bench_of_a_file_prints_a_row_for_each_prior(tmp_path: Path) -> None:
    path = written(LANDSCAPE, tmp_path / "made.json.gz")
    done = bench("search", "--landscapes", path, "--seeds", 1, "--no-rivals", "--captured", 0, "--configs", tmp_path)
    assert done.returncode == 0, done.stderr
    assert LANDSCAPE.shape.slug in done.stdout
    assert [line.split("  ")[0] for line in done.stdout.splitlines() if line.startswith("search")] == [
        "search", "search, own files", "search, no files",
    ]  # fmt: skip
    assert "per M: 8 " in done.stdout


def test_what_is_missing_is_named_with_the_cure() -> None:
    done = bench("search", code="sys.modules['optuna'] = None; sys.modules['matplotlib'] = None")
    assert done.returncode == 2
    assert "pip install optuna matplotlib" in done.stderr


def test_an_unknown_bench_is_answered_with_those_there_are() -> None:
    done = bench("serach")
    assert done.returncode == 2
    assert "scripts/bench search" in done.stderr
