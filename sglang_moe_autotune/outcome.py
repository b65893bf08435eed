"""The outcome of a job: the pair that stands, and the evidence for it. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from sglang_moe_autotune.bench import Comparison  # noqa: TC001 - msgspec reads annotations when it runs
from sglang_moe_autotune.decision import Estimate
from sglang_moe_autotune.records import Evidence
from sglang_moe_autotune.shapes import ConfigPair  # noqa: TC001 - as above

NO_GAIN: Final = Estimate(0.0, 0.0, 0.0)


class Outcome(msgspec.Struct, frozen=True):
    """How a job ended. ``pair`` is the baseline where nothing was clearly faster, and SGLang's own config where what
    beat a learned baseline does not beat that."""

    pair: ConfigPair
    estimate: Estimate
    """of a winner: against SGLang's own config"""
    baseline_us: float
    samples: int
    measured: int
    comparison: Comparison | None = None
    """the one with the largest error; None for the baseline"""
    runs: int = 0
    """of each GEMM, over all comparisons"""

    def evidence(self, gpu_s: float, before: Evidence | None) -> Evidence:
        """For the record. ``before``: of the pair this job was measured against; it holds where that pair stays."""
        gain, low, high = self.estimate
        if before is not None and self.estimate == NO_GAIN:  # the pair stays, and with it what is known of it
            # Of two records with one gain the store keeps that with more samples.
            samples = before.samples + max(1, self.samples)
            return msgspec.structs.replace(before, samples=samples, measured=self.measured, gpu_s=gpu_s)
        return Evidence(
            baseline_us=self.baseline_us,
            chosen_us=self.baseline_us * (1 - gain),
            gain=gain,
            gain_low=low,
            gain_high=high,
            samples=self.samples,
            measured=self.measured,
            gpu_s=gpu_s,
            # Errors add up: this pair was compared with the one before, and that one with SGLang's own.
            max_error=self.comparison.error + ((before and before.max_error) or 0.0) if self.comparison else None,
            tolerance=self.comparison.tolerance if self.comparison else None,
            runs=self.runs,
        )
