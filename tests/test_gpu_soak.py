"""The soak on a stand-in for the server: it goes through all deeds, and finds what is planted."""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import gpu_soak
from gpu_server import Server

from sglang_moe_autotune import switch


class StandIn(Server):
    """Answers as SGLang does; its slices go on while nothing forbids them, or always where that is planted."""

    def __init__(self, root: Path, *, always: bool = False, drift: float = 0.0) -> None:
        self.root, self.always, self.short, self.drift = root, always, False, drift
        self.log = root / "server.log"
        self.log.write_text("all is well\n")
        self.level, self.paused, self.released, self.running = 2, threading.Event(), False, 0
        self.stopped: set[str] = set()
        self.asked, self.begun = 0, time.monotonic()
        self.counted, self.at = 0.0, time.monotonic()
        self.lock = threading.Lock()
        self.process = SimpleNamespace(pid=0, poll=lambda: None)  # type: ignore[assignment]
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                owner.count()
                told = {"internal_states": [{"moe_autotune": {"slices": int(owner.counted)}}]}
                self.answer(200, told if self.path == "/server_info" else None)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
                owner.count()
                self.answer(*getattr(owner, self.path.strip("/"))(body))

            def answer(self, code: int, value: Any) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(b"" if value is None else json.dumps(value).encode() + b"\n")

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.http.server_address[1]
        self.thread = threading.Thread(target=self.http.serve_forever)
        self.thread.start()

    def count(self) -> None:
        with self.lock:
            now = time.monotonic()
            forbids = self.level < 2 or self.paused.is_set() or self.released or switch.read(self.root) != "on"
            if self.always or not forbids:
                self.counted += 1000 * (now - self.at)
            self.at = now

    def generate_one(self, rid: str, prompt: list[int], parameters: dict[str, Any]) -> dict[str, Any]:
        new = parameters["max_new_tokens"]
        for _ in range(new):
            while self.paused.is_set():
                time.sleep(0.01)
            time.sleep(0.0005)
            if rid in self.stopped or "" in self.stopped:
                return {"output_ids": [1], "meta_info": {"finish_reason": {"type": "abort", "message": "Abort"}}}
        self.asked += 1
        made = new - 1 if self.short and self.asked % 7 == 0 else new
        logprob = -1.0 - self.drift * self.asked
        return {
            "output_ids": [7] * made,
            "meta_info": {
                "finish_reason": {"type": "length"},
                "input_token_logprobs": [[None, 0]] + [[logprob, 1]] * (len(prompt) - 1),
                "output_token_logprobs": [[logprob, 7]] * made,
            },
        }

    def generate(self, body: Any, *_: Any) -> Any:  # type: ignore[override]
        with self.lock:
            self.running += 1
        try:
            prompts, parameters = body["input_ids"], body["sampling_params"]
            if isinstance(prompts[0], list):
                return 200, [self.generate_one("", prompt, parameters) for prompt in prompts]
            return 200, self.generate_one(body.get("rid", ""), prompts, parameters)
        finally:
            with self.lock:
                self.running -= 1
                self.stopped.clear()

    def flush_cache(self, _: Any) -> Any:
        return (400, "pending") if self.running else (200, "flushed")

    def set_internal_state(self, body: Any) -> Any:
        self.level = body["server_args"]["moe_autotune"]
        return 200, [True]

    def pause_generation(self, body: Any) -> Any:
        assert body["mode"] == "in_place"
        self.paused.set()
        return 200, None

    def continue_generation(self, _: Any) -> Any:
        self.paused.clear()
        return 200, None

    def abort_request(self, body: Any) -> Any:
        self.stopped.add("" if body["abort_all"] else body["rid"])
        return 200, None

    def release_memory_occupation(self, _: Any) -> Any:
        assert not self.running, "released while a request runs: SGLang ends its scheduler then"
        self.released = True
        return 200, None

    def resume_memory_occupation(self, _: Any) -> Any:
        assert not self.running
        self.released = False
        return 200, None

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gap is longer than it must be for the stand-in, but for the file that is looked at every few seconds."""
    sleep = time.sleep
    monkeypatch.setattr(gpu_soak.time, "sleep", lambda s: sleep(min(s, 0.05)))


def soaked(root: Path, **how: Any) -> tuple[gpu_soak.Soak, dict[str, Any], dict[str, Any]]:
    server = StandIn(root, **how)
    soak = gpu_soak.Soak(server, root, 3, saver=True)
    return soak, gpu_soak.first_answers(soak), {}


@pytest.mark.usefixtures("quick")
def test_a_soak_goes_through_every_deed_and_all_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_soak, "SAMPLE_S", 0.0)
    monkeypatch.setattr(gpu_soak, "rss_mib", lambda _: {"1": 1000})
    soak, reference, found = soaked(tmp_path)
    live = SimpleNamespace(
        rows=1, slices=0, gpu_s=1.0, queue=(), passes_over=0, pauses=0, pass_longest_us=1.0,
        graphs=SimpleNamespace(outcomes={}), deferred={}, quarantine={},
    )  # fmt: skip
    monkeypatch.setattr(soak, "live", lambda: SimpleNamespace(**{**vars(live), "slices": soak.slices()}))
    try:
        for name in soak.deeds:
            soak.run(name)
        gpu_soak.drive(soak, 3.0, reference, found)
        for _ in range(8):  # however long a deed took here
            soak.sample()
    finally:
        soak.server.stop()
    assert soak.done.keys() == soak.deeds.keys()
    assert found["answers"]
    checks: list[tuple[str, bool, str]] = []
    gpu_soak.judge(soak, soak.server.text(), checks)
    assert [check for check in checks if not check[1]] == []
    assert soak.count.aborted > 0
    checks.clear()
    gpu_soak.judge(soak, f"line\n{TRACEBACK}  File sglang_moe_autotune/tuner.py\n", checks)
    assert [name for name, ok, _ in checks if not ok] == ["no error in the server's log"]


TRACEBACK = "Traceback (most recent call last):\n  File x.py\n"


@pytest.mark.parametrize(
    ("log", "count"),
    [
        pytest.param("server_args=ServerArgs(watchdog_timeout=300, soft_watchdog_timeout=None)\n", 0, id="arguments"),
        pytest.param(f"{TRACEBACK}ValueError: Request is disconnected\n", 0, id="SGLang's own"),
        pytest.param(f"{TRACEBACK}{TRACEBACK}  File sglang_moe_autotune/tuner.py\n", 1, id="ours"),
        pytest.param("MoE autotune failed in its idle hook\n", 1, id="a fence"),
        pytest.param("pool memory leak detected! 3 tokens\nScheduler hit an exception\n", 2, id="SGLang's checks"),
    ],
)
def test_faults_are_told_from_what_servers_log_anyway(log: str, count: int) -> None:
    assert len(gpu_soak.faults(log)) == count


@pytest.mark.parametrize("deed", ["load and pause", "release", "switch by request", "switch by file"])
@pytest.mark.usefixtures("quick")
def test_slices_where_none_may_be_are_found_out(tmp_path: Path, deed: str) -> None:
    soak, _, _ = soaked(tmp_path, always=True)
    try:
        soak.run(deed)
    finally:
        soak.server.stop()
    assert "slices were spent while" in soak.broken[0]
    assert not soak.server.paused.is_set()  # type: ignore[attr-defined]
    assert not soak.server.released  # type: ignore[attr-defined]
    checks: list[tuple[str, bool, str]] = []
    gpu_soak.judge(soak, "", checks)
    assert not {name: ok for name, ok, _ in checks}["every promise held, in every kind of deed"]
    assert switch.read(tmp_path) == "on"


@pytest.mark.usefixtures("quick")
def test_a_lost_token_and_a_changed_answer_are_found_out(tmp_path: Path) -> None:
    soak, reference, found = soaked(tmp_path)
    soak.server.short = True  # type: ignore[attr-defined]
    try:
        soak.load(1.0)
    finally:
        soak.server.stop()
    assert soak.count.failed
    soak, reference, found = soaked(tmp_path, drift=0.001)
    try:
        for _ in range(40):
            soak.answers()
        gpu_soak.look(soak, reference, found)
    finally:
        soak.server.stop()
    assert "answers are not those of before" in soak.broken[0]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        pytest.param([5.0] * 8, (0.0, 0.0), id="level"),
        pytest.param([0, 0, 0, 40, 40, 40, 40, 40], (40, 0.0), id="early"),
        pytest.param([float(i) for i in range(12)], (9.0, 4.0), id="a leak"),
        pytest.param([0, 0, 0, 0, 0, 0, 0, 900], (0, 0), id="one spike"),
    ],
)
def test_a_trend_is_told_from_a_level_that_is_reached_early(values: list[float], found: tuple[float, float]) -> None:
    total, late = gpu_soak.growth(values)
    assert (total, late) == found or (total == found[0] and late <= found[1] + 1)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("outcomes", "holds"),
    [({}, False), ({"recaptured": 3}, True), ({"recaptured": 3, "failed": 1}, False)],
    ids=["none", "some", "one-failed"],
)
def test_a_soak_with_captures_needs_some(tmp_path: Path, outcomes: dict[str, int], holds: bool) -> None:
    soak, _, _ = soaked(tmp_path)
    soak.server.stop()
    soak.samples = [{"free_mib": 1, "rss_mib": {}, "graphs": outcomes}]
    checks: list[tuple[str, bool, str]] = []
    gpu_soak.judge(soak, "", checks, recapture=True)
    assert {name: ok for name, ok, _ in checks}["graphs were captured again, none in vain"] is holds


@pytest.mark.parametrize("recapture", [False, True])
def test_a_server_without_the_memory_saver_is_soaked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recapture: bool
) -> None:
    started: list[tuple[str, ...]] = []

    def server(_model: Path, _port: int, _log: Path, _environ: Any, flags: tuple[str, ...], _wait_s: int) -> str:
        started.append(flags)
        if "--enable-memory-saver" in flags:
            raise RuntimeError("the server is not healthy after 3 s")
        return "a server"

    monkeypatch.setattr(gpu_soak, "Server", server)
    monkeypatch.setattr(gpu_soak, "saver_environ", lambda: ({}, ""))
    options = SimpleNamespace(work=tmp_path, out=tmp_path, port=1, flags=[], compile_processes=1, recapture=recapture)
    checks: list[tuple[str, bool, str]] = []
    assert gpu_soak.start(options, tmp_path, checks) == ("a server", False)  # type: ignore[arg-type]
    assert len(started) == (1 if recapture else 2)
    assert [ok for _, ok, _ in checks] == ([] if recapture else [False])


def test_a_library_that_the_loader_cannot_load_is_found_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "torch_memory_saver"
    package.mkdir()
    (package / "__init__.py").write_text("")
    library = tmp_path / "lib.so"
    (package / "utils.py").write_text(f"def get_binary_path_from_package(_): return {str(library)!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("torch_memory_saver", "torch_memory_saver.utils"):  # set first, so that what is imported does not stay
        monkeypatch.setitem(sys.modules, name, sys)
        monkeypatch.delitem(sys.modules, name)
    library.write_bytes(b"no library")
    environ, why = gpu_soak.saver_environ()
    assert environ == {}
    assert why.startswith("its library cannot be preloaded")


def test_few_samples_say_nothing() -> None:
    with pytest.raises(ValueError, match="six are needed"):
        gpu_soak.growth([1.0, 2.0])
