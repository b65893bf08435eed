"""The inspection: a stored row, put to the test again on a bench. Pure; a generator that yields between slices."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple

from sglang_moe_autotune.decision import Estimate, PairedTest
from sglang_moe_autotune.records import Evidence
from sglang_moe_autotune.shapes import GEMMS

if TYPE_CHECKING:
    from collections.abc import Generator

    from sglang_moe_autotune.bench import Bench, Comparison
    from sglang_moe_autotune.records import Record

Outcome = Literal["holds", "slower", "differs", "lost", "unsure"]
"""``holds``: faster again, and its output agrees. ``slower``: the test does not find it faster. ``differs``: its
output does not agree. ``lost``: its binary cannot be made or launched any more. ``unsure``: it could not be
measured, which says nothing about the row. Rows that are slower, differ or are lost are demoted."""

Progress = Literal["worked", "waiting"]

DEMOTED: tuple[Outcome, ...] = ("slower", "differs", "lost")

_ERROR_RATE = 0.005
_NO_GAIN = Estimate(0.0, 0.0, 0.0)
_DIRTY_LIMIT = 200
"""empty measurements in a row after which a row cannot be measured"""


class Finding(NamedTuple):
    """What an inspection found."""

    outcome: Outcome
    reason: str
    estimate: Estimate
    evidence: Evidence
    """of the new measurement, for the record that replaces one that is demoted"""


def inspect(bench: Bench, record: Record) -> Generator[Progress, None, Finding]:
    """Test the stored pair against its baseline from nothing, then compare the outputs. A row holds if its gain is
    above zero by the test's error rate; how large it was found before does not count. Raises Declined."""
    while not bench.prepare():
        yield "worked"
    test = PairedTest(0.0, _ERROR_RATE, sampling=bench.sampling)
    for gemm in GEMMS:
        while (state := bench.readiness(gemm, record.pair.of(gemm))) == "waiting":
            yield "waiting"
        if state == "failed":
            return _finding("lost", bench.reason(gemm, record.pair.of(gemm)), test, bench)
    dirty = 0
    while test.outcome == "undecided":
        for gemm, count in zip(GEMMS, test.wanted, strict=True):
            if count:
                samples = bench.measure(gemm, record.pair.of(gemm), count)
                dirty = 0 if samples else dirty + 1
                test.add(**{gemm: samples})
                yield "worked"
                if not samples and bench.readiness(gemm, record.pair.of(gemm)) == "failed":
                    return _finding("lost", bench.reason(gemm, record.pair.of(gemm)), test, bench)
        if dirty > _DIRTY_LIMIT:
            return _finding("unsure", "it could not be measured without disturbance", test, bench)
    gain, low, high = (100 * value for value in test.estimate)
    if test.outcome != "faster":
        return _finding("slower", f"its gain is between {low:.1f} and {high:.1f} %", test, bench)
    compared = yield from _compare(bench, record)
    if isinstance(compared, str):
        return _finding("differs", compared, test, bench)
    return _finding("holds", f"{gain:.1f} % faster ({low:.1f} to {high:.1f})", test, bench, compared)


def _compare(bench: Bench, record: Record) -> Generator[Progress, None, Comparison | str | None]:
    """The comparison with the largest error and the runs of all, or what is wrong."""
    worst: Comparison | None = None
    runs = 0
    for case in range(bench.compare_cases):
        while (comparison := bench.compare(record.pair, case)) is None:
            yield "worked"
        yield "worked"
        if not comparison.ok:
            return f"{comparison.reason} (case {case})"
        runs += comparison.runs
        if worst is None or comparison.error > worst.error:
            worst = comparison
    return worst and worst._replace(runs=runs)


def _finding(
    outcome: Outcome, reason: str, test: PairedTest, bench: Bench, comparison: Comparison | None = None
) -> Finding:
    estimate = test.estimate if math.isfinite(test.estimate.low) else _NO_GAIN
    # A row that is taken back serves the baseline: its evidence says so, and by how many samples.
    gain = estimate if outcome == "holds" else _NO_GAIN
    evidence = Evidence(
        baseline_us=test.baseline_us,
        chosen_us=test.baseline_us * (1 - gain.gain),
        gain=gain.gain,
        gain_low=gain.low,
        gain_high=gain.high,
        samples=test.samples,
        measured=1,
        gpu_s=bench.gpu_s,
        max_error=comparison.error if comparison else None,
        tolerance=comparison.tolerance if comparison else None,
        runs=comparison.runs if comparison else 0,
    )
    return Finding(outcome, reason, estimate, evidence)
