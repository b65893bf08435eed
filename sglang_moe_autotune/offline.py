"""An errand run in this process: the tuner and the bench of a server, on made-up weights, with no server around.

``python -m sglang_moe_autotune.offline`` reads an errand from stdin, tells what happens on stdout, and stops at
the end of its stdin, so it ends with whoever started it. What breaks it is on stderr.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_moe_autotune import errand, inspection, records
from sglang_moe_autotune import store as store_module
from sglang_moe_autotune.bench import Declined
from sglang_moe_autotune.errand import Ended, Errand, Item, Learned, Passed, Ready, Step, Told, Verified
from sglang_moe_autotune.fitting import space_of
from sglang_moe_autotune.hindrance import bits_hold
from sglang_moe_autotune.store import Store
from sglang_moe_autotune.tuner import Tuner, TunerOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_moe_autotune.machine import Machine
    from sglang_moe_autotune.records import Record
    from sglang_moe_autotune.shapes import ConfigPair, MoeShape

logger = logging.getLogger("sglang.moe_autotune")

_TELL_EVERY_S = 0.25
_POLL_S = 0.002
_CLOSE_S = 10.0


class Outing:
    """One errand on one machine."""

    def __init__(
        self,
        order: Errand,
        machine: Machine,
        tell: Callable[[Told], object],
        stopped: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.order, self.machine = order, machine
        self._tell, self._stopped, self._clock = tell, stopped, clock
        root = None if order.root is None else Path(order.root)
        self.store = Store.open(root, machine.environment)
        for record in store_module.relatives(root, machine.environment):
            machine.prior.learn(record, here=False)
        self.gpu_s = 0.0
        self._told_s = 0.0
        self._begun_s = clock()

    def run(self) -> Ended:
        """Do the errand; all records are with the store when this returns, also after a stop."""
        self._tell(Ready(self.machine.environment))
        try:
            for place, item in enumerate(self.order.items, 1):
                # A shape that has not begun must not find the time spent by those before it.
                self._item(item, self._end_s(place / len(self.order.items)))
        finally:
            kept = self.store.close(_CLOSE_S)
        ended = Ended("stopped" if self._stopped() else "budget" if self._spent() else "done", self.gpu_s, kept)
        self._tell(ended)
        return ended

    def _end_s(self, share: float = 1.0) -> float:
        return math.inf if self.order.budget_s is None else self._begun_s + share * self.order.budget_s

    def _spent(self) -> bool:
        return self._clock() >= self._end_s()

    def _item(self, item: Item, until_s: float) -> None:
        ms = self._open(item)
        if not ms or self._stopped():
            return
        if reason := self.machine.load(item.shape):
            for M in ms:  # noqa: N806
                self._tell(Passed(item.shape.slug, M, reason))
        elif self.order.work == "tune":
            self._tune(item.shape, ms, until_s)
        else:
            self._verify(item.shape, ms)

    def _open(self, item: Item) -> dict[int, ConfigPair]:
        """The M that there is work for, with SGLang's answer; the others are told."""
        wanted = {}
        for M in item.ms:  # noqa: N806
            stored = self.store.contents.records.get((item.shape, M))
            baseline = self.machine.baseline(item.shape, M)
            if baseline is None:
                self._tell(Passed(item.shape.slug, M, "SGLang's own answer is no pair of plain configs"))
            elif self.order.work == "tune" and stored and self._settles(stored, baseline):
                self._tell(Passed(item.shape.slug, M, f"settled: {stored.verdict}", settled=True))
            elif self.order.work == "verify" and (why := _unverifiable(stored, baseline)):
                self._tell(Passed(item.shape.slug, M, why))
            else:
                wanted[M] = baseline
        return wanted

    def _settles(self, stored: Record, baseline: ConfigPair) -> bool:
        """Is nothing left to search, as a server sees it?"""
        if stored.source == "imported" or not bits_hold(stored, bit_equal=self.order.bit_equal):
            return False
        return stored.source == "pinned" or stored.baseline == baseline

    # -- tune -----------------------------------------------------------------------------------------------------

    def _tune(self, shape: MoeShape, baselines: dict[int, ConfigPair], until_s: float) -> None:
        order, machine = self.order, self.machine

        def learned(record: Record) -> None:
            held = self.store.contents.records.get((record.shape, record.M))
            if held is not None and not bits_hold(held, bit_equal=order.bit_equal):
                record = records.succeeding(record, held)  # or the M would be searched again by every errand
            self.store.submit(record=record)
            self._tell(Learned(record))

        options = TunerOptions(
            min_gain=order.min_gain_percent / 100,
            slice_us=order.slice_us,
            seed=order.seed,
            source=machine.source,
            sglang=machine.sglang,
            driver=machine.driver,
        )
        space = space_of(machine.environment)
        tuner = Tuner(machine.provider, learned, machine.prior, options, space=space, clock=self._clock)
        for record in self.store.contents.records.values():
            if bits_hold(record, bit_equal=order.bit_equal):  # others are searched again
                tuner.learn(record)
        for M, baseline in baselines.items():  # noqa: N806
            tuner.add(shape, M, baseline)
        fault = ""
        while not self._stopped() and self._clock() < until_s:
            try:
                result = tuner.step(deep_idle=True)
            except Exception as error:
                # The tuner has put this M off and leaves it alone after a few times: the others must not pay for it.
                logger.exception("A bench failed.")
                fault = f"{type(error).__name__}: {error}"
                continue
            if result == "nothing":
                break
            if result == "waiting":
                time.sleep(_POLL_S)
            if self._clock() - self._told_s > _TELL_EVERY_S:
                found = tuner.snapshot()
                if found.current is not None:
                    self._step(*found.current, found.phase or "", self.gpu_s + tuner.gpu_s)
        tuner.abandon()
        self.gpu_s += tuner.gpu_s
        found = tuner.snapshot()
        unreached = "stopped before it was done" if self._stopped() else "no time was left for it"
        for slug, M in found.queue:  # noqa: N806
            reason = found.deferred.get((slug, M), unreached)
            self._tell(Passed(slug, M, f"{reason} ({fault})" if reason.startswith("fault") else reason))
        for slug, M in found.failed:  # noqa: N806
            self._tell(Passed(slug, M, f"its bench failed again and again ({fault})"))

    def _step(self, slug: str, M: int, phase: str, gpu_s: float) -> None:  # noqa: N803
        self._told_s = self._clock()
        self._tell(Step(slug, M, phase, gpu_s))

    # -- verify ---------------------------------------------------------------------------------------------------

    def _verify(self, shape: MoeShape, baselines: dict[int, ConfigPair]) -> None:
        for M in baselines:  # noqa: N806
            if self._stopped() or self._spent():
                return
            record = self.store.contents.records[shape, M]
            self._step(shape.slug, M, "verifying", self.gpu_s)
            finding = self._inspect(record)
            if finding is None:
                continue
            stored, (gain, low, high) = record.evidence.gain, finding.estimate
            if finding.outcome in inspection.DEMOTED:
                self._demote(record, finding.evidence)
            self._tell(Verified(shape.slug, M, finding.outcome, finding.reason, stored, gain, low, high))

    def _inspect(self, record: Record) -> inspection.Finding | None:
        bench = self.machine.provider.open(record.shape, record.M, record.baseline)
        if isinstance(bench, str):
            self._tell(Passed(record.shape.slug, record.M, bench))
            return None
        steps = inspection.inspect(bench, record)
        try:
            while not self._stopped():
                if next(steps) == "waiting":
                    time.sleep(_POLL_S)
        except StopIteration as done:
            finding: inspection.Finding = done.value
            return finding
        except Declined as declined:
            self._tell(Passed(record.shape.slug, record.M, str(declined)))
        finally:
            self.gpu_s += bench.gpu_s
            bench.close()
        return None

    def _demote(self, record: Record, evidence: records.Evidence) -> None:
        if self.store.path is not None:
            store_module.change(self.store.path, functools.partial(_demoted, record=record, evidence=evidence))


