"""The plugin inside the real SGLang: loader, hooks, lookup semantics, fences, and when it stands aside."""
# ruff: noqa: PLC0415 - what runs in the other process imports there

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest
from sglang_ways import skip_unless

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from scheduler_process import SchedulerProcess

pytestmark = pytest.mark.sglang


def prepare() -> None:
    """A published configuration, an H200's name, and ``ask``, ``learn``, ``Stub`` for the snippets below."""
    import builtins
    import importlib
    from types import SimpleNamespace

    from sglang.srt.managers.scheduler import Scheduler

    from sglang_moe_autotune import plugin, releases
    from sglang_moe_autotune.lookup import CallKey
    from sglang_moe_autotune.shapes import ConfigPair, KernelConfig

    server_args = releases.publish_server_args()
    config = importlib.import_module(releases.LOOKUP.module)
    config.get_device_name = lambda *_: "NVIDIA H200"
    shape = ((256, 512, 3072), (256, 3072, 256), 8, None)
    pair = ConfigPair(KernelConfig(32, 64, 128, 1, 4, 3), KernelConfig(32, 128, 64, 16, 8, 2))

    def ask(m: int, function: object = None, down: bool = True) -> object:
        function = function or config.try_get_optimal_moe_config
        return function(*shape, m, block_shape=None, per_channel_quant=False, return_down_config=down)  # type: ignore[operator]

    def learn(m: int) -> None:
        plugin.serving().lookup.publish([(CallKey(*shape, None, False), m, pair)])

    class Stub:
        """As much of a scheduler as an idle pass touches; the idle method is the hooked one."""

        def __init__(self) -> None:
            self.server_args = server_args
            self._engine_paused = False
            self.weight_updater = SimpleNamespace(offload_tags=set(), _session=None)
            self.profiler_manager = SimpleNamespace(profile_in_progress=False)
            self.slept = 0
            self.idle_sleeper = SimpleNamespace(maybe_sleep=self._sleep)

        def _sleep(self) -> None:
            self.slept += 1

        maybe_sleep_on_idle = Scheduler.maybe_sleep_on_idle

    builtins.given = SimpleNamespace(  # type: ignore[attr-defined]
        ask=ask, learn=learn, Stub=Stub, config=config, pair=pair, shape=shape, serving=plugin.serving()
    )


@pytest.fixture(scope="module")
def prepared(scheduler: SchedulerProcess) -> SchedulerProcess:
    scheduler.run(prepare)
    return scheduler


# -- loader and hooks ---------------------------------------------------------------------------------------------


def hooks() -> dict[str, object]:
    import importlib

    from sglang_moe_autotune import plugin, releases

    fused = importlib.import_module("sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe")
    config = releases.config_module()
    return {
        "in_place": plugin.hooks_in_place(),
        "propagated": fused.try_get_optimal_moe_config is config.try_get_optimal_moe_config,
        "stock": releases.stock_lookup() is not config.try_get_optimal_moe_config,
    }


def test_every_hook_is_in_place_also_where_the_name_was_imported_before(prepared: SchedulerProcess) -> None:
    told = prepared.run(hooks)
    assert len(told["in_place"]) == 5
    assert all(told["in_place"].values())
    assert told["propagated"]
    assert told["stock"]


