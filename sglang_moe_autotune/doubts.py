"""Doubts: learned rows that made the steps of a server slower. Taken back at once, and put to the bench once more.

Step times are the weaker witness: they are not paired, and clocks, contexts and other load are in them. So what they
say costs a row its place only until the bench has measured it again, beside SGLang's own config, in idle time. Where it
holds, it serves again and is doubted no more in this process; where it does not, the store keeps it as demoted, with a
generation of its own, so that no older copy brings it back. A doubt that the process ends with, or that a fault of the
bench leaves open, is not kept: the next start serves the row, and is the first to see whether steps there are slower
with it.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang_moe_autotune import accord, pace, records
from sglang_moe_autotune.captures import UNKNOWN
from sglang_moe_autotune.checks import FAULT, Checks
from sglang_moe_autotune.step_times import MOST_PLACES, Place, Slowdown, StepTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sglang_moe_autotune.beat import Beat
    from sglang_moe_autotune.bench import BenchmarkProvider
    from sglang_moe_autotune.checks import Step
    from sglang_moe_autotune.heat import BatchKind
    from sglang_moe_autotune.lookup import CallKey
    from sglang_moe_autotune.overlay import Overlay
    from sglang_moe_autotune.recapture import Recapture
    from sglang_moe_autotune.store import Store
    from sglang_moe_autotune.tuner import Tuner

    Sizes = Callable[[], Mapping[BatchKind, Sequence[int]]]

logger = logging.getLogger("sglang.moe_autotune")


class Row(NamedTuple):
    """A learned pair that is, or was, served."""

    key: CallKey
    M: int
    pair: Any


class Doubts:
    """Fed by the serving thread: batches, and after passes that worked a look at which answers are in effect where."""

    def __init__(self, overlay: Overlay, recapture: Recapture, captured: Sizes, beat: Beat) -> None:
        """captured: tokens of the graphs, by kind of batch. beat: times the steps that follow a batch like it."""
        self.told: dict[str, str] = {}
        """"slug M" -> what became of its row, for people"""
        self._overlay, self._recapture, self._captured = overlay, recapture, captured
        self._served = True
        self.steps = StepTimes(captured, self._opened, _context_of, beat)
        self._answers: dict[Place, dict[CallKey, Any]] = {}
        self._fresh: dict[Place, set[Row]] = {}
        """rows whose effect on a place is being watched"""
        self._had: set[Row] = set()
        """rows that were doubted once"""
        self._back: list[Row] = []
        """taken back, and not yet put to the bench"""
        self._asked: dict[str, Row] = {}
        self._seen: tuple[int, int, bool] | None = None
        self._store: Store | None = None
        self._checks: Checks | None = None
        self._tuner: Tuner | None = None
        self._let_go: Callable[[], object] = self.abandon
        self._alone = True

    def join(
        self, store: Store, provider: BenchmarkProvider, tuner: Tuner, let_go: Callable[[], object],
        alone: bool, slice_us: float,
    ) -> None:  # fmt: skip
        """From now on rows are doubted. Not alone: the ranks of a server decide together what they serve, so what one
        of them sees is told and nothing is taken back. let_go: closes the bench that is open, whosever it is."""
        self._store, self._tuner, self._let_go, self._alone = store, tuner, let_go, alone
        self._checks = Checks(provider, self._found, time.monotonic, pace.longest_launch_us(slice_us))

    # -- what is in effect where -----------------------------------------------------------------------------------

    def look(self, now_s: float, *, overlays: bool) -> None:
        """An idle pass ended: note where other rows are in effect than before. Costs one comparison where nothing can
        have changed.

        overlays: are learned rows served at all?
        """
        self.steps.pause()
        seen = (self._overlay.lookup.epoch, self._recapture.made, overlays)
        if seen == self._seen or not self.steps.on:
            return
        self._seen, self._served = seen, overlays
        for place in tuple(self.steps.places):
            answers, before = self._in_effect(place), self._answers.get(place, {})
            if answers != before:
                self._answers[place] = answers
                self._changed(place, before, now_s)

    def _opened(self, place: Place) -> None:
        if len(self._answers) >= 2 * MOST_PLACES:  # eager sizes can be any, and few are timed at a time
            timed = set(self.steps.places)
            self._answers = {known: answers for known, answers in self._answers.items() if known in timed}
            self._fresh = {known: rows for known, rows in self._fresh.items() if known in timed}
        self._answers[place] = self._in_effect(place)
        self._fresh.pop(place, None)

    def _in_effect(self, place: Place) -> dict[CallKey, Any]:
        """Learned pairs by call. Eager batches follow the table of rows, a graph keeps those of its capture."""
        if place.M in self._captured().get(place.kind, ()):
            return {key: pair for key, pair in self._recapture.held(*place).items() if pair is not None}
        if not self._served:
            return {}
        rows = self._overlay.lookup.rows().items()
        return {key: table[place.M] for key, table in rows if place.M in table}

    def _changed(self, place: Place, before: dict[CallKey, Any], now_s: float) -> None:
        fresh = {
            Row(key, place.M, pair)
            for key, pair in self._answers[place].items()
            if pair != before.get(key) and pair is not UNKNOWN
        }
        held = {Row(key, place.M, pair) for key, pair in self._answers[place].items()}
        fresh = ((self._fresh.get(place, set()) & held) | fresh) - self._had
        if self.steps.changed(place, now_s, watch=bool(fresh)):
            self._fresh[place] = fresh
        else:
            self._fresh.pop(place, None)

    # -- batches ---------------------------------------------------------------------------------------------------

    def block(self, batch: Any, now_s: float) -> None:
        """``steps.ran`` said that a block is full. Where it shows that steps got worse, the rows go, before this batch
        runs: one swap of a table."""
        if (slowdown := self.steps.block(batch, now_s)) is not None:
            self._doubt(slowdown)

    def _doubt(self, slowdown: Slowdown) -> None:
        rows = sorted(self._fresh.pop(slowdown.place, set()), key=str)
        self._had.update(rows)
        rows = [row for row in rows if not self._pinned(row)]
        if not rows:
            return
        if self._alone:
            served = self._overlay.lookup.rows()
            rows_now = [row for row in rows if served.get(row.key, {}).get(row.M) == row.pair]
            self._overlay.lookup.publish([(row.key, row.M, None) for row in rows_now])
            self._recapture.take_out(slowdown.place.M)
            self._back += rows_now
        did = "taken back until the bench has measured it again" if self._alone else "served on: several ranks decide"
        for row in rows:
            self._tell(row, f"{slowdown}: {did}")
        names = ", ".join(map(self._name, rows))
        logger.warning("MoE autotune: %s, since the learned row of %s is in use: %s.", slowdown, names, did)

    def _pinned(self, row: Row) -> bool:
        record = self._record(row)
        return record is not None and record.source == "pinned"

    def _record(self, row: Row) -> records.Record | None:
        shape = self._overlay.shape_of(row.key)
        if shape is None or self._store is None:
            return None
        record = self._store.contents.records.get((shape, row.M))
        return record if record is not None and record.pair == row.pair else None

    def _name(self, row: Row) -> str:
        shape = self._overlay.shape_of(row.key)
        return f"{'a shape' if shape is None else shape.slug} {row.M}"

    def _tell(self, row: Row, words: str) -> None:
        self.told = {**self.told, self._name(row): words}

    # -- the bench -------------------------------------------------------------------------------------------------

    def ready(self, *, deep_idle: bool) -> bool:
        """Is there a row to be measured now? One comparison where nothing is in doubt."""
        if self._checks is None or not (self._back or self._asked):
            return False
        while self._back:
            row = self._back.pop()
            if (record := self._record(row)) is not None and record.verdict == "faster":
                proposal = accord.propose(record, None)
                self._asked[proposal.id] = row
                self._checks.add(proposal)
        return self._checks.ready(deep_idle=deep_idle)

    def step(self, *, deep_idle: bool) -> Step:
        """At most one slice, while no other bench is open. Exceptions of the bench propagate; the row stays out."""
        assert self._checks is not None  # noqa: S101 - ``ready`` said yes
        assert self._tuner is not None  # noqa: S101 - as above
        if not self._checks.busy:
            if not self._tuner.give_way():
                return "worked"
            self._let_go()
        before_s = self._checks.gpu_s
        try:
            return self._checks.step(deep_idle=deep_idle)
        finally:
            self._tuner.gpu_s += self._checks.gpu_s - before_s

    def abandon(self) -> None:
        """Close the bench of a check, if one is open."""
        if self._checks is not None:
            self._checks.abandon()

    def _found(self, proposal: accord.Proposal, finding: accord.Finding) -> None:
        row = self._asked[proposal.id]
        if finding.outcome == "unsure":
            self._tell(row, f"taken back; it could not be measured again yet: {finding.reason}")
            return
        del self._asked[proposal.id]
        if finding.reason == FAULT:
            self._tell(row, f"taken back while this process lives: there was {FAULT} again")
            return
        record, store = proposal.record, self._store
        assert store is not None  # noqa: S101 - there is a bench
        if finding.outcome == "holds":
            another = self._overlay.lookup.rows().get(row.key, {}).get(row.M)
            if another is None and self._overlay.may_serve(record):
                self._overlay.lookup.publish([row])
                self._recapture.adopted(*row)
            words = f"measured again, {100 * finding.gain:.1f} % faster than SGLang's own: serves again"
        else:
            evidence = accord.settled(proposal, {0: finding}).evidence
            demoted = records.demote(store.contents, record, evidence).records.get((record.shape, record.M))
            if demoted is not None and demoted.verdict == "baseline":
                store.submit(record=demoted)
                if self._tuner is not None:
                    self._tuner.learn(demoted)
            words = f"did not hold when it was measured again ({finding.reason}): SGLang's own config serves"
        self._tell(row, words)
        logger.info("MoE autotune: the row of %s M=%d %s.", record.shape.slug, record.M, words)


def _context_of(batch: Any) -> int:
    """Tokens in the caches of a batch's requests. 0.5.11 to 0.5.23 keep their lengths on the host too, and may not
    where drafts are verified; a release that keeps something else there is not to end tuning."""
    total = getattr(getattr(batch, "seq_lens_cpu", None), "sum", None)
    return 0 if total is None else int(total())
