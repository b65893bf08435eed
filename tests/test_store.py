"""The store: in memory at once, on disk soon, never in the way of the server, and nothing finished is lost."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import record_values as v

from sglang_moe_autotune import record_file, whole_file
from sglang_moe_autotune.council import Place
from sglang_moe_autotune.document import decode
from sglang_moe_autotune.errors import StoreError
from sglang_moe_autotune.ranks import Ranks
from sglang_moe_autotune.records import Contents, Record, demote, forget, pin
from sglang_moe_autotune.store import Store, change, environments, file_name, read, relatives

if TYPE_CHECKING:
    from collections.abc import Collection

NEXT_TRITON = msgspec.structs.replace(v.H200, triton="3.8.1")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "root"


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_record_is_known_at_once_and_kept_for_the_next_process(root: Path) -> None:
    store = Store.open(root, v.H200)
    store.submit(record=v.record(8), note=v.note(None, 8, served={8: 2}))
    assert store.contents.records[v.shape(), 8] == v.record(8)
    assert store.flush(5)
    again = Store.open(root, v.H200)
    assert again.contents == store.contents
    assert again.state == "disk"


def test_two_stores_learn_from_each_other_when_they_write(root: Path) -> None:
    first, second = Store.open(root, v.H200), Store.open(root, v.H200)
    first.submit(record=v.record(1))
    assert first.flush(5)
    second.submit(record=v.record(2))
    assert second.flush(5)
    assert {m for _, m in second.contents.records} == {1, 2}


def test_changes_during_a_write_are_written_together(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, writes = threading.Event(), []
    real = record_file.RecordFile.update

    def update(self: record_file.RecordFile, ours: Contents, fresh: Collection[Record]) -> record_file.Update:
        writes.append(len(ours.records))
        gate.wait(5)
        return real(self, ours, fresh)

    monkeypatch.setattr(record_file.RecordFile, "update", update)
    store = Store.open(root, v.H200)
    for m in range(1, 51):
        store.submit(record=v.record(m))
    assert not store.flush(0.01)
    gate.set()
    assert store.flush(5)
    assert len(writes) <= 3
    assert len(read(root / file_name(v.H200)).records) == 50


def test_nothing_is_written_where_nothing_was_learned(root: Path) -> None:
    store = Store.open(root, v.H200)
    assert store.flush(1)
    assert store.close()
    assert not root.parent.exists()


def test_read_only_uses_what_is_stored_and_writes_nothing(root: Path) -> None:
    writer = Store.open(root, v.H200)
    writer.submit(record=v.record(1))
    assert writer.flush(5)
    text = writer.path.read_bytes() if writer.path else b""
    reader = Store.open(root, v.H200, read_only=True)
    reader.submit(record=v.record(2))
    assert not reader.flush(1)
    assert {m for _, m in reader.contents.records} == {1, 2}
    assert writer.path is not None
    assert writer.path.read_bytes() == text


def test_a_senseless_record_is_refused_with_its_reason(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store.open(root, v.H200)
    store.submit(record=v.record(0))
    assert not store.contents.records
    assert "M must be 1" in _warnings(caplog)[0]


def _file(root: Path) -> Path:
    root.parent.mkdir()
    root.touch()
    return root


def _below_a_file(root: Path) -> Path:
    return _file(root) / "below"


def _folder_in_the_place(root: Path) -> Path:
    (root / file_name(v.H200)).mkdir(parents=True)
    return root


def _pipe_in_the_place(root: Path) -> Path:
    root.mkdir(parents=True)
    os.mkfifo(root / file_name(v.H200))
    return root


def _loop(root: Path) -> Path:
    root.parent.mkdir()
    root.symlink_to(root)
    return root


def _impossible_name(root: Path) -> Path:
    return root / ("x" * 300)


BAD_ROOTS = [_file, _below_a_file, _folder_in_the_place, _pipe_in_the_place, _loop, _impossible_name]


@pytest.mark.parametrize("make", BAD_ROOTS, ids=lambda make: make.__name__.strip("_"))
def test_c11_a_bad_root_costs_one_warning(root: Path, caplog: pytest.LogCaptureFixture, make: object) -> None:
    bad = make(root)  # type: ignore[operator]
    store = Store.open(bad, v.H200)
    for m in (1, 2):
        store.submit(record=v.record(m))
        assert not store.flush(5)
    assert store.state == "memory"
    assert len(store.contents.records) == 2
    [warning] = _warnings(caplog)
    assert str(bad) in warning
    assert "SGLANG_MOE_AUTOTUNE_DIR" in warning


def test_c11_no_root_costs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    store = Store.open(None, v.H200)
    store.submit(record=v.record())
    assert not store.flush(1)
    assert store.contents.records
    assert "SGLANG_MOE_AUTOTUNE_DIR" in _warnings(caplog)[0]
    assert len(_warnings(caplog)) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="gives up root by Linux's user ids")
@pytest.mark.parametrize("mode", [0o555, 0o000], ids=["not writable", "not even readable"])
def test_c11_a_root_of_somebody_else(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "root"
    root.mkdir()
    script = f"""
