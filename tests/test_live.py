"""The thread that says how a process is: no fault ends it, none goes unsaid, and what ended long ago is swept away."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import first_launches
import pytest

from sglang_moe_autotune import live, status

if TYPE_CHECKING:
    from pathlib import Path

    from scheduler_process import SchedulerProcess

TORN = RuntimeError("dictionary changed size during iteration")


def turns(teller: live.Teller, *faults: Exception | None) -> None:
    for fault in faults:

        def turn(fault: Exception | None = fault) -> None:
            if fault is not None:
                raise fault

        teller.turn(turn)


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        pytest.param([TORN], 0, id="a dict that changed while it was read"),
        pytest.param([TORN, TORN, None] * 9, 0, id="now and then"),
        pytest.param([RuntimeError("CUDA error: an illegal memory access")] * 40, 1, id="each turn"),
        pytest.param([TypeError("of another kind")], 1, id="another kind"),
        pytest.param([TypeError("of another kind"), None] * 9, 1, id="another kind, again and again"),
    ],
)
def test_a_fault_that_stays_is_said_once(
    caplog: pytest.LogCaptureFixture, faults: list[Exception | None], said: int
) -> None:
    turns(live.Teller(), *faults)
    assert [r.message for r in caplog.records] == [
        "MoE autotune could not say how it is; it goes on and tries again."
    ] * said
    assert all(r.exc_info for r in caplog.records)


def test_live_files_of_processes_that_ended_more_than_a_day_ago_are_swept_away(tmp_path: Path) -> None:
    """SGLang ends its schedulers by SIGKILL: nobody else removes them, and each command of the shell reads all."""
    own, now_s = status.this_process(), time.time()
    elsewhere = own._replace(boot_id="another", host="node-2")
    kept = {own: 2e5, own._replace(pid=4194303): 3600, elsewhere: 30}
    for owner, age_s in (kept | {own._replace(pid=4194302): 2e5, elsewhere._replace(pid=7): 2e5}).items():
        unix_s = now_s - age_s
        assert status.write(tmp_path, status.LiveStatus(**owner._asdict(), unix_s=unix_s, since_unix_s=unix_s))
    folder = tmp_path / status.FOLDER
    for name in (".7-0.json.tmp", "of-a-newer-release.json"):
        (folder / name).write_bytes(b'{"schema": 99}')
        os.utime(folder / name, (now_s - 2e5, now_s - 2e5))
    live.sweep(tmp_path)
    assert {p.name for p in folder.iterdir()} == {*map(status.file_name, kept), "of-a-newer-release.json"}
    live.sweep(tmp_path / "nothing here")


def read_only_server(root: str) -> list[str]:
    import time  # noqa: PLC0415 - this runs in the other process
    from pathlib import Path  # noqa: PLC0415

    from record_values import H200  # noqa: PLC0415
    from replayed_serving import replayed_serving  # noqa: PLC0415

    from sglang_moe_autotune import live, plugin  # noqa: PLC0415
    from sglang_moe_autotune.device import Device  # noqa: PLC0415
    from sglang_moe_autotune.quarantine import Quarantine  # noqa: PLC0415
    from sglang_moe_autotune.serving import Serving  # noqa: PLC0415
    from sglang_moe_autotune.settings import Settings  # noqa: PLC0415

    live.start = lambda _: None
    live.time.sleep = lambda _: None
    serving = Serving(Settings(mode="read-only", dir=Path(root)), plugin.hooks_in_place)
    Quarantine(Path(root), "env", read_only=True)
    provider = replayed_serving().device.provider
    serving.start(Device(H200, provider, "replayed"))
    for number in range(2):
        live._turn(serving, number)
    time.sleep(0.5)
    return [type(serving.tuner).__name__, serving.state]


@pytest.mark.sglang
def test_read_only_writes_nothing_and_takes_nothing_away(scheduler: SchedulerProcess, tmp_path: Path) -> None:
    """Its folder may be an image's, or one that others keep: what a dead process left is another start's to take in."""
    first_launches.end(first_launches.start(tmp_path, "begin:0"))
    ended = status.this_process()._replace(pid=4194303)
    assert status.write(tmp_path, status.LiveStatus(**ended._asdict(), unix_s=1.0, since_unix_s=1.0))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert scheduler.run(read_only_server, str(tmp_path))[0] == "NoneType"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def keeping_server(folder: str) -> list[int]:
    from pathlib import Path  # noqa: PLC0415 - this runs in the other process
    from types import SimpleNamespace  # noqa: PLC0415

    from record_values import H200  # noqa: PLC0415
    from replayed_serving import replayed_serving  # noqa: PLC0415

    from sglang_moe_autotune import live, plugin  # noqa: PLC0415
    from sglang_moe_autotune.device import Device  # noqa: PLC0415
    from sglang_moe_autotune.serving import Serving  # noqa: PLC0415
    from sglang_moe_autotune.settings import Settings  # noqa: PLC0415

    calls: list[int] = []
    held: object = SimpleNamespace(keep=lambda _breathe: calls.append(len(calls)))
    serving = Serving(Settings(dir=Path(folder)), plugin.hooks_in_place)
    live._turn(serving, 1)  # no device yet
    live_start, live.start = live.start, lambda _serving: None
    try:
        serving.start(Device(H200, replayed_serving().device.provider, "replayed", held))  # type: ignore[arg-type]
    finally:
        live.start = live_start
    for number in range(2):
        live._turn(serving, number)
    return calls


@pytest.mark.sglang
def test_the_thread_keeps_binaries_at_each_turn(scheduler: SchedulerProcess, tmp_path: Path) -> None:
    assert scheduler.run(keeping_server, str(tmp_path)) == [0, 1]
