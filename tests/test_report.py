"""The report is one page that loads nothing, says what the store says, and is drawn for any store."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import record_values as v
import replayed_report
import report_store
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from record_strategies import QUICK

from sglang_moe_autotune.cli import main
from sglang_moe_autotune.figures import gather
from sglang_moe_autotune.plot import Scale, tokens, upward
from sglang_moe_autotune.records import Evidence
from sglang_moe_autotune.report import page
from sglang_moe_autotune.shapes import GEMMS, KernelConfig
from sglang_moe_autotune.trials import TrialLog
from sglang_moe_autotune.tried import Tried

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_moe_autotune.records import Record

REAL = v.contents(*report_store.records(), environment=report_store.H200)


class Reader(HTMLParser):
    """Every start tag with its attributes, and the tags that are still open at the end."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def drawn(*contents: Any) -> str:
    return page([gather(f"store {n}", one) for n, one in enumerate(contents)], 1_800_000_000.0)


def test_the_page_loads_nothing_and_runs_nothing() -> None:
    text = drawn(REAL)
    reader = Reader(text)
    assert reader.open == []
    assert not {tag for tag, _ in reader.tags} & {"script", "link", "img", "iframe", "object", "embed", "base", "a"}
    assert not {name for _, attrs in reader.tags for name in attrs} & {"src", "href", "srcset", "onload", "onclick"}
    assert "url(" not in text
    assert "@import" not in text
    (policy,) = (a["content"] for t, a in reader.tags if t == "meta" and "http-equiv" in a)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"


def test_it_reads_in_dark_and_on_a_phone() -> None:
    text = drawn(REAL)
    assert "prefers-color-scheme:dark" in text
    assert 'name="viewport" content="width=device-width' in text
    light, dark = (set(re.findall(r"--(\w+):", block)) for block in re.findall(r":root\{([^}]*)\}", text))
    assert dark == light, "a colour without its dark twin"
    assert set(re.findall(r"var\(--(\w+)\)", text)) <= light


def test_every_drawing_is_well_formed_labelled_and_within_its_box() -> None:
    drawings = re.findall(r"<svg.*?</svg>", drawn(REAL), re.DOTALL)
    assert len(drawings) == 6
    for drawing in drawings:
        root = ET.fromstring(drawing)  # noqa: S314 - our own text
        assert root.get("aria-label")
        _, _, width, height = map(float, (root.get("viewBox") or "").split())
        for circle in root.iter("circle"):
            assert 0 <= float(circle.get("cx", "nan")) <= width
            assert 0 <= float(circle.get("cy", "nan")) <= height


def test_every_row_is_in_the_table_and_in_the_plot() -> None:
    text = drawn(REAL)
    rows = re.findall(r"<tr><td>(\d+)</td><td>([\d.]+)</td><td>([\d.]+)</td>", text)
    wanted = [
        (str(r.M), f"{r.evidence.baseline_us:.1f}", f"{r.evidence.chosen_us:.1f}") for r in report_store.records()
    ]
    assert rows == wanted
    gains = re.search(r'aria-label="Gain of.*?</svg>', text, re.DOTALL)
    assert gains is not None
    assert gains[0].count("<circle") == len(wanted)
    assert gains[0].count('class="dot kept"') == sum(r.verdict == "baseline" for r in report_store.records())


def test_the_figures_add_up() -> None:
    figures = gather("x", REAL)
    (shape,) = figures.shapes
    assert len(shape.measured) == 74
    assert shape.gpu_s == pytest.approx(sum(r.evidence.gpu_s for r in REAL.records.values()))
    assert sorted(m for _, ms in shape.configs for m in ms) == list(shape.summary.faster)
    counts = [len(ms) for _, ms in shape.configs]
    assert counts == sorted(counts, reverse=True)
    assert figures.history[-1][1:] == (74, pytest.approx(shape.gpu_s))


NAME = "</title><script>alert(1)</script>\"'&"


def test_a_name_from_somebody_elses_file_is_shown_not_obeyed() -> None:
    environment = msgspec.structs.replace(v.H200, device_name=NAME, kernel_hash=NAME)
    text = page([gather(NAME, v.contents(v.record(64), v.note(None, 1), environment=environment))])
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 2
    assert Reader(text).open == []


