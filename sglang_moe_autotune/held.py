"""What is never tried: one file for each candidate that killed a process or held it up, until a person takes it away.

quarantine/HASH.json    one candidate, and why
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from sglang_moe_autotune import whole_file
from sglang_moe_autotune.shapes import Gemm, KernelConfig, MoeShape  # noqa: TC001 - msgspec reads them when it runs

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from sglang_moe_autotune.records import Record

FOLDER: Final = "quarantine"
_MAX_FILES: Final = 4096
"""of one kind that are read: more is damage, and a start must not take long"""


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
    rows_stay: bool = False
    """are stored rows with this config served all the same? It was only slow, at its M, or is being launched elsewhere,
    or is one of several suspects. Anything else ended or hung a process, and is not served at any M either"""


class Found(NamedTuple):
    """What a folder holds, for people and for a start."""

    held: tuple[Held, ...]
    unread: tuple[Path, ...]
    """files that cannot be read as what they should be; they hold nothing"""


def deadly(record: Record, held: Iterable[Held]) -> str:
    """Why a stored row is too dangerous to be served: one of its configs ended or hung a process, at whatever M. A
    kernel that reads where it must not may do so at one M and not at another. "" where none did."""
    for one in held:
        of, pair = one.candidate, record.pair
        if not one.rows_stay and of.shape == record.shape and of.config == pair.of(of.gemm):
            cure = "`quarantine --clear` lets it be used"
            return f"its {of.gemm} config is in quarantine: {one.reason} (M={one.M}); {cure}"
    return ""


def read(folder: Path) -> Found:
    """The candidates that are held, of all environments, by age."""
    held: list[Held] = []
    unread: list[Path] = []
    for path in files(folder, ".json"):
        try:
            found = whole_file.read(path, follow=False)
            if found is not None:
                held.append(msgspec.json.decode(found[0], type=Held))
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            unread.append(path)
    return Found(tuple(sorted(held, key=lambda one: one.unix_s)), tuple(unread))


def keep(folder: Path, held: Held) -> None:
    """Put its file there, where there is none. Raises OSError."""
    name = _name(held.candidate)
    if not (folder / name).exists():
        os.close(put(folder, name, msgspec.json.encode(held)))


def clear(folder: Path, candidate: Candidate) -> bool:
    """Let servers that start from now on try it again. Raises OSError; False where it is not held."""
    try:
        (folder / _name(candidate)).unlink()
    except FileNotFoundError:
        return False
    return True


def files(folder: Path, suffix: str) -> list[Path]:
    """Those of a kind, not too many; none where the folder cannot be listed."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - paths take 40 lines each, and a server looks again and again
        return [folder / name for name in sorted(name for name in names if name.endswith(suffix))[:_MAX_FILES]]
    except OSError:
        return []


def put(folder: Path, name: str, text: bytes, *, lock: bool = False) -> int:
    """A file with this text in the name's place, whole at every moment; the descriptor stays open for what is appended
    to it. lock: it is locked from its first moment on, where the file system can. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "it must be a folder, not a link: remove it", str(folder))
    temporary = folder / f".{name}.{secrets.token_hex(4)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666)
    try:
        append(descriptor, text)
        if lock:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary.replace(folder / name)
    except OSError:
        os.close(descriptor)
        temporary.unlink(missing_ok=True)
        raise
    return descriptor


def append(descriptor: int, text: bytes) -> None:
    """Write all of it. Raises OSError."""
    left = memoryview(text)
    while left:
        left = left[os.write(descriptor, left) :]


def _name(candidate: Candidate) -> str:
    return f"{hashlib.sha256(msgspec.json.encode(candidate)).hexdigest()[:20]}.json"
