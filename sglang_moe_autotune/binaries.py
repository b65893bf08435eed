"""Binaries of the MoE kernels, kept in the store: a start whose Triton cache is empty would compile them one by one.

A zip for each entry of Triton's cache, named after it, in a folder for each environment. What is missing, damaged or
not to be trusted is compiled as ever. The name is a hash of the kernel's source, its config, the compiler and its
version, so an entry answers for nothing else; that its content is what this compiler made rests on who can write there.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import stat
import time
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from triton import knobs
from triton.runtime.cache import get_cache_manager

from sglang_moe_autotune import whole_file
from sglang_moe_autotune.breath import no_breath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

logger = logging.getLogger("sglang.moe_autotune")

FOLDER: Final = "binaries"
MOST: Final = 512
"""files of one environment, of which those that were not used for longest go; an H200 has some 40 for a shape"""
MOST_BYTES: Final = 16 << 20
"""of one entry, unpacked"""
PUT_BACK_S: Final = 0.5
"""of a start; after it what is left is compiled where it is needed"""
_LEFT_OVER_S: Final = 3600.0
_ENDING: Final = ".zip"
_METADATA: Final = ".json"
_BINARY: Final = (".cubin", ".hsaco")
_PARTS: Final = (_METADATA, *_BINARY)
"""files of an entry without which nothing can be launched, by their endings"""
_METHODS: Final = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_NAME: Final = re.compile(r"\w[\w.-]{0,200}", re.ASCII)


class Binaries:
    """The binaries that the MoE kernels of this process hold, and those that the store has. Not for the serving thread:
    ``keep`` belongs to a thread of its own, ``put_back`` to the start."""

    def __init__(self, root: Path | None, environment: str, kernels: Iterable[Any], *, read_only: bool = False) -> None:
        """root: of the store; None keeps nothing. environment: the key of its environment. kernels: Triton's."""
        self._folder = None if root is None else root / FOLDER / environment
        self._kernels = tuple(kernels)
        self._read_only = read_only
        self._seen: set[str] = set()
        """of this process's: kept, or not to be had"""

    def put_back(self) -> int:
        """Give Triton's cache what it lacks of those that are kept; how many those were. Never raises."""
        begun_s, count = time.perf_counter(), 0
        try:
            for path in self._kept():
                if time.perf_counter() - begun_s > PUT_BACK_S:
                    break
                count += self._put_back(path)
        except Exception as error:
            logger.warning(
                "MoE autotune could not use the binaries in %s (%s), so they are compiled again.",
                *(self._folder, error),
                exc_info=not isinstance(error, OSError),
            )
        if count:
            taken_ms = 1e3 * (time.perf_counter() - begun_s)
            logger.info("MoE autotune put %d kept binaries into Triton's cache in %.0f ms.", count, taken_ms)
        return count

    def keep(self, breathe: Callable[[], None] = no_breath) -> int:
        """Keep those that this process has loaded for serving since the last call; how many were new. Never raises:
        the first failure is told, and the last."""
        count, known = 0, len(self._seen)
        try:
            for compiled in self._loaded():
                digest = str(getattr(compiled, "hash", ""))
                if digest not in self._seen:
                    breathe()
                    self._seen.add(digest)
                    count += _HASH.fullmatch(digest) is not None and self._keep(digest, compiled, breathe)
            if len(self._seen) > known:  # also where all are kept already, or a kill's leftovers would stay for good
                self._prune(breathe)
        except Exception as error:
            self._read_only = True
            logger.warning(
                "MoE autotune keeps no binaries in %s (%s): a start with an empty Triton cache compiles them.",
                *(self._folder, error),
                exc_info=not isinstance(error, OSError),
            )
        return count

    def _loaded(self) -> Iterator[Any]:
        if self._folder is None or self._read_only or knobs.compilation.override:
            return  # Triton names what TRITON_KERNEL_OVERRIDE puts in a kernel's place as that kernel
        for kernel in self._kernels:
            for caches in list(kernel.device_caches.values()):
                yield from list(caches[0].values())

    def _keep(self, digest: str, compiled: Any, breathe: Callable[[], None]) -> bool:
        assert self._folder is not None  # noqa: S101 - asked by the caller
        path = self._folder / (digest + _ENDING)
        if _unpacked(path):
            with contextlib.suppress(OSError):  # an image's, root's, or another process has just removed it
                os.utime(path, follow_symlinks=False)
            return False
        files = _files_of(compiled, breathe)
        if not _is_whole(files, digest):
            return False
        text = io.BytesIO()
        with zipfile.ZipFile(text, "w") as packed:  # as they are: to compress one would take a core for milliseconds
            for name, data in sorted(files.items()):
                breathe()
                packed.writestr(name, data)
        breathe()
        self._folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self._folder.parent, self._folder):  # whatever the umask
            folder.mkdir(0o755, exist_ok=True)
        breathe()
        try:
            if why := self._distrust():
                raise PermissionError(why)
            whole_file.replace(path, text.getvalue())
        except (IsADirectoryError, FileNotFoundError):  # somebody's, or the folder is being removed
            return False
        with contextlib.suppress(OSError):  # a file system without modes; who reads it looks at what it has
            path.chmod(0o644)  # as above
        return True

    def _kept(self) -> list[Path]:
        """The files, those used last first."""
        if self._folder is None:
            return []
        try:
            if why := self._distrust():
                logger.warning("MoE autotune uses no binaries of the store, so they are compiled again: %s.", why)
                return []
            found = [path for path in self._folder.iterdir() if _is_entry(path)]
        except FileNotFoundError:
            return []
        return sorted(found, key=_used_s, reverse=True)[:MOST]

    def _distrust(self) -> str:
        """Why what lies in the folder may be somebody else's, and the cure. Raises OSError, as where there is none."""
        assert self._folder is not None  # noqa: S101 - asked by the caller
        for folder in (self._folder.parent, self._folder):
            if why := _distrusted(folder.lstat()):
                return f"{why} ({folder}): make it a folder of this server's user, with `chown` and `chmod 755`"
        return ""

    def _put_back(self, path: Path) -> bool:
        manager = get_cache_manager(path.stem)
        for kernel in self._kernels:
            name = kernel.__name__[:150] + _METADATA  # as Triton names it: no file is read for what is there
            try:
                there = manager.get_group(name) or {}
            except ValueError:  # damaged; Triton 3.6 raises at the launch too
                continue
            if name in there and any(part.endswith(_BINARY) for part in there):
                return False
        files = _unpacked(path)
        if not files:
            return False
        group = {name: manager.put(data, name) for name, data in files.items()}
        manager.put_group(next(name for name in files if name.endswith(_METADATA)), group)
        return True

    def _prune(self, breathe: Callable[[], None]) -> None:
        assert self._folder is not None  # noqa: S101 - asked by the caller
        kept: list[tuple[float, str]] = []
        with contextlib.suppress(OSError):
            if self._distrust():
                return
            for name in os.listdir(self._folder):  # noqa: PTH208 - paths take 40 lines each
                breathe()
                path = self._folder / name
                if _is_entry(path):
                    kept.append((_used_s(path), name))
                elif whole_file.is_temporary(name) and time.time() - _used_s(path) > _LEFT_OVER_S:
                    path.unlink(missing_ok=True)  # of a process that was killed while it wrote
            for _, name in sorted(kept, reverse=True)[MOST:]:
                breathe()
                (self._folder / name).unlink(missing_ok=True)