import json, logging, os, pathlib, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import record_values as v
from sglang_moe_autotune.store import Store
if os.getuid() == 0:
    os.seteuid(54321)
messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger().addHandler(handler)
store = Store.open(pathlib.Path({str(root)!r}), v.H200)
store.submit(record=v.record())
print(json.dumps([store.flush(5), store.state, len(store.contents.records), messages]))
"""
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(folder.stat().st_mode | stat.S_IXOTH | stat.S_IROTH)
    root.chmod(mode)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    kept, state, known, messages = json.loads(done.stdout)
    assert (kept, state, known) == (False, "memory", 1)
    assert len(messages) == 1
    assert "Permission denied" in messages[0]


def test_a_disk_that_was_full_is_tried_again(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.open(root, v.H200)
    with monkeypatch.context() as patch:
        error = OSError(28, "No space left on device")
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(error))
        for m in (1, 2):
            store.submit(record=v.record(m))
            assert not store.flush(5)
    store.submit(record=v.record(3))
    assert store.flush(5)
    assert store.state == "disk"
    assert len(read(root / file_name(v.H200)).records) == 3
    assert len(_warnings(caplog)) == 1


def test_a_broken_file_is_set_aside_with_one_warning(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    root.mkdir(parents=True)
    path = root / file_name(v.H200)
    path.write_text("{")
    store = Store.open(root, v.H200)
    assert store.flush(5)
    store.submit(record=v.record())
    assert store.flush(5)
    assert (root / f"{path.name}.broken-1").read_text() == "{"
    assert len(read(path).records) == 1
    [warning] = _warnings(caplog)
    assert "set aside" in warning


def test_a_newer_file_is_left_alone_with_one_warning(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    root.mkdir(parents=True)
    path = root / file_name(v.H200)
    path.write_text('{"schema": 7}')
    store = Store.open(root, v.H200)
    store.submit(record=v.record())
    assert not store.flush(1)
    assert (store.state, path.read_text()) == ("read-only", '{"schema": 7}')
    [warning] = _warnings(caplog)
    assert "upgrade" in warning


def test_c31_an_upgrade_of_triton_keeps_the_old_rows_beside_the_new(root: Path) -> None:
    for environment, m in ((v.H200, 1), (NEXT_TRITON, 2)):
        store = Store.open(root, environment)
        assert not store.contents.records
        store.submit(record=v.record(m))
        assert store.flush(5)
    found = environments(root)
    assert [(e.environment, e.records, e.shapes, e.problems) for e in found] == [
        (v.H200, 1, 1, ()),
        (NEXT_TRITON, 1, 1, ()),
    ]


def test_c31_records_of_an_older_triton_are_there_as_seeds_whatever_else_lies_there(root: Path) -> None:
    others = (
        msgspec.structs.replace(v.H200, device_name="NVIDIA H200 NVL"),
        msgspec.structs.replace(v.H200, device_name="NVIDIA H200-triton-x"),
        msgspec.structs.replace(v.H200, capability=(10, 0)),
    )
    assert relatives(None, v.H200) == relatives(root, v.H200) == []
    for m, environment in enumerate((v.H200, NEXT_TRITON, *others), 1):
        store = Store.open(root, environment)
        store.submit(record=v.record(m))
        assert store.flush(5)
    (root / f"{file_name(v.H200).rpartition('-')[0]}-000000000000.json").write_text("{", encoding="utf-8")
    assert relatives(root, NEXT_TRITON) == [v.record(1)]
    assert relatives(root, v.H200) == [v.record(2)]


@pytest.mark.parametrize(
    ("change", "start"),
    [
        pytest.param({}, "nvidia-h200-triton-3.8.0-", id="plain"),
        pytest.param({"device_name": "NVIDIA H200 NVL"}, "nvidia-h200-nvl-triton-", id="C12 a longer name"),
        pytest.param({"device_name": ""}, "unnamed-triton-", id="a ROCm without a name"),
        pytest.param({"device_name": "../../etc/passwd"}, "etc-passwd-triton-", id="a path"),
        pytest.param({"device_name": "triton_" * 60}, "triton-triton-", id="endless"),
        pytest.param({"triton": "3.8.0+git1"}, "nvidia-h200-triton-3.8.0-git1-", id="local version"),
    ],
)
def test_a_file_name_is_safe_stable_and_its_environments_own(change: dict[str, object], start: str) -> None:
    environment = msgspec.structs.replace(v.H200, **change)
    name = file_name(environment)
    assert name.startswith(start)
    assert Path(name).name == name
    assert len(name) < 200
    assert name == file_name(decode_again(environment))
    assert not change or name != file_name(v.H200)


def decode_again(environment: object) -> v.Environment:
    return msgspec.json.decode(msgspec.json.encode(environment), type=v.Environment)


def test_a_root_behind_a_symlink_works(root: Path, tmp_path: Path) -> None:
    root.mkdir(parents=True)
    (tmp_path / "link").symlink_to(root)
    store = Store.open(tmp_path / "link", v.H200)
    store.submit(record=v.record())
    assert store.flush(5)
    assert read(root / file_name(v.H200)) == store.contents


def test_the_shell_sees_what_is_wrong(root: Path) -> None:
    assert environments(root) == []
    root.mkdir(parents=True)
    good = root / file_name(v.H200)
    store = Store.open(root, v.H200)
    store.submit(record=v.record())
    assert store.flush(5)
    document = json.loads(good.read_text())
    good.write_text(json.dumps({**document, "records": [*document["records"], {"M": 3}]}))
    (root / f"{good.name}.broken-1").touch()
    (root / "other.json").write_text("{")
    first, second = sorted(environments(root), key=lambda e: e.environment is None)
    assert (first.records, len(first.problems)) == (1, 2)
    assert second.environment is None
    assert "broken" in second.problems[0]
    for path in (root / "other.json", root / "missing.json", root):
        with pytest.raises(StoreError, match=str(path)):
            read(path)
    with pytest.raises(StoreError, match="--dir"):
        environments(good)


def test_a_decision_reaches_a_server_that_runs_and_its_old_copy_does_not_undo_it(root: Path) -> None:
    server = Store.open(root, v.H200)
    for m in (1, 2, 3):
        server.submit(record=v.record(m))
    assert server.flush(5)
    path = root / file_name(v.H200)
    change(path, lambda contents: forget(contents, v.shape(), 1))
    change(path, lambda contents: demote(contents, v.record(2), v.record(samples=1).evidence))
    change(path, lambda contents: pin(contents, v.shape(), 3, v.pair(16)))
    server.submit(note=v.note(None, 8))
    assert server.flush(5)
    for contents in (server.contents, read(path), Store.open(root, v.H200).contents):
        found = {m: (record.verdict, record.source) for (_, m), record in contents.records.items()}
        assert found == {2: ("baseline", "learned"), 3: ("faster", "pinned")}
        assert contents.records[v.shape(), 3].pair == v.pair(16)


def test_a_change_starts_a_file_only_where_it_is_told_of_which_environment(root: Path) -> None:
    path = root / file_name(v.H200)
    with pytest.raises(StoreError, match="does not exist"):
        change(path, lambda contents: contents)
    assert not root.exists()
    written = change(path, lambda contents: pin(contents, v.shape(), 8, v.pair()), v.H200)
    assert read(path) == written
    assert len(written.records) == 1


def test_a_change_that_makes_no_sense_is_refused_and_one_that_drops_rows_drops_nothing(root: Path) -> None:
    path = root / file_name(v.H200)
    before = change(path, lambda contents: pin(contents, v.shape(), 8, v.pair()), v.H200)
    text = path.read_bytes()
    with pytest.raises(StoreError, match="M must be"):
        change(path, lambda contents: pin(contents, v.shape(), 0, v.pair()))
    assert change(path, lambda _: v.contents()) == before
    assert path.read_bytes() == text


def test_a_change_in_a_folder_that_cannot_be_written_says_the_cure(root: Path) -> None:
    with pytest.raises(StoreError, match="SGLANG_MOE_AUTOTUNE_DIR"):
        change(_below_a_file(root) / "x.json", lambda contents: contents, v.H200)


WRITER = """
import pathlib, sys
sys.path.insert(0, sys.argv[4])
import record_values as v
from sglang_moe_autotune.store import Store
root, first, count = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
store = Store.open(root, v.H200)
for m in range(first, first + count):
    store.submit(record=v.record(m))
    if m % 10 == 9 and store.flush(30):
        print(m, flush=True)
