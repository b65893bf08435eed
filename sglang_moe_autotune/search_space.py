"""The search space: which kernel configs may be tried for a shape, and which can not work.

The axes are those of SGLang's offline tuner, on CUDA and on ROCm. The baseline usually lies outside of them (the
heuristic takes a BLOCK_SIZE_K of 32); a search carries it as candidate zero.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import TYPE_CHECKING, Final

import msgspec

from sglang_moe_autotune.shapes import GEMMS, KernelConfig, MoeShape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_moe_autotune.shapes import ConfigPair

AXES: Final[dict[str, tuple[int, ...]]] = {
    "BLOCK_SIZE_M": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_N": (32, 64, 128, 256),
    "BLOCK_SIZE_K": (64, 128, 256),
    "GROUP_SIZE_M": (1, 16, 32, 64),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
}
ROCM_AXES: Final[dict[str, tuple[int, ...]]] = {
    "BLOCK_SIZE_M": (32, 64, 128, 256),
    "BLOCK_SIZE_N": (16, 32, 64, 128, 256),
    "BLOCK_SIZE_K": (32, 64, 128, 256),
    "GROUP_SIZE_M": (1, 4, 8, 16, 32),
    "num_warps": (1, 2, 4, 8),
    "num_stages": (2,),
}
"""SGLang's tuner writes ``waves_per_eu`` 0 beside them, which is what Triton takes where a config is silent."""
TRITON_WARPS: Final = 4
TRITON_STAGES: Final = 3
"""What Triton takes where a config leaves them out."""

EIGHT_BIT: Final = ("fp8_w8a8", "int8_w8a8")
_WEIGHT_ONLY = {"int4_w4a16": 2, "int8_w8a16": 1}  # weights in one byte of the packed dimension


@lru_cache
def full_space(*, rocm: bool = False) -> tuple[KernelConfig, ...]:
    """All configs of the axes, 1,920 on CUDA and 1,600 on ROCm, small tiles first."""
    return tuple(tiles(*values) for values in product(*(ROCM_AXES if rocm else AXES).values()))


def illegal(config: KernelConfig, shape: MoeShape) -> str | None:
    """The rule that this config breaks for this shape, in words; None where it is legal.

    An illegal config would not crash: it would read out of bounds or scale with the wrong numbers.
    """
    block_n, block_k = shape.block_shape or (0, 0)
    tile_n, tile_k = config.BLOCK_SIZE_N, config.BLOCK_SIZE_K
    if shape.dtype in EIGHT_BIT and block_n > 0 and block_k > 0:
        if block_k % tile_k:
            return f"BLOCK_SIZE_K={tile_k} must divide the {block_k} of block_shape: a tile has one scale along K"
        if max(tile_n, block_n) % min(tile_n, block_n):
            return f"BLOCK_SIZE_N={tile_n} and the {block_n} of block_shape must divide one another"
    # Without groups SGLang takes the kernel that masks its loads along K.
    if shape.dtype in _WEIGHT_ONLY and block_k > 0:
        packing = _WEIGHT_ONLY[shape.dtype]
        for name, depth in (("up", shape.w1_shape[2] * packing), ("down", shape.w2_shape[2] * packing)):
            if depth % tile_k:
                return f"BLOCK_SIZE_K={tile_k} must divide the {depth} of the {name} GEMM: its loads have no mask"
    return None


def out_of_range(shape: MoeShape, M: int) -> str | None:  # noqa: N803
    """Why a launch at M would read or write at wrong addresses under any config, in words; None where it would not.

    The kernel for weight-only layers counts rows in 32 bits: a row's number times its length must stay below 2^31.
    That of all others counts in 64.
    """
    longest = max(shape.w1_shape[1], shape.K)
    if shape.dtype in _WEIGHT_ONLY and M * shape.top_k * longest >= 1 << 31:
        return f"{M} tokens x top-{shape.top_k} x {longest} columns exceed the 32-bit offsets of its kernel"
    return None


