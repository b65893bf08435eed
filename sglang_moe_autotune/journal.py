"""The journal of first launches: what is going to be launched for the first time is in a file before it is.

Nothing in a process survives what such a launch may do, and what a process has written outlives it. The file may lie
on a network that does not answer, so a thread of its own writes, and the thread that serves only hands it lines: it
announces a launch, and makes it in the first pass that finds the line written. Nothing waits. The line that closes it
is handed over and not waited for either.

A few launches may be announced at a time; which of them runs is a number in a page of memory (see ``page``). Where
that page is still there, the next start knows exactly what ran; where it is not, as in a fresh container, every launch
that was announced and not closed is a suspect.

    quarantine/PID-MARK-START-MARK.journal    lines of JSON: who writes, launches announced, launches closed
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec

from sglang_moe_autotune import held, page, status
from sglang_moe_autotune.bench import Declined
from sglang_moe_autotune.breath import no_breath
from sglang_moe_autotune.held import FOLDER, Candidate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

logger = logging.getLogger("sglang.moe_autotune")

AHEAD: Final = 4
"""launches that may be announced at a time: so many suspects there are at most"""
SILENT_S: Final = 5.0
"""a disk that has not answered for this long is down, and an M is put off instead of waited with"""
_BYTES: Final = 64 << 10
_LAPSE_S: Final = 0.5
"""after which an announcement that nobody makes use of is closed: requests came, or the search went elsewhere"""
_CROWDED_S: Final = 0.1
"""the same where another launch waits for its place: longer than a round of looks at all that a search waits for, or
each would drive out the other, and none be made"""
_TOUCH_S: Final = 10.0
_BREATH_S: Final = 100e-6
"""for which a call that finds no line written lets the interpreter go: the writer gets it after 5 ms otherwise"""
_FAULT_S: Final = 600.0
"""a fault that the process has outlived by this was none of the device"""


class Writer(msgspec.Struct, frozen=True, tag="writer"):
    owner: status.Owner
    environment: str = ""
    server: str | None = None
    """the same for the ranks of one server, which end together; None: no server, but a search offline"""
    page: str = ""
    """the name of the page that says which launch runs"""


class Announced(msgspec.Struct, frozen=True, tag="announced"):
    number: int
    what: str
    """for people"""
    candidate: Candidate | None
    """None: what SGLang launches itself, on our behalf"""
    M: int
    unix_s: float
    raised: bool = False
    """It raised, so it does not hang; where the device is lost, its process may still end of it."""


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """The launch came back, or was not made."""

    number: int


_Line = Writer | Announced | Closed


class Told(NamedTuple):
    """What a journal says: who wrote it, and the launches that were not closed at its end."""

    writer: Writer | None
    open: tuple[Announced, ...]


def parse(text: bytes, breathe: Callable[[], None] = no_breath) -> Told:
    """A line that is damaged, or torn by the end of its writer, says nothing."""
    writer: Writer | None = None
    announced: dict[int, Announced] = {}
    for part in text.split(b"\n")[:-1]:
        breathe()
        try:
            line = msgspec.json.decode(part, type=_Line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(line, Writer):
            writer = line
        elif isinstance(line, Announced):
            announced[line.number] = line
        else:
            announced.pop(line.number, None)
    return Told(writer, tuple(announced.values()))


class Launch(NamedTuple):
    """What is launched for the first time."""

    what: str
    candidate: Candidate | None = None
    M: int = 0


class _Entry:
    """A launch on its way: handed to the writer, written, or running."""

    def __init__(self, announced: Announced, now_s: float) -> None:
        self.announced = announced
        self.state: Literal["handed", "written", "running"] = "handed"
        self.looked_s = now_s

    @property
    def line(self) -> bytes:
        return msgspec.json.encode(self.announced) + b"\n"


class Journal:
    """This process's own. No method waits for a disk; all but those of the writer are the serving thread's.

    Without a folder, or where it cannot be written, every launch may be made and nobody is told of it.
    """

    def __init__(self, root: Path | None = None, environment: str = "", server: str | None = None) -> None:
        self._folder = None if root is None else root / FOLDER
        self._environment, self._server = environment, server
        self._changed = threading.Condition()
        self._entries: dict[Launch, _Entry] = {}
        self._lines: list[tuple[bytes, _Entry | None]] = []
        self._jobs: list[Callable[[], None]] = []
        self._count = 0
        self._writing = False
        self._faulted_s: float | None = None
        self._thread: threading.Thread | None = None
        self._page: page.Page | None = None
        # The writer's own:
        self._owner = status.this_process()
        stem = status.file_name(self._owner).removesuffix(".json")
        self._name = f"{stem}-{self._owner.start_time}-{secrets.token_hex(4)}.journal"
        self._file: int | None = None
        self._bytes = 0

    def announced(self, launch: Launch) -> bool:
        """May this be made now? The first call announces it, where there is a place; a later one finds it written.
        Raises Declined where the disk does not answer."""
        with self._changed:
            found, on_its_way = self._announced(launch, time.monotonic()), launch in self._entries
        if on_its_way and not found:
            time.sleep(_BREATH_S)
        return found

    def begin(self, launch: Launch) -> bool:
        """Is this made now? True: its line is written, and the page says that it runs."""
        if not self.announced(launch):
            return False
        with self._changed:
            if (entry := self._entries.get(launch)) is None:
                return self._folder is None  # nobody is told; or it has lapsed since
            self._end_running(but=entry)  # a fault before, which this process has survived
            entry.state = "running"
        self._set(entry.announced.number)
        return True

    def step(self, what: str) -> bool:
        """``begin`` for what is no candidate of the search."""
        return self.begin(Launch(what))

    def pause(self) -> None:
        """It came back, and more of the same comes soon: what was announced stays so."""
        self._set(0)
        with self._changed:
            for entry in self._entries.values():
                if entry.state == "running":
                    entry.state, entry.looked_s = "written", time.monotonic()

    def end(self) -> None:
        """It came back: the stream was waited for. Nothing where none was begun."""
        self._set(0)
        with self._changed:
            self._end_running()

    def fault(self) -> None:
        """It raised: where the device is lost, SGLang's next launch ends this process."""
        with self._changed:
            self._faulted_s = time.monotonic()
            for entry in (entry for entry in self._entries.values() if entry.state == "running"):
                entry.announced = msgspec.structs.replace(entry.announced, raised=True)
                self._lines.append((entry.line, None))
            self._wake()

    def withdraw(self) -> None:
        """Close what is announced and not made: the search goes elsewhere."""
        with self._changed:
            self._lapse(float("inf"))

    def later(self, job: Callable[[], None]) -> None:
        """Have the writer do this. Nothing without a folder."""
        with self._changed:
            if self._folder is not None:
                self._jobs.append(job)
                self._wake()

    def settled(self, timeout_s: float) -> bool:
        """Wait until all that was handed over is written or given up; False where that took too long."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._folder is None or not (self._lines or self._jobs or self._writing), timeout_s
            )

    # -- under the lock ------------------------------------------------------------------------------------------------

    def _announced(self, launch: Launch, now_s: float) -> bool:
        if self._folder is None:
            return True
        entry = self._entries.get(launch)
        if entry is not None and entry.state != "handed":
            entry.looked_s = now_s
            return True
        if self._thread is None and self._lines:
            self._wake()
        if any(e.state == "handed" and now_s - e.looked_s > SILENT_S for e in self._entries.values()):
            raise Declined(f"{self._folder} does not answer, and nothing is launched first without a line there")
        if entry is None:
            self._lapse(now_s - _CROWDED_S, leave=AHEAD - 1)
            if len(self._entries) < AHEAD:
                self._hand_over(launch, now_s)
        return False

    def _hand_over(self, launch: Launch, now_s: float) -> None:
        self._count += 1
        announced = Announced(self._count, launch.what, launch.candidate, launch.M, time.time())
        entry = self._entries[launch] = _Entry(announced, now_s)
        self._lines.append((entry.line, entry))
        self._wake()

    def _end_running(self, but: _Entry | None = None) -> None:
        self._faulted_s = None
        for launch, entry in list(self._entries.items()):
            if entry.state == "running" and entry is not but:
                self._close(launch)

    def _lapse(self, before_s: float, leave: int = 0) -> None:
        """Close what was announced and not looked at since, until so many are left."""
        for launch, entry in list(self._entries.items()):
            if entry.state == "written" and entry.looked_s < before_s and len(self._entries) > leave:
                self._close(launch)

    def _close(self, launch: Launch) -> None:
        line = Closed(self._entries.pop(launch).announced.number)
        self._lines.append((msgspec.json.encode(line) + b"\n", None))
        self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._write, name="moe-autotune-journal", daemon=True)
            with contextlib.suppress(RuntimeError):  # no thread is to be had: the next call tries again
                thread.start()
                self._thread = thread
        self._changed.notify_all()

    def _set(self, number: int) -> None:
        if self._page is not None:
            self._page.set(number)

    # -- the writer's thread ---------------------------------------------------------------------------------------

    def _write(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                if not self._lines and not self._jobs:
                    self._changed.wait(_LAPSE_S / 2 if self._entries else _TOUCH_S)
                now_s = time.monotonic()
                self._lapse(now_s - _LAPSE_S)
                if self._faulted_s is not None and now_s - self._faulted_s > _FAULT_S:
                    self._set(0)
                    self._end_running()
                lines, self._lines = self._lines, []
                jobs, self._jobs = self._jobs, []
                self._writing = True
            for job in jobs:
                job()
            try:
                self._put(lines)
            except OSError as error:
                self._give_up(error)
                return

    def _put(self, lines: list[tuple[bytes, _Entry | None]]) -> None:
        """Append them, and tell that they are written; without any, say that this process lives. Raises OSError."""
        text = b"".join(line for line, _ in lines)
        if self._file is None and not text:
            return
        if self._file is None or self._bytes + len(text) > _BYTES:
            self._begin()
        elif text:
            held.append(self._file, text)
            self._bytes += len(text)
        else:
            os.utime(self._file)
            if self._page is not None:
                self._page.touch()
        with self._changed:
            for entry in (entry for _, entry in lines if entry is not None and entry.state == "handed"):
                entry.state, entry.looked_s = "written", time.monotonic()
        if self._file is not None and not os.fstat(self._file).st_nlink:
            self._begin()  # somebody elsewhere took this process for long dead

    def _begin(self) -> None:
        """Begin the file, or begin it anew with what is open: it is whole at every moment. Raises OSError."""
        assert self._folder is not None  # noqa: S101 - for the type checker
        if self._page is None:
            self._page = page.make()
        name = self._page.name if self._page is not None else ""
        writer = Writer(self._owner, self._environment, self._server, name)
        with self._changed:
            text = msgspec.json.encode(writer) + b"\n" + b"".join(entry.line for entry in self._entries.values())
        # Its lock is held until the process ends: whoever can take it knows that the writer is gone, in any container.
        before, self._file = self._file, held.put(self._folder, self._name, text, lock=True)
        self._bytes = len(text)
        if before is not None:
            os.close(before)

    def _give_up(self, error: OSError) -> None:
        told = "MoE autotune keeps no journal of first launches in %s (%s): what kills the server may be tried again."
        logger.warning(told, self._folder, error.strerror or error)
        with self._changed:
            folder, self._folder, self._writing = self._folder, None, False
            self._changed.notify_all()
            # Afterwards a line that cannot be closed would accuse what did nothing.
            self._changed.wait_for(lambda: all(entry.state != "running" for entry in self._entries.values()))
            self._entries.clear()
        if folder is not None:
            with contextlib.suppress(OSError):
                (folder / self._name).unlink()
