"""Fixtures: a store folder of its own for each test, and processes that behave as SGLang's scheduler does."""

from __future__ import annotations

import importlib.util
import os
import signal
from typing import TYPE_CHECKING

import pytest
from scheduler_process import SchedulerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CLEARED = ("SGLANG_MOE_CONFIG_DIR", "SGLANG_PLUGINS", "SGLANG_PLATFORM", "SGLANG_CACHE_DIR")


def pytest_configure() -> None:
    """A background job ignores Ctrl-C, and so would the programs that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("sglang") and importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang is not installed in this environment: ./scripts/test makes one that has it")


@pytest.fixture(autouse=True)
def autotune_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store folder that the settings point to; the caller's own settings are taken away."""
    for name in [*CLEARED, *(n for n in os.environ if n.startswith("SGLANG_MOE_AUTOTUNE_"))]:
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "autotune"
    monkeypatch.setenv("SGLANG_MOE_AUTOTUNE_DIR", str(folder))
    return folder


@pytest.fixture(scope="module")
def start_scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., SchedulerProcess]]:
    """``start_scheduler(VAR="value", ...)``: a process that imported SGLang's scheduler and loaded its plugins,
    with these environment variables. One costs 10 s and 1 GB: share it among the tests of a module.
    """
    started: list[SchedulerProcess] = []

    def start(plugins: bool = True, **environ: str) -> SchedulerProcess:
        process = SchedulerProcess(tmp_path_factory.mktemp("scheduler"), environ, plugins=plugins)
        started.append(process)
        return process

    yield start
    for process in started:
        process.close()


@pytest.fixture(scope="module")
def scheduler(start_scheduler: Callable[..., SchedulerProcess]) -> SchedulerProcess:
    """One scheduler-like process with default settings, shared by the tests of a module."""
    return start_scheduler()
