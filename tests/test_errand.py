"""Errands and news survive the pipe; shapes have names that lead back to them; work is dealt out once and evenly."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_values import H200, record, shape

from sglang_moe_autotune import errand
from sglang_moe_autotune.errand import Ended, Errand, Item, Learned, Passed, Ready, Step, Verified

if TYPE_CHECKING:
    from sglang_moe_autotune.errand import Told

TOLD: list[Told] = [
    Ready(H200),
    Passed("E8", 4, "settled: faster", settled=True),
    Step("E8", 4, "searching", 1.5),
    Learned(record()),
    Verified("E8", 4, "slower", "its gain is between -1 and 1 %", 0.1, 0.0, -0.01, 0.01),
    Ended("budget", 2.5, True),
]


@pytest.mark.parametrize("told", TOLD, ids=lambda told: type(told).__name__)
def test_news_come_back_as_they_went(told: Told) -> None:
    line = errand.encode(told)
    assert line.count(b"\n") == 1
    assert errand.decode_told(line) == told


def test_an_errand_comes_back_as_it_went() -> None:
    fp8 = shape(64, dtype="fp8_w8a8", block_shape=(128, 128))
    order = Errand("tune", (Item(shape(), (1, 2)), Item(fp8, (4,))), "/x", budget_s=2.0, seed=3)
    assert errand.decode_errand(errand.encode(order)) == order


@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 99), unique=True, max_size=20)), max_size=5),
    st.integers(1, 8),
)
def test_work_is_dealt_out_once_and_evenly(work: list[tuple[int, list[int]]], count: int) -> None:
    items = [Item(shape(experts), tuple(ms)) for experts, ms in dict(work).items()]
    hands = errand.split(items, count)
    dealt = sorted((item.shape.E, m) for hand in hands for item in hand for m in item.ms)
    assert dealt == sorted((item.shape.E, m) for item in items for m in item.ms)
    sizes = [sum(len(item.ms) for item in hand) for hand in hands]
    assert len(hands) == min(count, len(dealt))
    assert not sizes or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("text", "slug"),
    [
        pytest.param("E=64,N=512,K=2048,top_k=6", "E64-N512-K2048-top6-bf16", id="bf16-by-default"),
        pytest.param("E=64, N=512, K=2048, top_k=6, dtype=fp16", "E64-N512-K2048-top6-fp16", id="blanks"),
        pytest.param(
            "E=8,N=256,K=512,top_k=2,dtype=fp8_w8a8,block=64x128", "E8-N256-K512-top2-fp8_w8a8-block64x128", id="block"
        ),
        pytest.param(
            "E=8,N=256,K=5,top_k=2,dtype=fp8_w8a8,per_channel=1", "E8-N256-K5-top2-fp8_w8a8-perchannel", id="channel"
        ),
    ],
)
def test_fields_make_a_shape(text: str, slug: str) -> None:
    made = errand.shape_of_fields(text)
    assert (made.slug, made.w1_shape[1]) == (slug, 2 * made.N)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("E=64", "N must be a whole number", id="missing"),
        pytest.param("E=64,N=-1,K=1,top_k=1", "N must be a whole number", id="negative"),
        pytest.param("E=64,N=5,K=1,top_k=65", "more than the 64 experts", id="top-k"),
        pytest.param("E=64,N=5,K=1,top_k=6,dtype=fp4", "dtype=fp4 is none of", id="dtype"),
        pytest.param("E=64,N=5,K=1,top_k=6,block=128", "like block=128x128", id="block"),
        pytest.param("E=64,N=5,K=1,top_k=6,experts=3", "'experts=3' is no field", id="unknown"),
        pytest.param("E64", "'E64' is no field", id="no-equals"),
    ],
)
def test_fields_that_make_none_are_told_why(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        errand.shape_of_fields(text)
