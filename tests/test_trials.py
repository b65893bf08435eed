"""Trials: kept beside the store and out of its way; what cannot be used is said, not deleted."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import record_values as v

from sglang_moe_autotune import store, whole_file
from sglang_moe_autotune.shapes import GEMMS, KernelConfig
from sglang_moe_autotune.trials import (
    FOLDER,
    MAX_BYTES,
    MAX_MS,
    MAX_TRIALS,
    TrialLog,
    environment_key,
    file_name,
    merged,
    read,
)
from sglang_moe_autotune.tried import Tried

if TYPE_CHECKING:
    from pathlib import Path

UP = Tried("up", KernelConfig(16, 32, 64, 1, 4, 3), 0.8, 5)
DOWN = Tried("down", KernelConfig(16, 64, 64, 1), 1.5, 3)
SHAPE = v.shape()


def put(root: Path, m: int, *rows: Tried, of: Any = SHAPE, environment: Any = v.H200) -> Path:
    """Written by a process of its own; the path of the file."""
    log = TrialLog(root, environment)
    log.put(of, m, rows)
    assert log.flush(5)
    return root / FOLDER / file_name(environment_key(environment), of)


def test_what_was_tried_is_read_by_shape_and_m(tmp_path: Path) -> None:
    put(tmp_path, 64, UP, DOWN)
    put(tmp_path, 8, DOWN)
    path = put(tmp_path, 8, UP, of=v.shape(8))
    assert read(tmp_path, v.H200) == {SHAPE: {8: [DOWN], 64: [UP, DOWN]}, v.shape(8): {8: [UP]}}
    document = json.loads(path.read_bytes())
    assert (document["schema"], document["environment_key"]) == (1, environment_key(v.H200))
    assert document["ms"] == {"8": [["up", [16, 32, 64, 1, 4, 3], 0.8, 5]]}


def test_the_environments_do_not_mix_and_the_store_does_not_list_them(tmp_path: Path) -> None:
    other = msgspec.structs.replace(v.H200, triton="3.8.1")
    put(tmp_path, 64, UP)
    put(tmp_path, 64, DOWN, environment=other)
    assert read(tmp_path, v.H200) == {SHAPE: {64: [UP]}}
    assert read(tmp_path, other) == {SHAPE: {64: [DOWN]}}
    assert store.environments(tmp_path) == []


def test_of_two_trials_of_a_config_the_one_with_more_samples_stays(tmp_path: Path) -> None:
    longer, shorter = UP._replace(ratio=0.9, samples=9), UP._replace(ratio=0.7, samples=2)
    put(tmp_path, 64, UP, DOWN)
    put(tmp_path, 64, shorter)
    put(tmp_path, 64, longer)
    assert read(tmp_path, v.H200) == {SHAPE: {64: [longer, DOWN]}}
    assert merged([UP, longer, shorter]) == merged([shorter, UP, longer]) == [longer]


def test_a_file_stays_bounded(tmp_path: Path) -> None:
    configs = [KernelConfig(16 << a, 16 << b, 64, 1 + g, 4, 2 + s) for a in range(5) for b in range(5)
               for g in range(4) for s in range(2)]  # fmt: skip
    ratios = [(config, round(1 + n / 1000, 5)) for n, config in enumerate(configs)]
    rows = [Tried(gemm, config, ratio, 1 << 50) for gemm in GEMMS for config, ratio in ratios]
    log = TrialLog(tmp_path, v.H200)
    for m in range(1, MAX_MS + 50):
        log.put(SHAPE, m, rows)
    assert log.flush(60)
    put(tmp_path, 5000, UP)
    found = read(tmp_path, v.H200)[SHAPE]
    assert len(found) == MAX_MS
    assert found[5000] == [UP], "the M of now is there"
    del found[5000]
    assert all(ms == [row for row in rows if row.ratio < 1.1195] for ms in found.values())
    assert {len(ms) for ms in found.values()} == {2 * MAX_TRIALS}
    assert sum(path.stat().st_size for path in (tmp_path / FOLDER).iterdir()) < MAX_BYTES


HEAD = {"schema": 1, "environment_key": environment_key(v.H200), "shape": msgspec.to_builtins(SHAPE)}
ROW = ["up", [16, 32, 64, 1, 4, 3], 0.8, 5]


def in_lines(*lines: str) -> bytes:
    """A file as it is written, with these lines for the M."""
    head = json.dumps(HEAD, separators=(",", ":")).removesuffix("}")
    return "\n".join([f'{head},"ms":{{', ",\n".join(lines), "}}"]).encode()


ROWS = json.dumps([ROW], separators=(",", ":"))


def test_each_m_is_a_line_of_a_json_document_and_read_as_such(tmp_path: Path) -> None:
    for m in (64, 8):
        path = put(tmp_path, m, UP)
    assert path.read_bytes() == in_lines(f'"8":{ROWS}', f'"64":{ROWS}')
    document = json.loads(path.read_bytes())
    assert list(document["ms"]) == ["8", "64"]
    path.write_text(json.dumps(document, indent=1))
    put(tmp_path, 16, DOWN)
    assert read(tmp_path, v.H200) == {SHAPE: {8: [UP], 16: [DOWN], 64: [UP]}}, "whoever has laid it out"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"{", id="torn"),
        pytest.param(b"\xff\xfe", id="no-text"),
        pytest.param(b"[" * 100_000, id="deep"),
        pytest.param(b" " * (MAX_BYTES + 1), id="large"),
        pytest.param(json.dumps({**HEAD, "ms": {"x": []}}).encode(), id="m-is-no-number"),
        pytest.param(in_lines(f'"8":{ROWS}', f'"x":{ROWS}'), id="m-in-lines-is-no-number"),
        pytest.param(in_lines(f'"8":{ROWS}', f'"64":{ROWS}')[:-20], id="torn-in-lines"),
        pytest.param(in_lines(f'"8":{ROWS[:-1]}', f'"64":{ROWS}'), id="torn-line"),
        pytest.param(in_lines(f'"8":{ROWS}}},{{"9":{ROWS}'), id="line-that-ends-early"),
        pytest.param(json.dumps({**HEAD, "schema": 2, "ms": {}}).encode(), id="newer"),
        pytest.param(json.dumps({**HEAD, "environment_key": "other", "ms": {}}).encode(), id="foreign"),
        pytest.param(json.dumps({**HEAD, "ms": {"64": [["up", [16, 32, 64, 1], 0.8, 5]]}}).encode(), id="short-row"),
        pytest.param(json.dumps({**HEAD, "ms": {"64": [["up", [17, 32, 64, 1, 4, 3], 0.8, 5]]}}).encode(), id="tile"),
        pytest.param(json.dumps({**HEAD, "ms": {"64": [["up", [16, 32, 64, 1, 4, 3], -1, 5]]}}).encode(), id="ratio"),
        pytest.param(json.dumps({**HEAD, "ms": {"64": [["left", ROW[1], 0.8, 5]]}}).encode(), id="no-gemm"),
        pytest.param(
            json.dumps({**HEAD, "shape": {**HEAD["shape"], "top_k": 0}, "ms": {"64": []}}).encode(),  # type: ignore[dict-item]
            id="shape",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named_and_left_alone(
    text: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / FOLDER / file_name(environment_key(v.H200), SHAPE)
    path.parent.mkdir()
    path.write_bytes(text)
    caplog.set_level(logging.WARNING)
    assert read(tmp_path, v.H200) == {}
    assert path.name in caplog.text
    caplog.clear()
    put(tmp_path, 64, UP)
    assert path.read_bytes() == text
    assert "are not kept" in caplog.text


def test_an_m_that_cannot_be_used_does_not_spoil_the_others(tmp_path: Path) -> None:
    path = put(tmp_path, 64, UP)
    document = json.loads(path.read_bytes())
    document["ms"]["8"] = [["up", "later"]]
    document["news"] = 1
    path.write_text(json.dumps(document))
    put(tmp_path, 16, DOWN)
    assert read(tmp_path, v.H200) == {SHAPE: {16: [DOWN], 64: [UP]}}
    assert json.loads(path.read_bytes())["ms"]["8"] == [["up", "later"]]


def test_what_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    strange = UP._replace(config=KernelConfig(16, 32, 64, 1, extra=(("waves_per_eu", 2),)))
    put(tmp_path, 64, strange, UP._replace(ratio=float("nan")), UP._replace(ratio=float("inf")), DOWN)
    assert read(tmp_path, v.H200) == {SHAPE: {64: [DOWN]}}


def test_a_put_does_not_wait_and_puts_during_a_write_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, writes = threading.Event(), []
    real = whole_file.replace

    def replace(path: Path, text: bytes) -> Any:
        writes.append(path.name)
        gate.wait(5)
        return real(path, text)

    monkeypatch.setattr(whole_file, "replace", replace)
    log = TrialLog(tmp_path, v.H200)
    started = time.perf_counter()
    for m in range(1, 51):
        log.put(SHAPE, m, [UP])
    assert time.perf_counter() - started < 4, "a put waited for the write"
    assert not log.flush(0.01)
    gate.set()
    assert log.flush(5)
    assert len(writes) <= 2
    assert len(read(tmp_path, v.H200)[SHAPE]) == 50
    threads = {t for t in threading.enumerate() if t.name == "moe-autotune-trials"}
    log.put(SHAPE, 51, [UP])  # whoever puts serves requests, and would wait for another thread to begin
    assert log.flush(5)
    assert {t for t in threading.enumerate() if t.name == "moe-autotune-trials"} == threads
    assert len(read(tmp_path, v.H200)[SHAPE]) == 51


@pytest.mark.parametrize("place", ["nowhere", "a-file", "a-link", "no-thread"])
def test_no_disk_is_no_exception(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root: Path | None = tmp_path / "root"
    assert root is not None
    if place == "nowhere":
        root = None
    elif place == "a-file":
        root.touch()
    elif place == "a-link":
        root.mkdir()
        (tmp_path / "elsewhere").mkdir()
        (root / FOLDER).symlink_to(tmp_path / "elsewhere")
    else:
        monkeypatch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no thread")))
    log = TrialLog(root, v.H200)
    log.put(SHAPE, 64, [UP])
    log.put(SHAPE, 64, [])
    assert log.flush(5)
    assert read(tmp_path / "root", v.H200) == {}
    if place == "a-link":
        assert not list((tmp_path / "elsewhere").iterdir())


def test_leftovers_of_a_kill_go_after_an_hour(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    for name, age_s in ((".old.json.1-2.tmp", 7200), (".new.json.1-2.tmp", 10), ("mine.txt", 7200)):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - age_s,) * 2)
    put(tmp_path, 64, UP)
    assert {".new.json.1-2.tmp", "mine.txt"} <= {path.name for path in folder.iterdir()}
    assert not (folder / ".old.json.1-2.tmp").exists()
