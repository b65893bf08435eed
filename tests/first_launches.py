"""Processes that announce and make first launches, and die as they are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_moe_autotune import journal as journals
from sglang_moe_autotune.held import Candidate
from sglang_moe_autotune.journal import Journal, Launch
from sglang_moe_autotune.shapes import KernelConfig, MoeShape

if TYPE_CHECKING:
    from collections.abc import Iterable

SHAPE = MoeShape((8, 64, 32), (8, 32, 32), 2)
CONFIGS = [KernelConfig(16, 32 * n, 32, 1, 4, 2) for n in range(1, 9)]
HERE = Path(__file__).resolve().parent


def launch(number: int, environment: str = "env") -> Launch:
    """The first launch of the candidate of that number."""
    return Launch(f"launch {number}", Candidate(environment, SHAPE, "up", CONFIGS[number]), 64)


def wait(journal: Journal, *launches: Launch) -> None:
    """Until the lines of all are written."""
    deadline = time.monotonic() + 20
    while sum(journal.announced(one) for one in launches) < len(launches):  # each is looked at, and kept by that
        assert time.monotonic() < deadline
        time.sleep(0.001)


def begin(journal: Journal, one: Launch) -> None:
    """As the idle loop does: look again until it may be made."""
    deadline = time.monotonic() + 20
    while not journal.begin(one):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def start(root: Path, steps: str, environment: str = "env", server: str | None = "s") -> subprocess.Popen[bytes]:
    """A process that has made these steps, words like ``announce:0 begin:0 end``, and sleeps."""
    command = [sys.executable, __file__, str(root), environment, server or "", *steps.split()]
    paths = os.pathsep.join((str(HERE.parent), str(HERE)))
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths})
    assert child.stdout is not None
    assert child.stdout.readline() == b"there\n"
    return child


def end(child: subprocess.Popen[bytes], number: int = signal.SIGKILL) -> None:
    child.send_signal(number)
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


def _main(root: str, environment: str, server: str, steps: Iterable[str]) -> None:
    journals._LAPSE_S = 1000.0  # whoever reads may be late
    journal = Journal(Path(root), environment, server or None)
    for step in steps:
        deed, _, which = step.partition(":")
        one = launch(int(which), environment) if which.isdecimal() else Launch(which)
        if deed == "announce":
            wait(journal, one)
        elif deed == "begin":
            begin(journal, one)
        else:
            {"end": journal.end, "fault": journal.fault, "pause": journal.pause}[deed]()
            assert journal.settled(20)
    sys.stdout.write("there\n")
    sys.stdout.flush()
    time.sleep(1000)


if __name__ == "__main__":
    _main(*sys.argv[1:4], sys.argv[4:])
