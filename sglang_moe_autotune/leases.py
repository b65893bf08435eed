"""Leases: which process works on which (shape, M), so that those that share a folder do not repeat each other's work.

A lease is a file that was created atomically, and nothing that must hold rests on it: where two processes take the
same one after all, their records merge. The owner touches its leases; whoever sees one unchanged for ``EXPIRY_S``
by its own steady clock takes it over, so no two clocks are compared. A dead process of this machine is seen at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import time
from typing import TYPE_CHECKING

import msgspec

from sglang_moe_autotune import whole_file
from sglang_moe_autotune.breath import Breath
from sglang_moe_autotune.status import Owner, presence

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sglang_moe_autotune.shapes import MoeShape

EXPIRY_S = 60.0
TOUCH_S = 10.0
_MAX_BYTES = 4096


class _Holder(msgspec.Struct, frozen=True):
    pid: int
    boot_id: str
    start_time: int
    host: str
    pid_namespace: str
    mark: str = ""
    """tells two holders in one process apart"""


_Identity = tuple[int, int]


class Leases:
    """The leases in one folder. One thread at a time; costs file access, so never on the serving thread."""

    def __init__(self, folder: Path, owner: Owner, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self.held: set[tuple[MoeShape, int]] = set()
        self._owner, self._clock = owner, clock
        self._text = msgspec.json.encode(_Holder(*owner, mark=secrets.token_hex(8)))
        self._seen: dict[str, tuple[_Identity, float]] = {}
        """of others' leases: how the file was, and since when by our clock"""
        self._touched_s = clock()
        self._breathe = Breath()

    def take(self, key: tuple[MoeShape, int]) -> bool:
        """Is it ours now? False while another process that lives holds it. Raises OSError."""
        if key in self.held:
            return True
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / name_of(key)
        if self._create(path) or (self._abandoned(path) and self._remove(path) and self._create(path)):
            self.held.add(key)
            self._seen.pop(path.name, None)
            return True
        return False

    def release(self, key: tuple[MoeShape, int]) -> None:
        """Give it back, if it is still ours. Never raises: an expired lease is as good as a released one."""
        self.held.discard(key)
        path = self.folder / name_of(key)
        with contextlib.suppress(OSError):
            if self._is_ours(path):
                path.unlink()

    def touch(self) -> None:
        """Say that this process lives, every ``TOUCH_S``; what was taken from it, or is lost, is not held any more."""
        now_s = self._clock()
        if now_s - self._touched_s < TOUCH_S:
            return
        self._touched_s = now_s
        for key in list(self.held):
            self._breathe()
            path = self.folder / name_of(key)
            with contextlib.suppress(OSError):
                if self._is_ours(path):
                    os.utime(path, follow_symlinks=False)
                    continue
            self.held.discard(key)

    def _create(self, path: Path) -> bool:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileExistsError:
            return False
        with open(descriptor, "wb", buffering=0) as file:  # noqa: PTH123 - a descriptor, not a path
            file.write(self._text)
        return True

    def _abandoned(self, path: Path) -> bool:
        """Is the owner dead, or has the file been as it is for too long, as we saw it ourselves?"""
        try:
            found = whole_file.read(path, follow=False)
        except OSError:
            return False
        if found is None:
            return True
        text, status = found
        identity, now_s = (status.st_ino, status.st_mtime_ns), self._clock()
        known, since_s = self._seen.setdefault(path.name, (identity, now_s))
        if known != identity:
            self._seen[path.name] = (identity, now_s)
            return False
        try:
            holder = msgspec.json.decode(text[:_MAX_BYTES], type=_Holder)
        except msgspec.DecodeError:
            return now_s - since_s > EXPIRY_S  # it is being written, or broken
        owner = Owner(holder.pid, holder.boot_id, holder.start_time, holder.host, holder.pid_namespace)
        # Its age plays no part here: the clock of another machine may be off by hours.
        return presence(owner, 0.0, self._owner) == "gone" or now_s - since_s > EXPIRY_S

    def _remove(self, path: Path) -> bool:
        """Take an abandoned lease away. Of several that try, one rename succeeds; one that hits a lease which
        another has just taken over puts it back."""
        seen = self._seen.get(path.name)
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.gone")
        try:
            path.rename(aside)
        except FileNotFoundError:
            return True
        status = aside.stat(follow_symlinks=False)
        if seen is not None and (status.st_ino, status.st_mtime_ns) != seen[0]:
            with contextlib.suppress(FileExistsError):
                os.link(aside, path, follow_symlinks=False)
            aside.unlink()
            return False
        aside.unlink()
        return True

    def _is_ours(self, path: Path) -> bool:
        found = whole_file.read(path, follow=False)
        return found is not None and found[0] == self._text


def name_of(key: tuple[MoeShape, int]) -> str:
    """A file name for people that is the key's own by its hash."""
    shape, M = key  # noqa: N806
    digest = hashlib.sha256(msgspec.json.encode((shape, M))).hexdigest()[:12]
    return f"{shape.slug[:80]}-M{M}-{digest}.lease"
