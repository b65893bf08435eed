"""import, merge, pin and forget: what they change, what they refuse, and that a refusal changes nothing."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from click.testing import CliRunner
from made_up_store import FP8, H100, H200, HEURISTIC, MANY, WINNER, fill, rewrite

from sglang_moe_autotune import store as store_module
from sglang_moe_autotune.cli import main
from sglang_moe_autotune.sglang_json import encode, file_name
from sglang_moe_autotune.shapes import KernelConfig

if TYPE_CHECKING:
    from click.testing import Result

    from sglang_moe_autotune.records import Contents

UP = KernelConfig(16, 64, 128, 1, 4, 3)
PAIR = json.dumps(UP.to_dict())


def shell(line: str, typed: str | None = None) -> Result:
    result = CliRunner().invoke(main, shlex.split(line), terminal_width=80, input=typed)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def path(autotune_folder: Path) -> Path:
    return fill(autotune_folder)


def read(path: Path) -> Contents:
    return store_module.read(path)


def config_file(name: str | None = None, **rows: KernelConfig) -> Path:
    file = Path(name or file_name(MANY, "NVIDIA H200"))
    file.write_text(encode({int(m.removeprefix("m")): config for m, config in (rows or {"m64": UP}).items()}))
    return file


# import


def test_imported_rows_are_seeds_and_nothing_that_was_measured_changes(path: Path) -> None:
    before = read(path)
    file = config_file(m64=UP, m256=UP, m1024=UP, m2048=UP)
    result = shell(f"import '{file}'")
    assert result.exit_code == 0
    assert "2 added" in result.stdout
    assert "2 rows left out" in result.stdout
    after = read(path)
    fresh = {m: r for (_, m), r in after.records.items() if (r.shape, m) not in before.records}
    assert {m: (r.source, r.pair.up) for m, r in fresh.items()} == {64: ("imported", UP), 2048: ("imported", UP)}
    assert all(after.records[key] == record for key, record in before.records.items())
    assert "imported" in shell("show E128").stdout
    assert json.loads(shell("list --json").stdout)["environments"][0]["shapes"][0]["M"]["given"] == [64, 2048]


def test_seeds_are_not_exported(path: Path) -> None:
    shell("export before")
    shell(f"import '{config_file()}'")
    shell("export after")
    files = [{p.name: p.read_text() for p in Path(n).glob("configs/*/*")} for n in ("before", "after")]
    assert files[0] == files[1] != {}


def test_trust_pins(path: Path) -> None:
    assert shell(f"import '{config_file(m256=UP)}' --trust").exit_code == 0
    record = read(path).records[MANY, 256]
    assert (record.source, record.pair.up) == ("pinned", UP)


def test_what_is_sglangs_own_answer_is_no_seed(path: Path) -> None:
    result = shell(f"import '{config_file(m64=HEURISTIC.up)}'")
    assert "nothing changes" in result.stdout
    assert (MANY, 64) not in read(path).records


def test_a_file_of_another_store_gives_seeds(path: Path, tmp_path: Path) -> None:
    other = fill(tmp_path / "other", H100)
    shell(f"forget {MANY.slug} 256 --yes")
    result = shell(f"import {other}")
    assert result.exit_code == 0
    assert read(path).records[MANY, 256].source == "imported"
    assert read(path).records[MANY, 1024].source == "learned"


REFUSED: list[Any] = [
    pytest.param("E=64,N=768,device_name=NVIDIA_H200.json", "", "--shape", id="fits no shape"),
    pytest.param("E=128,N=768,device_name=NVIDIA_B200.json", "--trust", "another GPU", id="C12 trust of another GPU"),
    pytest.param("triton_3_4_0/E=128,N=768,device_name=NVIDIA_H200.json", "--trust", "Triton 3.4.0", id="C31 Triton"),
    pytest.param("notes.json", "", "its name is not", id="no such name"),
    pytest.param("E=64,N=768,device_name=NVIDIA_H200.json", f"--shape {FP8.slug}", "fits no shape", id="wrong shape"),
]


@pytest.mark.parametrize(("name", "options", "says"), REFUSED)
def test_an_import_that_cannot_be_is_code_3_and_changes_nothing(
    path: Path, name: str, options: str, says: str
) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    file, before = config_file(name), path.read_bytes()
    result = shell(f"import '{file}' {options}")
    assert result.exit_code == 3
    assert says in result.stderr
    assert path.read_bytes() == before


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[]", b'{"schema": 99}', b"{}"])
@pytest.mark.parametrize("name", ["E=128,N=768,device_name=X.json", "other.json"])
def test_a_broken_file_is_code_3_and_changes_nothing(path: Path, data: bytes, name: str) -> None:
    Path(name).write_bytes(data)
    good, before = config_file(), path.read_bytes()
    result = shell(f"import '{good}' '{name}'")
    assert result.exit_code == 3
    assert name in result.stderr
    assert path.read_bytes() == before


def test_a_shape_that_the_store_does_not_know_can_be_named(path: Path) -> None:
    slug = "E64-N512-K2048-top6-bf16"
    file = config_file("E=64,N=512,device_name=NVIDIA_H200.json")
    assert shell(f"import {file} --shape {slug}").exit_code == 0
    assert {r.shape.slug for r in read(path).records.values() if r.source == "imported"} == {slug}


@pytest.mark.parametrize("line", ["import '{file}' --dry-run", "merge {other} --dry-run"])
def test_a_dry_run_says_what_it_would_do_and_does_nothing(path: Path, tmp_path: Path, line: str) -> None:
    fill(tmp_path / "other", H100)
    file, before = config_file(), path.read_bytes()
    result = shell(line.format(file=file, other=tmp_path / "other"))
    assert result.exit_code == 0
    assert "added" in result.stdout
    assert list(path.parent.glob("*.json")) == [path]
    assert path.read_bytes() == before


# merge


def test_a_merge_brings_each_environment_into_its_own_file(path: Path, tmp_path: Path) -> None:
    fill(tmp_path / "two", H200)
    other = fill(tmp_path / "two", H100)
    before = read(path)
    result = json.loads(shell(f"merge {tmp_path / 'two'} --json").stdout)
    assert {f["environment"]: len(f["changes"]) for f in result["files"]} == {
        "NVIDIA H100 80GB HBM3, Triton 3.6.0": 4,
        "NVIDIA H200, Triton 3.6.0": 0,
    }
    assert read(path) == before
    assert read(path.parent / other.name) == read(other)
    again = json.loads(shell(f"merge {tmp_path / 'two'} --json").stdout)
    assert all(f["changes"] == [] for f in again["files"])


def test_a_merge_keeps_the_better_evidence(path: Path, tmp_path: Path) -> None:
    other = fill(tmp_path / "other", H200)
    document = json.loads(other.read_text())
    for record in document["records"]:
        record["evidence"]["samples"] = 48 if record["M"] == 256 else 12
        record["evidence"]["gain"] = 0.4
    rewrite(other, document)
    (file,) = json.loads(shell(f"merge {other} --json").stdout)["files"]
    (change,) = file["changes"]
    assert (change["M"], change["kind"], change["gain_after"]) == (256, "replaced", 0.4)


def test_what_was_forgotten_does_not_come_back_with_a_merge(path: Path, tmp_path: Path) -> None:
    other = fill(tmp_path / "other", H200)
    shell("forget E128 256 --yes")
    assert json.loads(shell(f"merge {other} --json").stdout)["files"][0]["changes"] == []
    assert (MANY, 256) not in read(path).records


def test_a_folder_without_a_store_is_code_1_and_a_missing_file_code_3(path: Path) -> None:
    Path("empty").mkdir()
    assert shell("merge empty").exit_code == 1
    assert shell("merge nowhere.json").exit_code == 3
    Path("broken.json").write_text("{")
    assert shell("merge broken.json").exit_code == 3


# pin


def test_a_pin_is_stored_with_both_gemms(path: Path) -> None:
    down = json.dumps(msgspec.structs.replace(UP, BLOCK_SIZE_N=128).to_dict())
    assert shell(f"pin E128 64 --up '{PAIR}' --down '{down}'").exit_code == 0
    record = read(path).records[MANY, 64]
    assert (record.source, record.pair.up, record.pair.down.BLOCK_SIZE_N) == ("pinned", UP, 128)
    assert record.baseline == HEURISTIC
    steps = json.loads(shell("explain E128 64 --json").stdout)
    assert steps["answer"]["source"] == "pinned"


BAD_PAIRS = [
    pytest.param("{", "no config", id="no JSON"),
    pytest.param("[]", "JSON object", id="a list"),
    pytest.param("{}", "BLOCK_SIZE_M", id="no keys"),
    pytest.param('{"BLOCK_SIZE_M": "x"}', "BLOCK_SIZE_N", id="keys missing"),
    pytest.param(PAIR.replace("16", '"16"'), "whole number", id="a text"),
    pytest.param(json.dumps(KernelConfig(256, 256, 128, 1, 8, 5).to_dict()), "shared memory", id="too large"),
    pytest.param(f"{PAIR}' --down '{json.dumps(WINNER.up.to_dict())}", "share one BLOCK_SIZE_M", id="C30 two block M"),
]


@pytest.mark.parametrize(("text", "says"), BAD_PAIRS)
def test_a_pair_that_cannot_run_is_wrong_usage(path: Path, text: str, says: str) -> None:
    before = path.read_bytes()
    result = shell(f"pin E128 64 --up '{text}'")
    assert result.exit_code == 2
    assert says in result.stderr
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param({"BLOCK_SIZE_M": 48}, id="no power of two"),
        pytest.param({"BLOCK_SIZE_M": 17}, id="odd"),
        pytest.param({"num_waprs": 4}, id="unknown key"),
    ],
)
def test_a_config_that_no_server_would_read_is_wrong_usage(path: Path, odd: dict[str, int]) -> None:
    before = path.read_bytes()
    result = shell(f"pin E128 64 --up '{json.dumps({**UP.to_dict(), **odd})}'")
    assert result.exit_code == 2
    assert next(iter(odd)) in result.stderr
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("m", "says"),
    [
        pytest.param(256, "replaces a measured row (30.6 % faster)", id="faster"),
        pytest.param(16, "replaces a measured row (SGLang's own answer stays)", id="baseline"),
        pytest.param(64, "", id="nothing there"),
    ],
)
def test_a_pin_says_which_measured_row_it_replaces(path: Path, m: int, says: str) -> None:
    done = shell(f"pin E128 {m} --up '{PAIR}'")
    assert done.exit_code == 0
    assert done.stderr.startswith(says)
    assert bool(done.stderr) == bool(says)
    again = json.loads(shell(f"pin E128 {m} --up '{PAIR}' --json").stdout)
    assert again["files"][0]["notes"] == [], "a pin was replaced, and no measured row"


def test_a_merge_makes_no_folder_for_a_slip_of_the_pen(path: Path, tmp_path: Path) -> None:
    done = shell(f"merge {path} --dir {tmp_path}/nonexist/x")
    assert done.exit_code == 2
    assert not (tmp_path / "nonexist").exists()
    assert shell(f"merge {path} --dir {tmp_path}/baked").exit_code == 0


# forget


@pytest.mark.parametrize(("answer", "kept"), [("n\n", True), ("", True), ("y\n", False)])
def test_forget_says_what_is_lost_and_asks(path: Path, answer: str, kept: bool) -> None:
    result = shell("forget E128 256 1024", answer)
    assert "2 rows, 0.8 GPU seconds of measuring, gains up to 32.4 %" in result.stderr
    assert result.exit_code == (1 if kept else 0)
    assert ((MANY, 256) in read(path).records) is kept
    assert (MANY, 16) in read(path).records


def test_forget_counts_no_measuring_for_what_nobody_measured(path: Path) -> None:
    shell(f"pin E128 512 --up '{PAIR}'")
    result = shell("forget E128 512 --yes")
    assert "loses:\n  1 row, 1 pinned\n" in result.stderr


def test_without_m_the_whole_shape_goes(path: Path) -> None:
    assert shell("forget E128 --yes --json").exit_code == 0
    assert {shape for shape, _ in read(path).records} == {FP8}
    assert MANY in read(path).notes


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        pytest.param("forget E128 7 --yes", 1, "it has 16, 256, 1024", id="no such row"),
        pytest.param("forget E999 --yes", 1, "nearest", id="no such shape"),
        pytest.param("forget E128 --json", 2, "--yes", id="json does not ask"),
        pytest.param("forget E128 0", 2, "0", id="no M"),
        pytest.param(f"pin E999 64 --up '{PAIR}'", 1, "nearest", id="pin of no shape"),
        pytest.param(f"pin E128 x --up '{PAIR}'", 2, "x", id="pin of no M"),
        pytest.param("pin E128 64", 2, "--up", id="pin of nothing"),
        pytest.param("import nowhere.json", 3, "cannot be read", id="import of nothing"),
    ],
)
def test_what_is_refused_changes_nothing(path: Path, line: str, code: int, says: str) -> None:
    before = path.read_bytes()
    result = shell(line)
    assert result.exit_code == code
    assert says in result.stderr
    assert path.read_bytes() == before


def test_several_environments_have_to_be_chosen(path: Path) -> None:
    fill(path.parent, H100)
    for line in ("forget E128 --yes", f"pin E128 64 --up '{PAIR}'", f"import '{config_file()}'"):
        assert shell(line).exit_code == 2
        assert shell(f"{line} --environment H100").exit_code == 0
    assert read(path).records.keys() >= {(MANY, 256)}
