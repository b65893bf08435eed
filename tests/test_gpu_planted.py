"""What servers with a planted kernel must tell, on made-up stores and servers."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import gpu_acceptance
import gpu_parts
import gpu_planted
import made_up_store

from sglang_moe_autotune import trials
from sglang_moe_autotune.quarantine import Quarantine
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig
from sglang_moe_autotune.store import Store
from sglang_moe_autotune.tried import Tried

WRONG = KernelConfig(16, 64, 64, gpu_planted.WRONG, 4, 3)
SLOW = KernelConfig(16, gpu_planted.SLOW_WIDTH, 64, gpu_planted.SLOW, 4, 3)
GOOD = KernelConfig(16, 64, 64, 1, 4, 3)
KEY = "nvidia-h200"
STARTED = "[2026-11-30 16:16:55] MoE autotune 0.1.0: hooks in place; shapes: 1; learned rows: 0; mode miss\n"


@pytest.fixture
def run(tmp_path: Path) -> gpu_acceptance.Run:
    options = argparse.Namespace(
        out=tmp_path / "out", idle_s=1.0, port=1, compile_processes=1, flags=[], **gpu_planted.MODEL._asdict()
    )
    return gpu_acceptance.Run(options)


def store(root: Path, winner: KernelConfig, *, slow_is_held: bool = True) -> None:
    one = made_up_store.record(made_up_store.MANY, 256, 400.0, 300.0)
    opened = Store.open(root, made_up_store.H200)
    pair = ConfigPair(GOOD, winner)
    opened.submit(record=type(one)(one.shape, one.M, "faster", pair, one.baseline, one.evidence, unix_s=one.unix_s))
    assert opened.close(10.0)
    log = trials.TrialLog(root, made_up_store.H200)
    log.put(made_up_store.MANY, 256, [Tried("up", WRONG, 0.7, 3), Tried("down", GOOD, 0.8, 3)])
    assert log.flush(10.0)
    if slow_is_held:
        words = "its first launch took 1,023 times as long as SGLang's own"
        quarantine = Quarantine(root, KEY)
        quarantine.hold(made_up_store.MANY, 256, "up", SLOW, words)
        assert quarantine.journal.settled(10.0)


def failed(run: gpu_acceptance.Run) -> list[str]:
    return [name for name, ok, _ in run.checks if not ok]


@pytest.mark.parametrize(
    ("winner", "slow_is_held", "log", "fails"),
    [
        (GOOD, True, "", []),
        (WRONG, True, "", ["wrong configs"]),
        (SLOW, True, "", ["slow configs"]),
        (GOOD, False, "", ["slow configs"]),
        (GOOD, True, "Traceback (most recent call last)", ["the server lives"]),
    ],
    ids=["as-it-must-be", "wrong-taken", "slow-taken", "slow-not-met", "fault"],
)
def test_what_is_at_fault_must_be_met_and_not_taken(
    run: gpu_acceptance.Run, tmp_path: Path, winner: KernelConfig, slow_is_held: bool, log: str, fails: list[str]
) -> None:
    store(tmp_path / "store", winner, slow_is_held=slow_is_held)
    gpu_planted.judge_wrong(run, tmp_path / "store", log, made_up_store.live())
    assert [name for name in failed(run) if not name.startswith(tuple(fails) or ("-",))] == []
    assert len(failed(run)) == len(fails)
    assert run.findings["wrong"]["accepted"] == 1


class Server:
    """One that dies at a culprit of its own, or lives."""

    def __init__(self, root: Path, number: int, deaths: int) -> None:
        self.root, self.number, self.deaths = root, number, deaths
        self.process = argparse.Namespace(poll=lambda: None)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...

    def text(self) -> str:
        return "CUDA error"

    def post(self, *_: object) -> Any:
        if self.number > self.deaths:
            return {}
        culprit = KernelConfig(16, 64, 64, 16, 4, self.number + 1)
        quarantine = Quarantine(self.root, KEY)
        quarantine.hold(made_up_store.MANY, 16, "up", culprit, "a process ended in its first launch")
        assert quarantine.journal.settled(10.0)
        raise ConnectionResetError


@pytest.mark.parametrize(
    ("deaths", "early", "fails"),
    [
        (2, False, []),
        (2, True, []),
        (1, False, []),
        (0, False, ["a planted crash ends the first server", "each culprit", "a start lives"]),
        (9, False, ["a start lives"]),
    ],
    ids=["two", "one-before-it-is-healthy", "one", "none", "all"],
)
def test_servers_are_started_until_one_lives(
    run: gpu_acceptance.Run, monkeypatch: pytest.MonkeyPatch, deaths: int, early: bool, fails: list[str]
) -> None:
    monkeypatch.setattr(gpu_planted, "plant", lambda *_: None)
    monkeypatch.setattr(gpu_planted, "LIVES_S", 0.0)
    monkeypatch.setattr(gpu_planted, "live", lambda _: made_up_store.live())
    monkeypatch.setattr(gpu_planted.time, "sleep", lambda _: None)
    numbers: list[int] = []

    def serve(name: str) -> Server:
        numbers.append(int(name[0]))
        server = Server(run.work / "crash", len(numbers), deaths)
        if early and len(numbers) == 2:
            with contextlib.suppress(ConnectionResetError):
                server.post()
            (run.out / f"server_{name}.log").write_text(STARTED)
            raise RuntimeError("the server is not healthy after 40 s")
        return server

    monkeypatch.setattr(run, "serve", serve)
    parts = gpu_parts.Parts(run.out / "planted.json", 600.0, run.findings)
    gpu_planted.crash(run, parts)
    assert numbers == list(range(2, 2 + min(deaths + 1, gpu_planted.STARTS)))
    assert len(failed(run)) == len(fails)
    assert all(name.startswith(tuple(fails)) for name in failed(run))


def test_a_start_that_fails_for_another_reason_is_a_fault(
    run: gpu_acceptance.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_planted, "plant", lambda *_: None)

    def serve(name: str) -> Server:
        (run.out / f"server_{name}.log").write_text("no such flag\n")
        raise RuntimeError("the server is not healthy after 3 s")

    monkeypatch.setattr(run, "serve", serve)
    parts = gpu_parts.Parts(run.out / "planted.json", 600.0, run.findings)
    assert not parts.run("crash", lambda: gpu_planted.crash(run, parts))
    assert "not healthy" in parts.found["faults"]["crash"]
    assert failed(run)