_time_us = st.floats(0.0, 1e15)
_gain = st.floats(-5.0, 1.0)


@st.composite
def _records(draw: st.DrawFn) -> Record:
    evidence = Evidence(
        draw(_time_us), draw(_time_us), draw(_gain), draw(_gain), draw(_gain), 1, 1, draw(st.floats(0, 1e9))
    )
    fields = {"evidence": evidence, "unix_s": draw(st.floats(0, 1e15))}
    fields |= {"verdict": draw(st.sampled_from(["faster", "baseline"]))}
    fields |= {"source": draw(st.sampled_from(["learned", "pinned", "imported", "replayed"]))}
    return v.record(draw(st.integers(1, 1 << 24)), **fields)


TINY = v.record(1, evidence=Evidence(5e-324, 5e-324, 0.0, 0.0, 0.0, 1, 1, 5e-324), unix_s=5e-324)


@QUICK
@given(st.lists(_records(), max_size=5))
@example([TINY])
def test_any_store_can_be_drawn(records: list[Record]) -> None:
    text = drawn(v.contents(*records, v.note(None, 1, served={3: 4})))
    assert Reader(text).open == []
    assert "nan" not in re.sub(r"<style>.*?</style>", "", text)


def test_a_shape_without_a_row_is_named() -> None:
    text = drawn(v.contents(v.note(None, 1, served={3: 4})))
    assert v.shape().slug in text
    assert "not yet tuned: M = 3" in text


# What was tried


def tried_page(trials: dict[int, list[Tried]], *more: Any) -> str:
    return page([gather("x", v.contents(*more, v.note(None, 1)), {v.shape(): trials})], 1_800_000_000.0)


def test_nothing_is_shown_where_nothing_was_tried() -> None:
    assert "What was tried" not in drawn(REAL)
    assert "What was tried" not in tried_page({})
    assert "What was tried" not in tried_page({64: []})
    assert tried_page({}) == drawn(v.contents(v.note(None, 1))).replace("store 0", "x")


def test_what_the_tuner_tried_is_drawn_with_a_slice_of_the_landscape() -> None:
    contents, trials = replayed_report.replayed(2, 64, 1024)
    text = page([gather("x", contents, trials)])
    assert Reader(text).open == []
    ((shape, ms),) = trials.items()
    assert sum(map(len, ms.values())) == int(re.findall(r"(\d+) measurements of one GEMM", text)[0])
    strips = re.findall(r'<path class="strip (?:up|down)" d="([^"]*)">', text)
    assert len(strips) == 2 * len(ms) == 6
    assert all(1 <= strip.count("M") <= 120 for strip in strips)
    slices = re.findall(rf'aria-label="Slice of {shape.slug} at M=(\d+), (\w+)".*?</svg>', text, re.DOTALL)
    assert slices == [(str(m), gemm) for m in (2, 64, 1024) for gemm in ("up", "down")]
    best = min(row.ratio for row in ms[1024] if row.gemm == "up")
    (drawing,) = re.findall(r'aria-label="Slice of [^"]* at M=1024, up".*?</svg>', text, re.DOTALL)
    (ring,) = re.findall(r'class="cell \w+ best"[^>]*><title>[^:]*: ([\d.]+), n=', drawing)
    assert float(ring) == pytest.approx(best, abs=1e-3)


def test_the_hottest_m_and_those_with_the_largest_gains_are_sliced() -> None:
    row = Tried("up", KernelConfig(16, 32, 64, 1, 4, 3), 0.5, 5)
    gains = {8: 0.1, 16: 0.4, 32: 0.2, 64: 0.3}
    records = [v.record(m, evidence=Evidence(1, 1, gain, gain, gain, 9, 9, 1)) for m, gain in gains.items()]
    one = v.contents(*records, v.note(None, 1, served={8: 9, 64: 1}))
    (shape,) = gather("x", one, {v.shape(): {m: [row] for m in gains}}).shapes
    assert shape.sliced == (8, 16, 64)
    assert [m for m, _ in shape.tried] == sorted(gains)


