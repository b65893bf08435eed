"""Prometheus metrics, in SGLang's own registry, with the names and labels of SGLang's scheduler metrics.

The serving thread only appends to a deque; everything else happens on the thread that writes the live file.
``prometheus_client`` is imported there and only where SGLang has made its own metrics, so after SGLang has
set the folder that its processes share.
"""

from __future__ import annotations

import collections
import logging
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

from sglang_moe_autotune import server_info, status, tally
from sglang_moe_autotune.breath import Breath

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_moe_autotune.serving import Serving

logger = logging.getLogger("sglang.moe_autotune")

PREFIX: Final = "sglang:moe_autotune_"

Kind = Literal["gauge", "counter", "histogram"]


class Metric(NamedTuple):
    """One metric: ``PREFIX + name``, its own labels beside SGLang's, and what it says."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    meaning: str


METRICS: Final = (
    Metric("state", "gauge", ("state",), "1 for what the plugin does now, 0 for the other states."),
    Metric("paused", "gauge", ("reason",), "1 while nothing is tuned for this reason."),
    Metric("shapes", "gauge", ("state",), "Shapes of the model by state: tuning, queued, deferred, settled."),
    Metric("m", "gauge", ("shape", "progress"), "Values of M of a shape: learned, baseline, queued, deferred, failed."),
    Metric("rows", "gauge", (), "Learned rows that config lookups answer from."),
    Metric("epoch", "gauge", (), "Number of the published table of rows."),
    Metric("gain", "gauge", ("shape", "of"), "Gain in the time of both GEMMs over SGLang's configs, a fraction."),
    Metric("slices_total", "counter", (), "Slices of tuning on the GPU."),
    Metric("slice_seconds", "histogram", (), "Time of a slice on the serving thread: what a request may wait for."),
    Metric("gpu_seconds_total", "counter", (), "GPU time spent on tuning."),
    Metric("gpu_seconds_last_hour", "gauge", (), "GPU time spent on tuning within the last hour."),
    Metric("budget_seconds", "gauge", (), "GPU time an hour that tuning may use."),
    Metric("idle_seconds_total", "counter", (), "Time without requests of users."),
    Metric("binaries_total", "counter", ("outcome",), "Binaries from the compile process: ready, failed."),
    Metric("stale_graphs", "gauge", (), "Captured graphs that hold another config than the served one."),
    Metric("recaptures_total", "counter", ("outcome",), "Captures of a graph: recaptured, failed, withdrawn."),
    Metric("recapture_seconds", "histogram", (), "Time for which the server stood still for the capture of a graph."),
    Metric("step_changes_total", "counter", ("outcome",), "Rows in effect, by what step times say: worse, harmless."),
    Metric("serving_compiles_total", "counter", (), "Kernels that the serving process compiled for tuning: stays 0."),
)

_RECAPTURE_BUCKETS_S: Final = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
SLICE_BUCKETS_S: Final = (1e-4, 2e-4, 3e-4, 5e-4, 7e-4, 1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 1e-2, 5e-2, 0.2, 1.0)

_STATES: Final[tuple[str, ...]] = get_args(status.State)


def of(scheduler: Any) -> Metrics | None:
    """The metrics of this process; None where SGLang itself reports none from here."""
    context = getattr(scheduler, "metrics_collector_context", scheduler)
    collector = getattr(scheduler, "metrics_collector", None)
    if collector is None or not getattr(context, "current_scheduler_metrics_enabled", False):
        return None
    return Metrics(collector)


class Metrics:
    """Made from SGLang's own scheduler metrics, whose labels and classes it takes over."""

    def __init__(self, collector: Any) -> None:
        self.slices_s: collections.deque[float] = collections.deque(maxlen=1 << 16)
        """appended to by the serving thread, emptied by ``update``"""
        self._collector = collector
        self._labels: dict[str, str] = dict(collector.labels)
        self._families: dict[str, Any] = {}
        self._children: dict[tuple[str, ...], Any] = {}
        self._counted: dict[tuple[str, ...], float] = {}
        self._paused = ""
        self._broken = False
        self._breathe = Breath()

    def update(self, serving: Serving) -> None:
        """Bring all metrics up to date. Off the serving thread; a fault is logged once and ends the metrics."""
        if self._broken:
            return
        try:
            if not self._families:
                self._families = self._register()
            self._update(server_info.describe(serving, self._breathe))
            self._observe("slice_seconds", self.slices_s)
            self._observe("recapture_seconds", serving.recapture.new_pauses_s)
        except RuntimeError:
            raise  # a dict that the serving thread changed meanwhile: the caller tries again later
        except Exception:
            self._broken = True
            logger.exception("MoE autotune failed to report its metrics; they stay as they are from now on.")

    def _register(self) -> dict[str, Any]:
        import prometheus_client  # noqa: PLC0415 - see the module's docstring

        collector, names = self._collector, tuple(self._labels)
        gauge = getattr(collector, "_gauge_cls", None) or prometheus_client.Gauge
        counter = getattr(collector, "_counter_cls", None) or prometheus_client.Counter
        histogram = getattr(collector, "_histogram_cls", None) or prometheus_client.Histogram
        families: dict[str, Any] = {}
        for name, kind, labels, meaning in METRICS:
            self._breathe()
            common: dict[str, Any] = {"name": PREFIX + name, "documentation": meaning, "labelnames": (*names, *labels)}
            if kind == "gauge":
                families[name] = gauge(**common, multiprocess_mode="mostrecent")
            elif kind == "counter":
                families[name] = counter(**common)
            else:
                buckets = _RECAPTURE_BUCKETS_S if name == "recapture_seconds" else SLICE_BUCKETS_S
                families[name] = histogram(**common, buckets=buckets)
        return families

    def _update(self, now: Mapping[str, Any]) -> None:
        for state in _STATES:
            self._child("state", state).set(float(state == now["state"]))
        self._pause(now["reason"] if now["state"] in {"standing aside", "off"} else "")
        shapes = now["shapes"]
        for state in tally.STATES:
            self._child("shapes", state).set(sum(shape["state"] == state for shape in shapes.values()))
        for slug, shape in shapes.items():
            for progress in tally.PROGRESS:
                self._child("m", slug, progress).set(shape[progress])
            for of_what in ("best", "mean"):
                if (gain := shape[f"{of_what}_gain"]) is not None:
                    self._child("gain", slug, of_what).set(gain)
        for name, value in (
            ("rows", now["rows"]),
            ("epoch", now["epoch"]),
            ("gpu_seconds_last_hour", now["gpu_s_last_hour"]),
            ("budget_seconds", now["budget_s"]),
        ):
            self._child(name).set(value)
        self._count(now["slices"], "slices_total")
        self._count(now["gpu_s"], "gpu_seconds_total")
        self._count(now["idle_s"], "idle_seconds_total")
        self._count(now["compiles_for_tuning"], "serving_compiles_total")
        for outcome in ("worse", "harmless"):
            self._count(now["step_changes"].get(outcome, 0), "step_changes_total", outcome)
        for outcome in ("ready", "failed"):
            self._count(now["compile"].get(outcome, 0), "binaries_total", outcome)
        self._child("stale_graphs").set(len(now["graphs"]["stale"]))
        for outcome in ("recaptured", "failed", "withdrawn"):
            self._count(now["graphs"]["outcomes"].get(outcome, 0), "recaptures_total", outcome)

    def _pause(self, reason: str) -> None:
        if self._paused and self._paused != reason:
            self._child("paused", self._paused).set(0)
        if reason:
            self._child("paused", reason).set(1)
        self._paused = reason

    def _count(self, total: float, *place: str) -> None:
        self._child(*place).inc(max(0.0, total - self._counted.get(place, 0.0)))
        self._counted[place] = max(total, self._counted.get(place, 0.0))

    def _observe(self, name: str, fresh: collections.deque[float]) -> None:
        histogram = self._child(name)
        for _ in range(len(fresh)):
            self._breathe()
            histogram.observe(fresh.popleft())

    def _child(self, name: str, *own: str) -> Any:
        self._breathe()
        place = (name, *own)
        if place not in self._children:
            labels = next(metric.labels for metric in METRICS if metric.name == name)
            self._children[place] = self._families[name].labels(**self._labels, **dict(zip(labels, own, strict=True)))
        return self._children[place]
