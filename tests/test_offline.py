"""An errand without a server: everything is tuned once, kept as it is made, and taken up again where it stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import record_values as v
from offline_worker import MS, OTHER, REFUSED, SHAPE, Recordings
from record_values import H200
from synthetic import unbeatable

from sglang_moe_autotune import errand, store
from sglang_moe_autotune.errand import Ended, Errand, Item, Learned, Passed, Ready, Step, Verified
from sglang_moe_autotune.offline import Outing
from sglang_moe_autotune.records import ShapeNote, pin
from sglang_moe_autotune.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sglang_moe_autotune.records import Contents


def go(
    root: Path | None,
    work: errand.Work,
    *items: Item,
    bit_equal: bool = False,
    on: Recordings | None = None,
    until: Callable[[list[Any]], bool] = lambda _told: False,
    budget_s: float | None = None,
    clock: Callable[[], float] | None = None,
) -> list[Any]:
    """Run an errand here; what was told. ``until``: when to stop it."""
    told: list[Any] = []
    order = Errand(work, items, None if root is None else str(root), budget_s, bit_equal=bit_equal)
    extra = {} if clock is None else {"clock": clock}
    Outing(order, (on or Recordings()).machine(), told.append, lambda: until(told), **extra).run()
    return [errand.decode_told(errand.encode(one)) for one in told]


def of(told: list[Any], kind: type) -> list[Any]:
    return [one for one in told if isinstance(one, kind)]


def stored(root: Path) -> Contents:
    return store.read(root / store.file_name(H200))


def test_every_m_gets_a_record_that_is_in_the_store(autotune_folder: Path) -> None:
    told = go(autotune_folder, "tune", Item(SHAPE, MS), Item(OTHER, MS[:1]))
    assert isinstance(told[0], Ready)
    assert isinstance(told[-1], Ended)
    assert (told[-1].why, told[-1].kept) == ("done", True)
    keys = {(SHAPE, m) for m in MS} | {(OTHER, MS[0])}
    assert {(one.record.shape, one.record.M) for one in of(told, Learned)} == keys
    assert set(stored(autotune_folder).records) == keys
    assert told[-1].gpu_s > 0
    assert any(record.verdict == "faster" for record in stored(autotune_folder).records.values())


def test_what_is_settled_is_not_measured_again(autotune_folder: Path) -> None:
    go(autotune_folder, "tune", Item(SHAPE, MS[:2]))
    machine = Recordings()
    told = go(autotune_folder, "tune", Item(SHAPE, MS), on=machine)
    assert [one.M for one in of(told, Passed) if one.settled] == list(MS[:2])
    assert {m for _, m in machine.opened} == {MS[2]}
    assert machine.loaded == [SHAPE]


def test_under_bit_equal_a_row_that_is_not_proven_is_searched_again_once(autotune_folder: Path) -> None:
    rounded = Recordings()
    rounded.error = 0.003
    go(autotune_folder, "tune", Item(SHAPE, MS), on=rounded)
    unproven = {m for (_, m), r in stored(autotune_folder).records.items() if r.verdict == "faster"}
    assert unproven
    exact = Recordings()
    told = go(autotune_folder, "tune", Item(SHAPE, MS), on=exact, bit_equal=True)
    assert {one.M for one in of(told, Passed) if one.settled} == set(MS) - unproven
    assert {m for _, m in exact.opened} == unproven
    records = stored(autotune_folder).records.values()
    assert all(r.verdict == "baseline" or r.evidence.max_error == 0.0 for r in records)
    again = Recordings()
    go(autotune_folder, "tune", Item(SHAPE, MS), on=again, bit_equal=True)
    assert again.opened == []


def test_a_row_that_is_only_a_candidate_is_searched(autotune_folder: Path) -> None:
    (baseline,) = {Recordings().baseline(SHAPE, MS[0])}
    assert baseline is not None
    kept = Store.open(autotune_folder, H200)
    kept.submit(record=v.record(MS[0], SHAPE, baseline=baseline, source="imported"))
    assert kept.close(5)
    told = go(autotune_folder, "tune", Item(SHAPE, MS[:1]))
    assert [one.record.M for one in of(told, Learned)][:1] == [MS[0]]


def test_a_shape_that_is_settled_costs_no_weights(autotune_folder: Path) -> None:
    go(autotune_folder, "tune", Item(SHAPE, MS))
    machine = Recordings()
    go(autotune_folder, "tune", Item(SHAPE, MS), on=machine)
    assert machine.loaded == []


def test_a_stop_keeps_what_was_made_and_the_next_errand_does_the_rest(autotune_folder: Path) -> None:
    first = go(autotune_folder, "tune", Item(SHAPE, MS), until=lambda told: bool(of(told, Learned)))
    assert first[-1].why == "stopped"
    made = {one.record.M for one in of(first, Learned)}
    assert len(made) == 1
    assert {m for _, m in stored(autotune_folder).records} == made
    second = go(autotune_folder, "tune", Item(SHAPE, MS))
    assert {one.record.M for one in of(second, Learned)} >= set(MS) - made
    assert {m for _, m in stored(autotune_folder).records} == set(MS)


class Ticks:
    """A clock that moves by 10 ms at each reading."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.01
        return self.now_s


