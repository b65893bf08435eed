"""What is launched first is on disk before it is launched, nothing waits for that, and nobody is accused falsely."""

from __future__ import annotations

import errno
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import first_launches
import msgspec
import pytest
from first_launches import CONFIGS, SHAPE, begin, launch, wait
from hypothesis import given
from hypothesis import strategies as st

from sglang_moe_autotune import held, inquest, journal, page, status
from sglang_moe_autotune.bench import Declined
from sglang_moe_autotune.held import FOLDER, Candidate
from sglang_moe_autotune.journal import AHEAD, Announced, Closed, Journal, Launch, Told, Writer, parse

if TYPE_CHECKING:
    from collections.abc import Iterator


def told(root: Path) -> Told:
    (path,) = (root / FOLDER).glob("*.journal")
    return parse(path.read_bytes())


def accused(root: Path) -> list[str]:
    """Which launches of the dead a start holds something against, by the number of their config."""
    verdict = inquest.hold(root)
    return sorted(f"launch {CONFIGS.index(one.candidate.config)}" for one in verdict.held)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that answers while this is set."""
    answers, put, append = threading.Event(), held.put, held.append
    answers.set()

    def slow(real: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            answers.wait(30)
            return real(*args, **named)

        return call

    monkeypatch.setattr(held, "put", slow(put))
    monkeypatch.setattr(held, "append", slow(append))
    yield answers
    answers.set()


# -- before a launch ---------------------------------------------------------------------------------------------------


def test_a_launch_is_made_only_when_its_line_is_written_and_nothing_waits_for_that(
    tmp_path: Path, disk: threading.Event
) -> None:
    """With the disk held up, every call returns: a call that waited would wait for this very thread."""
    disk.clear()
    own = Journal(tmp_path, "env", "s")
    for _ in range(100):
        assert not own.announced(launch(0))
        assert not own.begin(launch(0))
        own.pause()
        own.end()
    disk.set()
    wait(own, launch(0))
    (line,) = told(tmp_path).open
    assert (line.what, line.candidate) == ("launch 0", launch(0).candidate)
    disk.clear()
    assert own.begin(launch(0)), "it is written: the disk is not asked again"
    own.end()
    assert not own.begin(launch(0)), "the next first launch of it is another one"


def test_where_the_disk_does_not_answer_an_m_is_put_off(
    tmp_path: Path, disk: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Journal(tmp_path, "env", "s")
    disk.clear()
    assert not own.announced(launch(0))
    now_s = time.monotonic()
    monkeypatch.setattr(journal.time, "monotonic", lambda: now_s + journal.SILENT_S + 1)
    for call in (own.announced, own.begin):
        with pytest.raises(Declined, match="does not answer"):
            call(launch(1))
    monkeypatch.undo()
    disk.set()
    wait(own, launch(1))


def test_few_are_announced_at_a_time_and_those_that_nobody_wants_make_way(tmp_path: Path) -> None:
    own = Journal(tmp_path, "env", "s")
    wait(own, *map(launch, range(AHEAD)))
    assert not own.announced(launch(AHEAD))
    assert len(told(tmp_path).open) == AHEAD
    wait(own, launch(AHEAD))
    assert own.settled(20)
    assert len(told(tmp_path).open) == AHEAD


def test_what_is_announced_and_not_made_is_closed_soon(tmp_path: Path) -> None:
    """Requests came, say, and the server may be ended in an hour."""
    own = Journal(tmp_path, "env", "s")
    wait(own, launch(0), launch(1))
    begin(own, launch(1))
    deadline = time.monotonic() + 20
    while [one.what for one in told(tmp_path).open] != ["launch 1"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not own.begin(launch(0)), "it has to be announced again"


def test_a_pause_leaves_it_announced_and_a_fault_leaves_it_open(tmp_path: Path) -> None:
    own = Journal(tmp_path, "env", "s")
    begin(own, Launch("set-up"))
    own.pause()
    assert own.begin(Launch("set-up"))
    own.fault()
    assert own.settled(20)
    assert [one.what for one in told(tmp_path).open] == ["set-up"]
    begin(own, launch(0))  # the process has outlived it
    assert own.settled(20)
    assert [one.what for one in told(tmp_path).open] == ["launch 0"]


def test_a_fault_is_forgotten_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_FAULT_S", 0.2)
    own = Journal(tmp_path, "env", "s")
    begin(own, launch(0))
    own.fault()
    deadline = time.monotonic() + 20
    while told(tmp_path).open:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_writer_touches_the_page_as_it_does_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_TOUCH_S", 0.01)
    own = Journal(tmp_path, "env", "s")
    begin(own, launch(0))
    own.end()
    assert own.settled(20)
    if own._page is None:
        pytest.skip("there is no memory file system here")
    path = page.PLACE / f"sglang-moe-autotune-{os.geteuid()}" / own._page.name
    os.utime(path, (1.0, 1.0))
    deadline = time.monotonic() + 20
    while path.stat().st_mtime == 1.0:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_hundred_looks_cost_no_line_and_no_system_call(tmp_path: Path) -> None:
    own = Journal(tmp_path, "env", "s")
    wait(own, launch(0))
    before = told(tmp_path)
    for _ in range(100):
        assert own.announced(launch(0))
    assert told(tmp_path) == before


def test_a_search_that_waits_for_many_makes_them_all(tmp_path: Path) -> None:
    """Looks in turn at more than have a place, each slow: none may drive out another that is about to be made."""
    own, left = Journal(tmp_path, "env", "s"), [Launch(f"step {number}") for number in range(24)]
    deadline = time.monotonic() + 20
    while left:
        assert time.monotonic() < deadline
        one = left.pop(0)
        if own.begin(one):
            own.end()
        else:
            left.append(one)
        time.sleep(0.001)


def test_what_is_withdrawn_accuses_nobody(tmp_path: Path) -> None:
    own = Journal(tmp_path, "env", "s")
    wait(own, launch(0), launch(1))
    begin(own, launch(1))
    own.withdraw()
    assert own.settled(20)
    assert [one.what for one in told(tmp_path).open] == ["launch 1"]


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_journal_stays_small_and_tells_what_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_BYTES", 4096)
    own = Journal(tmp_path, "env", "s")
    wait(own, launch(5))
    for number in range(300):
        assert own.announced(launch(5))
        begin(own, Launch(f"step {number}"))
        own.end()
    begin(own, launch(6))
    (path,) = (tmp_path / FOLDER).iterdir()
    assert path.stat().st_size < 8192
    found = told(tmp_path)
    assert found.writer is not None
    assert found.writer.owner == status.this_process()
    assert [one.what for one in found.open] == ["launch 5", "launch 6"]


def test_a_writer_whose_journal_was_cleared_away_begins_another_with_what_is_open(tmp_path: Path) -> None:
    own = Journal(tmp_path, "env", "s")
    begin(own, launch(0))
    next((tmp_path / FOLDER).iterdir()).unlink()
    wait(own, launch(1))
    assert [one.what for one in told(tmp_path).open] == ["launch 0", "launch 1"]


@pytest.mark.parametrize("place", ["file-in-the-way", "proc"])
def test_without_a_place_to_write_every_launch_may_be_made_and_it_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    root = Path("/proc/self") if place == "proc" else tmp_path / "file"
    if place != "proc":
        root.write_bytes(b"")
    own = Journal(root, "env", "s")
    for number in range(3):
        begin(own, launch(number))
        own.end()
    assert len([r for r in caplog.records if "keeps no journal" in r.getMessage()]) == 1


@pytest.mark.parametrize("runs", [False, True], ids=["nothing-runs", "a-launch-runs"])
def test_where_the_disk_is_full_no_line_stays_open_that_cannot_be_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    own = Journal(tmp_path, "env", "s")
    begin(own, launch(0))

    def full(descriptor: int, text: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(held, "append", full)
    if not runs:
        own.end()
    own.announced(launch(1))
    assert own.settled(20)
    if runs:
        time.sleep(0.1)
        assert [one.what for one in told(tmp_path).open] == ["launch 0"], "it may still end this process"
        own.end()
    deadline = time.monotonic() + 5
    while list((tmp_path / FOLDER).iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_a_thread_that_cannot_start_for_long_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    own = Journal(tmp_path, "env", "s")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        assert not own.announced(launch(0))
        now_s = time.monotonic()
        patch.setattr(journal.time, "monotonic", lambda: now_s + journal.SILENT_S + 1)
        with pytest.raises(Declined):
            own.announced(launch(0))
    now_s = time.monotonic() + journal.SILENT_S + 1
    monkeypatch.setattr(journal, "time", _Later(now_s))
    with pytest.raises(Declined):
        own.announced(launch(0))
    assert own.settled(20)
    assert own.announced(launch(0))


class _Later:
    """The clocks, from some moment on."""

    sleep, time = time.sleep, time.time

    def __init__(self, now_s: float) -> None:
        self._ahead_s = now_s - time.monotonic()

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s


# -- the next start ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "here", "elsewhere"),
    [
        pytest.param("announce:0 announce:1", [], [0, 1], id="about to launch"),
        pytest.param("announce:0 announce:1 begin:1 announce:2", [1], [0, 1, 2], id="in a launch"),
        pytest.param("announce:0 begin:0 end announce:1 begin:1 end", [], [], id="between launches"),
        pytest.param("begin:set-up pause announce:3", [], [3], id="between two steps of the set-up"),
        pytest.param("begin:0 fault", [0], [0], id="after a fault"),
        pytest.param("begin:0 fault begin:1 end", [], [], id="after a fault that it outlived"),
    ],
)
@pytest.mark.parametrize("place", ["here", "elsewhere"])
def test_the_page_names_the_culprit_and_without_it_there_are_few_suspects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: str, here: list[int], elsewhere: list[int], place: str
) -> None:
    """Elsewhere: in a fresh container, whose only volume is the folder."""
    first_launches.end(first_launches.start(tmp_path, steps))
    if place == "elsewhere":
        monkeypatch.setattr(page, "PLACE", tmp_path)
    expected = here if place == "here" else elsewhere
    assert accused(tmp_path) == [f"launch {n}" for n in expected]
    assert not list((tmp_path / FOLDER).glob("*.journal"))
    assert accused(tmp_path) == []
    assert len(held.read(tmp_path / FOLDER).held) == len(expected), "for good"
    for one in held.read(tmp_path / FOLDER).held:
        assert "or one of" in one.reason or len(expected) == 1
        assert one.rows_stay is ("or one of" in one.reason), "of several suspects most are innocent"


def test_a_journal_that_nobody_may_take_away_accuses_all_the_same(tmp_path: Path) -> None:
    first_launches.end(first_launches.start(tmp_path, "begin:0"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for _ in range(2):
        assert len(inquest.hold(tmp_path, read_only=True).held) == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def line(value: Any) -> bytes:
    return bytes(msgspec.json.encode(value)) + b"\n"


WRITER = Writer(status.this_process(), "env", "s")
BEGUN = Announced(3, "it", Candidate("env", SHAPE, "up", CONFIGS[0]), 64, 1.0)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        pytest.param(b"", 0, id="empty"),
        pytest.param(line(BEGUN), 1, id="announced"),
        pytest.param(line(BEGUN)[:-1], 0, id="torn-before-the-launch-was-made"),
        pytest.param(line(BEGUN)[:40], 0, id="torn"),
        pytest.param(line(BEGUN) + line(Closed(3))[:9], 1, id="killed-while-it-was-closed"),
        pytest.param(line(BEGUN) + line(Closed(3)), 0, id="closed"),
        pytest.param(line(BEGUN) + line(Closed(2)), 1, id="another-was-closed"),
        pytest.param(line(BEGUN) + line(BEGUN), 1, id="twice"),
        pytest.param(b"\0\0\0\n" + line(BEGUN) + b"[[[\n{}\n\xff\n", 1, id="damage-between"),
        pytest.param(b"[" * 100_000 + b"\n" + line(BEGUN), 1, id="deep"),
        pytest.param(line(BEGUN).replace(b"64,", b'"x",'), 0, id="not-a-launch"),
    ],
)
def test_a_journal_is_read_line_by_line(text: bytes, count: int) -> None:
    assert len(parse(line(WRITER) + text).open) == count
    assert parse(line(WRITER) + text).writer == WRITER
    assert parse(text).writer is None


@given(st.binary())
def test_no_text_breaks_the_reader(text: bytes) -> None:
    assert isinstance(parse(text), Told)
