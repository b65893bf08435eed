"""The GPU scripts from their first line to their last, on a stand-in: no GPU minute is lost to a wrong name."""

from __future__ import annotations

import collections
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import gpu_acceptance
import gpu_parts
import gpu_preflight
import gpu_ranks
import gpu_recapture
import gpu_server
import gpu_stand_in
import plot_life
import ranks_probe
from gpu_stand_in import StandIn

from sglang_moe_autotune import plugin
from sglang_moe_autotune.serving import Serving


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = time.sleep
    for module in (gpu_acceptance, gpu_ranks, gpu_recapture):
        monkeypatch.setattr(module.time, "sleep", lambda s: sleep(min(s, 0.05)))
    for module in (gpu_acceptance, gpu_ranks):
        monkeypatch.setattr(module, "Server", StandIn)
    monkeypatch.setattr(gpu_acceptance, "machine", lambda: {"gpu": "a stand-in"})
    monkeypatch.setattr(gpu_recapture.Run, "free_mib", lambda _: 1000)
    monkeypatch.setattr(gpu_ranks, "links", lambda: "GPU0 GPU1")
    monkeypatch.setattr(gpu_ranks, "STOP_S", 0.2)
    monkeypatch.setattr(gpu_ranks, "TURN_S", 0.1)
    monkeypatch.setattr(gpu_ranks, "RATE", 200.0)
    monkeypatch.setattr(StandIn, "hurts", True)
    monkeypatch.setattr(StandIn, "slow", False)
    monkeypatch.setattr(StandIn, "died", 0)


def run(module: Any, monkeypatch: pytest.MonkeyPatch, *line: str) -> int:
    monkeypatch.setattr(sys, "argv", ["script", *line])
    code: int = module.main()
    return code


def failed(found: dict[str, Any]) -> list[str]:
    return [name for name, ok, _ in found["checks"] if not ok]


@pytest.mark.parametrize("hybrid", [False, True], ids=["dense", "hybrid"])
def test_recapture_goes_through_all_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hybrid: bool) -> None:
    line = ["--out", str(tmp_path), "--idle-s", "20", *(["--hybrid"] if hybrid else [])]
    code = run(gpu_recapture, monkeypatch, *line)
    path = tmp_path / f"recapture{'_hybrid' if hybrid else ''}.json"
    found = json.loads(path.read_text())
    assert found["faults"] == {}
    assert failed(found) == []
    assert code == 0
    assert len(found["checks"]) >= 18
    assert found["life_medians_ms"].keys() == {kind for kind, *_ in gpu_recapture.LIFE} | {
        f"decode step, batch of {max(gpu_recapture.DECODE_SIZES)}, graph"
    }
    assert all(len(phases) == 4 for phases in found["life_medians_ms"].values())
    assert len(list(tmp_path.iterdir())) <= 8
    assert plot_life.panels(found["life"])


def test_recapture_tells_what_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "hurts", False)
    monkeypatch.setattr(gpu_recapture, "beside_requests", lambda *_: 1 / 0)
    assert run(gpu_recapture, monkeypatch, "--out", str(tmp_path), "--idle-s", "20") == 1
    found = json.loads((tmp_path / "recapture.json").read_text())
    assert list(found["faults"]) == ["beside requests"]
    assert failed(found) == ["the fault that clearing prevents would have been seen"]


def test_ranks_go_through_all_their_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "slow", True)
    monkeypatch.setenv(gpu_ranks.MULTICAST, "0")
    out, work = tmp_path / "out", tmp_path / "work"
    (work / "triton" / "tmp.pid_1").mkdir(parents=True)
    monkeypatch.setattr(gpu_ranks, "SETTLED_S", 0.5)
    line = ["--out", str(out), "--work", str(work), "--idle-s", "30", "--cold-s", "30"]
    line += ["--ways", "custom", "nccl", "symmetric", "--part", *gpu_ranks.PARTS]
    code = run(gpu_ranks, monkeypatch, *line)
    assert json.loads((out / "ranks_run.json").read_text())["faults"] == {}
    found = {part: json.loads((out / f"ranks_{part}.json").read_text()) for part in gpu_ranks.PARTS}
    wrong = {part: names for part in found if (names := failed(found[part]))}
    # Added latencies are the stand-in's noise; the rest holds.
    assert {name for names in wrong.values() for name in names if "added time" not in name} == set()
    assert code == (1 if wrong else 0)
    assert "left out" in found["differ"]["symmetric"]
    assert found["one"]["speed_up"]["times"] >= 1.7
    assert found["tp"]["recaptured"]
    assert found["ep"]["recaptured"]
    assert found["differ"]["custom"]["rows"] == {"0": len(gpu_stand_in.SIZES), "1": 0}
    assert found["tp"]["first_token"]["M_settled"] > 0
    assert len(found["tp"]["first_token"]["times_ms"]["on"]) > 20
    assert all("--enforce-disable-flashinfer-allreduce-fusion" in gpu_ranks.FLAGS[p] for p in PARTS_OF_TWO)


