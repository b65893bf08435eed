"""What a scheduler's idle passes do, in SGLang's own idle method with stub pools and a clock that stands still."""
# ruff: noqa: PLC0415 - what runs in the other process imports there

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_moe_autotune import idle_time
from sglang_moe_autotune.idle_time import IdleTime

if TYPE_CHECKING:
    from scheduler_process import SchedulerProcess

LIMITS = Path(__file__).parent.parent / "docs" / "limits.md"


def prepare() -> None:
    """``world.Scheduler()``: SGLang's ``on_idle`` and all it calls of the class, over stub parts, with a fake clock."""
    import builtins
    from types import SimpleNamespace

    from sglang.srt.managers import scheduler as module

    from sglang_moe_autotune import beat, plugin, releases, serving

    server_args = releases.publish_server_args()
    clock = SimpleNamespace(now=1000.0)
    serving.time = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=lambda: clock.now, time=lambda: clock.now)
    beat.monotonic = serving.time.monotonic

    class Tuner:
        """Counts steps; each takes ``takes_s`` of the clock."""

        def __init__(self, result: str = "worked", takes_s: float = 0.0004) -> None:
            self.result, self.takes_s, self.gpu_s = result, takes_s, 0.0
            self.steps: list[bool] = []
            self.abandoned = self.to_give = 0

        def step(self, deep_idle: bool) -> str:
            self.steps.append(deep_idle)
            clock.now += self.takes_s
            self.gpu_s += self.takes_s if self.result == "worked" else 0.0
            return self.result

        def abandon(self) -> None:
            self.abandoned += 1

        def give_way(self) -> bool:
            self.to_give -= self.to_give > 0
            return not self.to_give

        def add(self, *_: object) -> None: ...
        def heat(self, *_: object) -> None: ...

    absent = {"weight_updater", "ipc_channels", "tp_worker", "rust_server", "offload_tags", "_session"}

    class Parts:
        """Stands for every part of a scheduler that the idle method calls: it, and anything of it, can be called."""

        def __call__(self, *_: object, **__: object) -> object:
            return Parts()

        def __bool__(self) -> bool:
            return False

        def __enter__(self) -> object:
            return self

        def __exit__(self, *_: object) -> None: ...

        def __getattr__(self, name: str) -> object:
            if name.startswith("__"):
                raise AttributeError(name)
            return (lambda *_, **__: (False, [])) if name == "_check_all_pools" else Parts()

    class Scheduler:
        """The methods of SGLang's class that an idle pass runs through; its attributes are stubs."""

        def __init__(self, **changes: object) -> None:
            self.server_args = SimpleNamespace(**{**vars(server_args), **changes}) if changes else server_args
            self._engine_paused = False
            self.weight_updater = SimpleNamespace(offload_tags=set(), _session=None)
            self.profiler_manager = SimpleNamespace(profile_in_progress=False)
            self.slept, self.idle, self._last_stall_publish_ts = 0, True, 0.0
            self.idle_sleeper = SimpleNamespace(maybe_sleep=self._sleep)
            self.enable_unified_memory = self.enable_hisparse = False

        def _sleep(self) -> None:
            self.slept += 1

        def is_fully_idle(self, for_health_check: bool = False) -> bool:
            return self.idle

        def __getattr__(self, name: str) -> object:
            if name in absent or name.startswith("metrics_collector"):
                raise AttributeError(name)
            return Parts()

        maybe_sleep_on_idle = module.Scheduler.maybe_sleep_on_idle
        on_idle = module.Scheduler.on_idle
        publish_load_snapshot = lambda *_, **__: None  # noqa: E731

    def fresh(**changes: object) -> object:
        """A plugin state that has just been made, as this process's own."""
        from sglang_moe_autotune.settings import Settings

        state = serving.Serving(Settings(**changes), plugin.hooks_in_place)
        state._last_request_s = clock.now - 1000
        state.tuner = Tuner()
        plugin._serving = state
        for fence in plugin._FENCES.values():
            fence.broken = False
        return state

    builtins.world = SimpleNamespace(  # type: ignore[attr-defined]
        Scheduler=Scheduler, Tuner=Tuner, clock=clock, fresh=fresh, plugin=plugin, module=module
    )


@pytest.fixture(scope="module")
def world(scheduler: SchedulerProcess) -> SchedulerProcess:
    scheduler.run(prepare)
    return scheduler


