"""The window before the first capture: what it learns is served to the capture, and it ends when its time is spent."""
# ruff: noqa: PLC0415 - what runs in the other process imports there

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import record_values as v
from hypothesis import given
from hypothesis import strategies as st

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_process import SchedulerProcess

pytest.importorskip("torch")

from sglang_moe_autotune import releases, startup
from sglang_moe_autotune.fitting import Limit, fit
from sglang_moe_autotune.overlay import Overlay
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig
from sglang_moe_autotune.startup import in_turn, tune

SIZES = st.lists(st.integers(1, 500), max_size=20)


@given(SIZES, SIZES)
def test_every_size_comes_once_small_decode_and_large_prefill_first(decode: list[int], prefill: list[int]) -> None:
    found = in_turn(decode, prefill)
    assert sorted(found) == sorted({*decode, *prefill})
    if decode:
        assert found[0] == min(decode)
    if decode and (only := set(prefill) - set(decode)):
        assert found[1] == max(only)


def test_several_ranks_have_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "sizes_to_capture", lambda _: pytest.fail("it went on"))
    serving: Any = SimpleNamespace(device=object(), tuner=object(), switch=SimpleNamespace(why=""))
    tune(serving, SimpleNamespace(server_args=SimpleNamespace(tp_size=2)))
    with pytest.raises(pytest.fail.Exception):
        tune(serving, SimpleNamespace(server_args=SimpleNamespace(tp_size=1)))


def test_the_window_measures_against_what_is_served_where_sglangs_own_cannot_be_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape, large = v.shape(), KernelConfig(128, 256, 128, 1, 8, 4)
    limit = Limit(101_376)
    monkeypatch.setattr(releases, "ask_stock", lambda *_: large.to_dict())
    overlay: Any = Overlay("all")
    overlay.fit_to(limit)
    overlay.layers, overlay.shape_of = SimpleNamespace(keys=["call"]), lambda _: shape
    added: list[Any] = []
    tuner: Any = SimpleNamespace(add=lambda *row: added.append(row), snapshot=lambda: SimpleNamespace(queue=added))
    serving: Any = SimpleNamespace(overlay=overlay, settings=SimpleNamespace(max_m=4096))
    assert startup._queue(serving, tuner, [64, 8192]) == 1
    ((_, m, baseline),) = added
    assert m == 64
    assert baseline == fit(ConfigPair(large, large), shape, limit)
    assert limit.holds(baseline.up, shape)


GRAPHS = SimpleNamespace(decode=SimpleNamespace(bs=[4, 1, 2]), prefill=SimpleNamespace(bs=[64, 32]))


@pytest.mark.parametrize(
    ("config", "args", "found"),
    [
        pytest.param(
            {"get_server_args": None},
            {"cuda_graph_config": GRAPHS},
            {"decode": [1, 2, 4], "prefill": [32, 64]},
            id="0.5.16",
        ),
        pytest.param(
            {"get_exec": lambda: SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=GRAPHS))},
            {"speculative_num_draft_tokens": 4},
            {"decode": [4, 8, 16], "prefill": [32, 64]},
            id="0.5.23, drafts",
        ),
        pytest.param(
            {"get_global_server_args": None},
            {"cuda_graph_bs": [2, 1], "piecewise_cuda_graph_tokens": [8]},
            {"decode": [1, 2], "prefill": [8]},
            id="0.5.13",
        ),
        pytest.param({}, {"cuda_graph_bs": None}, {"decode": [], "prefill": []}, id="no graphs"),
    ],
)
def test_the_sizes_of_a_release(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], args: dict[str, Any], found: dict[str, list[int]]
) -> None:
    monkeypatch.setattr(releases, "config_module", lambda: SimpleNamespace(**config))
    assert releases.sizes_to_capture(SimpleNamespace(server_args=SimpleNamespace(**args))) == found


