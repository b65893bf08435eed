"""Noise leaves the truth in the middle of the ratios, and the idle kind does what idle GPUs do."""

from __future__ import annotations

import math
import random
from statistics import correlation, median, stdev
from typing import get_args

import pytest

from sglang_moe_autotune.noise import NoiseModel, make

MODELS = get_args(NoiseModel)


def pairs(model: NoiseModel, slices: int, count: int = 4, seed: int = 0) -> list[tuple[float, float]]:
    noise = make(model, 0.02, random.Random(seed))  # noqa: S311 - no secret
    begins = [number % 4 in (0, 3) for number in range(slices)]
    return [pair for first in begins for pair in noise.slice(90.0, 100.0, count, begins=first)]


@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("model", MODELS)
def test_the_true_ratio_is_the_median(model: NoiseModel, count: int) -> None:
    ratios = [ours / theirs for ours, theirs in pairs(model, 4000, count)]
    assert len(ratios) == 4000 * count
    assert median(ratios) == pytest.approx(0.9, rel=0.003)


@pytest.mark.parametrize("model", MODELS)
def test_a_seed_gives_one_noise(model: NoiseModel) -> None:
    assert pairs(model, 20) == pairs(model, 20) != pairs(model, 20, seed=1)


def test_launches_of_the_plain_noise_are_independent() -> None:
    logs = [(math.log(a), math.log(b)) for a, b in pairs("launch", 2000)]
    assert stdev(a for a, _ in logs) == pytest.approx(0.02, rel=0.05)
    assert abs(correlation(*zip(*logs, strict=True))) < 0.05


def test_the_clock_of_an_idle_gpu_is_felt_by_both_sides_of_a_pair() -> None:
    logs = [(math.log(a), math.log(b)) for a, b in pairs("idle", 2000)]
    assert stdev(a for a, _ in logs) > 0.08
    assert stdev(a - b for a, b in logs) < 0.12
    assert correlation(*zip(*logs, strict=True)) > 0.5


def test_an_idle_gpu_steps_its_clock_has_cold_launches_and_is_held_up() -> None:
    found = pairs("idle", 6000, count=1)
    ratios = [ours / theirs / 0.9 for ours, theirs in found]
    assert sum(abs(math.log(r)) > 0.1 for r in ratios) / len(ratios) > 0.1  # a cold first launch on either side
    assert sum(r > 1.5 for r in ratios) > 5
    assert sum(r < 1 / 1.5 for r in ratios) > 5
    clocks = [median(theirs for _, theirs in found[n : n + 15]) / 100 for n in range(0, 6000, 15)]
    assert min(clocks) < 1.1
    assert max(clocks) > 1.3
