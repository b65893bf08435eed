"""The store: what was learned in this environment, in memory at once and on disk soon after."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import re
import threading
import weakref
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from sglang_moe_autotune.breath import Breath
from sglang_moe_autotune.document import Unreadable
from sglang_moe_autotune.errors import StoreError
from sglang_moe_autotune.record_file import RecordFile, missing, unreadable
from sglang_moe_autotune.records import Contents, Environment, Key, Record, ShapeNote, merge, with_changes
from sglang_moe_autotune.validity import problem

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from sglang_moe_autotune.whole_file import Identity

logger = logging.getLogger("sglang.moe_autotune")

_CURE = "make it writable, or set SGLANG_MOE_AUTOTUNE_DIR to a folder that is"
_EXIT_S = 1.0

State = Literal["disk", "memory", "read-only"]
"""``disk``: changes are kept. ``memory``: there is no place, or the last write failed (a later change tries
again). ``read-only``: asked for, or a newer version writes the file."""


class Store:
    """Records and notes of one environment. ``submit`` never waits for the disk; one thread writes."""

    def __init__(self, root: Path | None, environment: Environment, *, read_only: bool = False) -> None:
        """Use ``open``, which reads the file too."""
        self.path = None if root is None else root / file_name(environment)
        self.state: State = "read-only" if read_only else "memory" if root is None else "disk"
        self._breath = Breath(needed=False)  # nobody is served before it is opened
        self._file = None if self.path is None else RecordFile(self.path, self._breath)
        self._contents = Contents(environment)
        self._warned: set[str] = set()
        self._fresh: dict[Key, Record] = {}  # records made here that are not known to be on disk
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._asked = False
        self._busy = False
        self._closed = False
        self._wanted = 0  # counts changes
        self._kept = 0  # the change up to which the file is known to hold everything
        self._tried = 0  # counts finished attempts to write

    @classmethod
    def open(cls, root: Path | None, environment: Environment, *, read_only: bool = False) -> Store:
        """Read what is stored for this environment. Disk trouble never raises: it costs one warning."""
        store = cls(root, environment, read_only=read_only)
        if store._file is None:
            if not read_only:
                store._warn("memory", "No folder for records (%s): they live in memory; %s", "no home", _CURE)
            return store
        try:
            contents = store._file.read()
        except (OSError, ValueError) as error:
            store._no_disk(error)
        else:
            if isinstance(contents, Unreadable) and contents.state == "newer":
                store._leave_alone(contents.reason)
            elif isinstance(contents, Contents) and contents.environment == environment:
                store._contents = contents
            elif contents is not None:
                store._change()  # the writer sets the broken file aside
        store._breath.needed = True  # also after an error: later writes may succeed
        atexit.register(_flush_at_exit, weakref.ref(store))
        return store

    @property
    def contents(self) -> Contents:
        """All that is known now, others' records as of our last write included. A frozen value."""
        return self._contents

    def taken_in(self, identity: Identity) -> bool:
        """Is all that the file holds in ``contents``, or soon will be, where this is how it is now?"""
        return self._file is not None and self._file.taken_in == identity

    def submit(self, *, record: Record | None = None, note: ShapeNote | None = None) -> None:
        """Merge into memory at once and hand the write to the writer. Logs and refuses a senseless value."""
        for value in (record, note):
            if value is not None and (reason := problem(value)):
                self._warn(reason, "A %s was not stored: %s", type(value).__name__, reason)
                return
        self._change(record, note)

    def refresh(self, timeout_s: float = 0.0) -> None:
        """Take in what others wrote, on the writer's thread: soon, and waited for as long as this."""
        with self._changed:
            if self._writes():
                tried = self._tried + (2 if self._busy else 1)
                self._ask()
                self._changed.wait_for(lambda: self._tried >= tried, timeout_s)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything submitted so far is on disk; False if that failed or took too long."""
        with self._changed:
            goal = self._wanted
            if self._kept >= goal or not self._writes():
                return self._kept >= goal
            tried = self._tried + (2 if self._busy else 1)  # the attempt under way may be older than the goal
            self._ask()
            self._changed.wait_for(lambda: self._kept >= goal or self._tried >= tried, timeout_s)
            return self._kept >= goal

    def close(self, timeout_s: float = _EXIT_S) -> bool:
        """Flush and end the writer. What is submitted afterwards stays in memory."""
        kept = self.flush(timeout_s)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return kept

    def _change(self, record: Record | None = None, note: ShapeNote | None = None) -> None:
        with self._changed:
            self._contents = with_changes(self._contents, record, note)
            self._wanted += 1
            if self._writes():
                if record is not None:
                    self._fresh[record.shape, record.M] = record
                self._ask()

    def _writes(self) -> bool:
        return self._file is not None and self.state != "read-only" and not self._closed

    def _ask(self) -> None:
        self._asked = True
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="moe-autotune-store", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread is to be had: the next change tries again
                self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._closed)
                if not self._asked:
                    return
                self._asked, self._busy = False, True
                goal, ours, fresh = self._wanted, self._contents, dict(self._fresh)
            self._breath()
            kept = self._write(ours, fresh.values())
            with self._changed:
                self._busy = False
                self._tried += 1
                if kept:
                    self._kept = max(self._kept, goal)
                    self._fresh = {key: r for key, r in self._fresh.items() if r is not fresh.get(key)}
                self._changed.notify_all()

    def _write(self, ours: Contents, fresh: Collection[Record]) -> bool:
        if self._file is None:
            return False
        try:
            update = self._file.update(ours, fresh)
        except (OSError, ValueError) as error:
            self._no_disk(error)
            return False
        for clause in update.aside:
            self._warn(clause, "A file of records could not be used and was set aside as %s", clause)
        self._adopt(update.contents)
        if update.newer is not None:
            self._leave_alone(update.newer)
            return False
        if self.state == "memory":
            logger.info("Records are kept in %s again", self.path)
        self.state = "disk"
        return True

    def _adopt(self, others: Contents) -> None:
        """Take in what others wrote. The merge runs outside the lock, which ``submit`` must not wait for."""
        while True:
            seen = self._contents
            merged = merge(seen, others, self._breath)
            with self._changed:
                if self._contents is seen:
                    self._contents = merged
                    return

    def _no_disk(self, error: OSError | ValueError) -> None:
        if self.state == "disk":
            self.state = "memory"
        message = "Records cannot be kept in %s (%s): they live in memory until this process ends; %s"
        self._warn("memory", message, self.path, error, _CURE)

    def _leave_alone(self, reason: str) -> None:
        self.state = "read-only"
        self._warn("newer", "The records in %s are left alone: %s", self.path, reason)

    def _warn(self, once: str, message: str, *arguments: object) -> None:
        if once not in self._warned:
            self._warned.add(once)
            logger.warning(message, *arguments)


def _flush_at_exit(reference: weakref.ref[Store]) -> None:
    if (store := reference()) is not None:
        store.flush(_EXIT_S)


def file_name(environment: Environment) -> str:
    """The file of an environment: readable, safe on any file system, its own by the hash of all fields."""
    digest = hashlib.sha256(msgspec.json.encode(environment)).hexdigest()[:12]
    return f"{_slug(environment.device_name)}-triton-{_slug(environment.triton)}-{digest}.json"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:48] or "unnamed"


class StoredEnvironment(NamedTuple):
    """One file below a root, for people."""

    path: Path
    environment: Environment | None
    """None where the file cannot be read"""
    records: int
    shapes: int
    problems: tuple[str, ...]


def environments(root: Path) -> list[StoredEnvironment]:
    """All files of the store at ``root``, none where the folder is missing. Raises StoreError."""
    try:
        names = sorted(path.name for path in root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{root} cannot be listed ({error}): name the folder of a store with --dir") from error
    return [_listed(root / name, names) for name in names if name.endswith(".json") and name[0] != "."]


def _listed(path: Path, names: list[str]) -> StoredEnvironment:
    broken = tuple(f"{name} was set aside" for name in names if name.startswith(f"{path.name}.broken-"))
    broken += tuple(f"{path.name}.d/{name} cannot be read" for name in RecordFile(path).spares.broken())
    try:
        contents = read(path)
    except StoreError as error:
        return StoredEnvironment(path, None, 0, 0, (str(error), *broken))
    unread = tuple(f"a {u.kind} is not used: {u.reason}" for u in contents.unread)
    shapes = {shape for shape, _ in contents.records} | set(contents.notes)
    counts = (len(contents.records), len(shapes))
    return StoredEnvironment(path, contents.environment, *counts, unread + broken)


def relatives(root: Path | None, environment: Environment, most_files: int = 4) -> list[Record]:
    """Records of other environments of the same GPU (another Triton, another kernel), the latest files last.

    They seed searches and are never served. What cannot be read is passed over: a seed is worth no warning.
    """
    if root is None:
        return []
    own, start = file_name(environment), f"{_slug(environment.device_name)}-triton-"
    try:
        paths = [p for p in root.iterdir() if p.name.startswith(start) and p.suffix == ".json" and p.name != own]
        paths = sorted(paths, key=lambda path: path.stat().st_mtime)[-most_files:]
    except OSError:
        return []
    found: list[Record] = []
    for path in paths:
        try:
            contents = read(path)
        except StoreError as error:
            logger.debug("no seeds from %s: %s", path, error)
            continue
        other = contents.environment
        if (other.device_name, other.capability) == (environment.device_name, environment.capability):
            found += contents.records.values()
    return found


def read(path: Path) -> Contents:
    """The contents of one file. Raises StoreError where it is missing, broken or newer than this version."""
    try:
        contents = RecordFile(path).read()
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    if contents is None:
        raise missing(path)
    if isinstance(contents, Unreadable):
        raise unreadable(path, contents)
    return contents


def change(path: Path, function: Callable[[Contents], Contents], new: Environment | None = None) -> Contents:
    """Apply a decision of the user to one file: lock, re-read, apply, write. Returns what the file holds now.

    ``function`` is pure and gets what is stored (nothing, where there is no file and ``new`` says of which
    environment it is to be); what it drops without ``records.forget`` stays. Raises StoreError where the file is
    missing, broken, newer than this version or cannot be written, or the result makes no sense.
    """
    try:
        return RecordFile(path).change(function, new)
    except (OSError, ValueError) as error:
        raise StoreError(f"{path} cannot be written ({error}): {_CURE}") from error
