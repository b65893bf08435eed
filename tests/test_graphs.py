"""SGLang's own runner captures one size again: other graphs and live slots stay, and a failure changes nothing."""
# ruff: noqa: PLC0415 - what runs in the other process imports there

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sglang_ways import skip_unless

if TYPE_CHECKING:
    from collections.abc import Callable

    from scheduler_process import SchedulerProcess

pytestmark = pytest.mark.sglang


def prepare() -> None:
    import builtins
    from types import SimpleNamespace

    import runner_on_cpu
    import test_plugin

    test_plugin.prepare()
    given = builtins.given  # type: ignore[attr-defined]
    scheduler = runner_on_cpu.make(given.ask)
    tiles = lambda: {key.size: graph.tile for key, graph in scheduler.runner.backend._graphs.items()}  # noqa: E731
    builtins.ground = SimpleNamespace(scheduler=scheduler, tiles=tiles, **vars(given))  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def ground(start_scheduler: Callable[..., SchedulerProcess]) -> SchedulerProcess:
    skip_unless("recapture", "one shape", "captures in runners of another build, which the CPU stand-in does not make")
    process = start_scheduler()
    process.run(prepare)
    return process


def capture_one() -> dict[str, object]:
    import builtins

    import runner_on_cpu

    from sglang_moe_autotune import graphs

    given = builtins.ground  # type: ignore[attr-defined]
    scheduler, runner, model = given.scheduler, given.scheduler.runner, given.scheduler.model
    (found,) = graphs.find(scheduler).graphs
    before, first = given.tiles(), dict(runner.backend._graphs)
    metadata = dict(runner.attn_backend.decode_cuda_graph_metadata)
    pools = {pool for pool, _ in scheduler.device.captured}
    sizes = runner.capture_bs
    given.learn(4)
    runner_on_cpu.serve_a_batch(scheduler)
    model.kv.zero_()
    reason = found.capture(4)
    kept = [key.size for key, graph in runner.backend._graphs.items() if graph is first[key]]
    renewed = [bs for bs, item in runner.attn_backend.decode_cuda_graph_metadata.items() if item is not metadata[bs]]
    return {
        "sizes": [(str(size), size.M) for size in found.sizes()],
        "reason": reason,
        "before": before,
        "after": given.tiles(),
        "kept": sorted(kept),
        "metadata": renewed,
        "written": model.kv.nonzero().flatten().tolist(),
        "same_list": runner.capture_bs is sizes,
        "bounds": [runner.capture_bs, runner.max_bs],
        "pool": scheduler.device.captured[-1][0] in pools,
        "streams": sorted({stream for _, stream in scheduler.device.captured}),
        "current": found.current,
    }


def test_one_size_is_captured_again_beside_the_others(ground: SchedulerProcess) -> None:
    told = ground.run(capture_one)
    assert told["sizes"] == [[f"decode {bs}", bs] for bs in (1, 2, 4, 8)]
    assert told["reason"] == ""
    assert set(told["before"].values()) == {16}
    assert told["after"] == {**told["before"], "4": 32}
    assert told["kept"] == [1, 2, 8]
    assert told["metadata"] == [4]
    assert told["written"] == [0], "keys and values went to padding, not to the last batch's slots"
    assert told["same_list"]
    assert told["bounds"] == [[1, 2, 4, 8], 8]
    assert told["pool"]
    assert len(told["streams"]) == 1, "that of the first capture"
    assert told["current"]


def stock_capture_would_write() -> list[int]:
    import builtins

    import runner_on_cpu
    import torch

    scheduler = builtins.ground.scheduler  # type: ignore[attr-defined]
    runner, model = scheduler.runner, scheduler.model
    runner_on_cpu.serve_a_batch(scheduler)
    runner.buffers.positions.zero_()
    model.kv.zero_()
    with scheduler.module.model_capture_mode(), torch.no_grad():
        forward = model.forward
        runner.capture_one_shape(4, forward)
    written: list[int] = model.kv.nonzero().flatten().tolist()
    return written


def test_without_clearing_a_single_size_writes_into_a_live_slot(ground: SchedulerProcess) -> None:
    """The trap itself, on SGLang's own code: else the test above would prove nothing."""
    assert ground.run(stock_capture_would_write) == [7]


def failures() -> list[dict[str, object]]:
    import builtins

    import runner_on_cpu
    from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

    from sglang_moe_autotune import graphs

    given = builtins.ground  # type: ignore[attr-defined]
    scheduler, runner, model = given.scheduler, given.scheduler.runner, given.scheduler.model
    (found,) = graphs.find(scheduler).graphs
    told = []
    for place in ("warm-up", "capture", ""):
        first, metadata = dict(runner.backend._graphs), dict(runner.attn_backend.decode_cuda_graph_metadata)
        runner_on_cpu.serve_a_batch(scheduler)
        model.fail = place
        reason = found.capture(2)
        model.fail = ""
        kept = all(runner.backend._graphs[key] is graph for key, graph in first.items())
        same = runner.attn_backend.decode_cuda_graph_metadata == metadata
        mode = get_is_capture_mode()
        told.append({"reason": reason, "kept": kept, "same": same, "sizes": runner.capture_bs, "mode": mode})
    return told


