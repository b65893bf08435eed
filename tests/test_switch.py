"""The switch: a file that anybody can write, a request, and what a server then still does."""
# ruff: noqa: PLC0415 - what runs in the other process imports there

from __future__ import annotations

import itertools
import json
import time
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result
from made_up_store import fill, live

from sglang_moe_autotune import status, switch
from sglang_moe_autotune.cli import main
from sglang_moe_autotune.switch import LEVELS, Level, Switch

if TYPE_CHECKING:
    from pathlib import Path

    from scheduler_process import SchedulerProcess


@pytest.mark.parametrize(
    ("text", "level"),
    [
        pytest.param(b"off\n", "off", id="echo off"),
        pytest.param(b" OFF \r\n", "off", id="capitals and blanks"),
        pytest.param(b"rows", "rows", id="rows"),
        pytest.param(b"on\n", "on", id="on"),
        pytest.param(b"", "on", id="touched"),
        pytest.param(b"of\n", "rows", id="misspelt"),
        pytest.param(b"0", "rows", id="a number"),
        pytest.param(b"\xff\xfe\x00", "rows", id="no text"),
        pytest.param(b"off" + b"x" * 5000, "rows", id="long"),
    ],
)
def test_a_word_in_the_file_is_obeyed_and_a_wrong_one_stops_the_tuning(
    tmp_path: Path, text: bytes, level: Level
) -> None:
    (tmp_path / switch.FILE).write_bytes(text)
    assert switch.read(tmp_path) == level


def test_without_a_file_or_a_folder_it_is_on_and_what_cannot_be_read_stops_the_tuning(tmp_path: Path) -> None:
    assert switch.read(None) == switch.read(tmp_path) == switch.read(tmp_path / "nowhere") == "on"
    (tmp_path / switch.FILE).mkdir()
    assert switch.read(tmp_path) == "rows"


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_written_is_read(tmp_path: Path, level: Level) -> None:
    root = tmp_path / "new"
    switch.write(root, level)
    assert switch.read(root) == level
    switch.write(root, "on")
    assert not (root / switch.FILE).exists()


@pytest.mark.parametrize(("of_file", "asked"), list(itertools.product(LEVELS, LEVELS)))
def test_the_lower_one_of_file_and_request_holds(of_file: Level, asked: Level) -> None:
    turned = Switch()
    turned.of_file, turned.asked = of_file, asked
    assert LEVELS.index(turned.level) == min(LEVELS.index(of_file), LEVELS.index(asked))
    assert bool(turned.by) == (turned.level != "on")


# -- the shell ----------------------------------------------------------------------------------------------------


def shell(line: str) -> Result:
    return CliRunner().invoke(main, line.split(), terminal_width=80)


def test_off_and_on_in_the_shell_and_status_says_so(autotune_folder: Path) -> None:
    fill(autotune_folder)
    assert status.write(autotune_folder, live(unix_s=time.time()))
    done = shell("off")
    assert done.exit_code == 0
    assert "captured graphs keep theirs" in done.stdout
    assert switch.read(autotune_folder) == "off"
    assert "Switched to 'off'" in shell("status").stdout
    assert json.loads(shell("status --json").stdout)["switch"] == "off"
    told = json.loads(shell("off --keep-rows --json").stdout)
    assert (told["switch"], told["servers"]) == ("rows", 1)
    assert shell("on").exit_code == 0
    assert switch.read(autotune_folder) == "on"
    assert "Switched" not in shell("status").stdout


def test_off_where_no_server_runs_is_set_for_the_next_one_and_says_that_nothing_was_stopped(
    autotune_folder: Path,
) -> None:
    fill(autotune_folder)
    done = shell("off")
    assert done.exit_code == 1
    assert f"Error: no server writes to {autotune_folder}" in done.stderr
    assert "nothing is tuned" not in done.stdout
    assert switch.read(autotune_folder) == "off"
    assert json.loads(shell("off --json").stdout)["servers"] == 0
    assert shell("on").exit_code == 0
    assert switch.read(autotune_folder) == "on"


@pytest.mark.parametrize("line", ["off", "on", "off --keep-rows --json"])
def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path, line: str) -> None:
    done = shell(f"{line} --dir {tmp_path}/nonexist/x")
    assert done.exit_code == 1
    assert "name its folder with --dir or SGLANG_MOE_AUTOTUNE_DIR" in done.stderr
    assert not (tmp_path / "nonexist").exists()


def test_a_server_that_is_silent_is_switched_too(autotune_folder: Path) -> None:
    """Its process lives, and may just be busy."""
    fill(autotune_folder)
    assert status.write(autotune_folder, live(unix_s=time.time() - 3600))
    done = shell("off")
    assert done.exit_code == 0
    assert "running servers" in done.stdout


def test_off_says_where_it_cannot_be_written(autotune_folder: Path) -> None:
    fill(autotune_folder)
    (autotune_folder / switch.FILE).touch()
    (autotune_folder / switch.FILE).unlink()
    (autotune_folder / switch.FILE).mkdir()
    failed = shell("off")
    assert failed.exit_code == 3
    assert "cannot be written" in failed.stderr


# -- in a server --------------------------------------------------------------------------------------------------


