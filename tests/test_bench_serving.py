"""The serving bench: its statistics on samples whose answer is known, and whole runs on a stand-in for the server."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import bench_figures as figures
import bench_serving
import serving_probe as probe
from bench_figures import Piece, Request, Slices
from stand_in_server import StandInBench

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_process import SchedulerProcess

MS = 1_000_000


# -- figures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "q", "found"),
    [([3.0], 0.99, 3.0), ([1.0, 2.0, 3.0], 0.5, 2.0), ([1.0, 2.0], 0.5, 1.5), ([5.0, 1.0, 3.0], 1.0, 5.0)],
)
def test_a_quantile_is_interpolated(values: list[float], q: float, found: float) -> None:
    assert figures.quantile(values, q) == found


def test_no_values_have_no_quantile() -> None:
    with pytest.raises(ValueError, match="needs values"):
        figures.quantile([], 0.5)


def test_the_interval_of_a_difference_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(40):
        draw = random.Random(seed)  # noqa: S311 - no secret
        off = [draw.gauss(10, 1) for _ in range(60)]
        on = [draw.gauss(10.5, 1) for _ in range(60)]
        found = figures.difference(on, off, lambda values: figures.quantile(values, 0.5), seed)
        assert found["low"] <= found["value"] <= found["high"]
        covered += found["low"] <= 0.5 <= found["high"]
    assert covered >= 34


def test_a_request_meets_a_slice_from_its_begin_to_its_end() -> None:
    slices = Slices([(300, 400), (100, 200)])
    met = [at for at in (99, 100, 199, 200, 250, 300, 399, 400) if slices.pass_at(at)]
    assert met == [100, 199, 300, 399]
    assert slices.begun_within(100, 300) == 1
    assert slices.begun_within(0, 1000) == 2
    assert slices.busy_share(0, 400) == 0.5
    assert slices.busy_share(150, 350) == 0.5


@pytest.mark.parametrize(
    ("handed_ns", "received_ns", "met"),
    [
        pytest.param(150, 210, True, id="handed in a pass and received after it"),
        pytest.param(150, 190, False, id="received while the pass was still on: its clock lies"),
        pytest.param(90, 210, False, id="handed before it: the doorbell might have rung"),
        pytest.param(200, 310, False, id="handed at its end"),
        pytest.param(0, 210, False, id="not seen when handed"),
        pytest.param(150, 0, False, id="not seen when received"),
    ],
)
def test_a_request_has_met_a_pass_that_was_running_when_it_was_handed_over(
    handed_ns: int, received_ns: int, met: bool
) -> None:
    one = Request(1, 0, True, 50, 400, 500, 80, received_ns, handed_ns)
    assert (Slices([(100, 200), (300, 400)]).met_by(one) is not None) is met


def request(number: int, tuning: bool, asked_ms: float, first_ms: float, sent_ms: float, received_ms: float) -> Request:
    times = [int(t * MS) for t in (asked_ms, first_ms, first_ms + 1, sent_ms, received_ms, sent_ms + 0.05)]
    return Request(number, 0, tuning, *times)


def test_added_latency_tells_those_that_met_a_slice_from_the_rest() -> None:
    off = [request(i, False, 100 * i, 100 * i + 10, 100 * i + 1, 100 * i + 1.1) for i in range(10)]
    late = [request(10 + i, True, 5000 + 100 * i, 5010.5 + 100 * i, 5001 + 100 * i, 5001.6 + 100 * i) for i in range(4)]
    free = [request(20 + i, True, 9000 + 100 * i, 9010 + 100 * i, 9001 + 100 * i, 9001.1 + 100 * i) for i in range(6)]
    slices = Slices([(int(r.sent_ns - 0.2 * MS), int(r.sent_ns + 0.5 * MS)) for r in late])
    found = figures.added_latency([*off, *late, *free], slices)
    assert found["requests"] == {"on": 10, "off": 10}
    assert (found["met_a_slice"], found["share_met"]) == (4, 0.4)
    assert found["slices_begun_while_a_request_ran"] == 0
    assert math.isclose(found["ttft"]["added_ms"]["p50"]["value"], 0.0, abs_tol=1e-6)
    assert math.isclose(found["ttft"]["added_ms"]["max"]["value"], 0.5, abs_tol=1e-6)
    assert math.isclose(found["wait_of_those_that_met"]["added_ms"]["p50"]["value"], 0.5, abs_tol=1e-6)
    checks = {check.name: check.holds for check in figures.latency_checks(found, [1, 2])}
    assert all(checks.values())
    missed = {c.name for learned in ([0, 0], [3, 0], []) for c in figures.latency_checks(found, learned) if not c.holds}
    assert missed == {"the run counts: rows learned in it", "rows learned in each turn"}
    assert [c.name for c in figures.latency_checks(found, [3, 0]) if not c.holds] == ["rows learned in each turn"]


def test_requests_and_time_are_told_by_the_length_of_the_pass() -> None:
    spans = [(0, 10 * MS)]
    slices = Slices([(0, MS // 2), (2 * MS, 2 * MS + MS // 20), (4 * MS, 7 * MS), (20 * MS, 21 * MS)])
    waits = [(0.1, 0.5), (4.5, 7.1), (5.0, 7.2), (8.0, 8.1)]
    on = [request(i, True, at - 0.1, at + 9, at - 0.05, end) for i, (at, end) in enumerate(waits)]
    rows = [row for row in figures.by_length(on, slices, spans) if row["passes"] or row["met"]]
    told = [(row["up_to_us"], row["passes"], row["met"], row["share_of_requests"]) for row in rows]
    assert told == [(100, 1, 0, 0.0), (500, 1, 1, 0.25), (5000, 1, 2, 0.5)]
    assert [round(row["share_of_time"] or 0, 3) for row in rows] == [0.005, 0.05, 0.3]
    assert math.isclose(rows[-1]["longest_wait_ms"] or 0, 2.65)


def test_a_stretch_counts_tokens_and_not_the_pieces_that_bring_them() -> None:
    one = [Piece(0, 0), Piece(10 * MS, 1), Piece(12 * MS, 2), Piece(18 * MS, 5), Piece(30 * MS, 6)]
    found = figures.stretch([one], 9 * MS, 20 * MS)
    assert found["tokens"] == 5  # the one at 30 ms is outside
    assert math.isclose(found["tokens_s"], 5 / 0.011)
    assert math.isclose(found["itl_mean_ms"], 2.0)  # 8 ms for four tokens: the first one is no gap
    assert math.isclose(figures.stretch([one], 13 * MS, 40 * MS)["itl_mean_ms"], 4.5)
    with pytest.raises(ValueError, match="needs values"):
        figures.stretch([one], 100 * MS, 200 * MS)


def test_a_slice_that_begins_while_a_request_runs_is_counted() -> None:
    one = request(1, True, 0, 10, 1, 1.5)
    found = figures.added_latency([one, one._replace(tuning=False)], Slices([(5 * MS, 6 * MS), (20 * MS, 21 * MS)]))
    assert found["slices_begun_while_a_request_ran"] == 2  # once for each of the two requests


def test_passes_are_told_by_m_with_those_longer_than_a_slice() -> None:
    spans = [(probe.SLICE, 0, int(us * 1000), m) for us, m in ((400, 64), (600, 64), (2500, 2048), (10, 0))]
    rows = {row["M"]: row for row in figures.slices_by_m(spans, 500)}
    assert [(m, row["passes"], row["longer_than_a_slice"], row["longer_than_2_ms"]) for m, row in rows.items()] == [
        (0, 1, 0, 0), (64, 2, 1, 0), (2048, 1, 1, 1),
    ]  # fmt: skip


# -- the bench ----------------------------------------------------------------------------------------------------


def test_arrivals_are_the_same_on_and_off_and_come_at_the_rate() -> None:
    arrivals = [bench_serving.arrivals(2.0, 30, seed) for seed in range(50)]
    assert bench_serving.arrivals(2.0, 30, 7) == arrivals[7] != arrivals[8]
    count = sum(map(len, arrivals))
    assert 2700 < count < 3300
    assert bench_serving.prompt(1, 24) == bench_serving.prompt(1, 24) != bench_serving.prompt(2, 24)


@pytest.mark.parametrize(
    ("text", "events"),
    [
        pytest.param(b"", [], id="nothing"),
        pytest.param((5).to_bytes(8, "little") * 4, [(5, 5, 5, 5)], id="one"),
        pytest.param((5).to_bytes(8, "little") * 7, [(5, 5, 5, 5)], id="one and the beginning of another"),
    ],
)
def test_events_are_read_up_to_the_one_that_is_being_written(text: bytes, events: list[Any]) -> None:
    assert probe.decode(text) == events


def run(folder: Path, *more: str, **how: Any) -> tuple[int, dict[str, Any]]:
    StandInBench.how = {"slice_s": 0.001, **how}
    line = ["--out", str(folder), "--warm-s", "0.1", "--turns", "2", "--turn-s", "3", "--rate", "4",
            "--steady-s", "5", "--steady-tokens", "100", "--streams", "2", *more]  # fmt: skip
    code = bench_serving.main(line, make=StandInBench)
    return code, json.loads((folder / "serving.json").read_text())


def held(found: dict[str, Any]) -> dict[str, bool]:
    return {check["name"]: check["holds"] for check in found["checks"]}


def test_a_run_on_a_stand_in_measures_its_slices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = run(tmp_path, "--part", "ttft", "--part", "micro")
    ttft, checks = found["ttft"], held(found)
    assert ttft["requests"]["on"] == ttft["requests"]["off"] > 10
    assert checks["the run counts: requests that met a slice"]
    assert checks["the run counts: rows learned in it"]
    assert checks["rows learned in each turn"]
    assert [row["first_pass_s"] is not None for row in ttft["turns"]] == [True, True]
    assert all(row["share_met"] > 0 and row["faster"] > 0 for row in ttft["turns"])  # a turn has a dozen requests
    assert sum(row["met"] for row in ttft["by_length_of_the_pass"]) == ttft["met_a_slice"]
    assert ttft["wait_of_those_that_met"]["added_ms"]["p50"]["value"] > 0
    assert found["memory"]["before"]["free"] == 10 << 30
    assert checks["lookup, hit against stock"]
    assert not checks["lookup, miss against stock"]
    assert checks["idle pass, nothing left"]
    assert "[MISSED] lookup, miss against stock: +2.50 us" in capsys.readouterr().out


def test_slices_beside_requests_and_a_run_that_learns_nothing_are_found_out(tmp_path: Path) -> None:
    code, found = run(tmp_path, "--part", "ttft", rude=True, learns=False)
    assert code == 1
    assert not held(found)["slices begun while a request ran"]
    assert not held(found)["the run counts: rows learned in it"]


def test_steady_load_is_compared_by_blocks_of_steps_and_finds_what_tuning_costs(tmp_path: Path) -> None:
    code, found = run(tmp_path, "--part", "steady", cost=0.25)
    steady, checks = found["steady"], held(found)
    assert code == 1
    for label, planted in (("throughput", 1 / 1.25 - 1), ("inter-token latency", 0.25), ("median step", 0.25)):
        assert steady[label]["low"] - 0.06 < planted < steady[label]["high"] + 0.06  # a sleep is longer than asked for
        assert not checks[f"steady load, {label}"]
    assert steady["throughput"]["pairs"] >= 20
    assert steady["steps"]["compared"] > 500
    assert steady["compile_processes_watched"]
    assert checks["passes of tuning under steady load"]
    rows = [line.split() for line in steady["series"]]
    assert {len(row) for row in rows} == {len(steady["columns"].split())}
    assert {row[-1] for row in rows} <= {"0", "-"}  # nothing compiles here
    assert sum(row[-1] == "0" for row in rows) > 0.8 * len(rows)
    assert steady["compiling"]["fours"]["none"] >= 10
    assert steady["compiling"]["fours"]["some"] == 0
    assert steady["compiling"]["while_compiling"] == {}
    assert steady["compiling"]["core_s"] == {"on": 0.0, "off": 0.0}
    assert checks["steady load, blocks whose compiling is known"]


@pytest.mark.parametrize(
    ("counts", "looks"),
    [
        pytest.param([(0, 0, 0), (0, 0, 0), (12, 0, 0)], 3, id="the first order of a server"),
        pytest.param([(12, 5, 1)], 1, id="some are not there yet"),
        pytest.param([(128, 136, 0), (128, 136, 0), (129, 136, 0)], 3, id="those on the disk were counted as ready"),
    ],
)
def test_steady_load_begins_once_a_binary_is_ordered(counts: list[tuple[int, int, int]], looks: int) -> None:
    asked: list[int] = []

    class Server:
        def get(self, _path: str) -> Any:
            asked.append(1)
            told = dict(zip(("ordered", "ready", "failed"), counts[len(asked) - 1], strict=True))
            return {"internal_states": [{"moe_autotune": {"compile": told}}]}

    server: Any = Server()
    assert bench_serving.wait_for_order(server)["ordered"] == counts[-1][0]
    assert len(asked) == looks


def test_steady_load_that_is_too_short_says_so(tmp_path: Path) -> None:
    code, found = run(tmp_path, "--part", "steady", "--steady-s", "0.5")
    assert code == 1
    assert "throughput" not in found["steady"]
    assert not held(found)["steady load, throughput"]
    assert not held(found)["steady load, inter-token latency"]


def test_passes_of_tuning_under_steady_load_are_found_out(tmp_path: Path) -> None:
    _, found = run(tmp_path, "--part", "steady", "--steady-s", "2", rude=True)
    assert not held(found)["passes of tuning under steady load"]


def test_a_turn_begins_with_a_tuner_that_forgot_where_little_is_left(tmp_path: Path) -> None:
    _, found = run(tmp_path / "much", "--part", "ttft", "--turn-s", "1", left=99)
    assert [row["forgot"] for row in found["ttft"]["turns"]] == [False, False]
    _, found = run(tmp_path / "little", "--part", "ttft", "--turn-s", "1", left=3)
    assert [row["forgot"] for row in found["ttft"]["turns"]] == [True, True]


def test_a_turn_without_a_pass_of_tuning_says_so_and_the_run_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_serving, "FIRST_PASS_S", 0.3)
    code, found = run(tmp_path, "--part", "ttft", "--turn-s", "1", slice_s=None)
    assert code == 1
    assert [row["first_pass_s"] for row in found["ttft"]["turns"]] == [None, None]
    assert not held(found)["the run counts: requests that met a slice"]


def test_turns_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    """Five at least are begun; what is left of the time decides of more."""
    _, found = run(tmp_path, "--part", "ttft", "--turns", "9", "--turn-s", "0.5", "--rate", "20", "--budget-s", "42")
    assert 5 <= len(found["ttft"]["turns"]) < 9
    assert not found["faults"]


def test_a_probe_that_reports_a_fault_ends_the_run_with_its_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = probe._answer
    monkeypatch.setattr(probe, "_answer", lambda path, _: answer(path, {"error": "KeyError: planted"}))
    code, found = run(tmp_path, "--part", "steady")
    assert code == 1
    assert "could not do renew: KeyError: planted" in found["faults"]["one server"]


def test_a_part_that_fails_does_not_take_the_others_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = probe._answer

    def planted(path: Path, value: Any) -> None:
        answer(path, {"error": "KeyError: planted"} if path.name.startswith("renew") else value)

    monkeypatch.setattr(probe, "_answer", planted)
    code, found = run(tmp_path, "--part", "ttft", "--part", "steady", "--warm-s", "0", "--steady-s", "2")
    assert code == 1
    assert list(found["faults"]) == ["ttft"]
    assert found["steady"]["blocks"] > 10
    assert found["seconds"].keys() >= {"ttft", "steady", "one server"}
    assert (tmp_path / "store.tar.gz").exists()


def test_a_part_for_which_no_time_is_left_is_left_out(tmp_path: Path) -> None:
    code, found = run(tmp_path, "--part", "ttft", "--part", "micro", "--budget-s", "10")
    assert code == 1
    assert "not begun" in found["faults"]["ttft"]
    assert "micro" in found


def test_without_a_folder_it_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_serving.main([])
    assert "--out is needed" in capsys.readouterr().err


# -- the probe inside SGLang --------------------------------------------------------------------------------------


def timed_hooks() -> dict[str, object]:
    """The part ``micro`` where there is no GPU: real hooks, a device that is a recording."""
    import importlib  # noqa: PLC0415 - this runs in the other process
    from types import SimpleNamespace  # noqa: PLC0415

    import serving_probe  # noqa: PLC0415
    from replayed_serving import SMALL, replayed_serving  # noqa: PLC0415
    from sglang.srt.managers.scheduler import Scheduler  # noqa: PLC0415

    from sglang_moe_autotune import plugin, releases, tuner  # noqa: PLC0415

    server_args = releases.publish_server_args()
    config = importlib.import_module(releases.LOOKUP.module)
    config.get_device_name = lambda *_: "NVIDIA H200"
    serving_probe._watch_plugin()
    serving = plugin.serving()
    made = replayed_serving(deferred=None)
    base = made.tuner
    kwargs = {"clock": base._clock, "space": base._space}
    observe = serving.watch.observe
    serving.watch.observe = lambda *_: None  # a recording is slower than a GPU, and would make tuning pause
    serving.tuner = tuner.Tuner(base._provider, base._sink, base._prior, base.options, **kwargs)
    for (shape, m), entry in base._agenda.entries.items():
        serving.tuner.add(shape, m, entry.baseline)
    serving.lookup.take_seen(99)
    serving._last_request_s -= 1000

    class Peers:
        """As far as a step and what is put in a tuner's place go."""

        def __init__(self) -> None:
            self._tuner, self._agenda, self.stepped = serving.tuner, serving.agenda, []

        def step(self, _now_s: float, *, deep_idle: bool) -> str:
            self.stepped.append(self._tuner)
            return self._tuner.step(deep_idle)

        def abandon(self) -> None: ...
        def stand_aside(self, _reason: str) -> None: ...

    serving.peers = peers = Peers()

    class Stub:
        maybe_sleep_on_idle = Scheduler.maybe_sleep_on_idle
        _engine_paused = False
        idle_sleeper = None

        def __init__(self) -> None:
            self.server_args = server_args
            self.weight_updater = SimpleNamespace(offload_tags=set(), _session=None)
            self.profiler_manager = SimpleNamespace(profile_in_progress=False)

    stub = Stub()
    for _ in range(50):
        stub.maybe_sleep_on_idle()
    slices = [e for e in serving_probe._events if e[0] == serving_probe.SLICE]
    found = serving_probe.micro(stub)
    left = serving.tuner.snapshot().queue
    forgotten = serving_probe.forget(stub)
    fresh = serving.tuner
    stub.maybe_sleep_on_idle()
    stepped_on = peers.stepped[-1] is fresh and fresh._agenda is peers._agenda
    for _ in range(2):  # as two passes that were far too long
        observe(1e6, 1.0, 0.0)
    lifted = [serving_probe.renew(stub)["lifted"] for _ in range(2)]
    counts = serving_probe.passes()
    serving.tuner = serving.peers = None
    return {
        "lifted": lifted, **counts,
        "slices": len(slices), "in_order": all(b <= e for _, b, e, _ in slices), "micro": found,
        "switch": serving.switch.level, "left": len(left), "forgotten": forgotten["queued"], "stepped_on": stepped_on,
        "M": SMALL.slug,
    }  # fmt: skip