# -- standing aside -----------------------------------------------------------------------------------------------


def aside(name: str) -> list[object]:
    """Slices of ten idle passes under a condition, then of ten after it ended; SGLang's sleeps; the reason."""
    import builtins
    import os

    from sglang_moe_autotune import releases

    world = builtins.world  # type: ignore[attr-defined]
    state = world.fresh()
    flags = {
        "pipeline parallelism": {"pp_size": 2}, "data parallelism": {"dp_size": 2},
        "several nodes": {"nnodes": 2},
        "DP attention": {"dp_size": 2, "enable_dp_attention": True},
        "LoRA": {"enable_lora": True}, "disaggregation": {"disaggregation_mode": "decode"},
        "fused all-reduce": {"enable_fused_moe_sum_all_reduce": True},
    }  # fmt: skip
    scheduler = world.Scheduler(**flags.get(name, {}))
    # the object, the attribute, its value while the condition holds; None: it is not there
    held = {
        "paused": (scheduler, "_engine_paused", True),
        "released": (scheduler.weight_updater, "offload_tags", {"weights"}),
        "released, 0.5.11": (scheduler, "weight_updater", None),
        "updating": (scheduler.weight_updater, "_session", object()),
        "profiling": (scheduler.profiler_manager, "profile_in_progress", True),
        "capturing": (releases, "capturing", lambda: True),
        "switched off": (state.switch, "asked", "off"),
        "died": (state, "died", "2 processes died"),
        "budget": (state.budget, "_left", -1.0),
        "not fully idle": (scheduler, "idle", False),
    }
    owner, attribute, value = held.get(name, (scheduler, "idle", True))
    kept = getattr(owner, attribute)
    if value is None:
        delattr(owner, attribute)
        scheduler.offload_tags = {"kv_cache"}
    else:
        setattr(owner, attribute, value)
    if name == "crash on late loads":
        os.environ["SGLANG_CRASH_ON_TRITON_LOAD_AFTER_READY"] = "1"
    tuner = state.tuner
    for _ in range(10):
        scheduler.on_idle()
    during, slept, reason, abandoned = len(tuner.steps), scheduler.slept, state.reason, tuner.abandoned
    setattr(owner, attribute, 100.0 if name == "budget" else kept)
    os.environ.pop("SGLANG_CRASH_ON_TRITON_LOAD_AFTER_READY", None)
    world.clock.now += 0.001  # after a pass with nothing to do the next ones rest
    for _ in range(10):
        scheduler.on_idle()
    return [during, slept, reason, len(tuner.steps) - during, abandoned]


FOR_A_TIME = {
    "paused": "the engine is paused",
    "released": "weights or caches are released",
    "released, 0.5.11": "weights or caches are released",
    "updating": "weights are being updated",
    "profiling": "the profiler is on",
    "capturing": "graphs are being captured",
    "switched off": "switched to 'off' by a request",
    "died": "2 processes died",
    "budget": "this hour's 600 GPU seconds are spent",
}
FOR_GOOD = {
    "pipeline parallelism": "pipeline parallelism",
    "data parallelism": "data parallelism: that its ranks agree",
    "DP attention": "DP attention: a rank without requests",
    "several nodes": "several nodes: that their ranks agree",
    "LoRA": "LoRA adapters can be loaded",
    "disaggregation": "disaggregated prefill and decode",
    "fused all-reduce": "--enable-fused-moe-sum-all-reduce",
    "crash on late loads": "SGLANG_CRASH_ON_TRITON_LOAD_AFTER_READY",
}


@pytest.mark.sglang
@pytest.mark.parametrize("name", FOR_A_TIME)
def test_c38_nothing_is_launched_while_a_condition_holds_and_tuning_goes_on_after_it(
    world: SchedulerProcess, name: str
) -> None:
    during, slept, reason, after, abandoned = world.run(aside, name)
    assert during == 0
    assert slept == 10  # SGLang's own sleep is never taken from it while nothing is tuned
    assert reason == FOR_A_TIME[name]
    assert after == 10
    assert abandoned == 1  # the device is let go when it begins, once


@pytest.mark.sglang
@pytest.mark.parametrize("name", FOR_GOOD)
def test_c26_a_server_that_is_not_shown_to_be_safe_never_tunes(world: SchedulerProcess, name: str) -> None:
    during, slept, reason, after, _ = world.run(aside, name)
    assert (during, slept, after) == (0, 10, 0)
    assert FOR_GOOD[name] in reason


