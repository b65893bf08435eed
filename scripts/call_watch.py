"""Where the time of a call went: computed, queued for a processor, kept up by threads of its own, or waited for more.

The kernel's own accounts of a thread say it. A thread that waits for anything (a lock, a file, another process) gives
up its processor by itself, and the kernel counts that as a voluntary switch. Without one nothing was waited for,
however long the call took: another process had the processor then, or the machine below this one had it. With one,
other threads of the process may have had the interpreter meanwhile, or a thread that the call started was to begin;
their accounts say so. A page that had to come from the disk is counted as well. What none of this explains was waited
for, and a sample of all stacks shows where.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import resource
import signal
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

LONG_MS = 2.0
"""A request may wait for so long; shorter calls are not looked into."""
_SAMPLES_S = 1e-3 * LONG_MS, 0.01
"""the first one, and how often then"""
_LOOK_AT_THREADS_EVERY = 200
_SLACK_MS = 0.5
_STACK_BYTES = 4 << 20
_THREAD = re.compile(r"hread 0x([0-9a-f]+)")
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')
_THREAD_CLOCK = 6
"""of Linux: the clock of a thread, precise also while the thread runs, is number ``~tid << 3 | 6``"""

Frame = tuple[str, str, str]
"""file, line and function"""

Why = Literal["computed", "queued", "stopped", "disk", "own threads", "waited"]
WHYS: tuple[Why, ...] = get_args(Why)


class Long(NamedTuple):
    """A call that took longer than ``LONG_MS``; what its thread did in that time."""

    began_s: float
    """by the machine's monotonic clock, which all processes share"""
    wall_ms: float
    computed_ms: float
    queued_ms: float
    """ready to run, and others had the processors"""
    gave_up: int
    """voluntary switches: how often it went to sleep by itself"""
    from_disk: int
    """pages and blocks that it had to fetch"""
    others_ms: float
    """what the other threads of the process computed, or were queued for, meanwhile"""
    where: str = ""
    """the innermost frames of its thread, in most of the samples; empty where there is none"""
    stacks: str = ""
    """the samples, of all threads"""

    @property
    def slept_ms(self) -> float:
        """Neither computing nor ready to."""
        return max(0.0, self.wall_ms - self.computed_ms - self.queued_ms)

    def why(self, stopped: Iterable[tuple[float, float]] = ()) -> Why:
        """What took most of it. stopped: when the process itself was stopped by a signal, from and to."""
        ended_s = self.began_s + 1e-3 * self.wall_ms
        if any(begin <= ended_s and self.began_s <= end for begin, end in stopped):
            return "stopped"
        if not self.gave_up or self.slept_ms <= _SLACK_MS:
            return "computed" if self.computed_ms >= self.wall_ms / 2 else "queued"
        if self.from_disk:
            return "disk"
        return "own threads" if self.others_ms >= self.slept_ms / 2 else "waited"


class _Account:
    """What the kernel has written down of a thread."""

    def __init__(self, native_id: int) -> None:
        self._clock = ~native_id << 3 | _THREAD_CLOCK
        self._schedstat = os.open(f"/proc/self/task/{native_id}/schedstat", os.O_RDONLY)

    @property
    def queued_ms(self) -> float:
        return 1e-6 * int(os.pread(self._schedstat, 80, 0).split()[1])

    @property
    def spent_ms(self) -> float:
        """Computed or queued for; 0 once the thread has ended."""
        with contextlib.suppress(OSError):
            return 1e3 * time.clock_gettime(self._clock) + self.queued_ms
        return 0.0

    def close(self) -> None:
        os.close(self._schedstat)


class CallWatch:
    """Times calls on the thread that made it; takes SIGALRM and the real-time timer."""

    def __init__(self, samples: Path) -> None:
        """samples: a file for stacks."""
        self.times_ms: list[float] = []
        self.long: list[Long] = []
        self._samples = samples.open("w+b", buffering=0)
        self._own = _Account(threading.get_native_id())
        self._others: dict[int, _Account] = {}
        faulthandler.register(signal.SIGALRM, self._samples, all_threads=True)

    def __call__(self, function: Callable[[], Any]) -> Any:
        """Its result; ``long`` has an account of it if it took long."""
        if len(self.times_ms) % _LOOK_AT_THREADS_EVERY == 0:
            self._look_at_threads()
        before = {native_id: account.spent_ms for native_id, account in self._others.items()}
        queued_ms, usage = self._own.queued_ms, resource.getrusage(resource.RUSAGE_THREAD)
        process_s, own_s = time.process_time(), time.thread_time()
        signal.setitimer(signal.ITIMER_REAL, *_SAMPLES_S)
        began_s = time.monotonic()
        try:
            return function()
        finally:
            wall_ms = 1e3 * (time.monotonic() - began_s)
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            self.times_ms.append(wall_ms)
            if wall_ms > LONG_MS:
                own_s, process_s = time.thread_time() - own_s, time.process_time() - process_s
                after, stacks = resource.getrusage(resource.RUSAGE_THREAD), self._stacks()
                self.long.append(
                    Long(
                        *(began_s, wall_ms, 1e3 * own_s, self._own.queued_ms - queued_ms),
                        after.ru_nvcsw - usage.ru_nvcsw,
                        after.ru_majflt - usage.ru_majflt + after.ru_inblock - usage.ru_inblock,
                        max(self._others_since(before), 1e3 * (process_s - own_s)),
                        where(stacks, threading.get_ident()),
                        stacks,
                    )
                )

    def _others_since(self, before: dict[int, float]) -> float:
        """Threads that began since are counted; of those that ended the process's own clock knows."""
        self._look_at_threads()
        return sum(max(0.0, a.spent_ms - before.get(native_id, 0.0)) for native_id, a in self._others.items())

    def _look_at_threads(self) -> None:
        ids = {i for thread in threading.enumerate() if (i := thread.native_id) is not None}
        ids.discard(threading.get_native_id())
        for gone in self._others.keys() - ids:
            self._others.pop(gone).close()
        for native_id in ids - self._others.keys():
            with contextlib.suppress(OSError):  # it has ended just now
                self._others[native_id] = _Account(native_id)

    def _stacks(self) -> str:
        text = os.pread(self._samples.fileno(), _STACK_BYTES, 0).decode(errors="replace")
        self._samples.seek(0)
        self._samples.truncate()
        return text


def where(stacks: str, ident: int) -> str:
    """The innermost frames of a thread in most of the samples."""
    places = Counter(tuple(frames[:4]) for thread, frames in sampled(stacks) if thread == ident)
    return in_a_line(max(places, key=places.__getitem__, default=()))


def sampled(stacks: str) -> list[tuple[int, list[Frame]]]:
    """The threads in what faulthandler writes, sample by sample: ident, and frames from the innermost on."""
    sections = _THREAD.split(stacks)[1:]  # idents and texts in turn
    return [(int(at, 16), _FRAME.findall(text)) for at, text in zip(sections[::2], sections[1::2], strict=True)]


def in_a_line(frames: Iterable[Frame]) -> str:
    return " < ".join(f"{'/'.join(file.split('/')[-2:])}:{line} {name}" for file, line, name in frames)
