"""The coverage script: what it finds on a recorded device is that device's truth, and its tables say what was found."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import synthetic

torch = pytest.importorskip("torch")
SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))

import coverage_rows  # noqa: E402 - found on the path set above
import gpu_acceptance  # noqa: E402 - as above
import gpu_coverage  # noqa: E402 - as above

from sglang_moe_autotune.prior import Prior  # noqa: E402 - as above
from sglang_moe_autotune.records import Environment  # noqa: E402 - as above
from sglang_moe_autotune.replay import ReplayProvider  # noqa: E402 - as above

if TYPE_CHECKING:
    from sglang_moe_autotune.shapes import ConfigPair, MoeShape

LANDSCAPE = synthetic.landscape(ms=(16, 512), ruggedness=0.02)
MS = LANDSCAPE.ms
H200 = Environment("NVIDIA H200", (9, 0), 132, 232448, 1, "3.6.0", "k")


def row(error: float = 1e-3, served: bool = True) -> gpu_coverage.Row:
    def shipped(_shape: MoeShape, m: int) -> tuple[ConfigPair, str] | None:
        return (LANDSCAPE.best(m)[0], "triton_3_6_0/E=1.json, row of 16") if m == MS[0] else None

    return gpu_coverage.Row(
        LANDSCAPE.shape,
        ReplayProvider(LANDSCAPE, noise_percent=0.5),
        Prior(),
        H200,
        lambda _shape, m: LANDSCAPE.baselines[m].pair,
        shipped,
        lambda _m, _pair: (error, served),
    )


def run(found: gpu_coverage.Row) -> dict[str, Any]:
    return gpu_coverage.run_row(coverage_rows.case("bf16"), found, MS, 60.0)


def test_gains_are_measured_again_and_the_file_is_the_third_column() -> None:
    told = run(row())
    assert told["settled"] == len(MS)
    assert told["equal"]
    small = told["rows"][str(MS[0])]
    before_us = LANDSCAPE.pair_us(MS[0], LANDSCAPE.baselines[MS[0]].pair)
    assert small["file"]["gain"] == pytest.approx(1 - LANDSCAPE.best(MS[0])[1] / before_us, abs=0.02)
    assert small["learned"]["gain"] > 0
    assert "file" not in told["rows"][str(MS[1])]
    text = gpu_coverage.tables({"bf16": told | {"sglang": "0.5.16", "file": "f.json"}})
    assert f"| {MS[0]} | " in text
    assert f"{100 * small['learned']['gain']:.1f} %" in text
    assert "outputs equal" in text


@pytest.mark.parametrize(("error", "served"), [(0.5, True), (1e-3, False)], ids=["differs", "not-served"])
def test_a_row_whose_output_differs_or_that_was_not_served_counts_as_nothing_shown(error: float, served: bool) -> None:
    told = run(row(error, served))
    assert not told["equal"]
    assert "NOT equal" in gpu_coverage.tables({"bf16": told})


def test_the_page_has_the_tables_of_what_was_found() -> None:
    page = (SCRIPTS.parent / "docs" / "gains.md").read_text(encoding="utf-8")
    found = coverage_rows.on_gpu()
    assert (gpu_coverage.tables(found) in page) if found else "Not measured yet" in page


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "gpu_coverage.py"), "--out", str(tmp_path / "out")]
    environ = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(SCRIPTS.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("no GPU is visible")


def test_a_row_that_fails_does_not_take_the_others_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"gpu": "NVIDIA H200", "driver": "580", "torch": "2.11", "triton": "3.6.0", "sglang": "0.5.16"}

    def build(of: coverage_rows.Case) -> gpu_coverage.Row:
        if of.name == "fp8-block-128":
            raise RuntimeError("no such kernel")
        return row()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_acceptance, "machine", lambda: machine)
    monkeypatch.setattr(gpu_coverage, "open_rows", lambda _: build)
    monkeypatch.setattr(coverage_rows, "padded", lambda _: contextlib.nullcontext())
    for name in ("SGLANG_MOE_CONFIG_DIR", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(name, "")  # set by the script, and set back by this
    arguments = ("--out", str(tmp_path), "--m", ",".join(map(str, MS)), "--budget-s", "60", "--rows")

    def call(rows: str) -> int:
        monkeypatch.setattr(sys, "argv", ["gpu_coverage.py", *arguments, rows])
        return gpu_coverage.main()

    assert call("fp8-block-128,bf16") == 1
    assert "no such kernel" in json.loads((tmp_path / "coverage_run.json").read_text())["faults"]["fp8-block-128"]
    found = json.loads((tmp_path / "coverage_gpu.json").read_text())
    assert list(found) == ["bf16"]
    assert found["bf16"]["equal"]
    assert found["bf16"]["sglang"] == "0.5.16"
    assert "driver 580, SGLang 0.5.16, torch 2.11, Triton 3.6.0" in (tmp_path / "gains.md").read_text()
    assert call("fp16") == 0
    assert list(json.loads((tmp_path / "coverage_gpu.json").read_text())) == ["bf16", "fp16"], "an earlier call's row"


def test_what_is_there_is_kept_after_each_m_and_counts_as_equal_only_at_the_end() -> None:
    kept: list[tuple[list[str], bool]] = []
    of = coverage_rows.case("bf16")
    told = gpu_coverage.run_row(of, row(), MS, 60.0, lambda found: kept.append((list(found["rows"]), found["equal"])))
    names = [str(m) for m in MS]
    assert kept == [(names[: n + 1], False) for n in range(len(names))]
    assert told["equal"]


def test_a_lost_device_ends_the_row() -> None:
    class Lost:
        def open(self, *_: object) -> Any:
            raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        run(row()._replace(provider=Lost()))


def test_tables_are_printed_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text(json.dumps({"bf16": run(row()) | {"sglang": "0.5.16"}}))
    command = [sys.executable, str(SCRIPTS / "gpu_coverage.py"), "--tables", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "| M | heuristic | learned |" in done.stdout
