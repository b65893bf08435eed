"""Deaths in the middle of a first launch: a mark that outlives its process, and the count that makes a start read-only.

SGLang ends its schedulers by SIGKILL, so nothing can be tidied up at an end, and most ends are no faults. What may
kill is a launch that was never made before. While one runs, the first byte of a mapped file says so: a store to memory,
which the kernel keeps when the process is gone. A process that is killed at any other moment leaves no death.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from sglang_moe_autotune import status
from sglang_moe_autotune.status import Owner

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FOLDER: Final = "deaths"
LIMIT: Final = 2
"""servers with deaths on one environment from which on a start is read-only"""
KEPT_S: Final = 7 * 86400.0
"""an older death does not count"""

_CALM, _LAUNCHING, _FAULTED = b"-"[0], b"L"[0], b"F"[0]
_SIZE: Final = 4096
_TEXT: Final = 16
"""where the owner's text begins, a line; the line after it says what was launched"""
_FAULT_KEPT_S: Final = 600.0


class _About(msgspec.Struct):
    pid: int
    boot_id: str
    start_time: int
    host: str
    pid_namespace: str
    environment: str
    server: str = ""


class Death(NamedTuple):
    """A process that died while it launched something for the first time."""

    path: Path
    owner: Owner
    environment: str
    unix_s: float
    what: str
    server: str = ""
    """the same for the ranks of one server, which end together; empty: its own"""


class Mark:
    """This process's own mark. ``begin`` and ``end`` cost less than a microsecond."""

    def __init__(self, page: Any, path: Path | None = None, descriptor: int = -1) -> None:
        self._page, self._path, self._descriptor = page, path, descriptor
        self._what = 0
        self._faulted_s: float | None = None

    @classmethod
    def open(cls, root: Path | None, environment: str, server: str = "") -> Mark:
        """A mark below ``root``, of a rank of ``server``; where nothing can be written there, one that ends with the
        process. Never raises OSError."""
        owner = status.this_process()
        about = msgspec.json.encode(_About(*owner, environment, server)) + b"\n"
        first = bytes([_CALM]) * _TEXT + about
        if root is not None and len(first) < _SIZE // 2:
            with contextlib.suppress(OSError, ValueError):
                (root / FOLDER).mkdir(parents=True, exist_ok=True)
                path = root / FOLDER / f"{owner.pid}-{secrets.token_hex(6)}.mark"
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                # Held until the process ends: whoever can take it knows that the owner is gone, in any container.
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, _SIZE)
                mark = cls(mmap.mmap(descriptor, _SIZE), path, descriptor)
                mark._page[: len(first)] = first
                mark._what = len(first)
                return mark
        mark = cls(bytearray(_SIZE))
        mark._what = _TEXT
        return mark

    def begin(self, what: str) -> None:
        """Something is launched for the first time now."""
        text = what.encode("utf-8", "replace")[:512] + b"\n"
        self._page[self._what : self._what + len(text)] = text
        self._page[0] = _LAUNCHING
        self._faulted_s = None

    def end(self) -> None:
        """It ended, and the device with it works."""
        self._page[0] = _CALM

    def fault(self) -> None:
        """It raised: where the device is lost, SGLang's next launch ends this process."""
        self._page[0] = _FAULTED
        self._faulted_s = time.monotonic()

    def keep(self) -> None:
        """Say that this process lives; off the serving thread, every few seconds. A fault that the process has
        outlived was none of the device."""
        if self._faulted_s is not None and time.monotonic() - self._faulted_s > _FAULT_KEPT_S:
            self._faulted_s = None
            self._page[0] = _CALM
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.utime(self._path)


def read(root: Path | None, environment: str | None = None) -> tuple[Death, ...]:
    """The deaths that count, of one environment (by its name) or of all, oldest first. Takes marks away that say
    nothing: those of processes that ended in another way, and what is older than ``KEPT_S``. Never raises OSError."""
    if root is None:
        return ()
    with contextlib.suppress(OSError):
        return tuple(sorted(_deaths(root, environment), key=lambda death: death.unix_s))
    return ()


def clear(root: Path) -> int:
    """Forget all deaths; how many there were. Raises OSError."""
    found = read(root)
    for death in found:
        death.path.unlink(missing_ok=True)
    return len(found)


def _deaths(root: Path, environment: str | None) -> Iterator[Death]:
    reader, now = status.this_process(), time.time()
    folder = root / FOLDER
    if not folder.is_dir():
        return
    for path in folder.glob("*.mark"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            text, unix_s = _read(path)
            first, _, rest = text[_TEXT:].partition(b"\n")
            about = msgspec.json.decode(first, type=_About)
            owner = Owner(about.pid, about.boot_id, about.start_time, about.host, about.pid_namespace)
            if not _gone(path, owner, reader, now - unix_s):
                continue
            if text[0] == _CALM or now - unix_s > KEPT_S:
                path.unlink(missing_ok=True)
            elif environment in {None, about.environment}:
                what = rest.partition(b"\n")[0].strip(b"\0").decode("utf-8", "replace")
                yield Death(path, owner, about.environment, unix_s, what, about.server)


def _read(path: Path) -> tuple[bytes, float]:
    with path.open("rb") as file:
        return file.read(_SIZE).ljust(_TEXT, b"-"), os.fstat(file.fileno()).st_mtime


def _gone(path: Path, owner: Owner, reader: Owner, age_s: float) -> bool:
    """Has the process that wrote the mark ended?"""
    if owner[:3] == reader[:3]:
        return False  # the caller's own: a lock of one process does not exclude itself
    here = status.presence(owner, age_s, reader)
    if here in {"running", "silent"}:
        return False
    if here == "gone" and owner.boot_id == reader.boot_id and owner.pid_namespace == reader.pid_namespace:
        return True
    if owner.boot_id != reader.boot_id and age_s <= status.SILENT_S:
        return False  # another machine may write here, where locks may exclude nobody
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def sentence(found: tuple[Death, ...]) -> str:
    """Why a start is read-only, for people; empty where it is not."""
    if len({death.server or death.path for death in found}) < LIMIT:
        return ""  # where one rank dies, SGLang kills the others, perhaps in the middle of launches of their own
    return (
        f"{len(found)} processes died in the middle of a first launch, the last one at {found[-1].what or 'an unknown'}"
        " launch; `sglang-moe-autotune on` forgets them"
    )
