"""Both sides of a pair meet every routing and the L2 cache alike, and what events say becomes samples of each side."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from sglang_moe_autotune import timing  # noqa: E402 - needs torch, which not every environment has
from sglang_moe_autotune.launch import rebind  # noqa: E402 - needs torch, which not every environment has
from sglang_moe_autotune.timing import PairTimer, Planned, Rotation, plan  # noqa: E402 - needs torch, which not every environment has

if TYPE_CHECKING:
    from collections.abc import Callable


def launches(turns: int, inner: int, rotation: Rotation) -> list[Planned]:
    return [p for turn in range(turns) for p in plan(turn, 2 * inner * turn, inner, rotation)]


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
    sides = side(device, lambda _: 100.0), side(device, lambda _: 100.0)
    assert len(timer.time(*sides, Rotation(4, 4), (100.0, 100.0), 50, 1000.0).samples) == 3
    assert len(timer.time(*sides, Rotation(4, 4), (100.0, 100.0), 2, 1000.0).samples) == 2
    assert len(timer.time(*sides, Rotation(4, 4), (5000.0, 5000.0), 50, 500.0).samples) == 1
    assert len(timer.time(*sides, Rotation(4, 4), (float("inf"), 100.0), 50, 1000.0).samples) == 1


@pytest.mark.parametrize("expected", [10.0, 300.0], ids=["short", "long"])
def test_a_slice_whose_launches_came_late_is_dirty_and_lengthens_the_next_spin(
    device: Device, expected: float
) -> None:
    timer = PairTimer()
    short = expected < 60
    timer._spin_cycles[short] = 1000
    device.early = True
    sides = side(device, lambda _: expected), side(device, lambda _: expected)
    assert timer.time(*sides, Rotation(4, 4), (expected, expected), 4, 500.0).samples == []
    assert timer._spin_cycles[short] > 1000


@pytest.mark.parametrize(("us", "late_us"), [(40.0, 15.0), (150.0, 25.0)], ids=["short", "long"])
def test_the_time_that_the_host_takes_to_launch_is_not_in_the_samples(
    monkeypatch: pytest.MonkeyPatch, us: float, late_us: float
) -> None:
    """A host that takes a while for each launch, and a GPU that works off what is queued: one pair a slice."""
    now = {"host": 0.0, "gpu": 0.0}

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            now["gpu"] = self.at = max(now["gpu"], now["host"])

        def query(self) -> bool:
            return self.at <= now["host"]

        def synchronize(self) -> None:
            now["host"] = max(now["host"], self.at)

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) / 1e3

    def work(duration_us: float, host_us: float) -> None:
        now["host"] += host_us
        now["gpu"] = max(now["gpu"], now["host"]) + duration_us

    monkeypatch.setattr(timing.torch.cuda, "Event", Event)
    monkeypatch.setattr(timing.torch.cuda, "_sleep", lambda cycles: work(cycles / 1700, 1.0))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now["host"] / 1e6)
    timer, sides = PairTimer(), [lambda _r, _l, n=n: work(us * n, late_us) for n in (0.9, 1.0)]
    timer._spin_cycles = {True: 1000, False: 1000}
    samples, dirty = [], 0
    for _ in range(24):
        timed = timer.time(sides[0], sides[1], Rotation(4, 4), (0.9 * us, us), 1, 2.5 * us)
        samples += timed.samples
        dirty += not timed.samples
        now["host"] += 5000.0
    assert dirty < 8
    for sample in samples:
        assert sample.candidate_us == pytest.approx(0.9 * us)
        assert sample.baseline_us == pytest.approx(us)


def test_only_the_named_tensors_of_a_launch_are_replaced() -> None:
    a, b, other = torch.zeros(2), torch.zeros(2), torch.ones(2)
    bound = (a, None, b, 7, a)
    found = rebind(bound, {a.data_ptr(): other})
    assert all(x is y for x, y in zip(found, (other, None, b, 7, other), strict=True))