_tried = st.builds(
    Tried,
    st.sampled_from(["up", "down"]),
    st.builds(KernelConfig, *(st.sampled_from([1, 16, 256, 1024]),) * 3, st.just(1), st.none() | st.just(4)),
    st.floats(1e-300, 1e6),
    st.integers(1, 1 << 50),
)


@QUICK
@given(st.dictionaries(st.integers(1, 1 << 24), st.lists(_tried, max_size=9), max_size=4))
def test_any_trials_can_be_drawn_within_their_boxes(trials: dict[int, list[Tried]]) -> None:
    text = tried_page(trials)
    assert Reader(text).open == []
    assert "nan" not in re.sub(r"<style>.*?</style>", "", text)
    for drawing in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        root = ET.fromstring(drawing)  # noqa: S314 - our own text
        _, _, width, height = map(float, (root.get("viewBox") or "").split())
        for box in root.iter("rect"):
            x, y, w, h = (float(box.get(name, "nan")) for name in ("x", "y", "width", "height"))
            assert 0 <= x <= x + w <= width
            assert 0 <= y <= y + h <= height


def test_two_hundred_m_make_a_page_that_a_phone_can_hold() -> None:
    configs = [KernelConfig(16 << a, 16 << b, 64, 1 + g, 4, 3) for a in range(5) for b in range(4) for g in range(6)]
    rows = [Tried(gemm, c, 0.5 + n / 90, 9) for gemm in GEMMS for n, c in enumerate(configs)]
    text = tried_page(dict.fromkeys(range(1, 201), rows))
    assert "of which 48 are drawn" in text
    assert text.count('<path class="strip') == 2 * 48
    assert len(text) < 400_000


# Scales

_value = st.floats(1e-3, 1e6)


@QUICK
@given(_value, _value, st.booleans())
def test_ticks_lie_within_and_are_few(a: float, b: float, log: bool) -> None:
    low, high = sorted((a, b))
    ticks = Scale(low, high, 0, 100, log).ticks()
    assert len(ticks) <= 8
    assert all(low * 0.998 <= t <= high * 1.002 for t in ticks)
    assert ticks == sorted(ticks)


@QUICK
@given(st.lists(st.integers(1, 1 << 24), min_size=1, max_size=9))
def test_the_axis_of_m_has_room_and_powers_of_two(ms: list[int]) -> None:
    scale, ticks = tokens(ms)
    assert scale.at(min(ms)) > scale.start
    assert scale.at(max(ms)) < scale.end
    assert 1 <= len(ticks) <= 9
    assert all(math.log2(t).is_integer() for t in ticks) or len(ticks) == 1


def test_upward_is_up() -> None:
    scale = upward(0.0, 40.0)
    assert scale.at(40.0) < scale.at(0.0)


# The command


def test_a_page_is_written_or_printed(autotune_folder: Path, tmp_path: Path) -> None:
    report_store.fill(autotune_folder)
    file = tmp_path / "r.html"
    written = CliRunner().invoke(main, ["report", "-o", str(file)])
    assert (written.exit_code, written.stdout) == (0, "")
    printed = CliRunner().invoke(main, ["report"])
    assert printed.stdout.startswith("<!doctype html>")
    assert file.read_text().startswith("<!doctype html>")
    found = json.loads(CliRunner().invoke(main, ["report", "--json"]).stdout)
    (shape,) = found["environments"][0]["shapes"]
    assert len(shape["rows"]) == 74
    assert CliRunner().invoke(main, ["report", "-o", str(tmp_path / "no" / "r.html")]).exit_code == 3


def test_the_command_draws_the_trials_beside_the_store(autotune_folder: Path) -> None:
    report_store.fill(autotune_folder)
    log = TrialLog(autotune_folder, report_store.H200)
    log.put(report_store.SHAPE, 64, [Tried("up", KernelConfig(16, 32, 64, 1, 4, 3), 0.5, 5)])
    assert log.flush(5)
    assert "What was tried" in CliRunner().invoke(main, ["report"]).stdout


def test_an_empty_store_is_code_1() -> None:
    assert CliRunner().invoke(main, ["report"]).exit_code == 1