def switched() -> dict[str, object]:
    import importlib
    import logging
    from types import SimpleNamespace

    from sglang.srt.managers.scheduler import Scheduler

    from sglang_moe_autotune import live, plugin, releases, switch
    from sglang_moe_autotune.lookup import CallKey
    from sglang_moe_autotune.shapes import ConfigPair, KernelConfig

    server_args = releases.publish_server_args()
    config = importlib.import_module(releases.LOOKUP.module)
    config.get_device_name = lambda *_: "NVIDIA H200"
    shape = ((256, 512, 3072), (256, 3072, 256), 8, None)
    pair = ConfigPair(KernelConfig(32, 64, 128, 1, 4, 3), KernelConfig(32, 128, 64, 16, 8, 2))
    serving = plugin.serving()
    serving.lookup.publish([(CallKey(*shape, None, False), 128, pair)])
    abandoned, steps = [], []

    def step(*, deep_idle: bool) -> str:
        steps.append(deep_idle)
        return "worked"

    serving.tuner = SimpleNamespace(
        gpu_s=0.0, step=step, abandon=lambda: abandoned.append(1), give_way=lambda: True,
        add=lambda *_: None, heat=lambda *_: None,
    )  # fmt: skip
    serving._last_request_s -= 1000
    stub = SimpleNamespace(
        server_args=server_args, _engine_paused=False, slept=0,
        weight_updater=SimpleNamespace(offload_tags=set(), _session=None),
        profiler_manager=SimpleNamespace(profile_in_progress=False),
        idle_sleeper=SimpleNamespace(maybe_sleep=lambda: None),
    )  # fmt: skip
    root = serving.root
    assert root is not None
    rows: list[list[object]] = []

    def look(name: str) -> None:
        before, closed = len(steps), len(abandoned)
        Scheduler.maybe_sleep_on_idle(stub)
        answer = config.try_get_optimal_moe_config(*shape, 128, return_down_config=True)
        rows.append([
            name, len(steps) - before, len(abandoned) - closed, answer[0]["BLOCK_SIZE_M"] == 32,
            serving.switch.level, serving.state,
        ])  # fmt: skip

    def file(level: str) -> None:
        switch.write(root, level)  # type: ignore[arg-type]
        live.follow(serving)

    def ask(**values: object) -> object:
        request = SimpleNamespace(server_args=values)
        plugin.on_control(stub, request)
        return request.server_args

    look("at first")
    file("rows")
    look("file rows")
    file("off")
    look("file off")
    ask(moe_autotune=2)
    look("a request cannot lift the file")
    file("on")
    look("file on")
    ask(moe_autotune=0)
    look("request 0")
    ask(moe_autotune=1.0)
    look("request 1")
    left = [ask(moe_autotune=bad) for bad in (3, -1, 0.5, True)]
    look("not understood")
    kept = ask(moe_autotune=2, pp_max_micro_batch_size=8)
    look("request 2")
    serving.tuner = None
    logging.getLogger("sglang.moe_autotune").setLevel(logging.WARNING)
    return {"rows": rows, "left": left, "kept": kept}


@pytest.mark.sglang
def test_the_switch_stops_tuning_and_takes_rows_back_at_run_time(scheduler: SchedulerProcess) -> None:
    told = scheduler.run(switched)
    assert told["rows"] == [
        ["at first", 1, 0, True, "on", "tuning"],
        ["file rows", 0, 1, True, "rows", "standing aside"],
        ["file off", 0, 1, False, "off", "standing aside"],
        ["a request cannot lift the file", 0, 0, False, "off", "standing aside"],
        ["file on", 1, 0, True, "on", "tuning"],
        ["request 0", 0, 1, False, "off", "standing aside"],
        ["request 1", 0, 1, True, "rows", "standing aside"],
        ["not understood", 0, 0, True, "rows", "standing aside"],
        ["request 2", 1, 0, True, "on", "tuning"],
    ]
    assert told["left"] == [{"moe_autotune": 3}, {"moe_autotune": -1}, {"moe_autotune": 0.5}, {"moe_autotune": True}]
    assert told["kept"] == {"pp_max_micro_batch_size": 8}


def by_sglangs_own_method() -> list[object]:
    import importlib
    import importlib.util
    from types import SimpleNamespace

    from sglang.srt.managers.io_struct import SetInternalStateReq, SetInternalStateReqOutput
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_moe_autotune import plugin, releases

    releases.publish_server_args()
    stub = SimpleNamespace()
    stub.spec_algorithm = SimpleNamespace(is_none=lambda: True)
    stub.metrics_reporter = SimpleNamespace(spec_total_num_accept_tokens=0, spec_total_num_forward_ct=0)
    name = "sglang.srt.managers.scheduler_components.internal_state"
    if importlib.util.find_spec(name):  # else the method does it all itself
        stub.internal_state = object.__new__(importlib.import_module(name).SchedulerInternalStateController)
        stub.internal_state.scheduler = SimpleNamespace()
    unknown = Scheduler.set_internal_state(stub, SetInternalStateReq(server_args={"no_such_knob": 1})).updated
    found: list[object] = [unknown, "server_args" in SetInternalStateReqOutput.__annotations__]
    for values in ({"moe_autotune": 1}, {"moe_autotune": 7}, {"no_such_knob": 1, "moe_autotune": 2}):
        answer = Scheduler.set_internal_state(stub, SetInternalStateReq(server_args=dict(values)))
        found.append([answer.updated, plugin.serving().switch.asked])
    return found


@pytest.mark.sglang
def test_sglangs_own_method_accepts_what_was_ours_and_refuses_the_rest(scheduler: SchedulerProcess) -> None:
    updated, sends_all_back, *told = scheduler.run(by_sglangs_own_method)
    assert updated is sends_all_back, "only releases that answer with all arguments call what they refuse updated"
    assert told == [[True, "rows"], [updated, "rows"], [updated, "on"]]