def second_model() -> list[object]:
    import builtins
    from types import SimpleNamespace

    from sglang_moe_autotune import serving

    world = builtins.world  # type: ignore[attr-defined]
    state = world.fresh()
    shapes, prepared = ["the target's"], []
    state.tuner.experience = prepared.append
    kept = serving.find_layers, serving.likely
    serving.find_layers, serving.likely = (lambda *_: iter(())), (lambda _: iter(shapes))
    try:
        for more in ((), ("the draft model's",)):
            shapes.extend(more)
            state.loaded(SimpleNamespace(model=None, dtype=None))
    finally:
        serving.find_layers, serving.likely = kept
    return prepared


@pytest.mark.sglang
def test_the_spaces_of_a_second_model_are_made_when_it_is_loaded_too(world: SchedulerProcess) -> None:
    assert world.run(second_model) == ["the target's", "the target's", "the draft model's"]


def given_back() -> list[object]:
    import builtins

    world = builtins.world  # type: ignore[attr-defined]
    found = []
    for urgent in (False, True):
        state, scheduler = world.fresh(), world.Scheduler()
        scheduler.on_idle()
        state.tuner.to_give = 4
        state.switch.asked, scheduler._engine_paused = "off", urgent
        passes = []
        for _ in range(5):
            world.clock.now += 0.001
            before = sum(state.watch.counts)
            scheduler.on_idle()
            passes.append([sum(state.watch.counts) - before, state.tuner.abandoned, state.state])
        found.append([passes, len(state.tuner.steps)])
    return found


@pytest.mark.sglang
def test_a_bench_is_given_back_in_passes_that_count_unless_the_engine_needs_it_at_once(world: SchedulerProcess) -> None:
    (patient, steps), (urgent, _) = world.run(given_back)
    assert patient == [[1, 0, "tuning"]] * 3 + [[0, 1, "standing aside"]] * 2
    assert steps == 1
    assert urgent == [[0, 1, "standing aside"]] * 5


def on_two_ranks() -> dict[str, object]:
    import builtins
    from types import SimpleNamespace

    world = builtins.world  # type: ignore[attr-defined]
    state = world.fresh()
    scheduler = world.Scheduler(tp_size=2, port=30123)
    scheduler.ps = SimpleNamespace(tp_rank=1)
    for _ in range(10):
        scheduler.on_idle()
    found: dict[str, object] = {"place": tuple(state.place), "steps": len(state.tuner.steps)}
    told: list[tuple[str, str]] = []

    def step(now_s: float, *, deep_idle: bool) -> str:
        told.append(("step", ""))
        world.clock.now += 0.001
        return "worked"

    state.peers = SimpleNamespace(
        step=step,
        stand_aside=lambda reason: told.append(("aside", reason)),
        abandon=lambda: told.append(("abandon", "")),
    )
    for level in ("on", "rows", "on"):
        state.switch.asked = level
        for _ in range(2):
            world.clock.now += 0.001
            scheduler.on_idle()
    return found | {"told": told}


@pytest.mark.sglang
def test_tensor_parallelism_tunes_and_the_other_ranks_are_told_when_one_is_switched_off(
    world: SchedulerProcess,
) -> None:
    found = world.run(on_two_ranks)
    assert found["place"] == [1, 2, 30123]
    assert found["steps"] == 20, "two slices of 0.4 ms begin in a pass of deep idle"
    off = ["aside", "switched to 'rows' by a request"]
    assert found["told"] == [["step", ""]] * 2 + [["abandon", ""], off, off] + [["step", ""]] * 2


@pytest.mark.sglang
def test_a_scheduler_that_is_not_fully_idle_does_not_reach_the_plugin(world: SchedulerProcess) -> None:
    during, slept, _, after, _ = world.run(aside, "not fully idle")
    assert (during, slept, after) == (0, 0, 10)


def test_each_condition_is_a_row_of_the_table_on_the_page_of_limits() -> None:
    text = " ".join(LIMITS.read_text(encoding="utf-8").split())
    for says in {*FOR_A_TIME.values(), *FOR_GOOD.values()} - {"2 processes died", FOR_A_TIME["budget"]}:
        said = re.sub("'off'.*", "", says).strip()
        assert said in text, f"docs/limits.md has no row for: {says}"


