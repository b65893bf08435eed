"""The statistics of the serving bench, from events and times to figures. Standard library only."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    Event = tuple[int, int, int, int]

_RESAMPLES = 2000
_LEVEL = 0.95
LENGTHS_US = (100, 300, 500, 700, 1000, 2000, 5000)
"""of passes, for the shares by length; the last class is open"""
MET = (
    "A request met a pass of tuning where the launcher's send to the scheduler's socket returned between the begin and"
    " the end of that pass, and the scheduler took the request in after its end. A pass is one call of the idle hook"
    " that did work. The share is of all requests sent with tuning on; one whose times were not seen has met none."
)


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
    handed_ns: int = 0
    """when the launcher's send had returned: the request lies in the scheduler's socket, or is about to"""

    @property
    def ttft_ms(self) -> float:
        return (self.first_ns - self.asked_ns) / 1e6

    @property
    def wait_ms(self) -> float:
        """In the scheduler's socket: what a slice adds, without the noise of the way there."""
        return (self.received_ns - self.sent_ns) / 1e6


class Piece(NamedTuple):
    """Of an answer: when it came, in ns of CLOCK_MONOTONIC, and how many tokens the answer had then. The first one
    stands for the sending, with none."""

    at_ns: int
    tokens: int


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


class Slices:
    """The idle passes in which the plugin did work: begins and ends, none of which overlap."""

    def __init__(self, spans: Iterable[tuple[int, int]]) -> None:
        ordered = sorted(spans)
        self.begins = [begin for begin, _ in ordered]
        self.ends = [end for _, end in ordered]

    def pass_at(self, at_ns: int) -> tuple[int, int] | None:
        """Begin and end of the one that was running."""
        place = bisect.bisect_right(self.begins, at_ns) - 1
        return (self.begins[place], self.ends[place]) if place >= 0 and at_ns < self.ends[place] else None

    def met_by(self, request: Request) -> tuple[int, int] | None:
        """The pass that a request met, as ``MET`` says."""
        if not (request.handed_ns and request.received_ns):
            return None
        span = self.pass_at(request.handed_ns)
        return span if span is not None and request.received_ns >= span[1] else None

    def within(self, begin_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """Those that begin in a span."""
        low, high = bisect.bisect_left(self.begins, begin_ns), bisect.bisect_left(self.begins, end_ns)
        return list(zip(self.begins[low:high], self.ends[low:high], strict=True))

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
    met = [r for r in on if slices.met_by(r)]
    figures: dict[str, Any] = {
        "requests": {"on": len(on), "off": len(off)},
        "definition": MET,
        "not_seen": sum(not (r.handed_ns and r.received_ns) for r in on),
        "met_a_slice": len(met),
        "share_met": len(met) / len(on) if on else 0.0,
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


def by_length(
    requests: Sequence[Request], slices: Slices, spans: Sequence[tuple[int, int]]
) -> list[dict[str, float | None]]:
    """Passes by their length: how many, what share of the time with tuning on they took, and the requests that met one.

    requests: those sent with tuning on, in these spans of ns.
    """
    total_ns = sum(end - begin for begin, end in spans) or 1
    passes = [p for span in spans for p in slices.within(*span)]
    met = [(span, r) for r in requests if (span := slices.met_by(r)) is not None]
    edges = [0.0, *LENGTHS_US, math.inf]
    rows: list[dict[str, float | None]] = []
    for low, high in itertools.pairwise(edges):
        lengths = [end - begin for begin, end in passes if low < (end - begin) / 1e3 <= high]
        waits = [r.wait_ms for (begin, end), r in met if low < (end - begin) / 1e3 <= high]
        rows.append({
            "over_us": low,
            "up_to_us": high if high < math.inf else None,
            "passes": len(lengths),
            "share_of_time": sum(lengths) / total_ns,
            "met": len(waits),
            "share_of_requests": len(waits) / len(requests) if requests else 0.0,
            "longest_wait_ms": max(waits, default=0.0),
        })  # fmt: skip
    return rows


def stretch(requests: Iterable[Sequence[Piece]], begin_ns: int, end_ns: int) -> dict[str, float]:
    """What streams gave between two moments: tokens a second, and the time between the tokens of a stream in ms. A
    piece of an answer may bring several tokens, whose time is shared. Raises ValueError where there is none."""
    tokens, spent_ns, gaps = 0, 0, []
    for pieces in requests:
        for number, (before, piece) in enumerate(itertools.pairwise(pieces)):
            if not begin_ns <= piece.at_ns < end_ns or (fresh := piece.tokens - before.tokens) <= 0:
                continue
            tokens += fresh
            if number:  # the first one is a time to first token
                spent_ns += piece.at_ns - before.at_ns
                gaps += [(piece.at_ns - before.at_ns) / fresh / 1e6] * fresh
    return {
        "tokens_s": tokens / (end_ns - begin_ns) * 1e9,
        "itl_mean_ms": spent_ns / max(1, len(gaps)) / 1e6,
        "itl_p50_ms": quantile(gaps, 0.5),
        "itl_p99_ms": quantile(gaps, 0.99),
        "tokens": tokens,
    }


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


def latency_checks(figures: dict[str, Any], learned: Sequence[int]) -> list[Check]:
    """The targets of sparse requests; a run that met too few slices, or learned nothing, does not count.

    learned: rows of each turn with tuning on.
    """
    share, least = figures["share_met"], min(learned, default=0)
    checks = [
        Check("the run counts: requests that met a slice", ">= 30 %", f"{100 * share:.0f} %", share >= 0.3),
        Check("the run counts: rows learned in it", ">= 1", str(sum(learned)), sum(learned) >= 1),
        Check("rows learned in each turn", ">= 1", f"{least} to {max(learned, default=0)}", least >= 1),
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
    """A ratio whose interval must lie within a limit: a wider one has shown nothing, and says so."""
    low, high = found["low"], found["high"]
    told = f"{100 * found['value']:+.2f} % ({100 * low:+.2f} to {100 * high:+.2f})"
    if high - low > 2 * limit:
        told += ", an interval too wide to tell"
    return Check(name, f"within {100 * limit:g} %, interval included", told, -limit <= low and high <= limit)
