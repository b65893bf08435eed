"""A graph is stale exactly while it holds another answer than the served one, for its own M and every call in it."""

from __future__ import annotations

from sglang_moe_autotune.captures import UNKNOWN, Captures, Size
from sglang_moe_autotune.lookup import CallKey
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig

KEY = CallKey((8, 512, 512), (8, 512, 256), 2, None, None, False)
OTHER = KEY._replace(top_k=4)
ONE, TWO = (ConfigPair(c, c) for c in (KernelConfig(16, 64, 64, 1, 4, 3), KernelConfig(32, 64, 64, 1, 4, 3)))
DECODE, PREFILL, LARGE = Size("decode", 8, 8), Size("prefill", 8, 8), Size("decode", 16, 16)


def captures() -> Captures:
    first = {(KEY, 8): None, (KEY, 16): None, (OTHER, 16): None}
    return Captures([DECODE, PREFILL, LARGE], first)


def test_nothing_is_stale_at_first() -> None:
    assert captures().stale({}) == {}
    assert captures().stale({KEY: {9: ONE}}) == {}, "a row of another M"
    assert len(captures()) == 3


def test_a_learned_row_makes_the_graphs_of_its_m_stale_of_both_kinds() -> None:
    found = captures().stale({KEY: {8: ONE}})
    assert set(found) == {DECODE, PREFILL}
    assert found[DECODE].served == {KEY: ONE}
    assert not found[DECODE].taken_back


def test_a_new_capture_is_noted_for_its_own_graph_only() -> None:
    held = captures()
    rows = {KEY: {8: ONE}}
    assert held.captured(DECODE, {(KEY, 8): ONE})
    assert set(held.stale(rows)) == {PREFILL}
    assert held.stale({KEY: {8: TWO}})[DECODE].taken_back is False, "a better row is no retreat"
    gone = held.stale({})
    assert set(gone) == {DECODE}, "the prefill graph never held the row"
    assert gone[DECODE].taken_back


def test_a_capture_that_asked_for_less_than_the_first_is_not_noted() -> None:
    held = captures()
    assert not held.captured(LARGE, {(KEY, 16): ONE, (KEY, 8): ONE, (OTHER, 8): ONE})
    assert set(held.stale({KEY: {16: ONE}})) == {LARGE}
    assert held.captured(LARGE, {(KEY, 16): ONE, (OTHER, 16): None})
    assert held.stale({KEY: {16: ONE}}) == {}


def test_two_calls_of_one_graph_are_captured_together() -> None:
    rows = {KEY: {16: ONE}, OTHER: {16: TWO}}
    assert captures().stale(rows)[LARGE].served == {KEY: ONE, OTHER: TWO}


def test_a_graph_that_is_gone_is_never_stale() -> None:
    held = captures()
    held.drop(LARGE)
    held.drop(LARGE)
    assert held.stale({KEY: {16: ONE}}) == {}


def test_what_sglang_captured_anew_is_unknown_where_a_row_was_ever_served() -> None:
    held = captures()
    held.stale({KEY: {16: ONE}})
    held.forget([DECODE, LARGE])
    found = held.stale({})
    assert set(found) == {LARGE}
    assert found[LARGE].taken_back, "it may hold the row"
    assert UNKNOWN != ONE
