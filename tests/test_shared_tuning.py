"""Ranks that share the work: n ranks tune a shape in about 1/n of the time, to rows that are as good, and agree."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

pytest.importorskip("torch")
from record_values import H200
from shared_tuning import MS, key_of, recorded, server, tune

from sglang_moe_autotune import records
from sglang_moe_autotune.bench import COMPARE_CASES, Share
from sglang_moe_autotune.council import Place
from sglang_moe_autotune.ranks import POLL_S, Ranks
from sglang_moe_autotune.records import Evidence, Record
from sglang_moe_autotune.replay import ReplayBench
from sglang_moe_autotune.shapes import ConfigPair
from sglang_moe_autotune.store import Store

if TYPE_CHECKING:
    from pathlib import Path

    from shared_tuning import SharedRank

    from sglang_moe_autotune.landscape import Landscape

RECORDED = recorded()


def regret(rank: SharedRank, landscape: Landscape) -> float:
    """How much longer than the best pair the served ones take, on average over the M."""
    logs = []
    for M in MS:  # noqa: N806
        served = rank.rows.get(M, landscape.baselines[M].pair)
        logs.append(math.log(landscape.pair_us(M, served) / landscape.best(M)[1]))
    return math.exp(sum(logs) / len(logs))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float]:
    """Time and regret of one rank."""
    with pytest.MonkeyPatch.context() as patch:
        (rank,) = server(patch, tmp_path_factory.mktemp("alone"), 1, RECORDED)
        rank.add(MS)
        return tune([rank]), regret(rank, RECORDED)


@pytest.mark.parametrize(("ranks", "times"), [(2, 1.6), (4, 2.3)])
def test_ranks_share_the_work_and_end_with_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: tuple[float, float], ranks: int, times: float
) -> None:
    group = server(monkeypatch, tmp_path, ranks, RECORDED)
    for rank in group:
        rank.add(MS)
    taken_s = tune(group)
    assert alone[0] / taken_s > times
    assert regret(group[0], RECORDED) < alone[1] + 0.025  # by the noise of searches, either way
    assert all(rank.rows == group[0].rows for rank in group)
    assert {rank.peers.epoch for rank in group} == {group[0].peers.ranks.table.epoch}
    assert not any(rank.peers.ranks.waits for rank in group)
    share = COMPARE_CASES * Share(0, ranks).runs
    assert {row.evidence.runs for row in group[0].peers.ranks.table.rows if row.verdict == "faster"} == {ranks * share}
    for rank in group:
        assert set(rank.rows.items()) <= {(M, pair) for _, M, pair in rank.adopted}  # what graphs may hold
        for M, served in rank.rows.items():  # noqa: N806 - never slower, whoever found it
            assert RECORDED.pair_us(M, served) < RECORDED.pair_us(M, RECORDED.baselines[M].pair)


def test_what_computes_something_else_on_one_rank_alone_is_served_on_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank that proposes it made its own share of the runs only, and saw nothing."""
    group = server(monkeypatch, tmp_path, 2, RECORDED)
    compare, refused = ReplayBench.compare, set()

    def differs(bench: Any, pair: ConfigPair, case: int) -> Any:
        found = compare(bench, pair, case)
        if bench._provider is group[1].provider and pair.up.BLOCK_SIZE_N >= 128 and case == 3:
            refused.add(pair)
            return found._replace(ok=False, error=1.0)
        return found

    monkeypatch.setattr(ReplayBench, "compare", differs)
    for rank in group:
        rank.add(MS[::3])
    tune(group)
    assert refused
    assert group[0].rows == group[1].rows != {}
    assert all(pair.up.BLOCK_SIZE_N < 128 for pair in group[0].rows.values())
    assert not refused & {row.pair for row in group[0].store.contents.records.values() if row.source == "learned"}


def test_two_servers_that_share_a_folder_do_not_repeat_each_others_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = server(monkeypatch, tmp_path, 1, RECORDED)
    second = server(monkeypatch, tmp_path, 1, RECORDED)
    for rank in first + second:
        rank.add(MS)
    tune(first + second)
    searched = [{key for key, e in rank.agenda.entries.items() if e.looks} for rank in first + second]
    assert not searched[0] & searched[1]
    assert len(searched[0] | searched[1]) == len(MS)
    # Each has taken in the other's rows, after it had measured them itself.
    assert first[0].rows.keys() == second[0].rows.keys()
    assert all(rank.peers.checks.gpu_s > 0 for rank in first + second)


def test_a_rank_that_is_not_there_keeps_new_rows_from_being_served_and_costs_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = server(monkeypatch, tmp_path, 2, RECORDED)
    group[0].add(MS)
    for _ in range(40_000):
        group[0].step()
    assert group[0].rows == {}
    assert sum(bool(e.looks) for e in group[0].agenda.entries.values()) <= 10  # it does not go on for nothing
    assert "rank 1 of 2 is not seen" in group[0].peers.ranks.waits[0]
    candidates = [r for r in group[0].store.contents.records.values() if r.verdict == "faster"]
    assert candidates
    assert {r.source for r in candidates} == {"imported"}  # raced first at the next start, served nowhere
    group[1].add(MS)  # it comes late: all is decided then
    tune(group)
    assert group[0].rows == group[1].rows != {}


