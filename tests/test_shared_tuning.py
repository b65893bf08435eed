"""Ranks that share the work: n ranks tune a shape in about 1/n of the time, to rows that are as good, and agree."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")
from shared_tuning import MS, recorded, server, tune

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


@pytest.mark.parametrize(("ranks", "times"), [(2, 1.65), (4, 2.4)])
def test_ranks_share_the_work_and_end_with_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: tuple[float, float], ranks: int, times: float
) -> None:
    group = server(monkeypatch, tmp_path, ranks, RECORDED)
    for rank in group:
        rank.add(MS)
    taken_s = tune(group)
    assert alone[0] / taken_s > times
    assert regret(group[0], RECORDED) < alone[1] + 0.01
    assert all(rank.rows == group[0].rows for rank in group)
    assert {rank.peers.epoch for rank in group} == {group[0].peers.ranks.table.epoch}
    assert not any(rank.peers.ranks.waits for rank in group)
    for rank in group:
        for M, served in rank.rows.items():  # noqa: N806 - never slower, whoever found it
            assert RECORDED.pair_us(M, served) < RECORDED.pair_us(M, RECORDED.baselines[M].pair)


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
