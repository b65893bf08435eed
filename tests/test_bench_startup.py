"""scripts/bench_startup.py on made-up servers: what begins with what, and what is compared."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import bench_startup
import gpu_parts
from bench_startup import AGAINST, KINDS, PLUGIN_COLD, PLUGIN_STORE, PLUGIN_WARM, STOCK_COLD, STOCK_WARM

SECONDS = {STOCK_COLD: 9.0, PLUGIN_COLD: 9.5, PLUGIN_STORE: 10.4, STOCK_WARM: 4.0, PLUGIN_WARM: 4.75}
CAPTURE = {STOCK_COLD: 3.0, PLUGIN_COLD: 3.1, PLUGIN_STORE: 7.5, STOCK_WARM: 1.0, PLUGIN_WARM: 1.25}
ENDS = (
    "[2026-01-01 00:00:00] Capture target prefill CUDA graph end. elapsed={} s, mem usage=6.73 GB.\n"
    "[2026-01-01 00:00:00] Capture target decode CUDA graph end. elapsed=4.06 s, mem usage=0.06 GB.\n"
)
START = "[2026-01-01 00:00:00] MoE autotune 0.1.0: hooks in place; store /s; learned rows: {}; tuning when idle\n"


class MadeUp:
    """A server that says when it was ready; ``started`` and ``ended`` have the environments in order."""

    started: list[dict[str, Any]]
    ended: list[str]
    broken: str | None = None
    lock = threading.Lock()

    def __init__(self, _model: Path, port: int, log: Path, environ: dict[str, str], flags: tuple[str, ...]) -> None:
        self.kind, self.log = log.stem, log
        cache = Path(environ["TRITON_CACHE_DIR"])
        store = Path(environ["SGLANG_MOE_AUTOTUNE_DIR"]) if "SGLANG_MOE_AUTOTUNE_DIR" in environ else None
        rows = len(list(store.iterdir())) if store is not None and store.exists() else 0
        with self.lock:
            self.started.append({"kind": self.kind, "port": port, "cache": cache.exists(), "rows": rows,
                                 "alone": environ.get("SGLANG_PLUGINS"), "nccl": int(flags[-1]),
                                 "ended": len(self.ended)})  # fmt: skip
        cache.mkdir(exist_ok=True)
        log.write_text((START.format(rows) if store is not None else "") + ENDS.format(CAPTURE[self.kind]))
        if self.kind == self.broken:
            raise RuntimeError("the server is not healthy after 1 s: planted")
        number = sum(one["kind"] == self.kind for one in self.started)
        self.ready_s, self.rested = SECONDS[self.kind] + number, False

    def text(self) -> str:
        return self.log.read_text()

    def rest(self) -> None:
        self.rested = True

    def __enter__(self) -> MadeUp:  # noqa: PYI034 - Self is in typing from Python 3.11 on
        return self

    def __exit__(self, *_: object) -> None:
        assert self.rested == (self.kind in AGAINST)
        time.sleep(0.01)
        with self.lock:
            self.ended.append(self.kind)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import tarfile  # noqa: PLC0415 - for the one archive

    (tmp_path / "row").write_text("a row")
    with tarfile.open(tmp_path / "store.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "row", "row")
    MadeUp.started, MadeUp.ended, MadeUp.broken = [], [], None
    monkeypatch.setattr(bench_startup, "machine", lambda: {"gpu": "none"})

    def call(*more: str, broken: str | None = None) -> tuple[int, dict[str, Any]]:
        MadeUp.broken = broken
        code = bench_startup.main(
            ["--out", str(tmp_path / "out"), "--store", str(tmp_path / "store.tar.gz"), "--rounds", "3", *more], MadeUp
        )
        return code, json.loads((tmp_path / "out" / "startup.json").read_text())

    return call


def test_starts_of_one_round_are_compared(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run()
    checks = {check["name"]: check["holds"] for check in found["checks"]}
    assert [list(r) for r in found["rounds"]] == [list(KINDS)] * 3  # the first, in which caches are filled, is none
    assert found["rounds"][0][STOCK_WARM] == {"ready_s": 6.0, "capture_s": 5.06, "rows": None}
    assert found["rounds"][0][PLUGIN_WARM] == {"ready_s": 6.75, "capture_s": 5.31, "rows": 1}
    assert found["added_ready_s"][PLUGIN_COLD] == {"median": 0.5, "rounds": [0.5] * 3}
    assert found["added_capture_s"][PLUGIN_STORE] == {"median": 4.5, "rounds": [4.5] * 3}
    assert checks[f"captures, {PLUGIN_WARM} - {STOCK_WARM}"]
    assert not checks[f"captures, {PLUGIN_STORE} - {STOCK_COLD}"]
    assert checks[f"start, {PLUGIN_COLD} - {STOCK_COLD}"]
    assert checks[f"start, {PLUGIN_WARM} - {STOCK_WARM}"]
    assert not checks[f"start, {PLUGIN_STORE} - {STOCK_COLD}"]
    assert code == 1
    assert "[MISSED] start, plugin-store - stock-cold: +1.40 s (+1.40 to +1.40 in 3 rounds)" in capsys.readouterr().out


def test_captures_of_other_releases_are_read() -> None:
    older = "[2026-01-01 00:00:00 TP0] Capture cuda graph end. Time elapsed: 3.21 s. mem usage=0.1 GB.\n"
    assert bench_startup.capture_s(older + ENDS.format(1)) == 8.27
    assert bench_startup.capture_s("Capture cuda graph begin.") == 0


def test_a_round_begins_together_each_with_folders_and_ports_of_its_own(run: Any) -> None:
    run()
    rounds = [MadeUp.started[:2], *(MadeUp.started[i : i + 5] for i in (2, 7, 12))]
    assert [one["ended"] for one in MadeUp.started] == [0] * 2 + [2] * 5 + [7] * 5 + [12] * 5
    assert {one["kind"] for one in rounds[0]} == {STOCK_WARM, PLUGIN_WARM}
    for one in MadeUp.started[2:]:
        assert one["cache"] == (one["kind"] in {STOCK_WARM, PLUGIN_WARM})
        assert one["rows"] == (one["kind"] in {PLUGIN_STORE, PLUGIN_WARM})
        assert (one["alone"] is None) == (one["kind"] in AGAINST)
    ports = [port for one in MadeUp.started for port in (one["port"], one["nccl"])]
    assert len(set(ports)) == len(ports) == 34
    orders = [tuple(one["kind"] for one in sorted(some, key=lambda one: one["port"])) for some in rounds[1:]]
    assert len(set(orders)) == 3, "none begins first in all rounds"


def test_a_server_that_does_not_start_is_told_and_ends_the_run(run: Any) -> None:
    code, found = run(broken=PLUGIN_STORE)
    assert code == 1
    assert "plugin-store: the server is not healthy after 1 s: planted" in found["faults"]["round 1"]
    assert len(MadeUp.started) == 2 + 5
    assert sorted(MadeUp.ended) == sorted(one["kind"] for one in MadeUp.started if one["kind"] != PLUGIN_STORE)


def test_a_fault_of_any_kind_is_told(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait for it for minutes, and a round without it would count."""
    monkeypatch.setattr(bench_startup, "rows_at_start", lambda _: {}["no line"])
    monkeypatch.setattr(bench_startup, "TOGETHER_S", 20.0)
    begun = time.monotonic()
    code, found = run()
    assert code == 1
    assert "no line" in found["faults"]["not counted"]
    assert time.monotonic() - begun < 10


