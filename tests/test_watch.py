"""status: again and again, over HTTP, and how two servers on one store differ."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from made_up_store import fill, live

from sglang_moe_autotune import explain, remote, status
from sglang_moe_autotune.cli import main
from sglang_moe_autotune.errors import ServerError
from sglang_moe_autotune.status import Server, differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from click.testing import Result

PART = {
    "version": "0.1.0",
    "mode": "miss",
    "state": "tuning",
    "rows": 3,
    "current": ["E128", 64],
    "gpu_s": 4.5,
    "shapes": {"E128-N768": {"learned": 2, "queued": 1, "best_gain": 0.324}},
}
Answer = tuple[int, bytes]


@pytest.fixture
def serve() -> Iterator[Callable[[dict[str, Answer]], str]]:
    """``serve({path: (code, body)})``: a server on the loopback address; its URL."""
    servers: list[http.server.HTTPServer] = []

    def start(answers: dict[str, Answer]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                code, body = answers.get(self.path, (404, b""))
                self.send_response(code)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                """Nothing: a test's output is its own."""

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def body(*states: Any, **fields: Any) -> bytes:
    return json.dumps({"version": "0.5.23", "model_path": "x", "internal_states": list(states), **fields}).encode()


def shell(*arguments: str) -> Result:
    result = CliRunner().invoke(main, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


# --url


def test_a_server_with_the_plugin_is_shown(serve: Callable[..., str]) -> None:
    url = serve({"/server_info": (200, body({"moe_autotune": PART, "other": 1}))})
    result = shell("status", "--url", f"{url}/")
    assert result.exit_code == 0
    assert f"{url}: SGLang 0.5.23" in result.stdout
    for line in ("state: tuning", "current: E128, 64", "shapes E128-N768: learned 2, queued 1, best_gain 0.324"):
        assert line in result.stdout
    found = json.loads(shell("status", "--url", url, "--json").stdout)["server_info"]
    assert found == {"url": url, "sglang": "0.5.23", "active": True, "moe_autotune": [PART]}


def test_an_older_release_has_another_path_and_a_scheme_may_be_left_out(serve: Callable[..., str]) -> None:
    url = serve({"/get_server_info": (200, body({"moe_autotune": PART}))})
    assert remote.ask(url.removeprefix("http://")).groups == (PART,)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(body(), id="no states"),
        pytest.param(body({}), id="no key"),
        pytest.param(body({"moe_autotune": None}), id="null"),
        pytest.param(body({"moe_autotune": [1]}), id="a list"),
        pytest.param(body("text", 3), id="states that are no objects"),
        pytest.param(body(internal_states="x"), id="states that are no list"),
        pytest.param(b"{}", id="nothing in it"),
    ],
)
def test_a_server_without_the_plugin_is_code_1_and_no_error(serve: Callable[..., str], answer: bytes) -> None:
    result = shell("status", "--url", serve({"/server_info": (200, answer)}))
    assert result.exit_code == 1
    assert "it has no moe_autotune" in result.stdout


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        pytest.param({}, "has no /server_info", id="not an SGLang server"),
        pytest.param({"/server_info": (401, b"")}, "wants a key", id="a key is wanted"),
        pytest.param({"/server_info": (500, b"")}, "answered 500", id="an error"),
        pytest.param({"/server_info": (200, b"<html>")}, "no /server_info", id="a page"),
        pytest.param({"/server_info": (200, b"[" * 100_000)}, "no /server_info", id="nested without end"),
    ],
)
def test_another_answer_is_code_3_and_one_sentence(
    serve: Callable[..., str], answers: dict[str, Answer], says: str
) -> None:
    result = shell("status", "--url", serve(answers))
    assert (result.exit_code, result.stdout) == (3, "")
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("url", ["", "ftp://127.0.0.1", "http://", "file:///etc/passwd", "http://127.0.0.1:1"])
def test_an_address_that_is_none_is_an_error(url: str) -> None:
    with pytest.raises(ServerError):
        remote.ask(url, timeout_s=2.0)


