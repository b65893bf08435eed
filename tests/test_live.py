"""The thread that says how a process is: no fault ends it, none goes unsaid, and what ended long ago is swept away."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from sglang_moe_autotune import live, status

if TYPE_CHECKING:
    from pathlib import Path

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
