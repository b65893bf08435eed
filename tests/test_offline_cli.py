"""``tune`` and ``verify`` as a person runs them: what is done, what is printed where, and the exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from offline_worker import MS, OTHER, REFUSED, SHAPE
from record_values import H200, contents, note, record

from sglang_moe_autotune import crew, offline_cli, store
from sglang_moe_autotune.offline_cli import tune, tune_items, verify, verify_items
from sglang_moe_autotune.selection import Opened
from sglang_moe_autotune.sglang_json import GRID

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.testing import Result

WORKER = str(Path(__file__).with_name("offline_worker.py"))


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    monkeypatch.setattr(crew, "COMMAND", (WORKER,))
    monkeypatch.setenv("COLUMNS", "80")
    return lambda manner: monkeypatch.setattr(crew, "COMMAND", (WORKER, manner))


def run(command: Any, *arguments: str) -> Result:
    result = CliRunner().invoke(command, arguments, terminal_width=80)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def file(*values: Any) -> Opened:
    return Opened(Path("x.json"), contents(*values))


# What to do


def test_without_a_name_all_that_servers_have_met_hottest_first() -> None:
    files = [file(note(SHAPE, served={8: 2, 64: 9, 512: 2})), file(note(SHAPE, served={8: 8}), record(64, OTHER))]
    found = {item.shape: item.ms for item in tune_items(files, (), (), (), 16384)}
    assert found == {SHAPE: (8, 64, 512), OTHER: GRID}


def test_large_m_is_left_out_unless_it_is_asked_for() -> None:
    files = [file(note(SHAPE, served={8: 2, 99999: 9}))]
    (item,) = tune_items(files, (), (), (), 16384)
    assert item.ms == (8,)
    (item,) = tune_items(files, (SHAPE.slug,), (), (99999,), 16384)
    assert item.ms == (99999,)


@pytest.mark.parametrize("name", [pytest.param("E8", id="its-beginning"), pytest.param(SHAPE.slug, id="its-name")])
def test_a_stored_shape_is_found_by(name: str) -> None:
    files = [file(note(SHAPE, served={8: 2}), note(OTHER))]
    assert [item.shape for item in tune_items(files, (name,), (), (), 16384)] == [SHAPE]


def test_a_name_or_fields_will_do_without_a_store() -> None:
    by_name = tune_items([], (SHAPE.slug,), (), MS, 16384)
    by_fields = tune_items([], (), ("E=8,N=256,K=512,top_k=2",), MS, 16384)
    assert by_name == by_fields
    assert by_name[0].shape == SHAPE


def test_only_rows_that_are_served_are_verified() -> None:
    files = [file(record(64, SHAPE), record(8, SHAPE), record(1, SHAPE, verdict="baseline"), record(2, OTHER))]
    assert [(item.shape, item.ms) for item in verify_items(files, ("E8",))] == [(SHAPE, (8, 64))]
    assert {item.shape for item in verify_items(files, ())} == {SHAPE, OTHER}


# tune


def test_tune_then_tune_again_then_verify(autotune_folder: Path) -> None:
    first = run(tune, SHAPE.slug, "--m", "8,64")
    assert first.exit_code == 0, first.output
    assert "2 M searched" in first.stdout
    assert f"{SHAPE.slug} M=64: " in first.stderr
    assert set(store.read(autotune_folder / store.file_name(H200)).records) == {(SHAPE, 8), (SHAPE, 64)}

    second = run(tune, "--m", "8,64")
    assert (second.exit_code, "2 M settled before" in second.stdout) == (0, True)

    third = run(verify)
    assert third.exit_code == 0, third.output
    assert "0 taken back" in third.stdout


def test_json_is_one_object_and_tells_everything(autotune_folder: Path) -> None:
    result = run(tune, SHAPE.slug, REFUSED.slug, "--m", "8", "--json")
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    assert result.stderr == ""
    assert [(row["shape"], row["M"]) for row in told["learned"]] == [(SHAPE.slug, 8)]
    assert told["learned"][0]["samples"] > 0
    assert [row["reason"] for row in told["passed"]] == ["no weights of it can be made up"]
    assert told["gpus"]["default"]["device_name"] == H200.device_name
    assert told["gpus"]["default"]["ended"] == "done"


def test_a_worker_on_each_gpu(autotune_folder: Path) -> None:
    result = run(tune, SHAPE.slug, "--m", "8,64,512", "--gpus", "0,1", "--json")
    told = json.loads(result.stdout)
    assert set(told["gpus"]) == {"0", "1"}
    assert sorted(row["M"] for row in told["learned"]) == [8, 64, 512]


def test_more_gpus_than_work_start_no_more_workers_than_work(autotune_folder: Path) -> None:
    told = json.loads(run(tune, SHAPE.slug, "--m", "8", "--gpus", "0,1,2", "--json").stdout)
    assert set(told["gpus"]) == {"0"}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        pytest.param((), 1, "no shape is stored yet", id="nothing-stored"),
        pytest.param(("E8",), 1, "no shape is stored", id="no-such-name"),
        pytest.param(("--shape", "E=8"), 2, "N must be a whole number", id="bad-fields"),
        pytest.param((SHAPE.slug, "--m", "1,zwei"), 2, "write 1,16,64", id="bad-m"),
        pytest.param((SHAPE.slug, "--budget-s", "nan"), 2, "not a number", id="bad-budget"),
        pytest.param((SHAPE.slug, "--ray", "--gpus", "all"), 2, "leave --gpus out", id="ray-and-gpus"),
        pytest.param((SHAPE.slug, "--dry-run", "--dir", "/nonexist/x"), 2, "no folder /nonexist", id="no-such-folder"),
        pytest.param((SHAPE.slug, "--gpus", "foo", "--dry-run"), 2, "'foo' is no GPU", id="bad-gpus"),
        pytest.param((SHAPE.slug, "--gpus", "", "--dry-run"), 2, "is no GPU", id="no-gpus"),
        pytest.param((SHAPE.slug, "--gpus", "0,,1", "--dry-run"), 2, "is no GPU", id="gpus-with-a-gap"),
        pytest.param((REFUSED.slug, "--m", "8,64"), 1, "M=8, 64: left out, no weights of it", id="refused"),
    ],
)
def test_what_goes_wrong_has_a_sentence_and_a_code(
    autotune_folder: Path, arguments: tuple[str, ...], code: int, says: str
) -> None:
    from sglang_moe_autotune.shell import Commands  # noqa: PLC0415 - the group gives errors their codes

    result = run(Commands(commands={"tune": tune}), "tune", *arguments)
    assert (result.exit_code, says in result.stderr.replace("\n", " ")) == (code, True), result.output


def test_a_worker_that_dies_keeps_its_records_and_ends_with_3(
    autotune_folder: Path, worker: Callable[[str], None]
) -> None:
    worker("dies")
    result = run(tune, SHAPE.slug, "--m", "8,64")
    assert result.exit_code == 3
    assert "illegal memory access" in result.stderr
    assert "1 M searched" in result.stdout
    assert len(store.read(autotune_folder / store.file_name(H200)).records) == 1


@pytest.mark.usefixtures("autotune_folder")
def test_where_no_gpu_is_reached_the_error_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "COMMAND", ("-c", "raise SystemExit('no GPU is visible to this process')"))
    result = run(tune, SHAPE.slug, "--m", "8")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "no GPU is visible to this process" in result.stderr


def test_a_dry_run_starts_nothing(monkeypatch: pytest.MonkeyPatch, autotune_folder: Path) -> None:
    monkeypatch.setattr(crew, "COMMAND", ("-c", "raise SystemExit('started')"))
    result = run(tune, SHAPE.slug, "--m", "8,64", "--dry-run")
    assert (result.exit_code, result.stdout) == (0, f"{SHAPE.slug}  M 8, 64\n")
    told = json.loads(run(tune, SHAPE.slug, "--m", "8,64", "--dry-run", "--json").stdout)
    assert told == {"items": [{"shape": SHAPE.slug, "M": [8, 64]}]}
    assert not autotune_folder.exists()


INTERRUPTED = """
import sys
from sglang_moe_autotune import crew, offline_cli