def before_capture(budget_s: float) -> dict[str, object]:
    import importlib
    import logging
    import time
    from types import SimpleNamespace

    from record_values import H200
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_moe_autotune import landscape, live, plugin, releases
    from sglang_moe_autotune.device import Device
    from sglang_moe_autotune.layers import LiveLayer, call_key
    from sglang_moe_autotune.replay import ReplayProvider
    from sglang_moe_autotune.serving import Serving
    from sglang_moe_autotune.settings import Settings

    args = releases.publish_server_args()
    config = importlib.import_module(releases.LOOKUP.module)
    config.get_device_name = lambda *_: "NVIDIA H200"
    recorded = landscape.load(landscape.shipped()[0])
    shape = recorded.shape
    live.start = lambda _: None
    releases.sizes_to_capture = lambda _: {"decode": [2, 16], "prefill": [64, 32768]}
    releases.origin = lambda _: "miss"
    serving = plugin._serving = Serving(Settings(startup_s=budget_s, dir=plugin.serving().root), plugin.hooks_in_place)
    key = call_key(shape)
    serving.overlay.layers.add([LiveLayer(SimpleNamespace(), key, "bfloat16", False, ())])
    serving.start(Device(H200, ReplayProvider(recorded, polls=1, clock=time.monotonic), "learned"))
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("sglang.moe_autotune")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    runner = SimpleNamespace(server_args=args)
    at_capture: list[object] = []

    def capture(_runner: object, *_: object, **__: object) -> None:
        for m in (2, 16, 64):
            answer = config.try_get_optimal_moe_config(*key[:4], m, return_down_config=True)
            at_capture.append(answer[0] == releases.ask_stock(shape, m)[0])

    begun = time.monotonic()
    hooked = getattr(ModelRunner, "init_cuda_graphs", None) or ModelRunner.init_device_graphs  # before 0.5.16
    hook_there = plugin._holds(hooked, plugin.on_capture)
    plugin.on_capture(runner)
    took_s = time.monotonic() - begun
    capture(runner)
    plugin.on_capture(runner)  # a draft model's graphs come later
    log.removeHandler(handler)
    told = serving.tuner.snapshot()
    for m in (2, 16, 64):
        record = serving.store.contents.records.get((shape, m))
        serving.tuner.add(shape, m, recorded.baselines[m].pair if record is None else record.baseline)
    queue = [m for _, m in serving.tuner.snapshot().queue]
    return {"hook": hook_there, "stock": at_capture, "took_s": took_s, "log": messages, "broken": [
        f.name for f in plugin._FENCES.values() if f.broken], "faster": told.faster, "queue": queue,
        "records": sorted(m for _, m in serving.store.contents.records)}  # fmt: skip


@pytest.mark.sglang
def test_rows_learned_before_the_capture_are_what_is_captured(start_scheduler: Callable[..., SchedulerProcess]) -> None:
    process = start_scheduler(SGLANG_MOE_AUTOTUNE_STARTUP_S="60")
    told = process.run(before_capture, 60.0)
    assert told["hook"]
    assert told["broken"] == []
    assert told["faster"] >= 2
    assert told["stock"].count(False) == told["faster"]
    assert set(told["records"]) <= {2, 16, 64}
    assert any("has 60 s for 3 M" in line for line in told["log"])  # 32768 is above the largest M that is tuned
    assert sum("before the graphs are captured:" in line for line in told["log"]) == 1
    assert told["queue"] == sorted({2, 16, 64} - set(told["records"]))  # nothing is searched again
    assert told["took_s"] < 60  # nothing was left that could be tuned within it


@pytest.mark.sglang
def test_the_window_ends_when_its_time_is_spent(start_scheduler: Callable[..., SchedulerProcess]) -> None:
    told = start_scheduler().run(before_capture, 0.2)
    assert not told["hook"]  # with the default of 0 SGLang's method is not even hooked
    assert told["took_s"] < 5
    assert told["broken"] == []