@pytest.mark.sglang
def test_the_probe_sees_slices_and_times_the_hooks_in_a_scheduler(scheduler: SchedulerProcess) -> None:
    scheduler.reach(Path(bench_serving.__file__).parent)
    told = scheduler.run(timed_hooks)
    assert told["slices"] > 20
    assert told["in_order"]
    assert told["forgotten"] == 3 >= told["left"]
    assert told["switch"] == "on"
    assert told["stepped_on"]
    assert told["lifted"] == [1, 0]
    assert told["pauses"] == 1
    assert told["passes"] >= told["slices"]
    for cost in told["micro"]["idle_ns"].values():
        assert 0 < cost["stock"] < cost["hooked"] < cost["looking"]
    assert all(value > 0 for value in told["micro"]["lookup_ns"].values())


def forgotten() -> dict[str, object]:
    """A whole plugin with its store, its leases and its peers, which learns from a recording; then it forgets."""
    import time  # noqa: PLC0415 - this runs in the other process

    import demo_cpu  # noqa: PLC0415
    import serving_probe  # noqa: PLC0415

    from sglang_moe_autotune import landscape, plugin  # noqa: PLC0415

    recorded = landscape.load(demo_cpu.LANDSCAPE)
    module, server_args = demo_cpu.lookup_module(recorded.device_name)
    serving = plugin.serving()
    serving_probe._watch_plugin()
    serving.start(demo_cpu.device_of(recorded, 2.0, 0))
    scheduler = demo_cpu.IdleScheduler(server_args)
    for m in recorded.ms:
        demo_cpu.ask(module, recorded.shape, m)

    def learn(count: int) -> list[int]:
        """The M of so many records."""
        events, end = serving_probe._events, time.monotonic() + 60
        events.clear()
        learned: list[int] = []
        while len(learned) < count and time.monotonic() < end:
            scheduler.maybe_sleep_on_idle()
            if serving.state in {"idle", "waiting"}:
                time.sleep(0.001)
            while events:
                kind, _, m, _ = events.popleft()
                if kind == serving_probe.LEARNED:
                    learned.append(m)
        return learned

    time.sleep(0.1)  # a grace
    first = learn(3)
    kept = serving.store.flush(10.0), len(serving.store.contents.records)
    told = serving_probe.forget(scheduler)
    again = learn(3)
    serving.let_go()
    return {
        "ms": list(recorded.ms), "first": first, "kept": kept, "queued": told["queued"], "again": again,
    }  # fmt: skip


@pytest.mark.sglang
def test_what_was_forgotten_is_learned_again_beside_its_records_in_the_store(
    start_scheduler: Callable[..., SchedulerProcess],
) -> None:
    process = start_scheduler()  # of its own: the plugin of the other one has had parts replaced
    process.reach(Path(bench_serving.__file__).parent)
    told = process.run(forgotten)
    assert told["kept"] == [True, len(set(told["first"]))]
    assert told["queued"] == len(told["ms"])
    assert len(told["again"]) == 3
    assert set(told["again"]) & set(told["first"])
