"""Steady load by blocks of steps: the figures find what was planted whatever the host does, the switching inside the
scheduler leaves all as it was, and what compiles is counted, stopped and let go on."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import bench_pairs as pairs
import compile_watch
import steady_probe
from bench_figures import Piece, within
from bench_pairs import Block, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scheduler_process import SchedulerProcess

MS = 1_000_000


# -- figures -------------------------------------------------------------------------------------------------------


def host(seed: int, span_s: float, effect: float) -> list[Step]:
    """Steps of 1.28 ms of a host whose speed wanders by 12 % over 2 s and by 3 % over 60 ms, each of them 8 % off by
    itself and one in a hundred late by 3 ms; every 190 there is a prefill. effect: what tuning adds to a step."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    slow, fast, at_ns, steps = draw.gauss(0, 0.12), draw.gauss(0, 0.03), 0.0, list[Step]()
    while at_ns < span_s * 1e9:
        block, ms = len(steps) // steady_probe.BLOCK, 1.28
        keeps = math.exp(-ms / 2000), math.exp(-ms / 60)
        slow = keeps[0] * slow + 0.12 * math.sqrt(1 - keeps[0] ** 2) * draw.gauss(0, 1)
        fast = keeps[1] * fast + 0.03 * math.sqrt(1 - keeps[1] ** 2) * draw.gauss(0, 1)
        ms *= math.exp(slow + fast + draw.gauss(0, 0.08))
        ms = ms * (1 + effect * steady_probe.tuning_in(block, seed)) + (3.0 if draw.random() < 0.01 else 0.0)
        prefill = len(steps) % 190 == 189
        steps.append(Step(int(at_ns), block, 0 if prefill else 8))
        at_ns += MS * (5.0 if prefill else ms)
    return steps


def compared(seed: int, span_s: float, effect: float) -> dict[str, Any]:
    steps = host(seed, span_s, effect)
    blocks = pairs.blocks_of(steps, 8, steady_probe.DROPPED, lambda block: steady_probe.tuning_in(block, seed))
    return pairs.compared(blocks, 0.005)


def test_a_hundred_seconds_of_a_host_that_wanders_tell_half_a_percent() -> None:
    found = compared(1, 100, 0.003)
    for label, planted in (("median step", 0.003), ("throughput", 1 / 1.003 - 1)):
        assert found[label]["pairs"] > 1500
        assert found[label]["half_width"] < 0.004
        assert abs(found[label]["value"] - planted) < 0.004
        assert found[label]["mean"]["low"] < found[label]["mean"]["value"] < found[label]["mean"]["high"]


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(40):
        found = compared(seed, 4, 0.02)["median step"]
        covered += found["low"] <= 0.02 <= found["high"]
    assert covered >= 34


def test_an_interval_that_is_wider_than_the_limit_says_so_and_does_not_hold() -> None:
    found = compared(3, 4, 0.0)["throughput"]
    assert not found["interval_within_the_limit"]
    check = within("throughput", found, 0.005)
    assert not check.holds
    assert "too wide to tell" in check.measured
    assert within("throughput", {"value": 0.001, "low": -0.002, "high": 0.004}, 0.005).holds
    narrow = within("throughput", {"value": 0.004, "low": 0.002, "high": 0.006}, 0.005)
    assert not narrow.holds
    assert "too wide" not in narrow.measured


def test_too_few_blocks_have_no_figure() -> None:
    assert compared(1, 0.7, 0.0) == {}
    with pytest.raises(ValueError, match="9 differences"):
        pairs.centre([0.1] * 9)


def test_a_centre_is_that_of_the_means_of_any_two() -> None:
    found = pairs.centre([float(v) for v in range(20)] + [1000.0])
    assert found["value"] == 10.0
    assert 4 < found["low"] < 10 < found["high"] < 16


