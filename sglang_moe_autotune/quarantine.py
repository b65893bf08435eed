"""Candidates that killed a server or held it up: a journal of first launches, and what was found in it.

Before the first launch of a binary a line goes to the journal of this process, and another one after it. A plain
write is enough: what a process has written outlives the process, whatever kills it. A journal whose last line tells
of a launch that never came back, and whose writer is dead, names the culprit; the next start keeps it from ever
being tried again, in a file of its own, until a person takes that away. Without a folder: in memory only.

    quarantine/PID-START-MARK.journal    lines of JSON: who writes, launches begun, launches ended
    quarantine/HASH.json                 one candidate that is held, and why
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import time
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from sglang_moe_autotune import status, whole_file
from sglang_moe_autotune.shapes import Gemm, KernelConfig, MoeShape  # noqa: TC001 - msgspec reads them when it runs

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger("sglang.moe_autotune")

FOLDER: Final = "quarantine"
HANGS_S: Final = 60.0
"""a launch that has not come back for this long never does"""
_JOURNAL_BYTES: Final = 64 << 10
_MAX_FILES: Final = 4096
"""of either kind that are read: more is damage, and a start must not take long"""
_UNTOUCHED_S: Final = 86400.0
"""after which the journal of a process elsewhere is cleared away; if it lives, it begins another one"""
_HANGS: Final = "its first launch does not come back"
_CRASHED: Final = "a process ended in the middle of its first launch"


class Candidate(msgspec.Struct, frozen=True):
    """One config of one GEMM of a shape, in the environment of that name."""

    environment: str
    shape: MoeShape
    gemm: Gemm
    config: KernelConfig

    def __str__(self) -> str:
        return f"{self.shape.slug} {self.gemm} {self.config}"


class Held(msgspec.Struct, frozen=True):
    """The content of one file: a candidate that is never tried."""

    candidate: Candidate
    reason: str
    M: int
    """of the launch"""
    unix_s: float
    """when it was made"""


class _Writer(msgspec.Struct, frozen=True, tag="writer"):
    owner: status.Owner


class _Begun(msgspec.Struct, frozen=True, tag="begun"):
    candidate: Candidate
    M: int
    unix_s: float


class _Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The launch of the line before came back."""


_Line = _Writer | _Begun | _Ended


class Journal(NamedTuple):
    """What a journal says: who wrote it, and the launch that had not come back at its end."""

    owner: status.Owner | None
    open: _Begun | None


