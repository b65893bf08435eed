"""The parts of a GPU script: each is on disk when it ends, none takes another along, none runs past its time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import gpu_parts
from gpu_parts import Parts

import sglang_moe_autotune


def test_a_part_that_fails_is_told_with_its_traceback_and_the_next_one_runs(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "out" / "found.json", 60.0)

    def fail() -> None:
        raise ValueError("no such layer")

    parts.run("first", fail)
    assert "no such layer" in json.loads(parts.path.read_text())["faults"]["first"]
    parts.run("second", lambda: parts.found.update(figure=7))
    found = json.loads(parts.path.read_text())
    assert found["figure"] == 7
    assert set(found["seconds"]) == {"first", "second"}
    assert parts.failed == ["first"]


def test_a_part_that_needs_more_than_is_left_is_not_begun(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "found.json", 5.0)
    parts.run("long", lambda: pytest.fail("it was begun"), need_s=100.0)
    assert "100 are needed" in json.loads(parts.path.read_text())["faults"]["long"]


def test_a_part_that_hangs_is_ended_even_where_it_catches_what_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_parts, "_LAST_WORD_S", 0.1)
    parts = Parts(tmp_path / "found.json", 1.1)

    def hang() -> None:
        end_s = time.monotonic() + 20
        while time.monotonic() < end_s:
            try:
                time.sleep(0.05)
            except Exception:  # noqa: BLE001, S112 - as a loop that goes on whatever a candidate does
                continue
        pytest.fail("it was left alone")

    parts.run("hangs", hang)
    assert "OverError: the time is over" in parts.found["faults"]["hangs"]
    parts.run("after", lambda: pytest.fail("it was begun"))
    assert parts.failed == ["hangs", "after"]


def test_what_an_earlier_call_found_stays_but_its_errors(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "found.json", 60.0, {"figure": 1, "faults": {"old": "gone"}, "seconds": {"old": 3.0}})
    parts.run("new", lambda: None)
    found = json.loads(parts.path.read_text())
    assert found["figure"] == 1
    assert found["faults"] == {}
    assert set(found["seconds"]) == {"old", "new"}


def test_the_package_of_another_folder_is_not_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu_parts.of_this_checkout()
    monkeypatch.setattr(sglang_moe_autotune, "__file__", str(tmp_path / "sglang_moe_autotune" / "__init__.py"))
    with pytest.raises(SystemExit, match="first in PYTHONPATH"):
        gpu_parts.of_this_checkout()


def test_a_server_ends_with_a_script_that_is_killed() -> None:
    snippet = (
        "import os, subprocess, gpu_server; sleep = ['sleep', '60']\n"
        "child = subprocess.Popen(sleep, start_new_session=True, preexec_fn=gpu_server._die_with_parent)\n"
        "print(child.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(gpu_parts.__file__).parent)}
    done = subprocess.run([sys.executable, "-c", snippet], env=environ, stdout=subprocess.PIPE, text=True, check=False)
    end_s = time.monotonic() + 10
    while (state := Path(f"/proc/{int(done.stdout)}/stat")).exists() and ") Z " not in state.read_text():
        assert time.monotonic() < end_s, "it lives on"
        time.sleep(0.02)
