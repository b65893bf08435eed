"""Merging is a join: nothing is lost, and order, grouping and repetition do not matter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import record_strategies as s
import record_values as v
from hypothesis import given

from sglang_moe_autotune.document import encode
from sglang_moe_autotune.records import (
    Contents,
    Evidence,
    Record,
    beyond,
    demote,
    forget,
    generation,
    merge,
    pin,
    succeeding,
    with_changes,
)
from sglang_moe_autotune.validity import problem

if TYPE_CHECKING:
    from sglang_moe_autotune.shapes import ConfigPair


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
    for key in a.records.keys() | b.records.keys():
        assert key in both.records or generation(both, key) > max(
            x.records[key].generation for x in (a, b) if key in x.records
        )
    assert both.notes.keys() == a.notes.keys() | b.notes.keys()
    assert {u.raw for u in both.unread} == {u.raw for u in (*a.unread, *b.unread)}
    for shape, note in a.notes.items():
        assert note.baselines.keys() <= both.notes[shape].baselines.keys()
        assert all(both.notes[shape].served[m] >= count for m, count in note.served.items())


def _evidence(samples: int, gain_low: float) -> dict[str, object]:
    return {"evidence": msgspec.structs.replace(v.record().evidence, samples=samples, gain_low=gain_low)}


def _tie(**changes: Any) -> Record:
    return v.record(verdict="baseline", pair=v.heuristic(64), **changes)


@pytest.mark.parametrize(
    ("winner", "loser"),
    [
        pytest.param(v.record(samples=1, source="pinned"), v.record(samples=999), id="pinned beats more samples"),
        pytest.param(v.record(generation=1), v.record(samples=999, source="pinned"), id="a later decision"),
        pytest.param(v.record(samples=1), v.record(samples=999, source="imported"), id="learned beats imported"),
        pytest.param(v.record(samples=1), v.record(samples=999, source="replayed"), id="learned beats replayed"),
        pytest.param(
            v.record(samples=1, source="imported"), v.record(samples=999, source="replayed"), id="replayed is the last"
        ),
        pytest.param(v.record(**_evidence(48, 0.18)), v.record(**_evidence(72, 0.01)), id="larger gain_low"),
        pytest.param(v.record(**_evidence(41, 0.09)), v.record(**_evidence(40, 0.09)), id="then more samples"),
        pytest.param(v.record(samples=48), _tie(samples=400), id="a faster row beats a tie that took more samples"),
        pytest.param(_tie(samples=41), _tie(samples=40), id="of two ties more samples"),
        pytest.param(_tie(revision=1, samples=1), v.record(samples=999, revision=0), id="a later revision"),
        pytest.param(v.record(source="pinned"), v.record(revision=9), id="pinned beats any revision"),
        pytest.param(v.record(generation=1), v.record(revision=9), id="a later decision beats any revision"),
    ],
)
def test_one_of_two_records_for_a_shape_and_m(winner: Record, loser: Record) -> None:
    key = (winner.shape, winner.M)
    for first, second in ((winner, loser), (loser, winner)):
        assert merge(v.contents(first), v.contents(second)).records == {key: winner}


@s.QUICK
@given(s.records, s.records, s.documents())
def test_what_was_measured_again_replaces_what_it_knew_in_every_copy(
    earlier: Record, made: Record, other: Contents
) -> None:
    key = (earlier.shape, earlier.M)
    earlier = msgspec.structs.replace(earlier, source="learned")
    made = msgspec.structs.replace(made, shape=key[0], M=key[1], source="learned", generation=earlier.generation)
    after = succeeding(made, earlier)
    assert merge(v.contents(earlier), v.contents(after)).records[key] == after
    assert succeeding(made, None) == made
    both = merge(v.contents(earlier), other)
    assert merge(both, v.contents(after)).records.get(key) != earlier


def test_what_only_confirms_keeps_its_revision_so_that_a_better_row_of_another_host_still_wins() -> None:
    first, again = v.record(**_evidence(48, 0.05)), v.record(**_evidence(60, 0.05))
    assert succeeding(again, first) == again
    better = v.record(pair=v.pair(16), **_evidence(48, 0.2))
    assert merge(v.contents(succeeding(again, first)), v.contents(better)).records == {KEY: better}
    moved = v.record(baseline=v.pair(16), **_evidence(99, 0.3))
    assert succeeding(moved, first).revision == 1, "measured against another answer of SGLang's"
    assert succeeding(_tie(samples=999), first).revision == 1
    assert succeeding(again, v.record(source="imported", revision=3)) == again


KEY = (v.shape(), 64)
WORSE = msgspec.structs.replace(v.record().evidence, gain=-0.1, gain_low=-0.12, gain_high=-0.08, samples=1)


@s.QUICK
@given(s.documents(), s.documents(), s.records)
def test_what_was_forgotten_stays_so_whatever_older_copy_is_merged(a: Contents, b: Contents, record: Record) -> None:
    key = (record.shape, record.M)
    known = merge(merge(a, b), Contents(v.H200, {key: record}))
    after = forget(known, *key)
    assert key not in after.records
    for copy in (a, b, known, merge(a, known)):
        assert merge(after, copy) == after
        assert merge(copy, after) == after
    again = with_changes(after, record)
    assert again.records[key].pair == record.pair, "a search after that counts"


@s.QUICK
@given(s.documents(), s.records, s.pairs)
def test_a_pin_wins_over_every_older_copy_and_over_what_is_learned_later(
    known: Contents, record: Record, pair: ConfigPair
) -> None:
    key = (record.shape, record.M)
    after = pin(known, *key, pair)
    assert (after.records[key].pair, after.records[key].source) == (pair, "pinned")
    assert merge(known, after).records[key] == after.records[key]
    learned = msgspec.structs.replace(record, source="learned", generation=0)
    assert with_changes(after, learned).records[key] == after.records[key]
    other = v.pair(128)
    assert pin(after, *key, other).records[key].pair == other, "a second pin replaces the first"


@s.QUICK
@given(s.documents(), s.records, s.evidence)
def test_what_was_demoted_is_not_served_whatever_older_copy_is_merged(
    known: Contents, record: Record, evidence: Evidence
) -> None:
    key = (record.shape, record.M)
    known = with_changes(known, msgspec.structs.replace(record, source="learned", generation=3))
    held = known.records[key]
    after = demote(known, held, evidence)
    demoted = after.records[key]
    assert (demoted.verdict, demoted.pair, demoted.evidence) == ("baseline", held.baseline, evidence)
    assert merge(known, after) == after
    assert demote(after, held, evidence) == after or held.pair == held.baseline


def test_a_record_that_is_another_by_now_or_pinned_is_not_demoted() -> None:
    for held in (v.record(pair=v.pair(16)), v.record(source="pinned")):
        contents = v.contents(held)
        assert demote(contents, v.record(), WORSE) is contents
    assert demote(v.contents(), v.record(), WORSE) == v.contents()


def test_of_two_hosts_that_decide_at_once_the_pin_stands_and_a_later_word_settles_it() -> None:
    before = v.contents(v.record())
    both = merge(forget(before, *KEY), pin(before, *KEY, v.pair(16)))
    assert both.records[KEY].source == "pinned"
    assert merge(pin(before, *KEY, v.pair(16)), demote(before, v.record(), WORSE)).records[KEY].source == "pinned"
    assert KEY not in merge(forget(both, *KEY), pin(before, *KEY, v.pair(16))).records


def test_a_pin_knows_its_baseline_where_anybody_does_and_makes_sense_without() -> None:
    known = pin(v.contents(v.record()), *KEY, v.pair(16)).records[KEY]
    noted = pin(v.contents(v.note(None, 64)), *KEY, v.pair(16)).records[KEY]
    blank = pin(v.contents(), *KEY, v.pair(16)).records[KEY]
    same = pin(v.contents(v.record()), *KEY, v.record().pair).records[KEY]
    assert known.baseline == noted.baseline == v.heuristic(64)
    assert blank.baseline == v.pair(16)
    assert same.evidence == v.record().evidence
    assert known.evidence.samples == 0
    assert [problem(r) for r in (known, noted, blank, same)] == [None] * 4


@s.QUICK
@given(s.documents(), s.documents())
def test_what_is_beyond_brings_the_old_up_to_the_new(a: Contents, b: Contents) -> None:
    both = merge(a, b)
    news = beyond(both, a)
    assert both == (a if news is None else merge(a, news))
    assert beyond(both, both) is None


def test_a_field_of_a_newer_version_that_is_added_to_a_note_is_news() -> None:
    shape, note = v.shape(), v.note(None, 1)
    old = msgspec.structs.replace(v.contents(note), note_text={shape: {"later": b"1"}})
    new = msgspec.structs.replace(v.contents(note), note_text={shape: {"later": b"1", "newer": b"1"}})
    news = beyond(merge(old, new), old)
    assert news is not None
    assert merge(old, news) == merge(old, new)


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
