"""Device time of two launches, interleaved, within one slice."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from sglang_moe_autotune.bench import Sample
from sglang_moe_autotune.pace import MAX_SPIN_US, pairs_within

_T = TypeVar("_T")

Side = Callable[[int, int], None]
"""makes one launch with a routing and on a layer, both by number"""

_SHORT_LAUNCH_US = 60.0
"""Below this a launch can end before the host has made the next one, and the gap would be measured."""
_LAUNCHES_PER_INTERVAL = 4
_HOST_US = {True: 8.0, False: 30.0}
"""of one launch before it was seen: of many short ones, and of the first of long ones"""
_CYCLES_PER_US = 1000.0
"""of the GPU's clock, before it was seen"""
_LEAST_CYCLES_PER_US = 50.0
"""less than any GPU counts. A spin that seems slower waited for the host, or for another process, before it began: by
that the next ones would be far too short, and where they came to nothing, so would all later ones."""
_MARGIN = 1.3
_MARGIN_US = {True: 20.0, False: 40.0}
"""by which a spin is longer than the host is thought to need; the first launch of a slice takes now longer, now less"""
_REST_S = 0.05
"""after which the GPU's clocks may have fallen to a fifth, so that a spin takes five times as long"""


class Planned(NamedTuple):
    """One launch of a turn."""

    candidate: bool
    routing: int
    layer: int


def plan(first: bool, before: int, launched: int, inner: int, rotation: Rotation) -> list[Planned]:
    """The launches of one pair: ``inner`` of each side, both with the same routings, the candidate's first or not.

    Routings go round for each trial by itself, so that the first launches of two trials are comparable: ``before``
    counts those of each side before this pair. Layers go round over all launches, whichever side makes them, so that
    each launch finds in the L2 cache what any other finds there: weights that were last drawn through it a whole round
    ago. ``launched`` counts the launches before this pair.
    """
    routings = [(before + step) % rotation.routings for step in range(inner)]
    sides = [(side, routing) for side in (first, not first) for routing in routings]
    return [Planned(*pair, (launched + i) % rotation.layers) for i, pair in enumerate(sides)]


class Rotation(NamedTuple):
    """What launches vary over."""

    routings: int
    layers: int


class Timed(NamedTuple):
    """What one slice measured."""

    samples: list[Sample]
    inner: int
    """launches of each side in one of them, which has their mean times"""
    device_us: float
    """from the first to the last event, the spin included: what the slice cost"""
    launched_us: float
    """without the spin; the host's gaps are in it where the slice was dirty"""


def inner_launches(expected_us: tuple[float, float]) -> int:
    """Launches of each side in a pair, by what one of each takes: infinite for one that has never run."""
    known = max(expected_us) < float("inf")
    return _LAUNCHES_PER_INTERVAL if known and min(expected_us) < _SHORT_LAUNCH_US else 1