def test_a_budget_ends_the_work_and_leaves_a_share_for_every_shape(autotune_folder: Path) -> None:
    clock, machine = Ticks(), Recordings()
    told = go(autotune_folder, "tune", Item(SHAPE, MS), Item(OTHER, MS), on=machine, budget_s=5.0, clock=clock)
    assert told[-1].why == "budget"
    assert {shape for shape, _ in machine.opened} == {SHAPE, OTHER}
    assert clock.now_s < 6.0
    assert [one for one in of(told, Passed) if one.reason == "no time was left for it"]


def test_what_cannot_be_done_is_said_and_the_rest_is_done(autotune_folder: Path) -> None:
    told = go(autotune_folder, "tune", Item(REFUSED, MS), Item(SHAPE, (MS[0], 7)))
    reasons = {(one.slug, one.M): one.reason for one in of(told, Passed)}
    assert reasons[SHAPE.slug, 7] == "SGLang's own answer is no pair of plain configs"
    assert {reasons[REFUSED.slug, m] for m in MS} == {"no weights of it can be made up"}
    assert {one.record.M for one in of(told, Learned)} == {MS[0]}


def test_without_a_store_the_records_are_told(autotune_folder: Path) -> None:
    told = go(None, "tune", Item(SHAPE, MS[:1]))
    assert {one.record.M for one in of(told, Learned)} == {MS[0]}
    assert told[-1].kept is False
    assert not autotune_folder.exists()


# Verify


@pytest.fixture
def tuned(autotune_folder: Path) -> Path:
    go(autotune_folder, "tune", Item(SHAPE, MS))
    return autotune_folder


def faster(root: Path) -> set[int]:
    return {m for (_, m), record in stored(root).records.items() if record.verdict == "faster"}


def test_rows_that_hold_are_left_alone(tuned: Path) -> None:
    before = stored(tuned)
    told = go(tuned, "verify", Item(SHAPE, MS))
    assert {one.M for one in of(told, Verified)} == faster(tuned)
    assert {one.outcome for one in of(told, Verified)} == {"holds"}
    assert stored(tuned) == before
    assert told[-1].gpu_s > 0


def slower_now() -> Recordings:
    machine = Recordings()
    machine.landscapes[SHAPE] = unbeatable(machine.landscapes[SHAPE])
    return machine


def disagreeing() -> Recordings:
    machine = Recordings()
    machine.disagrees = True
    return machine


