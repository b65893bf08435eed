"""/server_info says what the plugin does, in values that every release of SGLang can send."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import effort
import msgspec
import pytest
from record_values import record, shape
from replayed_serving import SMALL, replayed_serving, tune

from sglang_moe_autotune import __version__, server_info

if TYPE_CHECKING:
    from scheduler_process import SchedulerProcess


def native(value: Any) -> bool:
    """Only what msgpack has a form for, and no subclass of it."""
    if type(value) is dict:
        return all(type(key) is str and native(item) for key, item in value.items())
    if type(value) is list:
        return all(map(native, value))
    return value is None or type(value) in {bool, int, float, str}


@pytest.mark.parametrize("steps", [0, 60, 10**6], ids=["start", "midway", "end"])
def test_the_values_travel_and_come_back(steps: int) -> None:
    serving = replayed_serving()
    tune(serving, steps)
    told = server_info.describe(serving)
    assert native(told)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(told)) == told
    assert json.loads(json.dumps(told)) == told


def test_it_says_how_far_each_shape_is() -> None:
    serving = replayed_serving(ms=(8, 64, 512), deferred=7)
    before = server_info.describe(serving)
    assert before["queue"] == 4
    assert before["shapes"][SMALL.slug]["queued"] == 4
    assert before["version"] == __version__

    tune(serving)
    after = server_info.describe(serving)
    (found,) = after["shapes"].values()
    assert found["learned"] + found["baseline"] == 3
    assert found["learned"] == len([r for r in serving.store.contents.records.values() if r.verdict == "faster"]) > 0
    assert 0 < found["best_gain"] < 1
    assert (after["deferred"], found["deferred"], found["state"]) == (1, 1, "deferred")
    assert after["gpu_s"] == serving.tuner.gpu_s > 0
    assert after["slices"] == serving.slices > 0


def test_before_the_device_is_known_there_is_an_answer() -> None:
    serving = replayed_serving()
    serving.tuner = serving.store = serving.device = None
    told = server_info.describe(serving)
    assert (told["queue"], told["current"], told["shapes"][SMALL.slug]["learned"]) == (0, None, 0)


def test_the_rest_of_the_answer_stays() -> None:
    result = SimpleNamespace(internal_state={"last_gen_throughput": 1.0})
    server_info.add(result, replayed_serving())
    assert set(result.internal_state) == {"last_gen_throughput", server_info.KEY}


def test_rows_of_other_models_cost_a_request_two_lines_each() -> None:
    serving = replayed_serving()
    server_info.describe(serving)
    few = effort.lines(lambda: server_info.describe(serving))
    for m in range(1, 3000):
        serving.store._contents.records[shape(m), m] = record(m, shape(m))
    assert effort.lines(lambda: server_info.describe(serving)) < few + 2.1 * 3000


def ask(mode):  # type: ignore[no-untyped-def] # its source runs in the scheduler process
    """The hooked method as SGLang calls it, and the names of its parameters."""
    import importlib.util  # noqa: PLC0415 - as above
    import inspect  # noqa: PLC0415 - as above
    from types import SimpleNamespace  # noqa: PLC0415 - as above

    import msgspec  # noqa: PLC0415 - as above
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput  # noqa: PLC0415 - as above
    from sglang.srt.managers.scheduler import Scheduler  # noqa: PLC0415 - as above

    from sglang_moe_autotune import plugin, releases  # noqa: PLC0415 - as above

    hooked, other = Scheduler.get_internal_state, None
    if importlib.util.find_spec("sglang.srt.managers.scheduler_components.internal_state"):
        answer = lambda request: GetInternalStateReqOutput(internal_state={"asked": request})  # noqa: E731
        stub = SimpleNamespace(internal_state=SimpleNamespace(get_internal_state=answer))
        own = {"asked": "request"}
    else:  # the method looks at the scheduler's parts itself
        part = SimpleNamespace(last_gen_throughput=1.0, spec_total_num_forward_ct=0, step_time_dict={})
        runner = SimpleNamespace(weight_load_mem_usage=1.0, graph_mem_usage=1.0)
        stub = SimpleNamespace(
            server_args=releases.publish_server_args(), metrics_reporter=part, max_total_num_tokens=1,
            draft_worker=None,
            tp_worker=SimpleNamespace(model_runner=runner), max_running_requests=1,
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: SimpleNamespace(mem_usage=1.0)),
            spec_algorithm=SimpleNamespace(is_none=lambda: True, is_dspark=lambda: False),
        )  # fmt: skip
        other = repr  # those releases pickle their answer
        own = hooked.__wrapped__(stub, "request").internal_state
        own = msgspec.msgpack.decode(msgspec.msgpack.encode(own, enc_hook=other))
    if mode == "broken":
        plugin.serving().lookup = None
    given = hooked(stub, "request")
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(given.internal_state, enc_hook=other))
    return [own, sent, sorted(inspect.signature(hooked).parameters)]


@pytest.mark.sglang
def test_the_real_scheduler_method_shows_it(scheduler: SchedulerProcess) -> None:
    own, told, parameters = scheduler.run(ask, "whole")
    assert own
    assert told == {**own, "moe_autotune": told["moe_autotune"]}
    assert told["moe_autotune"]["mode"] == "miss"
    assert parameters == ["recv_req", "self"]


@pytest.mark.sglang
def test_a_fault_of_ours_leaves_the_answer_of_sglang(scheduler: SchedulerProcess) -> None:
    own, told, _ = scheduler.run(ask, "broken")
    assert told == own
    assert "server info hook" in scheduler.log()


def collector_contract():  # type: ignore[no-untyped-def] # as above
    """What ``metrics.of`` counts on."""
    import dataclasses  # noqa: PLC0415 - this runs in the scheduler process
    import inspect  # noqa: PLC0415 - as above

    from sglang.srt.managers.scheduler import Scheduler  # noqa: PLC0415 - as above
    from sglang.srt.observability import metrics_collector as found  # noqa: PLC0415 - as above

    source = inspect.getsource(Scheduler)
    fields = {field.name for field in dataclasses.fields(found.SchedulerMetricsCollectorContext)}
    return {
        "collector": "self.metrics_collector = self.metrics_collector_context.collector" in source,
        "enabled": "current_scheduler_metrics_enabled" in fields,
        "labels": "self.labels = labels" in inspect.getsource(found.SchedulerMetricsCollector.__init__),
        "classes": all(
            hasattr(found.SchedulerMetricsCollector, name) for name in ("_gauge_cls", "_counter_cls", "_histogram_cls")
        ),
    }


@pytest.mark.sglang
def test_sglang_keeps_its_metrics_where_ours_look_for_them(scheduler: SchedulerProcess) -> None:
    assert scheduler.run(collector_contract) == dict.fromkeys(("collector", "enabled", "labels", "classes"), True)