def clocked(step: Callable[[], _T]) -> tuple[_T, float]:
    """What a step returns, and its device time in microseconds; waits for it."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    result = step()
    end.record()
    end.synchronize()
    return result, begin.elapsed_time(end) * 1e3


class PairTimer:
    """Times candidate and baseline in turn on the current stream.

    Launches are queued behind a spinning kernel, so that the host's time to make them is hidden: all launches of a
    slice where they are short, the first one where the GPU is still busy with it when the host makes the next. The spin
    is as long as the host needs for these launches, by what it needed of late. A slice in which it ended too early is
    dirty and gives no samples. After a rest a slice holds one pair: how long its spin takes is not known.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._host_us = dict(_HOST_US)
        """of one launch, as of late, where launches are short and where they are not"""
        self._cycles_per_us = _CYCLES_PER_US
        self._ended_s = float("-inf")
        self._launched = 0
        """so far: layers go on from slice to slice"""

    def time(
        self,
        candidate: Side,
        baseline: Side,
        rotation: Rotation,
        expected_us: tuple[float, float],
        count: int,
        slice_us: float,
        before: int = 0,
        *,
        begins: bool = True,
    ) -> Timed:
        """Up to ``count`` pairs, as many as fit ``slice_us``, at least one.

        expected_us: what one launch of each side is thought to take; infinite for a candidate that has never run,
        which then gets one launch alone. before: launches of each side that this trial had so far, see ``plan``.
        begins: the slice begins with the candidate; the sides come first in turn.
        """
        unknown = expected_us[0] == float("inf")
        short, inner = min(expected_us) < _SHORT_LAUNCH_US, inner_launches(expected_us)
        pair_us = inner * ((0.0 if unknown else expected_us[0]) + expected_us[1])
        host_us = 2 * inner * self._host_us[short]
        if short:  # a slice can be longer than a spin
            count = max(1, min(count, int((MAX_SPIN_US - _MARGIN_US[short]) / (_MARGIN * host_us))))
        alone = unknown or time.perf_counter() - self._ended_s > _REST_S
        pairs = 1 if alone else pairs_within(pair_us, host_us, count, slice_us)
        events = self._take_events(2 * pairs + 2)
        plans = []
        for pair in range(pairs):
            plans.append(plan(begins == (pair % 2 == 0), before + pair * inner, self._launched, inner, rotation))
            self._launched += 2 * inner
        hidden = len(plans) * len(plans[0]) if short else 1
        made, starved, host_us = 0, False, 0.0
        cycles = self._cycles(short, hidden)
        events[0].record()
        torch.cuda._sleep(cycles)
        events[1].record()
        begun = time.perf_counter()
        for pair, planned in enumerate(plans):
            for number, (is_candidate, routing, layer) in enumerate(planned, 1):
                (candidate if is_candidate else baseline)(routing, layer)
                if number % inner == 0:
                    events[2 * pair + 1 + number // inner].record()
                made += 1
                if made == hidden:
                    starved = events[1].query()
                    host_us = (time.perf_counter() - begun) * 1e6
        last = events[2 * pairs + 1]
        last.synchronize()
        spin_us = events[0].elapsed_time(events[1]) * 1e3
        self._ended_s = time.perf_counter()
        self._learn(short, host_us / hidden, cycles / spin_us if spin_us > 0 else self._cycles_per_us, late=starved)
        device_us = events[0].elapsed_time(last) * 1e3
        launched_us = device_us - spin_us
        if starved:
            return Timed([], inner, device_us, launched_us)
        spans = [events[i].elapsed_time(events[i + 1]) * 1e3 / inner for i in range(1, 2 * pairs + 1)]
        samples = []
        for pair in range(pairs):
            first, second = spans[2 * pair], spans[2 * pair + 1]
            samples.append(Sample(first, second) if plans[pair][0].candidate else Sample(second, first))
        return Timed(samples, inner, device_us, launched_us)

    @property
    def host_us(self) -> float:
        """What one of many short launches takes the host, as of late."""
        return self._host_us[True]

    def _take_events(self, count: int) -> list[torch.cuda.Event]:
        while len(self._events) < count:
            self._events.append(torch.cuda.Event(enable_timing=True))
        return self._events[:count]

    def _cycles(self, short: bool, hidden: int) -> int:
        spin_us = min(MAX_SPIN_US, _MARGIN * hidden * self._host_us[short] + _MARGIN_US[short])
        return int(spin_us * self._cycles_per_us)

    def _learn(self, short: bool, host_us: float, cycles_per_us: float, *, late: bool) -> None:
        """Slowly what one launch took the host, so that one stall of it does not make the next slice long; at once,
        though not all of it, where the spin was too short."""
        known = self._host_us[short]
        self._host_us[short] = min(max(host_us, known), 2 * known) if late else known + 0.2 * (host_us - known)
        self._cycles_per_us = max(cycles_per_us, _LEAST_CYCLES_PER_US)
