"""What the shell counts is what the store holds, and a shape is found by any name that can only mean it."""

from __future__ import annotations

import math
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_store import FP8, HEURISTIC, MANY, NOTES, RECORDS, record

from sglang_moe_autotune import summary
from sglang_moe_autotune.errors import ShapeNotFoundError
from sglang_moe_autotune.records import ShapeNote

KEYED = {(r.shape, r.M): r for r in RECORDS}
NOTED = {n.shape: n for n in NOTES}


def test_each_m_is_counted_once_by_its_outcome() -> None:
    many, fp8 = summary.summarise(KEYED, NOTED)
    assert (many.shape, many.faster, many.baseline, many.untuned) == (MANY, (256, 1024), (16,), (64,))
    assert (fp8.shape, fp8.faster, fp8.baseline, fp8.untuned, fp8.origin) == (FP8, (128,), (), (), "fallback")


def test_gains_are_those_of_the_faster_rows() -> None:
    many, _ = summary.summarise(KEYED, NOTED)
    assert many.best_gain == pytest.approx(1 - 364.1 / 539.0)
    assert many.mean_gain == pytest.approx(1 - math.sqrt(308.9 / 445.0 * 364.1 / 539.0))


def test_a_shape_without_a_faster_row_has_no_gain() -> None:
    (only,) = summary.summarise({(MANY, 16): record(MANY, 16, 9.0, 9.0)}, {})
    assert (only.best_gain, only.mean_gain, only.baseline) == (None, None, (16,))


def test_nothing_is_no_summary() -> None:
    assert summary.summarise({}, {}) == ()


def test_rows_join_records_and_notes() -> None:
    note = ShapeNote(MANY, {8: HEURISTIC, 16: HEURISTIC}, {4: 9, 16: 2})
    rows = summary.rows(MANY, {(MANY, 16): record(MANY, 16, 9.0, 8.0), (FP8, 2): RECORDS[3]}, note)
    assert [(r.M, r.served, r.record is not None, r.baseline is not None) for r in rows] == [
        (4, 9, False, False),
        (8, 0, False, True),
        (16, 2, True, True),
    ]


@given(st.lists(st.floats(-10, 0.999), min_size=1, max_size=9))
def test_the_mean_gain_is_between_the_least_and_the_largest(gains: list[float]) -> None:
    mean = summary.mean_gain(gains)
    assert mean is not None
    assert min(gains) - 1e-9 <= mean <= max(gains) + 1e-9


def test_a_gain_of_one_does_not_break_the_mean() -> None:
    assert summary.mean_gain([1.0, 0.5]) == pytest.approx(0.5)
    assert summary.mean_gain([1.0]) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        pytest.param(MANY.slug, MANY, id="whole"),
        pytest.param("E128", MANY, id="beginning"),
        pytest.param("e256-n256", FP8, id="small letters"),
        pytest.param(FP8.slug, FP8, id="whole and longest"),
    ],
)
def test_a_name_finds_its_shape(name: str, expected: object) -> None:
    assert summary.find(name, [FP8, MANY]) == (expected,)


def test_a_whole_name_wins_over_longer_ones_that_begin_so() -> None:
    longer = msgspec.structs.replace(MANY, per_channel_quant=True)
    assert longer.slug.startswith(MANY.slug)
    assert summary.find(MANY.slug, [longer, MANY]) == (MANY,)


def test_shapes_that_share_a_name_are_all_found() -> None:
    twin = msgspec.structs.replace(FP8, activation_dtype="float16")
    assert twin.slug == FP8.slug
    assert set(summary.find("E256", [twin, MANY, FP8])) == {twin, FP8}


@pytest.mark.parametrize(
    ("name", "says"),
    [
        pytest.param("E", "begins 2 stored names.*E128.*E256", id="two begin so"),
        pytest.param("", "begins 2 stored names", id="empty"),
        pytest.param("E129-N768-K2048-top8-bf16", f"nearest are {MANY.slug}", id="a digit off"),
        pytest.param("?", "nearest are", id="nothing alike"),
    ],
)
def test_a_name_that_finds_nothing_says_what_is_near(name: str, says: str) -> None:
    with pytest.raises(ShapeNotFoundError, match=says):
        summary.find(name, [MANY, FP8])


def test_an_empty_store_is_said_to_be_empty() -> None:
    with pytest.raises(ShapeNotFoundError, match=re.escape("no shape is stored")):
        summary.find("E8", [])
