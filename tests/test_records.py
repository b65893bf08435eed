"""Merging is a join: nothing is lost, and order, grouping and repetition do not matter."""

from __future__ import annotations

import msgspec
import pytest
import record_strategies as s
import record_values as v
from hypothesis import given

from sglang_moe_autotune.document import encode
from sglang_moe_autotune.records import Contents, Record, merge, with_changes


@s.QUICK
@given(s.documents(), s.documents())
def test_merge_is_commutative(a: Contents, b: Contents) -> None:
    assert merge(a, b) == merge(b, a)
    assert encode(merge(a, b)) == encode(merge(b, a))


@s.QUICK
@given(s.documents(), s.documents(), s.documents())
def test_merge_is_associative(a: Contents, b: Contents, c: Contents) -> None:
    assert merge(merge(a, b), c) == merge(a, merge(b, c))


@s.QUICK
@given(s.documents(), s.documents())
def test_merge_is_idempotent_and_loses_no_key(a: Contents, b: Contents) -> None:
    both = merge(a, b)
    assert merge(both, a) == merge(both, both) == both
    assert both.records.keys() == a.records.keys() | b.records.keys()
    assert both.notes.keys() == a.notes.keys() | b.notes.keys()
    assert {u.raw for u in both.unread} == {u.raw for u in (*a.unread, *b.unread)}
    for shape, note in a.notes.items():
        assert note.baselines.keys() <= both.notes[shape].baselines.keys()
        assert all(both.notes[shape].served[m] >= count for m, count in note.served.items())


def _evidence(samples: int, gain_low: float) -> dict[str, object]:
    return {"evidence": msgspec.structs.replace(v.record().evidence, samples=samples, gain_low=gain_low)}


@pytest.mark.parametrize(
    ("winner", "loser"),
    [
        pytest.param(v.record(samples=1, source="pinned"), v.record(samples=999), id="pinned beats more samples"),
        pytest.param(v.record(**_evidence(41, 0.01)), v.record(**_evidence(40, 0.09)), id="more samples"),
        pytest.param(v.record(**_evidence(40, 0.09)), v.record(**_evidence(40, 0.01)), id="larger gain_low"),
        pytest.param(
            v.record(samples=41, verdict="baseline", pair=v.heuristic(64)),
            v.record(samples=40),
            id="taken back",
        ),
    ],
)
def test_one_of_two_records_for_a_shape_and_m(winner: Record, loser: Record) -> None:
    key = (winner.shape, winner.M)
    for first, second in ((winner, loser), (loser, winner)):
        assert merge(v.contents(first), v.contents(second)).records == {key: winner}


def test_a_change_leaves_the_contents_it_started_from_alone() -> None:
    before = v.contents(v.record(1), v.note(None, 1))
    text = encode(before)
    after = with_changes(with_changes(before, v.record(2)), note=v.note(None, 2, served={2: 5}))
    assert encode(before) == text
    assert {m for _, m in after.records} == {1, 2}
    assert after.notes[v.shape()].baselines.keys() == {1, 2}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"device_name": "NVIDIA H200 NVL"}, id="C12 a longer name"),
        pytest.param({"device_name": "NVIDIA H20-3e"}, id="C12 a near name"),
        pytest.param({"capability": (11, 0)}, id="C13 one name, another chip"),
        pytest.param({"triton": "3.8.1"}, id="C31 another Triton"),
        pytest.param({"triton": "3.8.0+git1"}, id="local part of the Triton version"),
        pytest.param({"shared_memory_bytes": 101376}, id="less shared memory"),
        pytest.param({"kernel_hash": "k2"}, id="another kernel source"),
    ],
)
def test_two_environments_never_merge(change: dict[str, object]) -> None:
    other = msgspec.structs.replace(v.H200, **change)
    with pytest.raises(ValueError, match="one file for each"):
        merge(v.contents(v.record()), v.contents(v.record(), environment=other))
