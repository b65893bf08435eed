"""A pass that took longer than it may is noted, with who had the interpreter meanwhile."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import gpu_server
import pass_probe

from sglang_moe_autotune.pace import Watch
from sglang_moe_autotune.serving import Serving


def spin_beside(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(range(100))


def deep(stop: threading.Event, frames: int) -> None:
    """Rests with many frames on its stack."""
    if frames:
        deep(stop, frames - 1)
    else:
        stop.wait()


def make_passes(folder: Path) -> None:
    """Passes of a process of its own: faulthandler shows a hundred threads, and that of the tests may have more."""

    def idle(self: Any, seconds: float) -> bool:
        began_s, now_s = time.perf_counter(), time.monotonic()
        while time.perf_counter() - began_s < seconds:
            time.sleep(0.001)
        taken_us = 1e6 * (time.perf_counter() - began_s) if seconds else 0.0  # a busy machine makes no long pass of one
        self.watch.observe(taken_us, 5000.0, now_s, "loading a binary")
        return True

    Serving.idle = idle  # type: ignore[assignment, method-assign]
    stop = threading.Event()
    busy = threading.Thread(target=spin_beside, args=(stop,), name="busy")
    resting = threading.Thread(target=stop.wait, name="resting")
    crowd = [threading.Thread(target=deep, args=(stop, 60)) for _ in range(40)]  # as of a server
    pass_probe._watch(folder)
    for thread in (busy, resting, *crowd):
        thread.start()
    serving: Any = SimpleNamespace(watch=Watch())
    for seconds in (0.0, 0.03, 0.0):
        assert Serving.idle(serving, seconds) is True
    stop.set()


def test_a_long_pass_is_noted_with_the_thread_that_was_busy(tmp_path: Path) -> None:
    here = Path(__file__).parent
    code = "import pathlib, sys, test_pass_probe; test_pass_probe.make_passes(pathlib.Path(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), str(here)])},
        capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (note,) = gpu_server.long_passes(tmp_path)
    assert note["did"] == "loading a binary"
    assert note["us"] > 30_000 > note["bound_us"]
    assert note["computed_us"] < note["us"]
    assert any(line.startswith("serving: ") and " idle" in line for line in note["threads"]), note["threads"]
    assert any(line.startswith("busy: ") and "spin_beside" in line for line in note["threads"])
    assert not any(line.startswith("resting") for line in note["threads"])


def test_each_long_slice_of_one_go_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def idle(self: Any, _: object) -> bool:
        for taken_us in (6000.0, 10.0, 7000.0):
            self.watch.observe(taken_us, 5000.0, 1.0, "")
        return True

    monkeypatch.setattr(Serving, "idle", idle)
    monkeypatch.setattr(Watch, "observe", Watch.observe)
    before = signal.getsignal(signal.SIGALRM)
    samples = pass_probe._watch(tmp_path)
    try:
        passes: Any = SimpleNamespace(watch=Watch())
        Serving.idle(passes, None)
        Serving.idle(passes, None)
    finally:
        faulthandler.unregister(signal.SIGALRM)
        signal.signal(signal.SIGALRM, before)
        samples.close()
    assert [note["us"] for note in gpu_server.long_passes(tmp_path)] == [6000, 7000] * 2


def test_it_does_nothing_outside_a_scheduler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    idle = Serving.idle
    monkeypatch.setenv("PASS_PROBE_NOTES", str(tmp_path))
    pass_probe.register()
    assert Serving.idle is idle
    assert gpu_server.long_passes(tmp_path) == []
