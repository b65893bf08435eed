"""The board of a server: a file for each rank, written by that rank alone, and the table that rank 0 decides.

Readers see the old text or the new one; nobody waits for anybody. All of it lies in one folder of the store, and what
is lost with it is posted again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_moe_autotune import whole_file
from sglang_moe_autotune.breath import Breath
from sglang_moe_autotune.epochs import Table
from sglang_moe_autotune.post import SCHEMA, Post, usable
from sglang_moe_autotune.records import Record
from sglang_moe_autotune.status import presence, this_process
from sglang_moe_autotune.validity import problem

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_TABLE = "table.json"


class _Rows(msgspec.Struct, frozen=True):
    """A table whose rows are read and written one by one: hundreds at once take a millisecond."""

    epoch: int = 0
    rows: tuple[msgspec.Raw, ...] = ()
    since: tuple[int, ...] = ()
    dismissed: tuple[str, ...] = ()


class Board:
    """One rank's view of the board in ``folder``. One thread at a time; costs file access."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self.folder, self.rank, self.ranks = folder, rank, ranks
        self._posts: dict[int, tuple[tuple[int, int, int], Post]] = {}
        self._table: tuple[tuple[int, int, int], Table] | None = None
        self._written: dict[str, tuple[int, int, int]] = {}
        self._breathe = Breath()

    def write(self, post: Post) -> None:
        """Raises OSError."""
        self._write(f"rank-{self.rank}.json", post)

    def write_table(self, table: Table) -> None:
        """Raises OSError."""
        rows = []
        for row in table.rows:
            self._breathe()
            rows.append(msgspec.Raw(msgspec.json.encode(row)))
        self._write(_TABLE, _Rows(table.epoch, tuple(rows), table.since, table.dismissed))

    def lost(self, *, table: bool = False) -> bool:
        """Is what this rank wrote not there any more, or another's?"""
        name = _TABLE if table else f"rank-{self.rank}.json"
        try:
            return _identity((self.folder / name).stat(follow_symlinks=False)) != self._written.get(name)
        except OSError:
            return True

    def posts(self) -> Mapping[int, Post]:
        """What each rank posted last, this one's own included; a rank that posted nothing usable is left out."""
        for rank in range(self.ranks):
            self._breathe()
            known = self._posts.get(rank)
            found = self._read(f"rank-{rank}.json", Post, known[0] if known else None)
            if found is None:
                self._posts.pop(rank, None)
            elif isinstance(found, tuple):
                if found[1].rank == rank and found[1].ranks == self.ranks and found[1].schema <= SCHEMA:
                    self._posts[rank] = found[0], usable(found[1])
                else:
                    self._posts.pop(rank, None)
        return {rank: post for rank, (_, post) in self._posts.items()}

    def table(self) -> Table | None:
        """What rank 0 decided last; None where there is nothing usable."""
        found = self._read(_TABLE, _Rows, self._table[0] if self._table else None)
        if isinstance(found, tuple):
            table = self._spelt_out(found[1])
            self._table = None if table is None else (found[0], table)
        elif found is None:
            self._table = None
        return self._table[1] if self._table else None

    def _spelt_out(self, found: _Rows) -> Table | None:
        """None where one of its rows is not usable."""
        rows: list[Record] = []
        for raw in found.rows:
            self._breathe()
            try:
                rows.append(msgspec.json.decode(raw, type=Record))
            except (ValueError, RecursionError):
                return None
            if problem(rows[-1]) is not None:
                return None
        good = len(rows) == len(found.since)
        return Table(found.epoch, tuple(rows), found.since, found.dismissed) if good else None

    def forget(self) -> None:
        """Read everything again at the next look."""
        self._posts, self._table = {}, None

    def _write(self, name: str, value: Any) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._breathe()
        path = self.folder / name
        temporary = path.with_name(f".{name}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(msgspec.json.encode(value))
            status = temporary.stat()
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        self._written[name] = _identity(status)

    def _read(self, name: str, kind: Any, known: tuple[int, int, int] | None) -> Any:
        """(identity, value), True where it is as ``known``, None where there is none."""
        path = self.folder / name
        try:
            if _identity(path.stat(follow_symlinks=False)) == known:
                return True
            found = whole_file.read(path, follow=False)
            return None if found is None else (_identity(found[1]), msgspec.json.decode(found[0], type=kind))
        except (OSError, ValueError, RecursionError):
            return None  # msgspec's errors are ValueErrors


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_mtime_ns, status.st_size


def sweep(parent: Path, own: str) -> None:
    """Remove the boards of servers of this machine whose ranks have all ended. Never raises."""
    with contextlib.suppress(OSError):
        for folder in parent.iterdir():
            if folder.name != own and not folder.is_symlink() and folder.is_dir() and _is_dead(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_dead(folder: Path) -> bool:
    reader, posts = this_process(), []
    for path in folder.glob("rank-*.json"):
        try:
            posts.append(msgspec.json.decode(path.read_bytes(), type=Post))
        except (OSError, ValueError):
            return False
    return bool(posts) and all(presence(post.owner, 0.0, reader) == "gone" for post in posts)
