"""A learned row answers for its own M only, in SGLang's return shape, as a fresh dict; the rest are misses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_moe_autotune.lookup import CallKey, Lookup, read_answer
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig

KEY = CallKey((256, 512, 3072), (256, 3072, 256), 8, None, None, False)
UP = KernelConfig(32, 64, 128, 1, 4, 3)
DOWN = KernelConfig(32, 128, 64, 16, 8, 2)
PAIR = ConfigPair(UP, DOWN)


def learned(*sizes: int) -> Lookup:
    lookup = Lookup()
    lookup.publish((KEY, m, PAIR) for m in sizes)
    return lookup


@given(st.integers(1, 100_000))
def test_c08_no_m_but_its_own_is_answered(m: int) -> None:
    answer = learned(128).answer(KEY, m, True)
    assert (answer is not None) == (m == 128)


def test_the_answer_has_both_return_shapes_of_sglang() -> None:
    lookup = learned(64)
    assert lookup.answer(KEY, 64, False) == UP.to_dict()
    assert lookup.answer(KEY, 64, True) == (UP.to_dict(), (DOWN.to_dict(), 32))


def test_what_a_caller_does_to_an_answer_reaches_nobody_else() -> None:
    lookup = learned(64)
    up, (down, _) = lookup.answer(KEY, 64, True)  # type: ignore[misc]
    up.clear()
    down["USE_TMA"] = True
    assert lookup.answer(KEY, 64, True) == (UP.to_dict(), (DOWN.to_dict(), 32))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(KEY._replace(top_k=9), id="c14-top-k"),
        pytest.param(KEY._replace(w1_shape=(257, 512, 3072), w2_shape=(257, 3072, 256)), id="c14-fused-expert"),
        pytest.param(KEY._replace(dtype="fp8_w8a8"), id="dtype"),
        pytest.param(KEY._replace(block_shape=(128, 128)), id="block"),
        pytest.param(KEY._replace(w1_shape=(256, 512, 4096), w2_shape=(256, 4096, 256)), id="hidden-size"),
    ],
)
def test_another_layer_is_a_miss(other: CallKey) -> None:
    assert learned(64).answer(other, 64, True) is None


def test_a_miss_is_counted_and_its_first_answer_kept() -> None:
    lookup = Lookup()
    first = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    for _ in range(3):
        lookup.miss(KEY, 7, (first, (None, None)))
    assert lookup.missed == {(KEY, 7): 3}
    (seen,) = lookup.take_seen(99)
    assert (seen.M, seen.baseline) == (7, ConfigPair(KernelConfig(16, 32, 64, 1), KernelConfig(16, 32, 64, 1)))
    assert lookup.take_seen(99) == []


def test_a_reader_keeps_the_table_it_has_while_another_is_published() -> None:
    lookup = learned(64)
    before = lookup.rows()
    lookup.publish([(KEY, 128, PAIR), (KEY, 64, None)])
    assert set(before[KEY]) == {64}
    assert set(lookup.rows()[KEY]) == {128}
    assert lookup.epoch == 2


HEURISTIC = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 8}


@pytest.mark.parametrize(
    ("answer", "readable"),
    [
        pytest.param(HEURISTIC, True, id="up-only"),
        pytest.param((HEURISTIC, (None, None)), True, id="no-down"),
        pytest.param((HEURISTIC, (dict(HEURISTIC), 64)), True, id="with-down"),
        pytest.param((HEURISTIC, ({**HEURISTIC, "USE_TMA": True}, 64)), False, id="down-tma"),
        pytest.param({**HEURISTIC, "USE_TMA": False}, False, id="up-tma"),
        pytest.param(None, False, id="none"),
        pytest.param((HEURISTIC, None, None), False, id="moved-shape"),
        pytest.param(({"BLOCK_SIZE_M": 64}, (None, None)), False, id="keys-missing"),
        pytest.param(({**HEURISTIC, "num_warps": "4"}, (None, None)), False, id="not-a-number"),
    ],
)
def test_only_a_plain_pair_is_a_baseline(answer: object, readable: bool) -> None:
    assert (read_answer(answer) is not None) == readable


def test_c35_one_weight_passed_twice_stands_for_no_layer() -> None:
    assert KEY._replace(w2_shape=KEY.w1_shape).synthetic
    assert not KEY.synthetic
