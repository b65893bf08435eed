"""What the GPU script of the search computes, on a recorded device and on a made-up one."""
# ruff: noqa: PLC0415 - what runs in the other process imports there

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import gpu_acceptance
import gpu_parts
import gpu_search
import made_up_store
import twin_probe
from twins import Twins

from sglang_moe_autotune import landscape, trials
from sglang_moe_autotune.bench import Declined, Sample
from sglang_moe_autotune.errand import shape_of_fields
from sglang_moe_autotune.records import Evidence, Record
from sglang_moe_autotune.replay import ReplayProvider
from sglang_moe_autotune.routings import Sampling
from sglang_moe_autotune.shapes import ConfigPair
from sglang_moe_autotune.tried import Tried

PATH = landscape.shipped()[0]
RECORDED = landscape.load(PATH)
EVIDENCE = Evidence(100.0, 80.0, 0.2, 0.1, 0.3, 24, 10, 0.1)


@pytest.fixture
def run() -> Any:
    checks: list[tuple[str, bool, str]] = []
    return SimpleNamespace(findings={}, checks=checks, check=lambda *check: checks.append(check))


@pytest.fixture
def parts(tmp_path: Path, run: Any) -> gpu_parts.Parts:
    return gpu_parts.Parts(tmp_path / "out" / "found.json", 100.0, run.findings)


def bed(provider: Any) -> Any:
    def opened(_shape: object, m: int, _slice_us: float) -> tuple[ConfigPair, Any]:
        return RECORDED.baselines[m].pair, provider.open(RECORDED.shape, m, RECORDED.baselines[m].pair)

    return SimpleNamespace(open=opened, close=lambda: None)


def chosen(kept: bool) -> dict[tuple[Any, int], Record]:
    rows = {}
    for m in (64, 1024):
        base = RECORDED.baselines[m].pair
        some = next(c for c in RECORDED.up_us[m] if RECORDED.latency_us(m, "down", c) is not None)
        pair = base if kept else ConfigPair(some, some)
        rows[RECORDED.shape, m] = Record(RECORDED.shape, m, "faster", pair, base, EVIDENCE, source="learned")
    return rows


