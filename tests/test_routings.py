"""Launches with each routing in turn are put together to samples that two trials may be compared by."""

from __future__ import annotations

import math
import random
import statistics

import msgspec
import pytest
import synthetic
from hypothesis import given
from hypothesis import strategies as st

from sglang_moe_autotune import landscape
from sglang_moe_autotune.bench import Sample
from sglang_moe_autotune.decision import LOOKS, MOST_LAUNCHES, PairedTest, looks
from sglang_moe_autotune.replay import ReplayProvider
from sglang_moe_autotune.routings import FEW, HOPELESS, MANY, Round, Sampling, sampling, timed

LANDSCAPE = synthetic.landscape(ms=(3, 12, 24, 512), ruggedness=0.02)
SHAPE = synthetic.bf16_shape(E=256, top_k=8)


@pytest.mark.parametrize(("M", "many"), [(1, True), (16, True), (127, True), (128, False), (4096, False)])
def test_where_some_experts_have_no_token_a_sample_holds_a_launch_with_each_routing(M: int, many: bool) -> None:  # noqa: N803
    assert timed(SHAPE, M) == (MANY if many else FEW)
    assert sampling(SHAPE, M) == ((len(MANY), 1) if many else (1, len(FEW)))


def test_with_expert_parallelism_a_rank_has_half_of_the_choices_or_less() -> None:
    local = msgspec.structs.replace(synthetic.bf16_shape(E=128, top_k=8), ep=True)
    assert [sampling(local, M).per_sample for M in (127, 128)] == [8, 1]


def test_more_routings_have_the_same_share_of_skewed_ones() -> None:
    shares = [sum(name.startswith("skewed") for name in names) / len(names) for names in (FEW, MANY)]
    assert shares == [0.25, 0.25]
    assert len(set(MANY)) == len(MANY)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.sampled_from([1, 4]), st.integers(1, 8))
def test_slices_of_any_size_make_samples_of_whole_rounds(slices: list[int], inner: int, size: int) -> None:
    turns, samples, launched = Round(Sampling(size)), 0, 0
    for pairs in slices:
        samples += len(turns.add([Sample(1.0, 1.0)] * pairs, inner))
        launched += pairs * inner
    assert turns.launched == launched
    assert samples == launched // inner // math.ceil(size / inner)
    lacking = turns.pairs(3, inner)
    assert len(turns.add([Sample(1.0, 1.0)] * lacking, inner)) == 3
    assert turns.pairs(1, inner) == math.ceil(size / inner), "no more than were asked for"


@given(st.integers(1, 9), st.sampled_from([Sampling(8, 1), Sampling(1, 4)]), st.integers(8, 60))
def test_each_side_begins_half_of_the_slices_whatever_their_size(size: int, sampled: Sampling, rounds: int) -> None:
    turns, begun, per_round = Round(sampled), [], sampled.per_sample * sampled.per_round
    while turns.launched < 4 * rounds * per_round:
        begun.append(turns.begins)
        turns.add([Sample(1.0, 1.0)] * min(size, turns.pairs(1 + rounds)))
    assert abs(sum(begun) / len(begun) - 0.5) <= 0.5 / min(len(begun), rounds) ** 0.5
    assert True in begun[:4]
    assert False in begun[:4]


@pytest.mark.parametrize("pairs", range(1, 8))
@pytest.mark.parametrize("wanted", [1, 12])
@pytest.mark.parametrize("sampled", [Sampling(8, 1), Sampling(1, 4)], ids=["few-tokens", "many-tokens"])
def test_a_slow_first_launch_of_each_slice_favours_no_side(sampled: Sampling, wanted: int, pairs: int) -> None:
    turns, samples = Round(sampled), []
    while len(samples) < 960 // sampled.per_sample:
        begins = turns.begins
        cold = [Sample(1.25, 1.0) if begins else Sample(1.0, 1.25)]
        samples += turns.add((cold + [Sample(1.0, 1.0)] * pairs)[: min(pairs, turns.pairs(wanted))])
    logs = [math.log(ours / theirs) for ours, theirs in samples]
    assert abs(statistics.fmean(logs)) < 0.002
    assert abs(sum(log > 0 for log in logs) - sum(log < 0 for log in logs)) <= 0.06 * len(logs) + 2


def test_a_slice_without_times_is_begun_again_by_the_same_side() -> None:
    turns = Round(Sampling(8))
    begun = turns.begins
    assert turns.add([]) == []
    assert turns.begins == begun


def test_a_sample_is_the_mean_over_the_routings_of_each_side() -> None:
    times = [Sample(80.0, 110.0), Sample(83.0, 78.0), Sample(80.0, 75.0), Sample(87.0, 111.0)]
    assert Round(Sampling(4)).add(times) == [Sample(82.5, 93.5)]
    assert Round(Sampling(1)).add(times) == times


def test_what_takes_many_times_as_long_is_not_launched_with_every_routing() -> None:
    turns = Round(Sampling(8))
    assert turns.add([Sample(1.0, 1.0)] * 3) == []
    assert len(turns.add([Sample(4 * HOPELESS, 1.0)])) == 1
    assert turns.pairs(1) == 8, "the next one begins anew"