def test_a_proxy_for_the_web_is_not_asked(serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert remote.ask(serve({"/server_info": (200, body({"moe_autotune": PART}))})).active


# Two servers on one store


def test_what_differs_between_two_servers_is_named(autotune_folder: Path) -> None:
    fill(autotune_folder)
    me, now = status.this_process(), time.time()
    elsewhere = me._replace(pid=7, host="gpu-2", boot_id="another")
    assert status.write(autotune_folder, live(me, unix_s=now))
    assert status.write(autotune_folder, live(elsewhere, unix_s=now, rows=5, mode="read-only"))
    result = shell("status").stdout
    assert "differ" in result
    assert re.search(r"rows: pid \d+ on \S+: 3; pid 7 on gpu-2: 5", " ".join(result.split()))
    found = json.loads(shell("status", "--json").stdout)["differences"]
    assert [d["field"] for d in found] == ["mode", "rows"]
    assert set(found[0]["values"].values()) == {"miss", "read-only"}


def server(**fields: Any) -> Server:
    presence = fields.pop("presence", "running")
    return Server(None, live(**fields), presence)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        pytest.param({}, [], id="equal"),
        pytest.param({"state": "busy", "gpu_s": 9.0, "reason": "x"}, [], id="what always differs"),
        pytest.param({"epoch": 9}, ["epoch"], id="epoch"),
        pytest.param({"sglang": "0.5.23", "triton": "3.8.0"}, ["sglang", "triton"], id="versions"),
        pytest.param({"rows": 9, "presence": "gone"}, [], id="gone"),
        pytest.param({"rows": 9, "presence": "silent"}, [], id="silent"),
        pytest.param({"rows": 9, "presence": "elsewhere"}, ["rows"], id="elsewhere"),
        pytest.param({"rows": 9, "device_name": "NVIDIA B200"}, [], id="another GPU"),
    ],
)
def test_only_what_should_be_equal_is_compared(second: dict[str, Any], expected: list[str]) -> None:
    assert [d.field for d in differences((server(), server(**second)))] == expected


# --watch


def watch(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-m", "sglang_moe_autotune.cli", "status", "--watch", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)


@pytest.mark.parametrize("option", [(), ("--json",)], ids=["people", "json"])
def test_a_watch_in_a_pipe_prints_block_after_block_and_ends_well(
    autotune_folder: Path, option: tuple[str, ...]
) -> None:
    fill(autotune_folder)
    with watch(*option) as process:
        assert process.stdout is not None
        starts = 0
        for line in process.stdout:
            assert "\x1b" not in line
            starts += line.startswith("{" if option else "-- ")
            if option:
                assert json.loads(line)["environments"][0]["records"] == 4
            if starts == 2:
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize("option", [(), ("--json",)], ids=["people", "json"])
def test_a_watch_outlives_a_server_that_is_not_there(autotune_folder: Path, option: tuple[str, ...]) -> None:
    fill(autotune_folder)
    with watch("--url", "http://127.0.0.1:1", *option) as process:
        assert process.stdout is not None
        seen = 0
        for line in process.stdout:
            if option:
                told = json.loads(line)
                assert "gives no answer" in told["not_reached"]
                assert told["environments"][0]["records"] == 4
            seen += "not reached" in line or bool(option)
            if seen == 2:
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")


def test_a_watch_of_what_is_no_address_ends_at_once(autotune_folder: Path) -> None:
    with watch("--url", "ftp://127.0.0.1") as process:
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 3
    assert "http://HOST:PORT" in errors


# Completion


def test_a_shape_is_completed_from_the_store(autotune_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(autotune_folder)

    def completed(line: str, word: int) -> list[str]:
        monkeypatch.setenv("_SGLANG_MOE_AUTOTUNE_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(word))
        result = CliRunner().invoke(main, [], prog_name="sglang-moe-autotune")
        return [text.removeprefix("plain,") for text in result.stdout.splitlines() if text]

    for command in ("show", "explain", "pin", "forget"):
        assert completed(f"sglang-moe-autotune {command} e128", 2) == ["E128-N768-K2048-top8-bf16"]
    assert len(completed("sglang-moe-autotune show ", 2)) == 2
    (autotune_folder / "x.json").write_text("{")
    assert len(completed("sglang-moe-autotune show ", 2)) == 2
    monkeypatch.setenv("SGLANG_MOE_AUTOTUNE_DIR", str(autotune_folder / "nowhere"))
    assert completed("sglang-moe-autotune show ", 2) == []


# What explain takes from running servers


@pytest.mark.parametrize(
    ("fields", "mode", "source"),
    [
        pytest.param({"mode": "off"}, "off", "heuristic", id="mode of the server"),
        pytest.param({"mode": "off", "triton": "3.8.0"}, "miss", "learned", id="a server of another Triton"),
        pytest.param({"reason": "deterministic inference is on, so"}, "miss", "override", id="deterministic"),
    ],
)
def test_explain_asks_the_running_servers(
    autotune_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: Any, mode: str, source: str
) -> None:
    (tmp_path / "configs").mkdir()
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(tmp_path))
    fill(autotune_folder)
    assert status.write(autotune_folder, live(unix_s=time.time(), **fields))
    found = json.loads(shell("explain", "E128", "256", "--json").stdout)
    assert (found["mode"], found["answer"]["source"]) == (mode, source)


def test_the_reason_that_explain_looks_for_is_the_servers_own() -> None:
    source = Path(importlib.util.find_spec("sglang_moe_autotune.serving").origin)  # type: ignore[union-attr, arg-type]
    assert f'"{explain.DETERMINISTIC} is on' in source.read_text(encoding="utf-8")
