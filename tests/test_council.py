"""The council: proposals and findings travel over the board, rank 0 decides, and each rank sees the same table."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

import pytest
from record_values import H200, pair, record

from sglang_moe_autotune import absence, accord
from sglang_moe_autotune.accord import Finding, propose
from sglang_moe_autotune.bench import COMPARE_RUNS
from sglang_moe_autotune.board import Board, sweep
from sglang_moe_autotune.council import Council, Place, Present
from sglang_moe_autotune.epochs import Table
from sglang_moe_autotune.post import Post, server_name
from sglang_moe_autotune.status import this_process
from sglang_moe_autotune.store import Store

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_moe_autotune.records import Evidence, Record


class Seats:
    """The ranks of a server in one process, and the clock they are given."""

    def __init__(self, folder: Path, ranks: int, paths: list[Path] | None = None) -> None:
        self.kept: list[Record] = []
        paths = paths or [folder / "env.json"] * ranks
        self.taken_back: list[tuple[Record, Evidence]] = []
        written = self.kept.append, lambda *row: self.taken_back.append(row)
        self.all = [Council(path, Place(rank, ranks, 1), 0.01, *written) for rank, path in enumerate(paths)]
        self.now_s = 0.0
        self.adopted = [0] * ranks

    def turn(self, *ranks: int) -> None:
        """One turn of these ranks, of all where none is named; each has served what it saw before."""
        self.now_s += 0.25
        for rank in ranks or range(len(self.all)):
            self.all[rank].confer(Present(epoch=self.adopted[rank]), self.now_s)
            self.adopted[rank] = self.all[rank].table.epoch

    def put(self, rank: int, row: Record) -> accord.Proposal:
        proposal = propose(row, self.all[rank].table.row((row.shape, row.M)))
        self.all[rank].propose(proposal)
        self.all[rank].note(accord.own_finding(proposal, None))
        return proposal

    def answer(self, rank: int, outcome: accord.Outcome = "holds", gain: float = 0.08) -> None:
        for proposal in self.all[rank].asked:
            self.all[rank].note(Finding(proposal.id, outcome, gain, gain / 2, gain * 2, 24, runs=COMPARE_RUNS))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("finder", [0, 1])
def test_a_row_is_published_once_every_rank_has_measured_it(tmp_path: Path, ranks: int, finder: int) -> None:
    seats = Seats(tmp_path, ranks)
    proposal = seats.put(finder, record())
    seats.turn(*range(ranks), *range(ranks))
    others = [rank for rank in range(ranks) if rank != finder]
    assert all([p.id for p in seats.all[rank].asked] == [proposal.id] for rank in others)
    assert seats.all[finder].asked == ()
    for rank in others[:-1]:
        seats.answer(rank)
    seats.turn()
    seats.turn()
    assert all(seat.table.epoch == 0 for seat in seats.all)  # one is missing, and nobody waits for it
    seats.answer(others[-1], gain=0.05)
    for _ in range(5):
        seats.turn()
    assert {seat.table for seat in seats.all} == {seats.all[0].table}
    (row,) = seats.all[0].table.rows
    assert (row.verdict, row.evidence.gain) == ("faster", 0.05)
    assert seats.kept == [row]  # one writer to the store
    assert not any(seat.proposals or seat.asked or seat.waits for seat in seats.all)


def test_one_refusal_settles_the_m_for_all_with_sglangs_own_answer(tmp_path: Path) -> None:
    seats = Seats(tmp_path, 2)
    seats.put(0, record())
    seats.turn(0, 1)
    seats.answer(1, "refused")
    for _ in range(3):
        seats.turn()
    (row,) = seats.all[1].table.rows
    assert row.verdict == "baseline"
    assert seats.kept == [row]
    assert not seats.all[0].proposals


def test_a_refused_second_step_leaves_the_first_in_place(tmp_path: Path) -> None:
    seats = Seats(tmp_path, 2)
    seats.put(0, record())
    seats.turn(0, 1)
    seats.answer(1)
    for _ in range(3):
        seats.turn()
    first = seats.all[0].table
    seats.put(1, record(pair=pair(64)))
    seats.turn(1, 0)
    seats.answer(0, "refused")
    for _ in range(3):
        seats.turn()
    assert seats.all[0].table.rows == seats.all[1].table.rows == first.rows
    assert not seats.all[1].proposals


def test_a_row_of_the_store_that_one_rank_refuses_is_taken_back_on_all_and_in_the_store(tmp_path: Path) -> None:
    seats = Seats(tmp_path, 2)
    stored = propose(record(), None)
    seats.all[0].foreign[stored.id] = stored
    seats.turn(0, 1, 0)
    seats.answer(0)
    seats.answer(1, "refused")
    for _ in range(3):
        seats.turn()
    assert [row.verdict for row in seats.all[1].table.rows] == ["baseline"]
    assert seats.kept == []
    ((row, evidence),) = seats.taken_back
    assert row == stored.record
    assert (evidence.gain, evidence.runs) == (0.0, 0)


def test_a_row_of_the_store_that_is_outdated_when_it_is_asked_for_is_not_taken_back(tmp_path: Path) -> None:
    seats = Seats(tmp_path, 2)
    first = seats.put(0, record())
    seats.turn(0, 1)
    seats.answer(1)
    for _ in range(3):
        seats.turn()
    assert [row.pair for row in seats.all[0].table.rows] == [first.record.pair]
    better = propose(record(pair=pair(64)), seats.all[0].table.rows[0])
    seats.all[0].foreign[better.id] = better
    seats.all[0].table = Table()  # what it was measured against is not served any more
    seats.turn(0, 1)
    assert seats.taken_back == seats.kept[1:] == []


def test_c22_ranks_with_private_volumes_serve_what_they_have_and_say_so(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "env.json", tmp_path / "b" / "env.json"]
    seats = Seats(tmp_path, 2, paths)
    seats.put(0, record())
    for _ in range(5):
        seats.turn()
    assert [seat.table.epoch for seat in seats.all] == [0, 0]
    for rank, seat in enumerate(seats.all):
        (told,) = seat.waits
        assert f"rank {1 - rank} of 2 is not seen in {paths[rank].parent}" in told


def test_a_lost_folder_is_posted_again(tmp_path: Path) -> None:
    seats = Seats(tmp_path, 2)
    seats.put(1, record())
    seats.turn(1, 0)
    seats.answer(0)
    for _ in range(3):
        seats.turn()
    shutil.rmtree(tmp_path / "env.json.ranks")
    seats.turn()
    seats.turn()
    for seat in seats.all:
        assert seat.table.epoch == 1
        assert seat.waits == ()
    newcomer = Board(seats.all[0]._board.folder, 1, 2)
    assert newcomer.table() == seats.all[0].table


def test_a_rank_that_lags_is_named_and_is_not_any_more_once_it_serves_the_epoch(tmp_path: Path) -> None:
    seats = Seats(tmp_path, 2)
    seats.put(0, record())
    seats.turn(0, 1)
    seats.answer(1)
    seats.turn(1, 0)
    seats.turn(0)
    assert seats.all[0].waits == ("rank 1 serves epoch 0 of 1",)
    seats.now_s += 20
    seats.turn(0)
    assert "rank 1 has said nothing for 2" in seats.all[0].waits[0]
    seats.turn(1)
    seats.turn(1, 0)
    assert seats.all[0].waits == ()


def test_a_rank_that_measures_no_more_says_why(tmp_path: Path) -> None:
    seats = Seats(tmp_path, 2)
    seats.all[1].confer(Present(off="tuning ended with a fault"), 0.25)
    seats.turn(0)
    (told,) = seats.all[0].waits
    assert told == "rank 1 measures nothing now (tuning ended with a fault); until it does nothing new is served"


@pytest.mark.parametrize("text", [b"", b"{}", b"[1]", b"\xff", b'{"rank": 1}', b"[" * 5000], ids=lambda t: repr(t[:9]))
def test_a_broken_post_or_table_is_a_rank_that_says_nothing(tmp_path: Path, text: bytes) -> None:
    ours = Board(tmp_path, 0, 2)
    (tmp_path / "rank-1.json").write_bytes(text)
    if text[:1] != b"{":
        (tmp_path / "table.json").write_bytes(text)
    assert ours.posts() == {}
    assert ours.table() is None


def test_a_proposal_that_makes_no_sense_is_left_out(tmp_path: Path) -> None:
    bad = propose(record(0), None)
    post = Post(**this_process()._asdict(), rank=1, ranks=2, proposals=(bad, propose(record(), None)))
    Board(tmp_path, 1, 2).write(post)
    assert [p.record.M for p in Board(tmp_path, 0, 2).posts()[1].proposals] == [64]


def test_two_servers_never_share_a_board_and_boards_of_dead_ones_go(tmp_path: Path) -> None:
    assert server_name(30000) == server_name(30000) != server_name(30001)
    for name, start in (("dead", 1), ("alive", None)):
        owner = this_process() if start is None else this_process()._replace(start_time=start)
        Board(tmp_path / name, 0, 1).write(Post(**owner._asdict(), rank=0, ranks=1))
    sweep(tmp_path, "own")
    assert [path.name for path in tmp_path.iterdir()] == ["alive"]


def test_a_rank_that_started_read_only_confirms_nothing_and_the_others_say_why(tmp_path: Path) -> None:
    seats = Seats(tmp_path, 3)
    died = Present(off="read-only: 2 processes died in the middle of a first launch")
    seats.put(0, record())
    for _ in range(8):
        seats.turn(0, 1)
        seats.answer(1)
        seats.all[2].say(died, seats.now_s)
    assert seats.all[0].table.rows == ()
    assert seats.kept == []
    for rank in (0, 1):
        (told,) = [wait for wait in seats.all[rank].waits if "rank 2" in wait]
        assert told == f"rank 2 measures nothing now ({died.off}); until it does nothing new is served"


def test_its_absence_is_told_by_a_thread_also_where_its_store_is_read_only(tmp_path: Path) -> None:
    store = Store.open(tmp_path, H200, read_only=True)
    absence.tell(store, Place(1, 2, 1), "read-only: a reason")
    assert store.path is not None
    seat = Council(store.path, Place(0, 2, 1), 0.01, lambda _: None, lambda *_: None)
    until_s = time.monotonic() + 10.0
    while not any("read-only: a reason" in wait for wait in seat.waits) and time.monotonic() < until_s:
        seat.confer(Present(), time.monotonic())
        time.sleep(0.05)
    assert any("read-only: a reason" in wait for wait in seat.waits)
    assert not store.path.exists()
