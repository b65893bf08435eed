"""The space is SGLang's; what would read out of bounds or scale wrongly is never in it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_moe_autotune.search_space import (
    AXES,
    ROCM_AXES,
    filled,
    fitted,
    full_space,
    illegal,
    legal_space,
    neighbours,
    out_of_range,
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


def test_a_space_is_made_once_whatever_top_k_a_batch_says() -> None:
    """A model may say its top_k with its first batch only: no request must wait for the space then."""
    first = legal_space(BF16, 232_448)
    assert legal_space(msgspec.structs.replace(BF16, top_k=BF16.top_k + 1), 232_448) is first
    assert legal_space(BF16, 101_376) != first


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


PER_CHANNEL = MoeShape((128, 1408, 2816), (128, 2816, 704), 8, "fp8_w8a8", None, True)
HEURISTIC = KernelConfig(128, 256, 128, 32, 8, 4)


@pytest.mark.parametrize(
    ("limit", "rocm", "wanted"),
    [
        pytest.param(232_448, False, HEURISTIC, id="C01-it-fits-a-large-gpu"),
        pytest.param(101_376, False, KernelConfig(128, 256, 128, 32, 8, 3), id="C01-a-stage-less-on-a-small-gpu"),
        pytest.param(65_536, True, KernelConfig(128, 256, 128, 32, 8, 1), id="C02-on-hip-all-stages-count"),
        pytest.param(40_000, False, KernelConfig(128, 128, 128, 32, 8, 2), id="then-smaller-tiles"),
        pytest.param(1_000, False, None, id="nothing-like-it-fits"),
    ],
)
def test_a_config_is_made_to_fit(limit: int, rocm: bool, wanted: KernelConfig | None) -> None:
    assert fitted(HEURISTIC, PER_CHANNEL, limit, rocm=rocm) == wanted


@given(
    st.sampled_from(full_space()),
    st.sampled_from([BF16, fp8((64, 64), 320), fp8((128, 128)), int4(704, 2048), PER_CHANNEL]),
    st.sampled_from([65_536, 101_376, 166_912, 232_448]),
    st.booleans(),
)
def test_what_was_made_to_fit_fits_is_legal_and_stays_as_it_is(
    config: KernelConfig, shape: MoeShape, limit: int, rocm: bool
) -> None:
    found = fitted(config, shape, limit, rocm=rocm)
    if found is None:
        assert illegal(config, shape) is not None or shared_memory_bytes(config, shape, all_stages=rocm) > limit
        return
    assert shared_memory_bytes(found, shape, all_stages=rocm) <= limit
    assert illegal(found, shape) is None
    assert fitted(found, shape, limit, rocm=rocm) == found
    if shared_memory_bytes(config, shape, all_stages=rocm) <= limit:
        assert found == config
    assert all(getattr(found, axis) <= getattr(config, axis) for axis in AXES)


@pytest.mark.parametrize("limit", [65_536, 101_376, 166_912, 232_448])
@pytest.mark.parametrize("rocm", [False, True], ids=["C01-cuda", "C02-hip"])
def test_no_member_of_the_space_needs_more_than_there_is(limit: int, rocm: bool) -> None:
    space = legal_space(PER_CHANNEL, limit, rocm=rocm)
    assert space
    assert max(shared_memory_bytes(c, PER_CHANNEL, all_stages=rocm) for c in space) <= limit


def test_the_space_of_rocm_is_the_one_of_sglangs_tuner() -> None:
    space = full_space(rocm=True)
    assert len(space) == len(set(space)) == 1600
    assert {(c.num_stages, *c.extra) for c in space} == {(2,)}
    for near in neighbours(space[777], ROCM_AXES):
        assert near in space


def test_weights_without_groups_take_the_kernel_that_masks_its_loads() -> None:
    shape = MoeShape((64, 1408, 2048), (64, 2048, 704), 6, "int8_w8a16")
    assert illegal(KernelConfig(64, 64, 128, 1, 4, 3), shape) is None
    grouped = MoeShape(shape.w1_shape, shape.w2_shape, 6, "int8_w8a16", (0, 128))
    assert illegal(KernelConfig(64, 64, 128, 1, 4, 3), grouped)


@pytest.mark.parametrize(
    ("shape", "most"),
    [
        pytest.param(int4(768, 2048), (1 << 31) // (6 * 2048), id="weight-only"),
        pytest.param(BF16, None, id="bf16-counts-in-64-bits"),
        pytest.param(fp8((128, 128)), None, id="fp8-too"),
    ],
)
@pytest.mark.parametrize("M", [1, 127, 128, 129, 4096, 65536, 1 << 20], ids="C03-M={}".format)
def test_an_m_is_out_of_range_where_offsets_overflow(shape: MoeShape, most: int | None, M: int) -> None:  # noqa: N803
    assert (out_of_range(shape, M) is not None) == (most is not None and most < M)


def test_a_baseline_off_the_axes_has_neighbours() -> None:
    heuristic = KernelConfig(64, 64, 32, 8)
    assert filled(heuristic) == KernelConfig(64, 64, 32, 8, 4, 3)
    assert KernelConfig(64, 64, 64, 8, 4, 3) in set(neighbours(heuristic))
