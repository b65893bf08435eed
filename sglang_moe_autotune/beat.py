"""The beat: the same requests decode on, step after step. Pure.

Between two steps of a server milliseconds pass, in which all that a hook touches leaves the processor's caches; what
takes 3 us in a loop takes 15 there. So what goes on is told in one short function by one small object, and only
what begins, ends or is full is looked at.
"""

from __future__ import annotations

import time
from typing import Any


class Beat:
    """``goes_on`` before each batch; where it says no, the batch is looked at, and ``begin`` says what may follow it.

    Who decodes is told by the identity of SGLang's list of requests and by its length, and the list is not held:
    others come into a batch by a prefill only, which is looked at.
    """

    __slots__ = ("_left", "_length", "_mode", "_requests", "intervals", "last_s", "steps")

    def __init__(self) -> None:
        self.steps = 0
        """that went on since a batch was looked at, to be counted as ones like it"""
        self.last_s = 0.0
        """when the last batch that is timed began"""
        self.intervals: list[float] | None = None
        """where the times between these steps belong; None: they are not timed"""
        self._requests = self._length = self._left = 0
        self._mode: Any = None

    def begin(self, batch: Any, intervals: list[float] | None, most: int) -> None:
        """This batch has been looked at, and decodes. most: steps that may follow it without another look."""
        self._requests, self._length, self._mode = id(batch.reqs), len(batch.reqs), batch.forward_mode
        self.intervals, self._left = intervals, most

    def goes_on(self, batch: Any) -> bool:
        """Is it one more step of the batch that ran last? Then it is counted and timed."""
        if not self._left:
            return False
        requests = batch.reqs
        if id(requests) != self._requests or batch.forward_mode is not self._mode or len(requests) != self._length:
            return False
        self._left -= 1
        self.steps += 1
        if self.intervals is not None:
            now_s = time.monotonic()
            self.intervals.append(now_s - self.last_s)
            self.last_s = now_s
        return True

    def pause(self) -> None:
        """Something came between, or what is in effect changed: the next batch is looked at."""
        self._left = 0

    def take(self) -> int:
        """``steps``, which begin anew."""
        steps, self.steps = self.steps, 0
        return steps
