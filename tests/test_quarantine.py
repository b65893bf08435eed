"""What killed a process in its first launch is never tried again; what a live process launches is no crash."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from typing import IO, TYPE_CHECKING, Any

import first_launches
import msgspec
import pytest
from first_launches import SHAPE

from sglang_moe_autotune import deaths, inquest, status
from sglang_moe_autotune import held as held_files
from sglang_moe_autotune.held import FOLDER, Candidate, Held
from sglang_moe_autotune.inquest import HANGS_S
from sglang_moe_autotune.journal import Announced, Writer
from sglang_moe_autotune.quarantine import Quarantine
from sglang_moe_autotune.shapes import MoeShape

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG, OTHER, PAST = (first_launches.CONFIGS[n] for n in (1, 2, 3))

@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        if process.poll() is None:
            first_launches.end(process)


def crash(root: Path, environment: str = "env") -> None:
    """A process dies in the first launch of ``CONFIG``; that of ``PAST`` came back."""
    first_launches.end(first_launches.start(root, "begin:3 end begin:1", environment))


def journals(root: Path) -> list[Path]:
    return sorted((root / FOLDER).glob("*.journal"))


def test_c17_a_crash_in_a_first_launch_is_found_by_every_later_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    crash(tmp_path)
    with caplog.at_level(logging.INFO, "sglang.moe_autotune"):
        first = Quarantine(tmp_path, "env")
        again = Quarantine(tmp_path, "env")
    assert [r.getMessage() for r in caplog.records] == [
        f"MoE autotune will not try {SHAPE.slug} up {CONFIG} again: {inquest._CRASHED} (M=64).",
        "MoE autotune: candidates in quarantine, never tried: 1.",
    ]
    for held in (first, again):
        assert "in quarantine" in held.reason(SHAPE, "up", CONFIG)
        assert [held.reason(SHAPE, "down", CONFIG), held.reason(SHAPE, "up", OTHER)] == ["", ""]
        assert held.reason(SHAPE, "up", PAST) == "", "its launch came back"
        assert held.reason(MoeShape((8, 64, 32), (8, 32, 32), 4), "up", CONFIG) == ""
    assert not journals(tmp_path)
    assert Quarantine(tmp_path, "another environment").held == ()


@pytest.mark.parametrize("steps", ["begin:1", "begin:1 end"], ids=["hangs", "comes-back"])
def test_the_launches_of_a_live_process_are_no_crashes(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], steps: str
) -> None:
    processes.append(first_launches.start(tmp_path, steps))
    assert Quarantine(tmp_path, "env").held == ()
    assert len(journals(tmp_path)) == 1
    first_launches.end(processes[0])
    assert len(Quarantine(tmp_path, "env").held) == (steps == "begin:1")
    assert not journals(tmp_path)


def test_c18_a_launch_that_does_not_come_back_is_left_out_while_its_process_still_lives(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.append(first_launches.start(tmp_path, "begin:1"))
    now_s = time.time()
    monkeypatch.setattr(inquest.time, "time", lambda: now_s + HANGS_S + 5)
    os.utime(journals(tmp_path)[0], (now_s + HANGS_S,) * 2)  # its writer does so
    assert "does not come back" in Quarantine(tmp_path, "env").reason(SHAPE, "up", CONFIG)
    assert len(journals(tmp_path)) == 1, "its writer lives"


@pytest.mark.parametrize("case", ["stopped", "raised"])
def test_what_is_not_known_to_hang_is_not_left_out_for_good(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """A container that is paused, a machine that sleeps; and a launch that came back with an exception, after which
    requests come for an hour."""
    processes.append(first_launches.start(tmp_path, "begin:1 fault" if case == "raised" else "begin:1"))
    now_s = time.time()
    if case == "stopped":
        processes[0].send_signal(signal.SIGSTOP)
    else:
        os.utime(journals(tmp_path)[0], (now_s + HANGS_S,) * 2)
    monkeypatch.setattr(inquest.time, "time", lambda: now_s + HANGS_S + 5)
    assert Quarantine(tmp_path, "env").held == ()
    assert found_in(tmp_path) == ()
    monkeypatch.undo()
    first_launches.end(processes[0])
    assert Quarantine(tmp_path, "env").reason(SHAPE, "up", CONFIG), "but it ended its process"


def test_an_orderly_end_leaves_nothing(tmp_path: Path) -> None:
    first_launches.end(first_launches.start(tmp_path, "begin:1 end"), signal.SIGTERM)
    assert Quarantine(tmp_path, "env").held == ()
    assert not list((tmp_path / FOLDER).iterdir())


def test_a_crash_in_another_environment_is_kept_for_it(tmp_path: Path) -> None:
    crash(tmp_path, "theirs")
    assert Quarantine(tmp_path, "env").held == ()
    assert not journals(tmp_path)
    assert len(Quarantine(tmp_path, "theirs").held) == 1


def written_elsewhere(root: Path, *, age_s: float, **changes: Any) -> IO[bytes]:
    """The journal of a process that nobody here can look up, in the middle of a launch; while it is open, it lives."""
    owner = status.this_process()._replace(pid=1, pid_namespace="pid:[1]", start_time=5, **changes)
    begun = Announced(1, "it", Candidate("env", SHAPE, "up", CONFIG), 64, time.time() - age_s)
    path = root / FOLDER / "1-0.journal"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(x) + b"\n" for x in (Writer(owner, "env", "s"), begun)))
    file = path.open("ab", buffering=0)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


@pytest.mark.parametrize("changes", [{}, {"boot_id": "another", "host": "node-2"}], ids=["container", "machine"])
def test_a_launch_elsewhere_is_left_out_now_and_for_good_only_when_it_is_overdue(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    """A container that is restarted within seconds must not launch again what killed it."""
    with written_elsewhere(tmp_path, age_s=1, **changes) as file:
        assert Quarantine(tmp_path, "env").reason(SHAPE, "up", CONFIG)
        assert journals(tmp_path)
        assert found_in(tmp_path) == (), "it may live, and come back in an instant"
        assert [one.rows_stay for one in Quarantine(tmp_path, "env").held] == [True], "it takes no stored row away"
        file.write(b'{"type":"closed","number":1}\n')
        assert Quarantine(tmp_path, "env").held == ()
    with written_elsewhere(tmp_path, age_s=HANGS_S + 1, **changes):
        assert Quarantine(tmp_path, "env").held
        assert len(found_in(tmp_path)) == 1


def test_the_lock_tells_a_process_of_another_container_from_a_dead_one(tmp_path: Path) -> None:
    with written_elsewhere(tmp_path, age_s=1):
        assert deaths.read(tmp_path) == ()
    assert len(deaths.read(tmp_path)) == 1
    assert len(found_in(tmp_path)) == 1


def found_in(root: Path) -> tuple[Held, ...]:
    return held_files.read(root / FOLDER).held


def test_held_by_word_lasts_and_a_person_takes_it_away(tmp_path: Path) -> None:
    own = Quarantine(tmp_path, "env")
    own.hold(SHAPE, 64, "up", CONFIG, "it took 1,000 times as long")
    assert own.journal.settled(20)
    assert own.reason(SHAPE, "up", CONFIG) == "in quarantine: it took 1,000 times as long (M=64)"
    assert Quarantine(tmp_path, "env").reason(SHAPE, "up", CONFIG) == own.reason(SHAPE, "up", CONFIG)
    (held,) = held_files.read(tmp_path / FOLDER).held
    assert held_files.clear(tmp_path / FOLDER, held.candidate)
    assert not held_files.clear(tmp_path / FOLDER, held.candidate)
    assert Quarantine(tmp_path, "env").held == ()


def test_files_that_are_damaged_hold_nothing_and_are_named(tmp_path: Path) -> None:
    held_files.keep(tmp_path / FOLDER, Held(Candidate("env", SHAPE, "up", CONFIG), "slow", 1, 1.0))
    folder = tmp_path / FOLDER
    (folder / "zero.json").write_bytes(b"")
    (folder / "folder.json").mkdir()
    (folder / "link.json").symlink_to(next(folder.glob("*.json")))
    (folder / "0-0.journal").write_bytes(b"\xff\n")
    found = held_files.read(folder)
    assert [held.candidate.config for held in found.held] == [CONFIG]
    assert {path.name for path in found.unread} == {"zero.json", "folder.json", "link.json"}
    assert len(Quarantine(tmp_path, "env").held) == 1
    assert isinstance(found.held[0], Held)


def test_without_a_place_to_write_it_holds_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    own = Quarantine(tmp_path / "file", "env")
    own.hold(SHAPE, 1, "up", CONFIG, "slow")
    assert own.journal.settled(20)
    assert own.reason(SHAPE, "up", CONFIG)


def test_read_only_writes_nothing_and_clears_nothing(tmp_path: Path) -> None:
    crash(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / FOLDER).iterdir()}
    own = Quarantine(tmp_path, "env", read_only=True)
    assert own.journal.begin(own.launch(SHAPE, 1, "up", OTHER))
    own.journal.end()
    own.hold(SHAPE, 1, "up", OTHER, "slow")
    assert own.journal.settled(20)
    assert own.reason(SHAPE, "up", CONFIG)
    assert own.reason(SHAPE, "up", OTHER)
    assert {path: path.read_bytes() for path in (tmp_path / FOLDER).iterdir()} == before


def test_a_writer_that_is_killed_at_a_random_moment_accuses_at_most_what_ran(tmp_path: Path) -> None:
    """Whatever its lines say, the page says which one it was, or that none was."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom first_launches import begin, launch\n"
        "from sglang_moe_autotune.journal import Journal\nown, n = Journal(Path(sys.argv[1]), 'env', 's'), 0\n"
        "while True:\n    n += 1\n    begin(own, launch(n % 8))\n    print('runs', n % 8, flush=True)\n"
        "    own.end()\n    print('came back', flush=True)\n"
    )
    places = os.pathsep.join(map(str, (first_launches.HERE.parent, first_launches.HERE)))
    for _ in range(5):
        command = [sys.executable, "-c", script, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": places}) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"runs 1\n"
            time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
            said = process.stdout.read().decode().split("\n")[-2]
        found = Quarantine(tmp_path, "env").held
        assert len(found) <= 1
        assert not list((tmp_path / FOLDER).glob("*.journal"))
        if said.startswith("runs"):  # what was said last is over by now, at most, and the next one not begun
            assert [first_launches.CONFIGS.index(one.candidate.config) for one in found] in ([], [int(said.split()[1])])
        for one in found:
            held_files.clear(tmp_path / FOLDER, one.candidate)