# -- windows, sleep, health probes -----------------------------------------------------------------------------------


def window() -> dict[str, object]:
    import builtins
    from types import SimpleNamespace

    world = builtins.world  # type: ignore[attr-defined]
    state = world.fresh()
    provider = SimpleNamespace(slice_us=None)
    state.device = SimpleNamespace(provider=provider)
    scheduler = world.Scheduler()
    found: dict[str, object] = {}

    def batch(*rids: str) -> None:
        mode = SimpleNamespace(is_extend=lambda: False)
        reqs = [SimpleNamespace(rid=rid) for rid in rids]
        world.plugin.on_batch(scheduler, SimpleNamespace(reqs=reqs, forward_mode=mode))

    def passes(count: int, step_s: float = 0.0) -> list[object]:
        before, slept = len(state.tuner.steps), scheduler.slept
        for _ in range(count):
            scheduler.on_idle()
            world.clock.now += step_s
        return [len(state.tuner.steps) - before, scheduler.slept - slept, state.state]

    batch("user-1")
    found["grace"] = passes(4, 0.01)
    world.clock.now += 0.02
    found["after the grace"] = passes(3)
    found["first slices"] = provider.slice_us
    passes(20)
    found["later slices"] = provider.slice_us
    found["deep"] = [any(state.tuner.steps), state.tuner.steps[-1]]
    batch("HEALTH_CHECK_7")
    found["health probe"] = passes(3)
    world.clock.now += 11
    passes(1)
    found["deep idle"] = state.tuner.steps[-1]
    batch("HEALTH_CHECK_8")
    passes(1)
    found["deep idle after a health probe"] = state.tuner.steps[-1]
    batch("user-2", "HEALTH_CHECK_9")
    found["a user again"] = passes(1)
    world.clock.now += 1
    for result in ("waiting", "nothing"):
        state.tuner = world.Tuner(result)
        found[result] = passes(5, 0.001)
        world.clock.now += 1
    found["idle"] = [round(state.idle_time.total_s, 1), round(state.idle_time.deep_s, 1), state.idle_time.windows]
    return found


@pytest.mark.sglang
def test_a_window_begins_after_a_grace_with_small_slices_and_health_probes_are_no_requests(
    world: SchedulerProcess,
) -> None:
    told = world.run(window)
    assert told["grace"] == [0, 4, "busy"]
    assert told["after the grace"] == [3, 0, "tuning"]
    assert told["first slices"] == 200.0
    assert told["later slices"] == 500.0
    assert told["deep"] == [False, False]
    assert told["health probe"] == [3, 0, "tuning"]
    assert told["deep idle"] is True
    assert told["deep idle after a health probe"] is True
    assert told["a user again"] == [0, 1, "busy"]
    assert told["waiting"] == [5, 5, "waiting"]
    assert told["nothing"] == [5, 5, "idle"]  # --sleep-on-idle sleeps as ever
    assert told["idle"][2] == 2


def long_batches() -> dict[str, object]:
    """Steps of the first idle passes after batches that took so long, and the slices after a wait for binaries."""
    import builtins
    from types import SimpleNamespace

    world = builtins.world  # type: ignore[attr-defined]
    scheduler, found = world.Scheduler(), {}
    mode = SimpleNamespace(is_extend=lambda: True)
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid="user")], forward_mode=mode, extend_num_tokens=8192)
    for took_s in (0.02, 0.2, 12.0):
        state = world.fresh()
        world.plugin.on_batch(scheduler, batch)  # before it runs
        world.clock.now += took_s
        scheduler.on_idle()
        found[f"{took_s:g} s"] = [list(state.tuner.steps), state.state]
    state = world.fresh()
    provider = SimpleNamespace(slice_us=None)
    state.device = SimpleNamespace(provider=provider)
    state.tuner.result = "waiting"
    for _ in range(20):
        scheduler.on_idle()
    state.tuner.result, lengths = "worked", []
    for _ in range(9):
        scheduler.on_idle()
        lengths.append(provider.slice_us)
    found["lengths"] = lengths
    return found


@pytest.mark.sglang
def test_grace_and_deep_idle_count_from_the_end_of_a_batch(world: SchedulerProcess) -> None:
    told = world.run(long_batches)
    assert told["0.02 s"] == told["0.2 s"] == told["12 s"] == [[], "busy"]
    assert told["lengths"] == [200.0] * 8 + [500.0], "passes that launch nothing use up no small slices"


