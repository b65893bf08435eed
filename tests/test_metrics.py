"""Metrics appear where SGLang's own do: in the folder its processes share, under its labels, at no cost to serving."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, get_args

import pytest

from sglang_moe_autotune import metrics, status, tally
from sglang_moe_autotune.metrics import METRICS, PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"

# Each rank is a process of its own, as in SGLang: prometheus_client decides at its import where samples go.
RANK = """
import sys, types
from replayed_serving import SMALL, replayed_serving, tune
from sglang_moe_autotune import metrics

assert "prometheus_client" not in sys.modules
rank = sys.argv[1]
labels = {"model_name": "m", "engine_type": "unified", "tp_rank": rank, "pp_rank": "0", "moe_ep_rank": "0"}
scheduler = types.SimpleNamespace(
    metrics_collector=types.SimpleNamespace(labels=labels),
    metrics_collector_context=types.SimpleNamespace(current_scheduler_metrics_enabled=True),
)
found = metrics.of(scheduler)
assert "prometheus_client" not in sys.modules, "made before the first update"
serving = replayed_serving()
found.update(serving)
serving.state, serving.reason = "standing aside", "the engine is paused"
found.update(serving)
serving.state, serving.reason = "idle", ""
tune(serving)
serving.slices = 5
found.slices_s.extend([0.0004, 0.0004, 0.0004, 0.0009, 0.7])
found.update(serving)
found.update(serving)
print(len([r for r in serving.store.contents.records.values() if r.verdict == "faster"]), serving.tuner.gpu_s)
"""

COLLECTOR = """
from prometheus_client import CollectorRegistry, generate_latest, multiprocess

registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
"""

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def python(code: str, folder: Path, *arguments: str) -> str:
    environ = {
        **os.environ,
        "PROMETHEUS_MULTIPROC_DIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
    }
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def parse(text: str) -> Iterator[tuple[tuple[str, frozenset[tuple[str, str]]], float]]:
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, labels, value = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line).groups()  # type: ignore[union-attr]
            yield (name, frozenset(re.findall(r'(\w+)="([^"]*)"', labels or ""))), float(value)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Samples, list[tuple[int, float]]]:
    """The text of /metrics, its samples, and (learned rows, GPU seconds) of each of two ranks."""
    folder = tmp_path_factory.mktemp("multiprocess")
    said = [python(RANK, folder, rank).split() for rank in ("0", "1")]
    text = python(COLLECTOR, folder)
    return text, dict(parse(text)), [(int(rows), float(gpu_s)) for rows, gpu_s in said]


def value(samples: Samples, name: str, rank: int, **labels: str) -> float:
    wanted = {("tp_rank", str(rank)), ("model_name", "m"), *labels.items()}
    found = [v for (n, has), v in samples.items() if n == PREFIX + name and wanted <= has]
    assert len(found) == 1, f"{PREFIX}{name} {labels}: {found}"
    return found[0]


def test_every_metric_is_there_with_its_kind_and_the_labels_of_sglang(scraped: Any) -> None:
    text, samples, _ = scraped
    for metric in METRICS:
        base = (PREFIX + metric.name).removesuffix("_total") if metric.kind == "counter" else PREFIX + metric.name
        assert re.search(rf"^# TYPE {base}(_total)? {metric.kind}$", text, re.MULTILINE), metric.name
        name = PREFIX + metric.name + ("_count" if metric.kind == "histogram" else "")
        labels = [{key for key, _ in has} for (n, has) in samples if n == name]
        assert labels, metric.name
        for found in labels:  # a gauge of "all" processes would carry a pid
            assert found == {"model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank", *metric.labels}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_numbers_are_those_of_the_process(scraped: Any, rank: int) -> None:
    _, samples, said = scraped
    learned, gpu_s = said[rank]
    slug = "E8-N256-K512-top2-bf16"
    assert value(samples, "m", rank, shape=slug, progress="learned") == learned > 0
    assert value(samples, "m", rank, shape=slug, progress="queued") == 0
    assert value(samples, "shapes", rank, state="deferred") == 1
    mean, best = (value(samples, "gain", rank, shape=slug, of=of) for of in ("mean", "best"))
    assert 0 < mean <= best < 1
    assert value(samples, "gpu_seconds_total", rank) == pytest.approx(gpu_s)
    assert value(samples, "idle_seconds_total", rank) == 1.5
    assert value(samples, "serving_compiles_total", rank) == 0


def test_counters_count_once_however_often_they_are_brought_up_to_date(scraped: Any) -> None:
    assert value(scraped[1], "slices_total", 0) == 5
    assert value(scraped[1], "slice_seconds_count", 0) == 5
    assert value(scraped[1], "slice_seconds_bucket", 0, le="0.0005") == 3
    assert value(scraped[1], "slice_seconds_bucket", 0, le="0.002") == 4


def test_one_state_holds_and_a_reason_that_is_over_is_0(scraped: Any) -> None:
    states = {state: value(scraped[1], "state", 0, state=state) for state in get_args(status.State)}
    assert states == {state: float(state == "idle") for state in states}
    assert value(scraped[1], "paused", 0, reason="the engine is paused") == 0


@pytest.mark.parametrize(
    "scheduler",
    [
        pytest.param(SimpleNamespace(), id="no-metrics"),
        pytest.param(SimpleNamespace(metrics_collector=None), id="disabled"),
        pytest.param(
            SimpleNamespace(
                metrics_collector=SimpleNamespace(labels={}),
                metrics_collector_context=SimpleNamespace(current_scheduler_metrics_enabled=False),
            ),
            id="a-rank-that-reports-none",
        ),
    ],
)
def test_where_sglang_reports_nothing_neither_do_we(scheduler: Any) -> None:
    assert metrics.of(scheduler) is None


def test_an_older_scheduler_that_holds_the_flag_itself() -> None:
    scheduler = SimpleNamespace(metrics_collector=SimpleNamespace(labels={}), current_scheduler_metrics_enabled=True)
    assert metrics.of(scheduler) is not None


class FakeFamily:
    """Another backend of metrics, as SGLang's Ray wrappers are one: set, inc and observe on what labels() gives."""

    made: list[FakeFamily]

    def __init__(self, name: str, documentation: str, labelnames: tuple[str, ...], **_: Any) -> None:
        self.name, self.labelnames, self.samples = name, labelnames, []  # type: ignore[var-annotated]
        FakeFamily.made.append(self)

    def labels(self, **labels: str) -> Any:
        assert set(labels) == set(self.labelnames)
        keep = self.samples.append
        return SimpleNamespace(set=keep, inc=keep, observe=keep)


