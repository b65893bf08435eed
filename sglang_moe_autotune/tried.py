"""What searches tried, and how long it took in units of SGLang's own config. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from sglang_moe_autotune.experience import Trial
from sglang_moe_autotune.shapes import GEMMS

if TYPE_CHECKING:
    from sglang_moe_autotune.agenda import Key
    from sglang_moe_autotune.experience import Experience
    from sglang_moe_autotune.shapes import ConfigPair, Gemm, KernelConfig


class Tried(NamedTuple):
    """A trial at one M as it was measured, for people."""

    gemm: Gemm
    config: KernelConfig
    ratio: float
    """its time in units of that of SGLang's own config"""
    samples: int


class Ratios:
    """Chains the ratios of an M's searches, the later of which begin with a winner of an earlier one."""

    def __init__(self) -> None:
        self._behind: dict[Key, dict[Gemm, float]] = {}
        """by GEMM the log-ratio of what the last search chose to SGLang's own config"""

    def tried(self, key: Key, experience: Experience, chosen: ConfigPair) -> list[Tried]:
        """What is known at the M of a search that ended; its own ratios are to the pair that it began with."""
        _, M = key  # noqa: N806 - the field's name for it
        rows = {trial: row for trial, row in experience.measured[M].items() if row.logs}
        behind, began = self._behind.get(key, dict.fromkeys(GEMMS, 0.0)), experience.reference[M]
        further = {Trial(gemm, began.of(gemm)): 0.0 for gemm in GEMMS}
        further = {trial: row.centre for trial, row in rows.items()} | further
        ends = [(gemm, further.get(Trial(gemm, chosen.of(gemm)))) for gemm in behind]
        self._behind[key] = {gemm: behind[gemm] + by for gemm, by in ends if by is not None}
        return [
            Tried(trial.gemm, trial.config, math.exp(row.centre + behind[trial.gemm]), len(row.logs))
            for trial, row in rows.items()
            if trial.gemm in behind
        ]
