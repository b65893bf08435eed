"""What the GPU script of the search computes, on a recorded device and on a made-up one."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import gpu_search

from sglang_moe_autotune import landscape
from sglang_moe_autotune.bench import Sample
from sglang_moe_autotune.records import Evidence, Record
from sglang_moe_autotune.replay import ReplayProvider
from sglang_moe_autotune.shapes import ConfigPair

PATH = landscape.shipped()[0]
RECORDED = landscape.load(PATH)


@pytest.fixture
def run() -> Any:
    checks: list[tuple[str, bool, str]] = []
    return SimpleNamespace(findings={}, checks=checks, check=lambda *check: checks.append(check))


def bed(provider: Any) -> Any:
    def opened(_shape: object, m: int) -> tuple[ConfigPair, Any]:
        return RECORDED.baselines[m].pair, provider.open(RECORDED.shape, m, RECORDED.baselines[m].pair)

    return SimpleNamespace(open=opened)


@pytest.mark.parametrize("kept", [False, True])
def test_regret_is_that_of_the_landscape(run: Any, monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    evidence, rows = Evidence(100.0, 80.0, 0.2, 0.1, 0.3, 24, 10, 0.1), {}
    for m in (64, 1024):
        base = RECORDED.baselines[m].pair
        some = next(c for c in RECORDED.up_us[m] if RECORDED.latency_us(m, "down", c) is not None)
        pair = base if kept else ConfigPair(some, some)
        rows[RECORDED.shape, m] = Record(RECORDED.shape, m, "faster", pair, base, evidence, source="learned")
    monkeypatch.setattr(gpu_search, "stored", lambda _: rows)
    gpu_search.regret(run, bed(ReplayProvider(RECORDED, noise_percent=0.0)), [PATH])
    for m in (64, 1024):
        figures = run.findings["regret"][RECORDED.shape.slug][str(m)]
        chosen = rows[RECORDED.shape, m].pair
        base = RECORDED.baselines[m]
        us = base.up_us + base.down_us if kept else RECORDED.pair_us(m, chosen)
        assert figures["regret"] == pytest.approx(us / RECORDED.best(m)[1] - 1, abs=1e-3)
        assert figures["kept"] is kept
    assert [ok for _, ok, _ in run.checks] == [False]


@pytest.mark.parametrize(("bias", "fooled"), [(1.0, False), (0.97, True)], ids=["one-config", "three-percent"])
def test_only_a_real_difference_fools_the_decision(run: Any, bias: float, fooled: bool) -> None:
    rng = random.Random(3)  # noqa: S311 - noise

    class Bench:
        def readiness(self, *_: object) -> str:
            return "ready"

        def measure(self, _gemm: str, _config: object, count: int) -> list[Sample]:
            return [Sample(bias * 100 * rng.lognormvariate(0, 0.02), 100 * rng.lognormvariate(0, 0.02))] * min(1, count)

        def close(self) -> None: ...

    provider = SimpleNamespace(open=lambda *_: Bench())
    gpu_search.noise(run, bed(provider), [PATH], decisions=80)
    counts = run.findings["noise"]
    assert counts["decisions"] == 80
    ((_, ok, told),) = run.checks
    assert ok is not fooled, told
    assert (counts["both_tests_faster"] > 70) is fooled
    assert json.loads(told)["decisions"] == 80
