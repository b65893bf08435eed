"""One file of the store on disk: lock, re-read, merge, spare, temporary file, fsync, replace.

Whoever is killed when, and whether locks work or not, the file holds a whole document, and it and its spares
together hold all that any writer was told is written.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from typing import TYPE_CHECKING, NamedTuple

from sglang_moe_autotune import lock_file, whole_file
from sglang_moe_autotune.breath import no_breath
from sglang_moe_autotune.document import Unreadable, decode, encode
from sglang_moe_autotune.errors import StoreError
from sglang_moe_autotune.records import Contents, Record, beyond, lifted, merge
from sglang_moe_autotune.spares import Spares
from sglang_moe_autotune.validity import problem

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from sglang_moe_autotune.records import Environment, ShapeNote

LOCK_S = 2.0
_ATTEMPTS = 8
_STALE_S = 3600.0
_MAX_ASIDE = 1000


class Update(NamedTuple):
    """What came of a write."""

    contents: Contents
    """ours and what others had written, merged"""
    aside: tuple[str, ...] = ()
    """one clause for each broken file that was renamed: its new name, and why"""
    newer: str | None = None
    """why the file was left alone: a newer version writes it"""


class _Shared(NamedTuple):
    """What the shared file holds; no text where there is none."""

    text: bytes | None
    contents: Contents


class RecordFile:
    """Reads and updates the file at ``path``. One thread at a time; any number of processes."""

    def __init__(self, path: Path, breathe: Callable[[], None] = no_breath) -> None:
        self.path = path
        self.spares = Spares(path, breathe)
        self._breathe = breathe
        self.taken_in: whole_file.Identity | None = None
        """how the file was when all that it held was last merged and written"""
        self._found: whole_file.Identity | None = None
        self._last: tuple[bytes, Contents] | None = None
        self._swept = False

    def read(self) -> Contents | Unreadable | None:
        """What the file and its spares hold, or None where there is no file. Raises OSError."""
        found = self._read()
        return self.spares.read(found.contents) if isinstance(found, _Shared) else found

    def update(self, ours: Contents, fresh: Collection[Record] = ()) -> Update:
        """Merge ours into the file and return both merged. Raises OSError; then the file is as it was.

        fresh: records of ours that were made since the last update: they come after decisions found in the file.
        A file that cannot be used is set aside first.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside: list[str] = []
        with lock_file.hold(self._lock, LOCK_S):
            self._breathe()
            self._sweep()
            for _ in range(_ATTEMPTS):
                shared = self._read()
                self._breathe()
                if shared is None:
                    shared = _Shared(None, Contents(ours.environment))
                elif isinstance(shared, _Shared) and shared.contents.environment != ours.environment:
                    shared = Unreadable("broken", "it holds records of another environment")
                if isinstance(shared, _Shared):
                    merged = merge(self.spares.read(shared.contents), ours, self._breathe)
                    merged = merge(merged, lifted(merged, fresh), self._breathe)
                    self._write(shared, merged)
                    return Update(merged, tuple(aside))
                if shared.state == "newer":
                    return Update(ours, tuple(aside), shared.reason)
                moved = self._set_aside(ours.environment)
                ours = merge(ours, moved, self._breathe) if isinstance(moved, Contents) else ours
                aside += [moved] if isinstance(moved, str) else []
        raise OSError(errno.EBUSY, "it is broken again and again", str(self.path))

    def change(self, function: Callable[[Contents], Contents], new: Environment | None = None) -> Contents:
        """Write what ``function`` makes of the contents, and return it. Raises OSError, and StoreError where the
        file is missing (and ``new`` does not say what it is to be), cannot be used, or the result makes no sense."""
        if new is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        elif not self.path.exists():
            raise missing(self.path)
        with lock_file.hold(self._lock, LOCK_S):
            shared = self._read()
            if shared is None:
                if new is None:
                    raise missing(self.path)
                shared = _Shared(None, Contents(new))
            if isinstance(shared, Unreadable):
                raise unreadable(self.path, shared)
            before = self.spares.read(shared.contents)
            changed = merge(before, function(before))
            values: list[Record | ShapeNote] = [*changed.records.values(), *changed.notes.values()]
            if reason := next(filter(None, map(problem, values)), None):
                raise StoreError(f"{self.path} is left as it was: {reason}")
            self._write(shared, changed)
            return changed

    @property
    def _lock(self) -> Path:
        return self.path.with_name(f"{self.path.name}.lock")

    def _read(self) -> _Shared | Unreadable | None:
        """The shared file alone."""
        self._found = None
        if (found := whole_file.read(self.path)) is None:
            return None
        text, self._found = found[0], whole_file.identity(found[1])
        if self._last is not None and text == self._last[0]:
            return _Shared(*self._last)
        contents = decode(text, self._breathe)
        if isinstance(contents, Unreadable):
            return contents
        self._last = (text, contents)
        return _Shared(text, contents)

    def _write(self, shared: _Shared, merged: Contents) -> None:
        """Bring the shared file from what it held to ``merged``; the news among it into our spare first."""
        text = encode(merged, self._breathe)
        self._breathe()
        if text == (encode(shared.contents, self._breathe) if shared.text is None else shared.text):
            self.taken_in = self._found
            return
        if (news := beyond(merged, shared.contents, self._breathe)) is not None:
            self.spares.add(news)
            self._breathe()
        self.taken_in = whole_file.identity(whole_file.replace(self.path, text))
        self._last = (text, merged)
        self._breathe()
        self.spares.sweep()
        self._breathe()

    def _set_aside(self, environment: Environment) -> Contents | str | None:
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
        moved = RecordFile(aside, self._breathe)._read()
        if isinstance(moved, Unreadable):
            return f"{aside.name}: {moved.reason}"
        if moved is None or moved.contents.environment == environment:
            return None if moved is None else moved.contents
        return f"{aside.name}: it holds records of another environment"

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
        if self._swept:
            return
        self._swept = True
        with contextlib.suppress(OSError):
            for path in self.path.parent.glob(f".{self.path.name}.*.tmp"):
                if time.time() - path.stat(follow_symlinks=False).st_mtime > _STALE_S:
                    path.unlink()


def missing(path: Path) -> StoreError:
    """A file that a command was to read or change is not there."""
    cure = "check the path; `sglang-moe-autotune status --json` lists the files of a store"
    return StoreError(f"{path} does not exist: {cure}")


def unreadable(path: Path, found: Unreadable) -> StoreError:
    """A file that a command may not touch; the reason of a newer one names the cure."""
    if found.state == "newer":
        return StoreError(f"{path} is newer: {found.reason}")
    what = "is no file of a store, or a broken one, and is left as it is"
    return StoreError(f"{path} {what}: {found.reason}")
