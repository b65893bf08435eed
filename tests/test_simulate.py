"""The real tuner on landscapes: near the best where there is one, no better than chance where nothing can be known."""

from __future__ import annotations

import json
import random
from statistics import fmean

import pytest
import synthetic

from sglang_moe_autotune.landscape import Landscape, load, shipped
from sglang_moe_autotune.prior import Prior
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig
from sglang_moe_autotune.simulate import simulate

H200 = load(shipped()[0])


def test_the_recorded_landscape_without_any_config_file() -> None:
    results = [simulate(H200, seed, prior=Prior()) for seed in range(3)]
    assert fmean(r["regret_geomean"] for r in results) < 0.010
    assert max(r["compiled"] for r in results) <= 80
    assert max(r["gpu_s"] for r in results) < 4.0
    assert all(row["accepted"] for r in results for row in r["per_m"].values())


@pytest.mark.parametrize(
    "shape",
    [synthetic.bf16_shape(), synthetic.bf16_shape(8, 7168, 4096, 2), synthetic.bf16_shape(256, 256, 7168, 8)],
    ids=lambda shape: shape.slug,
)
def test_landscapes_of_another_make(shape: object) -> None:
    landscape = synthetic.landscape(shape, ms=(8, 512, 4096))  # type: ignore[arg-type]
    result = simulate(landscape, 0, prior=Prior())
    heuristic = [landscape.baselines[M] for M in landscape.ms]
    worst = max((b.up_us + b.down_us) / landscape.best(M)[1] for b, M in zip(heuristic, landscape.ms, strict=True)) - 1
    assert result["regret_geomean"] < 0.06 < worst
    assert result["compiled"] <= 80


def test_where_nothing_beats_the_baseline_nothing_is_learned() -> None:
    for seed in range(3):
        result = simulate(synthetic.unbeatable(H200), seed, prior=Prior())
        assert not any(row["accepted"] for row in result["per_m"].values())
        assert result["regret_geomean"] == pytest.approx(0.0)


def random_search(landscape: Landscape, configs: int, seed: int) -> float:
    """The mean regret of the best pair among so many launchable configs drawn at random, timed without noise."""
    launchable = [c for c in landscape.candidates if c not in landscape.out_of_resources]
    drawn = random.Random(seed).sample(launchable, configs)  # noqa: S311 - no secret
    regrets = []
    for M in landscape.ms:  # noqa: N806
        best_us = landscape.pair_us(M, landscape.baselines[M].pair)
        for tile in {c.BLOCK_SIZE_M for c in drawn}:
            row = [c for c in drawn if tile == c.BLOCK_SIZE_M and c in landscape.up_us[M] and c in landscape.down_us[M]]
            best_us = min([best_us, *(landscape.pair_us(M, ConfigPair(u, d)) for u in row for d in row)])
        regrets.append(best_us / landscape.best(M)[1] - 1)
    return fmean(regrets)


def test_shuffled_latencies_leave_it_no_better_than_chance() -> None:
    ours, chance = [], []
    for seed in range(12):
        landscape = synthetic.shuffled(H200, seed)
        result = simulate(landscape, seed, prior=Prior())
        ours.append(fmean(row["regret"] for row in result["per_m"].values()))
        chance.append(random_search(landscape, result["compiled"], seed))
    assert fmean(ours) > 0.8 * fmean(chance)


def test_a_seed_gives_one_result() -> None:
    landscape = synthetic.landscape(ms=(8, 512))
    assert simulate(landscape, 3, prior=Prior()) == simulate(landscape, 3, prior=Prior())
    assert simulate(landscape, 3, prior=Prior())["gpu_s"] != simulate(landscape, 4, prior=Prior())["gpu_s"]


def test_the_budget_stops_it_and_untuned_m_keep_the_baseline() -> None:
    result = simulate(H200, 0, budget_s=0.2, prior=Prior())
    assert 0.2 <= result["gpu_s"] < 0.21
    rows = result["per_m"].values()
    assert not all(row["accepted"] for row in rows)
    assert all(row["chosen_us"] == row["baseline_us"] for row in rows if not row["accepted"])


def test_the_result_can_be_recomputed_from_its_configs() -> None:
    result = json.loads(json.dumps(simulate(H200, 1, prior=Prior())))
    assert set(result) == {"shape", "per_m", "regret_geomean", "regret_p95", "gpu_s", "compiled", "seed", "configs"}
    for m, row in result["per_m"].items():
        assert set(row) == {"baseline_us", "chosen_us", "best_us", "regret", "measured", "gpu_s", "accepted"}
        pair = ConfigPair(*(KernelConfig.from_dict(result["configs"][m][gemm]) for gemm in ("up", "down")))
        assert H200.pair_us(int(m), pair) == pytest.approx(row["chosen_us"])
        assert row["regret"] == pytest.approx(row["chosen_us"] / H200.best(int(m))[1] - 1)
    assert sum(row["gpu_s"] for row in result["per_m"].values()) == pytest.approx(result["gpu_s"])


def test_few_distinct_winners_serve_all_m() -> None:
    configs = simulate(H200, 0, prior=Prior())["configs"]
    assert len({json.dumps(config) for pair in configs.values() for config in pair.values()}) <= 12