def faults_after_faults() -> dict[str, object]:
    import builtins
    from types import SimpleNamespace

    world = builtins.world  # type: ignore[attr-defined]
    scheduler = world.Scheduler()
    found: dict[str, object] = {}

    def abandon() -> None:
        raise RuntimeError("planted: the bench cannot be closed")

    state = world.fresh()
    world.plugin.on_batch(scheduler, SimpleNamespace(reqs=[SimpleNamespace(rid="a")]))  # without a forward mode
    for _ in range(3):
        scheduler.on_idle()
    found["batch"] = [state.state, state.reason, scheduler.slept]

    state = world.fresh()
    tuner, tuner.abandon = state.tuner, abandon
    del scheduler._engine_paused, scheduler.weight_updater
    scheduler.profiler_manager = None
    for _ in range(3):
        scheduler.on_idle()
    found["idle"] = [state.state, state.reason, len(tuner.steps), state.tuner is None]

    # A server that tunes nothing decodes on in deep idle's wake when the request hook breaks: nobody says "pause" then.
    state = world.fresh()
    state.state = "off"
    batch = SimpleNamespace(reqs=[SimpleNamespace(rid="a")], forward_mode=SimpleNamespace(is_extend=lambda: False))
    world.plugin.on_batch(scheduler, batch)
    found["held"] = [state.beat._requests is batch.reqs]
    state._idled, state.requests = True, abandon
    world.plugin.on_requests(scheduler, [SimpleNamespace()])
    found["held"] += [state.beat._requests, state._idled]
    world.plugin.on_batch(scheduler, batch)
    found["held"] += [state.beat._requests]
    return found


@pytest.mark.sglang
def test_a_fault_ends_tuning_and_a_second_one_in_tidying_up_is_none_of_sglangs(world: SchedulerProcess) -> None:
    told = world.run(faults_after_faults)
    assert told["batch"] == ["off", "when requests run can no longer be followed; the log has it", 3]
    assert told["idle"] == ["off", "tuning ended with a fault; the log has it", 0, True]
    assert told["held"] == [True, None, False, None], "no request is kept, and no start of a capture announced"


def resting() -> dict[str, object]:
    """Steps and SGLang's sleeps of passes 0.1 ms apart, after a pass that found nothing, and after what ends a rest."""
    import builtins
    from types import SimpleNamespace

    world = builtins.world  # type: ignore[attr-defined]
    state = world.fresh()
    scheduler = world.Scheduler()
    state.tuner = world.Tuner("nothing", takes_s=0.0)
    scheduler.on_idle()
    found: dict[str, object] = {}

    def passes(count: int) -> list[int]:
        before, slept = len(state.tuner.steps), scheduler.slept
        for _ in range(count):
            world.clock.now += 0.0001
            scheduler.on_idle()
        return [len(state.tuner.steps) - before, scheduler.slept - slept]

    found["a millisecond has ten"] = passes(100)
    found["state"] = [state.state, state.reason]
    found["idle"] = round(state.idle_time.total_s, 4)
    state.tuner.result = "worked"
    passes(10)
    found["work has no rests"] = passes(10)
    state.tuner.result = "waiting"
    found["nor have waits for a compile"] = passes(10)
    state.tuner.result = "nothing"
    passes(1)
    mode = SimpleNamespace(is_extend=lambda: False)
    probe = SimpleNamespace(reqs=[SimpleNamespace(rid="HEALTH_CHECK_1")], forward_mode=mode)
    for name, ends in (
        ("a batch", lambda: world.plugin.on_batch(scheduler, probe)),
        ("a message", lambda: world.plugin.on_requests(scheduler, [SimpleNamespace()])),
        ("the switch", state.switched),
    ):
        found[f"{name} not yet"] = passes(1)[0]
        ends()
        found[name] = passes(1)[0]
    abandoned, scheduler._engine_paused = state.tuner.abandoned, True
    found["standing aside"] = [passes(100), state.state, state.tuner.abandoned - abandoned]
    return found


