"""A breath: a thread that works beside the one that serves lets it go on, often enough. Pure.

A thread that asks for the interpreter gets it after 5 ms otherwise, or when whoever has it waits for something: then
also a call of the system that takes microseconds is over, and the interpreter taken again, before the other one is
awake. So the parts of a long work have breaths between them, also where it reads files. What one part takes, such as
the text of one entry in one call of C, is the bound on what a request waits for.
"""

from __future__ import annotations

import time
from typing import Final

EVERY_S: Final = 100e-6
LENGTH_S: Final = 500e-6
"""A thread that waits wakes within 50 us; shorter ones, as of ``time.sleep(0)``, are over before it does. But it gives
the interpreter up at each launch, and gets it again behind this one: with breaths as long as a slice, a slice meets a
part or two of a long work and not all of it."""


class Breath:
    """To be called between two parts of a work: gives way where the last time was 0.1 ms ago. One thread at a time."""

    def __init__(self, *, needed: bool = True) -> None:
        self.needed = needed
        """not while nobody is served"""
        self._last_s = 0.0

    def __call__(self) -> None:
        if self.needed and time.perf_counter() - self._last_s > EVERY_S:
            time.sleep(LENGTH_S)
            self._last_s = time.perf_counter()


def no_breath() -> None:
    """For a work that makes nobody wait."""