# -- regret ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [False, True])
def test_regret_is_that_of_the_landscape(run: Any, parts: Any, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    rows = chosen(kept)
    monkeypatch.setattr(gpu_search, "stored", lambda _: rows)
    gpu_search.regret(run, parts, bed(ReplayProvider(RECORDED, noise_percent=0.0)), [PATH])
    for m in (64, 1024):
        figures = run.findings["regret"][RECORDED.shape.slug][str(m)]
        base = RECORDED.baselines[m]
        us = base.up_us + base.down_us if kept else RECORDED.pair_us(m, rows[RECORDED.shape, m].pair)
        assert figures["regret"] == pytest.approx(us / RECORDED.best(m)[1] - 1, abs=1e-3)
        assert figures["best_us"] == pytest.approx(RECORDED.best(m)[1], rel=1e-3)
        assert figures["kept"] is kept
    slower = not kept and any(
        RECORDED.pair_us(m, rows[RECORDED.shape, m].pair) > 1.01 * (base.up_us + base.down_us)
        for m in (64, 1024)
        if (base := RECORDED.baselines[m])
    )
    assert [ok for _, ok, _ in run.checks] == [False, not slower, True]


def test_the_best_is_timed_anew_so_that_its_luck_does_not_count(
    run: Any, parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 3 % noise the least of many medians is too low; who chose the best pair must not look worse for it."""
    rows = {
        (RECORDED.shape, m): Record(
            RECORDED.shape, m, "faster", RECORDED.best(m)[0], RECORDED.baselines[m].pair, EVIDENCE, source="learned"
        )
        for m in RECORDED.ms
    }
    monkeypatch.setattr(gpu_search, "stored", lambda _: rows)
    gpu_search.regret(run, parts, bed(ReplayProvider(RECORDED, noise_percent=3.0)), [PATH])
    assert run.findings["regret_summary"][RECORDED.shape.slug]["geomean"] == pytest.approx(0.0, abs=0.004)


def test_an_m_that_cannot_be_timed_says_why_and_the_others_go_on(
    run: Any, parts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_search, "stored", lambda _: chosen(kept=False))
    good = bed(ReplayProvider(RECORDED, noise_percent=0.0))

    def opened(shape: object, m: int, slice_us: float) -> Any:
        if m == 64:
            raise RuntimeError("no memory")
        return good.open(shape, m, slice_us)

    gpu_search.regret(run, parts, SimpleNamespace(open=opened), [PATH])
    found = json.loads(parts.path.read_text())["regret"][RECORDED.shape.slug]
    assert found["64"]["why"] == "RuntimeError: no memory"
    assert "regret" in found["1024"]
    assert run.checks[-1][1] is False


def test_rows_of_no_landscape_are_an_error(run: Any, parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other = landscape.load(landscape.shipped()[1])
    monkeypatch.setattr(gpu_search, "stored", lambda _: {(other.shape, 64): object()})
    with pytest.raises(RuntimeError, match="no landscape"):
        gpu_search.regret(run, parts, None, [PATH])  # type: ignore[arg-type]


# -- twins -----------------------------------------------------------------------------------------------------


class Bench:
    """A made-up device on which one name of the config is as fast as the other, or not."""

    def __init__(self, bias: float = 1.0) -> None:
        self.bias, self.rng, self.closed = bias, random.Random(3), False  # noqa: S311 - noise
        self.sampling = Sampling()

    def prepare(self) -> bool:
        return True

    def readiness(self, *_: object) -> str:
        return "ready"

    def measure(self, _gemm: str, _config: object, count: int) -> list[Sample]:
        noise = self.rng.lognormvariate
        return [Sample(self.bias * 100 * noise(0, 0.02), 100 * noise(0, 0.02))] * min(1, count)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("bias", "fooled"), [(1.0, False), (0.97, True)], ids=["one-config", "three-percent"])
def test_only_a_real_difference_fools_the_decision(run: Any, parts: Any, bias: float, fooled: bool) -> None:
    run.options = argparse.Namespace(decisions=80)
    bench = Bench(bias)
    there = SimpleNamespace(open=lambda _, m, __: (RECORDED.baselines[m].pair, bench))
    gpu_search.noise(run, parts, there, [RECORDED.shape])  # type: ignore[arg-type]
    found = run.findings["noise"]
    assert found["decisions"] == found["wanted"] == 80
    assert [p["decisions"] for p in found["places"].values()] == [20, 20, 20, 20]
    assert bench.closed
    ((_, ok, told),) = run.checks
    assert ok is not fooled, told
    assert (found["both_tests_faster"] > 70) is fooled


def test_the_places_after_one_that_fails_make_up_for_it(run: Any) -> None:
    def refuse() -> Any:
        raise Declined("no live layer of this shape")

    places = [("gone", refuse), ("here", lambda: (RECORDED.baselines[64].pair, Bench()))]
    twins = Twins(places, 10)  # type: ignore[arg-type]
    for _ in twins.steps():
        pass
    assert twins.places["gone"]["why"] == "Declined: no live layer of this shape"
    assert twins.places["here"]["decisions"] == 10
    gpu_search.judge_twins(run, "twins", twins.told)
    ((_, ok, told),) = run.checks
    assert ok
    assert "gone: Declined" in told


@pytest.mark.parametrize(
    "told",
    [
        {"error": "ValueError"},
        {"decisions": 400, "wanted": 1000, "both_tests_faster": 0},
        {"decisions": 1000, "wanted": 1000, "both_tests_faster": 11},
    ],
    ids=["fault", "too-few", "fooled"],
)
def test_what_shows_nothing_passes_for_nothing(run: Any, told: dict[str, Any]) -> None:
    gpu_search.judge_twins(run, "twins", told)
    assert run.checks[0][1] is False


def test_the_probe_takes_idle_passes_when_told_and_gives_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [("here", lambda: (RECORDED.baselines[64].pair, Bench()))]
    monkeypatch.setattr(twin_probe, "twins_here", lambda ms, decisions: Twins(places * len(ms), decisions))
    monkeypatch.setattr(twin_probe, "LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(twin_probe, "PAUSE_SHARE", 0.0)
    probe = twin_probe.Probe(tmp_path)
    assert not probe.step()
    (tmp_path / "order.json").write_text(json.dumps({"ms": [64], "decisions": 2}))
    taken = 0
    while probe.step():
        taken += 1
    assert taken > 10
    told = json.loads((tmp_path / "twins.json").read_text())
    assert told["ended"]
    assert told["decisions"] == 2


def test_a_fault_of_the_probe_is_told_and_not_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(twin_probe, "twins_here", fail)
    monkeypatch.setattr(twin_probe, "LOOK_EVERY_S", 0.0)
    (tmp_path / "order.json").write_text("{}")
    probe = twin_probe.Probe(tmp_path)
    assert not probe.step()
    assert "ZeroDivisionError" in json.loads((tmp_path / "twins.json").read_text())["error"]
    assert not probe.step()


def in_a_scheduler(scripts: str) -> list[object]:
    """The probe's own twins on the plugin's own state, whose device is a recording."""
    import sys

    sys.path.insert(0, scripts)
    import twin_probe

    from sglang_moe_autotune import landscape, plugin, releases, stand_in
    from sglang_moe_autotune.device import Device
    from sglang_moe_autotune.records import Environment
    from sglang_moe_autotune.replay import ReplayProvider

    releases.publish_server_args()
    releases.config_module().get_device_name = lambda *_: "a device without files"  # type: ignore[attr-defined]
    recorded = landscape.load(landscape.shipped()[0])
    provider = ReplayProvider(recorded, noise_percent=1.0)
    state = plugin.serving()
    state.overlay.layers.add(stand_in.build(recorded.shape, 1, "meta"))
    state.start(Device(Environment("NVIDIA H200", (9, 0), 132, 232448, 1, "3.6.0", "k"), provider, "replayed"))
    twins = twin_probe.twins_here([16, 64, 300], 6)
    for _ in twins.steps():
        pass
    return [twins.told, state.state, state.tuner is None, provider.slice_us]


@pytest.mark.sglang
def test_in_a_scheduler_the_twins_have_the_live_layers_and_tuning_ends(scheduler: Any) -> None:
    told, state, ended, slice_us = scheduler.run(in_a_scheduler, str(Path(gpu_search.__file__).parent))
    slug = RECORDED.shape.slug
    assert [told["places"][f"{slug} M={m}"]["decisions"] for m in (16, 64)] == [2, 2]
    assert told["places"][f"{slug} M=300"]["why"], "the recording has no such M"
    assert (state, ended, slice_us) == ("off", True, 500.0)


# -- the whole -------------------------------------------------------------------------------------------------


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_search.py", *arguments])
    return gpu_search.main()


def test_one_part_fails_and_the_others_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_acceptance, "machine", lambda: {"gpu": "made up"})
    monkeypatch.setattr(gpu_search, "Bed", lambda _: bed(ReplayProvider(RECORDED, noise_percent=0.0)))
    monkeypatch.setattr(gpu_search, "stored", lambda _: chosen(kept=True))
    monkeypatch.setattr(gpu_search, "shapes_of", lambda _: (RECORDED.shape, RECORDED.shape))
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", "")  # it is set by the script, and set back by this
    out = tmp_path / "out"
    common = ("--out", str(out), "--state", str(tmp_path / "state"), "--landscapes", str(PATH))

    def fail(*_: object) -> None:
        raise SystemExit("no pair")

    monkeypatch.setattr(gpu_search, "script", fail)
    assert call(monkeypatch, *common, "--part", "script,regret") == 1
    found = json.loads((out / "search.json").read_text())
    assert "SystemExit: no pair" in found["faults"]["script"]
    assert set(found["seconds"]) == {"a GPU without a server", "regret", "script"}
    assert set(found["regret"][RECORDED.shape.slug]) == {"64", "1024"}
    assert found["machine"] == {"gpu": "made up"}
    assert "## Regret of" in (out / "search.md").read_text()

    def learn(run: Any, *_: Any, **__: Any) -> None:
        rows = [gpu_search.row_of(row) for row in chosen(kept=False).values()]
        run.findings["learned"] = {"slug": {"M": 2, "gpu_s": 0.2, "rows": rows}}
        run.check("learned", True, "two")

    monkeypatch.setattr(gpu_search, "live", learn)
    assert call(monkeypatch, *common, "--part", "live") == 0
    text = (out / "search.md").read_text()
    assert "| 64 | 100.0 | 80.0 | 20.0 % | 10.0 to 30.0 % | 24 |" in text
    assert "## Regret of" in text, "what an earlier call found is kept"


@pytest.mark.parametrize("twins_end", [True, False])
def test_the_live_part_tells_rows_and_twins_and_leaves_the_store_for_later_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, twins_end: bool
) -> None:
    options = argparse.Namespace(
        out=tmp_path / "out", state=tmp_path / "state", idle_s=5.0, port=1, compile_processes=1, decisions=40,
        flags=[], other="8,7168,2", experts=2, intermediate=16, hidden=32, top_k=1, layers=2,
    )  # fmt: skip
    options.state.mkdir()
    run = gpu_acceptance.Run(options)
    parts = gpu_parts.Parts(options.out / "search.json", 60.0 if twins_end else 1.0, run.findings)
    store = run.work / "store"
    made_up_store.fill(store)
    trial = Tried("up", made_up_store.WINNER.up, 0.7, 3)
    log = trials.TrialLog(store, made_up_store.H200)
    log.put(made_up_store.MANY, 256, [trial, trial._replace(gemm="down")])
    assert log.flush(10.0)
    seen: dict[str, Any] = {}

    class Server:
        def __enter__(self) -> Any:
            seen["environ"] = dict(run.environ)
            return self

        def __exit__(self, *_: object) -> None:
            seen["stopped"] = True

        def generate(self, *_: object) -> list[Any]:
            return []

        def text(self) -> str:
            return "all is well"

    def idle(_s: float) -> None:
        if (run.work / "order.json").exists():
            assert json.loads((run.work / "order.json").read_text())["decisions"] == 40
            told = {"decisions": 40, "wanted": 40, "both_tests_faster": 0, "ended": True, "places": {}}
            (run.work / "twins.json").write_text(json.dumps(told if twins_end else {**told, "error": "a fault"}))

    monkeypatch.setattr(run, "serve", lambda _: Server())
    monkeypatch.setattr(gpu_search, "wait_until_learned", lambda *_: made_up_store.live())
    monkeypatch.setattr(gpu_search.time, "sleep", idle)
    gpu_search.live(run, parts, twins=True)
    assert seen["stopped"]
    assert seen["environ"]["TRITON_CACHE_DIR"].startswith(str(run.work)), "what was compiled before is not counted"
    assert {p.name for p in run.probe.iterdir()} >= {"mixed_model.py", "twin_probe.py", "twins.py"}
    many = run.findings["learned"][made_up_store.MANY.slug]
    assert (many["M"], many["faster"], many["candidates_measured"]) == (3, 2, 1)
    assert [row["M"] for row in many["rows"]] == [16, 256, 1024]
    assert {name: ok for name, ok, _ in run.checks}["one config under two names (twins)"] is twins_end
    assert (made_up_store.MANY, 256) in gpu_search.stored(run)
    assert "| 256 | 445.0 | 308.9 | 30.6 % |" in gpu_search.tables(run.findings)


def test_a_server_without_the_plugin_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_acceptance.time, "sleep", lambda _: None)
    run = SimpleNamespace(live=lambda: None, findings={})
    with pytest.raises(RuntimeError, match="no scheduler with the plugin"):
        gpu_acceptance.wait_until_learned(run, 0.01)  # type: ignore[arg-type]


def test_the_shapes_of_the_mixed_model_are_those_that_landscapes_are_recorded_of() -> None:
    options = argparse.Namespace(**gpu_search.MODEL._asdict(), other=gpu_search.OTHER)
    many, few = gpu_search.shapes_of(options)
    assert many == shape_of_fields("E=256,N=256,K=4096,top_k=8")
    assert few == shape_of_fields("E=8,N=7168,K=4096,top_k=2")
    assert {many, few} <= {landscape.load(path).shape for path in landscape.shipped()}


def test_what_cannot_work_is_said_before_a_minute_is_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in (
        (("--part", "regret", "--landscapes", str(PATH)), "needs a landscape of"),
        (("--part", "twins"), "needs live beside it"),
        (("--part", "all"), "--part has all"),
    ):
        with pytest.raises(SystemExit):
            call(monkeypatch, "--out", str(tmp_path), *arguments)
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        call(monkeypatch)


def test_the_page_has_what_was_found() -> None:
    docs = Path(__file__).resolve().parent.parent / "docs"
    page, found = (docs / "measured_search.md").read_text(), json.loads((docs / "search_gpu.json").read_text())
    for line in gpu_search.tables({"learned": found["learned"]}).splitlines():
        if line.startswith("| "):
            assert line in page
    for slug, by_m in found["regret"].items():
        lines = gpu_search.tables({"regret": {slug: by_m}}).splitlines()
        assert len(lines) > 4
        assert all(f"| {slug} {line}" in page for line in lines if line.startswith("| ") and "heuristic" not in line)
    live, plants, server = found["live"], found["plants"], found["planted_server"]
    for told in (
        f"{live['gpu_s']:.1f} GPU seconds",
        f"{plants['wrong_trials']:,} of 24 kinds; {plants['wrong_admitted']} admitted",
        f"{plants['honest_trials']}; {plants['honest_refused']} refused", f"{server['measured']} measurements",
        f"in {server['wrong_measured_faster_than_the_baseline']} of them a wrong",
    ):  # fmt: skip
        assert told in page
    assert not any(server["accepted_by_fault"].values())
