"""The paired test says ``faster`` of what is faster, and hardly ever of anything else, under hostile noise."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest

from sglang_moe_autotune.bench import Sample
from sglang_moe_autotune.decision import LOOKS, PairedTest, beyond

Noise = Callable[[random.Random, int], tuple[float, float]]
"""factors of (candidate, baseline) in the n-th sample"""


def gaussian(percent: float) -> Noise:
    return lambda rng, n: (math.exp(rng.gauss(0, percent / 100)), math.exp(rng.gauss(0, percent / 100)))


def with_outliers(rng: random.Random, n: int) -> tuple[float, float]:
    return tuple(math.exp(rng.gauss(0, 0.02)) * (rng.uniform(1.2, 4.0) if rng.random() < 0.05 else 1) for _ in "cb")  # type: ignore[return-value]


def drifting(rng: random.Random, n: int) -> tuple[float, float]:
    """A clock that moves by a third while the test runs, felt by both sides of a pair."""
    clock = 1 + 0.33 * math.sin(n / 40)
    return clock * math.exp(rng.gauss(0, 0.03)), clock * math.exp(rng.gauss(0, 0.03))


NOISES = {"2%": gaussian(2), "5%": gaussian(5), "outliers": with_outliers, "drift": drifting}


def run(gain: float, noise: Noise, seed: int, min_gain: float = 0.01, floor: float = 0.0) -> PairedTest:
    rng, test, n = random.Random(seed), PairedTest(min_gain, floor=floor), 0  # noqa: S311 - no secret
    while test.outcome == "undecided":
        pairs: list[list[Sample]] = [[], []]
        for side, (count, us) in enumerate(zip(test.wanted, (300.0, 150.0), strict=True)):
            for _ in range(min(count, 5)):
                ours, theirs = noise(rng, n)
                pairs[side].append(Sample(us * (1 - gain) * ours, us * theirs))
                n += 1
        test.add(*pairs)
    return test


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_one_config_under_two_names_is_accepted_in_less_than_one_of_a_hundred(noise: Noise) -> None:
    accepted = sum(run(0.0, noise, seed).outcome == "faster" for seed in range(250))
    confirmed = sum(
        run(0.0, noise, seed).outcome == run(0.0, noise, 1000 + seed).outcome == "faster" for seed in range(250)
    )
    assert accepted <= 2
    assert confirmed == 0


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_a_slower_config_is_never_accepted(noise: Noise) -> None:
    assert all(run(-0.01, noise, seed).outcome == "tie" for seed in range(100))


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_five_percent_are_seen_at_once_in_small_noise_and_soon_in_any(noise: Noise) -> None:
    tests = [run(0.05, noise, seed) for seed in range(50)]
    assert sum(test.outcome == "faster" for test in tests) >= 48
    assert statistics.median(test.estimate.gain for test in tests) == pytest.approx(0.05, abs=0.02)


def test_clear_cases_are_cheap() -> None:
    assert {run(0.2, gaussian(2), seed).samples for seed in range(20)} == {LOOKS[0]}
    assert max(run(-0.2, gaussian(2), seed).samples for seed in range(20)) == LOOKS[0]


@pytest.mark.parametrize(
    ("gain", "least", "most"), [(0.008, 0, 16), (0.015, 30, 40), (0.004, 0, 1)], ids=["0.8%", "1.5%", "0.4%"]
)
def test_c29_the_incumbent_stays_until_the_test_is_sure(gain: float, least: int, most: int) -> None:
    tests = [run(gain, gaussian(2), seed) for seed in range(40)]
    assert least <= sum(test.outcome == "faster" for test in tests) <= most
    for test in tests:
        if test.outcome == "faster":
            assert test.estimate.low > 0
            assert test.estimate.gain >= 0.01


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
def test_a_pair_that_gains_nothing_seldom_costs_the_longest_test(noise: Noise) -> None:
    tests = [run(0.0, noise, seed) for seed in range(100)]
    assert {test.outcome for test in tests} <= {"tie", "faster"}
    assert statistics.fmean(test.samples for test in tests) < 0.7 * LOOKS[-1]  # without giving up 118 to 185 of 192


def test_giving_up_early_costs_hardly_any_gain_that_the_longest_test_would_have_found() -> None:
    tests = [run(0.015, gaussian(2), seed) for seed in range(100)]
    assert sum(test.outcome == "faster" for test in tests) >= 94


def test_a_floor_below_zero_lets_pass_what_is_as_fast_and_nothing_beyond_it() -> None:
    def outcomes(gain: float) -> int:
        tests = [run(gain, gaussian(2), seed, min_gain=-0.005, floor=-0.02) for seed in range(100)]
        assert all(t.estimate.low > -0.02 and t.estimate.gain >= -0.005 for t in tests if t.outcome == "faster")
        return sum(test.outcome == "faster" for test in tests)

    assert outcomes(0.0) >= 90
    assert outcomes(-0.02) <= 1


def test_the_bounds_hold_the_truth() -> None:
    held = 0
    for seed in range(200):
        estimate = run(0.03, gaussian(2), seed).estimate
        assert estimate.low <= estimate.gain <= estimate.high
        held += estimate.low <= 0.03 <= estimate.high
    assert held >= 196


def test_it_asks_for_both_gemms_and_for_nothing_once_decided() -> None:
    test = PairedTest(0.01)
    assert test.wanted == (LOOKS[0], LOOKS[0])
    test.add(up=[Sample(1.0, 2.0)] * LOOKS[0])
    assert test.wanted == (0, LOOKS[0])
    assert test.outcome == "undecided"
    assert test.add(down=[Sample(1.0, 2.0)] * LOOKS[0]) == "faster"
    assert test.wanted == (0, 0)
    assert test.baseline_us == 4.0


@pytest.mark.parametrize("count", LOOKS)
def test_the_bound_is_the_sign_test(count: int) -> None:
    k = beyond(count, 0.001)
    tail = [sum(math.comb(count, i) for i in range(n + 1)) / 2**count for n in (k, k + 1)]
    assert tail[0] <= 0.001 < tail[1] if k else tail[0] <= 0.001


def test_too_few_samples_for_a_rate_are_refused() -> None:
    with pytest.raises(ValueError, match="4 samples"):
        beyond(4, 0.001)