@pytest.mark.parametrize(
    ("machine", "outcome"),
    [pytest.param(slower_now, "slower", id="slower"), pytest.param(disagreeing, "differs", id="another-output")],
)
def test_rows_that_do_not_hold_are_taken_back_for_good(
    tuned: Path, machine: Callable[[], Recordings], outcome: str
) -> None:
    old, rows = stored(tuned), faster(tuned)
    told = go(tuned, "verify", Item(SHAPE, MS), on=machine())
    assert {(one.M, one.outcome) for one in of(told, Verified)} == {(m, outcome) for m in rows}
    after = stored(tuned)
    assert faster(tuned) == set()
    for m in rows:
        record = after.records[SHAPE, m]
        assert (record.pair, record.evidence.gain) == (record.baseline, 0.0)
        assert record.evidence.samples > 0
    # An older copy of the store does not bring them back.
    store.change(tuned / store.file_name(H200), lambda contents: store.merge(contents, old))
    assert faster(tuned) == set()


def test_a_row_whose_binary_is_lost_is_taken_back(tuned: Path) -> None:
    machine = Recordings()
    m = max(faster(tuned))
    pair = stored(tuned).records[SHAPE, m].pair
    machine.landscapes[SHAPE].up_us[m].pop(pair.up, None)
    machine.landscapes[SHAPE].down_us[m].pop(pair.down, None)
    (found,) = of(go(tuned, "verify", Item(SHAPE, (m,)), on=machine), Verified)
    assert (found.outcome, found.reason) == ("lost", "not recorded")
    assert m not in faster(tuned)


def test_rows_that_cannot_be_measured_are_left_alone_and_said(tuned: Path) -> None:
    path = tuned / store.file_name(H200)
    row = min(faster(tuned))
    pinned = stored(tuned).records[SHAPE, row]
    store.change(path, lambda contents: pin(contents, SHAPE, row, pinned.pair))
    before = stored(tuned)
    told = go(tuned, "verify", Item(SHAPE, (row, 7)), Item(OTHER, MS[:1]), on=slower_now())
    assert {one.reason for one in of(told, Passed)} == {
        "pinned by the user",
        "SGLang's own answer is no pair of plain configs",
        "no row for this GPU, Triton and kernel",
    }
    assert of(told, Verified) == []
    assert stored(tuned) == before


def test_a_row_against_an_outdated_baseline_is_not_judged(tuned: Path) -> None:
    row = min(faster(tuned))
    machine = Recordings()
    other = machine.landscapes[SHAPE].candidates[0]
    baseline = machine.landscapes[SHAPE].baselines
    from sglang_moe_autotune.landscape import Baseline  # noqa: PLC0415 - this test alone
    from sglang_moe_autotune.shapes import ConfigPair  # noqa: PLC0415 - as above

    baseline[row] = Baseline(ConfigPair(other, other), 1.0, 1.0)
    (told,) = of(go(tuned, "verify", Item(SHAPE, (row,)), on=machine), Passed)
    assert told.reason == "SGLang's own answer has changed since: tune it again"
    assert row in faster(tuned)


def test_notes_and_steps_do_not_disturb(tuned: Path) -> None:
    held = store.Store.open(tuned, H200)
    held.submit(note=ShapeNote(SHAPE, served={8: 3}))
    held.close(5)
    told = go(tuned, "verify", Item(SHAPE, MS))
    assert {one.phase for one in of(told, Step)} == {"verifying"}
    assert stored(tuned).notes[SHAPE].served == {8: 3}


def test_a_bench_that_raises_costs_its_own_m_alone(autotune_folder: Path) -> None:
    machine = Recordings()
    open_bench = machine.open

    def faulty(shape: Any, m: int, baseline: Any) -> Any:
        if m == MS[0]:
            raise OSError("CUDA said no")
        return open_bench(shape, m, baseline)

    machine.open = faulty  # type: ignore[method-assign]
    told = go(autotune_folder, "tune", Item(SHAPE, MS), on=machine)
    assert {one.record.M for one in of(told, Learned)} == set(MS[1:])
    (passed,) = of(told, Passed)
    assert (passed.slug, passed.M) == (SHAPE.slug, MS[0])
    assert "OSError: CUDA said no" in passed.reason
