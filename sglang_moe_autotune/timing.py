"""Device time of two launches, interleaved, within one slice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from sglang_moe_autotune.bench import Sample

Thunk = Callable[[], None]

_SHORT_LAUNCH_US = 60.0
"""Below this a launch can end before the host has made the next one, and the gap would be measured."""
_LAUNCHES_PER_INTERVAL = 4
_MAX_SPIN_CYCLES = 4_000_000


class Timed(NamedTuple):
    """What one slice measured."""

    samples: list[Sample]
    device_us: float
    """from the first to the last event, the spin included: what the slice cost"""


class PairTimer:
    """Times candidate and baseline in turn on the current stream.

    Short launches are queued behind a spinning kernel, so that the host's time to make them is hidden; a slice
    in which the spin ended too early is dirty, gives no samples, and lengthens the next spin.
    """

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._spin_cycles = 200_000
        self._turn = 0
        """pairs timed so far: which slot and which side come first goes on from slice to slice"""

    def time(
        self,
        candidate: Sequence[Thunk],
        baseline: Sequence[Thunk],
        expected_us: tuple[float, float],
        count: int,
        slice_us: float,
    ) -> Timed:
        """Up to ``count`` pairs, as many as fit ``slice_us``, at least one.

        candidate, baseline: one thunk a slot of the rotation, each makes one launch; both sides have the same
        routing in a slot, and weights that the other side has not just drawn through the L2 cache. expected_us:
        what one launch of each is thought to take; infinite for a candidate that has never run, which then gets
        one launch alone.
        """
        unknown = expected_us[0] == float("inf")
        short = min(expected_us[0] if not unknown else expected_us[1], expected_us[1]) < _SHORT_LAUNCH_US
        inner = _LAUNCHES_PER_INTERVAL if short and not unknown else 1
        pair_us = inner * ((0.0 if unknown else expected_us[0]) + expected_us[1])
        pairs = 1 if unknown else max(1, min(count, int(0.6 * slice_us / max(pair_us, 1.0))))
        events = self._take_events(2 * pairs + 2)
        first_turn = self._turn
        events[0].record()
        torch.cuda._sleep(self._spin_cycles if short else 1000)
        events[1].record()
        begun = time.perf_counter()
        for pair in range(pairs):
            # A-B, B-A, ...: what drifts within a slice meets both sides alike.
            sides = (candidate, baseline) if self._turn % 2 == 0 else (baseline, candidate)
            for offset, side in enumerate(sides):
                for step in range(inner):
                    # Two turns a slot, so that each slot is met in both orders.
                    side[(self._turn // 2 + step) % len(side)]()
                events[2 * pair + 2 + offset].record()
            self._turn += 1
        host_us = (time.perf_counter() - begun) * 1e6
        starved = short and events[1].query()
        last = events[2 * pairs + 1]
        last.synchronize()
        spin_us = events[0].elapsed_time(events[1]) * 1e3
        self._adapt(short, spin_us, host_us)
        device_us = events[0].elapsed_time(last) * 1e3
        if starved:
            return Timed([], device_us)
        spans = [events[i].elapsed_time(events[i + 1]) * 1e3 / inner for i in range(1, 2 * pairs + 1)]
        samples = []
        for pair in range(pairs):
            first, second = spans[2 * pair], spans[2 * pair + 1]
            samples.append(Sample(first, second) if (first_turn + pair) % 2 == 0 else Sample(second, first))
        return Timed(samples, device_us)

    def _take_events(self, count: int) -> list[torch.cuda.Event]:
        while len(self._events) < count:
            self._events.append(torch.cuda.Event(enable_timing=True))
        return self._events[:count]

    def _adapt(self, short: bool, spin_us: float, host_us: float) -> None:
        if not short or spin_us <= 0:
            return
        wanted = 1.3 * host_us + 20.0
        factor = min(3.0, max(0.5, wanted / spin_us))
        self._spin_cycles = int(min(_MAX_SPIN_CYCLES, max(1000, self._spin_cycles * factor)))
