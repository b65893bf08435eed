"""What a running server says of itself: a live file a process, written by the plugin and read by the shell.

Standard library and msgspec only, so that the plugin can import it. Nothing here waits for a lock: the
file of a process has one writer, and a reader sees the old text or the new one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from sglang_moe_autotune.breath import no_breath

if TYPE_CHECKING:
    from collections.abc import Callable

SCHEMA = 1
FOLDER = "live"
SILENT_S = 60.0
"""A process that has not written for this long is silent; a server writes every few seconds."""
_MAX_BYTES = 4 << 20

State = Literal["tuning", "waiting", "idle", "busy", "standing aside", "off"]
"""``tuning``: slices run. ``waiting``: work is queued, its binaries are being compiled. ``idle``: nothing
left to learn. ``busy``: requests run. ``standing aside``: something forbids tuning now (``reason``).
``off``: this process will not tune any more (``reason``); stored rows may still be served."""

Presence = Literal["running", "silent", "gone", "elsewhere"]
"""``running`` and ``silent``: the process lives on this host. ``gone``: it ended, or cannot be seen from
here and is silent. ``elsewhere``: another host or container wrote the file within ``SILENT_S``."""


class Owner(NamedTuple):
    """Who a process is. A pid alone comes back for another process, also in another container."""

    pid: int
    boot_id: str
    start_time: int
    """clock ticks after boot, field 22 of /proc/<pid>/stat; 0 where there is no /proc"""
    host: str
    pid_namespace: str


class CompileCounts(msgspec.Struct, frozen=True):
    """Binaries asked of the side process since this process started."""

    ordered: int = 0
    ready: int = 0
    failed: int = 0


class GraphCounts(msgspec.Struct, frozen=True):
    """SGLang's captured graphs, as far as they hold configs; each is named by its kind and size, as ``decode 16``."""

    recapture: str = "off"
    """``idle``: captured again in deep idle. ``restart``: at the next start, or by hand. ``off``: never here"""
    reason: str = ""
    """why not ``idle``, or what cannot be captured again"""
    captured: int = 0
    """graphs that can be captured again"""
    stale: tuple[str, ...] = ()
    """hold another config than the served one"""
    put_off: dict[str, str] = {}
    """stale graph -> why it is not captured again now"""
    outcomes: dict[str, int] = {}
    """captures by outcome: recaptured, failed, withdrawn"""
    pause_ms: dict[str, float] = {}
    """graph -> how long the server stood still for its last capture"""

    def lines(self) -> list[str]:
        """For people; nothing where there are no graphs."""
        if not self.captured:
            return []
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        longest = f", longest pause {max(self.pause_ms.values()):.0f} ms" if self.pause_ms else ""
        when = f"{self.recapture}{f': {self.reason}' if self.reason else ''}"
        return [
            (f"{len(self.stale)} of {self.captured} captured graphs hold an older config;"
            f" {outcomes or 'none captured again'}{longest} (recapture {when})"),
            *(f"not now: graph {where}: {why}" for where, why in sorted(self.put_off.items())),
        ]


class LiveStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one live file. A shape is named by its slug; counts and seconds are since the start."""

    schema: int = SCHEMA
    pid: int
    boot_id: str
    start_time: int
    host: str
    pid_namespace: str = ""
    unix_s: float
    """when this was written"""
    since_unix_s: float
    """when the plugin started in this process"""
    rank: int = 0
    ranks: int = 1
    """of its server, those that share each layer"""
    waits: tuple[str, ...] = ()
    """what its ranks wait for, or what differs between them, in words"""
    sglang: str = ""
    triton: str = ""
    device_name: str = ""
    mode: str = "miss"
    hooks: dict[str, bool] = {}
    """hooked path -> is our hook really in place"""
    state: State = "idle"
    reason: str = ""
    switch: str = "on"
    """``off``: rows are not served and nothing is tuned; ``rows``: served, nothing is tuned"""
    switched_by: str = ""
    epoch: int = 0
    queue: tuple[tuple[str, int], ...] = ()
    """(slug, M) to be tuned, hottest first"""
    current: tuple[str, int] | None = None
    rows: int = 0
    """learned rows that lookups answer from"""
    fitted: int = 0
    """(call, M) whose config SGLang chose and this GPU cannot launch: another one is served"""
    slices: int = 0
    gpu_s: float = 0.0
    gpu_s_last_hour: float = 0.0
    budget_s: float | None = None
    """GPU seconds an hour that tuning may use; None: no cap"""
    idle_s: float = 0.0
    """time without requests of users"""
    deep_idle_s: float = 0.0
    """of it, after enough of it in a row for launches that are longer than a slice"""
    idle_windows: int = 0
    searches: int = 0
    """searches of an M that ended in that time"""
    idle_needed_s: dict[str, float] = {}
    """idle time that the queue of each shape needs, by what the searches so far took"""
    pass_p99_us: float = 0.0
    """how long passes of tuning keep the scheduler"""
    pass_longest_us: float = 0.0
    pass_longest_did: str = ""
    """what that pass did"""
    passes_over: int = 0
    """passes that took longer than they may"""
    pauses: int = 0
    """times that tuning paused itself because of them"""
    compile: CompileCounts = CompileCounts()
    serving_compiles_for_tuning: int = 0
    """kernels that the serving process compiled because of tuning: 0, or a promise is broken"""
    deferred: dict[str, str] = {}
    """"slug M" -> why it cannot be tuned now"""
    quarantine: dict[str, str] = {}
    """candidate -> why it is never tried"""
    doubts: dict[str, str] = {}
    """"slug M" -> what became of a row with which steps took longer than before"""
    step_changes: dict[str, int] = {}
    """sizes where other rows took effect, by what step times say of it: worse, harmless, or why they say nothing"""
    graphs: GraphCounts = GraphCounts()

    @property
    def owner(self) -> Owner:
        return Owner(self.pid, self.boot_id, self.start_time, self.host, self.pid_namespace)


class Server(NamedTuple):
    """A live file that was read."""

    path: Path
    live: LiveStatus
    presence: Presence


class Unread(NamedTuple):
    """A live file that says nothing usable, and why."""

    path: Path
    reason: str


class Servers(NamedTuple):
    """Every live file below a root: those running first, then by the time of writing, newest first."""

    servers: tuple[Server, ...]
    unread: tuple[Unread, ...]


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 - Path.readlink would read "pid:[1]" as a path
    except OSError:
        return ""


def start_time(pid: int) -> int | None:
    """Ticks from boot to the start of a living process; None if there is none (or a zombie), or no /proc."""
    # The name in field 2 may hold blanks and brackets, so the fields are counted from its last bracket.
    fields = _read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(fields) < 20 or fields[0] in {"Z", "X", "x"} or not fields[19].isdecimal():
        return None
    return int(fields[19])


def this_process() -> Owner:
    """The calling process, as its live file names it."""
    pid = os.getpid()
    return Owner(
        pid,
        _read_text("/proc/sys/kernel/random/boot_id"),
        start_time(pid) or 0,
        socket.gethostname(),
        _link("/proc/self/ns/pid"),
    )


def file_name(owner: Owner) -> str:
    """``<pid>-<mark>.json``: containers that share a folder have the same pids, hence the mark."""
    mark = hashlib.sha256(f"{owner.boot_id} {owner.host} {owner.pid_namespace}".encode(errors="replace"))
    return f"{owner.pid}-{mark.hexdigest()[:8]}.json"


def encode(live: LiveStatus) -> bytes:
    """The text of a live file, one line. Raises what msgspec raises on a value that JSON has no form for."""
    return msgspec.json.encode(live) + b"\n"


def decode(text: bytes) -> LiveStatus | str:
    """The status, or the reason why the text is none. Unknown fields pass."""
    try:
        schema = msgspec.json.decode(text, type=_Header).schema
        if schema > SCHEMA:
            return f"written by a newer version (schema {schema}, this one reads {SCHEMA}): update the shell"
        return msgspec.json.decode(text, type=LiveStatus)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"not a live status: {error}"


class _Header(msgspec.Struct):
    schema: int = SCHEMA


def write(root: Path, live: LiveStatus) -> bool:
    """Put the status below ``root``; False when that did not work. Never raises, never waits for a lock.

    Costs file access: call it off the serving thread. Readers see the old text or the new one; nothing is
    synced to the disk, as the text is worthless after a power cut.
    """
    folder = root / FOLDER
    name = file_name(live.owner)
    temporary = folder / f".{name}.tmp"
    try:
        text = encode(live)
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(text)
        temporary.replace(folder / name)
    except (OSError, ValueError, TypeError, ArithmeticError, msgspec.MsgspecError):
        # A full disk or an odd device name must not reach the server; the next call tries again.
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink(missing_ok=True)
        return False
    return True


def presence(owner: Owner, age_s: float, reader: Owner) -> Presence:
    """Whether the writer of a file that is ``age_s`` old still runs, as ``reader`` can tell."""
    fresh = abs(age_s) <= SILENT_S
    same_kernel = bool(owner.boot_id) and owner.boot_id == reader.boot_id
    # Another container on this machine has pids of its own: looking one up here would find a stranger.
    # Host names are not asked: two machines can both be called localhost.
    if same_kernel and owner.pid_namespace == reader.pid_namespace and owner.start_time:
        if start_time(owner.pid) != owner.start_time:
            return "gone"
        return "running" if fresh else "silent"
    return "elsewhere" if fresh else "gone"


def read(root: Path, now_unix_s: float | None = None, breathe: Callable[[], None] = no_breath) -> Servers:
    """Every live file below ``root``; a missing folder is no servers. Raises OSError if it cannot be listed.

    Files of dead processes stay for a day (see ``live``): they are read as ``gone``.
    """
    now = time.time() if now_unix_s is None else now_unix_s
    reader = this_process()
    servers: list[Server] = []
    unread: list[Unread] = []
    folder = root / FOLDER
    try:
        names = os.listdir(folder)  # noqa: PTH208 - paths take 40 lines each
    except FileNotFoundError:
        return Servers((), ())
    for name in sorted(name for name in names if name.endswith(".json") and not name.startswith(".")):
        breathe()
        path = folder / name
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            continue  # it was swept away between the listing and the reading
        except OSError as error:
            unread.append(Unread(path, error.strerror or str(error)))
            continue
        live = decode(text) if len(text) <= _MAX_BYTES else f"larger than {_MAX_BYTES >> 20} MiB"
        if isinstance(live, str):
            unread.append(Unread(path, live))
        else:
            servers.append(Server(path, live, presence(live.owner, now - live.unix_s, reader)))
    order = {"running": 0, "elsewhere": 1, "silent": 2, "gone": 3}
    servers.sort(key=lambda s: (order[s.presence], -s.live.unix_s, s.live.rank))
    return Servers(tuple(servers), tuple(unread))


class Difference(NamedTuple):
    """A field in which servers that share a store and a kind of GPU differ, and each one's value."""

    field: str
    values: tuple[tuple[str, str], ...]
    """(who, value), in the order of the servers"""


_COMPARED = ("sglang", "triton", "mode", "switch", "epoch", "rows")


def differences(servers: tuple[Server, ...]) -> tuple[Difference, ...]:
    """How the servers that live differ from one another, for each kind of GPU on its own."""
    found = []
    by_device: dict[str, list[LiveStatus]] = {}
    for server in servers:
        if server.presence in {"running", "elsewhere"}:
            by_device.setdefault(server.live.device_name, []).append(server.live)
    for lives in by_device.values():
        for field in _COMPARED:
            values = tuple((f"pid {live.pid} on {live.host}", str(getattr(live, field))) for live in lives)
            if len({value for _, value in values}) > 1:
                found.append(Difference(field, values))
        waits = tuple((f"pid {live.pid} on {live.host}", "; ".join(live.waits)) for live in lives if live.waits)
        if waits:
            found.append(Difference("ranks", waits))
    return tuple(found)
