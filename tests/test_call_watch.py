"""The watch of calls: what computing, sleeping, own threads and a stop look like, on real threads and processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

from call_watch import WHYS, Long  # noqa: E402 - it lies there

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the accounts are those of Linux")

STOPPED = [(10.0, 10.2)]


@pytest.mark.parametrize(
    ("call", "why"),
    [
        pytest.param(Long(1.0, 9.0, 8.5, 0.2, 0, 0, 0.0), "computed", id="computed"),
        pytest.param(Long(1.0, 9.0, 1.0, 7.9, 0, 0, 0.0), "queued", id="others-had-the-processors"),
        pytest.param(Long(1.0, 9.0, 1.0, 0.0, 0, 0, 0.0), "queued", id="the-machine-below-had-the-processor"),
        pytest.param(Long(1.0, 9.0, 1.0, 7.8, 1, 0, 0.0), "queued", id="it-hardly-slept"),
        pytest.param(Long(1.0, 9.0, 1.0, 0.0, 2, 1, 0.0), "disk", id="a-page-from-the-disk"),
        pytest.param(Long(1.0, 9.0, 1.0, 0.0, 2, 0, 5.0), "own threads", id="another-thread-had-the-interpreter"),
        pytest.param(Long(1.0, 9.0, 1.0, 0.0, 2, 0, 0.1), "waited", id="it-slept-and-nothing-of-its-own-explains-it"),
        pytest.param(Long(1.0, 9.0, 7.0, 0.0, 1, 0, 0.1), "waited", id="also-where-it-computed-for-longer"),
        pytest.param(Long(9.9, 300.0, 1.0, 0.0, 1, 0, 0.0), "stopped", id="a-signal-stopped-it"),
        pytest.param(Long(10.3, 9.0, 1.0, 0.0, 1, 0, 0.0), "waited", id="a-stop-that-was-over-explains-nothing"),
    ],
)
def test_each_long_call_has_one_reason(call: Long, why: str) -> None:
    assert call.why(STOPPED) == why
    assert why in WHYS


WATCHED = """
import json, sys, threading, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from call_watch import CallWatch

def compute(seconds=0.05):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

def take_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=0.05)

def let_a_thread_work():
    done = threading.Event()
    threading.Thread(target=lambda: (compute(), done.set(), time.sleep(60)), daemon=True).start()
    done.wait()

def be_stopped():
    print("ready", flush=True)
    sys.stdin.readline()

watch = CallWatch(Path(sys.argv[2]))
for function in (lambda: None, compute, take_a_lock, let_a_thread_work, be_stopped):
    watch(function)
print(json.dumps([[call.why(), call._asdict()] for call in watch.long]))
"""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What a process saw of its calls; the last of them is stopped for 0.1 s."""
    command = [sys.executable, "-c", WATCHED, str(SCRIPTS), str(tmp_path_factory.mktemp("watched") / "stacks")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        began_s = time.monotonic()
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGCONT)
        ended_s = time.monotonic()
        text, _ = process.communicate("\n", timeout=60)
    return [*json.loads(text), (began_s, ended_s)]


def test_a_short_call_is_not_looked_into_and_a_long_one_that_computes_waited_for_nothing(watched: list[Any]) -> None:
    assert len(watched) == 5
    why, call = watched[0]
    assert why in {"computed", "queued"}  # the machine may be busy
    assert "compute" in call["where"]
    assert call["computed_ms"] >= 49
    assert call["wall_ms"] >= call["computed_ms"] * 0.99


def test_a_lock_that_nobody_gives_back_is_a_wait_and_the_sample_shows_its_line(watched: list[Any]) -> None:
    why, call = watched[1]
    assert why == "waited"
    assert "take_a_lock" in call["where"]
    assert call["gave_up"] >= 1
    assert call["computed_ms"] + call["queued_ms"] < call["wall_ms"] / 2


def test_a_thread_that_the_call_started_is_one_of_its_own(watched: list[Any]) -> None:
    why, call = watched[2]
    assert why == "own threads"
    assert call["others_ms"] >= 40


def test_a_stop_is_known_by_whoever_made_it(watched: list[Any]) -> None:
    _, call = watched[3]
    assert Long(**call).why() == "waited"
    assert Long(**call).why([watched[4]]) == "stopped"


def test_the_accounts_of_a_thread_grow_while_it_runs() -> None:
    from call_watch import _Account  # noqa: PLC0415 - opens a file of this process

    done = threading.Event()
    thread = threading.Thread(target=lambda: [None for _ in iter(done.is_set, True)])
    thread.start()
    assert thread.native_id is not None
    account = _Account(thread.native_id)
    before, until_s = account.spent_ms, time.monotonic() + 10.0
    while account.spent_ms < before + 10 and time.monotonic() < until_s:
        time.sleep(0.01)
    after = account.spent_ms
    done.set()
    thread.join()
    assert after >= before + 10
    while account.spent_ms and time.monotonic() < until_s:
        time.sleep(0.01)  # joined, and not yet ended
    assert account.spent_ms == 0.0
    account.close()
