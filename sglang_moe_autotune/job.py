"""The job: one (shape, M) from the first slice to a record, as a generator that yields between slices.

Search, then the best pair against the baseline: paired test, outputs compared in every case, a second test with
fresh samples (by other ranks, where there are some), adoption. A pair that is refused makes way for the next one; what
is not clearly faster ends the job with the baseline. Where that is a learned pair, it may have become slow since it
won: a winner over it is taken only if it is faster than SGLang's own config now, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from sglang_moe_autotune.bench import DIRTY, Declined, Sample
from sglang_moe_autotune.decision import Estimate, PairedTest
from sglang_moe_autotune.outcome import NO_GAIN, Outcome
from sglang_moe_autotune.patience import Patience
from sglang_moe_autotune.routings import Sampling
from sglang_moe_autotune.search import Search, SearchOptions
from sglang_moe_autotune.search_space import same_launches
from sglang_moe_autotune.shapes import GEMMS, ConfigPair, KernelConfig, MoeShape

if TYPE_CHECKING:
    from sglang_moe_autotune.bench import Bench, Comparison
    from sglang_moe_autotune.experience import Experience, Trial
    from sglang_moe_autotune.prior import Prior

Progress = Literal["worked", "waiting"]
"""What a step did: a slice of work, or a look at something that is not ready."""

Phase = Literal["preparing", "searching", "deciding", "comparing", "confirming", "proving", "adopting"]

Steps = Generator[Progress, None, None]

_LOOKS: Final = 50
"""at binaries in vain before the first rest: what is there already is launchable some passes later (see ``journal``)"""
_ASK_AFTER: Final = 2
"""measurements without a sample: the launch may have been refused"""
_DIRTY_LIMIT: Final = 200
"""Empty measurements in a row after which a trial counts as not measurable: the job must end some time."""


class JobOptions(msgspec.Struct, frozen=True):
    """How a pair must prove itself."""

    min_gain: float = 0.01
    """of up + down, as a fraction; less is a tie"""
    error_rate: float = 0.005
    """of each of the two tests"""
    floor: float = 0.0
    """what the lower bound of the gain must be above"""
    own_gain: float = 0.01
    """the least gain over SGLang's own config, where the baseline is another"""
    pairs: int = 3
    """tried in turn where outputs disagree or adoption fails"""
    compile_wait_s: float = 600.0
    """of asking, without any binary getting ready; then the job goes on without those it waits for"""
    poll_s: float = 0.02
    """between two looks at binaries that were all being compiled"""
    search: SearchOptions = SearchOptions()


class _Proven(NamedTuple):
    """What a winner gains over SGLang's own config."""

    estimate: Estimate
    own_us: float
    samples: int