@pytest.mark.sglang
def test_passes_with_nothing_to_do_rest_for_a_millisecond_and_whatever_brings_work_ends_it(
    world: SchedulerProcess,
) -> None:
    told = world.run(resting)
    steps, slept = told["a millisecond has ten"]
    assert 9 <= steps <= 10
    assert slept == 100
    assert told["state"] == ["idle", ""]
    assert told["idle"] == pytest.approx(0.01, abs=0.0011)
    assert told["work has no rests"] == [10, 0]
    assert told["nor have waits for a compile"] == [10, 10]
    for name in ("a batch", "a message", "the switch"):
        assert (told[f"{name} not yet"], told[name]) == (0, 1), name
    assert told["standing aside"] == [[0, 100], "standing aside", 1]


def collecting() -> list[list[bool]]:
    import builtins
    import gc

    world = builtins.world  # type: ignore[attr-defined]
    state = world.fresh()
    scheduler, told = world.Scheduler(), []
    kept, state.tuner.step = state.tuner.step, lambda deep_idle: told.append(gc.isenabled()) or kept(deep_idle)
    rows = []
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        scheduler.on_idle()
        rows.append([enabled, told[-1], gc.isenabled()])
    gc.enable()
    return rows


@pytest.mark.sglang
def test_no_garbage_is_collected_in_a_pass_and_collecting_is_as_it_was_after_it(world: SchedulerProcess) -> None:
    assert world.run(collecting) == [[True, False, True], [False, False, False]]


def over_its_bound() -> dict[str, object]:
    import builtins
    import logging

    world = builtins.world  # type: ignore[attr-defined]
    state = world.fresh()
    scheduler = world.Scheduler()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sglang.moe_autotune").addHandler(handler)
    state.tuner.takes_s = 0.003
    rows = []
    for _ in range(6):
        before = len(state.tuner.steps)
        scheduler.on_idle()
        rows.append([len(state.tuner.steps) - before, state.state, state.reason[:15]])
    world.clock.now += 10
    scheduler.on_idle()
    scheduler.on_idle()
    scheduler.on_idle()
    logging.getLogger("sglang.moe_autotune").removeHandler(handler)
    return {"rows": rows, "steps": len(state.tuner.steps), "pauses": state.watch.pauses,
            "log": [m for m in messages if "paused" in m], "abandoned": state.tuner.abandoned}  # fmt: skip


@pytest.mark.sglang
def test_tuning_pauses_itself_when_two_passes_were_too_long_and_says_so_once(world: SchedulerProcess) -> None:
    told = world.run(over_its_bound)
    assert told["rows"][0] == [1, "tuning", ""]
    assert [row[0] for row in told["rows"]] == [1, 1, 0, 0, 0, 0]
    assert told["rows"][-1][1:] == ["standing aside", "paused for 2 s:"]
    assert told["steps"] == 4
    assert told["pauses"] == 2
    assert len(told["log"]) == 1
    assert "3.0 ms of 2.0" in told["log"][0]
    assert told["rows"][-1][1] == "standing aside"
    assert told["abandoned"] == 2


# -- memory -------------------------------------------------------------------------------------------------------


def little_memory(free_mib: int) -> list[list[object]]:
    from types import SimpleNamespace

    import torch

    from sglang_moe_autotune import benchmark, releases
    from sglang_moe_autotune.scratch import scratch_bytes
    from sglang_moe_autotune.shapes import ConfigPair, KernelConfig, MoeShape

    kept = torch.cuda.mem_get_info, torch.cuda.current_device
    torch.cuda.mem_get_info, torch.cuda.current_device = lambda: (free_mib << 20, 140 << 30), lambda: 0
    shape = MoeShape((256, 512, 3072), (256, 3072, 256), 8)
    tile = KernelConfig(16, 32, 64, 1)
    lent = benchmark.Lent(lambda _: [1, 2], releases.invoke_function(), None, lambda: 0)
    provider = benchmark.DeviceProvider(lent, SimpleNamespace(recover=lambda: None), 128 << 20, 500.0)
    found = []
    try:
        for m in (16, 512, 4096, 16384):
            opened = provider.open(shape, m, ConfigPair(tile, tile))
            found.append([m, scratch_bytes(shape, m, flush=False) >> 20, opened if isinstance(opened, str) else ""])
    finally:
        torch.cuda.mem_get_info, torch.cuda.current_device = kept
    return found


