"""The scheduler-like process is what plugins take for a scheduler, and failures in it reach the test."""
# ruff: noqa: PLC0415 - what runs in the other process imports there

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from scheduler_process import SchedulerProcess

pytestmark = pytest.mark.sglang


def identity() -> dict[str, object]:
    import multiprocessing
    import os
    import sys

    from sglang.srt import plugins

    return {
        "child": multiprocessing.parent_process() is not None,
        "scheduler": "sglang.srt.managers.scheduler" in sys.modules,
        "loaded": plugins._plugins_loaded,
        "folder": os.environ["SGLANG_MOE_AUTOTUNE_DIR"],
    }


def test_it_is_a_spawned_child_with_the_scheduler_imported_and_plugins_loaded(
    scheduler: SchedulerProcess,
) -> None:
    told = scheduler.run(identity)
    folder = told.pop("folder")
    assert told == {"child": True, "scheduler": True, "loaded": True}
    assert Path(folder).is_relative_to(scheduler.folder)


def test_a_failure_there_fails_here(scheduler: SchedulerProcess) -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        scheduler.run_source("def f(x): return 1 / x", "f", 0)
    assert scheduler.run_source("def f(x): return 1 / x", "f", 2) == 0.5


def test_prints_go_to_its_log(scheduler: SchedulerProcess) -> None:
    assert scheduler.run_source("def f(): print('told on stdout', flush=True)", "f") is None
    assert "told on stdout" in scheduler.log()


def test_the_store_folder_of_a_test_is_its_own(autotune_folder: Path, tmp_path: Path) -> None:
    assert os.environ["SGLANG_MOE_AUTOTUNE_DIR"] == str(autotune_folder)
    assert autotune_folder.is_relative_to(tmp_path)
    assert [n for n in os.environ if n.startswith("SGLANG_MOE_AUTOTUNE_")] == ["SGLANG_MOE_AUTOTUNE_DIR"]
