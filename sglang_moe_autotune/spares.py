"""What each writer of a file wrote lately, in a file of the writer's own, beside the shared one.

Where locks exclude nobody, a writer that read the shared file before another one's change can replace it
afterwards, without that change. Nobody else writes a spare, so nothing in it can be lost that way: readers take
the shared file and all spares together, and the next writer writes that. A spare goes once it is an hour old: to
lose a record then, a process would have to stop for that hour between reading and replacing the file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import time
from typing import TYPE_CHECKING

from sglang_moe_autotune import whole_file
from sglang_moe_autotune.breath import no_breath
from sglang_moe_autotune.document import decode, encode
from sglang_moe_autotune.records import Contents, merge

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KEPT_S = 3600.0
_OPEN_S = 900.0
"""how long a spare takes more: one that grew for days would be read by every writer every time"""
_NAME = re.compile(r"[0-9]+-[0-9a-f]{16}\.json")


class Spares:
    """The folder ``NAME.d`` beside the file ``NAME``. One thread at a time."""

    def __init__(self, path: Path, breathe: Callable[[], None] = no_breath) -> None:
        self.folder = path.with_name(f"{path.name}.d")
        self._breathe = breathe
        self._known: dict[str, whole_file.Identity] = {}
        self._together: Contents | None = None
        """all that was ever read here: a spare only grows, and what is gone is in the shared file"""
        self._name = ""
        self._own: Contents | None = None
        self._since_s = 0.0

    def read(self, known: Contents) -> Contents:
        """``known`` and what the spares of its environment hold. What cannot be read is passed over."""
        if self._together is None or self._together.environment != known.environment:
            self._together, self._known = Contents(known.environment), {}
        seen: dict[str, whole_file.Identity] = {}
        for name in self._names():
            self._breathe()
            with contextlib.suppress(OSError):
                seen[name] = self._take(name)
        self._known = seen
        return merge(known, self._together, self._breathe) if seen else known

    def _take(self, name: str) -> whole_file.Identity:
        """Add what a spare holds to what all held so far, unless it is the same as before. Raises OSError."""
        assert self._together is not None  # noqa: S101 - set by the caller
        path = self.folder / name
        identity = whole_file.identity(path.stat(follow_symlinks=False))
        if identity == self._known.get(name) or (found := whole_file.read(path, follow=False)) is None:
            return identity
        contents = decode(found[0], self._breathe)
        if isinstance(contents, Contents) and contents.environment == self._together.environment:
            self._together = merge(self._together, contents, self._breathe)
            return whole_file.identity(found[1])
        raise OSError(errno.EINVAL, "it holds no records of this environment", str(path))

    def add(self, news: Contents) -> None:
        """Keep what this writer is about to write. Raises OSError."""
        now_s = time.monotonic()
        pid = os.getpid()  # a fork must not write into its parent's spare
        if self._own is None or now_s - self._since_s > _OPEN_S or not self._name.startswith(f"{pid}-"):
            self._name, self._own, self._since_s = f"{pid}-{secrets.token_hex(8)}.json", None, now_s
        own = news if self._own is None else merge(self._own, news, self._breathe)
        self.folder.mkdir(exist_ok=True)
        self._check_folder()
        self._breathe()
        status = whole_file.replace(self.folder / self._name, encode(own, self._breathe))
        self._own = own
        self._known[self._name] = whole_file.identity(status)
        self._together = own if self._together is None else merge(self._together, news, self._breathe)

    def sweep(self) -> None:
        """Remove what is an hour older than this writer's spare, by the file system's own clock. To be called
        when the shared file holds all that ``read`` gave."""
        if self._name not in self._known:
            return
        limit_ns = self._known[self._name][1] - int(KEPT_S * 1e9)
        with contextlib.suppress(OSError):
            self._check_folder()
            for name, identity in list(self._known.items()):
                self._breathe()
                if identity[1] < limit_ns:
                    (self.folder / name).unlink()
                    del self._known[name]
            for path in self.folder.glob(".*.tmp"):
                if path.stat(follow_symlinks=False).st_mtime_ns < limit_ns:
                    path.unlink()

    def broken(self) -> list[str]:
        """The names of spares that cannot be read, for people."""
        return [name for name in self._names() if self._is_broken(self.folder / name)]

    def _is_broken(self, path: Path) -> bool:
        try:
            found = whole_file.read(path, follow=False)
        except OSError:
            return True
        return found is not None and not isinstance(decode(found[0]), Contents)

    def _names(self) -> list[str]:
        """Nothing where there is no folder, or none that can be listed: the shared file is all there is then."""
        try:
            self._check_folder()
            return sorted(name for name in os.listdir(self.folder) if _NAME.fullmatch(name))  # noqa: PTH208 - names
        except OSError:
            return []

    def _check_folder(self) -> None:
        """A link may lead out of the store, where files must be neither read nor removed. Raises OSError."""
        if self.folder.is_symlink():
            raise OSError(errno.ELOOP, "it must be a folder, not a link: remove it", str(self.folder))
