"""The pages in docs/ name what exists: commands that parse, settings, links."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from sglang_moe_autotune.cli import main
from sglang_moe_autotune.decision import LOOKS, looks
from sglang_moe_autotune.routings import FEW, MANY
from sglang_moe_autotune.search import SearchOptions
from sglang_moe_autotune.search_space import full_space
from sglang_moe_autotune.settings import NUMBERS, PREFIX, Settings
from sglang_moe_autotune.tuner import TunerOptions

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.glob("*.md"))
COMMANDS = [
    (page.name, line)
    for page in PAGES
    for line in re.findall(r"^ *\$ sglang-moe-autotune (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}: {line[:40]}" for page, line in COMMANDS])
def test_a_command_on_a_page_parses(page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("landscape.json.gz").touch()
    name, *arguments = shlex.split(line)
    main.commands[name].make_context(name, arguments, parent=click.Context(main))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_settings_on_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)", text):
        assert (page.parent / target).exists(), target
    known = {"MODE", "DIR", "BIT_EQUAL", "RECAPTURE", *(number.name for number in NUMBERS)}
    named = set(re.findall(rf"\b{PREFIX}([A-Z][A-Z_]+)\b", text)) - {"COMPLETE"}
    if page.name not in {"design.md", "limits.md"}:
        assert named <= known


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", *PAGES], ids=lambda page: page.name)
def test_links_into_a_page_lead_to_a_heading(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        text = (page.parent / target if target else page).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["quick_start.md", "fleets.md", "upgrading.md", "how_it_decides.md", "shell.md"])
def test_the_pages_of_the_tasks_are_there(page: str) -> None:
    assert (DOCS / page).stat().st_size > 1000


def test_the_figures_on_how_it_decides_are_those_of_the_code() -> None:
    text = " ".join((DOCS / "how_it_decides.md").read_text(encoding="utf-8").split())
    *first, last = LOOKS
    assert f"after {', '.join(map(str, first))} and {last} samples" in text
    assert "with samples of eight pairs the last two are left out" in text
    assert (len(MANY), looks(len(MANY))) == (8, LOOKS[:-2])
    assert "where four samples of one pair count as one, the last." in text
    assert (len(FEW), looks(len(FEW))) == (4, LOOKS[:-1])
    assert f"an error rate of {100 * TunerOptions().error_rate:g} %" in text
    assert f"at least {100 * TunerOptions().min_gain:g} %" in text
    assert f"at most {SearchOptions().compiled_per_shape} configs are compiled" in text
    assert f"{len(full_space()):,} configs" in text
    assert Settings().min_gain_percent == 100 * TunerOptions().min_gain
    assert (Settings().slice_us, Settings().deep_idle_s) == (500, 10), "half a millisecond, ten seconds"