def _demoted(contents: records.Contents, *, record: Record, evidence: records.Evidence) -> records.Contents:
    return records.demote(contents, record, evidence)


def _unverifiable(stored: Record | None, baseline: ConfigPair) -> str:
    if stored is None:
        return "no row for this GPU, Triton and kernel"
    if stored.verdict != "faster":
        return "SGLang's own answer is served there"
    if stored.source == "pinned":
        return "pinned by the user"
    return "" if stored.baseline == baseline else "SGLang's own answer has changed since: tune it again"


def main() -> int:
    """The process: 0 when the errand ended, whatever it found."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # SGLang and compilers print to stdout, which carries the answers
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    order = errand.decode_errand(sys.stdin.buffer.readline())
    try:
        from sglang_moe_autotune import machine  # noqa: PLC0415 - imports torch, whose prints must not be answers

        found = machine.gpu_machine(order)
    except ImportError as error:
        sys.exit(f"SGLang cannot be imported by {sys.executable} ({error}): run this with the Python of your server")
    stop = threading.Event()

    def watch() -> None:
        sys.stdin.buffer.read()
        stop.set()

    threading.Thread(target=watch, name="moe-autotune-stop", daemon=True).start()
    Outing(order, found, lambda told: answers.write(errand.encode(told)), stop.is_set).run()
    if found.binaries is not None:
        found.binaries.keep()
    return 0


if __name__ == "__main__":
    sys.exit(main())
