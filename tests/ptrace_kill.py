"""Kills a writer at every system call of its way in turn, before the call and after it.

A script, because it forks: ``ptrace_kill.py ROOT first|later [N EVERY]`` prints one JSON line. Each round forks a
writer that submits a record and flushes, twice; lets it run to its n-th stop at a system call of any of its threads,
and kills it there. No register is read, so any Linux will do; one where tracing is forbidden is told apart.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import record_values as v

from sglang_moe_autotune.document import decode
from sglang_moe_autotune.record_file import RecordFile
from sglang_moe_autotune.records import Contents
from sglang_moe_autotune.store import Store, file_name

TRACEME, CONT, SYSCALL, SETOPTIONS = 0, 7, 24, 0x4200
TRACESYSGOOD, TRACEFORK, TRACEVFORK, TRACECLONE, EXITKILL = 1, 2, 4, 8, 0x100000
WALL = 0x40000000
NOT_ALLOWED = 77
"""exit code where tracing is forbidden"""
MOST_STOPS = 5000
OURS, SEED, NEXT = (1, 2), (3, 4), 5
"""M that the victim writes; that lay there before, in the round ``later``; that the next writer adds"""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, pid: int, argument: int = 0) -> None:
    if _libc.ptrace(request, pid, None, argument) < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _write_twice(root: Path, pipe: int) -> None:
    """The way under test. Each M goes into the pipe once its writer was told that it is kept."""
    store = Store.open(root, v.H200)
    for m in OURS:
        store.submit(record=v.record(m))
        if store.flush(30):
            os.write(pipe, bytes([m]))


def _start(root: Path) -> tuple[int, int]:
    pipe, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _ptrace(TRACEME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            _write_twice(root, theirs)
            os._exit(0)
        except OSError:
            os._exit(NOT_ALLOWED)
        finally:
            os._exit(1)
    os.close(theirs)
    return pid, pipe


def _run_to(pid: int, stops: int) -> bool:
    """Let the process run to that stop and kill it there; False where it ended before."""
    _, status = os.waitpid(pid, WALL)
    if os.WIFEXITED(status):
        raise PermissionError("this system lets no process trace its child")
    _ptrace(SETOPTIONS, pid, TRACESYSGOOD | TRACEFORK | TRACEVFORK | TRACECLONE | EXITKILL)
    _ptrace(SYSCALL, pid)
    seen = 0
    while True:
        thread, status = os.waitpid(-1, WALL)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            if thread == pid:
                return False
            continue
        stopped_by = os.WSTOPSIG(status)
        passed_on = 0
        if stopped_by == signal.SIGTRAP | 0x80:
            seen += 1
            if seen == stops:
                os.kill(pid, signal.SIGKILL)
                _reap(pid)
                return True
        elif stopped_by not in (signal.SIGTRAP, signal.SIGSTOP):
            passed_on = stopped_by
        try:
            _ptrace(SYSCALL, thread, passed_on)
        except ProcessLookupError:
            continue  # it ended between its stop and our word


def _reap(pid: int) -> None:
    while True:
        thread, status = os.waitpid(-1, WALL)
        if thread == pid and (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
            return


def _m_in(path: Path) -> set[int] | None:
    """The M that a reader finds; None where the file is no whole document."""
    if path.exists() and not isinstance(decode(path.read_bytes()), Contents):
        return None
    contents = RecordFile(path).read()
    return {m for _, m in contents.records} if isinstance(contents, Contents) else set()


def run(root: Path, first: bool, begin: int = 1, every: int = 1) -> dict[str, int]:
    """One round for each stop, each in a folder of its own: an empty one, or one with records of another writer."""
    lost = unparseable = stuck = told = 0
    for n in range(begin, MOST_STOPS, every):
        path = root / str(n) / file_name(v.H200)
        finished = set()
        if not first:
            RecordFile(path).update(v.contents(*map(v.record, SEED)))
            finished.update(SEED)
        pid, pipe = _start(path.parent)
        killed = _run_to(pid, n)
        said = os.read(pipe, len(OURS))
        finished.update(said)
        told += len(said)
        os.close(pipe)
        known = _m_in(path)
        unparseable += known is None
        lost += not finished <= (known or set())
        started = time.monotonic()
        RecordFile(path).update(v.contents(v.record(NEXT)))
        stuck += time.monotonic() - started > 1
        lost += not finished | {NEXT} <= (_m_in(path) or set())
        if not killed:
            return {"stops": n, "told": told, "lost": lost, "unparseable": unparseable, "stuck": stuck}
    raise SystemExit(f"the writer did not end within {MOST_STOPS} stops")


def main(arguments: list[str]) -> int:
    root, state, *stops = Path(arguments[0]), *arguments[1:]
    logging.disable(logging.CRITICAL)
    try:
        found = run(root, state == "first", *map(int, stops))
    except PermissionError as error:
        sys.stderr.write(f"{error}\n")
        return NOT_ALLOWED
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