def _is_entry(path: Path) -> bool:
    return path.suffix == _ENDING and _HASH.fullmatch(path.stem) is not None


def _used_s(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _distrusted(of: os.stat_result) -> str:
    """Why a file or folder may hold what somebody else wrote; "" where only this user, its groups and root can write
    it (a volume of Kubernetes with an ``fsGroup`` can be written by that group)."""
    if stat.S_ISLNK(of.st_mode):
        return "it is a link"
    if of.st_uid not in {os.geteuid(), 0}:
        return f"it belongs to user {of.st_uid}"
    if of.st_mode & stat.S_IWOTH:
        return "anybody may write there"
    if of.st_mode & stat.S_IWGRP and of.st_gid not in {os.getegid(), *os.getgroups()}:
        return f"group {of.st_gid} may write there"
    return ""


def _files_of(compiled: Any, breathe: Callable[[], None]) -> dict[str, bytes]:
    """What Triton's cache has of a loaded kernel; empty where that is gone, or other than what runs."""
    files = {}
    try:
        for name, at in compiled.metadata_group.items():
            if name.endswith(_PARTS):
                breathe()
                files[name] = Path(at).read_bytes()
    except OSError:
        return {}
    size_bytes = sum(map(len, files.values()))
    return files if compiled.kernel in files.values() and size_bytes <= MOST_BYTES else {}


def _unpacked(path: Path) -> dict[str, bytes]:
    """The files of a kept entry, whole by their checksums; empty where there is none that can be used."""
    try:
        read = whole_file.read(path, follow=False)
        if read is None or len(read[0]) > MOST_BYTES or _distrusted(read[1]):
            return {}
        with zipfile.ZipFile(io.BytesIO(read[0])) as packed:
            parts = packed.infolist()
            told_bytes = sum(part.file_size for part in parts)
            # zipfile unpacks the other methods whole, whatever size the part states
            if told_bytes > MOST_BYTES or any(part.compress_type not in _METHODS for part in parts):
                return {}
            files = {part.filename: _part(packed, part) for part in parts}
    except (OSError, ValueError, EOFError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error):
        return {}
    return files if len(parts) == len(files) and _is_whole(files, path.stem) else {}


def _part(packed: zipfile.ZipFile, part: zipfile.ZipInfo) -> bytes:
    """Without the size, zipfile would unpack all that is there, a thousand times what was read, and cut it then."""
    with packed.open(part) as file:
        return file.read(part.file_size + 1)


def _is_whole(files: Mapping[str, bytes], digest: str) -> bool:
    """Are these the metadata of this entry and one binary? Triton raises at the launch of anything less."""
    metadata = [name for name in files if name.endswith(_METADATA)]
    binary = [name for name in files if name.endswith(_BINARY)]
    if len(files) != len(metadata) + len(binary) or not all(map(_NAME.fullmatch, files)):
        return False
    return len(metadata) == len(binary) == 1 and _hash_of(files[metadata[0]]) == digest


def _hash_of(metadata: bytes) -> object:
    """As Triton wrote it there."""
    try:
        told = json.loads(metadata)
    except (ValueError, RecursionError):
        return None
    return told.get("hash") if isinstance(told, dict) else None
