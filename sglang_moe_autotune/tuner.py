"""The tuner: one slice a call, from a miss to a published row. Pure: time and the device come in."""

from __future__ import annotations

import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

import msgspec

from sglang_moe_autotune import consolidation, looks, records, snapshot
from sglang_moe_autotune.agenda import FINISHED_LOOKS, Agenda, Deferral, Entry, Key
from sglang_moe_autotune.bench import Declined
from sglang_moe_autotune.experience import Experience
from sglang_moe_autotune.job import Job, JobOptions
from sglang_moe_autotune.prior import Prior
from sglang_moe_autotune.records import Record, Source
from sglang_moe_autotune.search import SearchOptions
from sglang_moe_autotune.search_space import legal_space, out_of_range, same_launches
from sglang_moe_autotune.tried import Ratios

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from sglang_moe_autotune.bench import Bench, BenchmarkProvider
    from sglang_moe_autotune.outcome import Outcome
    from sglang_moe_autotune.shapes import ConfigPair, KernelConfig, MoeShape
    from sglang_moe_autotune.snapshot import Snapshot
    from sglang_moe_autotune.tried import Tried

Step = Literal["worked", "waiting", "nothing"]
"""A slice was spent; everything wanted is being compiled; nothing to do now."""


class TunerOptions(msgspec.Struct, frozen=True):
    """What the process decides once."""

    min_gain: float = 0.01
    """a row must take this fraction less than the baseline"""
    error_rate: float = 0.005
    """of each of the two paired tests a row passes"""
    slice_us: float = 500.0
    """an M whose launches are longer is stepped in deep idle only"""
    seed: int = 0
    """the order in which equal candidates are tried"""
    retry_s: float = 30.0
    """before a deferred M is tried again; doubles with each time, to an hour at most"""
    max_faults: int = 3
    """exceptions of the bench after which an M is left alone"""
    search: SearchOptions = SearchOptions()
    source: Source = "learned"
    sglang: str = ""
    driver: str = ""


