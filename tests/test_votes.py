"""Votes: all ranks capture the same sizes at the same place of their loops, or none does; nobody ever waits.

A state machine drives several ranks in lockstep, as SGLang's broadcast keeps them, with boards that are read late or
never, ranks that are not ready, requests that move weights, and ranks whose hooks broke.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglang_moe_autotune.votes import PREFIX, Votes

if TYPE_CHECKING:
    from sglang_moe_autotune.votes import Ballot


class FakeGraphs:
    """Captures nothing, and holds what it promised as the real one must."""

    def __init__(self) -> None:
        self.can = True
        self.promised = False
        self.captured: list[tuple[int, ...]] = []

    def ready(self) -> bool:
        self.promised = self.promised or self.can
        return self.can

    def capture(self, sizes: tuple[int, ...]) -> None:
        assert self.promised, "a capture without what it needs"
        self.promised = False
        self.captured.append(sizes)

    def release(self) -> None:
        self.promised = False


class Server(RuleBasedStateMachine):
    """Passes of a server; a board that shows each rank's vote as it was at some earlier moment."""

    @initialize(count=st.integers(2, 5))
    def begin(self, count: int) -> None:
        self.ranks = [Votes(rank, count) for rank in range(count)]
        self.graphs = [FakeGraphs() for _ in range(count)]
        self.posted_votes: dict[int, int] = {}
        self.posted_ballot: Ballot | None = None
        self.deaf: set[int] = set()
        self.log: list[list[tuple[int, ...]]] = []

    @rule(sizes=st.sets(st.integers(1, 64), max_size=4))
    def rank_0_asks(self, sizes: set[int]) -> None:
        self.ranks[0].ask(sizes)

    @rule(data=st.data())
    def a_rank_posts(self, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, len(self.ranks) - 1))
        self.posted_votes[rank] = self.ranks[rank].vote
        if rank == 0:
            self.posted_ballot = self.ranks[0].ballot

    @rule(data=st.data())
    def a_rank_considers_what_it_reads(self, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, len(self.ranks) - 1))
        asked = self.ranks[0].ballot if rank == 0 else self.posted_ballot
        self.ranks[rank].consider(asked, self.graphs[rank])

    @rule(data=st.data(), can=st.booleans())
    def memory_comes_and_goes(self, data: st.DataObject, can: bool) -> None:
        self.graphs[data.draw(st.integers(0, len(self.graphs) - 1))].can = can

    @rule(data=st.data())
    def a_board_is_lost(self, data: st.DataObject) -> None:
        self.posted_votes.pop(data.draw(st.integers(0, len(self.ranks) - 1)), None)
        self.posted_ballot = None

    @rule()
    def a_pass_without_requests(self) -> None:
        message = self.ranks[0].announcement(self.posted_votes)
        starts = [votes.start(message) if message else () for votes in self.ranks]
        for sizes, graphs in zip(starts, self.graphs, strict=True):
            if sizes:
                graphs.capture(sizes)
        if message:
            self.log.append(starts)
        assert self.ranks[0].announcement(self.posted_votes) is None, "one message a ballot"

    @rule()
    def a_request_moves_weights(self) -> None:
        for rank, votes in enumerate(self.ranks):
            if rank not in self.deaf:
                votes.cancel(self.graphs[rank])

    @rule(data=st.data())
    def a_ranks_hook_breaks_before_it_promised(self, data: st.DataObject) -> None:
        rank = data.draw(st.integers(1, len(self.ranks) - 1))
        if not self.ranks[rank].vote:
            self.deaf.add(rank)  # it sees no request any more, so its count stays behind

    @invariant()
    def all_start_together_or_none(self) -> None:
        for starts in getattr(self, "log", ()):
            assert len(set(starts)) == 1, starts
            assert starts[0]


TestServer = Server.TestCase
TestServer.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_ballot_that_all_are_ready_for_starts_all_and_once() -> None:
    ranks, graphs = [Votes(rank, 3) for rank in range(3)], FakeGraphs()
    ranks[0].ask([64, 8, 8])
    assert ranks[0].ballot is not None
    for votes in ranks:
        votes.consider(ranks[0].ballot, graphs)
    message = ranks[0].announcement({1: ranks[1].vote, 2: ranks[2].vote})
    assert message == f"{PREFIX}:1:8,64"
    assert [votes.start(message) for votes in ranks] == [(8, 64)] * 3
    assert [votes.start(message) for votes in ranks] == [()] * 3


def test_a_rank_that_does_not_vote_means_no_start() -> None:
    ranks, graphs = [Votes(rank, 3) for rank in range(3)], FakeGraphs()
    ranks[0].ask([8])
    for votes in ranks[:2]:
        votes.consider(ranks[0].ballot, graphs)
    assert ranks[0].announcement({0: 1, 1: 1}) is None
    graphs.can = False
    ranks[2].consider(ranks[0].ballot, graphs)
    assert ranks[0].announcement({0: 1, 1: 1, 2: ranks[2].vote}) is None


def test_a_vote_for_a_cancelled_ballot_counts_for_no_later_one() -> None:
    leader, other, graphs = Votes(0, 2), Votes(1, 2), FakeGraphs()
    leader.ask([8])
    stale = leader.ballot
    leader.cancel(graphs)
    other.cancel(graphs)
    other.consider(stale, graphs)
    assert other.vote == 0
    leader.ask([8])
    leader.consider(leader.ballot, graphs)
    assert leader.announcement({1: 1}) is None


@pytest.mark.parametrize("text", ["", PREFIX, f"{PREFIX}:1:", f"{PREFIX}:1:8,", f"{PREFIX}:x:8", f"{PREFIX}:1:8\n"])
def test_what_is_no_message_starts_nothing(text: str) -> None:
    votes, graphs = Votes(0, 1), FakeGraphs()
    votes.ask([8])
    votes.consider(votes.ballot, graphs)
    assert votes.start(text) == ()
    assert votes.vote == 1