def test_a_capture_that_fails_leaves_the_old_graph_and_what_it_reads(ground: SchedulerProcess) -> None:
    warm_up, capture, fine = ground.run(failures)
    for failed, place in ((warm_up, "warm-up"), (capture, "capture")):
        assert failed["reason"] == f"RuntimeError: planted in the {place}"
        assert failed["kept"]
        assert failed["same"]
    assert fine["reason"] == ""
    assert not fine["kept"]
    assert all(found["sizes"] == [1, 2, 4, 8] and not found["mode"] for found in (warm_up, capture, fine))


def hybrid() -> dict[str, object]:
    import builtins

    import runner_on_cpu
    import torch

    from sglang_moe_autotune import graphs

    given = builtins.ground  # type: ignore[attr-defined]
    scheduler, model = given.scheduler, given.scheduler.model
    rows = scheduler.runner.model_runner.req_to_token_pool
    rows.req_index_to_mamba_index_mapping = torch.full((9,), 5)
    model.slots = rows.req_index_to_mamba_index_mapping
    runner_on_cpu.serve_a_batch(scheduler)
    (found,) = graphs.find(scheduler).graphs
    reason = found.capture(1)
    model.slots = None
    del rows.req_index_to_mamba_index_mapping
    tracked = scheduler.runner.buffers.mamba_track_mask.any() or scheduler.runner.buffers.mamba_track_indices.any()
    return {"reason": reason, "written": model.state.nonzero().flatten().tolist(), "tracked": bool(tracked)}


def test_a_hybrid_models_states_are_left_alone(ground: SchedulerProcess) -> None:
    assert ground.run(hybrid) == {"reason": "", "written": [0], "tracked": False}


def breakable_session() -> dict[str, object]:
    """SGLang's own prefill backend: its session drops the output buffer that all graphs write."""
    import builtins
    from types import SimpleNamespace

    import torch
    from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend

    from sglang_moe_autotune.graphs import _same_output

    runner = builtins.ground.scheduler.runner  # type: ignore[attr-defined]
    backend = BreakableCudaGraphBackend(
        SimpleNamespace(device_module=runner.device_module, model_runner=runner.model_runner)
    )
    buffer = backend._shared_output_buffer = torch.zeros(8, 4)
    told = {}
    with _same_output(backend), backend.capture_session("stream"):
        told["kept"] = backend._shared_output_buffer is buffer
        told["stream"] = backend._capture_stream
    told["after"] = backend._shared_output_buffer is buffer and "capture_session" not in vars(backend)
    with backend.capture_session("stream"):
        told["stock"] = backend._shared_output_buffer
    return told


def test_prefill_graphs_keep_their_one_output_buffer(ground: SchedulerProcess) -> None:
    told = ground.run(breakable_session)
    assert told == {"kept": True, "stream": "stream", "after": True, "stock": None}


def refusals() -> dict[str, object]:
    import builtins
    from types import SimpleNamespace

    from sglang_moe_autotune import graphs

    scheduler = builtins.ground.scheduler  # type: ignore[attr-defined]
    model_runner, runner = scheduler.tp_worker.model_runner, scheduler.runner
    rows, pool = model_runner.req_to_token_pool, model_runner.token_to_kv_pool
    told: dict[str, object] = {}

    def ask(name: str, owner: object, **changed: object) -> None:
        kept = {key: getattr(owner, key, None) for key in changed}
        vars(owner).update(changed)
        found = graphs.find(scheduler)
        vars(owner).update(kept)
        told[name] = [len(found.graphs), found.refused]

    ask("as it is", scheduler)
    for flag in ("speculative_algorithm", "enable_lora", "enable_memory_saver", "enable_torch_compile"):
        ask(flag, scheduler.server_args, **{flag: "x"})
    ask("pool", model_runner, token_to_kv_pool=SimpleNamespace())
    ask("rows", rows, free_slots=[0, 1])
    ask("canary", model_runner, canary_manager=object())
    ask("n-grams", model_runner, use_ngram_embedding=True)
    ask("glue", runner, _metadata_glue=object())
    ask("backend", runner, backend=SimpleNamespace())
    ask("eager", model_runner, decode_cuda_graph_runner=SimpleNamespace())
    assert pool is model_runner.token_to_kv_pool
    return told


