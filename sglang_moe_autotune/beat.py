"""The beat: the same requests decode on, step after step. Pure.

Between two steps of a server milliseconds pass, in which all that a hook touches leaves the processor's caches; what
takes 3 us in a loop takes 15 there. So what goes on is told in one short function by one small object, and only
what begins, ends or is full is looked at.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Beat:
    """``goes_on`` before each batch; where it says no, the batch is looked at, and ``begin`` says what may follow it.

    Who decodes is told by SGLang's list of requests, by its identity and its length: up to 0.5.13 a running batch gets
    more requests in the same list, and with HiSparse or PD multiplexing no prefill runs just before that. The list is
    held no longer than its batch decodes on.
    """

    __slots__ = ("_count", "_ended", "_intervals", "_left", "_mode", "_requests", "_steps", "last_s")

    def __init__(self) -> None:
        self.last_s = 0.0
        """when the last batch that is timed began"""
        self._steps = self._left = self._count = 0
        self._requests: Any = None
        self._mode: Any = None
        self._intervals: list[float] | None = None
        self._ended = False

    def begin(self, batch: Any, intervals: list[float] | None, most: int) -> None:
        """This batch has been looked at, and decodes. intervals: where the times between the steps that follow belong;
        None: they are not timed. most: steps that may follow without another look."""
        if not self._ended:
            self._requests, self._mode, self._intervals, self._left = batch.reqs, batch.forward_mode, intervals, most
            self._count = len(batch.reqs)

    def goes_on(self, batch: Any, count: Callable[[Any], int] = len) -> bool:
        """Is it one more step of the batch that ran last? Then it is counted and timed. No function is called that need
        not be: a name of the builtins alone takes half a microsecond to find, so ``len`` comes as a default."""
        if (
            self._left
            and (requests := batch.reqs) is self._requests
            and batch.forward_mode is self._mode
            and count(requests) == self._count
        ):
            self._left -= 1
            self._steps += 1
            if self._intervals is not None:
                now_s = monotonic()
                self._intervals.append(now_s - self.last_s)
                self.last_s = now_s
            return True
        return False

    def pause(self) -> None:
        """Something came between, or what is in effect changed: the next batch is looked at."""
        self._left, self._requests, self._intervals = 0, None, None

    def end(self) -> None:
        """Every batch is looked at from now on: nobody says ``pause`` any more."""
        self._ended = True
        self.pause()

    def take(self) -> int:
        """Steps that went on since a batch was looked at, to be counted as ones like it; they begin anew."""
        steps, self._steps = self._steps, 0
        return steps
