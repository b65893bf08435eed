"""The write path: whatever fails or dies between two steps, the old records or the new ones are whole."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import record_values as v

from sglang_moe_autotune import lock_file, record_file
from sglang_moe_autotune.document import decode, encode
from sglang_moe_autotune.record_file import RecordFile
from sglang_moe_autotune.records import Contents, forget

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = ("mkdir", "open", "fsync", "replace")


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it, and no clean-up that a dead process could not do may matter."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "root" / "h200.json"


def _keys(path: Path) -> set[int]:
    """The M of the records in the file and its spares."""
    contents = RecordFile(path).read()
    if contents is None:
        return set()
    assert isinstance(contents, Contents), contents
    return {m for _, m in contents.records}


def _shared_keys(path: Path) -> set[int]:
    """The M of the records in the file alone."""
    contents = decode(path.read_bytes())
    assert isinstance(contents, Contents), contents
    return {m for _, m in contents.records}


def _break(monkeypatch: pytest.MonkeyPatch, step: str, call: int, error: BaseException) -> Callable[[], int]:
    """Make the n-th call of ``os.step`` raise, and say how often it was called."""
    calls = 0
    real = getattr(os, step)

    def broken(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return real(*args, **kwargs)

    monkeypatch.setattr(os, step, broken)
    return lambda: calls


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "error", [Killed(), OSError(errno.ENOSPC, "No space left on device")], ids=["killed", "disk full"]
)
def test_a_failure_at_any_step_leaves_a_whole_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str, call: int, error: BaseException
) -> None:
    RecordFile(path).update(v.contents(v.record(1)))
    with monkeypatch.context() as patch:
        _break(patch, step, call, error)
        try:
            RecordFile(path).update(v.contents(v.record(2)))
            finished = True
        except (Killed, OSError):
            finished = False
    assert _keys(path) in ([{1, 2}] if finished else [{1}, {1, 2}])
    RecordFile(path).update(v.contents(v.record(3)))
    assert _keys(path) >= {1, 3}


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_no_temporary_file(path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    with monkeypatch.context() as patch:
        calls = _break(patch, step, 1, OSError(errno.ENOSPC, "No space left on device"))
        with pytest.raises(OSError, match="No space"):
            RecordFile(path).update(v.contents(v.record(2)))
        assert calls() == 1
    assert sorted(p.name for p in path.parent.rglob("*")) == [f"{path.name}.d", f"{path.name}.lock"]


def test_the_text_is_synced_before_it_takes_the_place_and_the_folder_after(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        steps.append("folder" if Path(f"/proc/self/fd/{descriptor}").resolve().is_dir() else "file")
        real_fsync(descriptor)

    def replace(source: os.PathLike[str], target: os.PathLike[str]) -> None:
        steps.append("replace")
        assert Path(source).parent == Path(target).parent
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    RecordFile(path).update(v.contents(v.record()))
    assert steps == ["file", "replace", "folder"] * 2


def test_nothing_new_is_no_write(path: Path) -> None:
    file = RecordFile(path)
    file.update(Contents(v.H200))
    assert not path.exists()
    file.update(v.contents(v.record()))
    before = path.stat()
    assert RecordFile(path).update(v.contents(v.record())).contents == v.contents(v.record())
    assert path.stat() == before


def test_a_broken_file_is_renamed_to_a_free_name_and_never_lost(path: Path) -> None:
    path.parent.mkdir()
    (path.parent / f"{path.name}.broken-1").write_text("older")
    path.write_text("half a reco")
    update = RecordFile(path).update(v.contents(v.record()))
    assert [clause.split(":")[0] for clause in update.aside] == [f"{path.name}.broken-2"]
    assert (path.parent / f"{path.name}.broken-1").read_text() == "older"
    assert (path.parent / f"{path.name}.broken-2").read_text() == "half a reco"
    assert _keys(path) == {64}


def test_records_of_another_environment_are_set_aside_not_merged(path: Path) -> None:
    other = v.contents(v.record(1), environment=v.Environment("B200", (10, 0), 148, 232448, 1, "3.8.0", "k1"))
    path.parent.mkdir()
    path.write_bytes(encode(other))
    update = RecordFile(path).update(v.contents(v.record(2)))
    assert "another environment" in update.aside[0]
    assert _keys(path) == {2}
    assert (path.parent / f"{path.name}.broken-1").read_bytes() == encode(other)


def test_a_file_that_was_mended_before_it_could_be_set_aside_is_merged(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.parent.mkdir()
    path.write_text("broken")
    real = RecordFile._take_name

    def mend_first(self: RecordFile) -> Path:
        path.write_bytes(encode(v.contents(v.record(1))))
        return real(self)

    monkeypatch.setattr(RecordFile, "_take_name", mend_first)
    assert RecordFile(path).update(v.contents(v.record(2))).aside == ()
    assert _keys(path) == {1, 2}


def test_a_newer_versions_file_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_text('{"schema": 99}')
    update = RecordFile(path).update(v.contents(v.record()))
    assert "upgrade" in (update.newer or "")
    assert path.read_text() == '{"schema": 99}'


def test_a_lock_that_is_held_too_long_is_not_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "LOCK_S", 0.1)
    path.parent.mkdir()
    with lock_file.hold(path.with_name(f"{path.name}.lock"), 1) as held:
        assert held
        started = time.perf_counter()
        RecordFile(path).update(v.contents(v.record()))
        assert time.perf_counter() - started < 2
    assert _keys(path) == {64}


def test_temporary_files_of_killed_writers_go_after_an_hour(path: Path) -> None:
    path.parent.mkdir()
    old, new, foreign = (path.parent / name for name in (f".{path.name}.1-a.tmp", f".{path.name}.2-b.tmp", ".x.tmp"))
    for temporary in (old, new, foreign):
        temporary.touch()
    for temporary in (old, foreign):
        os.utime(temporary, (1, 1))
    RecordFile(path).update(v.contents(v.record()))
    assert [p.exists() for p in (old, new, foreign)] == [False, True, True]


def _spares(path: Path) -> list[Path]:
    return sorted(path.with_name(f"{path.name}.d").glob("*.json"))


def test_a_writer_has_one_spare_and_a_fork_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RecordFile(path)
    for m in (1, 2, 3):
        file.update(v.contents(v.record(m)))
    [spare] = _spares(path)
    assert _shared_keys(spare) == {1, 2, 3}
    monkeypatch.setattr(os, "getpid", lambda: 1)
    file.update(v.contents(v.record(4)))
    assert [_shared_keys(s) for s in _spares(path) if s != spare] == [{4}]


def test_a_spare_is_closed_after_a_while_so_that_it_stays_small(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, now_s = RecordFile(path), 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    file.update(v.contents(v.record(1)))
    now_s = 901.0
    file.update(v.contents(v.record(2)))
    assert sorted(sorted(_shared_keys(s)) for s in _spares(path)) == [[1], [2]]


def test_spares_go_when_they_are_an_hour_old_and_the_file_holds_what_they_hold(path: Path) -> None:
    RecordFile(path).update(v.contents(v.record(1)))
    path.unlink()  # as if a blind writer had lost it
    [old] = _spares(path)
    RecordFile(path).update(v.contents(v.record(2)))
    for spare in _spares(path):
        os.utime(spare, (time.time() - (3700 if spare == old else 3500),) * 2)
    RecordFile(path).update(v.contents(v.record(3)))
    assert old not in _spares(path)
    assert len(_spares(path)) == 2
    assert _shared_keys(path) == {1, 2, 3}


def test_what_only_a_spare_holds_is_read_and_written_by_the_next(path: Path) -> None:
    RecordFile(path).update(v.contents(v.record(1)))
    path.write_bytes(encode(v.contents(v.record(2))))
    assert _keys(path) == {1, 2}
    RecordFile(path).update(v.contents(v.record(2)))
    assert _shared_keys(path) == {1, 2}


def test_a_record_made_after_a_decision_that_its_writer_did_not_know_counts(path: Path) -> None:
    first = v.record(1)
    RecordFile(path).update(v.contents(first))
    RecordFile(path).change(lambda contents: forget(contents, first.shape, 1))
    again = v.record(1, samples=50)
    assert RecordFile(path).update(v.contents(first)).contents.records == {}
    kept = RecordFile(path).update(v.contents(again), [again]).contents.records
    assert [(r.evidence.samples, r.generation) for r in kept.values()] == [(50, 1)]
