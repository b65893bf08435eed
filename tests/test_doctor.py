"""Each row of the doctor is right about a machine made to order; a cure is there exactly where one is due."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import filelock
import made_up_store
import pytest

from sglang_moe_autotune import doctor
from sglang_moe_autotune.doctor import Check


def program(folder: Path, name: str, text: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("version", "health"),
    [
        pytest.param(None, "fail", id="not installed"),
        pytest.param("0.5.9", "fail", id="before plugins"),
        pytest.param("0.5.10.post1", "fail", id="the last one before plugins"),
        pytest.param("0.5.11", "ok", id="the first with plugins"),
        pytest.param("0.5.13.post1", "ok", id="a post release"),
        pytest.param("0.10.0", "ok", id="two digits in the middle"),
        pytest.param("1.0.0rc1", "ok", id="a release candidate"),
        pytest.param("main", "unknown", id="no number"),
    ],
)
def test_sglang(version: str | None, health: str) -> None:
    row = doctor.check_sglang(version)
    assert row.health == health
    assert bool(row.cure) is (health != "ok")


@pytest.mark.parametrize(
    ("names", "allowed", "health"),
    [
        pytest.param(["moe_autotune"], None, "ok", id="no restriction"),
        pytest.param(["moe_autotune"], "", "ok", id="an empty restriction is none"),
        pytest.param(["moe_autotune"], " , ", "ok", id="commas only are none"),
        pytest.param(["other", "moe_autotune"], "other, moe_autotune", "ok", id="listed"),
        pytest.param(["moe_autotune"], "other", "fail", id="left out"),
        pytest.param(["moe_autotune"], "moe_autotune2", "fail", id="a longer name"),
        pytest.param([], None, "fail", id="not registered"),
    ],
)
def test_plugin(names: list[str], allowed: str | None, health: str) -> None:
    assert doctor.check_plugin(names, allowed).health == health


def test_hooks_without_sglang_are_unknown() -> None:
    assert [row.health for row in doctor.check_hooks(None)] == ["unknown"]


def test_moved_hooks_fail(tmp_path: Path) -> None:
    folder = tmp_path / "sglang" / "srt" / "managers"
    folder.mkdir(parents=True)
    (folder / "scheduler.py").write_text("class Scheduler:\n def run_batch(self): ...")
    rows = {row.name.removeprefix("hook "): row for row in doctor.check_hooks(tmp_path)}
    assert rows.pop("run_batch").health == "ok"
    assert {row.health for row in rows.values()} == {"fail"}
    assert all(row.cure for row in rows.values())


@pytest.mark.parametrize("files", [0, 1, 3])
def test_triton_counts_the_configs_made_for_it(tmp_path: Path, files: int) -> None:
    for version in ("3_6_0", "3_5_1"):
        folder = tmp_path / doctor.CONFIGS / f"triton_{version}"
        folder.mkdir(parents=True)
        for number in range(files if version == "3_6_0" else 9):
            (folder / f"{number}.json").write_text("{}")
    assert f"ships {files or 'no'} config" in doctor.check_triton("3.6.0", tmp_path).says


def test_triton_alone_is_ok_and_absent_is_unknown() -> None:
    assert doctor.check_triton("3.6.0", None) == Check("triton", "ok", "3.6.0")
    assert doctor.check_triton(None, None).health == "unknown"


def test_compiler(tmp_path: Path) -> None:
    gcc = program(tmp_path, "gcc", "exit 0")
    path = {"PATH": str(tmp_path)}
    assert doctor.check_compiler(path).says == gcc
    assert doctor.check_compiler({**path, "CC": "gcc -m64"}).health == "ok"
    assert doctor.check_compiler({**path, "CC": "nowhere"}).health == "warn"
    assert doctor.check_compiler({**path, "CC": " "}).health == "ok"
    assert doctor.check_compiler({"PATH": str(tmp_path / "none")}).health == "warn"


@pytest.mark.parametrize(
    ("script", "health", "says"),
    [
        pytest.param("echo 'NVIDIA H200, 570.1, 143771 MiB'", "ok", "1 x NVIDIA H200, 570.1", id="one"),
        pytest.param("for i in 1 2 3; do echo 'A, 1, 2 MiB'; done; echo 'B, 1, 2 MiB'", "ok",
                     "3 x A, 1, 2 MiB; 1 x B", id="of two kinds"),
        pytest.param("echo 'SMI has failed' >&2; exit 9", "warn", "SMI has failed", id="no driver"),
        pytest.param("exit 3", "warn", "exit code 3", id="silent failure"),
        pytest.param("exit 0", "warn", "exit code 0", id="no GPU listed"),
        pytest.param("sleep 30", "warn", "no answer", id="hangs"),
    ],
)  # fmt: skip
def test_gpu(tmp_path: Path, script: str, health: str, says: str) -> None:
    row = doctor.check_gpu(program(tmp_path, "nvidia-smi", f"exec 2>&1; {script}"), timeout_s=0.5)
    assert row.health == health
    assert says in row.says


def test_no_nvidia_smi_is_unknown_not_a_failure(tmp_path: Path) -> None:
    assert doctor.check_gpu(None).health == "unknown"
    assert doctor.check_gpu(str(tmp_path)).health == "unknown"


@pytest.mark.parametrize("made", [True, False])
def test_a_good_cache_folder_leaves_no_trace(tmp_path: Path, made: bool) -> None:
    root = tmp_path / "a" / "b"
    if made:
        root.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    assert [row.health for row in doctor.check_cache(root)] == ["ok", "ok"]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("place", ["none", "a file", "below a file", "a dangling link", "below proc"])
def test_a_bad_cache_folder_is_a_warning(tmp_path: Path, place: str) -> None:
    root: Path | None = tmp_path / "root"
    assert root is not None
    if place == "none":
        root = None
    elif place == "a file":
        root.write_text("")
    elif place == "below a file":
        root.write_text("")
        root = root / "x"
    elif place == "a dangling link":
        root.symlink_to(tmp_path / "nowhere" / "at all")
    else:
        root = Path("/proc/x")
    (row,) = doctor.check_cache(root)
    assert row.health == "warn"
    assert "memory only" in row.says
    assert "SGLANG_MOE_AUTOTUNE_DIR" in row.cure


def test_locks_that_do_not_work_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(filelock.SoftFileLock):
        def _acquire(self) -> None:
            self._context.lock_file_fd = os.open(os.devnull, os.O_RDONLY)

        def _release(self) -> None:
            self._context.lock_file_fd = None

    class Refused(filelock.SoftFileLock):
        def _acquire(self) -> None:
            raise OSError(37, "No locks available")

    for kind, says in ((Deaf, "exclude nobody"), (Refused, "No locks available")):
        monkeypatch.setattr(doctor, "FileLock", kind)
        row = doctor.check_cache(tmp_path)[1]
        assert row.health == "warn"
        assert says in row.says


def test_the_store_is_counted_and_what_is_wrong_in_it_is_named(tmp_path: Path) -> None:
    assert [row.health for row in doctor.check_store(None)] == ["ok"]
    assert "empty" in doctor.check_store(tmp_path)[0].says
    path = made_up_store.fill(tmp_path)
    assert doctor.check_store(tmp_path) == [Check("store", "ok", "records: 4, environments: 1")]
    path.write_text("{")
    (row,) = doctor.check_store(tmp_path)
    assert row.health == "warn"
    assert path.name in row.says
    (row,) = doctor.check_store(path)
    assert row.health == "warn"


@pytest.mark.parametrize(
    ("made", "health", "says"),
    [
        pytest.param(None, "fail", "No such file", id="no configs folder"),
        pytest.param([], "warn", "none for Triton 3.6.0", id="empty"),
        pytest.param(["triton_3_6_0"], "warn", "own configs are hidden", id="an export"),
        pytest.param(["triton_3_5_1"], "warn", "none for Triton 3.6.0", id="of another Triton"),
        pytest.param(["triton_3_6_0", "triton_3_6_0_tmp"], "fail", "triton_3_6_0_tmp", id="left by a copy"),
        pytest.param(["triton_3_4_0+git1a2b"], "fail", "3_4_0+git1a2b", id="of a ROCm build"),
        pytest.param(["triton_"], "fail", "is not triton_ and numbers", id="no number"),
        pytest.param(["README", "old_triton_x"], "warn", "hidden", id="other names do no harm"),
    ],
)
def test_config_dir(tmp_path: Path, made: list[str] | None, health: str, says: str) -> None:
    for name in made or []:
        (tmp_path / "configs" / name).mkdir(parents=True)
    if made == []:
        (tmp_path / "configs").mkdir()
    row = doctor.check_config_dir(str(tmp_path), "3.6.0")
    assert row.health == health
    assert says in row.says


def test_config_dir_unset_is_fine_and_empty_is_a_folder_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert doctor.check_config_dir(None, None).health == "ok"
    assert doctor.check_config_dir("", None).health == "fail"


@pytest.mark.parametrize(
    ("mode", "health"),
    [("miss", "ok"), ("all", "ok"), ("restart", "ok"), ("read-only", "warn"), ("off", "warn")],
)
def test_a_mode_that_stops_tuning_is_named(mode: str, health: str) -> None:
    assert doctor.check_mode(mode).health == health


def test_examine_is_about_the_environment_that_is_passed(tmp_path: Path) -> None:
    environ = {
        "PATH": str(tmp_path),
        "SGLANG_MOE_AUTOTUNE_DIR": str(tmp_path / "x"),
        "SGLANG_MOE_AUTOTUNE_MODE": "off",
        "SGLANG_MOE_AUTOTUNE_SLICE_US": "soon",
        "SGLANG_PLUGINS": "other",
        "SGLANG_MOE_CONFIG_DIR": str(tmp_path),
    }
    rows = {row.name: row for row in doctor.examine(environ)}
    assert len(rows) == len(doctor.examine(environ))
    health = {name: rows[name].health for name in ("mode", "settings", "SGLANG_MOE_CONFIG_DIR", "gpu")}
    assert health == {"mode": "warn", "settings": "warn", "SGLANG_MOE_CONFIG_DIR": "fail", "gpu": "unknown"}
    assert rows["plugin"].health == "fail"
    assert str(tmp_path / "x") in rows["cache"].says
    assert "SLICE_US" in rows["settings"].says


def test_every_row_that_is_not_ok_has_a_cure(tmp_path: Path) -> None:
    rows = doctor.examine({"PATH": str(tmp_path), "SGLANG_MOE_AUTOTUNE_DIR": "/proc/x"})
    assert {row.health for row in rows} > {"ok", "warn"}
    assert [row.name for row in rows if (row.health == "ok") is bool(row.cure)] == []


def test_nothing_of_the_device_is_imported() -> None:
    code = (
        "import os, sys\n"
        "from sglang_moe_autotune import doctor\n"
        "doctor.examine(os.environ)\n"
        "print({'torch', 'triton', 'sglang'} & {n.partition('.')[0] for n in sys.modules})"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"
