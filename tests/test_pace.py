"""No slice exceeds its bound, whatever the times were before it; and where one does, tuning pauses itself."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_moe_autotune import pace
from sglang_moe_autotune.pace import HARD_US, UNKNOWN_RATIO, Watch

torch = pytest.importorskip("torch")

from sglang_moe_autotune import timing  # noqa: E402 - needs torch
from sglang_moe_autotune.timing import PairTimer, Rotation  # noqa: E402 - as above

LONGEST = pace.longest_launch_us(500.0)


class Machine:
    """A host that takes ``host_us`` to make a launch, and a device that runs them one after the other."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.host_us, self.device_us, self.host_per_launch_us, self.mhz = 0.0, 0.0, 8.0, 2000.0
        machine = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at_us = 0.0

            def record(self) -> None:
                machine.host_us += 1.0
                self.at_us = max(machine.device_us, machine.host_us)

            def query(self) -> bool:
                return machine.host_us >= self.at_us

            def synchronize(self) -> None:
                machine.host_us = max(machine.host_us, self.at_us)

            def elapsed_time(self, end: Event) -> float:
                return (end.at_us - self.at_us) / 1e3

        patch.setattr(timing.torch.cuda, "Event", Event)
        patch.setattr(timing.torch.cuda, "_sleep", lambda cycles: self.run(cycles / self.mhz))
        patch.setattr(timing.time, "perf_counter", lambda: self.host_us * 1e-6)

    def run(self, us: float) -> None:
        self.host_us += self.host_per_launch_us
        self.device_us = max(self.device_us, self.host_us) + us

    def launching(self, us: float) -> timing.Side:
        return lambda _routing, _layer: self.run(us)


TIMES = st.floats(3.0, LONGEST)
SLICES = st.lists(
    st.tuples(TIMES, st.floats(0.3, UNKNOWN_RATIO), st.floats(4.0, 25.0), st.integers(1, 50)), min_size=1, max_size=25
)


@settings(max_examples=150, deadline=None)
@given(SLICES, st.floats(900.0, 2000.0))
def test_no_slice_takes_longer_than_its_bound_for_any_sequence_of_times(
    slices: list[tuple[float, float, float, int]], mhz: float
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        machine, timer = Machine(patch), PairTimer()
        machine.mhz = mhz  # an idle GPU clocks low, and its spin is longer
        for base_us, ratio, host_us, count in slices:
            machine.host_per_launch_us = host_us
            candidate_us = base_us * ratio
            sides = machine.launching(candidate_us), machine.launching(base_us)
            # A first launch, of which nothing is known, then two slices by what was learned.
            for expected_us in (float("inf"), candidate_us, candidate_us):
                begun_us = machine.host_us = max(machine.host_us, machine.device_us)
                timed = timer.time(*sides, Rotation(4, 4), (expected_us, base_us), count, 500.0)
                taken_us = machine.host_us - begun_us
                assert taken_us <= HARD_US, (expected_us, base_us, count, taken_us)
                assert timed.device_us <= taken_us + 1


@given(st.floats(0.1, 1e6), st.floats(0.0, 1e5), st.integers(1, 100), st.floats(50, 2000))
def test_a_slice_holds_one_pair_or_what_fits(pair_us: float, host_us: float, count: int, slice_us: float) -> None:
    pairs = pace.pairs_within(pair_us, host_us, count, slice_us)
    assert 1 <= pairs <= count
    assert pairs == 1 or pairs * max(pair_us, host_us) <= 0.6 * slice_us


@pytest.mark.parametrize("slice_us", [50.0, 500.0, 2000.0])
def test_what_may_be_tuned_outside_deep_idle_is_bounded_before_its_first_launch(slice_us: float) -> None:
    longest = pace.longest_launch_us(slice_us)
    assert longest * (1 + UNKNOWN_RATIO) <= HARD_US
    assert longest <= slice_us
    assert pace.bound_us(longest, slice_us, launched=True) == HARD_US
    assert pace.bound_us(longest * 1.01, slice_us, launched=True) > HARD_US
    assert pace.bound_us(10_000, slice_us, launched=True) > 40_000  # of deep idle: a first launch of a slow candidate
    assert pace.bound_us(10_000, slice_us, launched=False) == pace.LOAD_US


# -- the watch ----------------------------------------------------------------------------------------------------


def test_a_bound_broken_twice_within_a_minute_pauses_for_a_stated_time() -> None:
    watch = Watch()
    assert watch.observe(1999, HARD_US, 0) is None
    assert watch.observe(2500, HARD_US, 1) is None
    assert watch.why_paused(1) == ""
    begun = watch.observe(3000, HARD_US, 50)
    assert begun is not None
    assert "paused for 2 s" in begun.reason
    assert begun.longest == "3.0 ms of 2.0"
    assert watch.why_paused(51.9) == begun.reason
    assert watch.why_paused(52) == ""
    assert (watch.broken, watch.pauses, watch.longest_us) == (2, 1, 3000)


def test_what_the_longest_pass_did_is_kept_and_told_with_the_pause() -> None:
    watch = Watch()
    for now_s, (taken_us, did) in enumerate([(900, "measuring"), (4000, "adopting a row"), (3000, "comparing")]):
        pause = watch.observe(taken_us, HARD_US, float(now_s), did)
    assert watch.longest_did == "adopting a row"
    assert pause is not None
    assert pause.longest == "3.0 ms of 2.0, comparing"


def test_two_long_passes_that_lie_far_apart_pause_nothing() -> None:
    watch = Watch()
    assert [watch.observe(9000, HARD_US, at) for at in (0, 61, 122, 183)] == [None] * 4


@pytest.mark.parametrize(
    ("taken_us", "between", "pauses"),
    [
        pytest.param(3000, 98, 1, id="two in a hundred"),
        pytest.param(3000, 99, 0, id="rare"),
        pytest.param(9000, 5000, 1, id="rare and several times too long"),
    ],
)
def test_rare_passes_that_are_a_little_too_long_pause_nothing(taken_us: float, between: int, pauses: int) -> None:
    watch = Watch()
    watch.observe(taken_us, HARD_US, 0)
    for _ in range(between):
        watch.observe(500, HARD_US, 1)
    watch.observe(taken_us, HARD_US, 2)
    assert (watch.broken, watch.pauses) == (2, pauses)


def test_pauses_double_to_ten_minutes_and_begin_small_again_after_ten_good_ones() -> None:
    watch, now, lengths = Watch(), 0.0, []
    for _ in range(12):
        watch.observe(9000, HARD_US, now)
        begun = watch.observe(9000, HARD_US, now + 1)
        assert begun is not None
        lengths.append(begun.until_s - now - 1)
        now = begun.until_s + 1
    assert lengths[:4] == [2, 4, 8, 16]
    assert lengths[-1] == lengths[-2] == 600
    now += 601
    watch.observe(9000, HARD_US, now)
    begun = watch.observe(9000, HARD_US, now)
    assert begun is not None
    assert begun.until_s - now == 2


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=60))
def test_the_histogram_counts_every_pass_and_its_quantiles_are_upper_ends(times: list[float]) -> None:
    watch = Watch()
    for taken_us in times:
        watch.observe(taken_us, HARD_US, 0.0)
    assert sum(watch.counts) == len(times)
    quantiles = [watch.quantile_us(q) for q in (0.5, 0.9, 0.99, 1.0)]
    assert all(a <= b for a, b in itertools.pairwise(quantiles))
    assert quantiles[-1] >= max(times)
    assert Watch().quantile_us(0.5) == 0.0
