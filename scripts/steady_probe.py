"""Tuning switched on and off between two steps of a loaded scheduler, for ``serving_probe.py``: blocks of steps, so
short that a host whose speed wanders within seconds is the same host in a block and its neighbour.

On: all that the plugin does beside requests. Off: its hooks find no plugin, and its threads stand still at their next
breath. What SGLang's hook registry puts around a hooked function stays, in both.
"""

from __future__ import annotations

import os
import random
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BLOCK = 16
"""Steps of a block. Shorter ones are more alike, and more of them is dropped: on a host like the H200's, 24 or 32 steps
gave intervals wider by a fifth or two."""
MOST_HELD_S = 1.0
"""for which a thread stands still at a time, whatever happens"""
DROPPED = 4
"""steps after a switch that count for neither side: a result is awaited one step later, and streams see it later"""


def tuning_in(block: int, seed: int) -> bool:
    """Four blocks are on, off, off, on, or the other way round, by a coin for each four: nothing that comes at regular
    times can keep to one side."""
    four, place = divmod(block, 4)
    outer = random.Random(f"{seed} {four}").random() < 0.5  # noqa: S311 - no secret
    return outer if place in (0, 3) else not outer


class Hold:
    """Where threads stand still meanwhile; never the one that serves."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._serving = 0

    def close(self) -> None:
        """By the thread that serves."""
        self._serving = threading.get_ident()
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def wait(self) -> None:
        if not self._open.is_set() and threading.get_ident() != self._serving:
            self._open.wait(MOST_HELD_S)


class Flips:
    """Tells each switch to whoever reads the pipe; says nothing where nobody does, or is behind."""

    def __init__(self, path: Path) -> None:
        try:
            self._pipe: int | None = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            self._pipe = None

    @property
    def heard(self) -> bool:
        return self._pipe is not None

    def tell(self, word: str) -> None:
        if self._pipe is not None:
            try:
                os.write(self._pipe, word.encode() + b"\n")
            except OSError:
                self.close()

    def close(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None


class Alternation:
    """``step`` before each batch; ``end`` from any thread leaves tuning on.

    put: makes it so. hold: opened once the steps after a switch are over, so that what waited there is in what counts.
    """

    def __init__(self, seed: int, put: Callable[[bool], object], hold: Hold, flips: Flips) -> None:
        self.block = -1
        """in which the last batch began; -1: none did yet"""
        self._seed, self._put, self._hold, self._flips = seed, put, hold, flips
        self._steps, self._tuning, self._ended = BLOCK, True, False
        self._lock = threading.Lock()

    def step(self) -> int:
        """The block of the batch that is about to begin; -1 after the end."""
        if self._steps >= BLOCK:
            self._switch()
        elif self._steps == DROPPED and self._tuning:
            self._hold.open()
        self._steps += 1
        return -1 if self._ended else self.block

    def end(self) -> int:
        """The number of blocks, of which the last one is not whole."""
        with self._lock:
            self._ended = True
            self._put(True)
            self._hold.open()
            self._flips.tell("end")
            self._flips.close()
        return self.block + 1

    def _switch(self) -> None:
        with self._lock:
            if self._ended:
                return
            self.block, self._steps = self.block + 1, 0
            self._tuning = tuning_in(self.block, self._seed)
            self._hold.close()
            self._put(self._tuning)
            self._flips.tell(f"{self.block} {'on' if self._tuning else 'off'}")


def put_plugin() -> Callable[[bool], None]:
    """What puts the plugin that there is in the hooks' sight, or out of it. Raises RuntimeError where there is none."""
    from sglang_moe_autotune import plugin  # noqa: PLC0415 - schedulers only

    serving: Any = plugin.serving()

    def put(tuning: bool) -> None:
        serving.steps.pause()  # batches run that it does not see
        if tuning:
            serving._served, serving._idled, serving._rest_until_s = True, False, 0.0
        plugin._serving = serving if tuning else None

    return put
