"""File systems whose locks do not do what they should, made by replacing what the lock calls."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Literal

import filelock

from sglang_moe_autotune import lock_file, record_file

if TYPE_CHECKING:
    from pathlib import Path

Locks = Literal["work", "blind", "ENOLCK", "524", "vanish", "two hosts"]
"""``blind``: flock says yes to everybody. ``ENOLCK``, ``524``: flock fails so. ``vanish``: somebody removes the
lock file all the time. ``two hosts``: locks exclude processes of one host, and nobody on the other."""

_ERRORS = {"ENOLCK": errno.ENOLCK, "524": 524}


class Blind(filelock.FileLock):
    """A lock that everybody gets."""

    def _acquire(self) -> None:
        self._context.lock_file_fd = os.open(os.devnull, os.O_RDONLY)

    def _release(self) -> None:
        descriptor, self._context.lock_file_fd = self._context.lock_file_fd, None
        os.close(descriptor)


def break_locks(locks: Locks, host: int = 0) -> None:
    """Break the locks of this process in this way, for good."""
    if locks == "blind":
        lock_file.FileLock = Blind
    elif locks in _ERRORS:

        class Refused(filelock.FileLock):
            def _acquire(self) -> None:
                raise OSError(_ERRORS[locks], "no locks here")

        lock_file.FileLock = Refused
    elif locks == "two hosts":

        def own(self: record_file.RecordFile) -> Path:
            return self.path.with_name(f"{self.path.name}.lock-{host}")

        record_file.RecordFile._lock = property(own)
