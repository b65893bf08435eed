"""The statistics of the serving bench, from events and times to figures. Standard library only."""

from __future__ import annotations

import bisect
import math
import random
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Event = tuple[int, int, int, int]

_RESAMPLES = 2000
_LEVEL = 0.95


class Request(NamedTuple):
    """One request of the bench, in nanoseconds of CLOCK_MONOTONIC; 0: not seen."""

    number: int
    turn: int
    tuning: bool
    asked_ns: int
    """when the client sent it"""
    first_ns: int
    """when the client had its first token"""
    done_ns: int
    sent_ns: int = 0
    """when the launcher handed it to the scheduler"""
    received_ns: int = 0
    """when the scheduler took it in"""

    @property
    def ttft_ms(self) -> float:
        return (self.first_ns - self.asked_ns) / 1e6

    @property
    def wait_ms(self) -> float:
        """In the scheduler's socket: what a slice adds, without the noise of the way there."""
        return (self.received_ns - self.sent_ns) / 1e6


def quantile(values: Sequence[float], q: float) -> float:
    """By linear interpolation. Raises ValueError for no values."""
    if not values:
        raise ValueError("a quantile needs values")
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def difference(
    on: Sequence[float], off: Sequence[float], of: Callable[[Sequence[float]], float], seed: int = 0
) -> dict[str, float]:
    """``of(on) - of(off)`` with a bootstrap interval, both sides drawn anew on their own."""
    random_ = random.Random(seed)  # noqa: S311 - no secret
    drawn = sorted(
        of(random_.choices(on, k=len(on))) - of(random_.choices(off, k=len(off))) for _ in range(_RESAMPLES)
    )
    tail = (1 - _LEVEL) / 2
    return {"value": of(on) - of(off), "low": quantile(drawn, tail), "high": quantile(drawn, 1 - tail)}


def ratio(on: Sequence[float], off: Sequence[float], seed: int = 0) -> dict[str, float]:
    """The mean of paired ratios minus 1, by turns, with a bootstrap interval over turns. Raises ValueError where the
    turns are no pairs."""
    logs = [math.log(a / b) for a, b in zip(on, off, strict=True)]
    random_ = random.Random(seed)  # noqa: S311 - no secret
    drawn = sorted(math.fsum(random_.choices(logs, k=len(logs))) / len(logs) for _ in range(_RESAMPLES))
    tail = (1 - _LEVEL) / 2
    ends = math.fsum(logs) / len(logs), quantile(drawn, tail), quantile(drawn, 1 - tail)
    return dict(zip(("value", "low", "high"), map(math.expm1, ends), strict=True))


class Slices:
    """The idle passes in which the plugin did work: begins and ends, none of which overlap."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        ordered = sorted(spans)
        self.begins = [begin for begin, _ in ordered]
        self.ends = [end for _, end in ordered]

    def running_at(self, at_ns: int) -> bool:
        place = bisect.bisect_right(self.begins, at_ns) - 1
        return place >= 0 and at_ns < self.ends[place]

    def begun_within(self, begin_ns: int, end_ns: int) -> int:
        return bisect.bisect_left(self.begins, end_ns) - bisect.bisect_left(self.begins, begin_ns)

    def busy_share(self, begin_ns: int, end_ns: int) -> float:
        """The share of a span that slices take."""
        place = max(0, bisect.bisect_right(self.begins, begin_ns) - 1)
        taken = 0
        while place < len(self.begins) and self.begins[place] < end_ns:
            taken += max(0, min(self.ends[place], end_ns) - max(self.begins[place], begin_ns))
            place += 1
        return taken / (end_ns - begin_ns)


def added_latency(requests: Sequence[Request], slices: Slices) -> dict[str, Any]:
    """What tuning adds to the time to first token, and how many requests met a running slice."""
    on, off = ([r for r in requests if r.tuning is wanted] for wanted in (True, False))
    seen = [r for r in on if r.sent_ns]
    met = [r for r in seen if slices.running_at(r.sent_ns)]
    figures: dict[str, Any] = {
        "requests": {"on": len(on), "off": len(off)},
        "met_a_slice": len(met),
        "share_met": len(met) / len(seen) if seen else 0.0,
        "slices_begun_while_a_request_ran": sum(
            slices.begun_within(r.received_ns, r.done_ns) for r in requests if r.received_ns
        ),
    }
    sides = {"ttft": ([r.ttft_ms for r in on], [r.ttft_ms for r in off])}
    waits = [r.wait_ms for r in on if r.received_ns], [r.wait_ms for r in off if r.received_ns]
    if all(waits):
        sides["wait"] = waits
    if met:
        sides["ttft_of_those_that_met"] = ([r.ttft_ms for r in met], [r.ttft_ms for r in off])
        sides["wait_of_those_that_met"] = ([r.wait_ms for r in met if r.received_ns], waits[1])
    named: tuple[tuple[str, Callable[[Sequence[float]], float]], ...] = (
        ("p50", lambda values: quantile(values, 0.5)),
        ("p99", lambda values: quantile(values, 0.99)),
        ("max", max),
    )
    for side, (these, those) in sides.items():
        if these and those:
            figures[side] = {
                "on_ms": {name: of(these) for name, of in named},
                "off_ms": {name: of(those) for name, of in named},
                "added_ms": {name: difference(these, those, of) for name, of in named},
            }
    return figures


def slices_by_m(events: Iterable[tuple[int, int, int, int]], slice_us: float) -> list[dict[str, float]]:
    """The passes of each M: how many, how long, and how many were longer than a slice; M 0 is news and notes."""
    by_m: dict[int, list[float]] = {}
    for _, begin, end, m in events:
        by_m.setdefault(m, []).append((end - begin) / 1e3)
    return [
        {
            "M": m,
            "passes": len(spans),
            "p50_us": quantile(spans, 0.5),
            "p99_us": quantile(spans, 0.99),
            "max_us": max(spans),
            "longer_than_a_slice": sum(span > slice_us for span in spans),
            "longer_than_2_ms": sum(span > 2000 for span in spans),
        }
        for m, spans in sorted(by_m.items())
    ]


class Check(NamedTuple):
    """One target: what it asks for, what was measured, whether it holds."""

    name: str
    target: str
    measured: str
    holds: bool


def latency_checks(figures: dict[str, Any], learned: int) -> list[Check]:
    """The targets of sparse requests; a run that met too few slices, or learned nothing, does not count."""
    share = figures["share_met"]
    checks = [
        Check("the run counts: requests that met a slice", ">= 30 %", f"{100 * share:.0f} %", share >= 0.3),
        Check("the run counts: rows learned in it", ">= 1", str(learned), learned >= 1),
        Check(
            "slices begun while a request ran",
            "0",
            str(figures["slices_begun_while_a_request_ran"]),
            figures["slices_begun_while_a_request_ran"] == 0,
        ),
    ]
    for name, limit in (("p50", 0.5), ("p99", 2.0), ("max", 5.0)):
        for side in ("ttft", "wait"):
            if side in figures:
                added = figures[side]["added_ms"][name]
                told = f"{added['value']:.2f} ms ({added['low']:.2f} to {added['high']:.2f})"
                checks.append(Check(f"added {side}, {name}", f"<= {limit} ms", told, added["value"] <= limit))
    return checks


def within(name: str, found: dict[str, float], limit: float) -> Check:
    """A ratio that must lie within a limit, interval stated."""
    told = f"{100 * found['value']:+.2f} % ({100 * found['low']:+.2f} to {100 * found['high']:+.2f})"
    return Check(name, f"within {100 * limit:g} %", told, abs(found["value"]) <= limit)