def test_a_test_of_large_samples_ends_after_as_many_launches() -> None:
    assert looks(1) == LOOKS
    assert [count for count in LOOKS if count * 8 <= MOST_LAUNCHES] == list(looks(8))
    assert looks(1000) == LOOKS[:1]
    test, fed = PairedTest(0.01, sampling=Sampling(8)), 0
    while test.outcome == "undecided":
        up, down = test.wanted
        rng = random.Random(fed)  # noqa: S311 - no secrets
        draw = lambda n: [Sample(100 * rng.gauss(0.99, 0.02), 100.0) for _ in range(n)]  # noqa: B023, E731
        test.add(up=draw(up), down=draw(down))
        fed += 1
    assert test.samples * 8 <= MOST_LAUNCHES


def test_two_configs_that_change_places_with_the_routing_are_told_apart() -> None:
    """Times of two configs on an H200 at M=16, by routing: the first one takes 9 % less, and with half of the routings
    it takes more."""
    fast, own = (87.0, 83.0, 80.0, 87.5, 83.0, 80.0, 87.0, 87.0), (109.0, 78.0, 75.0, 111.0, 78.0, 75.0, 110.0, 109.0)
    rng = random.Random(1)  # noqa: S311 - no secrets
    widths = {}
    for size in (1, 8):
        turns, test = Round(Sampling(size)), PairedTest(0.01, sampling=Sampling(size))
        while test.outcome == "undecided":
            places = [(turns.launched + n) % 8 for n in range(turns.pairs(max(test.wanted)))]
            times = [Sample(fast[p] * rng.gauss(1, 0.01), own[p] * rng.gauss(1, 0.01)) for p in places]
            samples = turns.add(times)
            test.add(up=samples, down=samples)
        widths[size] = test.estimate.high - test.estimate.low
    assert test.outcome == "faster"
    assert test.estimate.gain == pytest.approx(1 - sum(fast) / sum(own), abs=0.01)
    assert widths[8] < 0.2 * widths[1]


def test_what_is_faster_with_even_loads_and_much_slower_with_skewed_ones_is_not_taken_for_faster() -> None:
    ratios = [1.35 if name.startswith("skewed") else 0.95 for name in FEW]
    rng = random.Random(2)  # noqa: S311 - no secrets
    outcomes = {}
    for sampled in (Sampling(1), Sampling(1, len(FEW))):
        test, launched = PairedTest(0.01, sampling=sampled), 0
        while test.outcome == "undecided":
            count = max(test.wanted)
            samples = [
                Sample(100 * ratios[(launched + n) % 4] * rng.gauss(1, 0.005), 100 * rng.gauss(1, 0.005))
                for n in range(count)
            ]
            launched += count
            test.add(up=samples, down=samples)
        outcomes[sampled] = test.outcome
    assert outcomes[Sampling(1, len(FEW))] == "tie"
    assert test.estimate.gain == pytest.approx(-0.05, abs=0.01)
    assert outcomes[Sampling(1)] == "faster", "by single launches it seems so: the median never sees one in four"


def test_a_recording_is_read_as_a_device_would_be() -> None:
    """One sample at an M with few tokens costs eight launches of each side, and is as much sharper."""
    pairs = {}
    for M in LANDSCAPE.ms:  # noqa: N806
        provider = ReplayProvider(LANDSCAPE, noise_percent=2.0)
        baseline = LANDSCAPE.baselines[M].pair
        bench = provider.open(LANDSCAPE.shape, M, baseline)
        assert not isinstance(bench, str)
        config = LANDSCAPE.best(M)[0].up
        while bench.readiness("up", config) != "ready":
            pass
        bench.measure("up", config, 1)
        samples, begun_s = [], bench.gpu_s
        while len(samples) < 200:
            samples += bench.measure("up", config, 200 - len(samples))
        spent_us = (bench.gpu_s - begun_s) * 1e6
        launches = spent_us / 200 / sum(LANDSCAPE.latency_us(M, "up", c) or 0.0 for c in (config, baseline.up))
        assert launches == pytest.approx(sampling(LANDSCAPE.shape, M).per_sample, rel=0.02)
        spread = statistics.stdev(math.log(a / b) for a, b in samples)
        assert spread == pytest.approx(0.02 * math.sqrt(2 / sampling(LANDSCAPE.shape, M).per_sample), rel=0.25)
        pairs[M] = launches
    assert len({round(n) for n in pairs.values()}) == 2, pairs


def test_of_a_hopeless_config_come_no_more_samples_than_were_asked_for() -> None:
    """Each of its times is one by itself, and a slice holds as many as a sample of another config would need."""
    M, own = 3, LANDSCAPE.baselines[3]  # noqa: N806
    slow = next(c for c in LANDSCAPE.candidates if c not in (own.pair.up, own.pair.down))
    up_us = {**LANDSCAPE.up_us, M: {**LANDSCAPE.up_us[M], slow: 40.0}}
    baselines = {**LANDSCAPE.baselines, M: msgspec.structs.replace(own, up_us=10.0)}
    known = msgspec.structs.replace(LANDSCAPE, up_us=up_us, baselines=baselines)
    provider = ReplayProvider(known, noise_percent=2.0, polls=1)
    bench = provider.open(known.shape, M, known.baselines[M].pair)
    assert not isinstance(bench, str)
    bench.measure("up", slow, 1)
    assert max(len(bench.measure("up", slow, 1)) for _ in range(20)) == 1


def test_shipped_recordings_have_both_kinds() -> None:
    sizes = {sampling(known.shape, M) for known in map(landscape.load, landscape.shipped()) for M in known.ms}
    assert sizes == {(1, 4), (8, 1)}
