"""The fit: a config that this GPU cannot launch, with less shared memory. Pure.

What SGLang answers on a miss can need more shared memory than a block may have, and the first forward would end the
server: releases before 0.5.16 with fp8 weights without blocks on GPUs of 101,376 bytes. Stages go first, as they
cost speed alone; then tiles, one halving after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from sglang_moe_autotune.search_space import fitted, illegal, legal_space, shared_memory_bytes
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig, MoeShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_moe_autotune.records import Environment

_LEAST_M: Final = 16


class Limit(NamedTuple):
    """The shared memory of a block, and how the stages of a loop count against it."""

    bytes: int
    """0 where nobody knows: then everything fits"""
    all_stages: bool = False

    def need(self, config: KernelConfig, shape: MoeShape) -> int:
        """The least that a launch of this config takes, in bytes."""
        return shared_memory_bytes(config, shape, all_stages=self.all_stages)

    def holds(self, config: KernelConfig, shape: MoeShape) -> bool:
        return self.bytes <= 0 or self.need(config, shape) <= self.bytes


def unfit(pair: ConfigPair, shape: MoeShape, limit: Limit) -> str | None:
    """Why a pair must not be launched for this shape within the limit; None where nothing speaks against it."""
    for config in (pair.up, pair.down):
        if (rule := illegal(config, shape)) is not None:
            return rule
        if not limit.holds(config, shape):
            need = limit.need(config, shape)
            return f"{config} needs at least {need} bytes of shared memory, and a block may use {limit.bytes}"
    return None


def limit_of(environment: Environment) -> Limit:
    """The limit of a GPU. All stages count only where compiled kernels say that they do, whatever the tile (gfx950):
    on gfx942 one stays in registers, and on Hopper and Blackwell it does for tiles of few rows. The bound must not
    take from SGLang what could be launched."""
    amd = is_amd(environment.device_name)
    return Limit(environment.shared_memory_bytes, amd and environment.capability == (9, 5))


def is_amd(device_name: str) -> bool:
    """Is this a name that ROCm gives a device? It may give none at all."""
    return not device_name or device_name.startswith("AMD") or "gfx" in device_name or "Radeon" in device_name


def space_of(environment: Environment) -> Callable[[MoeShape], tuple[KernelConfig, ...]]:
    """What may be tried for a shape on a GPU: SGLang's own space there, without what it cannot launch."""
    rocm, limit = is_amd(environment.device_name), environment.shared_memory_bytes
    return lambda shape: legal_space(shape, limit or None, rocm=rocm)


def fit(pair: ConfigPair, shape: MoeShape, limit: Limit) -> ConfigPair | None:
    """The pair with as little taken off as this GPU needs to launch it; None where it fits as it is, or not at all.

    Both GEMMs keep one BLOCK_SIZE_M, which is halved last.
    """
    if all(limit.holds(config, shape) for config in (pair.up, pair.down)):
        return None
    block_m = pair.up.BLOCK_SIZE_M
    while block_m >= min(_LEAST_M, pair.up.BLOCK_SIZE_M):
        up, down = (
            fitted(msgspec.structs.replace(config, BLOCK_SIZE_M=block_m), shape, limit.bytes, rocm=limit.all_stages)
            for config in (pair.up, pair.down)
        )
        if up is not None and down is not None and up.BLOCK_SIZE_M == down.BLOCK_SIZE_M == block_m:
            return ConfigPair(up, down)
        block_m //= 2
    return None
