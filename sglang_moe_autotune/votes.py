"""The vote for re-capture: rank 0 asks, every rank answers when it is ready, and one broadcast message starts all.

Pure. What is asked and answered travels through the board, at any speed. The start travels through SGLang's own
request broadcast, which every rank processes at the same place of its loop. A vote is a promise: it stands until the
start, or until a request that moves weights or caches cancels the ballot. That request comes by the same
broadcast, so all ranks cancel, or none. Nobody waits: without all votes there is no start.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PREFIX: Final = "SGLANG_MOE_AUTOTUNE_RECAPTURE"
_MESSAGE: Final = re.compile(rf"{PREFIX}:(\d{{1,9}}):(\d{{1,9}}(?:,\d{{1,9}})*)")


class Ballot(msgspec.Struct, frozen=True):
    """What rank 0 asks all ranks to be ready for: graphs of these sizes, captured anew together."""

    number: int
    sizes: tuple[int, ...]
    """in tokens, ascending"""


class Graphs(Protocol):
    """What captures graphs anew in this process."""

    def ready(self) -> bool:
        """Could ``capture`` begin now, and could nothing but the device keep it from ending? Once it has said so,
        what it needs (memory, binaries) is kept until ``capture`` or ``release``."""

    def capture(self, sizes: tuple[int, ...]) -> None:
        """Capture these sizes anew. Called at the same loop position on all ranks."""

    def release(self) -> None:
        """The ballot was cancelled: nothing need be kept."""


class Votes:
    """One rank's part. All methods are called on the serving thread, with what the board said last.

    ``closed`` counts starts and cancellations. They come by the broadcast, so it is the same on all ranks at the same
    place; a rank where it is not, because a hook broke, answers to no ballot, and nothing starts.
    """

    def __init__(self, rank: int = 0, ranks: int = 1) -> None:
        self.rank, self.ranks = rank, ranks
        self.closed = 0
        self.ballot: Ballot | None = None
        """rank 0: what it asks for now"""
        self.vote = 0
        """the number of the ballot that this rank is ready for; 0: none"""

    def ask(self, sizes: Iterable[int]) -> None:
        """Rank 0: put a ballot to all ranks, unless one is open."""
        wanted = tuple(sorted(set(sizes)))
        if self.ballot is None and wanted:
            self.ballot = Ballot(self.closed + 1, wanted)

    def consider(self, asked: Ballot | None, graphs: Graphs) -> None:
        """In an idle pass: promise to be ready for what rank 0 asks, if this rank is. What the board says is old, so
        it never ends a promise."""
        if asked is not None and asked.number == self.closed + 1 and not self.vote and graphs.ready():
            self.vote = asked.number

    def announcement(self, votes: Mapping[int, int]) -> str | None:
        """Rank 0, where it has just received its requests, and there were none: the message that starts all, once
        every rank's vote is known. It goes into this pass's broadcast or nowhere: asked again, it is None."""
        ballot = self.ballot
        if ballot is None or self.vote != ballot.number:
            return None
        if any(votes.get(rank) != ballot.number for rank in range(self.ranks) if rank != self.rank):
            return None
        self.ballot = None
        return f"{PREFIX}:{ballot.number}:{','.join(map(str, ballot.sizes))}"

    def start(self, message: str) -> tuple[int, ...]:
        """Every rank, when the message arrives: the sizes to capture now; empty for what is no start of the ballot
        that this rank promised to be ready for."""
        match = _MESSAGE.fullmatch(message)
        if match is None or not self.vote or int(match[1]) != self.vote:
            return ()
        self._close()
        return tuple(map(int, match[2].split(",")))

    def cancel(self, graphs: Graphs | None) -> None:
        """A request that moves weights or caches arrived, on all ranks at this place: no promise stands."""
        if self.vote and graphs is not None:
            graphs.release()
        self._close()

    def _close(self) -> None:
        self.closed += 1
        self.vote = 0
        self.ballot = None
