"""Killed at any moment, on any file system: what a writer was told is kept is found, and the file is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ptrace_kill
import pytest
import record_locks
import record_values as v

from sglang_moe_autotune import lock_file, whole_file
from sglang_moe_autotune.document import decode
from sglang_moe_autotune.record_file import RecordFile
from sglang_moe_autotune.records import Contents

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the writers are forked")

FOLDER = Path(__file__).parent


def _script(name: str, *arguments: object) -> dict[str, Any]:
    command = [sys.executable, str(FOLDER / name), *map(str, arguments)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    if done.returncode == ptrace_kill.NOT_ALLOWED:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("locks", "writers", "kills"),
    [
        pytest.param("work", 16, 60, id="C24 locks work"),
        pytest.param("blind", 6, 25, id="flock excludes nobody"),
        pytest.param("ENOLCK", 6, 25, id="no locks available"),
        pytest.param("524", 6, 25, id="locks not supported"),
        pytest.param("vanish", 8, 25, id="the lock file vanishes"),
        pytest.param("two hosts", 8, 25, id="two hosts that do not see each other's locks"),
    ],
)
def test_writers_killed_at_random_lose_nothing_finished(tmp_path: Path, locks: str, writers: int, kills: int) -> None:
    options = ("--locks", locks, "--writers", writers, "--kills", kills, "--pause-ms", 3)
    found = _script("record_crowd.py", tmp_path / "root", *options)
    assert (found["lost"], found["unparseable"]) == (0, 0)
    assert found["finished"] > kills / 2
    assert found["checks"] == kills + 1


def test_without_spares_blind_locks_lose_records_so_the_crowd_would_tell(tmp_path: Path) -> None:
    options = ("--locks", "blind", "--writers", 6, "--kills", 10, "--pause-ms", 10, "--no-spares")
    assert _script("record_crowd.py", tmp_path / "root", *options)["lost"] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="ptrace as Linux has it")
@pytest.mark.parametrize("part", [1, 2, 3, 4])
@pytest.mark.parametrize("state", ["first", "later"], ids=["an empty folder", "a file with records"])
def test_a_writer_killed_at_every_system_call_loses_nothing_finished(tmp_path: Path, state: str, part: int) -> None:
    """Each part takes every fourth stop: together, the whole way."""
    found = _script("ptrace_kill.py", tmp_path, state, part, 4)
    assert (found["lost"], found["unparseable"], found["stuck"]) == (0, 0, 0)
    assert found["stops"] > 100
    assert found["told"] > 5


class Killed(BaseException):
    """Stands for SIGKILL."""


def test_a_blind_writer_that_is_killed_right_after_it_replaced_the_file_takes_nothing_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It read the file before another's change was finished, stops, replaces it with the old rows, and dies."""
    path = tmp_path / "h200.json"
    monkeypatch.setattr(lock_file, "FileLock", record_locks.Blind)
    RecordFile(path).update(v.contents(v.record(1)))
    real = whole_file.replace

    def others_first(place: Path, text: bytes) -> os.stat_result:
        if place != path:
            return real(place, text)
        monkeypatch.setattr(whole_file, "replace", real)
        RecordFile(path).update(v.contents(v.record(2)))
        real(place, text)
        raise Killed

    monkeypatch.setattr(whole_file, "replace", others_first)
    with pytest.raises(Killed):
        RecordFile(path).update(v.contents(v.record(3)))
    shared = decode(path.read_bytes())
    assert isinstance(shared, Contents)
    assert {m for _, m in shared.records} == {1, 3}, "the race was not met"
    contents = RecordFile(path).read()
    assert isinstance(contents, Contents)
    assert {m for _, m in contents.records} == {1, 2, 3}
    RecordFile(path).update(v.contents(v.record(4)))
    mended = decode(path.read_bytes())
    assert isinstance(mended, Contents)
    assert {m for _, m in mended.records} == {1, 2, 3, 4}


@pytest.mark.parametrize("locks", ["blind", "ENOLCK", "524", "two hosts"])
def test_the_ways_of_breaking_locks_break_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: record_locks.Locks
) -> None:
    monkeypatch.setattr(lock_file, "FileLock", lock_file.FileLock)
    monkeypatch.setattr(RecordFile, "_lock", RecordFile._lock)
    file = RecordFile(tmp_path / "h200.json")
    with lock_file.hold(file._lock, 0) as first:
        assert first
        record_locks.break_locks(locks)
        with lock_file.hold(file._lock, 0) as second:
            assert second == (locks in ("blind", "two hosts"))
