"""Made-up landscapes, unlike the recorded one, so that no test passes by having been fitted to it."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import msgspec

from sglang_moe_autotune.landscape import Baseline, Landscape
from sglang_moe_autotune.search_space import filled, legal_space, shared_memory_bytes
from sglang_moe_autotune.shapes import GEMMS, ConfigPair, Gemm, KernelConfig, MoeShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

LIMIT_BYTES = 166_912
SMS = 108


def bf16_shape(E: int = 32, N: int = 1024, K: int = 4096, top_k: int = 4) -> MoeShape:  # noqa: N803
    return MoeShape((E, 2 * N, K), (E, K, N), top_k)


def heuristic(shape: MoeShape, M: int) -> ConfigPair:  # noqa: N803
    """What SGLang's fallback answers for bf16."""
    config = KernelConfig(16, 32, 64, 1) if shape.E >= M else KernelConfig(64, 64, 32, 8)
    return ConfigPair(config, config)


def model_us(shape: MoeShape, M: int, gemm: Gemm, config: KernelConfig, ruggedness: float, seed: int) -> float:  # noqa: N803
    """A roofline of an invented GPU: tiles in waves, weights once, a penalty a poor fit, and fixed ruggedness."""
    tile = filled(config)
    m, n, k = tile.BLOCK_SIZE_M, tile.BLOCK_SIZE_N, tile.BLOCK_SIZE_K
    width, depth = (shape.w1_shape[1], shape.K) if gemm == "up" else (shape.K, shape.N)
    active = shape.E * (1 - (1 - shape.top_k / shape.E) ** M)
    rows = M * shape.top_k / active
    blocks = active * math.ceil(rows / m) * math.ceil(width / n)
    resident = max(1, LIMIT_BYTES // shared_memory_bytes(tile, shape, all_stages=True))
    waves = math.ceil(blocks / (SMS * min(resident, 4)))
    warps = tile.num_warps or 4
    per_tile = m * n * depth / (1.3e6 * min(1.0, (m * n) ** 0.5 / 128) * (1 + 0.1 * (warps == 8) * (m * n > 8192)))
    per_tile *= 1 + 0.25 / ((tile.num_stages or 3) - 1) + 24 / k
    memory = active * width * depth * 2 / 1.8e6 + rows * active * depth * math.ceil(width / n) * 2 / 6e6
    memory *= 1 + 0.05 * abs(math.log2(tile.GROUP_SIZE_M / (1 if rows < 64 else 16)))
    luck = _luck(seed, gemm, tile) * ruggedness + _luck(seed, gemm, tile, M) * ruggedness / 3
    return 5 + max(waves * per_tile * min(resident, 4) ** 0.5, memory) * math.exp(luck)


def _luck(*what: object) -> float:
    return random.Random(repr(what)).gauss(0, 1)  # noqa: S311 - no secret


def landscape(
    shape: MoeShape | None = None,
    ms: Iterable[int] = (1, 8, 64, 512, 4096),
    *,
    ruggedness: float = 0.04,
    seed: int = 0,
) -> Landscape:
    shape = shape or bf16_shape()
    fits = [
        c for c in legal_space(shape) if shared_memory_bytes(c, shape, all_stages=True) <= LIMIT_BYTES
    ]
    tables: dict[Gemm, dict[int, dict[KernelConfig, float]]] = {
        gemm: {M: {c: model_us(shape, M, gemm, c, ruggedness, seed) for c in fits} for M in ms} for gemm in GEMMS
    }
    baselines = {}
    for M in ms:  # noqa: N806
        pair = heuristic(shape, M)
        up, down = (model_us(shape, M, gemm, pair.of(gemm), ruggedness, seed) for gemm in GEMMS)
        baselines[M] = Baseline(pair, up, down)
    return Landscape(shape, legal_space(shape), tables["up"], tables["down"], baselines)


Row = dict[KernelConfig, float]


def mapped(recorded: Landscape, change: Callable[[int, Gemm, Row], Row]) -> Landscape:
    """With every row of latencies replaced."""
    return msgspec.structs.replace(
        recorded,
        up_us={M: change(M, "up", row) for M, row in recorded.up_us.items()},
        down_us={M: change(M, "down", row) for M, row in recorded.down_us.items()},
    )


def shuffled(recorded: Landscape, seed: int) -> Landscape:
    """The same latencies, each M's and GEMM's dealt out anew: no config says anything of another."""
    rng = random.Random(seed)  # noqa: S311 - no secret

    def deal(M: int, gemm: Gemm, row: Row) -> Row:  # noqa: N803
        values = list(row.values())
        rng.shuffle(values)
        return dict(zip(row, values, strict=True))

    return mapped(recorded, deal)


def unbeatable(recorded: Landscape) -> Landscape:
    """No candidate is faster than the baseline, some are exactly as fast."""

    def slower(M: int, gemm: Gemm, row: Row) -> Row:  # noqa: N803
        baseline = recorded.baselines[M]
        least = min(row.values())
        return {c: us / least * (baseline.up_us if gemm == "up" else baseline.down_us) for c, us in row.items()}

    return mapped(recorded, slower)
