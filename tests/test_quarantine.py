"""What killed a process in its first launch is never tried again; what a live process launches is no crash."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_moe_autotune import quarantine, status
from sglang_moe_autotune.quarantine import FOLDER, HANGS_S, Candidate, Held, Journal, Quarantine, parse
from sglang_moe_autotune.shapes import KernelConfig, MoeShape

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPE = MoeShape((8, 64, 32), (8, 32, 32), 2)
CONFIG = KernelConfig(16, 64, 32, 1, 4, 2)
OTHER = KernelConfig(16, 128, 32, 1, 4, 2)

CHILD = """
import os, signal, sys, time
from pathlib import Path
from sglang_moe_autotune.quarantine import Quarantine
from sglang_moe_autotune.shapes import KernelConfig, MoeShape

shape, config = MoeShape((8, 64, 32), (8, 32, 32), 2), KernelConfig(16, 64, 32, 1, 4, 2)
root, environment, deed = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
held = Quarantine(root, environment)
held.begin(shape, 7, "down", KernelConfig(16, 32, 32, 1))
held.end()
held.begin(shape, 64, "up", config)
if deed in ("ends", "comes-back"):
    held.end()
print("begun", flush=True)
if deed == "crashes":
    os.kill(os.getpid(), signal.SIGKILL)
if deed == "ends":
    sys.exit()
