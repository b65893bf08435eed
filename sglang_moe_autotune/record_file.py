"""One file of the store on disk: lock, re-read, merge, temporary file, fsync, replace.

Whoever is killed when, the file holds a whole document, and what was in it before is still in it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import secrets
import stat
import time
from typing import TYPE_CHECKING, NamedTuple

import filelock

from sglang_moe_autotune.document import MAX_BYTES, Unreadable, decode, encode
from sglang_moe_autotune.records import Contents, merge, no_breath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

LOCK_S = 2.0
_ATTEMPTS = 8
_STALE_S = 3600.0
_MAX_ASIDE = 1000


class Snapshot(NamedTuple):
    """What a file held when it was read."""

    text: bytes
    contents: Contents | Unreadable
    identity: tuple[int, int, int]
    """inode, modification time and size"""


class Update(NamedTuple):
    """What came of a write."""

    contents: Contents
    """ours and what others had written, merged"""
    aside: tuple[str, ...] = ()
    """one clause for each broken file that was renamed: its new name, and why"""
    newer: str | None = None
    """why the file was left alone: a newer version writes it"""


class RecordFile:
    """Reads and updates the file at ``path``. One thread at a time; any number of processes."""

    def __init__(self, path: Path, breathe: Callable[[], None] = no_breath) -> None:
        self.path = path
        self._breathe = breathe
        self._last: tuple[bytes, Contents] | None = None
        self._swept = False

    def read(self) -> Snapshot | None:
        """What the file holds, or None where there is none. Raises OSError."""
        try:
            # O_NONBLOCK: a pipe in the file's place must not hang the server
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor, not a path
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file", str(self.path))
            text = file.read(MAX_BYTES + 1)
        if self._last is not None and text == self._last[0]:
            return Snapshot(text, self._last[1], _identity(status))
        contents = decode(text, self._breathe)
        if isinstance(contents, Contents):
            self._last = (text, contents)
        return Snapshot(text, contents, _identity(status))

    def update(self, ours: Contents) -> Update:
        """Merge ours into the file and return both merged. Raises OSError; then the file is as it was."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside: list[str] = []
        written: bytes | None = None
        with _lock(self.path) as locked:
            if not self._swept:
                self._sweep()
            for attempt in range(_ATTEMPTS):
                snapshot = self.read()
                if snapshot is not None and snapshot.text == written:
                    return Update(ours, tuple(aside))
                usable = _usable(snapshot, ours)
                if isinstance(usable, Unreadable) and usable.state == "newer":
                    return Update(ours, tuple(aside), usable.reason)
                if isinstance(usable, Unreadable):
                    moved = self._set_aside(ours)
                    ours = merge(ours, moved) if isinstance(moved, Contents) else ours
                    aside += [moved] if isinstance(moved, str) else []
                    continue
                ours = merge(ours, usable, self._breathe)
                text = encode(ours, self._breathe)
                if text == (encode(usable) if snapshot is None else snapshot.text):
                    return Update(ours, tuple(aside))
                if self._replace(text, snapshot):
                    written, self._last = text, (text, ours)
                if not locked:
                    # another writer that read before our replace may replace after it: look again, and later
                    time.sleep(random.uniform(0.01, 0.03) * (attempt + 1))  # noqa: S311 - only spreads writers
        raise OSError(errno.EBUSY, "other processes keep replacing it", str(self.path))

    def _replace(self, text: bytes, expected: Snapshot | None) -> bool:
        """Put the text in the file's place, unless somebody has replaced what was read."""
        if len(text) > MAX_BYTES:
            raise OSError(errno.EFBIG, f"the records would take {len(text)} bytes", str(self.path))
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open(os.open(temporary, flags, 0o666), "wb") as file:  # noqa: PTH123 - O_EXCL, mode by umask
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            if self._identity() != (None if expected is None else expected.identity):
                temporary.unlink()
                return False
            temporary.replace(self.path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(self.path.parent)
        return True

    def _identity(self) -> tuple[int, int, int] | None:
        try:
            return _identity(self.path.stat())
        except FileNotFoundError:
            return None

    def _set_aside(self, ours: Contents) -> Contents | str | None:
        """Rename a file that cannot be used to a free name, and say why; None where it was gone already.

        Contents where the file was good after all: without a lock, another process may have mended it between
        our reading and our renaming.
        """
        aside = self._take_name()
        try:
            self.path.replace(aside)
        except OSError as error:
            aside.unlink()
            if isinstance(error, FileNotFoundError):
                return None
            raise
        moved = RecordFile(aside, self._breathe).read()
        usable = _usable(moved, ours)
        return f"{aside.name}: {usable.reason}" if isinstance(usable, Unreadable) else usable

    def _take_name(self) -> Path:
        """Create an empty file of the next free name: a rename would silently replace what is there."""
        for n in range(1, _MAX_ASIDE):
            aside = self.path.with_name(f"{self.path.name}.broken-{n}")
            with contextlib.suppress(FileExistsError):
                os.close(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
                return aside
        raise OSError(errno.EEXIST, f"{_MAX_ASIDE - 1} broken files lie beside it", str(self.path))

    def _sweep(self) -> None:
        """Remove temporary files that killed writers left behind an hour ago or more."""
        self._swept = True
        with contextlib.suppress(OSError):
            for path in self.path.parent.glob(f".{self.path.name}.*.tmp"):
                if time.time() - path.stat().st_mtime > _STALE_S:
                    path.unlink()


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_mtime_ns, status.st_size


def _usable(snapshot: Snapshot | None, ours: Contents) -> Contents | Unreadable:
    """What can be merged with ours: nothing yet where there is no file."""
    if snapshot is None:
        return Contents(ours.environment)
    if isinstance(snapshot.contents, Contents) and snapshot.contents.environment != ours.environment:
        return Unreadable("broken", "it holds records of another environment")
    return snapshot.contents


def _sync_folder(folder: Path) -> None:
    """Make the rename last. Some file systems refuse, and nothing better is to be had there."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold the file's lock; False where it is not to be had in time, or locks do not work. Its file stays."""
    lock = filelock.FileLock(path.with_name(f"{path.name}.lock"))
    try:
        lock.acquire(timeout=LOCK_S, poll_interval=0.02)
    except (OSError, NotImplementedError):
        # A deadline, a file system without locks, a lock file of another user: the lock only saves work.
        locked = False
    else:
        locked = True
    try:
        yield locked
    finally:
        if locked:
            with contextlib.suppress(OSError):
                lock.release()