crew.COMMAND = (sys.argv.pop(1), "slow")
offline_cli.tune()
"""


def test_ctrl_c_keeps_what_was_made(autotune_folder: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", INTERRUPTED, WORKER, SHAPE.slug, "--m", "8,64,512"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[:2]))}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ, start_new_session=True
    ) as process:
        assert process.stderr is not None
        assert "M=" in process.stderr.readline()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    made = store.read(autotune_folder / store.file_name(H200)).records
    assert f"{len(made)} M searched" in out
    assert len(made) < 3


def test_records_of_other_machines_are_kept_here_too(
    autotune_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from test_crew import FakeRay  # noqa: PLC0415 - one test

    monkeypatch.setitem(sys.modules, "ray", FakeRay(gpus=1))  # type: ignore[arg-type]
    order = offline_cli._order

    def elsewhere(*arguments: Any) -> Any:
        made = order(*arguments)
        return type(made)(made.work, made.items, str(tmp_path / "on-the-node"))

    monkeypatch.setattr(offline_cli, "_order", elsewhere)
    result = run(tune, SHAPE.slug, "--m", "8", "--ray", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["gpus"]["ray-0"]["kept"] is True
    assert set(store.read(autotune_folder / store.file_name(H200)).records) == {(SHAPE, 8)}


# verify


def test_verify_without_rows_says_so(autotune_folder: Path) -> None:
    held = store.Store.open(autotune_folder, H200)
    held.submit(note=note(SHAPE, served={8: 1}))
    held.close(5)
    result = run(verify)
    assert (result.exit_code, "nothing to verify" in result.stderr) == (1, True)


def test_a_row_that_is_taken_back_ends_with_1(autotune_folder: Path) -> None:
    run(tune, SHAPE.slug, "--m", "8")
    held = store.Store.open(autotune_folder, H200)
    (row,) = held.contents.records.values()
    # The baseline itself, stored as a faster pair, is no faster than the baseline.
    lie = {"verdict": "faster", "pair": row.baseline, "generation": 1}
    held.submit(record=type(row)(**{**{f: getattr(row, f) for f in row.__struct_fields__}, **lie}))
    held.close(5)
    result = run(verify, "--json")
    assert result.exit_code == 1
    assert [found["outcome"] for found in json.loads(result.stdout)["verified"]] == ["slower"]
    (row,) = store.read(autotune_folder / store.file_name(H200)).records.values()
    assert row.verdict == "baseline"
