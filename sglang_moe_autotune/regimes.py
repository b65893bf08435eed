"""Regimes: which tiles win at how many rows an expert, for machines without SGLang's config files.

Shares, in percent, of each value among NVIDIA winners for bf16 and fp8 in SGLang 0.5.23's files, in five ranges of
rows an expert. Coarse on purpose: it stands in for the files where there are none, and never outvotes them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Final, NamedTuple

from sglang_moe_autotune.search_space import AXES, full_space

if TYPE_CHECKING:
    from sglang_moe_autotune.shapes import KernelConfig, MoeShape


class Regime(NamedTuple):
    """Shares by value of each axis below a count of rows an expert."""

    rows: float
    block_m: dict[int, int]
    block_n: dict[int, int]
    block_k: dict[int, int]
    group_m: dict[int, int]
    stages: dict[int, int]


_GROUPS: Final = {1: 48, 16: 22, 32: 18, 64: 12}
REGIMES: Final = (
    Regime(4, {16: 90, 32: 3, 64: 7}, {32: 12, 64: 42, 128: 43, 256: 3}, {64: 28, 128: 63, 256: 9}, _GROUPS,
           {2: 12, 3: 43, 4: 27, 5: 18}),
    Regime(16, {16: 70, 32: 15, 64: 15}, {32: 7, 64: 35, 128: 53, 256: 5}, {64: 20, 128: 68, 256: 12}, _GROUPS,
           {2: 20, 3: 50, 4: 22, 5: 8}),
    Regime(64, {16: 10, 32: 27, 64: 56, 128: 6}, {32: 2, 64: 22, 128: 65, 256: 11}, {64: 40, 128: 55, 256: 5}, _GROUPS,
           {2: 15, 3: 53, 4: 27, 5: 5}),
    Regime(256, {32: 4, 64: 50, 128: 40, 256: 5}, {64: 13, 128: 46, 256: 40}, {64: 62, 128: 36, 256: 2}, _GROUPS,
           {2: 8, 3: 43, 4: 45, 5: 4}),
    Regime(math.inf, {64: 16, 128: 75, 256: 8}, {64: 4, 128: 33, 256: 63}, {64: 78, 128: 21},
           {1: 33, 16: 37, 32: 17, 64: 13}, {3: 41, 4: 55, 5: 4}),
)  # fmt: skip
_WIDE_TILE: Final = 128 * 128
"""from here on a tile's sums fill the registers of four warps"""
_WRONG_WARPS: Final = 1.5
_UNSEEN: Final = 1


def order(shape: MoeShape, M: int) -> tuple[KernelConfig, ...]:  # noqa: N803
    """The full space by falling likelihood at this many rows an expert."""
    rows = M * shape.top_k / max(1, shape.E)
    return _order(next(n for n, regime in enumerate(REGIMES) if rows < regime.rows))


def prepare() -> None:
    """Work out all orders, each of which takes some milliseconds: at a start, where no request waits for it."""
    for number in range(len(REGIMES)):
        _order(number)


@lru_cache
def _order(regime_number: int) -> tuple[KernelConfig, ...]:
    regime = REGIMES[regime_number]
    tables = (regime.block_m, regime.block_n, regime.block_k, regime.group_m, None, regime.stages)
    costs = [
        [-math.log(table.get(value, _UNSEEN) / 100) if table else 0.0 for value in values]
        for table, values in zip(tables, AXES.values(), strict=True)
    ]
    # Sums of per-axis costs in the order of the space itself: 1,920 calls of a key function would not fit a slice.
    totals = [sum(parts) for parts in product(*costs)]
    space = full_space()
    for number, config in enumerate(space):
        wide = config.BLOCK_SIZE_M * config.BLOCK_SIZE_N >= _WIDE_TILE
        totals[number] += _WRONG_WARPS * ((config.num_warps == 8) != wide)
    return tuple(space[n] for n in sorted(range(len(space)), key=totals.__getitem__))
