"""The compile process with several workers: one that dies fails the order in its hands, and no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# The process itself, with a compiler that kills its worker for some orders in place of Triton.
CHILD = """
import os, signal, sys, time
from sglang_moe_autotune import compile_child

def build(order):
    if order["kills"]:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.6)
    return {"hash": order["hash"], "ok": True, "shared_bytes": 1, "error": None, "fault": False}

build.__module__, build.__qualname__ = "sglang_moe_autotune.compile_child", "build"
compile_child.build, compile_child._get_ready = build, lambda order: None
sys.argv = ["compile_child", str(os.getppid()), sys.argv[1]]
compile_child.main()
"""


def answers(processes: int, kills: list[bool]) -> list[dict[str, Any]]:
    """By order, what the process says of it."""
    orders = [{"hash": str(place), "kills": one} for place, one in enumerate(kills)]
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(processes)],
        input="".join(json.dumps(order) + "\n" for order in orders),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=Path(__file__).parent.parent,
    )
    found = {answer["hash"]: answer for answer in map(json.loads, done.stdout.splitlines())}
    assert sorted(found) == sorted(order["hash"] for order in orders), done.stderr
    return [found[order["hash"]] for order in orders]


@pytest.mark.parametrize("processes", [1, 8])
def test_of_orders_in_parallel_only_the_one_that_kills_its_worker_fails(processes: int) -> None:
    kills = [False, False, False, True, False, False, False, False]
    found = answers(processes, kills)
    assert [answer["ok"] for answer in found] == [not one for one in kills]
    assert not any(answer["fault"] for answer in found)
    assert "died on it" in found[3]["error"]


@pytest.mark.parametrize("processes", [1, 4])
def test_where_every_worker_is_killed_it_is_the_machine_from_the_third_on(processes: int) -> None:
    found = answers(processes, [True] * 6)
    assert not any(answer["ok"] for answer in found)
    assert sorted(answer["fault"] for answer in found) == [False, False, True, True, True, True]
