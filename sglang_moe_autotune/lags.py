"""The lag of a config at one M: how far the best pair with it is behind the best pair of all, in log time. Pure.

Costs are by trial, in units of the baseline pair's time; up and down GEMM of a pair share their BLOCK_SIZE_M.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from sglang_moe_autotune.shapes import GEMMS, Gemm, KernelConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_moe_autotune.experience import Trial

SHARE: Final[Mapping[Gemm, float]] = {"up": 0.6, "down": 0.4}
"""of the baseline pair's time, before it was measured"""
OTHER: Final[Mapping[Gemm, Gemm]] = {"up": "down", "down": "up"}


def least_by_tile(costs: Mapping[Trial, float]) -> dict[int, dict[Gemm, float]]:
    """By BLOCK_SIZE_M the least cost of each GEMM."""
    least: dict[int, dict[Gemm, float]] = {}
    for (gemm, config), cost in costs.items():
        tile = least.setdefault(config.BLOCK_SIZE_M, dict.fromkeys(GEMMS, math.inf))
        tile[gemm] = min(tile[gemm], cost)
    return least


def best(least: Mapping[int, Mapping[Gemm, float]]) -> float:
    """The cost of the best pair, the baseline's at most."""
    return min([1.0, *(sum(tile.values()) for tile in least.values())])


def lags(costs: Mapping[Trial, float]) -> dict[KernelConfig, float]:
    """By config; infinite where nothing fits it."""
    least = least_by_tile(costs)
    leading, found = best(least), dict[KernelConfig, float]()
    for (gemm, config), cost in costs.items():
        lag = math.log((cost + least[config.BLOCK_SIZE_M][OTHER[gemm]]) / leading)
        found[config] = min(lag, found.get(config, math.inf))
    return found
