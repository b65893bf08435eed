"""One config under two names: whoever calls one of them faster is fooled. Decided as a job decides, a slice a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from sglang_moe_autotune.bench import Declined
from sglang_moe_autotune.decision import PairedTest
from sglang_moe_autotune.job import JobOptions
from sglang_moe_autotune.routings import Sampling
from sglang_moe_autotune.search_space import filled
from sglang_moe_autotune.shapes import GEMMS, ConfigPair

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from sglang_moe_autotune.bench import Bench

_DIRTY_LIMIT = 200
"""empty measurements in a row after which a place is given up"""

Progress = Literal["worked", "waiting"]


class Twins:
    """A number of decisions, in equal parts over places: a name, and what opens its bench and tells its baseline.

    A place that fails says why, and the next ones make up for it.
    """

    def __init__(self, places: Sequence[tuple[str, Callable[[], tuple[ConfigPair, Bench]]]], decisions: int) -> None:
        self._places, self._decisions = places, decisions
        self._options = JobOptions()
        self.counts = {"decisions": 0, "first_test_faster": 0, "both_tests_faster": 0, "samples": 0}
        self.places: dict[str, dict[str, Any]] = {}

    @property
    def told(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {**self.counts, "wanted": self._decisions, "places": self.places}

    def steps(self) -> Iterator[Progress]:
        """One bench call at most between two yields."""
        for number, (name, opened) in enumerate(self._places, 1):
            place = self.places[name] = {"decisions": 0, "both_tests_faster": 0, "baseline_us": [], "why": ""}
            try:
                baseline, bench = opened()
                try:
                    yield from self._decide(baseline, bench, place, self._decisions * number / len(self._places))
                finally:
                    bench.close()
            except (Declined, RuntimeError) as error:
                place["why"] = f"{type(error).__name__}: {error}"

    def _decide(self, baseline: ConfigPair, bench: Bench, place: dict[str, Any], until: float) -> Iterator[Progress]:
        twin = ConfigPair(*(filled(baseline.of(gemm)) for gemm in GEMMS))
        while not bench.prepare():
            yield "worked"
        for gemm in GEMMS:
            while (state := bench.readiness(gemm, twin.of(gemm))) == "waiting":
                yield "waiting"
            if state == "failed":
                raise Declined(bench.reason(gemm, twin.of(gemm)))
        while self.counts["decisions"] < until:
            first = yield from self._test(bench, twin, Sampling(bench.sampling.per_sample))
            both = False
            if first.outcome == "faster":
                both = (yield from self._test(bench, twin, bench.sampling)).outcome == "faster"
            self.counts["decisions"] += 1
            self.counts["first_test_faster"] += first.outcome == "faster"
            self.counts["both_tests_faster"] += both
            place["decisions"] += 1
            place["both_tests_faster"] += both
            seen = [*place["baseline_us"], round(first.baseline_us, 2)]
            place["baseline_us"] = [min(seen), max(seen)]  # how far the clocks drifted

    def _test(self, bench: Bench, twin: ConfigPair, sampling: Sampling) -> Generator[Progress, None, PairedTest]:
        """As a job makes it; the first one may go by single launches."""
        test, dirty = PairedTest(self._options.min_gain, self._options.error_rate, sampling=sampling), 0
        while test.outcome == "undecided":
            for gemm, count in zip(GEMMS, test.wanted, strict=True):
                if count:
                    samples = bench.measure(gemm, twin.of(gemm), count)
                    dirty = 0 if samples else dirty + 1
                    test.add(**{gemm: samples})
                    yield "worked"
            if dirty > _DIRTY_LIMIT:
                raise Declined("its measurements stayed dirty: something else keeps this GPU busy")
        self.counts["samples"] += test.samples
        return test