@pytest.mark.sglang
@pytest.mark.parametrize("free_mib", [512, 200])
def test_c27_with_little_memory_it_tunes_what_fits_beyond_the_reserve_and_declines_the_rest(
    world: SchedulerProcess, free_mib: int
) -> None:
    rows = world.run(little_memory, free_mib)
    assert [why == "" for _, need_mib, why in rows] == [need_mib <= free_mib - 128 for _, need_mib, _ in rows]
    assert (rows[0][2] == "") is (free_mib == 512)
    assert f"{free_mib} MiB are free" in rows[-1][2]


def long_prefill() -> list[object]:
    import builtins
    from types import SimpleNamespace

    world = builtins.world  # type: ignore[attr-defined]
    state = world.fresh()
    found = []
    for scratch_mib, tokens in ((500, 8192), (500, 64), (100, 8192), (0, 8192)):
        state.device = SimpleNamespace(provider=SimpleNamespace(scratch_bytes=scratch_mib << 20, slice_us=0.0))
        before = state.tuner.abandoned
        mode = SimpleNamespace(is_extend=lambda: True)
        batch = SimpleNamespace(reqs=[SimpleNamespace(rid="user")], forward_mode=mode, extend_num_tokens=tokens)
        world.plugin.on_batch(world.Scheduler(), batch)
        found.append(state.tuner.abandoned - before)
    return found


@pytest.mark.sglang
def test_c27_a_long_prefill_gets_the_scratch_back_before_it_runs(world: SchedulerProcess) -> None:
    assert world.run(long_prefill) == [1, 0, 0, 0]


# -- a request that waits -----------------------------------------------------------------------------------------


def waiting_request() -> dict[str, object]:
    import builtins
    from types import SimpleNamespace

    import effort
    import zmq

    world = builtins.world  # type: ignore[attr-defined]
    from sglang_moe_autotune import releases
    from sglang_moe_autotune.doorbell import Doorbell

    context = zmq.Context()
    inbox, rpc = context.socket(zmq.PULL), context.socket(zmq.DEALER)
    port = inbox.bind_to_random_port("tcp://127.0.0.1")
    sender = context.socket(zmq.PUSH)
    sender.connect(f"tcp://127.0.0.1:{port}")
    channels = SimpleNamespace(recv_from_tokenizer=inbox, recv_from_rpc=rpc)
    state = world.fresh()
    scheduler = world.Scheduler()
    scheduler.ipc_channels = channels
    found: dict[str, object] = {}

    def passes(count: int) -> list[int]:
        before, slept = len(state.tuner.steps), scheduler.slept
        for _ in range(count):
            scheduler.on_idle()
        return [len(state.tuner.steps) - before, scheduler.slept - slept]

    found["nobody waits"] = passes(3)
    sender.send(b"a request")
    inbox.poll(2000)
    found["somebody waits"] = passes(3)
    found["received"] = inbox.recv(zmq.NOBLOCK).decode()
    found["received once"] = passes(3)
    bell = Doorbell(scheduler)
    bell.rung()
    found["lines"] = effort.lines(bell.rung)
    found["sockets"] = [
        len(releases.request_sockets(scheduler)),
        len(releases.request_sockets(SimpleNamespace(recv_from_tokenizer=inbox, recv_from_rpc=None))),
        len(releases.request_sockets(SimpleNamespace(ipc_channels=channels, rust_server=object()))),
        len(releases.request_sockets(SimpleNamespace(ipc_channels=channels, rust_server=None))),
        len(releases.request_sockets(SimpleNamespace(recv_from_tokenizer=None, recv_from_rpc=None))),
        len(releases.request_sockets(SimpleNamespace(ipc_channels=SimpleNamespace(recv_from_tokenizer=world)))),
    ]
    context.destroy(linger=0)
    return found


@pytest.mark.sglang
def test_c25_no_slice_begins_while_a_request_waits_in_a_socket(world: SchedulerProcess) -> None:
    told = world.run(waiting_request)
    assert told["nobody waits"] == [3, 0]
    assert told["somebody waits"] == [0, 3]
    assert told["received"] == "a request"
    assert told["received once"] == [3, 0]
    assert told["lines"] < 20
    assert told["sockets"] == [2, 1, 0, 2, 0, 0]


# -- idle time ----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0, 5), st.booleans(), st.booleans()), max_size=50))
def test_idle_time_is_never_more_than_the_time_that_passed(passes: list[tuple[float, bool, bool]]) -> None:
    idle, now = IdleTime(0.0), 0.0
    for gap, deep, queued in passes:
        now += gap
        idle.passed(now, 1.0, deep=deep, queued=queued)
    assert 0 <= idle.deep_s <= idle.total_s <= now + 1e-9
    assert idle.used_s <= idle.total_s
    assert idle.total_s <= len(passes)


