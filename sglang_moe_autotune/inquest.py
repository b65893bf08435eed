"""What the journals of the dead tell: which candidates are held from now on, and which deaths count.

    deaths/NAME.json    a server's process that ended in the middle of a first launch
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from sglang_moe_autotune import held, page, status, whole_file
from sglang_moe_autotune.breath import Breath
from sglang_moe_autotune.held import Held
from sglang_moe_autotune.journal import Announced, Told, Writer, parse
from sglang_moe_autotune.status import Owner  # noqa: TC001 - msgspec reads it when it runs

if TYPE_CHECKING:
    from pathlib import Path

DEATHS: Final = "deaths"
HANGS_S: Final = 60.0
"""a launch that has not come back for this long never does"""
_SPEAKS_S: Final = 30.0
"""Writers touch their journals more often than this. One that does not is stopped as a whole, and not by a launch."""
_UNTOUCHED_S: Final = 86400.0
"""after which what a killed writer left half made is removed"""
_HANGS: Final = "its first launch does not come back"
_CRASHED: Final = "a process ended in the middle of its first launch"
_ELSEWHERE: Final = "another process was launching it for the first time"
_SUSPECT: Final = "a process ended when this, or one of {} more, was launched first or about to be"


class Death(msgspec.Struct, frozen=True):
    """A process that ended while it launched something for the first time."""

    owner: Owner
    environment: str
    server: str
    """the same for the ranks of one server, which end together"""
    unix_s: float
    what: str


class Verdict(NamedTuple):
    """What was found now. The files that say so for good are written already, where they can be."""

    held: tuple[Held, ...] = ()
    deaths: tuple[tuple[str, Death], ...] = ()
    """with the name of the file"""


def hold(root: Path, *, read_only: bool = False) -> Verdict:
    """Look at the journals of all other processes; take those of the dead away, once what they tell is kept.

    read_only: write nothing and take nothing away. Never raises OSError.
    """
    folder, reader, now_s = root / held.FOLDER, status.this_process(), time.time()
    verdicts = []
    breathe = Breath()  # servers call this too, beside what they serve
    for path in held.files(folder, ".journal"):
        breathe()
        with contextlib.suppress(OSError):
            if (found := whole_file.read(path, follow=False)) is None:
                continue
            told, age_s = parse(found[0], breathe), now_s - found[1].st_mtime
            if told.writer is None or told.writer.owner[:3] == reader[:3]:
                continue
            if _gone(path, told.writer.owner, reader, age_s):
                verdict = _dead(path, told, found[1].st_mtime)
                verdicts.append(verdict)
                if not read_only:
                    _keep(root, verdict)
                    path.unlink(missing_ok=True)
                    page.remove(told.writer.page)
            else:
                verdicts.append(_living(root, told, reader, (now_s, age_s), read_only=read_only))
    if not read_only:
        _sweep(folder, now_s)
    return Verdict(tuple(h for v in verdicts for h in v.held), tuple(d for v in verdicts for d in v.deaths))


def _dead(path: Path, told: Told, unix_s: float) -> Verdict:
    suspects = _ran(told)
    if not suspects or told.writer is None:
        return Verdict()
    why = _CRASHED if len(suspects) == 1 else _SUSPECT.format(len(suspects) - 1)
    several = len(suspects) > 1
    found = tuple(Held(o.candidate, why, o.M, o.unix_s, rows_stay=several) for o in suspects if o.candidate is not None)
    if told.writer.server is None:
        return Verdict(found)
    what = " or ".join(one.what for one in suspects)
    death = Death(told.writer.owner, told.writer.environment, told.writer.server, unix_s, what)
    return Verdict(found, ((f"{path.stem}.json", death),))


def _living(root: Path, told: Told, reader: Owner, times_s: tuple[float, float], *, read_only: bool) -> Verdict:
    """Of a process elsewhere nobody here can tell whether it lives. Its launch is over in an instant, or else it is a
    culprit: it is not tried here in any case, and left out for good where it must be one. times_s: now, and since the
    writer's last word."""
    assert told.writer is not None  # noqa: S101 - for the type checker
    in_sight = _in_sight(told.writer, reader)
    launches = [one for one in _ran(told) if one.candidate is not None]
    now_s, silent_s = times_s
    overdue = [one for one in launches if now_s - one.unix_s > HANGS_S and silent_s <= _SPEAKS_S and not one.raised]
    hung = tuple(Held(one.candidate, _HANGS, one.M, one.unix_s) for one in overdue if one.candidate is not None)
    if not read_only:
        with contextlib.suppress(OSError):
            _keep(root, Verdict(hung))
    if in_sight:
        return Verdict(hung)
    fresh = [one for one in launches if one not in overdue]
    there = (Held(o.candidate, _ELSEWHERE, o.M, o.unix_s, rows_stay=True) for o in fresh if o.candidate is not None)
    return Verdict((*hung, *there))


def _ran(told: Told) -> tuple[Announced, ...]:
    """Of what is not closed, what ran: exactly where the page can be read, all of it where not."""
    number = page.read(told.writer.page) if told.writer is not None else None
    return told.open if number is None else tuple(one for one in told.open if one.number == number)


def _keep(root: Path, verdict: Verdict) -> None:
    for one in verdict.held:
        held.keep(root / held.FOLDER, one)
    for name, death in verdict.deaths:
        os.close(held.put(root / DEATHS, name, msgspec.json.encode(death)))


def _in_sight(writer: Writer, reader: Owner) -> bool:
    """Pids count in one namespace of one boot of one machine only."""
    owner = writer.owner
    return bool(owner.start_time) and (owner.boot_id, owner.pid_namespace) == (reader.boot_id, reader.pid_namespace)


def _gone(path: Path, owner: Owner, reader: Owner, age_s: float) -> bool:
    """Has the process that wrote the journal ended?"""
    here = status.presence(owner, age_s, reader)
    if here in {"running", "silent"}:
        return False
    if here == "gone" and owner.boot_id == reader.boot_id and owner.pid_namespace == reader.pid_namespace:
        return True
    if owner.boot_id != reader.boot_id and age_s <= status.SILENT_S:
        return False  # another machine may write here, where locks may exclude nobody
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _sweep(folder: Path, now_s: float) -> None:
    with contextlib.suppress(OSError):
        for path in folder.glob(".*.tmp"):
            if now_s - path.lstat().st_mtime > _UNTOUCHED_S:
                path.unlink(missing_ok=True)