def shared_memory_bytes(config: KernelConfig, shape: MoeShape, *, all_stages: bool = False) -> int:
    """The least shared memory that this config can need, in bytes: one tile of A and of B a stage in flight.

    CUDA keeps one stage in registers (sm80, sm86, sm89, sm120) or none (sm90, sm100); HIP keeps none, hence
    ``all_stages``. int4 weights are unpacked on their way and need not pass through it. The compiled binary states
    the true need; this is for what is not compiled yet.
    """
    stages = TRITON_STAGES if config.num_stages is None else config.num_stages
    if shape.dtype in _WEIGHT_ONLY:
        a_bytes, b_bytes = 2, 2 - _WEIGHT_ONLY[shape.dtype]
    elif shape.dtype in EIGHT_BIT:
        a_bytes, b_bytes = 1, 1
    else:
        a_bytes = b_bytes = 4 if "float32" in (shape.dtype, shape.activation_dtype) else 2
    tile = (config.BLOCK_SIZE_M * a_bytes + config.BLOCK_SIZE_N * b_bytes) * config.BLOCK_SIZE_K
    return tile * max(1, stages if all_stages else stages - 1)


def legal_space(shape: MoeShape, limit_bytes: int | None = None, *, rocm: bool = False) -> tuple[KernelConfig, ...]:
    """The configs of the full space that may be tried; empty where no tile fits the shape's blocks.

    limit_bytes: the opt-in shared memory of a block; configs that exceed it even by the lower bound are left out.
    """
    # The rules ask for no top_k, which a model may say only with its first batch.
    return _legal_space(msgspec.structs.replace(shape, top_k=1), limit_bytes, rocm=rocm)


@lru_cache(maxsize=64)
def _legal_space(shape: MoeShape, limit_bytes: int | None, *, rocm: bool) -> tuple[KernelConfig, ...]:
    return tuple(
        config
        for config in full_space(rocm=rocm)
        if illegal(config, shape) is None
        and (limit_bytes is None or shared_memory_bytes(config, shape, all_stages=rocm) <= limit_bytes)
    )


def fitted(config: KernelConfig, shape: MoeShape, limit_bytes: int, *, rocm: bool = False) -> KernelConfig | None:
    """The config, or one like it that needs less shared memory: fewer stages first, then a smaller N, K and M.

    None where nothing like it fits or would be legal. By the lower bound; the compiled binary states the true need.
    """

    def fits(candidate: KernelConfig) -> bool:
        return shared_memory_bytes(candidate, shape, all_stages=rocm) <= limit_bytes

    config = _with(config, num_stages=filled(config).num_stages) if not fits(config) else config
    while not fits(config) and (config.num_stages or TRITON_STAGES) > (1 if rocm else 2):
        config = _with(config, num_stages=(config.num_stages or TRITON_STAGES) - 1)
    for axis, least in (("BLOCK_SIZE_N", 32), ("BLOCK_SIZE_K", 32), ("BLOCK_SIZE_M", 16)):
        while not fits(config) and getattr(config, axis) > least:
            smaller = _with(config, **{axis: getattr(config, axis) // 2})
            if illegal(smaller, shape) is not None:
                break
            config = smaller
    return config if fits(config) and illegal(config, shape) is None else None


def _with(config: KernelConfig, **values: int | None) -> KernelConfig:
    return msgspec.structs.replace(config, **values)


def neighbours(config: KernelConfig, axes: dict[str, tuple[int, ...]] = AXES) -> Iterator[KernelConfig]:
    """Configs one step away on one of the axes; any group size is one step from any other.

    From a value off the axis (the baseline's) the steps are the nearest ones on either side.
    """
    here = tuple(int(getattr(filled(config), axis)) for axis in axes)
    for n, (axis, values) in enumerate(axes.items()):
        lower, higher = [v for v in values if v < here[n]], [v for v in values if v > here[n]]
        steps = lower + higher if axis == "GROUP_SIZE_M" else lower[-1:] + higher[:1]
        for value in steps:
            yield tiles(*here[:n], value, *here[n + 1 :])


def tiles(*values: int) -> KernelConfig:
    """A config by its values on the axes, in their order."""
    return KernelConfig(**dict(zip(AXES, values, strict=True)))  # type: ignore[arg-type]  # no axis is ``extra``


def filled(config: KernelConfig) -> KernelConfig:
    """The same launch with Triton's own warps and stages written out, and without extra keys."""
    return KernelConfig(
        config.BLOCK_SIZE_M,
        config.BLOCK_SIZE_N,
        config.BLOCK_SIZE_K,
        config.GROUP_SIZE_M,
        TRITON_WARPS if config.num_warps is None else config.num_warps,
        TRITON_STAGES if config.num_stages is None else config.num_stages,
    )


def same_launches(a: ConfigPair, b: ConfigPair) -> bool:
    """Is one the other under another spelling?"""
    return all((filled(a.of(g)), a.of(g).extra) == (filled(b.of(g)), b.of(g).extra) for g in GEMMS)
