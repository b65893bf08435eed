"""A shape has a name, and the name leads back to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_moe_autotune.errand import shape_of_fields
from sglang_moe_autotune.shapes import (
    ACTIVATION_WORDS,
    MAX_SIZE,
    QUANTISED,
    VARIANTS,
    MoeShape,
    shape_of_sizes,
    shape_of_slug,
)

_SIZE = st.integers(1, MAX_SIZE)


@st.composite
def layers(draw: st.DrawFn) -> MoeShape:
    """What SGLang's lookup can be told of a layer; quantised ones with bfloat16 around them."""
    dtype = draw(st.sampled_from([*QUANTISED, "bf16", "fp16", "float32"]))
    ep, experts, top_k = draw(st.booleans()), draw(_SIZE), draw(_SIZE)
    blocks = st.none() | st.tuples(st.integers(0, 512), st.integers(0, 512))
    return shape_of_sizes(
        (experts, draw(_SIZE), draw(_SIZE), top_k if ep else min(top_k, experts)),
        dtype,
        draw(blocks),
        per_channel_quant=draw(st.booleans()),
        activation_dtype=ACTIVATION_WORDS.get(dtype, "bfloat16"),
        ep=ep,
        variant=tuple(sorted(draw(st.sets(st.sampled_from(VARIANTS))))),
    )


@given(layers())
def test_a_name_leads_back_to_its_shape(made: MoeShape) -> None:
    assert shape_of_slug(made.slug) == made


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(MoeShape((128, 1536, 2048), (128, 2048, 768), 8), id="bf16"),
        pytest.param(MoeShape((8, 768, 2048), (8, 2048, 768), 2, variant=("no-combine", "ungated")), id="ungated"),
        # Two weights in a byte along the columns of both matrices; K of the up GEMM is packed as N of the file is.
        pytest.param(MoeShape((256, 1024, 1024), (256, 2048, 256), 8, "int4_w4a16", (0, 128)), id="C06-int4"),
        pytest.param(MoeShape((8, 64, 64), (8, 64, 32), 2, "int8_w8a16", (0, 32), variant=("zero-points",)), id="int8"),
        pytest.param(MoeShape((8, 128, 128), (8, 128, 64), 2, "float32", activation_dtype="float32"), id="float32"),
        pytest.param(MoeShape((2, 128, 128), (2, 128, 64), 8, ep=True), id="fewer-local-experts-than-top-k"),
    ],
)
def test_layers_as_they_lie_in_memory(made: MoeShape) -> None:
    assert shape_of_slug(made.slug) == made


@given(st.text() | st.from_regex(r"E[0-9]{1,9}-N[0-9]-K[0-9]-top[0-9]-[a-z0-9_]{1,9}(-[a-z]+)*", fullmatch=True))
def test_any_text_is_a_name_or_none(text: str) -> None:
    found = shape_of_slug(text)
    assert found is None or found.slug == text.replace("-fp32", "-float32")


@pytest.mark.parametrize(
    "text",
    [
        "", "E8", "E8-N256", "E8-N256-K512-top2-bf99", "E8-N0-K512-top2-bf16", "E2-N8-K8-top4-bf16",
        "E08-N8-K8-top4-bf16", "E99999999-N8-K8-top2-bf16", "E8-N8-K8-top2-bf16-perchanel", "E8-N8-K8-top2-bf16 ",
        "E\u0668-N8-K8-top2-bf16",
    ],
)  # fmt: skip
def test_what_is_no_whole_name_is_none(text: str) -> None:
    assert shape_of_slug(text) is None


def test_fields_say_the_same_as_a_name() -> None:
    found = shape_of_fields("E=256,N=256,K=2048,top_k=8,dtype=int4_w4a16,block=0x128")
    assert found == shape_of_slug("E256-N256-K2048-top8-int4_w4a16-block0x128")


def test_the_variants_are_those_that_live_layers_have() -> None:
    pytest.importorskip("torch")
    from sglang_moe_autotune import layers as live  # noqa: PLC0415 - needs torch

    all_on: Any = SimpleNamespace(b13=1, b2=1, fuse_swiglu_interleaved=True, w13_zp=1, w2_zp=1)
    config = SimpleNamespace(
        no_combine_keep_router_weight=True, no_combine=True, apply_router_weight_on_input=True, is_gated=False
    )
    assert live._variant(all_on, config) == VARIANTS
