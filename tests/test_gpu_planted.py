"""What servers with a planted kernel must tell, on made-up stores and servers."""

from __future__ import annotations

import argparse
import subprocess
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
from sglang_moe_autotune.held import Candidate
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


CULPRIT = KernelConfig(16, 64, 64, 16, 4, 3)
HELD = Candidate(KEY, made_up_store.MANY, "up", CULPRIT)


class Server:
    """One that ends in its first launch of a culprit, leaving its journal, or lives."""

    def __init__(self, run: gpu_acceptance.Run, log: Path, *, dies: bool, holds: bool) -> None:
        self.root, self.log, self.dies = run.work / "crash", log, dies
        self.process = argparse.Namespace(poll=lambda: None)
        log.write_text(STARTED)
        if holds:
            Quarantine(self.root, KEY)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...

    def text(self) -> str:
        return self.log.read_text()

    def post(self, *_: object) -> Any:
        if not self.dies:
            return {}
        end_in_a_launch(self.root)
        raise ConnectionResetError


def end_in_a_launch(root: Path) -> None:
    """What a process leaves that is killed in the first launch of the culprit."""
    snippet = f"""
import os, sys, time
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).resolve().parent.parent)]!r}
import made_up_store
from pathlib import Path
from sglang_moe_autotune.quarantine import Quarantine
from sglang_moe_autotune.shapes import KernelConfig
quarantine = Quarantine(Path({str(root)!r}), {KEY!r}, server="s")
launch = quarantine.launch(made_up_store.MANY, 16, "up", KernelConfig(16, 64, 64, 16, 4, 3))
while not quarantine.journal.begin(launch):
    quarantine.journal.announced(launch)
    time.sleep(0.001)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -9, done.stderr


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LIVES_S", "LEAST_S", "REQUEST_S", "GONE_S"):
        monkeypatch.setattr(gpu_planted, name, 0.0)


def told(*, holds: bool = True, **fields: Any) -> Any:
    return made_up_store.live(quarantine={str(HELD): "a process ended"} if holds else {}, **fields)


ENDS, HOLDS = "a planted crash ends the first server", "the culprit is in quarantine at the second start"
LIVES, TUNES = "the second server lives and serves", "the second server goes on tuning"


@pytest.mark.parametrize(
    ("deaths", "early", "live", "fails"),
    [
        pytest.param((1,), False, told(), [], id="as-it-must-be"),
        pytest.param((1,), True, told(), [], id="before-it-is-healthy"),
        pytest.param((), False, told(), [ENDS, HOLDS, LIVES, TUNES], id="none"),
        pytest.param((1, 2), False, told(), [HOLDS, LIVES, TUNES], id="again"),
        pytest.param((1,), False, told(holds=False), [HOLDS], id="the-server-does-not-hold-it"),
        pytest.param((1,), False, told(slices=0), [TUNES], id="no-slice"),
        pytest.param((1,), False, told(mode="read-only"), [TUNES], id="read-only"),
        pytest.param((1,), False, told(state="off", reason="a fault"), [TUNES], id="off"),
        pytest.param((1,), False, None, [HOLDS, TUNES], id="no-word"),
    ],
)
@pytest.mark.usefixtures("no_waits")
def test_the_second_server_must_hold_what_ended_the_first_and_go_on(
    run: gpu_acceptance.Run, monkeypatch: pytest.MonkeyPatch, deaths: tuple[int, ...], early: bool, live: Any,
    fails: list[str],
) -> None:
    monkeypatch.setattr(gpu_planted, "live", lambda _: live)
    planted: list[tuple[Candidate, ...]] = []
    monkeypatch.setattr(gpu_planted, "plant", lambda _, name, found=(): planted.append(tuple(found)))
    names: list[str] = []

    def serve(name: str) -> Server:
        names.append(name)
        assert {run.environ[variable] for variable in gpu_planted.NO_DIAGNOSTICS} == {"0"}
        server = Server(run, run.out / f"server_{name}.log", dies=len(names) in deaths, holds=len(names) == 2)
        if early and len(names) == 1:
            with pytest.raises(ConnectionResetError):
                server.post()
            raise RuntimeError("the server is not healthy after 40 s")
        return server

    monkeypatch.setattr(run, "serve", serve)
    parts = gpu_parts.Parts(run.out / "planted.json", 600.0, run.findings)
    gpu_planted.crash(run, parts)
    assert names == ["2_crash", "3_crash"][: len(deaths[:1]) + 1]
    assert planted == [(), (HELD,)][: len(names)], "the second one must be ended by what ended the first"
    assert failed(run) == fails


@pytest.mark.usefixtures("no_waits")
def test_a_store_that_does_not_hold_the_culprit_fails(run: gpu_acceptance.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_planted, "live", lambda _: told())
    monkeypatch.setattr(gpu_planted, "plant", lambda *_: None)
    servers: list[Server] = []

    def serve(name: str) -> Server:
        servers.append(Server(run, run.out / f"server_{name}.log", dies=not servers, holds=False))
        return servers[-1]

    monkeypatch.setattr(run, "serve", serve)
    gpu_planted.crash(run, gpu_parts.Parts(run.out / "planted.json", 600.0, run.findings))
    assert failed(run) == [HOLDS]


@pytest.mark.usefixtures("no_waits")
def test_a_second_start_without_time_is_not_begun(run: gpu_acceptance.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_planted, "plant", lambda *_: None)
    names: list[str] = []

    def serve(name: str) -> Server:
        names.append(name)
        return Server(run, run.out / f"server_{name}.log", dies=True, holds=False)

    monkeypatch.setattr(run, "serve", serve)
    gpu_planted.crash(run, gpu_parts.Parts(run.out / "planted.json", gpu_planted.START_S - 1, run.findings))
    assert names == ["2_crash"]
    assert failed(run) == [HOLDS, LIVES, TUNES]


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