store.flush(30)
print("done", flush=True)
sys.stdin.read()
"""


def test_c24_eight_processes_killed_at_random_points_lose_nothing_finished(root: Path, tmp_path: Path) -> None:
    chance = random.Random(0)  # noqa: S311 - only when to kill
    folder = str(Path(__file__).parent)
    outputs = [tmp_path / f"out-{n}" for n in range(8)]
    workers = []
    for n, output in enumerate(outputs):
        command = [sys.executable, "-c", WRITER, str(root), str(n * 100 + 1), "100", folder]
        with output.open("w") as file:
            workers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file))
    path = root / file_name(v.H200)
    lines_before_death = {n: chance.randint(0, 9) for n in range(6)}
    deadline = time.monotonic() + 60
    while lines_before_death or not all(o.read_text().endswith("done\n") for o in outputs[6:]):
        assert time.monotonic() < deadline
        assert not path.exists() or isinstance(decode(path.read_bytes()), Contents)
        for n, lines in list(lines_before_death.items()):
            if outputs[n].read_text().count("\n") >= lines:
                time.sleep(chance.uniform(0, 0.005))
                os.kill(workers[n].pid, signal.SIGKILL)
                del lines_before_death[n]
    codes = [worker.communicate(timeout=30) and worker.returncode for worker in workers]
    assert codes == [-signal.SIGKILL] * 6 + [0] * 2
    known = {m for _, m in read(path).records}
    for n, output in enumerate(outputs):
        finished = output.read_text().split()
        last = n * 100 + 100 if finished[-1:] == ["done"] else max(map(int, finished), default=0)
        assert set(range(n * 100 + 1, last + 1)) <= known


def test_what_was_submitted_last_is_written_when_the_process_ends(root: Path) -> None:
    script = WRITER.replace("store.flush(30)\nprint", "print").replace("store.flush(30)", "False")
    command = [sys.executable, "-c", script, str(root), "1", "25", str(Path(__file__).parent)]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    subprocess.run(command, check=True, timeout=60, **streams)
    assert len(read(root / file_name(v.H200)).records) == 25


def test_where_no_thread_can_start_a_record_waits_in_memory_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that serves submits: an exception there would end tuning."""

    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store = Store.open(tmp_path, v.H200)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        store.submit(record=v.record(1))
    assert len(store.contents.records) == 1
    store.submit(record=v.record(2))
    assert store.flush(30)
    assert len(Store.open(tmp_path, v.H200).contents.records) == 2


def test_what_a_store_has_written_itself_is_taken_in(tmp_path: Path) -> None:
    ours, other = Store.open(tmp_path, v.H200), Store.open(tmp_path, v.H200)
    assert ours.path is not None
    ours.submit(record=v.record(64))
    assert ours.flush(5)
    assert ours.taken_in(whole_file.identity(ours.path.stat()))
    ranks, tried = Ranks(ours, Place(), "learned", 0.01), ours._tried
    ranks.turn()
    assert ours._tried == tried
    assert not ours._asked, "a write of this process is followed by no other"
    other.submit(record=v.record(128))
    assert other.flush(5)
    assert not ours.taken_in(whole_file.identity(ours.path.stat()))
    ranks.turn()
    assert ours._asked or ours._busy or ours._tried > tried
    ours.refresh(5)
    ranks.turn()
    assert [record.M for record in ranks.news] == [128]
    assert ours.taken_in(whole_file.identity(ours.path.stat()))
