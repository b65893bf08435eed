"""The real tuner on landscapes: near the best where there is one, no better than chance where nothing can be known."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec
import pytest
import synthetic

from sglang_moe_autotune.landscape import Landscape, load, parse, shipped
from sglang_moe_autotune.prior import Prior
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig
from sglang_moe_autotune.simulate import simulate

if TYPE_CHECKING:
    from pathlib import Path

H200 = load(shipped()[0])


def test_the_recorded_landscape_without_any_config_file() -> None:
    results = [simulate(H200, seed, prior=Prior()) for seed in range(3)]
    assert fmean(r["regret_geomean"] for r in results) < 0.010
    assert max(r["compiled"] for r in results) <= 80
    assert max(r["gpu_s"] for r in results) < 5.0
    assert all(row["accepted"] for r in results for row in r["per_m"].values())


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.name)
def test_every_shipped_landscape_without_any_config_file(path: Path) -> None:
    recorded = load(path)
    order = list(recorded.ms)
    random.Random(7).shuffle(order)  # noqa: S311 - no secret
    result = simulate(recorded, 7, prior=Prior(), order=order)
    assert result["regret_geomean"] < (0.015 if len(order) > 4 else 0.025)  # M that lie far apart teach each other less
    assert result["compiled"] <= 80
    assert result["gpu_s"] < 10
    assert all(row["chosen_us"] < row["baseline_us"] for row in result["per_m"].values() if row["accepted"])
    configs = result["configs"].values()
    assert all(pair["up"]["BLOCK_SIZE_M"] == pair["down"]["BLOCK_SIZE_M"] for pair in configs)


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
    assert result["regret_geomean"] < 0.09 < worst
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


def test_a_seed_gives_one_result_in_every_process() -> None:
    file = next(path for path in shipped() if "e256_n256_k3072" in path.name)
    code = (
        "import json, sys; from pathlib import Path; from sglang_moe_autotune.landscape import load;"
        "from sglang_moe_autotune.prior import Prior; from sglang_moe_autotune.simulate import simulate;"
        "print(json.dumps(simulate(load(Path(sys.argv[1])), 1, prior=Prior())))"
    )
    # Addresses, and with them the hashes of some values, are others in each process.
    told = {subprocess.check_output([sys.executable, "-c", code, str(file)], timeout=120) for _ in range(3)}
    assert len(told) == 1


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


# -- files that nobody has seen ----------------------------------------------------------------------------------------

TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
OFF_THE_AXES = TILE | {"BLOCK_SIZE_N": 96, "num_warps": 2, "num_stages": 1}
ROCM = TILE | {"num_warps": 8, "num_stages": 2, "waves_per_eu": 2}


def odd(**changes: object) -> Landscape:
    """A file with two candidates at M=4, the second one twice as fast as the baseline, changed."""
    file = {
        "E": 8, "N": 64, "K": 128, "topk": 2, "dtype": None, "block_shape": None,
        "candidates": [TILE | {"num_warps": 4, "num_stages": 3}, TILE | {"num_warps": 4, "num_stages": 4}],
        "up_us": {"4": {"0": 30.0, "1": 10.0}}, "down_us": {"4": {"0": 30.0, "1": 10.0}},
        "default": {"4": {"config": TILE, "up_us": 20.0, "down_us": 20.0}},
    }  # fmt: skip
    return parse(json.dumps(file | changes).encode())


@pytest.mark.parametrize(
    ("changes", "regret"),
    [
        pytest.param({}, 0.0, id="as-it-is"),
        pytest.param({"candidates": [], "up_us": {"4": {}}, "down_us": {"4": {}}}, 0.0, id="no-candidate"),
        pytest.param({"down_us": {"4": {}}}, 0.0, id="a-candidate-with-half-of-the-baseline"),
        pytest.param({"candidates": [OFF_THE_AXES, ROCM]}, 0.0, id="off-the-axes-and-keys-of-rocm"),
        pytest.param({"dtype": "int4_w4a16", "block_shape": [0, 32]}, 0.0, id="packed-weights"),
        pytest.param({"dtype": "fp8_w8a8", "per_channel_quant": True}, 0.0, id="per-channel"),
        pytest.param({"topk": 1, "E": 1}, 0.0, id="one-expert"),
        pytest.param({"device_name": "AMD Radeon Graphics", "future": {"x": [1]}}, 0.0, id="another-device"),
        pytest.param(
            {
                "up_us": {"65536": {"0": 3e6, "1": 1e6}}, "down_us": {"65536": {"0": 3e6, "1": 1e6}},
                "default": {"65536": {"config": TILE, "up_us": 2e6, "down_us": 2e6}},
            },
            0.0,
            id="seconds-a-launch",
        ),
        pytest.param(
            {
                "up_us": {"4": {"0": 2e-3, "1": 1e-3}}, "down_us": {"4": {"0": 2e-3, "1": 1e-3}},
            },
            0.0,
            id="nearly-no-time",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_odd_files_are_searched_to_their_end(changes: dict[str, object], regret: float, noise: float) -> None:
    result = simulate(odd(**changes), 0, noise, prior=Prior())
    assert result["regret_geomean"] == pytest.approx(regret)
    assert json.loads(json.dumps(result)).keys() == result.keys()
    assert len(result["per_m"]) == len(result["configs"]) == 1


def test_a_budget_below_one_launch_is_spent_by_the_first_one() -> None:
    result = simulate(odd(), 0, budget_s=1e-12, prior=Prior())
    assert result["gpu_s"] < 1e-3
    assert not any(row["accepted"] for row in result["per_m"].values())


def test_the_order_of_m_in_a_file_and_its_candidates_do_not_matter_to_what_is_best() -> None:
    backwards = msgspec.structs.replace(
        H200,
        candidates=H200.candidates[::-1],
        baselines=dict(reversed(H200.baselines.items())),
    )
    assert simulate(backwards, 0, prior=Prior()) == simulate(H200, 0, prior=Prior())


def test_the_noise_of_an_idle_gpu_costs_little_and_fools_nobody() -> None:
    result = simulate(H200, 0, noise_model="idle", prior=Prior())
    assert result["regret_geomean"] < 0.02
    assert all(row["chosen_us"] < row["baseline_us"] for row in result["per_m"].values() if row["accepted"])
