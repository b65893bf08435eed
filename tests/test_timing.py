"""Both sides of a pair meet every routing and the L2 cache alike, and what events say becomes samples of each side."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from sglang_moe_autotune import pace, timing  # noqa: E402 - needs torch, which not every environment has
from sglang_moe_autotune.bench import Sample  # noqa: E402 - needs torch, which not every environment has
from sglang_moe_autotune.launch import rebind  # noqa: E402 - needs torch, which not every environment has
from sglang_moe_autotune.routings import Round, Sampling  # noqa: E402 - needs torch, which not every environment has
from sglang_moe_autotune.timing import PairTimer, Planned, Rotation, plan  # noqa: E402 - needs torch, which not every environment has

if TYPE_CHECKING:
    from collections.abc import Callable


def launches(turns: int, inner: int, rotation: Rotation) -> list[Planned]:
    rounds = Round(Sampling(1, rotation.routings))
    found = []
    for turn in range(turns):  # a pair in each slice, as where launches are long
        found += plan(rounds.begins, rounds.launched, 2 * inner * turn, inner, rotation)
        rounds.add([Sample(1.0, 1.0)], inner)
    return found


@pytest.mark.parametrize("inner", [1, 4], ids=["long-launches", "short-launches"])
@pytest.mark.parametrize("cached", [1, 2, 3, 4], ids=lambda n: f"cache-holds-{n}-layers")
@pytest.mark.parametrize("layers", [2, 3, 4, 8], ids=lambda n: f"{n}-layers")
def test_neither_side_finds_more_weights_in_the_cache(inner: int, cached: int, layers: int) -> None:
    cache: OrderedDict[int, None] = OrderedDict()
    hits, made = {True: 0, False: 0}, {True: 0, False: 0}
    for candidate, _, layer in launches(800, inner, Rotation(4, layers)):
        hits[candidate] += layer in cache
        made[candidate] += 1
        cache[layer] = None
        cache.move_to_end(layer)
        while len(cache) > cached:
            cache.popitem(last=False)
    assert made[True] == made[False]
    assert abs(hits[True] - hits[False]) / made[True] < 0.02, hits


@pytest.mark.parametrize("inner", [1, 4], ids=["long-launches", "short-launches"])
def test_each_side_meets_each_routing_equally_often_and_comes_first_half_of_the_time(inner: int) -> None:
    planned = launches(64, inner, Rotation(4, 4))
    for routing in range(4):
        sides = [p.candidate for p in planned if p.routing == routing]
        assert sum(sides) * 2 == len(sides)
    turns = [planned[i : i + 2 * inner] for i in range(0, len(planned), 2 * inner)]
    for slot in range(4):
        first = [turn[0].candidate for number, turn in enumerate(turns) if (number // 2) % 4 == slot]
        assert sum(first) * 2 == len(first)
    for turn in turns:
        assert [p.routing for p in turn if p.candidate] == [p.routing for p in turn if not p.candidate]


class Device:
    """A clock that launches move on, read by events as CUDA's are."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.early = False

    def event(self, enable_timing: bool) -> Device.Event:
        assert enable_timing
        return Device.Event(self)

    class Event:
        def __init__(self, device: Device) -> None:
            self._device, self._at_ms = device, 0.0

        def record(self) -> None:
            self._at_ms = self._device.now_ms

        def query(self) -> bool:
            return self._device.early

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Device.Event) -> float:
            return end._at_ms - self._at_ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()

    def sleep(cycles: int) -> None:
        device.now_ms += cycles / 2e6

    monkeypatch.setattr(timing.torch.cuda, "Event", device.event)
    monkeypatch.setattr(timing.torch.cuda, "_sleep", sleep)
    return device


def side(device: Device, us: Callable[[int], float]) -> timing.Side:
    def launch(routing: int, layer: int) -> None:
        device.now_ms += us(routing) / 1e3

    return launch


@pytest.mark.parametrize("expected", [20.0, 300.0], ids=["short", "long"])
def test_samples_are_the_times_of_each_side(device: Device, expected: float) -> None:
    timer = PairTimer()
    one, two = (lambda routing, n=n: n * expected * (1 + routing) for n in (1, 2))
    sides = side(device, one), side(device, two)
    for _ in range(9):
        timed = timer.time(*sides, Rotation(4, 4), (expected, 2 * expected), 16, 2000.0)
        assert timed.samples
        for sample in timed.samples:
            assert sample.baseline_us == pytest.approx(2 * sample.candidate_us)
        assert timed.device_us >= sum(s.candidate_us + s.baseline_us for s in timed.samples)


def test_a_slice_holds_what_fits_it_and_a_candidate_that_never_ran_one_launch(device: Device) -> None:
    timer = PairTimer()
    timer.time(*[side(device, lambda _: 100.0)] * 2, Rotation(4, 4), (100.0, 100.0), 1, 1000.0)  # ends the rest
    sides = side(device, lambda _: 100.0), side(device, lambda _: 100.0)
    assert len(timer.time(*sides, Rotation(4, 4), (100.0, 100.0), 50, 1000.0).samples) == 3
    assert len(timer.time(*sides, Rotation(4, 4), (100.0, 100.0), 2, 1000.0).samples) == 2
    assert len(timer.time(*sides, Rotation(4, 4), (5000.0, 5000.0), 50, 500.0).samples) == 1
    assert len(timer.time(*sides, Rotation(4, 4), (float("inf"), 100.0), 50, 1000.0).samples) == 1


