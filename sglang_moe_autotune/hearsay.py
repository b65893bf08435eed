"""Hearsay: what a rank measured in its searches, so that no other tries what it found slow. Pure."""

from __future__ import annotations

import math

import msgspec

from sglang_moe_autotune.experience import Trial
from sglang_moe_autotune.lags import SHARE, lags
from sglang_moe_autotune.shapes import Gemm, KernelConfig, MoeShape  # noqa: TC001 - msgspec reads the annotations


class Heard(msgspec.Struct, frozen=True):
    """The trials of one (shape, M): the gemm, its config, and its time in units of that of SGLang's own config."""

    shape: MoeShape
    M: int
    trials: tuple[tuple[Gemm, KernelConfig, float], ...]

    def lags(self) -> dict[KernelConfig, float]:
        """The lag of each config, as an own search would see it; what is no ratio is left out."""
        usable = ((gemm, config, ratio) for gemm, config, ratio in self.trials if 0 < ratio < math.inf)
        return lags({Trial(gemm, config): SHARE[gemm] * ratio for gemm, config, ratio in usable})
