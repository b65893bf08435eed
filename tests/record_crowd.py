"""A crowd of writer processes on one file, killed at random: what was finished, and what a reader finds.

A script, because it forks: ``record_crowd.py ROOT --writers 16 --kills 60 --locks work`` prints one JSON line.
A record counts as finished when its writer was told so (``flush`` returned True) and said so through a pipe.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import random
import select
import signal
import struct
import sys
import time
from pathlib import Path
from typing import NamedTuple, get_args

import record_values as v
from record_locks import Locks, break_locks

from sglang_moe_autotune import spares, whole_file
from sglang_moe_autotune.document import decode
from sglang_moe_autotune.record_file import RecordFile
from sglang_moe_autotune.records import Contents
from sglang_moe_autotune.store import Store, file_name

MS_PER_WRITER = 4
"""few keys, written again and again with more samples: a lost update shows as well as a lost record"""
_REPORT = struct.Struct("<IQ")
_FLUSH_S = 60.0
_DIE_WITH_PARENT = 1


class Outcome(NamedTuple):
    """Figures of one run."""

    writers: int
    kills: int
    locks: str
    finished: int
    """records whose writer was told that they are kept"""
    lost: int
    """of those, not found by a reader at some moment afterwards"""
    unparseable: int
    """moments at which the file was no whole document"""
    checks: int
    """moments looked at"""
    spares: int
    """spares in the folder at the end"""
    seconds: float


class _Writer:
    """One process that writes until it is killed."""

    def __init__(self, root: Path, slot: int, life: int, locks: Locks, pause_s: float) -> None:
        self.slot = slot
        self.pipe, ours = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
                os.close(self.pipe)
                _write_on(root, slot, life, ours, locks, pause_s)
            finally:
                os._exit(3)
        os.close(ours)
        os.set_blocking(self.pipe, False)
        self._rest = b""

    def reports(self) -> list[tuple[int, int]]:
        """What it said since the last call: (M, samples) that are finished."""
        try:
            while chunk := os.read(self.pipe, 1 << 16):
                self._rest += chunk
        except BlockingIOError:
            pass
        whole = len(self._rest) // _REPORT.size * _REPORT.size
        text, self._rest = self._rest[:whole], self._rest[whole:]
        return list(_REPORT.iter_unpack(text))

    def kill(self) -> None:
        """Kill it at once; on a busy machine it takes its time to be gone."""
        os.kill(self.pid, signal.SIGKILL)

    def is_gone(self, *, wait: bool = False) -> bool:
        pid, status = os.waitpid(self.pid, 0 if wait else os.WNOHANG)
        assert pid == 0 or os.WIFSIGNALED(status), f"a writer ended by itself with {status}"
        return pid != 0


def _write_on(root: Path, slot: int, life: int, pipe: int, locks: Locks, pause_s: float) -> None:
    chance = random.Random(f"{slot} {life}")  # noqa: S311 - only when to write
    os.nice(10)  # without locks all of them compute at once: the one that kills must get its turn
    break_locks(locks, host=slot % 2)
    if pause_s:
        replace = whole_file.replace

        def slowly(path: Path, text: bytes) -> os.stat_result:
            time.sleep(chance.uniform(0, pause_s))
            return replace(path, text)

        whole_file.replace = slowly
    store = Store.open(root, v.H200)
    for samples in range(life * 1_000_000 + 1, sys.maxsize):
        ms = [slot * MS_PER_WRITER + 1 + chance.randrange(MS_PER_WRITER) for _ in range(chance.randint(1, 2))]
        for m in ms:
            store.submit(record=v.record(m, samples=samples))
        if store.flush(_FLUSH_S):
            os.write(pipe, b"".join(_REPORT.pack(m, samples) for m in set(ms)))
        time.sleep(chance.uniform(0, 0.01))


class _Reader:
    """Holds what the file must hold, and looks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = RecordFile(path)
        self.finished: dict[int, int] = {}
        self.told = self.checks = self.unparseable = 0
        self.lost: set[tuple[int, int]] = set()

    def take(self, reports: list[tuple[int, int]]) -> None:
        self.told += len(reports)
        for m, samples in reports:
            self.finished[m] = max(samples, self.finished.get(m, 0))

    def buried(self, writer: _Writer, *, wait: bool = False) -> bool:
        """Is it gone? Then its last words are taken in."""
        if not writer.is_gone(wait=wait):
            return False
        self.take(writer.reports())
        os.close(writer.pipe)
        return True

    def look(self, *, anew: bool = True) -> None:
        """``anew``: as a process does that has just started."""
        self.checks += 1
        if anew:
            self._file = RecordFile(self.path)
        expected = dict(self.finished)
        if self.path.exists() and not isinstance(decode(self.path.read_bytes()), Contents):
            self.unparseable += 1
        contents = self._file.read()
        known = contents.records if isinstance(contents, Contents) else {}
        for m, samples in expected.items():
            record = known.get((v.shape(), m))
            if record is None or record.evidence.samples < samples:
                self.lost.add((m, samples))


def run(root: Path, writers: int, kills: int, locks: Locks = "work", pause_s: float = 0.0, seed: int = 0) -> Outcome:
    """Start so many writers, kill one at a time at a random moment and start another in its place."""
    started = time.monotonic()
    chance = random.Random(seed)  # noqa: S311 - only whom to kill, and when
    path = root / file_name(v.H200)
    crowd = [_Writer(root, slot, 0, locks, pause_s) for slot in range(writers)]
    reader = _Reader(path)
    dying: list[_Writer] = []
    for life in range(1, kills + 1):
        until = time.monotonic() + chance.uniform(0, 0.06)
        while (left := until - time.monotonic()) > 0:
            ready, _, _ = select.select([w.pipe for w in crowd], [], [], left)
            for writer in crowd:
                if writer.pipe in ready:
                    reader.take(writer.reports())
            if locks == "vanish":
                path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
        slot = chance.randrange(writers)
        crowd[slot].kill()
        dying.append(crowd[slot])
        crowd[slot] = _Writer(root, slot, life, locks, pause_s)
        dying = [writer for writer in dying if not reader.buried(writer)]
        reader.look(anew=life % 20 == 0)
    for writer in crowd:
        writer.kill()
    for writer in [*dying, *crowd]:
        reader.buried(writer, wait=True)
    reader.look()
    left = len(list(root.glob("*.d/*.json")))
    counts = (reader.told, len(reader.lost), reader.unparseable, reader.checks, left)
    return Outcome(writers, kills, locks, *counts, round(time.monotonic() - started, 1))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--writers", type=int, default=16)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--locks", choices=get_args(Locks), default="work")
    parser.add_argument("--pause-ms", type=float, default=0.0, help="longest wait before each replace")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-spares", action="store_true", help="show that the spares are what saves")
    options = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    if options.no_spares:
        spares.Spares.read = lambda self, known: known
    outcome = run(options.root, options.writers, options.kills, options.locks, options.pause_ms / 1e3, options.seed)
    sys.stdout.write(json.dumps(outcome._asdict()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
