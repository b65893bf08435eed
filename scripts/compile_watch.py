#!/usr/bin/env python3
"""Watches a server's compile processes beside steady load: how many were busy in each block of steps. In blocks without
tuning it stops them, so that what they cost can be told from what the plugin costs.

    compile_watch.py SERVER_PID PIPE OUT

A line of the pipe is a block that begins, ``7 on`` or ``8 off``, or ``end``; OUT has a line for each one that ended:
number, busy processes, seconds of a core. Ends with its parent or by SIGTERM; whatever it stopped goes on then.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

MODULE = b"sglang_moe_autotune.compile_child"
BUSY = 0.05
"""share of a block for which a process ran, from which on it counts as busy"""
_SCAN_S = 0.5
_SILENT_S = 3.0
"""without a word nothing stays stopped"""
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    """One of /proc, at a moment."""

    parent: int
    name: str
    ran_s: float


def read(pid: int) -> Process | None:
    """None where it ended. The scheduler's own count of what it ran, which is finer, where there is one."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    try:
        ran_s = int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        ran_s = (int(fields[11]) + int(fields[12])) * _TICK_S
    return Process(int(fields[1]), name, ran_s)


def compiling(server: int) -> set[int]:
    """The compile process below this one, and all that it started."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (process := read(int(entry.name))) is not None:
            children.setdefault(process.parent, []).append(int(entry.name))
    return _below([pid for pid in _below([server], children) if _is_compile(pid)], children)


def _below(roots: list[int], children: dict[int, list[int]]) -> set[int]:
    found, left = set(roots), list(roots)
    while left:
        fresh = [pid for pid in children.get(left.pop(), ()) if pid not in found]
        found.update(fresh)
        left += fresh
    return found


def _is_compile(pid: int) -> bool:
    try:
        return MODULE in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


class Watch:
    """Counts, stops and continues; ``word`` for each line of the pipe."""

    def __init__(self, server: int) -> None:
        self.server = server
        self._pids: set[int] = set()
        self._stopped: set[int] = set()
        self._before: dict[int, float] = {}
        self._block: int | None = None
        self._begun_s = 0.0

    def scan(self) -> None:
        """Look for new ones: what began to run since then is not stopped yet."""
        self._pids = compiling(self.server)

    def word(self, text: str, now_s: float) -> str | None:
        """Ends the block before; what there is to write of it."""
        ended = self._end(now_s)
        number, _, state = text.partition(" ")
        if state == "off":
            self._send(self._pids, signal.SIGSTOP)
            self._stopped |= self._pids
        else:
            self.go_on()
        self._block = int(number) if state else None
        self._before = {pid: found.ran_s for pid in self._pids if (found := read(pid)) is not None}
        self._begun_s = now_s
        return ended

    def skip(self) -> None:
        """Say nothing of the block that there is."""
        self._block = None

    def go_on(self) -> None:
        self._send(self._stopped, signal.SIGCONT)
        self._stopped.clear()

    def _end(self, now_s: float) -> str | None:
        if self._block is None:
            return None
        after = {pid: found.ran_s for pid in self._pids if (found := read(pid)) is not None}
        ran_s = [after[pid] - self._before.get(pid, after[pid]) for pid in after]
        busy = sum(ran >= BUSY * (now_s - self._begun_s) for ran in ran_s)
        return f"{self._block} {busy} {sum(ran_s):.6f}"

    @staticmethod
    def _send(pids: set[int], number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def main() -> None:
    server, pipe, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    watch, parent = Watch(server), os.getppid()
    descriptor = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)  # for writing too: otherwise it ends with its first writer
    text, scanned_s, heard_s = b"", 0.0, time.monotonic()
    try:
        with Path(out).open("a", buffering=1) as file:
            while os.getppid() == parent:
                if select.select([descriptor], [], [], 0.05)[0]:
                    *lines, text = (text + os.read(descriptor, 4096)).split(b"\n")
                    heard_s = time.monotonic()
                    if len(lines) > 1:  # it is behind: of these blocks nothing is known
                        watch.skip()
                    if lines and (ended := watch.word(lines[-1].decode(), heard_s)) is not None:
                        file.write(ended + "\n")
                now_s = time.monotonic()
                if now_s > heard_s + _SILENT_S:
                    watch.go_on()
                if now_s > scanned_s + _SCAN_S:
                    watch.scan()
                    scanned_s = time.monotonic()
    finally:
        watch.go_on()


if __name__ == "__main__":
    main()
