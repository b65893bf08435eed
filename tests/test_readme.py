"""What README and docs say exists: commands, files, settings, modules and versions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from import_table import modules

import sglang_moe_autotune
from sglang_moe_autotune import cli
from sglang_moe_autotune.settings import NUMBERS, PREFIX

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CHANGELOG.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md")))
SETTINGS = {PREFIX + name for name in ("MODE", "DIR", "BIT_EQUAL", "RECAPTURE", *(n.name for n in NUMBERS))}


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def commands(page: str) -> list[list[str]]:
    """The words of each command line in the page's console blocks, comments taken off."""
    blocks = re.findall(r"```console\n(.*?)```", text(page), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    return [line.removeprefix("$ ").split("  #")[0].split() for line in lines]


SHELL = [words[1] for words in commands("README.md") if words[0] == "sglang-moe-autotune"]


def test_the_first_screen_holds_the_two_commands_of_a_fresh_machine() -> None:
    first = [words[0] for words in commands("README.md")]
    assert first[:2] == ["./scripts/demo", "./scripts/test"]
    above = text("README.md").partition("./scripts/test")[0]
    assert above.count("\n") < 30, "the two commands have left the first screen"


def test_the_readme_shows_every_command_of_the_shell() -> None:
    assert set(SHELL) == set(cli.main.commands) - {"simulate"}


@pytest.mark.parametrize("command", SHELL)
def test_a_command_of_the_readme_explains_itself(command: str) -> None:
    result = CliRunner().invoke(cli.main, [command, "--help"])
    assert result.exit_code == 0, result.output
    assert f"{command} " in result.output


ASKS_NOTHING = [c for c in SHELL if c != "export" and not any(p.required for p in cli.main.commands[c].params)]


@pytest.mark.parametrize("command", ASKS_NOTHING)
def test_a_command_of_the_readme_runs_on_an_empty_store(command: str) -> None:
    result = CliRunner().invoke(cli.main, [command])
    assert result.exit_code in (0, 1), result.output
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files(page: str) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", text(page))
    missing = [t for t in targets if "://" not in t and not ((ROOT / page).parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_settings_that_are_named_exist(page: str) -> None:
    named = set(re.findall(rf"(?<!_){PREFIX}[A-Z_]+[A-Z]", text(page)))
    assert named <= SETTINGS


def test_the_design_names_modules_that_exist() -> None:
    table = re.findall(r"^\| (.*?) \|", text("docs/design.md"), re.MULTILINE)
    named = {name for cell in table for name in re.findall(r"`(\w+)`", cell)}
    assert named
    assert named <= set(modules())


def test_pages_are_short() -> None:
    assert len(text("docs/design.md").splitlines()) <= 150


def test_the_changelog_names_the_version_or_what_is_not_released() -> None:
    headings = re.findall(r"^## (\S+)", text("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] in ("Unreleased", sglang_moe_autotune.__version__)


def test_the_measured_tables_are_the_recorded_figures() -> None:
    recorded = {row["M"]: row for row in json.loads(text("docs/h200_acceptance.json"))["rows"]}
    first = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) % \|", text("README.md"), re.MULTILINE)
    kept = re.findall(r"^\| (\d+) \| ([\d.]+) \| kept \|", text("README.md"), re.MULTILINE)
    assert kept, "the first table hides that SGLang's config stays at many M"
    kept += re.findall(r"^\| (\d+) \| ([\d.]+) \| kept \|", text("docs/measured.md"), re.MULTILINE)
    for m, heuristic in kept:
        assert recorded[int(m)]["verdict"] == "baseline"
        assert abs(float(heuristic) - recorded[int(m)]["baseline_us"]) <= 0.51
    row = re.compile(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) % \| -?[\d.]+ to", re.MULTILINE)
    whole = row.findall(text("docs/measured.md"))
    assert len(first) >= 5
    assert len(whole) == sum(r["verdict"] == "faster" for r in recorded.values())
    for m, heuristic, learned, gain in [*first, *whole]:
        figures = recorded[int(m)]
        assert abs(float(heuristic) - figures["baseline_us"]) <= 0.51
        assert abs(float(learned) - figures["chosen_us"]) <= 0.51
        assert abs(float(gain) - 100 * figures["gain"]) <= 0.051


def test_the_readme_counts_what_the_run_has_recorded() -> None:
    recorded = json.loads(text("docs/h200_acceptance.json"))
    faster = {row["M"]: row["verdict"] == "faster" for row in recorded["rows"]}
    decode = [m for m in faster if 8 <= m <= 80]
    readme = " ".join(text("README.md").split())
    assert f"{sum(faster.values())} of the {len(faster)} captured sizes got a faster config" in readme
    assert f"of the {len(decode)} from 8 to 80 tokens {sum(not faster[m] for m in decode)} stayed" in readme
    assert f"in {recorded['learning_s']:.0f} idle seconds" in readme
    assert f"which made {recorded['compiles']['binaries_made_by_the_compile_process']} binaries" in readme
    assert f"the run above spent {recorded['gpu_s']:.0f}" in readme
    free = [recorded["memory"][when] >> 20 for when in ("free_before", "free_after")]
    assert "Measured: {:,} MiB free before, {:,} after".format(*free) in readme
    captures = json.loads(text("docs/startup.json"))["added_capture_s"]
    warm, fresh = (captures[kind]["median"] for kind in ("plugin-warm", "plugin-store"))
    assert f"took {warm:.1f} s longer than stock ones" in readme
    assert f"and {fresh:.1f} s longer with an empty one" in readme
    pauses = json.loads(text("docs/serving.json"))["steady"]["graphs"]["pause_ms"].values()
    assert f"{min(pauses):.0f} to {max(pauses):.0f} with 24" in readme
    shapes = json.loads(text("docs/search_gpu.json"))["live"]
    longest = [us / 1e3 for us in (recorded["watch"]["pass_longest_us"], shapes["pass_longest_us"])]
    assert "Longest seen: {:.1f} ms in the run above, {:.1f} ms in".format(*longest) in readme
    two = json.loads(text("docs/ranks_gpu.json"))["tp, one compile process a rank"]["first_token"]
    median, longest = (two[name]["added_ms"]["value"] for name in ("p50", "max"))
    assert f"with two ranks {median:.2f} ms in the median, {longest:.2f} ms in the longest" in readme
