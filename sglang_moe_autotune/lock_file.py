"""A lock between processes. It saves work; what a store must not lose never rests on it."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import time
from typing import TYPE_CHECKING

try:
    import fcntl
except ImportError:  # no flock on this system: every caller goes on without
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_HELD_BY_ANOTHER = frozenset({errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK})
_POLL_S = 0.01


@contextlib.contextmanager
def hold(path: Path, timeout_s: float) -> Iterator[bool]:
    """Hold the lock; False where it is not to be had in time, or locks do not work there. Its file stays."""
    descriptor = None
    # No lock service (37), no support (524), a link, a folder, another user's file: go on without.
    with contextlib.suppress(OSError):
        descriptor = _acquire(path, timeout_s)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            _release(descriptor)


def _acquire(path: Path, timeout_s: float) -> int | None:
    if fcntl is None:
        return None
    deadline_s = time.monotonic() + timeout_s
    while True:
        # O_NOFOLLOW: a link in its place may lead out of the store. O_NONBLOCK: a pipe must not hang the server.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
        try:
            if _try(descriptor) and _still_there(path, descriptor):
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if time.monotonic() > deadline_s:
            return None
        time.sleep(random.uniform(0.5, 1.5) * _POLL_S)  # noqa: S311 - only spreads processes


def _try(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD_BY_ANOTHER:
            return False
        raise
    return True


def _still_there(path: Path, descriptor: int) -> bool:
    """A lock on a file that was removed excludes nobody who comes later."""
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _release(descriptor: int) -> None:
    # A child forked meanwhile shares the lock: closing alone would leave it held as long as the child lives.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
