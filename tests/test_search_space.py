"""The space is SGLang's; what would read out of bounds or scale wrongly is never in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_moe_autotune.search_space import (
    AXES,
    filled,
    full_space,
    illegal,
    legal_space,
    neighbours,
    shared_memory_bytes,
)
from sglang_moe_autotune.shapes import KernelConfig, MoeShape

BF16 = MoeShape((128, 1536, 2048), (128, 2048, 768), 8)


def fp8(block: tuple[int, int], N: int = 256) -> MoeShape:  # noqa: N803
    return MoeShape((256, 2 * N, 7168), (256, 7168, N), 8, "fp8_w8a8", block)


def int4(N: int, K: int) -> MoeShape:  # noqa: N803
    """Packed as SGLang hands it over: two weights a byte along K of each GEMM."""
    return MoeShape((64, 2 * N, K // 2), (64, K, N // 2), 6, "int4_w4a16", (0, 32))


def test_full_space_is_the_grid_of_sglangs_tuner() -> None:
    assert len(full_space()) == len(set(full_space())) == 1920
    assert legal_space(BF16) == full_space()


@pytest.mark.parametrize(
    ("shape", "key", "allowed"),
    [
        pytest.param(fp8((64, 64), 320), "BLOCK_SIZE_K", {64}, id="C04-block-64-leaves-one-K-tile"),
        pytest.param(fp8((128, 128)), "BLOCK_SIZE_K", {64, 128}, id="C05-no-K-tile-over-two-scales"),
        pytest.param(fp8((128, 128)), "BLOCK_SIZE_N", {32, 64, 128, 256}, id="wide-tiles-take-two-scales"),
        pytest.param(fp8((96, 128)), "BLOCK_SIZE_N", {32}, id="odd-block-n"),
        pytest.param(int4(768, 2048), "BLOCK_SIZE_K", {64, 128, 256}, id="wna16-both-depths-divide"),
        pytest.param(int4(704, 2048), "BLOCK_SIZE_K", {64}, id="wna16-down-depth-704"),
        pytest.param(int4(768, 2880), "BLOCK_SIZE_K", {64}, id="wna16-up-depth-2880"),
    ],
)
def test_tiles_that_a_shape_allows(shape: MoeShape, key: str, allowed: set[int]) -> None:
    assert {getattr(c, key) for c in legal_space(shape)} == allowed


@pytest.mark.parametrize(
    "shape", [fp8((128, 32)), fp8((48, 48)), int4(96, 2048)], ids=["block-k-32", "block-48", "depth-96"]
)
def test_an_empty_space_is_an_answer(shape: MoeShape) -> None:
    assert legal_space(shape) == ()


def test_reason_names_rule_and_values() -> None:
    reason = illegal(KernelConfig(64, 64, 256, 1, 4, 3), fp8((128, 128)))
    assert reason is not None
    assert "BLOCK_SIZE_K=256" in reason
    assert "128" in reason


def test_hopeless_configs_are_left_out_and_measured_ones_are_not() -> None:
    # 128x256x64 with 5 stages was refused with 245,760 bytes on a device of 232,448; with 4 it was the fastest.
    kept = legal_space(BF16, 232_448)
    assert KernelConfig(128, 256, 64, 1, 8, 4) in kept
    assert KernelConfig(256, 256, 256, 1, 8, 3) not in kept
    assert shared_memory_bytes(KernelConfig(128, 256, 64, 1, 8, 5), BF16, all_stages=True) == 245_760
    # The need of the fp8 heuristic that small GPUs cannot launch, and of the same tile with a stage less.
    per_channel = MoeShape((128, 1408, 2816), (128, 2816, 704), 8, "fp8_w8a8", None, True)
    assert shared_memory_bytes(KernelConfig(128, 256, 128, 1, 8, 4), per_channel) == 147_456
    assert shared_memory_bytes(KernelConfig(128, 256, 128, 1, 8, 3), per_channel) == 98_304


@given(st.sampled_from(full_space()))
def test_neighbours_differ_on_one_axis_and_the_relation_is_mutual(config: KernelConfig) -> None:
    for near in neighbours(config):
        assert sum(getattr(near, axis) != getattr(config, axis) for axis in AXES) == 1
        assert near in full_space()
        assert config in set(neighbours(near))


def test_a_baseline_off_the_axes_has_neighbours() -> None:
    heuristic = KernelConfig(64, 64, 32, 8)
    assert filled(heuristic) == KernelConfig(64, 64, 32, 8, 4, 3)
    assert KernelConfig(64, 64, 64, 8, 4, 3) in set(neighbours(heuristic))