def test_a_step_counts_between_two_like_it_in_its_block() -> None:
    sizes = [8] * 12 + [8, 8, 8, 8, 8, 0, 8, 8, 8, 8, 7, 8] + [8] * 4
    steps = [Step(i * MS, i // 12, size) for i, size in enumerate(sizes)]
    blocks = pairs.blocks_of(steps, 8, 2, lambda block: block == 0)
    assert [(block.number, block.tuning, len(block.spans_ms)) for block in blocks] == [(0, True, 9), (1, False, 4)]
    assert blocks[0].counts
    assert not blocks[1].counts
    assert blocks[0][2:4] == (2 * MS, 11 * MS)


def test_gaps_are_those_that_lie_within_a_block() -> None:
    blocks = [Block(n, True, (100 * n + 10) * MS, (100 * n + 90) * MS, (1.0,)) for n in range(2)]
    times = [(0, 0), (8, 1), (12, 2), (16, 3), (20, 5), (89, 6), (95, 7), (120, 8), (121, 9)]
    found = pairs.with_gaps(blocks, [[Piece(at * MS, tokens) for at, tokens in times]])
    assert found[0].gaps_ms == (4.0, 2.0, 2.0, 69.0)
    assert found[1].gaps_ms == (1.0,)


def test_what_compiling_costs_is_told_apart() -> None:
    blocks = []
    for number in range(160):
        tuning, busy = steady_probe.tuning_in(number, 0), 3 if number < 80 else 0
        ms = (1.1 if busy else 1.0) if tuning else 1.0
        blocks.append(Block(number, tuning, 0, 0, (ms,) * 20, (ms,) * 20, busy if tuning else 0))
    one = next(i for i in range(156, 160) if blocks[i].tuning)
    blocks[one] = blocks[one]._replace(compiling=1)
    blocks[100] = blocks[100]._replace(compiling=None)
    blocks[101] = blocks[101]._replace(compiling=None)
    sides = pairs.by_compiling(blocks)
    assert {name: len(of) // 4 for name, of in sides.items()} == {"some": 20, "none": 18, "between": 1, "unknown": 1}
    some, none = (pairs.compared(sides[name], 0.005)["median step"] for name in ("some", "none"))
    assert math.isclose(some["value"], 0.1)
    assert math.isclose(none["value"], 0.0, abs_tol=1e-12)


def test_what_a_turn_of_a_thread_adds_is_told_by_the_steps_beside_it() -> None:
    steps = [Step(i * MS, 0, 8) for i in range(20)] + [Step(22 * MS + i * MS, 0, 8) for i in range(20)]
    blocks = [Block(0, True, 0, 100 * MS, (1.0,) * 30)]
    found = pairs.beside_turns(blocks, steps, [(19 * MS + MS // 2, 20 * MS), (30 * MS + 1, 30 * MS + MS // 2)])
    assert found["turns"] == found["compared"] == 2
    assert math.isclose(found["added_ms_a_turn"]["mean"], 1.0)  # one of 3 ms instead of 1, and one of 1


# -- inside the scheduler ------------------------------------------------------------------------------------------


def test_four_blocks_are_on_off_off_on_or_the_other_way_round() -> None:
    order = [steady_probe.tuning_in(block, 0) for block in range(400)]
    fours = {tuple(order[i : i + 4]) for i in range(0, 400, 4)}
    assert fours == {(True, False, False, True), (False, True, True, False)}
    assert 30 < sum(order[::4]) < 70


class Recorded:
    """An alternation, and what it did."""

    def __init__(self) -> None:
        self.states: list[bool] = []
        self.hold = steady_probe.Hold()
        flips = steady_probe.Flips(Path("/nowhere"))
        assert not flips.heard
        self.alternation = steady_probe.Alternation(0, self.states.append, self.hold, flips)


def test_tuning_is_switched_every_so_many_steps_and_stays_on_after_the_end() -> None:
    made = Recorded()
    told = [made.alternation.step() for _ in range(10 * steady_probe.BLOCK)]
    assert told == [i // steady_probe.BLOCK for i in range(10 * steady_probe.BLOCK)]
    assert made.states == [steady_probe.tuning_in(block, 0) for block in range(10)]
    assert made.alternation.end() == 10
    assert made.states[-1]
    assert [made.alternation.step() for _ in range(2 * steady_probe.BLOCK)] == [-1] * (2 * steady_probe.BLOCK)
    assert len(made.states) == 11


def test_threads_stand_still_without_tuning_and_go_on_after_the_steps_that_are_dropped() -> None:
    made = Recorded()
    passed: list[int] = []

    def beside() -> None:
        made.hold.wait()
        passed.append(made.alternation.block)

    while made.alternation.step() < 0 or made.states[-1]:
        made.hold.wait()  # the thread that serves never stands still
    threads = [threading.Thread(target=beside) for _ in range(3)]
    for thread in threads:
        thread.start()
    while not made.states[-1]:
        made.alternation.step()
    for _ in range(steady_probe.DROPPED - 1):
        made.alternation.step()
    time.sleep(0.05)
    assert passed == []
    made.alternation.step()
    for thread in threads:
        thread.join(0.5)
    assert passed == [made.alternation.block] * 3
    made.alternation.end()


def test_no_thread_stands_still_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steady_probe, "MOST_HELD_S", 0.05)
    hold = steady_probe.Hold()
    hold.close()
    thread = threading.Thread(target=hold.wait)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()


def switched_between_steps() -> dict[str, object]:
    """The probe's own hooks and commands in a scheduler, batch by batch."""
    import tempfile  # noqa: PLC0415 - this runs in the other process
    import threading  # noqa: PLC0415 - as above
    from pathlib import Path  # noqa: PLC0415 - as above
    from types import SimpleNamespace  # noqa: PLC0415 - as above

    import serving_probe  # noqa: PLC0415
    import steady_probe  # noqa: PLC0415

    from sglang_moe_autotune import live, plugin  # noqa: PLC0415
    from sglang_moe_autotune.breath import Breath  # noqa: PLC0415

    serving_probe._watch_plugin()
    serving, seen = plugin.serving(), []
    turned: list[str] = []
    folder = Path(tempfile.mkdtemp())
    told = serving_probe.alternate(folder)
    mode = SimpleNamespace(is_decode=lambda: True)
    batch = SimpleNamespace(reqs=[1] * 8, forward_mode=mode)

    def serve(count: int) -> None:
        for _ in range(count):
            serving_probe._on_batch(None, batch)
            seen.append(plugin._serving is serving)

    serve(1)
    while seen[-1]:
        serve(1)
    thread = threading.Thread(target=lambda: (Breath()(), turned.append("breath"), live._turn(serving, 1)))
    thread.start()
    thread.join(0.1)
    still, served = not turned, plugin._serving is None
    serving._served, serving._idled = False, True
    blocks = serving_probe.settle()["blocks"]
    thread.join(10)
    serve(3)
    events = list(serving_probe._events)
    steps = [e for e in events if e[0] == serving_probe.STEP]
    return {
        "told": told, "still": still, "away": served, "blocks": blocks,
        "turned": turned, "back": seen[-3:], "served": (serving._served, serving._idled),
        "sizes": sorted({e[3] for e in steps}),
        "states": [steady_probe.tuning_in(e[2], serving_probe.SEED) for e in steps],
        "seen": seen[: len(steps)], "turns": sum(e[0] == serving_probe.TURN for e in events),
    }  # fmt: skip


@pytest.mark.sglang
def test_the_probe_takes_the_plugin_out_of_sight_and_puts_it_back(scheduler: SchedulerProcess) -> None:
    scheduler.reach(Path(steady_probe.__file__).parent)
    told = scheduler.run(switched_between_steps)
    assert told["told"] == {"compile_processes_watched": False}
    assert told["seen"] == told["states"]
    assert not all(told["seen"])
    assert told["sizes"] == [8]
    assert told["away"]
    assert told["still"]
    assert told["turned"] == ["breath"]
    assert told["turns"] >= 1
    assert told["back"] == [True] * 3
    assert told["served"] == [True, False]
    assert told["blocks"] >= 1


# -- what compiles -------------------------------------------------------------------------------------------------


@pytest.fixture
def compiler(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is busy under the compile process's name, with one that is busy below it."""
    folder = tmp_path / "sglang_moe_autotune"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "compile_child.py").write_text(
        "import os, time\nparent = os.getpid()\npid = os.fork()\n"
        "end = time.monotonic() + 60\n"
        "while time.monotonic() < end and (pid or os.getppid() == parent): pass\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "sglang_moe_autotune.compile_child"], cwd=tmp_path
    )
    yield process
    process.kill()
    process.wait()


def ran_s(pids: set[int]) -> float:
    return sum(found.ran_s for pid in pids if (found := compile_watch.read(pid)) is not None)


def test_busy_compile_processes_are_counted_and_stopped_where_nothing_is_tuned(
    compiler: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    end = time.monotonic() + 20
    while len(pids := compile_watch.compiling(os.getpid())) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert compiler.pid in pids
    os.mkfifo(pipe := tmp_path / "flips")
    out = tmp_path / "busy"
    script = Path(compile_watch.__file__)
    watching = subprocess.Popen([sys.executable, str(script), str(os.getpid()), str(pipe), str(out)])
    try:
        flips = steady_probe.Flips(pipe)
        while not flips.heard:
            assert time.monotonic() < end
            time.sleep(0.05)
            flips = steady_probe.Flips(pipe)
        time.sleep(0.3)  # its first look
        flips.tell("0 on")
        time.sleep(0.4)
        flips.tell("1 off")
        time.sleep(0.2)
        before = ran_s(pids)
        time.sleep(0.3)
        stood = ran_s(pids) - before
        flips.tell("2 on")
        time.sleep(0.4)
        flips.tell("3 off")
        time.sleep(0.1)
    finally:
        watching.send_signal(signal.SIGTERM)
        assert watching.wait(10) == 0
    assert stood < 0.02
    rows = [line.split() for line in out.read_text().splitlines()]
    assert [int(row[0]) for row in rows] == [0, 1, 2]
    counts = [int(row[1]) for row in rows]
    assert counts[0] >= 1
    assert counts[1] == 0
    assert counts[2] >= 1
    before = ran_s(pids)
    time.sleep(0.4)
    assert ran_s(pids) - before > 0.02  # its end let them go on
