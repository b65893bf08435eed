"""The council of a server's ranks: proposals and findings on the board, and the table that rank 0 makes of them.

Used by the thread of ``ranks`` alone; reads and writes the board, and hands decided records to the store.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from sglang_moe_autotune import accord
from sglang_moe_autotune.accord import Finding, Proposal
from sglang_moe_autotune.board import Board, sweep
from sglang_moe_autotune.breath import Breath
from sglang_moe_autotune.epochs import Table
from sglang_moe_autotune.hearing import Hearing
from sglang_moe_autotune.post import Post, server_name
from sglang_moe_autotune.status import this_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from sglang_moe_autotune.hearsay import Heard
    from sglang_moe_autotune.records import Evidence, Record
    from sglang_moe_autotune.votes import Ballot

_BEAT_S = 5.0
_REREAD_S = 30.0
_SILENT_S = 15.0
_UNSURE = Finding("", "unsure")


class Place(NamedTuple):
    """Where this process stands among the ranks of its server."""

    rank: int = 0
    ranks: int = 1
    port: int = 0


class Present(NamedTuple):
    """How this rank is now, for the others."""

    epoch: int = 0
    """of the table that it serves"""
    rows: int = 0
    vote: int = 0
    ballot: Ballot | None = None
    off: str = ""


class Council:
    """One rank's seat. ``confer`` reads what the others posted, decides where it is rank 0's part, and posts."""

    def __init__(
        self,
        store_path: Path,
        place: Place,
        min_gain: float,
        keep: Callable[[Record], object],
        take_back: Callable[[Record, Evidence], object],
    ) -> None:
        """keep: called with each record that rank 0 decided. take_back: with a row of the store that a rank refused,
        and with what says so."""
        self.place = place
        self.table = Table()
        self.asked: tuple[Proposal, ...] = ()
        """to be measured by this rank"""
        self.posts: Mapping[int, Post] = {}
        self.waits: tuple[str, ...] = ()
        self.proposals: dict[str, Proposal] = {}
        """this rank's own, undecided"""
        self.foreign: dict[str, Proposal] = {}
        """rows of the store that this server's ranks have not measured; rank 0 proposes them one at a time"""
        self._min_gain, self._keep, self._take_back = min_gain, keep, take_back
        self._findings: dict[str, Finding] = {}
        self._told: list[Heard] = []
        """and not written yet"""
        self.hearsay: list[Heard] = []
        """what other ranks measured, fresh at each turn"""
        self._owner = this_process()
        self._breathe = Breath()
        self._folder = store_path.parent
        parent, name = store_path.with_name(f"{store_path.name}.ranks"), server_name(place.port)
        self._board = Board(parent / name, place.rank, place.ranks)
        self._hearing = Hearing(parent / name, place.rank, place.ranks)
        self._beat, self._posted, self._posted_s, self._reread_s = 0, b"", -_BEAT_S, -_REREAD_S
        self._heard: dict[int, tuple[int, float]] = {}
        self._to_sweep: tuple[Path, str] | None = (parent, name) if place.rank == 0 else None

    def propose(self, proposal: Proposal) -> None:
        """This rank found it; it takes the place of an earlier one at that M."""
        self.proposals = {i: p for i, p in self.proposals.items() if p.key != proposal.key}
        self.proposals[proposal.id] = proposal

    def tell(self, heard: Heard) -> None:
        """This rank measured these in a search."""
        self._told.append(heard)

    def note(self, finding: Finding) -> None:
        """This rank measured it."""
        self._findings[finding.id] = finding

    def confer(self, present: Present, now_s: float) -> list[Record]:
        """One turn. Returns what was decided of this rank's own proposals. Disk trouble never raises: what was not
        written now is written at a later turn."""
        if self._to_sweep is not None:
            sweep(*self._to_sweep)  # not in ``__init__``: the thread that serves makes this object
            self._to_sweep = None
        if now_s - self._reread_s > _REREAD_S:
            self._reread_s = now_s
            self._board.forget()  # a clock of the file system may be too coarse to show every change
        posts = {**self._board.posts(), self.place.rank: self._post(present)}
        proposals = {p.id: p for rank in sorted(posts) for p in posts[rank].proposals}
        if self.place.rank == 0:
            self._decide(posts, proposals)
        elif (table := self._board.table()) is not None:
            self.table = table
        self._breathe()
        decided = list(self._settle_own())
        self._findings = {i: f for i, f in self._findings.items() if i in proposals}
        open_here = [p for p in proposals.values() if self._is_open(p)]
        asked = [p for p in open_here if self._findings.get(p.id, _UNSURE).outcome == "unsure"]
        if [p.id for p in asked] != [p.id for p in self.asked]:
            self.asked = tuple(asked)
        self.posts = posts
        self.waits = tuple(self._differences(posts, present, now_s))
        self._breathe()
        self._write(present, now_s)
        self._breathe()
        self._exchange()
        return decided

    def say(self, present: Present, now_s: float) -> None:
        """The turn of a rank that only says how it is: it decides nothing, and asks nothing. Never raises OSError."""
        self._write(present, now_s)

    def _exchange(self) -> None:
        if self._told:
            with contextlib.suppress(OSError):
                self._hearing.tell(self._told)
                self._told.clear()
        self.hearsay = self._hearing.fresh()

    def _is_open(self, proposal: Proposal) -> bool:
        row = self.table.row(proposal.key)
        served = proposal.record.baseline if row is None else row.pair
        return proposal.id not in self.table.dismissed and proposal.against == served

    def _decide(self, posts: Mapping[int, Post], proposals: Mapping[str, Proposal]) -> None:
        table = self.table
        found = {rank: {f.id: f for f in post.findings} for rank, post in posts.items()}
        for proposal in proposals.values():
            self._breathe()
            if proposal.id in table.dismissed:
                continue
            row = table.row(proposal.key)
            row = row if row is not None and row.verdict == "faster" else None
            of_it = {rank: by_id[proposal.id] for rank, by_id in found.items() if proposal.id in by_id}
            decided = accord.decide(proposal, of_it, self.place.ranks, row, self._min_gain)
            if decided == "open":
                continue
            if isinstance(decided, str):
                table = self._drop(table, proposal, of_it, row)
            else:
                table = table.with_row(decided)
                self._keep(decided)
            self.foreign.pop(proposal.id, None)
        table = msgspec.structs.replace(table, dismissed=tuple(i for i in table.dismissed if i in proposals))
        if table != self.table or self._board.lost(table=True):
            self.table = table
            with contextlib.suppress(OSError):
                self._board.write_table(table)

    def _drop(self, table: Table, proposal: Proposal, found: Mapping[int, Finding], row: Record | None) -> Table:
        table = table.dismissing(proposal.id)
        if row is None or row.pair == proposal.record.pair == proposal.against:
            # In the table also where all ranks started with this row: none may go on serving what one refused.
            record = accord.settled(proposal, found)
            table = table.with_row(record)
            if proposal.id not in self.foreign:
                self._keep(record)
            elif proposal.against == record.baseline:  # it was measured; otherwise it is outdated, which says nothing
                self._take_back(proposal.record, record.evidence)
        return table

    def _settle_own(self) -> Iterator[Record]:
        for proposal in list(self.proposals.values()):
            if not self._is_open(proposal):
                del self.proposals[proposal.id]
                if (row := self.table.row(proposal.key)) is not None:
                    yield row

    def _post(self, present: Present) -> Post:
        proposals = tuple(self.proposals.values())
        if not proposals and self.foreign:
            proposals = (next(iter(self.foreign.values())),)
        return Post(
            **self._owner._asdict(),
            rank=self.place.rank,
            ranks=self.place.ranks,
            beat=self._beat,
            epoch=present.epoch,
            rows=present.rows,
            proposals=proposals,
            findings=tuple(self._findings.values()),
            off=present.off,
            ballot=present.ballot,
            vote=present.vote,
        )

    def _write(self, present: Present, now_s: float) -> None:
        if (
            msgspec.json.encode(self._post(present)) != self._posted
            or now_s - self._posted_s > _BEAT_S
            or self._board.lost()
        ):
            self._beat += 1
            post = self._post(present)
            with contextlib.suppress(OSError):
                self._board.write(post)
                self._posted, self._posted_s = msgspec.json.encode(post), now_s

    def _differences(self, posts: Mapping[int, Post], present: Present, now_s: float) -> Iterator[str]:
        for rank in range(self.place.ranks):
            if (post := posts.get(rank)) is None:
                yield (
                    f"rank {rank} of {self.place.ranks} is not seen in {self._folder}: there the plugin is off, failed,"
                    " or has another folder; nothing new is served until it is"
                )
                continue
            beat, since_s = self._heard.get(rank, (post.beat, now_s))
            self._heard[rank] = heard = (post.beat, since_s if beat == post.beat else now_s)
            if rank != self.place.rank and now_s - heard[1] > _SILENT_S:
                yield f"rank {rank} has said nothing for {now_s - heard[1]:.0f} s"
            if post.off:
                yield f"rank {rank} measures nothing now ({post.off}); until it does nothing new is served"
            if unsure := [finding.reason for finding in post.findings if finding.outcome == "unsure"]:
                yield f"rank {rank} cannot measure {len(unsure)} proposals now: {unsure[0]}"
            if post.epoch != self.table.epoch:
                yield f"rank {rank} serves epoch {post.epoch} of {self.table.epoch}"
            elif post.rows != present.rows:
                yield f"rank {rank} serves {post.rows} learned rows, rank {self.place.rank} {present.rows}"