def test_a_rank_that_is_switched_off_gives_its_leases_back_says_why_and_still_serves_what_is_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = server(monkeypatch, tmp_path, 2, RECORDED)
    for rank in group:
        rank.add(MS)
    while not all(rank.peers.ranks._leases.held for rank in group):
        behind = min(group, key=lambda rank: rank.provider.now_s)
        behind.step()
    off, on = group[1], group[0]
    off.tuner.abandon()
    off.peers.abandon()
    for _ in range(400):  # its thread goes on, and so does the other rank
        off.peers.stand_aside("switched to 'rows' by a request")
        off.provider.wait(0.05)
        off.peers.ranks.turn()
        while on.provider.now_s < off.provider.now_s:
            on.step()
    assert off.peers.ranks._leases.held == set()
    (told,) = on.peers.ranks.waits
    assert told == "rank 1 measures nothing now (switched to 'rows' by a request); until it does nothing new is served"
    assert off.rows == on.rows
    assert on.peers.ranks.table.epoch < len(MS)
    tune(group)
    assert off.rows == on.rows != {}
    assert not any(rank.peers.ranks.waits for rank in group)
    assert {M for _, M in on.store.contents.records} == set(MS)


def test_a_further_look_that_finds_nothing_better_is_kept_and_proposed_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = server(monkeypatch, tmp_path, 2, RECORDED)
    for rank in group:
        rank.add(MS[:6])
    tune(group)
    row = next(row for row in group[1].peers.ranks.table.rows if row.verdict == "faster")
    stored = group[1].store.contents.records[row.shape, row.M].evidence  # the one with more samples stays
    evidence = msgspec.structs.replace(row.evidence, samples=stored.samples + 24, looks=9)
    group[1].learned(msgspec.structs.replace(row, evidence=evidence))
    assert not group[1].peers.ranks._in
    assert group[1].store.contents.records[row.shape, row.M].evidence.looks == 9


@pytest.mark.parametrize("pinned", [False, True])
def test_a_row_of_the_store_that_a_rank_refuses_is_not_served_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: bool
) -> None:
    """As ``verify`` leaves it; what a person pinned meanwhile stays."""
    M, evidence = MS[12], Evidence(100.0, 90.0, 0.1, 0.09, 0.11, 24, 30, 0.1, looks=3, runs=270)  # noqa: N806
    baseline, found = RECORDED.baselines[M].pair, RECORDED.best(M)[0]
    before = Store.open(tmp_path, H200)
    before.submit(record=Record(RECORDED.shape, M, "faster", found, baseline, evidence))
    assert before.close()
    compare = ReplayBench.compare
    group = server(monkeypatch, tmp_path, 2, RECORDED)

    def differs(bench: Any, pair: ConfigPair, case: int) -> Any:
        if pinned and bench._M == M:
            word = records.pin(before.contents, RECORDED.shape, M, found).records[RECORDED.shape, M]
            group[0].store.submit(record=word)
        here = bench._provider is group[1].provider and bench._M == M
        return compare(bench, pair, case)._replace(ok=not here, error=1.0)

    monkeypatch.setattr(ReplayBench, "compare", differs)
    for rank in group:
        rank.add((M,))
    tune(group)
    assert M not in group[0].rows
    assert group[0].store.flush(10)
    (row,) = Store.open(tmp_path, H200).contents.records.values()
    assert (row.verdict, row.source) == (("faster", "pinned") if pinned else ("baseline", "learned"))
    assert row.generation == 1


@pytest.mark.parametrize("finder", [0, 1])
@pytest.mark.parametrize("started", [True, False], ids=["served since the start", "decided in service"])
def test_what_a_further_look_of_one_rank_finds_slower_than_sglangs_own_is_served_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finder: int, started: bool
) -> None:
    M, evidence = MS[12], Evidence(100.0, 90.0, 0.1, 0.09, 0.11, 24, 30, 0.1, looks=9, runs=270)  # noqa: N806
    row = Record(RECORDED.shape, M, "faster", RECORDED.best(M)[0], RECORDED.baselines[M].pair, evidence)
    if started:
        before = Store.open(tmp_path, H200)
        before.submit(record=row)
        assert before.close()
    group = server(monkeypatch, tmp_path, 2, RECORDED)
    if started:
        for rank in group:
            rank.lookup.publish([(key_of(row), M, row.pair)])
    else:
        group[0].learned(row)
        tune(group)
    assert [rank.rows for rank in group] == [{M: row.pair}] * 2
    changes = {"verdict": "baseline", "pair": row.baseline, "evidence": evidence.without_gain()}
    group[finder].learned(records.succeeding(msgspec.structs.replace(row, **changes), row))
    tune(group)
    assert [rank.rows for rank in group] == [{}] * 2
    assert not group[finder].peers.ranks._open
    assert all(rank.store.flush(10) for rank in group)
    (stored,) = Store.open(tmp_path, H200).contents.records.values()
    assert stored.verdict == "baseline"


