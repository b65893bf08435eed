"""One process among others: leases, council and store, all of it on a thread of its own.

The serving thread hands over what it found and wants, and reads what was made of it: attributes that are replaced
whole, and queues that are popped from. It takes no lock, touches no file and waits for nobody. Whatever the disk does,
the worst that can happen is that nothing new is decided.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
import zlib
from typing import TYPE_CHECKING

from sglang_moe_autotune import accord, whole_file
from sglang_moe_autotune.breath import Breath
from sglang_moe_autotune.council import Council, Place, Present
from sglang_moe_autotune.epochs import Table
from sglang_moe_autotune.leases import Leases
from sglang_moe_autotune.records import demote
from sglang_moe_autotune.status import this_process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sglang_moe_autotune.accord import Finding, Key, Proposal
    from sglang_moe_autotune.agenda import Entry
    from sglang_moe_autotune.hearsay import Heard
    from sglang_moe_autotune.records import Evidence, Record, Source
    from sglang_moe_autotune.shapes import ConfigPair
    from sglang_moe_autotune.store import Store
    from sglang_moe_autotune.votes import Ballot

logger = logging.getLogger("sglang.moe_autotune")

POLL_S = 0.25
_BUSY_POLL_S = 2.0
"""the same beside requests, whose steps each turn holds up for a moment"""
_AHEAD = 2
_IDLE_S = 5.0
"""without an idle pass, after which a rank is busy: it looks for others seldom, and gives its leases back"""
_MAX_OPEN = 8
"""own proposals that nobody has decided yet, after which nothing new is begun"""
_FLUSH_S = 0.2


class Ranks:
    """``turn`` does what there is to do once; ``start`` lets a thread call it until the process ends."""

    def __init__(
        self,
        store: Store,
        place: Place,
        source: Source,
        min_gain: float,
        servable: Callable[[Record], bool] = lambda _: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """servable: does a row of the store hold for the layers of this process? Called on the thread."""
        self.place, self.store = place, store
        # Handed over by the serving thread.
        self.wanted: tuple[Key, ...] = ()
        """what it would begin now, the hottest first"""
        self._idle_at_s = clock()
        self.present = Present()
        self._open: set[Key] = set()
        """what it proposed, until it has heard what was decided; the serving thread's own"""
        self._in: collections.deque[tuple[Proposal | None, Finding]] = collections.deque()
        self._trials: collections.deque[Heard] = collections.deque()
        # Handed over to it.
        self.leased: frozenset[Key] = frozenset()
        self.elsewhere: frozenset[Key] = frozenset()
        self.asked: tuple[Proposal, ...] = ()
        """to be measured by this rank"""
        self.table = Table()
        self.news: collections.deque[Record] = collections.deque()
        """records that others made, or that were decided, for the tuner"""
        self.heard: collections.deque[Heard] = collections.deque()
        """what other ranks measured"""
        self.votes: Mapping[int, int] = {}
        self.asked_ballot: Ballot | None = None
        self.waits: tuple[str, ...] = ()
        """what this rank's server waits for, or what differs between its ranks, in words"""
        # The thread's own.
        self._source, self._clock, self._servable = source, clock, servable
        self._foreign: dict[str, Proposal] = {}
        self._known = store.contents.records
        self._seen_file: object = None
        self._event = threading.Event()
        self._breathe = Breath()
        self._told = False
        self._leases: Leases | None = None
        self._council: Council | None = None
        if store.path is not None and store.state != "read-only":
            self._leases = Leases(store.path.with_name(f"{store.path.name}.leases"), this_process(), clock)
            if place.ranks > 1:
                self._council = Council(store.path, place, min_gain, self._keep, self._take_back)
                self._foreign = self._council.foreign
                # Rows of the store are served from the start on; the ranks measure them when there is time.
                self._known = {key: r for key, r in self._known.items() if r.source != source or place.rank != 0}
        if place.ranks > 1 and self._council is None:
            self.waits = ("there is no folder that the ranks could share: nothing new is served",)

    # -- the serving thread ----------------------------------------------------------------------------------------

    def idle(self, now_s: float) -> None:
        """An idle pass. The first one for a while brings the thread back at once."""
        was_idle, self._idle_at_s = self._is_idle(now_s), now_s
        if not was_idle:
            self._event.set()

    def admits(self, entry: Entry) -> bool:
        """May the tuner begin this one? What it found itself may be looked at again, unless that is open still; of
        what earlier processes found each rank goes on with a part."""
        if entry.record is not None:
            return entry.key not in self._open and (not entry.inherited or self._has_part(entry.key))
        if len(self._open) >= _MAX_OPEN:
            return False
        return self._leases is None or entry.key in self.leased

    def _has_part(self, key: Key) -> bool:
        return zlib.crc32(f"{key[0].slug} {key[1]}".encode()) % self.place.ranks == self.place.rank

    def propose(self, record: Record) -> None:
        """A row that this rank found, measured against what the ranks serve at its M."""
        row = self.table.row((record.shape, record.M))
        proposal = accord.propose(record, row)
        self._open.add(proposal.key)
        self._in.append((proposal, accord.own_finding(proposal, row)))
        self._event.set()

    def withdraw(self, record: Record, served: ConfigPair) -> None:
        """This rank found SGLang's own config faster than what the ranks serve: none may go on with that."""
        proposal, finding = accord.withdraw(record, served, self.table.row((record.shape, record.M)))
        self._open.add(proposal.key)
        self._in.append((proposal, finding))
        self._event.set()

    def found(self, finding: Finding) -> None:
        """What this rank measured of a proposal."""
        self._in.append((None, finding))
        self._event.set()

    def tell(self, heard: Heard) -> None:
        """What a search of this rank measured."""
        self._trials.append(heard)

    def wish(self, wanted: tuple[Key, ...]) -> None:
        """What the tuner would begin now, the hottest first."""
        self.wanted = wanted
        self._event.set()

    def decided(self, record: Record) -> None:
        """``news`` held this one: what was open at its M is not any more."""
        self._open.discard((record.shape, record.M))

    def start(self) -> None:
        """Let a thread of its own do the turns until the process ends."""
        threading.Thread(target=self._run, name="moe-autotune-ranks", daemon=True).start()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._event.wait(POLL_S if self._is_idle(self._clock()) else _BUSY_POLL_S)
            self._event.clear()
            try:
                self.turn()
            except Exception:
                # Nothing that serves depends on this thread, and the next turn reads everything again.
                if not self._told:
                    logger.exception("MoE autotune could not work with other ranks and servers; it tries again.")
                self._told = True

    def turn(self) -> None:
        """Read what others did, do this rank's part. Disk trouble never raises."""
        while self._in:
            self._breathe()
            self._take(*self._in.popleft())
        self._breathe()
        self._read_store()
        if self._council is not None:
            self._breathe()
            self._confer(self._council)
        self._breathe()
        self._lease()

    def _is_idle(self, now_s: float) -> bool:
        return now_s - self._idle_at_s < _IDLE_S

    def _take(self, proposal: Proposal | None, finding: Finding) -> None:
        if self._council is None:
            if finding.outcome != "unsure":  # the one rank of a server decides by itself
                self._foreign.pop(finding.id, None)
                self.asked = tuple(self._foreign.values())
            return
        if proposal is not None:
            self._council.propose(proposal)
        self._council.note(finding)

    def _read_store(self) -> None:
        """What others wrote, for the tuner; for rank 0 also the rows that no rank of this server has measured."""
        store = self.store
        if store.path is not None:
            with contextlib.suppress(OSError):
                identity = whole_file.identity(store.path.stat())
                if identity != self._seen_file:
                    self._seen_file = identity
                    if not store.taken_in(identity):  # else each write of ours would be followed by another
                        store.refresh()
        records = store.contents.records
        if records is self._known:
            return
        for key, record in records.items():
            self._breathe()
            if record is not self._known.get(key):
                self.news.append(record)
                if record.verdict == "faster" and record.source == self._source and self.place.rank == 0:
                    self._consider(key, record)
        self._known = records
        if self._council is None:
            self.asked = tuple(self._foreign.values())

    def _consider(self, key: Key, record: Record) -> None:
        row = self.table.row(key)
        if row is not None and (row.pair == record.pair or row.verdict == "baseline"):
            return
        own = () if self._council is None else self._council.proposals.values()
        if all(proposal.key != key for proposal in own) and self._servable(record):
            for outdated in [i for i, proposal in self._foreign.items() if proposal.key == key]:
                del self._foreign[outdated]
            proposal = accord.propose(record, row)
            self._foreign[proposal.id] = proposal

    def _keep(self, record: Record) -> None:
        self.store.submit(record=record)

    def _take_back(self, record: Record, evidence: Evidence) -> None:
        """A row of the store did not hold on a rank: no start serves it again."""
        held = self.store.contents.records.get((record.shape, record.M))
        demoted = demote(self.store.contents, record, evidence).records.get((record.shape, record.M))
        if demoted is not None and demoted is not held:
            self.store.submit(record=demoted)

    def _confer(self, council: Council) -> None:
        while self._trials:
            council.tell(self._trials.popleft())
        self.news.extend(council.confer(self.present, self._clock()))
        self.heard.extend(council.hearsay)
        self.asked, self.table, self.waits = council.asked, council.table, council.waits
        self.votes = {rank: post.vote for rank, post in council.posts.items()}
        self.asked_ballot = council.posts[0].ballot if 0 in council.posts else None

    def _lease(self) -> None:
        leases = self._leases
        if leases is None:
            return
        leases.touch()
        wanted = self.wanted if self._is_idle(self._clock()) else ()
        # Who stands aside may do so for days.
        proposed = () if self._council is None or self.present.off else self._council.proposals.values()
        ended = leases.held - set(wanted) - {proposal.key for proposal in proposed}
        # Whoever takes it next must find its record; a disk that takes long keeps it for another turn.
        if ended and (self.store.state != "disk" or self.store.flush(_FLUSH_S)):
            for key in ended:
                self._breathe()
                leases.release(key)
        # The last few are shared out one by one, so that no rank sits on two while another has none.
        ahead = _AHEAD if len(wanted) > _AHEAD * self.place.ranks else 1
        taken, elsewhere = len(leases.held.intersection(wanted)), set()
        before = set(leases.held)
        for key in wanted:
            if taken >= ahead:
                break
            self._breathe()
            if key not in leases.held:
                try:
                    taken += leases.take(key)
                except OSError:
                    leases.held.add(key)  # no place for leases: they save work, and nothing rests on them
                if key not in leases.held:
                    elsewhere.add(key)
        leased = leases.held - self._settled_elsewhere(leases.held - before)
        if leased != self.leased:
            self.leased = frozenset(leased)
        if elsewhere != self.elsewhere:
            self.elsewhere = frozenset(elsewhere)

    def _settled_elsewhere(self, fresh: set[Key]) -> set[Key]:
        """Of fresh leases those whose last owner left a record that was not read yet: the next turn does."""
        if fresh and self.store.state == "disk":
            self.store.refresh(_FLUSH_S)
        records = self.store.contents.records
        return {key for key in fresh if records.get(key) is not self._known.get(key)}