def parse(text: bytes) -> Journal:
    """A line that is damaged, or torn by the end of its writer, says nothing."""
    owner: status.Owner | None = None
    begun: _Begun | None = None
    for part in text.split(b"\n")[:-1]:
        try:
            line = msgspec.json.decode(part, type=_Line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(line, _Writer):
            owner = line.owner
        else:
            begun = line if isinstance(line, _Begun) else None
    return Journal(owner, begun)


class Quarantine:
    """What may not be tried in this process, and its journal. One thread; no method raises or waits for a disk.

    ``read_only``: nothing is written, and no journal of the dead is cleared away.
    """

    def __init__(self, root: Path | None = None, environment: str = "", *, read_only: bool = False) -> None:
        self._folder = None if root is None else root / FOLDER
        self._environment = environment
        self._read_only = read_only
        self._held: dict[Candidate, Held] = {}
        self._journal: int | None = None
        self._bytes = 0
        self._header = b""
        self._open = False
        if self._folder is not None:
            self._take_in(self._folder)

    @property
    def held(self) -> tuple[Held, ...]:
        """What is never tried in this environment, in the order of finding."""
        return tuple(self._held.values())

    def reason(self, shape: MoeShape, gemm: Gemm, config: KernelConfig) -> str:
        """Why this must not be launched; "" where it may."""
        found = self._held.get(Candidate(self._environment, shape, gemm, config))
        return "" if found is None else f"in quarantine: {found.reason} (M={found.M})"

    def begin(self, shape: MoeShape, M: int, gemm: Gemm, config: KernelConfig) -> None:  # noqa: N803
        """Note that a first launch is about to be made; some microseconds."""
        self._open = True
        self._write(_Begun(Candidate(self._environment, shape, gemm, config), M, time.time()))

    def end(self) -> None:
        """Note that it came back: the stream was waited for. Nothing where none was begun."""
        if self._open:
            self._open = False
            self._write(_Ended())

    def hold(self, shape: MoeShape, M: int, gemm: Gemm, config: KernelConfig, reason: str) -> None:  # noqa: N803
        """Never try this again, here or after a restart."""
        self._hold(Held(Candidate(self._environment, shape, gemm, config), reason, M, time.time()))

    # -- the disk --------------------------------------------------------------------------------------------------

    def _take_in(self, folder: Path) -> None:
        """Read what is held, and what the journals of other processes tell."""
        for one in read(folder).held:
            if one.candidate.environment == self._environment:
                self._held[one.candidate] = one
        if self._held:
            logger.info("MoE autotune: candidates in quarantine, never tried: %d.", len(self._held))
        reader, now_s = status.this_process(), time.time()
        for path, journal in _journals(folder):
            if journal.owner is None or journal.owner == reader:
                continue
            fate = _fate(journal.owner, reader)
            kept = True
            if (begun := journal.open) is not None:
                overdue = now_s - begun.unix_s > HANGS_S
                if fate == "lives" and not overdue:
                    continue
                # Of a process elsewhere nobody here can tell whether it lives. Its launch is over in an instant, or
                # else it is a culprit: it is left out here in any case, and for good where it must be one.
                held = Held(begun.candidate, _HANGS if fate == "lives" else _CRASHED, begun.M, begun.unix_s)
                kept = self._hold(held, keep=overdue or fate == "dead")
            if kept and not self._read_only and (fate == "dead" or (fate == "unknown" and _untouched(path, now_s))):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _hold(self, held: Held, *, keep: bool = True) -> bool:
        """True where a file says so from now on."""
        if held.candidate.environment == self._environment and held.candidate not in self._held:
            self._held[held.candidate] = held
            logger.warning("MoE autotune will not try %s again: %s (M=%d).", held.candidate, held.reason, held.M)
        if not keep or self._folder is None or self._read_only:
            return False
        target = self._folder / _name(held.candidate)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            _make(self._folder)
            temporary.unlink(missing_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            with open(descriptor, "wb", buffering=0) as file:  # noqa: PTH123 - a descriptor, not a path
                file.write(msgspec.json.encode(held))
            temporary.replace(target)
        except OSError:
            return False  # left out in this process, and found again by the next one
        return True

    def _write(self, line: _Line) -> None:
        if self._folder is None or self._read_only:
            return
        try:
            if self._journal is not None and not os.fstat(self._journal).st_nlink:
                os.close(self._journal)  # somebody elsewhere took this process for long dead
                self._journal = None
            if self._journal is None:
                self._journal = self._create(self._folder)
            text = msgspec.json.encode(line) + b"\n"
            if self._bytes + len(text) > _JOURNAL_BYTES:
                os.ftruncate(self._journal, 0)  # what came back needs no line, and nothing runs now
                text, self._bytes = self._header + text, 0
            self._bytes += os.write(self._journal, text)
        except OSError as error:
            logger.warning(
                "MoE autotune keeps no journal of first launches in %s (%s): a candidate that kills this server would"
                " be tried again.",
                *(self._folder, error.strerror or error),
            )
            self._folder = None

    def _create(self, folder: Path) -> int:
        owner = status.this_process()
        _make(folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_TRUNC
        journal = os.open(folder / _journal_name(owner), flags, 0o666)
        self._header = msgspec.json.encode(_Writer(owner)) + b"\n"
        self._bytes = os.write(journal, self._header)
        return journal


class Found(NamedTuple):
    """What a folder holds, for people and for a start."""

    held: tuple[Held, ...]
    unread: tuple[Path, ...]
    """files that cannot be read as what they should be; they hold nothing"""


def read(folder: Path) -> Found:
    """The candidates that are held, of all environments, by age."""
    held: list[Held] = []
    unread: list[Path] = []
    for path in _files(folder, ".json"):
        try:
            found = whole_file.read(path, follow=False)
            if found is not None:
                held.append(msgspec.json.decode(found[0], type=Held))
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            unread.append(path)
    return Found(tuple(sorted(held, key=lambda one: one.unix_s)), tuple(unread))


def clear(folder: Path, candidate: Candidate) -> bool:
    """Let servers that start from now on try it again. Raises OSError; False where it is not held."""
    try:
        (folder / _name(candidate)).unlink()
    except FileNotFoundError:
        return False
    return True


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "it must be a folder, not a link: remove it", str(folder))


def _journals(folder: Path) -> list[tuple[Path, Journal]]:
    found = []
    for path in _files(folder, ".journal"):
        with contextlib.suppress(OSError):
            if (text := whole_file.read(path, follow=False)) is not None:
                found.append((path, parse(text[0])))
    return found


def _files(folder: Path, suffix: str) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.suffix == suffix)[:_MAX_FILES]
    except OSError:
        return []


def _fate(owner: status.Owner, reader: status.Owner) -> Literal["lives", "dead", "unknown"]:
    """Pids count in one namespace of one boot of one machine only."""
    if not owner.start_time or (owner.boot_id, owner.pid_namespace) != (reader.boot_id, reader.pid_namespace):
        return "unknown"
    return "lives" if status.start_time(owner.pid) == owner.start_time else "dead"


def _untouched(path: Path, now_s: float) -> bool:
    try:
        return now_s - path.stat().st_mtime > _UNTOUCHED_S
    except OSError:
        return False


def _journal_name(owner: status.Owner) -> str:
    stem = status.file_name(owner).removesuffix(".json")
    return f"{stem}-{owner.start_time}.journal"


def _name(candidate: Candidate) -> str:
    return f"{hashlib.sha256(msgspec.json.encode(candidate)).hexdigest()[:20]}.json"