PARTS_OF_TWO = [part for part in gpu_ranks.PARTS if part != "one"]


def test_a_server_that_does_not_bear_a_custom_all_reduce_is_started_by_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandIn, "died", 1)
    monkeypatch.setattr(gpu_ranks, "SETTLED_S", 0.5)
    line = ["--out", str(tmp_path), "--work", str(tmp_path / "work"), "--part", "two", "--cold-s", "20"]
    assert run(gpu_ranks, monkeypatch, *line) == 0
    assert json.loads((tmp_path / "ranks_two.json").read_text())["started_by_nccl"] == ["learns"]


STAMP = "2026-11-30 16:16:55"
STARTED = "MoE autotune 0.1.0: hooks in place; shapes on the Triton path: 1; learned rows:"


@pytest.mark.parametrize(
    ("log", "rows"),
    [
        (f"[{STAMP}] {STARTED} 43; mode read-only\n", {0: 43}),
        (f"6/6[{STAMP} TP1 EP1] {STARTED} 0; mode x\n[{STAMP} TP0 EP0] {STARTED} 7; mode x\n", {0: 7, 1: 0}),
        (f"[{STAMP}] MoE autotune learned E256 M=16: 9.3 % faster\n", {}),
    ],
    ids=["one-rank", "two-ranks", "none"],
)
def test_rows_of_a_server_that_writes_no_live_file_are_in_its_log(log: str, rows: dict[int, int]) -> None:
    assert gpu_server.rows_at_start(log) == rows


class TokenizedGenerateReqInput:
    """Named as SGLang's."""


def test_requests_that_came_in_a_slice_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[Any] = []
    monkeypatch.setattr(Serving, "idle", lambda _self, worked: worked)
    monkeypatch.setattr(Serving, "requests", lambda _self, some: received.extend(some))
    monkeypatch.setattr(plugin, "serving", lambda: SimpleNamespace(place=SimpleNamespace(rank=1)))
    ranks_probe._count_met(tmp_path)
    serving = Serving.__new__(Serving)
    user = TokenizedGenerateReqInput()
    for worked, requests in ((True, [user]), (False, [user]), (True, [1])):
        assert serving.idle(worked) is worked
        serving.requests(requests)
    serving.requests([user])  # no idle pass since the last one: no slice was met
    assert len(received) == 4
    end = time.monotonic() + 10
    while not (tmp_path / "met-1.json").exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert json.loads((tmp_path / "met-1.json").read_text()) == {"met 1": 1, "requests 1": 3}


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("[TP0] CustomAllReduceV2 is disabled because your platform lacks GPU P2P capability", 1),
        ("[TP0] Setup Custom allreduce failed with no symmetric memory.", 1),
        ("[TP0] All Reduce config: symmetric_memory = 80.00 MB, multicast = False", 1),
        ("server_args=ServerArgs(enforce_disable_flashinfer_allreduce_fusion=True)", 0),
    ],
    ids=["disabled", "failed", "own", "arguments"],
)
def test_what_is_said_of_the_all_reduce_is_kept(line: str, seen: int) -> None:
    assert len(gpu_ranks.all_reduce(f"other words\n{line}\n")) == seen


def test_a_share_that_is_too_small_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_ranks, "SETTLED_S", 0.5)
    monkeypatch.setattr(gpu_ranks.Run, "met", lambda _: collections.Counter({"requests 0": 0}))
    run(gpu_ranks, monkeypatch, "--out", str(tmp_path), "--work", str(tmp_path / "work"), "--part", "tp")
    found = json.loads((tmp_path / "ranks_tp.json").read_text())
    assert "the turns count: enough requests met a slice, and M were settled" in failed(found)


def test_parts_are_kept_at_once_and_fail_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = {}
    parts = gpu_parts.Parts(tmp_path / "found.json", 50.0, found)
    assert not parts.run("breaks", lambda: 1 / 0)
    assert json.loads((tmp_path / "found.json").read_text())["faults"].keys() == {"breaks"}
    assert parts.run("works", lambda: found.update(answer=42))
    assert not parts.run("long", lambda: found.update(answer=0), need_s=60.0)
    kept = json.loads((tmp_path / "found.json").read_text())
    assert kept["answer"] == 42
    assert "ZeroDivisionError" in kept["faults"]["breaks"]
    assert kept["faults"]["long"].startswith("not begun")
    assert parts.failed
    assert "breaks FAILED" in capsys.readouterr().err


def test_the_preflight_sees_this_checkout_and_tells_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_preflight, "NEEDED", ("json", "no_such_package"))
    assert run(gpu_preflight, monkeypatch, "--gpus", "64") == 1
    told = capsys.readouterr().out
    assert "[FAIL] no_such_package: ModuleNotFoundError" in told
    assert "[ok] the package is this checkout's" in told
    assert "[FAIL] 64 GPU" in told
