"""The processes that share a server or a folder with this one, as its serving thread deals with them."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_moe_autotune import pace, releases
from sglang_moe_autotune.bench import Share
from sglang_moe_autotune.checks import Checks
from sglang_moe_autotune.council import Place, Present
from sglang_moe_autotune.experience import octaves
from sglang_moe_autotune.hearsay import Heard
from sglang_moe_autotune.layers import call_key
from sglang_moe_autotune.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang_moe_autotune.accord import Finding, Key, Proposal
    from sglang_moe_autotune.agenda import Agenda
    from sglang_moe_autotune.bench import BenchmarkProvider
    from sglang_moe_autotune.epochs import Table
    from sglang_moe_autotune.lookup import CallKey
    from sglang_moe_autotune.overlay import Overlay
    from sglang_moe_autotune.records import Record
    from sglang_moe_autotune.settings import Settings
    from sglang_moe_autotune.shapes import ConfigPair, MoeShape
    from sglang_moe_autotune.store import Store
    from sglang_moe_autotune.tried import Tried
    from sglang_moe_autotune.tuner import Step, Tuner
    from sglang_moe_autotune.votes import Graphs, Votes

logger = logging.getLogger("sglang.moe_autotune")

_NEWS_AT_ONCE = 4
_WISH_EVERY_S = 0.05


class Peers:
    """Between the tuner and the others: every pass of the idle loop calls ``step``, and nothing here waits."""

    def __init__(
        self,
        place: Place,
        settings: Settings,
        store: Store,
        provider: BenchmarkProvider,
        overlay: Overlay,
        tuner: Tuner,
        agenda: Agenda,
        votes: Votes,
        adopted: Callable[[CallKey, int, ConfigPair], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """adopted: told of each row whose binaries are loaded here and that is served from now on."""
        self.place = place
        self.graphs: Graphs | None = None
        """what captures graphs anew, where that is wanted in service"""
        self._settings, self._store, self._overlay, self._tuner = settings, store, overlay, tuner
        self._agenda, self._votes, self._adopted = agenda, votes, adopted
        assert overlay.source is not None  # noqa: S101 - set with the device that the tuner has
        self._source = overlay.source
        votes.rank, votes.ranks = place.rank, place.ranks
        provider.share = Share(place.rank, place.ranks)
        min_gain = settings.min_gain_percent / 100
        self.ranks = Ranks(store, place, self._source, min_gain, self._servable, clock)
        self.checks = Checks(provider, self._found, clock, pace.longest_launch_us(settings.slice_us))
        self._wanted: tuple[Key, ...] = ()
        self._wish_at_s, self._near = 0.0, 0
        self._leased: frozenset[Key] | None = None
        self._asked: tuple[Proposal, ...] = ()
        self._checked: set[str] = set()
        self._table: Table = self.ranks.table
        self._off = ""
        self._stale: set[int] = set()
        """M whose rows changed since graphs were captured"""
        agenda.admits, agenda.sharing = self.ranks.admits, place.ranks
        self._present()
        self.ranks.start()

    @property
    def epoch(self) -> int:
        """Of the rows that are served: the server's own count where it has several ranks."""
        return self._table.epoch if self.place.ranks > 1 else self._overlay.lookup.epoch

    def step(self, now_s: float, *, deep_idle: bool) -> Step:
        """One pass: what others did, then one slice of a check or of the tuner."""
        ranks, agenda = self.ranks, self._agenda
        ranks.idle(now_s)
        self._say("")
        self._vote(deep_idle=deep_idle)
        if ranks.news or ranks.heard or ranks.table is not self._table:
            self._hear()
            return "worked"
        if ranks.leased is not self._leased or ranks.elsewhere is not agenda.elsewhere:
            self._leased, agenda.elsewhere = ranks.leased, ranks.elsewhere
            agenda.wake()
        if ranks.asked is not self._asked:
            self._ask()
        self._wish(now_s, deep_idle=deep_idle)
        agenda.held = self.checks.ready(deep_idle=deep_idle)
        result: Step = "nothing" if self.checks.busy else self._tuner.step(deep_idle)
        if result == "nothing" and agenda.held:
            result = self._check(deep_idle=deep_idle)
        return "waiting" if result == "nothing" and self._wanted else result

    def learned(self, record: Record) -> bool:
        """The tuner found this. True where the ranks decide of it; then nothing is to be served yet."""
        self._wish_at_s, self._near = 0.0, record.M
        if self.place.ranks == 1:
            return False
        if record.verdict != "faster":
            held = self._store.contents.records.get((record.shape, record.M))
            served = self._served(record)
            if served is not None and (held is None or held.source != "pinned"):
                self.ranks.withdraw(record, served)
            return False
        row = self._table.row((record.shape, record.M))
        if row is not None and row.pair == record.pair:  # a further look found nothing better than what all serve
            self._store.submit(record=record)
            return True
        self.ranks.propose(record)
        if record.source == "learned":
            # Until it is decided it is a candidate, also for a server that starts later: raced first, never served.
            self._store.submit(record=msgspec.structs.replace(record, source="imported"))
        return True

    def tried(self, shape: MoeShape, M: int, trials: Sequence[Tried]) -> None:  # noqa: N803
        """What a search measured at its M."""
        if self.place.ranks > 1:
            self.ranks.tell(Heard(shape, M, tuple((trial.gemm, trial.config, trial.ratio) for trial in trials)))

    def requests(self, requests: Any) -> None:
        """What all ranks have just received, at the same place of their loops."""
        for message in releases.announced(requests):
            sizes = self._votes.start(message)
            self._stale -= set(sizes)  # not before: a ballot that is cancelled is put again
            if sizes and self.graphs is not None:
                self.graphs.capture(sizes)

    def abandon(self) -> None:
        """Close the bench of a check, if one is open."""
        self.checks.abandon()

    def stand_aside(self, reason: str) -> None:
        """This pass launches nothing: the others are told why, and what they decided is served all the same."""
        if self.ranks.table is not self._table:
            self._adopt(self.ranks.table)
        self._say(reason)

    def stop(self, reason: str) -> None:
        """Measure no more; the others are told."""
        self.checks.abandon()
        self._say(reason)

    def _say(self, off: str) -> None:
        if off != self._off:
            self._off = off
            self._present()

    # -- hearing ---------------------------------------------------------------------------------------------------

    def _hear(self) -> None:
        ranks = self.ranks
        for _ in range(min(_NEWS_AT_ONCE, len(ranks.news))):
            record = ranks.news.popleft()
            if record.source != "imported":  # a candidate, this rank's own perhaps: nothing is decided by it
                ranks.decided(record)
            usable = record.source in ("pinned", "imported", self._source) and self._overlay.stands(record)
            if usable and not self._is_rival(record):  # further looks must be measured against what is served
                self._tuner.learn(record)
        if ranks.heard:
            heard = ranks.heard.popleft()
            self._tuner.experience(heard.shape).hear(heard.M, heard.lags())
        if ranks.table is not self._table:
            self._adopt(ranks.table)
        self._wish_at_s = 0.0
        self._agenda.wake()

    def _adopt(self, table: Table) -> None:
        """Serve what rank 0 published: one swap. Each row was measured on this rank before it was decided."""
        served = self._overlay.lookup.rows()
        changes: list[tuple[CallKey, int, ConfigPair | None]] = []
        for row in table.after(self._table.epoch):
            key = call_key(row.shape)
            pair = row.pair if row.verdict == "faster" else None
            if self._overlay.shape_of(key) == row.shape and served.get(key, {}).get(row.M) != pair:
                changes.append((key, row.M, pair))
                self._log(row)
        if changes and self._settings.mode != "restart":
            self._overlay.lookup.publish(changes)
            for key, M, pair in changes:  # noqa: N806 - the field's name for it
                if pair is not None:
                    self._adopted(key, M, pair)
            self._stale |= {M for _, M, _ in changes}
        self._table = table
        self._present()

    def _log(self, row: Record) -> None:
        evidence = row.evidence
        logger.info(
            "MoE autotune, epoch of %d ranks: %s M=%d serves %s: %.1f %% faster on the slowest (at least %.1f %%).",
            *(self.place.ranks, row.shape.slug, row.M, row.pair, 100 * evidence.gain, 100 * evidence.gain_low),
        )

    def _present(self) -> None:
        rows = sum(len(rows) for rows in self._overlay.lookup.rows().values())
        self.ranks.present = Present(self._table.epoch, rows, self._votes.vote, self._votes.ballot, self._off)

    # -- checks ----------------------------------------------------------------------------------------------------

    def _servable(self, record: Record) -> bool:
        key = call_key(record.shape)
        if self._overlay.shape_of(key) != record.shape:
            return False
        # What one rank serves it has measured, or started with.
        return (self.place.ranks > 1 or self._served(record) != record.pair) and self._overlay.may_serve(record)

    def _is_rival(self, record: Record) -> bool:
        """Is it another server's row for an M that has a row here, which stays unless this one beats it?"""
        found = self.place.ranks == 1 and record.verdict == "faster" and record.source == self._source
        return found and self._served(record) not in (None, record.pair)

    def _served(self, record: Record) -> ConfigPair | None:
        """The learned pair that this process serves at the record's M."""
        return self._overlay.lookup.rows().get(call_key(record.shape), {}).get(record.M)

    def _ask(self) -> None:
        self._asked = self.ranks.asked
        ids = frozenset(proposal.id for proposal in self._asked)
        self._checked &= ids
        self.checks.keep(ids)
        for proposal in self._asked:
            if proposal.id not in self._checked:
                self.checks.add(proposal)

    def _check(self, *, deep_idle: bool) -> Step:
        if not self.checks.busy and not self._tuner.give_way():  # one bench at a time
            return "worked"
        before_s = self.checks.gpu_s
        try:
            return self.checks.step(deep_idle=deep_idle)
        finally:
            self._tuner.gpu_s += self.checks.gpu_s - before_s

    def _found(self, proposal: Proposal, finding: Finding) -> None:
        if self.place.ranks == 1 and finding.outcome == "holds":
            served = self._served(proposal.record)
            if served is not None and self._is_rival(proposal.record):
                if proposal.against != served:  # SGLang's own config; it must beat the row of this M here, too
                    self.checks.add(msgspec.structs.replace(proposal, against=served))
                    return
                self._tuner.learn(proposal.record)
        if finding.outcome != "unsure":
            self._checked.add(proposal.id)
        self.ranks.found(finding)
        if self.place.ranks == 1 and finding.outcome == "holds" and self._settings.mode != "restart":
            record = proposal.record
            self._overlay.lookup.publish([row := (call_key(record.shape), record.M, record.pair)])
            self._adopted(*row)
            self._log(record)

    def _wish(self, now_s: float, *, deep_idle: bool) -> None:
        if now_s < self._wish_at_s:
            return
        self._wish_at_s = now_s + _WISH_EVERY_S
        wanted = tuple(self._agenda.wanted(now_s, self._far, deep_idle=deep_idle))
        if wanted and not self._near:
            # Each rank begins in a part of its own: neighbours in M teach each other most.
            rank, ranks = self.place.rank, self.place.ranks
            self._near = sorted(M for _, M in wanted)[len(wanted) * (2 * rank + 1) // (2 * ranks)]
            wanted = tuple(self._agenda.wanted(now_s, self._far, deep_idle=deep_idle))
        if wanted != self._wanted:
            self._wanted = wanted
            self.ranks.wish(wanted)

    def _far(self, key: Key) -> float:
        return octaves(key[1], self._near) if self._near and self.place.ranks > 1 else 0.0

    # -- votes -----------------------------------------------------------------------------------------------------

    def _vote(self, *, deep_idle: bool) -> None:
        if self.graphs is None:
            return
        if self.place.rank == 0 and deep_idle and self._stale and self._votes.ballot is None:
            self._votes.ask(self._stale)
        ranks, votes = self.ranks, self._votes
        votes.consider(votes.ballot if self.place.rank == 0 else ranks.asked_ballot, self.graphs)
        if (votes.vote, votes.ballot) != (ranks.present.vote, ranks.present.ballot):
            self._present()
