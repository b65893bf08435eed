"""Leases: one holder at a time where the file system is sane; a dead owner's is taken over; no clock is compared."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from synthetic import bf16_shape

from sglang_moe_autotune.leases import EXPIRY_S, TOUCH_S, Leases, name_of
from sglang_moe_autotune.status import Owner, this_process

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE = bf16_shape()
KEY = (SHAPE, 64)
ELSEWHERE = Owner(4, "another boot", 77, "elsewhere", "pid:[1]")


class Clock:
    """A steady clock that a test moves."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def holds(folder: Path, key: Any = KEY, owner: Owner | None = None, clock: Callable[[], float] | None = None) -> Leases:
    found = Leases(folder, owner or this_process(), clock or Clock())
    assert found.take(key)
    return found


def test_one_of_two_holds_it_until_it_is_released(tmp_path: Path) -> None:
    first, second = holds(tmp_path), Leases(tmp_path, this_process(), Clock())
    assert not second.take(KEY)
    assert second.take((SHAPE, 65))
    first.release(KEY)
    assert second.take(KEY)
    assert first.held == set()


@pytest.mark.parametrize("skew_s", [-86_400.0, 0.0, 86_400.0], ids=["a-day-behind", "equal", "a-day-ahead"])
def test_an_owner_elsewhere_keeps_it_by_its_heartbeat_whatever_its_clock_says(tmp_path: Path, skew_s: float) -> None:
    theirs, ours = Clock(5_000.0), Clock()
    owner, watcher = holds(tmp_path, owner=ELSEWHERE, clock=theirs), Leases(tmp_path, this_process(), ours)
    path = tmp_path / name_of(KEY)
    for _ in range(20):
        theirs.now_s, ours.now_s = theirs.now_s + TOUCH_S, ours.now_s + TOUCH_S
        owner.touch()
        stamp = path.stat().st_mtime_ns + int(skew_s * 1e9)
        os.utime(path, ns=(stamp, stamp))
        assert not watcher.take(KEY)
    ours.now_s += EXPIRY_S - 1
    assert not watcher.take(KEY)  # nothing was heard for less than the limit
    ours.now_s += 2
    assert watcher.take(KEY)
    theirs.now_s += TOUCH_S
    owner.touch()
    assert owner.held == set()  # it has noticed, and does not touch the new owner's
    assert watcher.held == {KEY}


def _hold_and_wait(folder: str, ready: Any) -> None:
    held = Leases(Path(folder), this_process())
    held.take(KEY)
    ready.set()
    time.sleep(600)


def test_the_lease_of_a_killed_process_of_this_machine_is_taken_over_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_hold_and_wait, args=(str(tmp_path), ready), daemon=True)
    process.start()
    assert ready.wait(30)
    ours = Leases(tmp_path, this_process())
    assert not ours.take(KEY)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(10)
    assert ours.take(KEY)


def test_a_pid_that_came_back_is_another_process(tmp_path: Path) -> None:
    holds(tmp_path, owner=this_process()._replace(start_time=1))
    assert Leases(tmp_path, this_process(), Clock()).take(KEY)


def test_a_taker_that_is_late_puts_back_what_another_has_taken_over(tmp_path: Path) -> None:
    holds(tmp_path, owner=this_process()._replace(start_time=1))
    late, other = Leases(tmp_path, this_process(), Clock()), Leases(tmp_path, this_process(), Clock())
    path = tmp_path / name_of(KEY)
    assert late._abandoned(path)  # it has looked, and another is faster
    assert other.take(KEY)
    assert not late._remove(path)
    assert not Leases(tmp_path, this_process(), Clock()).take(KEY)
    other._touched_s = -EXPIRY_S
    other.touch()
    assert other.held == {KEY}


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"pid": "x"}', b"\xff" * 9000], ids=lambda text: repr(text[:9]))
def test_a_broken_lease_expires_as_any_other(tmp_path: Path, text: bytes) -> None:
    (tmp_path / name_of(KEY)).write_bytes(text)
    clock = Clock()
    ours = Leases(tmp_path, this_process(), clock)
    assert not ours.take(KEY)
    clock.now_s += EXPIRY_S + 1
    assert ours.take(KEY)


def test_no_place_for_leases_raises_to_the_caller_and_a_release_never_does(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ours = Leases(tmp_path / "file", this_process(), Clock())
    with pytest.raises(OSError, match="file"):
        ours.take(KEY)
    held = holds(tmp_path / "folder")
    (tmp_path / "folder" / name_of(KEY)).unlink()
    held.release(KEY)
    assert held.held == set()


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(msgspec.json.encode({"pid": 1}))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / name_of(KEY)).symlink_to(tmp_path / "target")
    assert not Leases(tmp_path / "folder", this_process(), Clock()).take(KEY)
    assert (tmp_path / "target").exists()


def test_two_keys_never_share_a_file() -> None:
    shapes = [bf16_shape(E=e, N=n) for e in (8, 64) for n in (256, 512)]
    names = {name_of((shape, M)) for shape in shapes for M in (1, 11, 111)}
    assert len(names) == 12