class Tuner:
    """Feed it misses and heat, call ``step`` in idle passes; finished records go to the sink."""

    def __init__(
        self,
        provider: BenchmarkProvider,
        sink: Callable[[Record], object],
        prior: Prior | None = None,
        options: TunerOptions | None = None,
        *,
        shared_memory_bytes: int | None = None,
        space: Callable[[MoeShape], Iterable[KernelConfig]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
        tried: Callable[[MoeShape, int, Sequence[Tried]], object] | None = None,
        agenda: Agenda | None = None,
    ) -> None:
        """tried: told, at the end of each search, what was measured at its M. agenda: for a caller who admits M."""
        self.options = options or TunerOptions()
        self.gpu_s = 0.0
        """device seconds spent, the open bench's included"""
        self._provider, self._sink, self._prior = provider, sink, prior or Prior()
        self._space = space or (lambda shape: legal_space(shape, shared_memory_bytes))
        self._clock, self._unix_clock, self._tell = clock, unix_clock, tried
        self._ratios = Ratios()
        self._agenda = agenda or Agenda(self.options.retry_s)
        self._experience: dict[MoeShape, Experience] = {}
        self._current: Entry | None = None
        self._job: Job | None = None
        self._bench: Bench | None = None
        self._ended: Bench | None = None
        """a bench whose job is over and that is being closed, a step at a time"""
        self._counted_s = 0.0
        self._steps: Iterator[Step] = iter(())

    # -- what to tune ----------------------------------------------------------------------------------------------

    def add(self, shape: MoeShape, M: int, baseline: ConfigPair) -> None:  # noqa: N803
        """Queue an M with SGLang's own answer. Nothing happens where it is queued, settled or failed already,
        or a stored record holds against the same baseline."""
        self._agenda.add(shape, M, baseline)

    def heat(self, shape: MoeShape, M: int, count: int) -> None:  # noqa: N803
        """Count servings of an M: the hottest is tuned first."""
        self._agenda.heat((shape, M), count)

    def learn(self, record: Record) -> None:
        """Take a stored record, or one that another process has just made: its M is not searched again while
        SGLang's answer there is the record's baseline, and its winner races first at other M."""
        key = (record.shape, record.M)
        self._prior.learn(record, here=True)
        if self._agenda.store(record) and self._current is not None and self._current.key == key:
            self.give_way()
        if (experience := self._experience.get(record.shape)) is not None:
            experience.recall(record)

    def settled(self, shape: MoeShape, M: int) -> None:  # noqa: N803
        """Never tune this M, whatever its baseline."""
        if self._current is not None and self._current.key == (shape, M):
            self.give_way()
        self._agenda.close((shape, M))

    @property
    def deferred(self) -> Mapping[Key, Deferral]:
        """What cannot be tuned now, with the reason; it is tried again later."""
        return MappingProxyType(self._agenda.deferred)

    def experience(self, shape: MoeShape) -> Experience:
        """What is known of a shape so far."""
        if shape not in self._experience:
            self._experience[shape] = Experience(self._space(shape))
            for (other, _), record in self._agenda.stored.items():
                if other == shape:
                    self._experience[shape].recall(record)
        return self._experience[shape]

    def gpu_s_per_m(self, shape: MoeShape) -> dict[int, float]:
        """Device seconds spent on each M of a shape."""
        return {m: entry.gpu_s for (other, m), entry in self._agenda.entries.items() if other == shape}

    # -- one slice -------------------------------------------------------------------------------------------------

    def step(self, deep_idle: bool) -> Step:
        """At most one slice. Exceptions of the bench propagate: its job is dropped, and the tuner stays usable."""
        if self._ended is not None:
            self._wind_down(self._ended)
            return "worked"
        if not self._may_go_on(deep_idle):
            return "worked" if self._agenda.asking or self._ended is not None else "nothing"
        entry, clean = self._current, False
        try:
            result = next(self._steps, None)
            clean = True
        except Declined as declined:
            clean, result = True, None
            if entry is not None:
                self._agenda.defer(entry, str(declined), self._clock())
        finally:
            if not clean:
                self._fault()
        if result is None:
            self._end()
            return "worked"
        self._account()
        return result

    def _may_go_on(self, deep_idle: bool) -> bool:
        """Is there a job for this step, after choosing one or giving way where needed?"""
        if self._current is not None and (deep_idle or not self._current.long):
            return True
        now_s = self._clock()
        if self._agenda.resting(now_s, deep_idle=deep_idle):
            return False
        again = self._worth_another_look, self._weigh, self._worth_consolidating
        entry = self._agenda.next_entry(now_s, *again, deep_idle=deep_idle)
        if entry is None:
            return False
        if self._current is not None and not self.give_way():  # it waits for deep idle, which may not come for hours
            return False
        self._current, self._steps = entry, self._run(entry)
        return True

    def abandon(self) -> None:
        """Close the current bench at once; the job starts again later from what was measured."""
        self._close()
        self._agenda.wake()

    def give_way(self) -> bool:
        """``abandon`` in steps, one a call; True where no bench is open any more."""
        if self._ended is not None:
            self._wind_down(self._ended)
        elif self._current is not None:
            self._end()
            self._agenda.wake()
        return self._ended is None

    def snapshot(self) -> Snapshot:
        """For status; costs a sort of the queue."""
        current, job = self._current, self._job  # once: the serving thread goes on meanwhile
        compiled = {shape.slug: len(e.ordered) for shape, e in self._experience.items()}
        return snapshot.take(self._agenda, current, job.phase if job else None, compiled, self.gpu_s)

    # -- jobs ------------------------------------------------------------------------------------------------------

    def _worth_another_look(self, entry: Entry) -> bool:
        return looks.worth_another(entry, self._agenda, self.experience(entry.shape), self.options.search)

    def _weigh(self, entry: Entry) -> bool:
        consolidation.weigh(entry, self.experience(entry.shape), self.options.search.most_winners)
        return False

    def _worth_consolidating(self, entry: Entry) -> bool:
        experience = self.experience(entry.shape)
        return looks.to_give_up(entry, self._agenda, experience, self.options.search) is not None

    def _run(self, entry: Entry) -> Iterator[Step]:
        if reason := out_of_range(entry.shape, entry.M):
            raise Declined(reason)
        second_look, search = entry.state == "settled", self.options.search
        experience = self.experience(entry.shape)
        yield "worked"
        look = looks.plan(entry, self._agenda, experience, search, self.options.min_gain)
        if look is None:
            return
        bench = self._provider.open(entry.shape, entry.M, look.baseline)
        if isinstance(bench, str):
            raise Declined(bench)
        self._bench = bench
        yield "worked"
        job = Job(
            entry.shape,
            entry.M,
            look.baseline,
            bench,
            experience,
            self._prior,
            JobOptions(
                look.bar.min_gain,
                self.options.error_rate,
                look.bar.floor,
                self.options.min_gain,
                search=msgspec.structs.replace(search, seed=self.options.seed, final_s=look.final_s),
            ),
            self._clock,
            allowance=look.allowance,
            quick=entry.looks == 0,
            only=look.only,
            own=entry.baseline,
            shared=self._provider.share.ranks > 1,
        )
        self._job = job
        for progress in job.steps():
            if job.prepared and job.phase == "preparing":
                self._agenda.deferred.pop(entry.key, None)
                if bench.launch_us > self.options.slice_us:
                    self._agenda.note_long(entry)
            yield progress
        entry.looks += look.only is None
        self._account()
        if job.outcome is None:
            return
        found = job.outcome.pair != look.baseline
        entry.firm = look.only is not None and not found
        if second_look and look.allowance:
            entry.barren = 0 if found else entry.barren + 1
        if found or not second_look or entry.looks == FINISHED_LOOKS or entry.firm:
            self._settle(entry, experience, job.outcome)
        if self._tell is not None:
            self._tell(entry.shape, entry.M, self._ratios.tried(entry.key, experience, job.outcome.pair))

    def _settle(self, entry: Entry, experience: Experience, outcome: Outcome) -> None:
        """Hand the record to the sink; only then is the M done, so that a failing sink loses nothing."""
        before = entry.record.evidence if entry.record else None
        evidence = outcome.evidence(entry.earlier_s + entry.gpu_s, before)
        evidence = msgspec.structs.replace(evidence, looks=entry.looks, firm=entry.firm)
        pair = entry.baseline if same_launches(outcome.pair, entry.baseline) else outcome.pair
        if pair == entry.baseline:
            evidence = evidence.without_gain()  # that of a winner which a further look gave up says nothing of it
        record = Record(
            shape=entry.shape,
            M=entry.M,
            verdict="baseline" if pair == entry.baseline else "faster",
            pair=pair,
            baseline=entry.baseline,
            evidence=evidence,
            source=self.options.source,
            sglang=self.options.sglang,
            driver=self.options.driver,
            unix_s=self._unix_clock(),
        )
        record = records.succeeding(record, entry.record or self._agenda.stored.get(entry.key))
        self._sink(record)
        self._prior.learn(record, here=True)
        entry.record, entry.state = record, "settled"
        experience.chosen[entry.M] = pair

    def _account(self) -> None:
        """Bring the device seconds of the open bench onto the tuner's and the entry's account."""
        if self._bench is not None and self._current is not None:
            fresh_s = self._bench.gpu_s - self._counted_s
            self._counted_s += fresh_s
            self._current.gpu_s += fresh_s
            self.gpu_s += fresh_s

    def _end(self) -> None:
        """The job is over; its bench is closed by the next steps."""
        self._account()
        if self._bench is not None:
            self._ended = self._bench
        self._bench = self._current = self._job = None
        self._steps, self._counted_s = iter(()), 0.0

    def _wind_down(self, bench: Bench) -> None:
        done = True
        try:
            done = bench.wind_down()
        finally:
            if done:
                self._ended = None
                bench.close()

    def _close(self) -> None:
        """The job is over, and its bench is closed at once."""
        self._end()
        if self._ended is not None:
            bench, self._ended = self._ended, None
            bench.close()

    def _fault(self) -> None:
        entry = self._current
        self._close()
        if entry is not None:
            entry.faults += 1
            if entry.faults >= self.options.max_faults:
                if entry.record is None:
                    entry.state = "failed"
                entry.looks = self.options.search.looks
                self._agenda.deferred.pop(entry.key, None)
            else:
                self._agenda.defer(entry, f"fault {entry.faults} while it was tuned", self._clock())
