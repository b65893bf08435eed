"""Checks: what another rank proposes is measured on this one, a slice a call. Pure: the device comes in."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Literal

from sglang_moe_autotune.accord import Finding, Proposal
from sglang_moe_autotune.bench import Declined
from sglang_moe_autotune.inspection import inspect
from sglang_moe_autotune.patience import Patience

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from sglang_moe_autotune import inspection
    from sglang_moe_autotune.bench import Bench, BenchmarkProvider, Readiness
    from sglang_moe_autotune.records import Record

Step = Literal["worked", "waiting", "nothing"]

FAULT: Final = "a fault while it was measured"
"""the reason of a proposal that was refused for an exception of the bench, which says nothing of the row"""
_WAIT_S = 5.0
"""of asking, without the binary getting ready; then the proposal is put off"""
_RETRY_S = 5.0
_LONGEST_RETRY_S = 600.0
_REST_S = 0.02


class _Task:
    __slots__ = ("long", "proposal", "retry_s", "times")

    def __init__(self, proposal: Proposal) -> None:
        self.proposal = proposal
        self.retry_s = 0.0
        self.times = 0
        self.long = False


class Checks:
    """Hand it proposals, call ``step`` while no other bench is open, and get a finding for each."""

    def __init__(
        self,
        provider: BenchmarkProvider,
        tell: Callable[[Proposal, Finding], object],
        clock: Callable[[], float],
        slice_us: float,
    ) -> None:
        """tell: called with each finding; one that is ``unsure`` is followed by another."""
        self.gpu_s = 0.0
        self._provider, self._tell, self._clock, self._slice_us = provider, tell, clock, slice_us
        self._tasks: deque[_Task] = deque()
        self._current: _Task | None = None
        self._bench: Bench | None = None
        self._counted_s = 0.0
        self._steps: Generator[Step, None, Finding] | None = None

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, proposal: Proposal) -> None:
        """Nothing happens where it is waiting already."""
        if all(task.proposal.id != proposal.id for task in self._tasks):
            self._tasks.append(_Task(proposal))

    def keep(self, ids: frozenset[str]) -> None:
        """Drop what is not asked for any more."""
        if any(task.proposal.id not in ids for task in self._tasks):
            if self._current is not None and self._current.proposal.id not in ids:
                self._close()
            self._tasks = deque(task for task in self._tasks if task.proposal.id in ids)

    @property
    def busy(self) -> bool:
        """Is one begun?"""
        return self._current is not None

    def ready(self, *, deep_idle: bool) -> bool:
        """Is there something to measure now?"""
        return self._current is not None or self._next(deep_idle=deep_idle) is not None

    def step(self, *, deep_idle: bool) -> Step:
        """At most one slice. Exceptions of the bench propagate: the proposal is refused, as a fault of this rank."""
        if self._current is None:
            self._current = self._next(deep_idle=deep_idle)
            if self._current is None:
                return "nothing"
            self._steps = self._check(self._current.proposal)
        elif self._current.long and not deep_idle:
            self._close()
            return "nothing"
        task = self._current
        assert self._steps is not None  # noqa: S101 - set with the task
        clean = False
        try:
            step = next(self._steps)
            clean = True
        except StopIteration as done:
            clean = True
            self._end(task, done.value)
            return "worked"
        except Declined as declined:
            clean = True
            self._put_off(task, str(declined))
            return "worked"
        finally:
            if not clean:
                self._end(task, Finding(task.proposal.id, "refused", reason=FAULT))
        self._account()
        return step

    def abandon(self) -> None:
        """Close the bench at once; its proposal is measured from nothing later."""
        self._close()

    def _next(self, *, deep_idle: bool) -> _Task | None:
        now_s = self._clock()
        return next((t for t in self._tasks if t.retry_s <= now_s and (deep_idle or not t.long)), None)

    def _check(self, proposal: Proposal) -> Generator[Step, None, Finding]:
        record = proposal.record
        opened = self._provider.open(record.shape, record.M, proposal.against)
        if isinstance(opened, str):
            raise Declined(opened)
        self._bench = bench = opened
        yield "worked"
        steps, patience = inspect(bench, record), Patience(_WAIT_S, self._clock)
        noted = False
        while True:
            try:
                progress = next(steps)
            except StopIteration as done:
                found = done.value
                break
            if progress == "waiting":
                if patience.ended():
                    raise Declined("its binary is not ready")
                yield from self._rest()
                continue
            patience.renew()
            if not noted and bench.launch_us > self._slice_us and self._current is not None:
                noted = self._current.long = True  # from here on in deep idle only
            yield "worked"
        state = (yield from self._adopt(bench, record)) if found.outcome == "holds" else "ready"
        while not bench.wind_down():
            yield "worked"
        return _finding(proposal, found, state)

    def _adopt(self, bench: Bench, record: Record) -> Generator[Step, None, Readiness]:
        patience = Patience(_WAIT_S, self._clock)
        while (state := bench.adopt(record.pair)) == "waiting" and not patience.ended():
            yield from self._rest()
        yield "worked"
        return state

    def _rest(self) -> Generator[Step, None, None]:
        until_s = self._clock() + _REST_S
        yield "waiting"
        while self._clock() < until_s:
            yield "waiting"

    def _end(self, task: _Task, finding: Finding) -> None:
        self._close()
        self._tasks.remove(task)
        self._tell(task.proposal, finding)

    def _put_off(self, task: _Task, reason: str) -> None:
        self._close()
        task.times += 1
        task.retry_s = self._clock() + min(_LONGEST_RETRY_S, _RETRY_S * 2.0 ** (task.times - 1))
        self._tasks.remove(task)
        self._tasks.append(task)
        self._tell(task.proposal, Finding(task.proposal.id, "unsure", reason=reason))

    def _account(self) -> None:
        if self._bench is not None:
            self.gpu_s += self._bench.gpu_s - self._counted_s
            self._counted_s = self._bench.gpu_s

    def _close(self) -> None:
        self._account()
        bench, self._bench, self._current, self._steps = self._bench, None, None, None
        self._counted_s = 0.0
        if bench is not None:
            bench.close()


def _finding(proposal: Proposal, found: inspection.Finding, state: Readiness) -> Finding:
    """For the one who proposes it. Raises Declined where nothing can be said now."""
    if found.outcome == "unsure":
        raise Declined(found.reason)
    if found.outcome != "holds":
        return Finding(proposal.id, "refused", samples=found.evidence.samples, reason=found.reason)
    if state == "waiting":
        raise Declined("its binary is not ready")
    if state != "ready":
        return Finding(proposal.id, "refused", reason="serving would have had to compile it")
    evidence = found.evidence
    return Finding(
        proposal.id, "holds", evidence.gain, evidence.gain_low, evidence.gain_high, evidence.samples, "",
        evidence.max_error, evidence.tolerance, evidence.runs,
    )  # fmt: skip
