"""What the ranks of a server tell each other of their searches: a file each, which only grows.

TOKEN                   of the process that writes
{"shape": ..., ...}     a search a line

It is read from where a reader left off, a little at a time. A search is some 13 kB: written whole after each one, a
long server's file would take every other rank some tens of milliseconds to read, and its serving thread waits for the
interpreter meanwhile.
"""

from __future__ import annotations

import os
import secrets
import stat
from typing import TYPE_CHECKING, Final

import msgspec

from sglang_moe_autotune.breath import Breath
from sglang_moe_autotune.hearsay import Heard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_MOST_BYTES: Final = 128 << 10
"""read of each rank at a time; a line is shorter"""
_TOKEN_BYTES: Final = 8


class Hearing:
    """One rank's ear and mouth, in ``folder``. One thread at a time; costs file access.

    What is lost with a file is not told again: without it a rank tries what another one has found slow.
    """

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        self._folder, self._rank, self._others = folder, rank, [other for other in range(ranks) if other != rank]
        self._begun = False
        self._breathe = Breath()
        self._read: dict[int, tuple[bytes, int]] = {}
        """of each rank the file's token, and how far it was read"""

    def tell(self, heard: Iterable[Heard]) -> None:
        """Append these. Raises OSError."""
        path = self._path(self._rank)
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = []
        for one in heard:
            self._breathe()
            lines.append(msgspec.json.encode(one))
        if not self._begun or not path.exists():
            path.unlink(missing_ok=True)  # of a process before this one
            lines.insert(0, secrets.token_hex(_TOKEN_BYTES).encode())
        # O_NONBLOCK: a pipe in the file's place must not hang the thread that ranks agree by
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        with open(os.open(path, flags, 0o666), "ab", buffering=0) as file:  # noqa: PTH123 - a descriptor, not a path
            file.write(b"\n".join(lines) + b"\n")
        self._begun = True

    def fresh(self) -> list[Heard]:
        """What the others told since the last call, or a part of it: the rest comes with the next ones."""
        return [one for rank in self._others for one in self._fresh(rank)]

    def _fresh(self, rank: int) -> Iterator[Heard]:
        try:
            text = self._more(rank)
        except OSError:
            return
        for line in text.splitlines():
            self._breathe()
            try:
                yield msgspec.json.decode(line, type=Heard)
            except (ValueError, RecursionError):
                continue  # torn by an end in the middle of it; msgspec's errors are ValueErrors

    def _more(self, rank: int) -> bytes:
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path(rank), flags)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return b""
            token = os.pread(descriptor, 2 * _TOKEN_BYTES, 0)
            known, offset = self._read.get(rank, (token, 0))
            if known != token or status.st_size < offset:
                offset = 0
            text = os.pread(descriptor, _MOST_BYTES, offset)
        finally:
            os.close(descriptor)
        whole = text.rfind(b"\n") + 1
        if not whole and len(text) == _MOST_BYTES:
            whole = len(text)  # no line of ours
        self._read[rank] = token, offset + whole
        return text[:whole]

    def _path(self, rank: int) -> Path:
        return self._folder / f"trials-{rank}.jsonl"