@pytest.mark.parametrize("better", ["ours", "theirs"])
def test_another_servers_row_must_be_faster_than_the_one_that_is_served_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, better: str
) -> None:
    M = MS[12]  # noqa: N806
    evidence = Evidence(100.0, 50.0, 0.5, 0.49, 0.51, 24, 30, 0.1, looks=9, runs=270)
    best, baseline = RECORDED.best(M)[0], RECORDED.baselines[M].pair
    pairs = [ConfigPair(c, c) for c in RECORDED.up_us[M] if c in RECORDED.down_us[M]]
    own_us, best_us = (RECORDED.pair_us(M, pair) for pair in (baseline, best))
    fair = min(pairs, key=lambda pair: abs(RECORDED.pair_us(M, pair) - (own_us + best_us) / 2))
    assert best_us < 0.97 * RECORDED.pair_us(M, fair) < 0.94 * own_us
    ours, theirs = (best, fair) if better == "ours" else (fair, best)
    (rank,) = server(monkeypatch, tmp_path, 1, RECORDED)
    row = Record(RECORDED.shape, M, "faster", theirs, baseline, evidence)
    rank.lookup.publish([(key_of(row), M, ours)])
    other = Store.open(tmp_path, H200)
    other.submit(record=row)
    assert other.close()
    rank.store.refresh(10)
    tune([rank])
    assert rank.rows == {M: best}
    assert ((row.shape, M) in rank.agenda.stored) == (better == "theirs"), "a further look starts from what is served"
    assert rank.peers.ranks.asked == ()
    assert rank.peers.checks.gpu_s > 0


class Ready:
    """Graphs that could be captured at any time, and what was."""

    def __init__(self) -> None:
        self.captured: list[tuple[int, ...]] = []

    def ready(self) -> bool:
        return True

    def capture(self, sizes: tuple[int, ...]) -> None:
        self.captured.append(sizes)

    def release(self) -> None:
        """Nothing is held."""


class AbortReq:
    """Named as SGLang's: what carries a message to all ranks."""

    def __init__(self, rid: str) -> None:
        self.rid = rid


def test_a_ballot_that_a_request_cancels_is_put_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = server(monkeypatch, tmp_path, 2, RECORDED)
    for rank in group:
        rank.peers.graphs = Ready()
        rank.add(MS[:4])
    tune(group)
    first = group[0].votes.ballot
    assert first is not None
    for rank in group:  # weights move
        rank.votes.cancel(rank.peers.graphs)
    tune(group)
    second = group[0].votes.ballot
    assert second is not None
    assert second.number == first.number + 1
    assert set(first.sizes) <= set(second.sizes)
    message = group[0].votes.announcement(group[0].peers.ranks.votes)
    assert message is not None
    for rank in group:
        rank.peers.requests([AbortReq(message)])
    assert [rank.peers.graphs.captured for rank in group] == [[second.sizes]] * 2
    tune(group)
    assert group[0].votes.ballot is None


def test_each_rank_goes_on_with_a_part_of_what_earlier_processes_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = server(monkeypatch, tmp_path, 4, RECORDED)
    evidence = Evidence(100.0, 90.0, 0.1, 0.09, 0.11, 24, 30, 0.1, looks=1)
    for rank in group:
        for M in MS:  # noqa: N806
            stored = Record(RECORDED.shape, M, "faster", RECORDED.best(M)[0], RECORDED.baselines[M].pair, evidence)
            rank.tuner.learn(stored)
        rank.add(MS)
    parts = [{M for (_, M), entry in r.agenda.entries.items() if r.peers.ranks.admits(entry)} for r in group]
    assert sorted(M for part in parts for M in part) == sorted(MS)
    assert all(parts)


def test_beside_requests_the_thread_turns_seldom_and_the_first_idle_pass_brings_it_back(tmp_path: Path) -> None:
    now_s, waited = 100.0, []
    ranks = Ranks(Store.open(tmp_path, H200), Place(), "learned", 0.01, clock=lambda: now_s)

    class Stop(BaseException):
        """Ends the thread's loop."""

    class Event:
        """Tells how long the thread would wait, and who wakes it."""

        woken = 0

        def wait(self, seconds: float) -> None:
            waited.append(seconds)
            raise Stop

        def set(self) -> None:
            self.woken += 1
            assert ranks._is_idle(now_s), "the thread, which may run at once, would wait as long again"

    ranks._event = event = Event()  # type: ignore[assignment]
    for quiet_s in (0.0, 1.0, 60.0):  # since the last idle pass
        now_s += quiet_s
        with pytest.raises(Stop):
            ranks._run()
    assert waited[:2] == [POLL_S] * 2
    assert waited[2] >= 4 * POLL_S
    for _ in range(3):
        ranks.idle(now_s)
    assert event.woken == 1
    with pytest.raises(Stop):
        ranks._run()
    assert waited[3] == POLL_S
