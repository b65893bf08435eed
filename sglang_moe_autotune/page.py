"""A page of memory that outlives its process: a number that costs one store to set and is there after any kill.

A page is a mapped file. On a disk or a network its store could wait, or be answered with a signal that no fence catches
(SIGBUS, where a block is missing and the disk is full). So there are pages in memory file systems only, where the page
is there once it was written, and none where ``PLACE`` is something else.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
import stat
import sys
import time
from pathlib import Path
from typing import Final

from sglang_moe_autotune import status

PLACE = Path("/dev/shm")  # noqa: S108 - a folder of our own below it, and nobody else's
_MOUNTS: Final = Path("/proc/self/mountinfo")
_NAME: Final = re.compile(r"(\d+)-(\d+)-(\d*)-[0-9a-f]{12}\.page")
_SIZE: Final = 4096
_KEPT_S: Final = 86400.0
"""a page whose process has said nothing for this long, and is gone, is of no use to anybody"""


class Page:
    """This process's own."""

    def __init__(self, path: Path, memory: mmap.mmap) -> None:
        self.name = path.name
        self._path = path
        self._number = memoryview(memory).cast("Q")

    def set(self, number: int) -> None:
        """One store to memory. number: 0 where nothing runs."""
        self._number[0] = number

    def touch(self) -> None:
        """Say that its process lives: after the first one no store does. Never raises OSError."""
        with contextlib.suppress(OSError):
            os.utime(self._path, follow_symlinks=False)


def make() -> Page | None:
    """A page; None where there is no place for one. Never raises OSError. Removes pages of the long dead."""
    with contextlib.suppress(OSError, ValueError):
        if (folder := _folder()) is None:
            return None
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _ours(folder):
            return None
        _sweep(folder)
        own = status.this_process()
        name = f"{own.pid}-{own.start_time}-{_digits(own.pid_namespace)}-{secrets.token_hex(6)}.page"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(folder / name, flags, 0o600)
        try:
            # Not ftruncate: it leaves a hole, and the first store into a hole of a full file system is a SIGBUS.
            if os.write(descriptor, bytes(_SIZE)) == _SIZE:
                return Page(folder / name, mmap.mmap(descriptor, _SIZE))
            (folder / name).unlink()
        except OSError:
            (folder / name).unlink()
        finally:
            os.close(descriptor)
    return None


def read(name: str) -> int | None:
    """What the page of that name says; None where it cannot be read here. name: as a file of somebody else has it."""
    with contextlib.suppress(OSError):
        if _NAME.fullmatch(name) and (folder := _folder()) is not None and _ours(folder):
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(descriptor, "rb", buffering=0) as file:  # noqa: PTH123 - a descriptor, not a path
                text = file.read(8)
            return int.from_bytes(text, sys.byteorder) if len(text) == 8 else None
    return None


def remove(name: str) -> None:
    """Take it away, where it is here. Never raises OSError."""
    with contextlib.suppress(OSError):
        if _NAME.fullmatch(name) and (folder := _folder()) is not None and _ours(folder):
            (folder / name).unlink()


def _folder() -> Path | None:
    """Where pages of this user are; None where ``PLACE`` is no memory file system."""
    kinds = [""]
    for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[4:5] == [str(PLACE)]:
            kinds.append(rest.split()[0])
    return PLACE / f"sglang-moe-autotune-{os.geteuid()}" if kinds[-1] == "tmpfs" else None


def _ours(folder: Path) -> bool:
    """Anybody may have made it, or a link in its place."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _sweep(folder: Path) -> None:
    namespace = _digits(status.this_process().pid_namespace)
    for path in folder.glob("*.page"):
        found = _NAME.fullmatch(path.name)
        if found is None or found[3] != namespace or status.start_time(int(found[1])) == int(found[2]):
            continue  # it lives, or nobody can tell here
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _KEPT_S:
                path.unlink()


def _digits(text: str) -> str:
    return "".join(c for c in text if c.isdecimal())