def test_what_the_queue_needs_follows_from_what_ended() -> None:
    idle = IdleTime(0.0)
    assert idle.expected_s(4) is None
    for second in range(1, 11):
        idle.passed(float(second), float(second), deep=False, queued=True)
    idle.settled = 5
    assert idle.expected_s(4) == pytest.approx(8.0)
    assert idle.windows == 1
    idle.passed(12.0, 0.5, deep=False, queued=True)
    assert idle.windows == 2


@pytest.mark.parametrize(
    ("idle_s", "alive_s", "found"),
    [(0.0, 60, False), (0.0, 3600, True), (35, 3600, True), (40, 3600, False)],
    ids=["just started", "never idle", "hardly", "enough"],
)
def test_a_server_that_hardly_idles_is_told_from_one_that_just_started(
    idle_s: float, alive_s: float, found: bool
) -> None:
    assert idle_time.scarce(idle_s, alive_s) is found


def hold_several_slices(ranks: int) -> dict[str, object]:
    """Slices of one idle pass: soon after a request, in deep idle, of long ones, and where one finds nothing to do."""
    import builtins

    from sglang_moe_autotune.council import Place

    world = builtins.world  # type: ignore[attr-defined]
    state, scheduler = world.fresh(), world.Scheduler()
    found: dict[str, object] = {}

    def slices(quiet_s: float, takes_s: float = 0.0003, result: str = "worked") -> int:
        state.tuner = world.Tuner(result, takes_s)
        state._last_request_s = world.clock.now - quiet_s
        state.place = Place(0, ranks)
        state._rest_until_s = 0.0
        scheduler.on_idle()
        return len(state.tuner.steps)

    scheduler.on_idle()
    found["soon"] = slices(5.0)
    found["deep"] = slices(20.0)
    found["long ones"] = slices(20.0, 0.0009)
    found["nothing to do"] = slices(20.0, 0.0003, "nothing")
    state.doorbell = type("Rings", (), {"rung": lambda self: bool(state.tuner.steps)})()
    found["a request waits"] = slices(20.0)
    return found


def broken_off(what: str) -> list[object]:
    """A pass of two ranks in deep idle whose first slice is followed by something: slices, and the state after it."""
    import builtins

    from sglang_moe_autotune.council import Place

    world = builtins.world  # type: ignore[attr-defined]
    state, scheduler = world.fresh(), world.Scheduler()
    scheduler.on_idle()
    state.tuner, state.place = world.Tuner(takes_s=0.0003), Place(0, 2)
    step = state.tuner.step

    def then(deep_idle: bool) -> str:
        if what == "faults" and state.tuner.steps:
            raise RuntimeError("planted")
        result: str = step(deep_idle)
        if what == "switched off":
            state.switch.asked = "rows"
        elif what == "given back in steps":
            state.switch.asked, state.tuner.to_give = "rows", 2
        elif what == "paused":
            scheduler._engine_paused = True
        elif what == "spent":
            state.budget._left = -1.0
        return result

    state.tuner.step = then
    tuner = state.tuner
    scheduler.on_idle()
    return [len(tuner.steps), tuner.abandoned, state.state, state._idled]


@pytest.mark.sglang
@pytest.mark.parametrize("what", ["switched off", "given back in steps", "paused", "spent"])
def test_a_pass_of_several_slices_stops_at_the_first_reason_to(world: SchedulerProcess, what: str) -> None:
    assert world.run(broken_off, what) == [1, 1, "standing aside", False]


@pytest.mark.sglang
def test_faults_after_the_first_slice_of_a_pass_end_tuning_as_others_do(world: SchedulerProcess) -> None:
    assert world.run(broken_off, "faults") == [1, 1, "off", False]


@pytest.mark.sglang
@pytest.mark.parametrize(("ranks", "deep"), [(1, 1), (2, 3)])
def test_in_deep_idle_a_pass_of_several_ranks_holds_what_begins_in_its_time(
    world: SchedulerProcess, ranks: int, deep: int
) -> None:
    told = world.run(hold_several_slices, ranks)
    assert told == {"soon": 1, "deep": deep, "long ones": 1, "nothing to do": 1, "a request waits": 1}