class Job:
    """Run ``steps`` to its end, then read ``outcome``. The bench stays the caller's to close."""

    def __init__(
        self,
        shape: MoeShape,
        M: int,  # noqa: N803
        baseline: ConfigPair,
        bench: Bench,
        experience: Experience,
        prior: Prior,
        options: JobOptions,
        clock: Callable[[], float],
        *,
        allowance: int,
        quick: bool = False,
        only: frozenset[KernelConfig] | None = None,
        own: ConfigPair | None = None,
        shared: bool = False,
    ) -> None:
        """allowance, quick, only: as of a ``Search``. own: SGLang's own config, where the baseline is another. shared:
        what it finds is a proposal, which others put to a second test before it is served."""
        self.shape, self.M, self.baseline = shape, M, baseline
        self.phase: Phase = "preparing"
        self.prepared = False
        self.outcome: Outcome | None = None
        self.refused: dict[ConfigPair, str] = {}
        """pairs that were faster and were not taken, with the reason"""
        self._bench, self._experience, self._prior = bench, experience, prior
        self._options, self._clock = options, clock
        self._allowance, self._quick, self._only = allowance, quick, only
        self._own, self._shared = baseline if own is None else own, shared
        self._tried, self._why = False, ""

    def steps(self) -> Steps:
        """One bench call at most between two yields."""
        while not self._bench.prepare():
            yield "worked"
        self.prepared = True
        yield "worked"
        while not self._prior.load_step(self.shape):
            yield "worked"
        search = Search(
            self.shape,
            self.M,
            self.baseline,
            self._experience,
            self._prior,
            self._options.search,
            allowance=self._allowance,
            quick=self._quick,
            only=self._only,
        )
        self.phase = "searching"
        yield from self._race(search)
        if self._tried and not search.measured:
            raise Declined(f"none of its candidates could be measured; {self._why}")
        self.outcome = Outcome(self.baseline, NO_GAIN, search.baseline_us, 0, search.measured)
        for pair, relative in search.ranked(self._options.pairs):
            if pair == self.baseline or relative > 1 - self._options.min_gain:
                break  # a test of what does not even look faster would cost most of all and end in a tie
            if (yield from self._judge(pair, search)):
                break

    # -- measuring -------------------------------------------------------------------------------------------------

    def _race(self, search: Search) -> Steps:
        ready: set[Trial] = set()
        while True:
            wanted = search.ask()
            if search.done:
                yield "worked"
                return
            self._tried = self._tried or bool(wanted)
            if not wanted:
                yield "worked"
            waiting = deque(wanted)
            fruitless, looks, patience = 0, 0, Patience(self._options.compile_wait_s, self._clock)
            while waiting:
                trial = waiting.popleft()
                if not search.count(trial):
                    continue
                if trial not in ready:
                    state = self._bench.readiness(*trial)
                    if state == "waiting":
                        waiting.append(trial)
                        fruitless, looks = fruitless + 1, looks + 1
                        yield "worked"
                        if patience.ended():
                            search.drop(trial)
                            self._why = "their binaries did not come"
                        elif fruitless >= len(waiting) and looks >= _LOOKS:
                            fruitless = 0
                            yield from self._rest()
                        continue
                    fruitless, looks = 0, 0
                    patience.renew()
                    if state == "failed":
                        reason = self._bench.reason(*trial)
                        self._why = self._why or reason
                        search.fail(trial, reason)
                        yield "worked"
                        continue
                    ready.add(trial)
                    yield "worked"
                yield from self._measure(search, trial)

    def _measure(self, search: Search, trial: Trial) -> Steps:
        dirty = 0
        while count := search.count(trial):
            if samples := self._bench.measure(*trial, count):
                search.tell(trial, samples)
                dirty = 0
                yield "worked"
                continue
            dirty += 1
            yield "worked"
            if dirty % _ASK_AFTER:
                continue
            if self._bench.readiness(*trial) == "failed":
                search.fail(trial, self._bench.reason(*trial))  # it could be loaded and not be launched
            elif dirty >= _DIRTY_LIMIT:
                search.drop(trial)
                self._why = "all measurements were dirty"
            yield "worked"

    def _rest(self) -> Steps:
        until_s = self._clock() + self._options.poll_s
        while self._clock() < until_s:
            yield "waiting"

    # -- judging ---------------------------------------------------------------------------------------------------

    def _judge(self, pair: ConfigPair, search: Search) -> Generator[Progress, None, bool]:
        """Put one pair through all tests; True when the job is over with it, False when the next may try."""
        self.phase, measured = "deciding", search.measured
        if not (yield from self._await(pair)):
            self.refused[pair] = "its binaries did not get ready"
            return False
        full = self._bench.sampling
        first = yield from self._test(pair, search, full if self._shared else Sampling(full.per_sample))
        if first.outcome != "faster":
            self._note_tie(first, measured)
            return True
        self.phase = "comparing"
        compared = yield from self._compare(pair)
        if not all(comparison.ok for comparison in compared):
            return False
        last, before = first, 0
        if not self._shared:
            self.phase = "confirming"
            last, before = (yield from self._test(pair, search, full)), first.samples
            if last.outcome != "faster":
                self._note_tie(last, measured)
                return True
        proven = yield from self._prove(pair, last, search)
        if proven is None:
            return True
        self.phase = "adopting"
        patience = Patience(self._options.compile_wait_s, self._clock)
        while (state := self._bench.adopt(pair)) == "waiting" and not patience.ended():
            yield "worked"
            yield from self._rest()
        yield "worked"
        if state == "ready":
            samples = before + proven.samples
            worst = max(compared, key=lambda comparison: comparison.error, default=None)
            runs = sum(comparison.runs for comparison in compared)
            self.outcome = Outcome(pair, proven.estimate, proven.own_us, samples, measured, worst, runs)
        else:
            self.refused[pair] = "serving would have had to compile it"
        return state == "ready"

    def _compare(self, pair: ConfigPair) -> Generator[Progress, None, list[Comparison]]:
        """All cases, up to the first that is not as it should be."""
        compared: list[Comparison] = []
        for case in range(self._bench.compare_cases):
            while (comparison := self._bench.compare(pair, case)) is None:
                yield "worked"
            yield "worked"
            compared.append(comparison)
            if not comparison.ok:
                self.refused[pair] = f"{comparison.reason} (case {case})"
                break
        return compared

    def _await(self, pair: ConfigPair) -> Generator[Progress, None, bool]:
        """Until both can be launched in this bench: another one measured them, where this job was interrupted. False
        where one cannot."""
        patience, ready = Patience(self._options.compile_wait_s, self._clock), True
        for gemm in GEMMS:
            looks = 0
            while (state := self._bench.readiness(gemm, pair.of(gemm))) == "waiting" and not patience.ended():
                looks += 1
                yield "worked"
                if looks >= _LOOKS:
                    yield from self._rest()
            ready = ready and state == "ready"
            yield "worked"
        return ready

    def _test(self, pair: ConfigPair, search: Search, sampling: Sampling) -> Generator[Progress, None, PairedTest]:
        """A paired test from nothing. The first of two on this rank may go by single samples, which take less time:
        what they favour by chance, or for one kind of routing, the second one sees."""
        test = PairedTest(self._options.min_gain, self._options.error_rate, self._options.floor, sampling=sampling)
        yield from self._feed(test, pair, search)
        return test

    def _prove(self, pair: ConfigPair, step: PairedTest, search: Search) -> Generator[Progress, None, _Proven | None]:
        """A winner over a learned pair must be faster than SGLang's own config too, which that pair need not be any
        more: the two are tested beside each other now, and together with the winner's step over the learned pair (its
        second test) it must be the gain of a row. None where it is not, or cannot be found out: the job is over."""
        if self._own == self.baseline or same_launches(pair, self._own):
            return _Proven(step.estimate, step.baseline_us, step.samples)
        self.phase = "proving"
        if not (yield from self._await(self._own)):
            self.refused[pair] = "SGLang's own config could not be launched beside it"
            return None
        gain, low, _ = step.estimate
        needed = 1 - (1 - self._options.own_gain) / (1 - gain)
        test = PairedTest(needed, self._options.error_rate, 1 - 1 / (1 - low), sampling=self._bench.sampling)
        yield from self._feed(test, self._own, search, turned=True)
        if test.outcome != "faster":
            self.outcome = Outcome(self._own, NO_GAIN, test.baseline_us, test.samples, search.measured)
            return None
        both = (1 - (1 - a) * (1 - b) for a, b in zip(test.estimate, step.estimate, strict=True))
        return _Proven(Estimate(*both), test.baseline_us, step.samples + test.samples)

    def _feed(self, test: PairedTest, pair: ConfigPair, search: Search, *, turned: bool = False) -> Steps:
        """Samples until the test has decided, the two GEMMs measured in alternate slices. A GEMM that the pair leaves
        as it is takes as long as it does: it is not launched again, and its noise blurs nothing. turned: test the
        baseline against the pair. Raises Declined."""
        for gemm in GEMMS:
            if gemm not in pair.unlike(self.baseline) and (us := search.reference_us(gemm)):
                test.add(**{gemm: [Sample(us, us)] * test.most})
        dirty = 0
        while test.outcome == "undecided" and dirty < _DIRTY_LIMIT:
            for gemm, count in zip(GEMMS, test.wanted, strict=True):
                if count:
                    samples = self._bench.measure(gemm, pair.of(gemm), count)
                    dirty = 0 if samples else dirty + 1
                    test.add(**{gemm: [Sample(*sample[::-1]) for sample in samples] if turned else samples})
                    yield "worked"
        if test.outcome == "undecided":
            raise Declined(DIRTY)

    def _note_tie(self, test: PairedTest, measured: int) -> None:
        self.outcome = Outcome(self.baseline, NO_GAIN, test.baseline_us, test.samples, measured)