def test_the_launcher_gets_no_hook_and_does_not_import_the_moe_stack_because_of_us() -> None:
    code = """
    import json, sys
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry
    load_plugins()
    moe = [m for m in sys.modules if "fused_moe" in m or m == "sglang.srt.managers.scheduler"]
    ours = sorted(m for m in sys.modules if m.startswith("sglang_moe_autotune"))
    print(json.dumps({"moe": moe, "hooks": list(HookRegistry._hooks), "ours": ours, "triton": "triton" in sys.modules}))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["moe"] == []
    assert told["hooks"] == []
    assert "sglang_moe_autotune.plugin" in told["ours"]  # it was loaded, and left it at that
    assert "sglang_moe_autotune.serving" not in told["ours"]


def load_into_a_changed_sglang() -> dict[str, object]:
    import logging

    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sglang.moe_autotune").addHandler(handler)
    Scheduler.run_one_batch = Scheduler.run_batch
    del Scheduler.run_batch
    load_plugins()
    return {"messages": messages, "hooks": list(HookRegistry._hooks)}


def test_c39_an_sglang_that_moved_a_hooked_function_runs_as_if_there_were_no_plugin(
    start_scheduler: Callable[..., SchedulerProcess],
) -> None:
    told = start_scheduler(plugins=False).run(load_into_a_changed_sglang)
    (message,) = told["messages"]
    assert "run_batch is gone" in message
    assert "tested are 0.5.11 to 0.5.23" in message
    assert told["hooks"] == []


def load_into_an_sglang_with_another_name() -> dict[str, object]:
    import logging
    import pathlib
    import shutil
    import tempfile

    import sglang
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sglang.moe_autotune").addHandler(handler)
    # Every hooked function is where it was; what says that weights are released has another name.
    root = pathlib.Path(tempfile.mkdtemp()) / "sglang"
    shutil.copytree(sglang.__path__[0], root, ignore=shutil.ignore_patterns("*.json", "*.cu*", "multimodal_gen"))
    updater = root / "srt" / "managers" / "scheduler_components" / "weight_updater.py"
    updater.write_text(updater.read_text().replace("offload_tags", "released_tags"))
    sglang.__path__.insert(0, str(root))
    load_plugins()
    shutil.rmtree(root.parent)
    return {"messages": messages, "hooks": list(HookRegistry._hooks)}


def test_c39_an_sglang_that_no_longer_tells_when_weights_are_released_is_not_tuned_on(
    start_scheduler: Callable[..., SchedulerProcess],
) -> None:
    told = start_scheduler(plugins=False).run(load_into_an_sglang_with_another_name)
    (message,) = told["messages"]
    assert "stands aside" in message
    assert "SchedulerWeightUpdaterManager has no offload_tags" in message
    assert told["hooks"] == []


# -- the lookup ---------------------------------------------------------------------------------------------------


def overlay() -> dict[str, object]:
    from sglang_moe_autotune import releases

    given = __builtins__["given"] if isinstance(__builtins__, dict) else __builtins__.given
    stock = releases.stock_lookup()
    before = {m: given.ask(m) == given.ask(m, stock) for m in (1, 64, 128, 8192)}
    given.learn(128)  # C32: SGLang's lru_cache holds its own answer for this key by now
    after = {m: given.ask(m) == given.ask(m, stock) for m in (1, 64, 127, 129, 8192)}
    first, second = given.ask(128), given.ask(128)
    return {
        "before": before,
        "after": after,
        "answer": first,
        "up_only": given.ask(128, down=False),
        "fresh": first[0] is not second[0] and first[1][0] is not second[1][0],
        "expected": [given.pair.up.to_dict(), given.pair.down.to_dict()],
    }


def test_c08_c32_a_learned_row_is_visible_at_once_and_for_its_own_m_only(prepared: SchedulerProcess) -> None:
    told = prepared.run(overlay)
    assert all(told["before"].values())
    assert all(told["after"].values())
    up, down = told["expected"]
    assert told["answer"] == [up, [down, 32]]
    assert told["up_only"] == up
    assert told["fresh"]


def override() -> dict[str, object]:
    import builtins

    from sglang.srt.layers.moe.moe_runner.triton_utils import override_config

    given = builtins.given  # type: ignore[attr-defined]
    given.learn(96)
    forced = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 16, "GROUP_SIZE_M": 1}
    counted = len(given.serving.lookup.missed)
    with override_config(forced):
        return {
            "learned": given.ask(96)[0] == forced,
            "missed": given.ask(97)[0] == forced,
            "counted": len(given.serving.lookup.missed) - counted,
        }


def test_override_config_is_untouched(prepared: SchedulerProcess) -> None:
    assert prepared.run(override) == {"learned": True, "missed": True, "counted": 0}


def synthetic_calls() -> dict[str, object]:
    import builtins

    from sglang_moe_autotune import plugin

    given = builtins.given  # type: ignore[attr-defined]
    look = given.config.try_get_optimal_moe_config
    counted = len(given.serving.lookup.missed)
    weight = (8 * 64, 32, 2048)  # LoRA's virtual experts pass one weight twice
    lora = look(weight, weight, 1, None, 4, return_down_config=False)
    try:
        look((8, 16), (8, 16), 1, None, 4)
        raised = ""
    except ValueError as error:
        raised = type(error).__name__
    return {
        "lora": sorted(lora),
        "raised": raised,
        "counted": len(given.serving.lookup.missed) - counted,
        "broken": [f.name for f in plugin._FENCES.values() if f.broken],
    }


def test_c35_synthetic_lookups_pass_through_and_their_valueerror_reaches_the_caller(
    prepared: SchedulerProcess,
) -> None:
    told = prepared.run(synthetic_calls)
    assert told["lora"] == ["BLOCK_SIZE_K", "BLOCK_SIZE_M", "BLOCK_SIZE_N", "GROUP_SIZE_M"]
    assert told["raised"] == "ValueError"
    assert told["counted"] == 0
    assert told["broken"] == []


def no_side_effects() -> dict[str, object]:
    """C20: the stream is being captured, so a lookup may do nothing but look up."""
    import builtins
    import io
    import logging
    import os
    import threading

    import torch

    from sglang_moe_autotune import plugin

    given = builtins.given  # type: ignore[attr-defined]
    given.learn(48)
    given.ask(49)  # SGLang's own first look at its files, and ours at nothing

    class ForbiddenError(BaseException):
        """Not an Exception, so that no fence could hide it."""

    def forbidden(*args: object, **kwargs: object) -> None:
        raise ForbiddenError(repr(args)[:200])

    places = [
        (builtins, "open"), (io, "open"), (os, "open"), (os, "stat"), (os, "listdir"), (os, "scandir"), (os, "write"),
        (logging.Logger, "_log"), (threading.Thread, "start"), (threading, "Lock"),
        (torch, "empty"), (torch, "zeros"), (torch.cuda, "synchronize"), (torch.cuda, "is_available"),
        (torch.cuda, "current_device"), (torch.cuda, "is_current_stream_capturing"), (torch.cuda, "mem_get_info"),
    ]  # fmt: skip
    kept = [(where, name, getattr(where, name)) for where, name in places]
    for where, name in places:
        setattr(where, name, forbidden)
    try:
        hit, miss = given.ask(48), given.ask(49)
    finally:
        for where, name, value in kept:
            setattr(where, name, value)
    return {
        "hit": hit[0]["BLOCK_SIZE_M"],
        "miss": miss[0]["BLOCK_SIZE_M"],
        "broken": [f.name for f in plugin._FENCES.values() if f.broken],
    }


def test_c20_a_lookup_touches_no_file_lock_log_thread_or_device(prepared: SchedulerProcess) -> None:
    assert prepared.run(no_side_effects) == {"hit": 32, "miss": 16, "broken": []}


def origins() -> dict[str, object]:
    import builtins

    import triton

    from sglang_moe_autotune import releases
    from sglang_moe_autotune.shapes import MoeShape

    given = builtins.given  # type: ignore[attr-defined]
    version = f"triton_{triton.__version__.replace('.', '_')}"
    exact = min((releases.configs_folder() / version).glob("E=*.json"))
    given.config.get_device_name = lambda *_: exact.name.partition("device_name=")[2].partition(",")[0].removesuffix(
        ".json"
    )
    fields = dict(part.split("=", 1) for part in exact.stem.removesuffix("_down").split(",")[:2])
    e, n = int(fields["E"]), int(fields["N"])
    dtype = "fp8_w8a8" if "dtype=fp8_w8a8" in exact.name else None
    block = (128, 128) if "block_shape=[128, 128]" in exact.name else None
    found = releases.origin(MoeShape((e, 2 * n, 4096), (e, 4096, n), 8, dtype, block))
    given.config.get_device_name = lambda *_: "NVIDIA H200"
    own = given.config.get_moe_configs
    given.config.get_moe_configs = lambda *_args, **_kwargs: None  # 0.5.11 looks for four other versions only
    few = releases.origin(MoeShape((128, 1536, 2048), (128, 2048, 768), 8))
    given.config.get_moe_configs = own
    return {
        "few": few,
        "file": exact.name,
        "exact": found,
        "fallback": releases.origin(MoeShape((128, 1536, 2048), (128, 2048, 768), 8)),
        "miss": releases.origin(MoeShape((251, 512, 3072), (251, 3072, 256), 8)),
    }


def test_a_file_of_another_triton_is_told_from_one_of_this_triton(prepared: SchedulerProcess) -> None:
    told = prepared.run(origins)
    assert (told["exact"], told["fallback"], told["miss"]) == ("exact", "fallback", "miss"), told["file"]
    assert told["few"] == "miss", "a file that this release's lookup does not take is no fallback"


# -- heat ---------------------------------------------------------------------------------------------------------


def batches() -> list[object]:
    import builtins
    from types import SimpleNamespace

    from sglang_moe_autotune import plugin

    given = builtins.given  # type: ignore[attr-defined]
    given.serving.heat.take({})

    def run(rids: list[str], extend: int | None) -> None:
        mode = SimpleNamespace(is_extend=lambda: extend is not None)
        reqs = [SimpleNamespace(rid=rid) for rid in rids]
        plugin.on_batch(given.Stub(), SimpleNamespace(reqs=reqs, forward_mode=mode, extend_num_tokens=extend))

    run(["a", "b", "c"], None)
    run(["a"], 700)
    run(["HEALTH_CHECK_1"], 1)
    run(["HEALTH_CHECK_1"], None)
    run([], None)
    run(["a", "HEALTH_CHECK_2"], None)
    return sorted(given.serving.heat.take({"decode": [2, 4], "prefill": [512, 1024]}).items())


def test_batches_are_counted_once_and_health_probes_are_not(prepared: SchedulerProcess) -> None:
    assert prepared.run(batches) == [[2, 1], [4, 1], [1024, 1]]


# -- standing aside -----------------------------------------------------------------------------------------------


def stand_aside() -> dict[str, object]:
    import builtins
    import time
    from types import SimpleNamespace

    from sglang_moe_autotune import releases

    given = builtins.given  # type: ignore[attr-defined]
    serving = given.serving
    steps: list[bool] = []
    abandoned: list[int] = []

    class Counting:
        gpu_s = 0.0

        def step(self, deep_idle: bool) -> str:
            steps.append(deep_idle)
            return "worked"

        def abandon(self) -> None:
            abandoned.append(1)

        def add(self, *_: object) -> None: ...
        def heat(self, *_: object) -> None: ...

    serving.tuner = Counting()
    serving.lookup.take_seen(99)
    serving._last_request_s, serving._served = serving._last_request_s - 1000, False
    found: dict[str, object] = {}

    def look(name: str, change: object) -> None:
        stub = given.Stub()
        time.sleep(0.0011)  # after a pass with nothing to do the next ones rest
        stub.maybe_sleep_on_idle()
        serving.reason = ""
        before = len(steps)
        change(stub)  # type: ignore[operator]
        stub.maybe_sleep_on_idle()
        found[name] = [len(steps) - before, stub.slept, serving.reason]

    look("nothing", lambda stub: None)
    look("paused", lambda stub: setattr(stub, "_engine_paused", True))
    look("released", lambda stub: stub.weight_updater.offload_tags.add("weights"))
    look("updating", lambda stub: setattr(stub.weight_updater, "_session", object()))
    look("profiling", lambda stub: setattr(stub.profiler_manager, "profile_in_progress", True))

    def stub_of(change: object) -> object:
        stub = given.Stub()
        change(stub)  # type: ignore[operator]
        return stub

    def old_release(stub: object) -> None:
        del stub.weight_updater  # type: ignore[attr-defined]
        stub.offload_tags = {"kv_cache"}  # type: ignore[attr-defined]

    look("released-0.5.11", old_release)

    def silent_release(stub: object) -> None:
        stub.weight_updater = SimpleNamespace(_session=None)  # type: ignore[attr-defined]

    try:
        releases.why_not_now(stub_of(silent_release))
        found["silent"] = "said nothing"
    except AttributeError as error:
        found["silent"] = str(error)
    found["abandoned"] = len(abandoned)
    serving.tuner = None
    return found


def test_c38_nothing_is_launched_while_the_engine_forbids_it_and_sglang_sleeps_as_ever(
    prepared: SchedulerProcess,
) -> None:
    told = prepared.run(stand_aside)
    assert told.pop("nothing") == [1, 0, ""]
    assert told.pop("abandoned") == 5
    assert "offload_tags" in told.pop("silent")  # not to know must never pass for a yes
    assert all(row[:2] == [0, 1] for row in told.values()), told
    assert len({row[2] for row in told.values()}) == 4  # one reason each; the two kinds of release share theirs
    assert all(row[2] for row in told.values())


def control_requests() -> dict[str, object]:
    import builtins

    from sglang.srt.managers import io_struct

    from sglang_moe_autotune import plugin

    given = builtins.given  # type: ignore[attr-defined]
    abandoned: list[int] = []

    class Open:
        def abandon(self) -> None:
            abandoned.append(1)

    given.serving.tuner = Open()
    found: dict[str, object] = {}
    names = [n for n in dir(io_struct) if n.endswith(("ReqInput", "Req")) and isinstance(getattr(io_struct, n), type)]
    for name in names:
        before = len(abandoned)
        plugin.on_requests(given.Stub(), [type(name, (), {})()])  # a request is known by its class's name
        found[name] = len(abandoned) - before
    given.serving.tuner = None
    return found


def test_a_request_that_moves_weights_or_caches_closes_the_bench_first(prepared: SchedulerProcess) -> None:
    told = prepared.run(control_requests)
    closing = {name for name, closed in told.items() if closed}
    needed = {"PauseGenerationReqInput", "ReleaseMemoryOccupationReqInput", "UpdateWeightFromDiskReqInput"}
    needed |= {"UpdateWeightsFromTensorReqInput", "UpdateWeightsFromDistributedReqInput", "LoadLoRAAdapterReqInput"}
    needed |= {"FlushCacheReqInput", "ResumeMemoryOccupationReqInput"}
    assert needed <= closing
    assert not closing & {"TokenizedGenerateReqInput", "TokenizedEmbeddingReqInput", "GetInternalStateReq", "AbortReq"}


def faults() -> dict[str, object]:
    import builtins

    from sglang_moe_autotune import plugin
    from sglang_moe_autotune.serving import Serving
    from sglang_moe_autotune.settings import Settings

    given = builtins.given  # type: ignore[attr-defined]
    serving = Serving(Settings(), hooks=plugin.hooks_in_place)
    serving._last_request_s, serving._served = serving._last_request_s - 1000, False

    class Failing:
        gpu_s = 0.0
        steps = 0

        def step(self, deep_idle: bool) -> str:
            self.steps += 1
            raise RuntimeError("planted in a step")

        def abandon(self) -> None: ...

    tuner = serving.tuner = Failing()
    kept, plugin._serving = plugin._serving, serving
    fence = plugin._FENCES[plugin.IDLE.name]
    states = []
    try:
        for _ in range(8):
            given.Stub().maybe_sleep_on_idle()
            states.append(serving.state)
    finally:
        plugin._serving, fence.broken = kept, False
    return {"steps": tuner.steps, "states": states, "reason": serving.reason}


def test_one_fault_of_a_bench_ends_its_job_and_five_in_a_row_end_tuning_with_a_word(prepared: SchedulerProcess) -> None:
    told = prepared.run(faults)
    assert told["steps"] == 5
    assert told["states"][0] == "tuning"
    assert told["states"][4:] == ["off"] * 4
    assert "the log has it" in told["reason"]


def unlike_layers() -> dict[str, object]:
    import builtins
    from types import SimpleNamespace

    from sglang_moe_autotune import plugin
    from sglang_moe_autotune.layers import LiveLayer, call_key
    from sglang_moe_autotune.records import Evidence, Record
    from sglang_moe_autotune.serving import Serving
    from sglang_moe_autotune.settings import Settings
    from sglang_moe_autotune.shapes import MoeShape

    given = builtins.given  # type: ignore[attr-defined]
    serving = Serving(Settings(), hooks=plugin.hooks_in_place)
    shape = MoeShape(*given.shape)
    evidence = Evidence(100.0, 80.0, 0.2, 0.1, 0.3, 24, 10, 0.1)
    record = Record(shape, 24, "faster", given.pair, given.pair, evidence, source="pinned")
    contents = SimpleNamespace(records={(shape, 24): record})
    serving.store = SimpleNamespace(contents=contents, path="")
    serving.overlay.source = "learned"
    key = call_key(shape)

    def layer(*variant: str) -> LiveLayer:
        return LiveLayer(SimpleNamespace(), key, "bfloat16", False, variant)  # type: ignore[arg-type]

    serving.overlay.layers.add([layer(), layer()])
    serving.overlay.publish_stored(serving.store.contents)
    first = sorted(serving.lookup.rows().get(key, {}))
    serving.overlay.layers.add([layer("bias")])  # a draft model of another kind, loaded later, makes the same call
    serving.overlay.publish_stored(serving.store.contents)
    return {"first": first, "then": sorted(serving.lookup.rows().get(key, {})), "shape": serving.overlay.shape_of(key)}


def test_a_row_is_not_served_to_layers_of_another_kind_that_make_the_same_call(prepared: SchedulerProcess) -> None:
    assert prepared.run(unlike_layers) == {"first": [24], "then": [], "shape": None}


def restarted() -> dict[str, object]:
    import builtins
    from types import SimpleNamespace

    from sglang_moe_autotune import plugin
    from sglang_moe_autotune.layers import LiveLayer, call_key
    from sglang_moe_autotune.lookup import Missed
    from sglang_moe_autotune.records import Evidence, Record
    from sglang_moe_autotune.serving import Serving
    from sglang_moe_autotune.settings import Settings
    from sglang_moe_autotune.shapes import MoeShape

    given = builtins.given  # type: ignore[attr-defined]
    serving = Serving(Settings(), hooks=plugin.hooks_in_place)
    shape = MoeShape(*given.shape)
    evidence = Evidence(100.0, 80.0, 0.2, 0.1, 0.3, 24, 10, 0.1)
    record = Record(shape, 24, "faster", given.pair, given.pair, evidence, source="learned")
    notes = []

    def submit(*, note: object) -> None:
        notes.append(note)

    serving.store = SimpleNamespace(
        contents=SimpleNamespace(records={(shape, 24): record}), path="", submit=submit
    )
    serving.overlay.source = "learned"
    serving.tuner = SimpleNamespace(add=lambda *_: None, heat=lambda *_: None)
    key = call_key(shape)
    serving.overlay.layers.add([LiveLayer(SimpleNamespace(), key, "bfloat16", False, ())])  # type: ignore[arg-type]
    serving.overlay.publish_stored(serving.store.contents)
    for M in (7, 9):  # noqa: N806 - two misses of one shape are one note
        serving.intake.add(serving.tuner, Missed(key, M, given.pair))
    passes = 0
    while serving.intake.notes.step(0.0):
        passes += 1
    return {"passes": passes, "notes": [note.shape == shape and bool(note.baselines) for note in notes]}


def test_a_restarted_server_notes_a_shape_that_it_has_records_of_too(prepared: SchedulerProcess) -> None:
    told = prepared.run(restarted)
    assert told["passes"] > 0
    assert told["notes"] == [True]


def no_layers() -> dict[str, object]:
    import builtins
    import logging
    from types import SimpleNamespace

    import torch

    from sglang_moe_autotune import plugin
    from sglang_moe_autotune.serving import Serving
    from sglang_moe_autotune.settings import Settings

    given = builtins.given  # type: ignore[attr-defined]
    serving = Serving(Settings(), hooks=plugin.hooks_in_place)
    kept, plugin._serving = plugin._serving, serving
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("sglang.moe_autotune")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        plugin.on_load(None, SimpleNamespace(model=model, dtype=torch.bfloat16, server_args=None))
        given.ask(5)
        stub = given.Stub()
        stub.maybe_sleep_on_idle()
    finally:
        plugin._serving = kept
        log.removeHandler(handler)
    (miss,) = serving.lookup.take_seen(99)
    told = {"slept": stub.slept, "shape": serving.overlay.shape_of(miss.key), "log": messages}
    return {**told, "tuner": serving.tuner is None, "store": serving.store is None}


def test_c40_a_model_without_a_triton_layer_costs_nothing_and_records_nothing(prepared: SchedulerProcess) -> None:
    told = prepared.run(no_layers)
    (message,) = told.pop("log")
    assert "hooks in place; shapes on the Triton path: 0; learned rows: 0" in message
    assert told == {"slept": 1, "shape": None, "tuner": True, "store": True}


def several_ranks() -> list[str]:
    from types import SimpleNamespace

    from sglang_moe_autotune import releases

    one = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "ep_size": 1, "nnodes": 1}
    rows = [{}, {"tp_size": 2}, {"tp_size": 4, "ep_size": 4}]
    rows += [{"pp_size": 2}, {"dp_size": 2}, {"nnodes": 2}, {"attn_cp_size": 2}, {"moe_dp_size": 2}]
    rows += [{"enable_dp_attention": True}, {"elastic_ep_backend": "mooncake"}, {"enable_lora": True}]
    rows += [{"disaggregation_mode": "prefill"}, {"enable_fused_moe_sum_all_reduce": True}]
    return [releases.why_never(SimpleNamespace(**{**one, **row})) for row in rows]


def test_a_server_that_is_not_shown_to_be_safe_says_why_it_never_tunes(prepared: SchedulerProcess) -> None:
    single, tensor, expert, *others = prepared.run(several_ranks)
    assert single == tensor == expert == ""
    assert all(others)
    assert len(set(others)) == len(others)  # each says its own reason, in one line
    assert not any("\n" in why for why in others)


def filler_batch() -> list[bool]:
    import builtins
    from types import SimpleNamespace

    from sglang_moe_autotune import plugin

    given = builtins.given  # type: ignore[attr-defined]
    serving = given.serving
    found = []
    for rids in (["HEALTH_CHECK_1"], []):
        serving._served = False
        mode = SimpleNamespace(is_extend=lambda: False, is_idle=lambda: True)
        reqs = [SimpleNamespace(rid=rid) for rid in rids]
        plugin.on_batch(given.Stub(), SimpleNamespace(reqs=reqs, forward_mode=mode, extend_num_tokens=None))
        found.append(serving._served)
    found.append(serving.heat.take({}) == {})
    return found


def test_c26_a_filler_batch_is_not_idle_time_a_health_probe_is_and_neither_is_heat(prepared: SchedulerProcess) -> None:
    assert prepared.run(filler_batch) == [False, True, True]


def announce() -> dict[str, object]:
    import builtins
    from types import SimpleNamespace

    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_moe_autotune import plugin, releases

    given = builtins.given  # type: ignore[attr-defined]
    votes = given.serving.votes

    class Graphs:
        def ready(self) -> bool:
            return True

    untouched = [plugin.on_receive(found) for found in (None, [], [object()])]
    votes.ask([64, 8])
    votes.consider(votes.ballot, Graphs())
    given.serving.peers, peers = SimpleNamespace(ranks=SimpleNamespace(votes={})), given.serving.peers
    given.serving._idled = False
    running = plugin.on_receive([])  # a batch ran since the last idle pass
    given.serving._idled = True
    busy = plugin.on_receive([object()]), plugin.on_receive(None), running
    number = votes.ballot.number
    (request,) = plugin.on_receive([])
    told = {"number": number, "untouched": untouched, "busy": busy, "rid": request.rid, "again": plugin.on_receive([])}
    given.serving.peers = peers
    told["type"] = type(request) is AbortReq
    told["read"] = releases.announced([object(), request, AbortReq(rid="a user's")])
    told["sizes"] = votes.start(request.rid)
    # A rank that does not know the message: SGLang's own handler looks for a request of that name, and finds none.
    waiting = [SimpleNamespace(rid="a"), SimpleNamespace(rid="b")]
    aborted: list[object] = []
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid="c", finished=lambda: False, to_finish=None)])
    stock = SimpleNamespace(
        chunked_req=None, waiting_queue=list(waiting), dllm_config=None, mm_receiver=None, rust_server=None,
        grammar_manager=SimpleNamespace(abort_requests=aborted.append),
        disaggregation_mode=None, running_batch=batch, cur_batch=batch, cur_batch_for_debug=batch, last_batch=None,
        enable_overlap=False, _iter_running_requests=lambda: iter(()), send_abort_output=aborted.append,
        collect_inflight_reqs=lambda: batch.reqs, ps=SimpleNamespace(pp_size=1), pp_size=1,
    )  # fmt: skip
    Scheduler.abort_request(stock, request)
    told["left_alone"] = stock.waiting_queue == waiting and batch.reqs[0].to_finish is None
    return told


def test_a_start_of_a_recapture_travels_as_a_request_that_does_nothing_where_it_is_not_known(
    prepared: SchedulerProcess,
) -> None:
    told = prepared.run(announce)
    assert told["untouched"] == [None] * 3
    assert told["busy"] == [None] * 3
    assert told["rid"] == f"SGLANG_MOE_AUTOTUNE_RECAPTURE:{told['number']}:8,64"
    assert told["again"] is None
    assert told["type"]
    assert told["read"] == [told["rid"]]
    assert told["sizes"] == [8, 64]
    assert told["left_alone"]


def resolved_arguments() -> dict[str, object]:
    import pickle
    from types import SimpleNamespace

    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.server_args import ServerArgs

    from sglang_moe_autotune import releases

    asked = ServerArgs(model_path="dummy")
    before = releases.why_never(asked)
    declare_resolution(asked, "first", enable_lora=False, speculative_num_draft_tokens=3)
    declare_resolution(asked, "second", enable_lora=True, ep_size=4)
    asked = pickle.loads(pickle.dumps(asked))  # noqa: S301 - our own; this is how a scheduler gets it
    scheduler = SimpleNamespace(server_args=asked)
    requests = [SimpleNamespace(rid=str(i)) for i in range(5)]
    batch = SimpleNamespace(reqs=requests, forward_mode=SimpleNamespace(is_extend=lambda: False))
    return {
        "attribute": asked.enable_lora,
        "before": before,
        "lora": releases.setting(asked, "enable_lora"),
        "ranks": releases.ranks(asked),
        "never": releases.why_never(asked),
        "batch": releases.batch_tokens(scheduler, batch),
        "absent": releases.setting(asked, "no_such_argument", 7),
    }


def test_server_arguments_are_read_as_sglang_resolved_them_not_as_the_user_wrote_them(
    prepared: SchedulerProcess,
) -> None:
    skip_unless("arguments", "resolved beside the input", "writes what it decides into the attributes themselves")
    told = prepared.run(resolved_arguments)
    assert told["attribute"] is None, "SGLang writes its decisions into the record again"
    assert told["before"] == ""
    assert told["lora"] is True
    assert told["ranks"] == 4
    assert "LoRA" in told["never"]
    assert told["batch"] == ["decode", 15]
    assert told["absent"] == 7


def deterministic() -> dict[str, object]:
    import importlib

    from sglang_moe_autotune import plugin, releases
    from sglang_moe_autotune.lookup import CallKey
    from sglang_moe_autotune.shapes import ConfigPair, KernelConfig

    releases.publish_server_args(enable_deterministic_inference=True)
    config = importlib.import_module(releases.LOOKUP.module)
    config.get_device_name = lambda *_: "NVIDIA H200"
    serving = plugin.serving()
    shape = ((256, 512, 3072), (256, 3072, 256), 8, None)
    row = KernelConfig(32, 64, 128, 1, 4, 3)
    serving.lookup.publish([(CallKey(*shape, None, False), 16, ConfigPair(row, row))])
    plugin.on_load(None, None)
    answer = config.try_get_optimal_moe_config(*shape, 16, return_down_config=True)
    return {
        "fixed": answer == releases.stock_lookup()(*shape, 16, return_down_config=True),
        "tile": answer[0],
        "missed": len(serving.lookup.missed),
        "broken": [f.name for f in plugin._FENCES.values() if f.broken],
    }


def test_c28_deterministic_inference_keeps_sglangs_fixed_tile_and_records_nothing(
    start_scheduler: Callable[..., SchedulerProcess],
) -> None:
    told = start_scheduler().run(deterministic)
    assert told["fixed"]
    assert told["tile"]["BLOCK_SIZE_M"] == 64
    assert told["missed"] == 0
    assert told["broken"] == []


# -- fences (last: they break the hooks of the shared process) ----------------------------------------------------


def break_hooks() -> dict[str, object]:
    import builtins
    from types import SimpleNamespace

    from sglang_moe_autotune import plugin, releases

    given = builtins.given  # type: ignore[attr-defined]
    serving = given.serving

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    given.learn(160)
    stub = given.Stub()
    serving.lookup.answer, serving.idle, serving.batch, serving.loaded = fail, fail, fail, fail
    serving.requests, serving.state, serving.tuner = fail, "idle", None
    answers = [given.ask(160) == given.ask(160, releases.stock_lookup()) for _ in range(3)]
    for _ in range(3):
        stub.maybe_sleep_on_idle()
        plugin.on_batch(stub, SimpleNamespace())
        plugin.on_load(None, None)
    for _ in range(3):
        plugin.on_requests(stub, [object()])
        plugin.on_requests(stub, [])
    return {"answers": answers, "slept": stub.slept, "state": [serving.state, serving.reason]}


def test_a_fault_of_ours_is_logged_once_a_hook_and_sglang_goes_on(prepared: SchedulerProcess) -> None:
    told = prepared.run(break_hooks)
    assert told["state"] == ["off", "tuning ended with a fault; the log has it"]
    assert told["answers"] == [True] * 3
    assert told["slept"] == 3
    for name, times in (("lookup", 1), ("idle", 2), ("batch", 1), ("load", 1), ("request", 1)):
        # the idle fence was broken, and mended for the tests after it, once before
        assert prepared.log().count(f"failed in its {name} hook") == times


def test_mode_off_registers_nothing(tmp_path: Path) -> None:
    code = """
    import sys
    sys.modules["sglang.srt.managers.scheduler"] = sys
    import multiprocessing
    multiprocessing.parent_process = lambda: object()
    from sglang_moe_autotune import plugin
    plugin.register()
    print("sglang_moe_autotune.serving" in sys.modules, "torch" in sys.modules)
    """
    environ = {**os.environ, "SGLANG_MOE_AUTOTUNE_MODE": "off"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
