"""A lock between processes. It saves work; what a store must not lose never rests on it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_POLL_S = 0.01


@contextlib.contextmanager
def hold(path: Path, timeout_s: float) -> Iterator[bool]:
    """Hold the lock; False where it is not to be had in time, or locks do not work there. Its file stays."""
    lock = _acquire(path, timeout_s)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            with contextlib.suppress(OSError):
                lock.release()


def _acquire(path: Path, timeout_s: float) -> FileLock | None:
    # A link in its place may lead out of the store, and a pipe or a folder there is no lock.
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return None
    lock = FileLock(path, thread_local=False)
    # No lock service (37), no support (524), another user's file: the caller goes on without.
    with contextlib.suppress(Timeout, OSError, NotImplementedError):
        lock.acquire(timeout=timeout_s, poll_interval=_POLL_S)
        return lock
    return None
