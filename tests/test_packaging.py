"""What is installed is what the repository says: entry points, dependencies, pins and executable scripts."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sglang_moe_autotune

tomllib = pytest.importorskip("tomllib", reason="tomllib came with Python 3.11")

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / "tests" / "sglang_env"
SCRIPTS = ("scripts/test", "scripts/check", "scripts/demo", ".ci/run")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    loaded: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return loaded


def requirement_names(lines: list[str]) -> set[str]:
    stripped = (line.partition("#")[0].strip() for line in lines)
    return {re.split(r"[\[<>=!~; ]", line)[0].lower().replace("_", "-") for line in stripped if line}


def lines_of(name: str) -> list[str]:
    return (ENVIRONMENT / name).read_text(encoding="utf-8").splitlines()


def test_the_tests_run_on_this_checkout() -> None:
    assert Path(sglang_moe_autotune.__file__).resolve().parent.parent == ROOT


def test_the_version_is_written_once_and_the_same(project: dict[str, Any]) -> None:
    assert project["project"]["version"] == sglang_moe_autotune.__version__


def test_sglang_finds_the_plugin_by_its_entry_point() -> None:
    found = [e for e in importlib.metadata.entry_points(group="sglang.srt.plugins") if e.name == "moe_autotune"]
    assert {e.value for e in found} == {"sglang_moe_autotune.plugin:register"}
    assert callable(found[0].load())


def test_the_shell_command_is_installed() -> None:
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="sglang-moe-autotune")
    assert callable(command.load())


def test_loading_the_entry_point_brings_neither_torch_nor_sglang() -> None:
    """The launcher loads every plugin; ours must not make it import the MoE stack."""
    snippet = (
        "import sys; from importlib.metadata import entry_points as e; "
        "f = [p for p in e(group='sglang.srt.plugins') if p.name == 'moe_autotune'][0].load(); f(); "
        "print(sorted({'torch', 'triton', 'sglang', 'click', 'rich'} & set(sys.modules)))"
    )
    child = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, check=True, timeout=60)
    assert child.stdout.strip() == "[]"


def test_pip_never_replaces_the_torch_of_the_server(project: dict[str, Any]) -> None:
    required = requirement_names(project["project"]["dependencies"])
    assert not required & {"torch", "triton", "sglang", "transformers", "numpy"}
    assert "sglang" in requirement_names(project["project"]["optional-dependencies"]["sglang"])


def test_the_environment_holds_what_the_package_and_the_scripts_need(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    wanted = requirement_names(project["project"]["dependencies"]) | requirement_names(
        [*extras["test"], *extras["check"]]
    )
    listed = requirement_names(lines_of("requirements.txt"))
    assert wanted <= listed, f"add {sorted(wanted - listed)} to tests/sglang_env/requirements.txt"


def test_the_environment_is_pinned() -> None:
    pinned = requirement_names(lines_of("constraints.txt"))
    exact = requirement_names([line for line in lines_of("requirements.txt") if "==" in line])
    loose = requirement_names(lines_of("requirements.txt")) - exact
    assert loose <= pinned, f"add {sorted(loose - pinned)} to tests/sglang_env/constraints.txt"
    assert all(re.fullmatch(r"[\w.\-]+==\S+", line) for line in lines_of("constraints.txt") if not line.startswith("#"))
    assert [line for line in lines_of("sglang.txt") if not line.startswith("#")] == ["sglang==0.5.23"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_can_be_started(name: str) -> None:
    path = ROOT / name
    assert os.access(path, os.X_OK), f"chmod +x {name}"
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=10)


def test_continuous_integration_runs_the_tests_then_the_check() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    started = re.findall(r"^\./(\S+)", text, re.MULTILINE)
    assert started == ["scripts/test", "scripts/check", "scripts/check_releases"]
    assert "set -euo pipefail" in text


def test_the_recorded_landscapes_are_in_the_package() -> None:
    folder = Path(sglang_moe_autotune.__file__).parent / "landscapes"
    assert sorted(folder.glob("*.json.gz")), "simulate and the demo replay a recording that must be shipped"