class Host:
    """A host that takes a while for each launch, and a GPU that works off what is queued."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cycles_per_us: float = 1980.0) -> None:
        self.now_us = self.gpu_us = 0.0
        self.cycles_per_us = cycles_per_us
        host = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                host.gpu_us = self.at = max(host.gpu_us, host.now_us)

            def query(self) -> bool:
                return self.at <= host.now_us

            def synchronize(self) -> None:
                host.now_us = max(host.now_us, self.at)

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) / 1e3

        monkeypatch.setattr(timing.torch.cuda, "Event", Event)
        monkeypatch.setattr(timing.torch.cuda, "_sleep", lambda cycles: self.work(cycles / self.cycles_per_us, 1.0))
        monkeypatch.setattr(timing.time, "perf_counter", lambda: self.now_us / 1e6)

    def work(self, duration_us: float, host_us: float) -> None:
        self.now_us += host_us
        self.gpu_us = max(self.gpu_us, self.now_us) + duration_us

    def sides(self, us: float, host_us: float) -> tuple[timing.Side, timing.Side]:
        return (lambda _r, _l: self.work(0.9 * us, host_us)), (lambda _r, _l: self.work(us, host_us))


@pytest.mark.parametrize("rest_us", [0.0, 200_000.0], ids=["at once", "after a rest"])
@pytest.mark.parametrize(("us", "late_us"), [(40.0, 15.0), (150.0, 25.0), (6.0, 12.0)], ids=["short", "long", "tiny"])
def test_the_time_that_the_host_takes_to_launch_is_not_in_the_samples(
    monkeypatch: pytest.MonkeyPatch, us: float, late_us: float, rest_us: float
) -> None:
    host, timer = Host(monkeypatch), PairTimer()
    sides = host.sides(us, late_us)
    samples, dirty = [], 0
    for _ in range(24):
        timed = timer.time(*sides, Rotation(4, 4), (0.9 * us, us), 16, 1000.0)
        samples += timed.samples
        dirty += not timed.samples
        host.now_us += 500.0 + rest_us
    assert dirty < 4
    for sample in samples:
        assert sample.candidate_us == pytest.approx(0.9 * us)
        assert sample.baseline_us == pytest.approx(us)


@pytest.mark.parametrize("slice_us", [500.0, 20_000.0])
def test_slices_of_one_pair_and_of_many_in_turn_are_clean(monkeypatch: pytest.MonkeyPatch, slice_us: float) -> None:
    """As where one GEMM wants one more sample and the other one wants many: each has the spin that it needs, and none
    has more launches than a spin can hide."""
    host, timer = Host(monkeypatch), PairTimer()
    sides, found = host.sides(10.0, 9.0), {1: 0, 400: 0}
    for _ in range(20):
        for count in found:
            found[count] += bool(timer.time(*sides, Rotation(4, 4), (9.0, 10.0), count, slice_us).samples)
            host.now_us += 300.0
    assert min(found.values()) >= 18, found


def test_a_slice_in_which_the_host_was_late_gives_no_samples_and_makes_the_next_one_clean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, timer = Host(monkeypatch), PairTimer()

    def counts(host_us: float) -> list[int]:
        sides = host.sides(10.0, host_us)
        return [len(timer.time(*sides, Rotation(4, 4), (9.0, 10.0), 1, 1000.0).samples) for _ in range(4)]

    assert counts(8.0)[-1] == 1
    assert counts(24.0) == [0, 0, 1, 1]
    assert counts(8.0) == [1, 1, 1, 1]


def test_no_spin_is_longer_than_it_may_be_also_where_the_clocks_fell_during_a_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, timer = Host(monkeypatch), PairTimer()
    sides, spins = host.sides(10.0, 9.0), []
    for turn in range(40):
        host.cycles_per_us = 345.0 if turn % 8 == 0 else 1980.0
        timed = timer.time(*sides, Rotation(4, 4), (9.0, 10.0), 16, 1000.0)
        spins.append(timed.device_us - timed.launched_us)
        host.now_us += 300.0 if turn % 8 != 7 else 5e6
    assert max(spins) <= 1000.0
    assert max(spins[1:8]) <= pace.MAX_SPIN_US


@pytest.mark.parametrize("stall_s", [0.005, 0.2, 60.0])
def test_a_host_that_stood_still_before_a_spin_spoils_a_few_slices_and_no_more(
    monkeypatch: pytest.MonkeyPatch, stall_s: float
) -> None:
    """The spin begins late and seems slow by that; as when the process was stopped in between."""
    host, timer, stalls = Host(monkeypatch), PairTimer(), [stall_s]

    def sleep(cycles: int) -> None:
        host.now_us += 1e6 * (stalls.pop() if stalls else 0.0)
        host.work(cycles / host.cycles_per_us, 3.0)

    sides, clean = host.sides(10.0, 8.0), 0
    monkeypatch.setattr(timing.torch.cuda, "_sleep", sleep)
    for _ in range(20):
        clean += bool(timer.time(*sides, Rotation(4, 4), (9.0, 10.0), 4, 1000.0).samples)
        host.now_us += 300.0
    assert clean >= 14


def test_only_the_named_tensors_of_a_launch_are_replaced() -> None:
    a, b = torch.zeros(2), torch.zeros(2)
    others = torch.ones(2), torch.ones(2)
    bound = (a, None, b, 7, a)
    swaps = [{a.data_ptr(): other} for other in others]
    for other, found in zip(others, rebind(bound, swaps), strict=True):
        assert all(x is y for x, y in zip(found, (other, None, b, 7, other), strict=True))
