"""Batches count for the captured size that served them, or for their own M where none did."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_moe_autotune.beat import Beat
from sglang_moe_autotune.heat import Heat

CAPTURED = {"decode": (1, 2, 4, 8, 16), "prefill": (4, 64, 512)}


@pytest.mark.parametrize(
    ("kind", "tokens", "served"),
    [
        pytest.param("decode", 1, 1, id="exact"),
        pytest.param("decode", 5, 8, id="padded-up"),
        pytest.param("decode", 17, 17, id="larger-than-any-graph"),
        pytest.param("prefill", 65, 512, id="prefill-has-its-own-sizes"),
        pytest.param("prefill", 3, 4, id="below-the-smallest"),
    ],
)
def test_a_batch_counts_for_what_served_it(kind: str, tokens: int, served: int) -> None:
    heat = Heat(Beat())
    heat.batch((kind, tokens))  # type: ignore[arg-type]
    assert heat.take(CAPTURED) == {served: 1}  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 1000), max_size=50))
def test_no_batch_is_lost_or_counted_twice(batches: list[int]) -> None:
    heat = Heat(Beat())
    for tokens in batches:
        heat.batch(("decode", tokens))
    assert sum(heat.take({}).values()) == len(batches)
    assert heat.take({}) == {}
