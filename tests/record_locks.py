"""File systems whose locks do not do what they should, made by replacing what the lock calls."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Literal

from sglang_moe_autotune import lock_file, record_file

if TYPE_CHECKING:
    from pathlib import Path

Locks = Literal["work", "blind", "ENOLCK", "524", "vanish", "two hosts"]
"""``blind``: flock says yes to everybody. ``ENOLCK``, ``524``: flock fails so. ``vanish``: somebody removes the
lock file all the time. ``two hosts``: locks exclude processes of one host, and nobody on the other."""

_ERRORS = {"ENOLCK": errno.ENOLCK, "524": 524}


def break_locks(locks: Locks, host: int = 0) -> None:
    """Break the locks of this process in this way, for good."""
    if locks == "blind":
        lock_file._try = lambda _: True
    elif locks in _ERRORS:

        def fail(descriptor: int) -> bool:
            raise OSError(_ERRORS[locks], "no locks here")

        lock_file._try = fail
    elif locks == "two hosts":

        def own(self: record_file.RecordFile) -> Path:
            return self.path.with_name(f"{self.path.name}.lock-{host}")

        record_file.RecordFile._lock = property(own)
