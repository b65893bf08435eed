"""A live file tells the truth about its process, whoever reads it, and writing one never hurts the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_moe_autotune import status
from sglang_moe_autotune.status import LiveStatus, Owner

NOW = 1_800_000_000.0


def live(owner: Owner | None = None, **fields: object) -> LiveStatus:
    owner = owner or status.this_process()
    basis: dict[str, object] = {**owner._asdict(), "unix_s": NOW, "since_unix_s": NOW - 60, **fields}
    return LiveStatus(**basis)  # type: ignore[arg-type]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    written = live(
        hooks={"a.b": True},
        state="tuning",
        queue=(("E8-N64", 16), ("E8-N64", 1)),
        current=("E8-N64", 16),
        budget_s=600.0,
        deferred={"E8-N64 4096": "no memory"},
    )
    assert status.write(tmp_path, written)
    (server,), unread = status.read(tmp_path, NOW + 1)
    assert (server.live, server.presence, unread) == (written, "running", ())


def test_a_second_write_replaces_the_first(tmp_path: Path) -> None:
    assert status.write(tmp_path, live(epoch=1))
    assert status.write(tmp_path, live(epoch=2))
    (server,), _ = status.read(tmp_path, NOW)
    assert server.live.epoch == 2
    assert len(list((tmp_path / "live").iterdir())) == 1


def test_no_folder_is_no_servers(tmp_path: Path) -> None:
    assert status.read(tmp_path) == ((), ())


@pytest.mark.parametrize(
    ("change", "age_s", "expected"),
    [
        pytest.param({}, 1, "running", id="this process"),
        pytest.param({}, 3600, "silent", id="alive but wrote an hour ago"),
        pytest.param({"start_time": 1}, 1, "gone", id="its pid belongs to another process now"),
        pytest.param({"pid": 2**22 + 1}, 1, "gone", id="no such pid"),
        pytest.param({"boot_id": "before", "start_time": 1}, 1, "elsewhere", id="other kernel, fresh"),
        pytest.param({"boot_id": "before"}, 3600, "gone", id="before the last boot"),
        pytest.param({"pid_namespace": "pid:[1]"}, 1, "elsewhere", id="other container, fresh"),
        pytest.param({"pid_namespace": "pid:[1]"}, 3600, "gone", id="other container, silent"),
        pytest.param({"boot_id": "", "start_time": 0}, 1, "elsewhere", id="a system without proc"),
        pytest.param({"boot_id": "there"}, -20, "elsewhere", id="its clock is ahead of ours"),
        pytest.param({"boot_id": "there"}, -7200, "gone", id="its clock is hours ahead"),
    ],
)
def test_presence(change: dict[str, object], age_s: float, expected: str) -> None:
    reader = status.this_process()
    assert status.presence(reader._replace(**change), age_s, reader) == expected


def test_a_killed_process_is_gone_and_its_file_stays(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib; from sglang_moe_autotune import status;"
        "o = status.this_process(); t = time.time();"
        "l = status.LiveStatus(**o._asdict(), unix_s=t, since_unix_s=t);"
        "print(status.write(pathlib.Path(sys.argv[1]), l), flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "True\n"
        assert [s.presence for s in status.read(tmp_path).servers] == ["running"]
        child.send_signal(signal.SIGKILL)
        deadline = time.monotonic() + 5
        while status.start_time(child.pid) is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        # Nobody has waited for it yet, so it is a zombie: its /proc entry is still there.
        assert Path(f"/proc/{child.pid}").exists()
        assert [s.presence for s in status.read(tmp_path).servers] == ["gone"]
    assert [s.presence for s in status.read(tmp_path).servers] == ["gone"]


def test_containers_with_equal_pids_keep_files_of_their_own(tmp_path: Path) -> None:
    me = status.this_process()
    for namespace in ("pid:[1]", "pid:[2]"):
        assert status.write(tmp_path, live(me._replace(pid_namespace=namespace)))
    assert len(status.read(tmp_path, NOW).servers) == 2


def test_running_servers_come_first_then_the_newest(tmp_path: Path) -> None:
    me = status.this_process()
    assert status.write(tmp_path, live(me._replace(pid=2**22 + 1), unix_s=NOW))
    assert status.write(tmp_path, live(me._replace(pid=2**22 + 2), unix_s=NOW - 9))
    assert status.write(tmp_path, live(me, unix_s=NOW - 30))
    pids = [s.live.pid - 2**22 for s in status.read(tmp_path, NOW).servers[1:]]
    assert status.read(tmp_path, NOW).servers[0].presence == "running"
    assert pids == [1, 2]


TEXT = msgspec.json.encode(live(Owner(1, "b", 2, "h", "n")))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(b"", "not a live status", id="empty"),
        pytest.param(TEXT[: len(TEXT) // 2], "not a live status", id="torn"),
        pytest.param(b"[]", "not a live status", id="a list"),
        pytest.param(b"\xff\xfe", "not a live status", id="not text"),
        pytest.param(TEXT.replace(b'"idle"', b'"dancing"'), "dancing", id="unknown state"),
        pytest.param(TEXT.replace(b'"pid":1', b'"pid":"one"'), "pid", id="a word for the pid"),
        pytest.param(TEXT.replace(b'"schema":1', b'"schema":7'), "(schema 7", id="newer schema"),
        pytest.param(b"[" * 100_000, "not a live status", id="deep"),
        pytest.param(b'{"later":' + b"[" * 100_000, "not a live status", id="deep in an unknown field"),
    ],
)
def test_a_text_that_is_no_status_is_a_reason(tmp_path: Path, text: bytes, says: str) -> None:
    reason = status.decode(text)
    assert isinstance(reason, str)
    assert says in reason
    (tmp_path / "live").mkdir()
    (tmp_path / "live" / "1-0.json").write_bytes(text)
    assert [u.reason for u in status.read(tmp_path).unread] == [reason]


def test_a_folder_or_a_huge_file_in_its_place_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "live" / "1-0.json").mkdir(parents=True)
    with (tmp_path / "live" / "2-0.json").open("wb") as file:
        file.truncate(1 << 33)
    servers, unread = status.read(tmp_path)
    assert servers == ()
    assert [u.path.name for u in unread] == ["1-0.json", "2-0.json"]
    assert "larger than 4 MiB" in unread[1].reason


def test_fields_of_a_later_release_pass() -> None:
    document = {**json.loads(TEXT), "gpu_temperature_c": 71}
    assert isinstance(status.decode(json.dumps(document).encode()), LiveStatus)


@given(
    st.builds(
        LiveStatus,
        pid=st.integers(1, 2**31),
        boot_id=st.text(),
        start_time=st.integers(0, 2**62),
        host=st.text(),
        unix_s=st.floats(0, 1e12),
        since_unix_s=st.floats(0, 1e12),
        state=st.sampled_from(["tuning", "waiting", "idle", "busy", "standing aside", "off"]),
        reason=st.text(),
        budget_s=st.none() | st.floats(0, 1e9),
        queue=st.lists(st.tuples(st.text(), st.integers(1, 2**40))).map(tuple),
        deferred=st.dictionaries(st.text(), st.text()),
    )
)
@settings(max_examples=60, deadline=None)
def test_decode_takes_back_what_encode_gave(value: LiveStatus) -> None:
    assert status.decode(status.encode(value)) == value


def test_an_endless_budget_is_read_as_no_cap() -> None:
    back = status.decode(status.encode(live(budget_s=float("inf"))))
    assert isinstance(back, LiveStatus)
    assert back.budget_s is None


@pytest.mark.parametrize("place", ["a file", "a file in between", "a folder in its place", "NUL in the path"])
def test_a_write_that_cannot_be_says_so_and_leaves_no_trace(tmp_path: Path, place: str) -> None:
    root = tmp_path / "root"
    if place == "a file":
        root.write_text("")
    elif place == "a file in between":
        root.mkdir()
        (root / "live").write_text("")
    elif place == "a folder in its place":
        (root / "live" / status.file_name(status.this_process())).mkdir(parents=True)
    else:
        root = tmp_path / "a\0b"
    before = sorted(tmp_path.rglob("*"))
    assert status.write(root, live()) is False
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"device_name": "\ud800"}, id="lone surrogate"),
        pytest.param({"epoch": 2**70}, id="a count beyond 64 bits"),
        pytest.param({"hooks": {"a": object()}}, id="a value without a JSON form"),
    ],
)
def test_a_status_that_cannot_be_encoded_never_raises(tmp_path: Path, fields: dict[str, object]) -> None:
    outcome = status.write(tmp_path, live(**fields))
    servers, unread = status.read(tmp_path, NOW)
    assert outcome is (len(servers) == 1)
    assert unread == ()


def test_a_reader_never_sees_half_a_status(tmp_path: Path) -> None:
    long, short = live(reason="x" * 60_000), live(reason="y")
    stop = threading.Event()

    def rewrite() -> None:
        while not stop.is_set():
            status.write(tmp_path, long)
            status.write(tmp_path, short)

    assert status.write(tmp_path, short)
    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for _ in range(200):
            servers, unread = status.read(tmp_path, NOW)
            assert (len(servers), unread) == (1, ())
            assert servers[0].live.reason in {long.reason, "y"}
    finally:
        stop.set()
        writer.join()


def test_the_shell_libraries_are_not_needed() -> None:
    code = (
        "import sys\n"
        "for name in ('click', 'rich', 'torch', 'triton', 'sglang', 'filelock', 'platformdirs'):\n"
        "    sys.modules[name] = None\n"
        "import sglang_moe_autotune.status"
    )
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), check=False).returncode == 0


def test_what_ranks_wait_for_is_said_beside_what_differs(tmp_path: Path) -> None:
    owners = [status.this_process()._replace(boot_id=f"boot-{rank}", host=f"host-{rank}") for rank in range(2)]
    for rank, owner in enumerate(owners):
        waits = ("rank 1 serves epoch 2 of 3", "rank 1 has said nothing for 20 s") if rank == 0 else ()
        assert status.write(tmp_path, live(owner, rank=rank, ranks=2, epoch=3 - rank, waits=waits))
    found = {d.field: dict(d.values) for d in status.differences(status.read(tmp_path, NOW + 1).servers)}
    assert sorted(found["epoch"].values()) == ["2", "3"]
    (told,) = found["ranks"].values()
    assert told == "rank 1 serves epoch 2 of 3; rank 1 has said nothing for 20 s"