def test_what_was_not_shown_to_be_safe_is_refused_with_a_reason(ground: SchedulerProcess) -> None:
    told = ground.run(refusals)
    assert told.pop("as it is") == [1, {}]
    assert told.pop("eager") == [0, {}]
    for name in ("glue", "backend"):
        count, refused = told.pop(name)
        assert (count, list(refused)) == (0, ["decode"])
    for count, refused in told.values():
        assert count == 0
        assert list(refused) == ["all"]
        assert refused["all"]


def own_stream() -> dict[str, object]:
    """A release whose ``graph_capture`` makes a new stream each time: the runner's first one is handed to it."""
    import builtins

    from sglang_moe_autotune import graphs

    scheduler = builtins.ground.scheduler  # type: ignore[attr-defined]
    module = scheduler.module
    (found,) = graphs.find(scheduler).graphs
    kept = vars(module).pop("get_or_create_global_graph_capture_stream", None)
    swapped = module.graph_capture
    scheduler.runner.stream = "the first stream"
    seen: list[object] = []

    import contextlib
    import types

    with contextlib.ExitStack() as stack:
        found._enter(stack)
        with module.graph_capture() as context:
            seen.append(context.stream)
        seen.append(isinstance(module.tqdm, types.ModuleType))
    if kept is not None:
        module.get_or_create_global_graph_capture_stream = kept
    return {"seen": seen, "put back": module.graph_capture is swapped}


def test_the_first_captures_stream_is_used_where_a_release_would_make_another(ground: SchedulerProcess) -> None:
    assert ground.run(own_stream) == {"seen": ["the first stream", False], "put back": True}


def withdraw() -> list[object]:
    import builtins

    from sglang_moe_autotune import graphs

    scheduler = builtins.ground.scheduler  # type: ignore[attr-defined]
    (found,) = graphs.find(scheduler).graphs
    runner = scheduler.runner
    told: list[object] = []
    for size in (4, 8, 1, 2):
        found.withdraw(size)
        told.append([list(runner.capture_bs), runner.max_bs])
    runner.capture_bs, runner.max_bs = [1, 2, 4, 8], 8
    return told


def test_a_withdrawn_size_is_padded_to_the_next_one_or_runs_eagerly(ground: SchedulerProcess) -> None:
    assert ground.run(withdraw) == [[[1, 2, 8], 8], [[1, 2], 2], [[2], 2], [[], 0]]


def idle_passes() -> dict[str, object]:
    """The hooked idle method of SGLang's scheduler, with its own decode runner beneath it."""
    import builtins
    from types import SimpleNamespace

    import runner_on_cpu

    from sglang_moe_autotune import plugin
    from sglang_moe_autotune.lookup import CallKey
    from sglang_moe_autotune.serving import Serving
    from sglang_moe_autotune.settings import Settings

    given = builtins.ground  # type: ignore[attr-defined]
    clock = SimpleNamespace(now_s=1000.0)
    serving = Serving(Settings(recapture="idle"), hooks=plugin.hooks_in_place)
    serving.recapture._clock = lambda: clock.now_s
    kept, plugin._serving = plugin._serving, serving
    try:
        made = runner_on_cpu.make(given.ask)
        serving.store = SimpleNamespace()  # type: ignore[assignment]
        stub = given.Stub()
        stub.tp_worker = made.tp_worker
        stub.server_args = SimpleNamespace(attention_backend="triton")

        def passes(count: int, quiet_s: float) -> list[int]:
            found = []
            for _ in range(count):
                serving._last_request_s -= quiet_s
                serving._rest_until_s = 0.0  # as after a millisecond
                captured = len(made.device.captured)
                stub.maybe_sleep_on_idle()
                found.append(len(made.device.captured) - captured)
                serving._last_request_s += quiet_s
                clock.now_s += 5.0
            return found

        told: dict[str, object] = {"first": sum(passes(2, 60.0)), "mode": serving.recapture.mode}
        key = CallKey(*given.shape, None, False)
        for M in (2, 8):  # noqa: N806 - the field's name for it
            serving.recapture.adopted(key, M, given.pair)
        serving.lookup.publish([(key, 2, given.pair), (key, 8, given.pair)])
        told["busy"] = sum(passes(8, 5.0))
        stub._engine_paused = True
        told["paused"] = sum(passes(4, 60.0))
        stub._engine_paused = False
        told["idle"] = passes(4, 60.0)
        told["tiles"] = {key.size: graph.tile for key, graph in made.runner.backend._graphs.items()}
        serving.lookup.publish([(key, 2, None)])
        told["taken back"] = passes(2, 60.0)
        told["tiles after"] = {key.size: graph.tile for key, graph in made.runner.backend._graphs.items()}
        told["status"] = serving.recapture.snapshot().outcomes
        told["asked"] = serving.lookup.asked
        told["broken"] = [f.name for f in plugin._FENCES.values() if f.broken]
    finally:
        plugin._serving = kept
    return told