@pytest.fixture
def serving() -> Any:
    from replayed_serving import replayed_serving  # noqa: PLC0415 - used by few tests of this module

    return replayed_serving()


def fake_metrics() -> metrics.Metrics:
    FakeFamily.made = []
    classes = dict.fromkeys(("_gauge_cls", "_counter_cls", "_histogram_cls"), FakeFamily)
    return metrics.Metrics(SimpleNamespace(labels={"tp_rank": "0"}, **classes))


def test_sglangs_own_metric_classes_are_used_where_it_has_others(serving: Any) -> None:
    fake_metrics().update(serving)
    assert [family.name for family in FakeFamily.made] == [PREFIX + metric.name for metric in METRICS]


def test_a_fault_is_logged_once_and_ends_the_metrics(serving: Any, caplog: pytest.LogCaptureFixture) -> None:
    found = fake_metrics()
    serving.budget = None
    for _ in range(3):
        found.update(serving)
    assert len([r for r in caplog.records if r.exc_info]) == 1


def changed() -> None:
    raise RuntimeError("dictionary changed size during iteration")


def test_a_change_during_the_reading_is_tried_again(serving: Any) -> None:
    found = fake_metrics()
    tuner, serving.tuner = serving.tuner, SimpleNamespace(snapshot=changed)
    with pytest.raises(RuntimeError, match="changed size"):
        found.update(serving)
    serving.tuner = tuner
    found.update(serving)
    assert any(family.samples for family in FakeFamily.made)


def test_slices_that_nobody_collects_do_not_fill_the_memory() -> None:
    found = fake_metrics()
    found.slices_s.extend([0.0] * 200_000)
    assert len(found.slices_s) < 100_000


# The pages


def dashboard() -> Any:
    return json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))


def expressions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]


@pytest.mark.parametrize("expression", expressions())
def test_the_dashboard_asks_for_metrics_and_labels_that_exist(expression: str) -> None:
    exist = {}
    for metric in METRICS:
        for suffix in ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",):
            exist[PREFIX + metric.name + suffix] = {*metric.labels, "le", "model_name", "instance", "tp_rank"}
    names = re.findall(rf"{PREFIX}\w+", expression)
    assert names
    assert set(names) <= set(exist)
    allowed = set.union(*(exist[name] for name in names))
    grouped = {label.strip() for group in re.findall(r"by \((.*?)\)", expression) for label in group.split(",")}
    matched = {label for group in re.findall(r"\{(.*?)\}", expression) for label in re.findall(r"(\w+)\s*[=!]", group)}
    assert grouped | matched <= allowed


def test_every_metric_is_on_the_dashboard_and_on_the_page() -> None:
    page, asked = (DOCS / "metrics.md").read_text(encoding="utf-8"), " ".join(expressions())
    for metric in METRICS:
        assert PREFIX + metric.name in asked
        row = next((line for line in page.splitlines() if f"`{PREFIX}{metric.name}`" in line), "")
        assert metric.kind in row, metric.name
        assert all(f"`{label}`" in row for label in metric.labels), metric.name


def test_panels_do_not_overlap_and_ids_are_unique() -> None:
    taken: set[tuple[int, int]] = set()
    panels = dashboard()["panels"]
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_the_page_names_every_state() -> None:
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    for word in (*get_args(status.State), *tally.STATES, *tally.PROGRESS):
        assert f"`{word}`" in page, word