def test_when_the_time_is_over_no_server_is_waited_for(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the two is ready, and the other one does not come."""
    comes, before = threading.Event(), {*threading.enumerate()}

    class Late(MadeUp):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            if self.kind == PLUGIN_WARM:
                comes.wait(60)

    monkeypatch.setattr(gpu_parts, "_LAST_WORD_S", 0.0)
    monkeypatch.setattr(sys.modules[__name__], "MadeUp", Late)
    try:
        code, found = run("--budget-s", "1.5")
        assert code == 1
        assert "the time is over" in found["faults"]["not counted"]
        ended_s = time.monotonic() + 10
        while MadeUp.ended != [STOCK_WARM] and time.monotonic() < ended_s:
            time.sleep(0.01)
        assert MadeUp.ended == [STOCK_WARM], "it does not wait for the other one"
        assert all(thread.daemon for thread in {*threading.enumerate()} - before)
    finally:
        comes.set()


def test_rounds_for_which_no_time_is_left_are_left_out(run: Any) -> None:
    code, found = run("--budget-s", "60")
    assert code == 1
    assert found["rounds"] == []
    assert not found["checks"][0]["holds"]


def test_without_a_store_it_says_where_to_take_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_startup.main(["--out", str(tmp_path), "--store", str(tmp_path / "none")])
    assert "store.tar.gz from the --out of bench_serving.py" in capsys.readouterr().err
