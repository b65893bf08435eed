"""The table of releases is what the script found, and the script finds out a release that does not fit."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from sglang_moe_autotune import doctor, matrix
from sglang_moe_autotune.cli import main
from sglang_moe_autotune.contract import CONTRACT, NEEDED, UNSUPPORTED, WITHOUT
from sglang_moe_autotune.matrix import Matrix, Release

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import release_wheels  # noqa: E402 - in scripts, which the line above puts on the path

BEGIN, END = "<!-- releases: made by scripts/check_releases -->\n", "<!-- end of releases -->\n"


# -- what is shipped ----------------------------------------------------------------------------------------------


def test_the_page_shows_the_table_that_is_shipped() -> None:
    page = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0] == matrix.markdown(matrix.load())


def test_every_release_that_is_shipped_was_checked_in_every_way_and_fits() -> None:
    releases = matrix.load().releases
    assert [release.version for release in releases] == list(release_wheels.known())
    assert (releases[0].version, releases[-1].version) == ("0.5.11", "0.5.23")
    assert {release.state for release in releases} <= {"fits", "less", "unsupported"}
    for release in releases:
        assert release.calls == ()
        assert release.loaded == ""
        assert release.torch
        assert len(release.kernel) == 16
        assert {part for part, versions in WITHOUT.items() if release.version in versions} == set(release.lacks)
        assert set(release.ways) | set(release.lacks) == {"lookup", "pauses", "arguments", "graphs", "recapture"}
    assert set(WITHOUT) <= {"recapture"}, "more than graphs in service is missing"
    whole = {release.version for release in releases if release.state == "fits"}
    assert {"0.5.13.post1", "0.5.16", "0.5.20", "0.5.23"} <= whole
    assert set(UNSUPPORTED) <= {release.version for release in releases}


@pytest.mark.sglang
def test_the_installed_release_is_found_as_it_was_checked() -> None:
    here = doctor.installed()
    assert here is not None
    (checked,) = [release for release in matrix.load().releases if release.version == here.version]
    assert (here.kernel, here.lacks, here.ways) == (checked.kernel, checked.lacks, checked.ways)


def test_a_table_survives_its_file() -> None:
    assert matrix.decode(matrix.encode(matrix.load())) == matrix.load()


@pytest.mark.parametrize(
    ("release", "state", "words"),
    [
        pytest.param(Release(version="1"), "fits", "fits", id="fits"),
        pytest.param(
            Release(version="1", lacks={"recapture": ("x",)}), "less", "fits, no re-capture in service", id="less"
        ),
        pytest.param(
            Release(version="1", lacks={"graphs": ("x",), "vote": ("y",)}), "less",
            "fits, no look at captured graphs, no vote of ranks", id="less of two",
        ),
        pytest.param(
            Release(version="1", lacks={"graphs": ("x",), "pauses": ("y",)}), "aside", "stands aside", id="needed"
        ),
        pytest.param(Release(version="1", calls=("it looks elsewhere",)), "aside", "stands aside", id="called"),
        pytest.param(
            Release(version="1", lacks={"hooks": ("x",)}, unsupported="why"), "unsupported", "not supported",
            id="stated",
        ),
    ],
)  # fmt: skip
def test_the_state_of_a_release(release: Release, state: str, words: str) -> None:
    assert release.state == state
    assert matrix.rows(Matrix((release,)))[0][3] == words


def test_every_part_that_is_not_needed_has_a_word_for_its_loss() -> None:
    assert set(matrix._LOSSES) == set(CONTRACT) - set(NEEDED)


# -- doctor -------------------------------------------------------------------------------------------------------


def shell(line: str, code: int) -> str:
    done = CliRunner().invoke(main, line.split())
    assert done.exit_code == code, done.output
    return done.stdout


@pytest.mark.sglang
def test_doctor_shows_the_releases_and_the_one_that_is_here() -> None:
    lines = shell("doctor --matrix", 0).splitlines()
    assert lines[0].split()[0] == "SGLang"
    assert [line.split()[0] for line in lines[1:-1]] == [release.version for release in matrix.load().releases]
    here = next(r for r in matrix.load().releases if r.version == importlib.metadata.version("sglang"))
    stands = f"{here.version}, {matrix.words(here)}; kernel {here.kernel[:8]}, as it was checked"
    assert lines[-1] == f"In this Python: {stands}"
    told = json.loads(shell("doctor --matrix --json", 0))
    assert [release["state"] for release in told["releases"]] == [release.state for release in matrix.load().releases]
    assert (told["installed"]["version"], told["installed"]["state"]) == (here.version, here.state)


def test_doctor_says_what_a_changed_release_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    monkeypatch.setattr(doctor, "sglang_root", lambda: tmp_path)
    monkeypatch.setattr(doctor, "version_of", lambda _name: "0.6.0")
    text = shell("doctor --matrix", 1)
    assert "In this Python: 0.6.0, stands aside; kernel unknown" in text
    assert "pauses: there is no sglang.srt.managers.scheduler" in text
    rows = {row.name: row for row in doctor.check_contract(tmp_path)}
    assert set(rows) == {f"contract {part}" for part in CONTRACT}
    assert {name for name, row in rows.items() if row.health == "fail"} == {f"contract {part}" for part in NEEDED}
    assert all(row.cure for row in rows.values())
    monkeypatch.setattr(doctor, "sglang_root", lambda: None)
    assert "There is no SGLang in this Python." in shell("doctor --matrix", 0)
    assert doctor.check_contract(None) == []


def test_doctor_names_the_releases_that_were_checked_for_one_that_was_not() -> None:
    assert doctor.check_sglang("0.5.16").says == "0.5.16"
    assert "0.5.11 to 0.5.23 were checked" in doctor.check_sglang("0.6.0").says


# -- the script ---------------------------------------------------------------------------------------------------


def wheel(cache: Path, version: str, **modules: str) -> Path:
    """A made-up release in the cache."""
    cache.mkdir(exist_ok=True)
    path = cache / f"sglang-{version}-cp312-cp312-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"sglang-{version}.dist-info/METADATA", "Requires-Dist: torch==9.9.9\n")
        archive.writestr("sglang/__init__.py", "")
        for name, text in modules.items():
            archive.writestr(f"sglang/srt/{name.replace('__', '/')}.py", text)
    return path


def script(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {
        **os.environ,
        "SGLANG_MOE_AUTOTUNE_RELEASES": str(cache),
        "PYTHONPATH": str(ROOT),
        "PIP_NO_INDEX": "1",  # a machine without a network, and quicker
        "PIP_RETRIES": "0",
    }
    command = [sys.executable, str(ROOT / "scripts" / "check_releases.py"), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=120)


def test_c39_a_made_up_release_that_moved_everything_does_not_fit(tmp_path: Path) -> None:
    wheel(tmp_path, "0.9.0", managers__scheduler="class Scheduler:\n def run_batch(self, batch): ...\n")
    done = script(tmp_path, "--only", "0.9.0", "--json")
    assert done.returncode == 1, done.stderr
    (release,) = json.loads(done.stdout)["releases"]
    assert release["torch"] == "9.9.9"
    assert set(release["lacks"]) == set(CONTRACT)
    assert "sglang.srt.managers.scheduler has no Scheduler.maybe_sleep_on_idle" in release["lacks"]["hooks"]
    assert not [why for why in release["lacks"]["hooks"] if "no Scheduler.run_batch" in why]
    assert "FileNotFoundError" in release["calls"][0]


def test_a_wheel_that_cannot_be_had_is_said_and_is_a_failure_unless_it_may_be_skipped(tmp_path: Path) -> None:
    told = set()
    for arguments in (("--only", "0.9.1"), ("--only", "0.9.1", "--skip-missing"), ("--only", "0.9.1", "0.5.11")):
        done = script(tmp_path, *arguments)
        assert done.returncode == 1, done.stderr
        assert "0.9.1: skipped: not in" in done.stderr
        told |= {line for line in done.stderr.splitlines() if "nothing was checked" in line}
    assert len(told) == 2, "what was asked for is named"


def test_a_wheel_that_is_not_the_known_one_is_refused(tmp_path: Path) -> None:
    path = wheel(tmp_path, "0.5.11")
    done = script(tmp_path, "--only", "0.5.11", "--skip-missing")
    assert done.returncode == 1
    assert f"{path} is not the {path.name} with the sha256" in done.stderr
    assert "remove it and try again" in done.stderr


def test_only_sources_are_unpacked(tmp_path: Path) -> None:
    path = wheel(tmp_path, "0.9.0", constants="X = 1")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("sglang/srt/large.so", "x")
    release_wheels.unpack(path, tmp_path / "some")
    release_wheels.unpack(path, tmp_path / "all", everything=True)
    assert not list((tmp_path / "some").rglob("*.so"))
    assert len(list((tmp_path / "all").rglob("*.so"))) == 1
    assert (tmp_path / "some" / "sglang" / "srt" / "constants.py").read_text(encoding="utf-8") == "X = 1"
