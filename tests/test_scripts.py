"""The scripts refuse what cannot work in one sentence with the cure, and do nothing twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_moe_autotune.settings import Settings, cache_root

ROOT = Path(__file__).resolve().parent.parent


def bash(snippet: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a snippet that has ``scripts/environment`` at hand."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "SGLANG_MOE_AUTOTUNE_TEST_ENV")}
    return subprocess.run(
        ["bash", "-euc", f"source scripts/environment; {snippet}"],
        cwd=ROOT,
        env={**inherited, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def finished_environment(folder: Path) -> dict[str, str]:
    """Variables that point to a folder which says that the environment in it is complete."""
    folder.mkdir()
    marks = 'echo "$(digest "$requirements"/{requirements,constraints,sglang}.txt)"'
    marks += '; echo "$repository $(digest "$repository/pyproject.toml")"'
    everything, package = bash(marks).stdout.splitlines()
    (folder / ".installed").write_text(everything + "\n", encoding="utf-8")
    (folder / ".package").write_text(package + "\n", encoding="utf-8")
    return {"SGLANG_MOE_AUTOTUNE_TEST_ENV": str(folder), "PYTHON": "/no/such/python"}


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/false"], ids=["absent", "fails"])
def test_an_unsuitable_python_is_named(python: str, tmp_path: Path) -> None:
    done = bash("make_environment", PYTHON=python, SGLANG_MOE_AUTOTUNE_TEST_ENV=str(tmp_path / "venv"))
    assert done.returncode == 1
    assert done.stderr.strip().count("\n") == 0
    assert f"PYTHON={python} is not a Python 3.11" in done.stderr


def test_a_finished_environment_is_used_as_it_is(tmp_path: Path) -> None:
    """With no Python to make one from and no pip in it, anything but using it would fail."""
    environ = finished_environment(tmp_path / "venv")
    done = bash('make_environment; echo "$python"; echo "$PYTHONPATH"; env', **environ)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    python, path, *variables = done.stdout.splitlines()
    assert python == str(tmp_path / "venv" / "bin" / "python")
    assert path.split(os.pathsep)[0] == str(ROOT)
    assert not [v for v in variables if v.startswith("SGLANG_MOE_AUTOTUNE_TEST_ENV")]


@pytest.mark.parametrize("mark", [".installed", ".package"])
def test_an_environment_for_something_else_is_not_taken_for_finished(mark: str, tmp_path: Path) -> None:
    environ = finished_environment(tmp_path / "venv")
    (tmp_path / "venv" / mark).write_text("an earlier state\n", encoding="utf-8")
    assert bash("make_environment", **environ).returncode != 0
    assert (tmp_path / "venv" / mark).read_text(encoding="utf-8") == "an earlier state\n"


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        pytest.param({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/sglang-moe-autotune-dev", id="xdg"),
        pytest.param({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/sglang-moe-autotune-dev", id="home"),
        pytest.param({"XDG_CACHE_HOME": "", "HOME": "/"}, f"{ROOT}/.venv-cache", id="home-is-the-root"),
        pytest.param({"XDG_CACHE_HOME": "", "HOME": ""}, f"{ROOT}/.venv-cache", id="no-home"),
    ],
)
def test_the_environment_lies_in_the_cache_of_the_user(environ: dict[str, str], folder: str) -> None:
    assert bash("cache_folder", **environ).stdout.strip() == folder


def test_the_server_of_the_demo_finds_the_plugin_of_the_checkout(tmp_path: Path) -> None:
    """An isolated Python without site-packages sees the entry point through PYTHONPATH alone."""
    site = tmp_path / "site"
    snippet = f"""
import sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
import pathlib, demo_gpu
demo_gpu.site_folder(pathlib.Path({str(tmp_path)!r}))
"""
    subprocess.run([sys.executable, "-c", snippet], check=True, timeout=60)
    look = "from importlib.metadata import entry_points as e; print([p.value for p in e(group='sglang.srt.plugins')])"
    environ = {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-S", "-c", look], env=environ, capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "['sglang_moe_autotune.plugin:register']"


def test_an_unknown_kind_of_demo_is_refused() -> None:
    environ = {**os.environ, "SGLANG_MOE_AUTOTUNE_DEMO": "tpu"}
    done = subprocess.run(
        [str(ROOT / "scripts" / "demo")], env=environ, capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 2
    assert "must be cpu or gpu, not 'tpu'" in done.stderr


def answer_of(script: str, *line: str, timeout_s: float, **environ: str) -> dict[str, Any]:
    """The JSON object that a script prints last."""
    done = subprocess.run(
        [sys.executable, f"scripts/{script}", *line],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.sglang
def test_planted_kernels_are_told_from_correct_ones_without_a_gpu(tmp_path: Path) -> None:
    """A few of the plants that the GPU gets 10,000 trials of, by Triton's interpreter on SGLang's real kernel."""
    plants = "honest,last-tile-slightly-wrong,no-token-mask,keeps-old-output"
    line = "--dry-run", "--plants", plants, "--trials", "4", "--out", str(tmp_path)
    told = answer_of("gpu_plants.py", *line, timeout_s=300, TRITON_CACHE_DIR=str(tmp_path))
    assert (told["wrong_trials"], told["wrong_admitted"]) == (3, 0)
    assert (told["honest_trials"], told["honest_refused"]) == (1, 0)
    assert "behind the end" in str(told["plants"]["no-token-mask"]["how"])
    assert "from run to run" in str(told["plants"]["keeps-old-output"]["how"])


def test_the_environment_does_not_lie_in_the_folder_of_a_store() -> None:
    environ = {"XDG_CACHE_HOME": "/x", "HOME": "/h"}
    assert Path(bash("cache_folder", **environ).stdout.strip()) != cache_root(Settings(), environ)


def test_a_long_installation_says_what_it_does(tmp_path: Path) -> None:
    """Run with a pip that says what pip says, and installs nothing."""
    said = [
        "Collecting torch==2.14.1",
        "  Downloading torch-2.14.1-cp311-cp311-manylinux_2_28_x86_64.whl.metadata (30 kB)",
        "Downloading torch-2.14.1-cp311-cp311-manylinux_2_28_x86_64.whl (915.1 MB)",
        "Using cached nvidia_cublas-13.1-py3-none-manylinux_2_27_x86_64.whl (1.2 GB)",
        "Downloading idna-3.11-py3-none-any.whl (71 kB)",
        "Installing collected packages: idna, nvidia-cublas, torch",
    ]
    (tmp_path / "pip.txt").write_text("\n".join(said) + "\n", encoding="utf-8")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncat "{tmp_path}/pip.txt"\nexit 3\n', encoding="utf-8")
    python.chmod(0o755)
    done = bash(f'python={python}; SECONDS=7; code=0; pip_install_aloud x || code=$?; echo "code $code"')
    assert done.stdout == "code 3\n", "what pip ends with is lost"
    assert done.stderr.splitlines() == [
        "  Downloading torch-2.14.1-cp311-cp311-manylinux_2_28_x86_64.whl (915.1 MB)",
        "  Using cached nvidia_cublas-13.1-py3-none-manylinux_2_27_x86_64.whl (1.2 GB)",
        "  Unpacking 3 packages after 7 s ...",
    ]


@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_the_demo_explains_itself_before_anything_is_installed(where: str, tmp_path: Path) -> None:
    environ = {"SGLANG_MOE_AUTOTUNE_DEMO": where, "SGLANG_MOE_AUTOTUNE_TEST_ENV": str(tmp_path / "venv")}
    done = bash("./scripts/demo --out /nowhere --help", **environ)
    assert done.returncode == 0, done.stderr
    assert "--out DIR" in done.stdout.replace("OUT", "DIR")
    assert done.stderr == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.sglang
def test_a_step_that_goes_on_costs_less_than_one_that_is_looked_at() -> None:
    found = answer_of("bench_hook.py", "--calls", "200", "--mb", "4", timeout_s=120)
    assert found.keys() == {"empty", "out of sight", "decodes on", "looked at"}
    assert found["decodes on"] < found["looked at"]