time.sleep(1000)
"""


def child(root: Path, deed: str, environment: str = "env") -> subprocess.Popen[bytes]:
    """A process that has begun its launch."""
    command = [sys.executable, "-c", CHILD, str(root), environment, deed]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(HERE)})
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    return process


HERE = Path(__file__).resolve().parent.parent


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def finish(process: subprocess.Popen[bytes]) -> None:
    process.wait(timeout=30)
    assert process.stdout is not None
    process.stdout.close()


def journals(root: Path) -> list[Path]:
    return sorted((root / FOLDER).glob("*.journal"))


def test_c17_a_crash_in_a_first_launch_is_found_by_every_later_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    finish(child(tmp_path, "crashes"))
    with caplog.at_level(logging.INFO, "sglang.moe_autotune"):
        first = Quarantine(tmp_path, "env")
        again = Quarantine(tmp_path, "env")
    assert [r.getMessage() for r in caplog.records] == [
        f"MoE autotune will not try {SHAPE.slug} up {CONFIG} again: {quarantine._CRASHED} (M=64).",
        "MoE autotune: candidates in quarantine, never tried: 1.",
    ]
    for held in (first, again):
        assert "in quarantine" in held.reason(SHAPE, "up", CONFIG)
        assert [held.reason(SHAPE, "down", CONFIG), held.reason(SHAPE, "up", OTHER)] == ["", ""]
        assert held.reason(SHAPE, "down", KernelConfig(16, 32, 32, 1)) == "", "its launch came back"
        assert held.reason(MoeShape((8, 64, 32), (8, 32, 32), 4), "up", CONFIG) == ""
    assert not journals(tmp_path)
    assert Quarantine(tmp_path, "another environment").held == ()


@pytest.mark.parametrize("deed", ["hangs", "comes-back"])
def test_the_launches_of_a_live_process_are_no_crashes(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], deed: str
) -> None:
    processes.append(child(tmp_path, deed))
    assert Quarantine(tmp_path, "env").held == ()
    assert len(journals(tmp_path)) == 1
    processes[0].kill()
    processes[0].wait()
    assert len(Quarantine(tmp_path, "env").held) == (deed == "hangs")
    assert not journals(tmp_path)


def test_c18_a_launch_that_does_not_come_back_is_left_out_while_its_process_still_lives(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    processes.append(child(tmp_path, "hangs"))
    now_s = time.time()
    monkeypatch.setattr(quarantine.time, "time", lambda: now_s + HANGS_S + 5)
    assert "does not come back" in Quarantine(tmp_path, "env").reason(SHAPE, "up", CONFIG)
    assert len(journals(tmp_path)) == 1, "its writer lives"


def test_an_orderly_end_leaves_nothing(tmp_path: Path) -> None:
    finish(child(tmp_path, "ends"))
    assert Quarantine(tmp_path, "env").held == ()
    assert not list((tmp_path / FOLDER).iterdir())


def test_a_crash_in_another_environment_is_kept_for_it(tmp_path: Path) -> None:
    finish(child(tmp_path, "crashes", "theirs"))
    assert Quarantine(tmp_path, "env").held == ()
    assert not journals(tmp_path)
    assert len(Quarantine(tmp_path, "theirs").held) == 1


def written_elsewhere(root: Path, *, age_s: float, **changes: Any) -> Path:
    """The journal of a process that nobody here can look up, in the middle of a launch."""
    owner = status.this_process()._replace(pid=1, pid_namespace="pid:[1]", start_time=5, **changes)
    begun = quarantine._Begun(Candidate("env", SHAPE, "up", CONFIG), 64, time.time() - age_s)
    path = root / FOLDER / quarantine._journal_name(owner)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(x) + b"\n" for x in (quarantine._Writer(owner), begun)))
    return path


@pytest.mark.parametrize("changes", [{}, {"boot_id": "another", "host": "node-2"}], ids=["container", "machine"])
def test_a_launch_elsewhere_is_left_out_now_and_for_good_only_when_it_is_overdue(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    """A container that is restarted within seconds must not launch again what killed it."""
    path = written_elsewhere(tmp_path, age_s=1, **changes)
    assert Quarantine(tmp_path, "env").reason(SHAPE, "up", CONFIG)
    assert path.exists()
    assert quarantine.read(tmp_path / FOLDER).held == (), "it may live, and come back in an instant"
    path.write_bytes(path.read_bytes() + b'{"type":"ended"}\n')
    assert Quarantine(tmp_path, "env").held == ()
    written_elsewhere(tmp_path, age_s=HANGS_S + 1, **changes)
    assert Quarantine(tmp_path, "env").held
    assert len(quarantine.read(tmp_path / FOLDER).held) == 1


def test_a_writer_whose_journal_was_cleared_away_begins_another(tmp_path: Path) -> None:
    own = Quarantine(tmp_path, "env")
    own.begin(SHAPE, 1, "up", CONFIG)
    own.end()
    journals(tmp_path)[0].unlink()
    own.begin(SHAPE, 1, "up", OTHER)
    (journal,) = journals(tmp_path)
    assert parse(journal.read_bytes()).open.candidate.config == OTHER  # type: ignore[union-attr]


def test_held_by_word_lasts_and_a_person_takes_it_away(tmp_path: Path) -> None:
    own = Quarantine(tmp_path, "env")
    own.hold(SHAPE, 64, "up", CONFIG, "it took 1,000 times as long")
    assert own.reason(SHAPE, "up", CONFIG) == "in quarantine: it took 1,000 times as long (M=64)"
    assert Quarantine(tmp_path, "env").reason(SHAPE, "up", CONFIG) == own.reason(SHAPE, "up", CONFIG)
    (held,) = quarantine.read(tmp_path / FOLDER).held
    assert quarantine.clear(tmp_path / FOLDER, held.candidate)
    assert not quarantine.clear(tmp_path / FOLDER, held.candidate)
    assert Quarantine(tmp_path, "env").held == ()


def test_the_journal_stays_small_and_tells_the_last_launch(tmp_path: Path) -> None:
    own = Quarantine(tmp_path, "env")
    for number in range(2000):
        own.begin(SHAPE, number, "up", CONFIG)
        own.end()
    own.begin(SHAPE, 5, "down", OTHER)
    (journal,) = journals(tmp_path)
    assert journal.stat().st_size <= 64 << 10
    told = parse(journal.read_bytes())
    assert told.owner == status.this_process()
    assert told.open is not None
    assert (told.open.candidate.gemm, told.open.M) == ("down", 5)


def line(value: Any) -> bytes:
    return bytes(msgspec.json.encode(value)) + b"\n"


WRITER = quarantine._Writer(status.this_process())
BEGUN = quarantine._Begun(Candidate("env", SHAPE, "up", CONFIG), 64, 1.0)
ENDED = quarantine._Ended()


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        pytest.param(b"", False, id="empty"),
        pytest.param(line(BEGUN), True, id="begun"),
        pytest.param(line(BEGUN)[:-1], False, id="torn-before-the-launch-was-made"),
        pytest.param(line(BEGUN)[:40], False, id="torn"),
        pytest.param(line(BEGUN) + line(ENDED)[:9], True, id="killed-while-saying-that-it-ended"),
        pytest.param(line(BEGUN) + line(ENDED), False, id="ended"),
        pytest.param(line(BEGUN) + line(BEGUN), True, id="the-first-was-survived"),
        pytest.param(b"\0\0\0\n" + line(BEGUN) + b"[[[\n{}\n\xff\n", True, id="damage-between"),
        pytest.param(b"[" * 100_000 + b"\n" + line(BEGUN), True, id="deep"),
        pytest.param(line(BEGUN).replace(b"64,", b'"x",'), False, id="not-a-launch"),
    ],
)
def test_a_journal_is_read_line_by_line(text: bytes, is_open: bool) -> None:
    assert (parse(line(WRITER) + text).open is not None) is is_open
    assert parse(line(WRITER) + text).owner == WRITER.owner
    assert parse(text).owner is None


@given(st.binary())
def test_no_text_breaks_the_reader(text: bytes) -> None:
    assert isinstance(parse(text), Journal)


def test_files_that_are_damaged_hold_nothing_and_are_named(tmp_path: Path) -> None:
    Quarantine(tmp_path, "env").hold(SHAPE, 1, "up", CONFIG, "slow")
    folder = tmp_path / FOLDER
    (folder / "zero.json").write_bytes(b"")
    (folder / "folder.json").mkdir()
    (folder / "link.json").symlink_to(next(folder.glob("*.json")))
    (folder / "0-0.journal").write_bytes(b"\xff\n")
    found = quarantine.read(folder)
    assert [held.candidate.config for held in found.held] == [CONFIG]
    assert {path.name for path in found.unread} == {"zero.json", "folder.json", "link.json"}
    assert len(Quarantine(tmp_path, "env").held) == 1
    assert isinstance(found.held[0], Held)


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/self").exists(), reason="no place that root cannot write to")
@pytest.mark.parametrize("place", ["file-in-the-way", "proc"])
def test_without_a_place_to_write_it_holds_in_memory_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    root = Path("/proc/self") if place == "proc" else tmp_path / "file"
    if place != "proc":
        root.write_bytes(b"")
    own = Quarantine(root, "env")
    for _ in range(3):
        own.begin(SHAPE, 1, "up", CONFIG)
        own.end()
    own.hold(SHAPE, 1, "up", CONFIG, "slow")
    assert own.reason(SHAPE, "up", CONFIG)
    assert len([r for r in caplog.records if "keeps no journal" in r.getMessage()]) == 1


def test_read_only_writes_nothing_and_clears_nothing(tmp_path: Path) -> None:
    finish(child(tmp_path, "crashes"))
    before = {path: path.read_bytes() for path in (tmp_path / FOLDER).iterdir()}
    own = Quarantine(tmp_path, "env", read_only=True)
    own.begin(SHAPE, 1, "up", OTHER)
    own.end()
    own.hold(SHAPE, 1, "up", OTHER, "slow")
    assert own.reason(SHAPE, "up", CONFIG)
    assert own.reason(SHAPE, "up", OTHER)
    assert {path: path.read_bytes() for path in (tmp_path / FOLDER).iterdir()} == before


def test_a_killed_writer_loses_no_line(tmp_path: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    """Killed at a random moment of many launches, the journal tells of at most the one that was open."""
    script = CHILD.split("held.begin", maxsplit=1)[0] + (
        "n = 0\nwhile True:\n    n += 1\n    held.begin(shape, n % 1000 + 1, 'up', config)\n"
        "    if n == 50: print('begun', flush=True)\n    held.end()\n"
    )
    for _ in range(5):
        command = [sys.executable, "-c", script, str(tmp_path), "env", ""]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(HERE)})
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        (journal,) = journals(tmp_path)
        told = parse(journal.read_bytes())
        assert told.owner is not None
        assert told.owner.pid == process.pid
        held = Quarantine(tmp_path, "env")
        assert bool(held.held) is (told.open is not None)
        for one in held.held:
            quarantine.clear(tmp_path / FOLDER, one.candidate)