def test_idle_passes_bring_rows_into_graphs_and_out_again(ground: SchedulerProcess) -> None:
    told = ground.run(idle_passes)
    assert told["mode"] == "idle"
    assert told["first"] == 0
    assert told["busy"] == 0, "within ten seconds of a request"
    assert told["paused"] == 0
    assert told["idle"] == [1, 1, 0, 0], "one size a pass"
    assert told["tiles"] == {"1": 16, "2": 32, "4": 16, "8": 32}
    assert told["taken back"] == [1, 0]
    assert told["tiles after"] == {"1": 16, "2": 16, "4": 16, "8": 32}
    assert told["status"] == {"recaptured": 3}
    assert told["asked"] is None
    assert told["broken"] == []


def prefill() -> dict[str, object]:
    import builtins

    import runner_on_cpu

    from sglang_moe_autotune import graphs

    given = builtins.ground  # type: ignore[attr-defined]
    scheduler, model = given.scheduler, given.scheduler.model
    runner = runner_on_cpu.add_prefill(scheduler)
    decode, prefill = graphs.find(scheduler).graphs
    first, buffer = dict(runner.backend._graphs), runner.backend._shared_output_buffer
    pools = {pool for pool, _ in scheduler.device.captured}
    stream = runner.stream
    given.learn(16)
    told: dict[str, object] = {"sizes": [[str(s) for s in some.sizes()] for some in (decode, prefill)]}
    for place in ("capture", ""):
        runner.buffers.out_cache_loc.fill_(runner_on_cpu.LIVE_SLOT)
        runner.buffers.positions.fill_(39)
        runner.buffers.mamba_track_mask.fill_(True)
        model.kv.zero_()
        model.fail = place
        reason = prefill.capture(16)
        model.fail = ""
        told[place or "fine"] = {
            "reason": reason,
            "kept": sorted(key.size for key, graph in runner.backend._graphs.items() if graph is first[key]),
            "tiles": {key.size: [s.tile for s in graph._segments] for key, graph in runner.backend._graphs.items()},
            "written": model.kv.nonzero().flatten().tolist(),
            "one buffer": runner.backend._shared_output_buffer is buffer
            and all(out.data_ptr() == buffer.data_ptr() for out in runner.backend._outputs.values()),
            "tracked": bool(runner.buffers.mamba_track_mask.any()),
            "pool and stream": len({pool for pool, _ in scheduler.device.captured} | pools) == 1
            and runner.stream == stream,
            "sizes": runner.capture_num_tokens,
        }
    del scheduler.tp_worker.model_runner.prefill_cuda_graph_runner
    return told


def test_prefill_graphs_are_captured_one_by_one_too(ground: SchedulerProcess) -> None:
    told = ground.run(prefill)
    assert told["sizes"][1] == ["prefill 4", "prefill 8", "prefill 16"]
    failed, fine = told["capture"], told["fine"]
    assert failed["reason"] == "RuntimeError: planted in the capture"
    assert failed["kept"] == [4, 8, 16]
    assert fine["reason"] == ""
    assert fine["kept"] == [4, 8]
    assert fine["tiles"]["16"] == [32]
    assert failed["tiles"]["16"] == [16]
    for found in (failed, fine):
        assert found["written"] == [0]
        assert found["one buffer"]
        assert not found["tracked"]
        assert found["pool and stream"]
        assert found["sizes"] == [4, 8, 16]


def arguments() -> list[str]:
    from sglang.srt.server_args import ServerArgs

    from sglang_moe_autotune import graphs

    fields = (getattr(ServerArgs, name, ()) for name in ("__dataclass_fields__", "__struct_fields__"))
    known = {*dir(ServerArgs)}.union(*fields)
    return sorted({*graphs._NOT_SHOWN, "attention_backend"} - known)


def test_the_server_arguments_that_are_looked_at_exist(ground: SchedulerProcess) -> None:
    assert ground.run(arguments) == []


def by_request() -> dict[str, object]:
    from types import SimpleNamespace

    from sglang_moe_autotune import controls

    asked: list[str] = []
    serving = SimpleNamespace(recapture=SimpleNamespace(request=lambda: asked.append("asked") or "3 graphs"))
    request = SimpleNamespace(server_args={controls.RECAPTURE: 1, "other": 5})
    refused = SimpleNamespace(server_args={controls.RECAPTURE: 2})
    controls.take(request, serving)
    controls.take(refused, serving)
    return {"asked": asked, "left": [request.server_args, refused.server_args]}


def test_set_internal_state_asks_for_a_recapture_by_hand(ground: SchedulerProcess) -> None:
    told = ground.run(by_request)
    assert told == {"asked": ["asked"], "left": [{"other": 5}, {"moe_autotune_recapture": 2}]}
