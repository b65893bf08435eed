"""Files that are whole at every moment: read up to a bound, replaced by a rename."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from typing import TYPE_CHECKING

from sglang_moe_autotune.document import MAX_BYTES

if TYPE_CHECKING:
    from pathlib import Path


Identity = tuple[int, int, int]
"""of a file as it is now: another one, or another text, has another"""


def identity(status: os.stat_result) -> Identity:
    return status.st_ino, status.st_mtime_ns, status.st_size


def read(path: Path, *, follow: bool = True) -> tuple[bytes, os.stat_result] | None:
    """The file's text, at most one byte more than ``MAX_BYTES``, and its status; None where there is no file.

    Raises OSError where it is not a regular file, or a link and ``follow`` is False.
    """
    # O_NONBLOCK: a pipe in the file's place must not hang the server
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor, not a path
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if status.st_size > MAX_BYTES:
            return file.read(MAX_BYTES + 1), status
        return file.read(), status


def replace(path: Path, text: bytes) -> os.stat_result:
    """Put the text in the file's place, and return its status. Raises OSError; then the file is as it was."""
    if len(text) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"the records would take {len(text)} bytes", str(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(temporary, flags, 0o666), "wb", buffering=0) as file:  # noqa: PTH123 - O_EXCL, umask
            left = memoryview(text)
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
            status = os.fstat(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)
    return status


def is_temporary(name: str, of: str = "") -> bool:
    """Is it the name of a temporary file (of the file named ``of``)?"""
    return name.startswith(f".{of}") and name.endswith(".tmp")


def _sync_folder(folder: Path) -> None:
    """Make the rename last. Some file systems refuse, and nothing better is to be had there."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
