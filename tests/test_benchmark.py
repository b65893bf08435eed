"""The bench from its first step to its last, with the real launches of SGLang recorded and a stand-in for the GPU."""
# ruff: noqa: PLC0415 - what runs in the other process imports there

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from sglang_moe_autotune import held, journal, status
from sglang_moe_autotune.bench import COMPARE_CASES, COMPARE_RUNS, Share

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from scheduler_process import SchedulerProcess

pytestmark = pytest.mark.sglang


def prepare() -> None:
    """Leave ``open_bench(layers, M, fp8)`` in the process, on a GPU that is a clock and a list of launches."""
    import builtins
    from contextlib import nullcontext
    from pathlib import Path
    from types import SimpleNamespace

    import torch
    import triton
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from triton.backends.compiler import GPUTarget

    from sglang_moe_autotune import benchmark, compile_child, launch, releases, scratch
    from sglang_moe_autotune.bench import Share
    from sglang_moe_autotune.layers import LiveLayers, find_layers
    from sglang_moe_autotune.lookup import CallKey
    from sglang_moe_autotune.quarantine import Quarantine
    from sglang_moe_autotune.shapes import ConfigPair, KernelConfig

    triton.runtime.driver.set_active(compile_child.StubDriver(GPUTarget("cuda", 90, 32)))
    gpu = SimpleNamespace(now_ms=0.0, launches=[], loaded=[], wrong=None, refuse=None, pools=0, free=8 << 30)
    gpu.quantised, gpu.asked = [], 0

    def quantise(operand: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        gpu.asked += 1
        scales = torch.ones(operand.shape[0], -(-operand.shape[1] // group))
        return operand.to(torch.float8_e4m3fn), scales

    kernels = releases.invoke_function().__globals__
    kernels["per_token_group_quant_fp8"] = quantise  # SGLang's is a kernel of its own, and needs a GPU

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at_ms = 0.0

        def record(self) -> None:
            self.at_ms = gpu.now_ms

        def query(self) -> bool:
            return False

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: object) -> float:
            return end.at_ms - self.at_ms  # type: ignore[attr-defined]

    class Pool:
        def __init__(self) -> None:
            gpu.pools += 1

        def __del__(self) -> None:
            gpu.pools -= 1

    stream = SimpleNamespace(synchronize=lambda: None, cuda_stream=0)
    for name, value in {
        "current_device": lambda: 0,
        "mem_get_info": lambda: (gpu.free, 140 << 30),
        "MemPool": Pool,
        "use_mem_pool": lambda pool: nullcontext(),
        "current_stream": lambda: stream,
        "Event": Event,
        "_sleep": lambda cycles: None,
    }.items():
        setattr(torch.cuda, name, value)
    scratch.serving_device = lambda: torch.device("cpu")

    class Kernel:
        """Takes as long as its tile says, and writes ones; it knows the kernel's arguments by position."""

        def __init__(self, binary: launch.Binary) -> None:
            names = binary.source.fn.arg_names
            self.place = {n: names.index(n) for n in ("b_ptr", "c_ptr", "sorted_token_ids_ptr", "BLOCK_SIZE_N")}
            self.place |= {n: names.index(n) for n in ("a_ptr", "a_scale_ptr", "b_scale_ptr")}

        def _init_handles(self) -> None: ...

        def __getitem__(self, grid: object) -> object:
            operands = ("a_ptr", "a_scale_ptr", "b_scale_ptr", "b_ptr")

            def run(*bound: object, stream: object = None) -> None:
                value = {n: bound[i] for n, i in self.place.items()}
                tile = value["BLOCK_SIZE_N"]
                if gpu.refuse == tile:
                    raise RuntimeError("Triton Error [CUDA]: invalid argument")
                gpu.now_ms += 0.2 if tile == 32 else 0.1
                gpu.launches.append((tile, value["b_ptr"].data_ptr(), id(value["sorted_token_ids_ptr"])))
                gpu.quantised.append([value[n].data_ptr() if value[n] is not None else 0 for n in operands])
                value["c_ptr"].fill_(1.0)  # type: ignore[attr-defined]
                if (deed := gpu.deeds.get(tile)) is not None:
                    deed(value["c_ptr"])
                if gpu.wrong == tile:
                    value["c_ptr"][-1].fill_(2.0)  # type: ignore[index]

            return run

    launch.load = Kernel
    launch.loaded = lambda made, device, binary: (
        Kernel(binary) if made.kwargs["BLOCK_SIZE_N"] == 32 else None
    )

    def align(ids: torch.Tensor, block: int, experts: int) -> object:
        count = ids.numel() + (experts + 1) * (block - 1)
        return tuple(torch.zeros(n, dtype=torch.int32) for n in (count, -(-count // block), 1))

    class Layer(torch.nn.Module):
        def __init__(self, fp8: bool) -> None:
            super().__init__()
            dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
            self.w1, self.w2 = torch.zeros(8, 64, 64, dtype=dtype), torch.zeros(8, 64, 32, dtype=dtype)
            scales = (torch.ones(8, 2, 2), torch.ones(8, 2, 1)) if fp8 else (None, None)
            self.moe_runner_config = SimpleNamespace(num_experts=8, num_local_experts=8, top_k=2, is_gated=True)
            runner = SimpleNamespace(runner_backend=MoeRunnerBackend.TRITON)
            self.quant_method = SimpleNamespace(
                runner=runner,
                # A view each time, as some of SGLang's methods make one.
                get_triton_quant_info=lambda layer: TritonMoeQuantInfo(
                    layer.w1[:],
                    layer.w2[:],
                    use_fp8_w8a8=fp8,
                    w13_scale=scales[0],
                    w2_scale=scales[1],
                    block_shape=[32, 32] if fp8 else None,
                ),
            )

    pair = lambda n: ConfigPair(*[KernelConfig(16, n, 32, 1, 4, 2)] * 2)  # noqa: E731

    def readied(bench: benchmark.DeviceBench, gemm: str, config: KernelConfig) -> str:
        """Its readiness after as many calls as its steps take."""
        states = (bench.readiness(gemm, config) for _ in range(20))
        return next((state for state in states if state != "waiting"), "waiting")

    builtins.readied = readied  # type: ignore[attr-defined]

    def open_bench(
        layers: int,
        M: int = 40,  # noqa: N803
        fp8: bool = False,
        root: str | None = None,
        bit_equal: bool = False,
        share: tuple[int, int] = (0, 1),
    ) -> SimpleNamespace:
        gpu.deeds = {}
        gpu.launches, gpu.wrong, gpu.refuse, gpu.quantised, gpu.asked = [], None, None, [], 0
        model = torch.nn.ModuleList([Layer(fp8) for _ in range(layers)])
        live = LiveLayers()
        live.add(find_layers(model, torch.bfloat16, 0))
        selector, block = ("fp8_w8a8", (32, 32)) if fp8 else (None, None)
        key = CallKey((8, 64, 64), (8, 64, 32), 2, selector, block, False)
        adopted: list[int] = []
        invoke = releases.invoke_function()
        lent = benchmark.Lent(live.of, invoke, align, lambda: 0)
        compiler = SimpleNamespace(readiness=lambda b: "ready", reason=lambda b: "", recover=lambda: None)
        quarantine = Quarantine(None if root is None else Path(root), "an-environment")
        provider = benchmark.DeviceProvider(lent, compiler, 1 << 30, 3000.0, quarantine, bit_equal=bit_equal)
        provider.serving = lent._replace(invoke=lambda *args, **named: adopted.append(args[14]["BLOCK_SIZE_N"]))
        provider.share = Share(*share)
        shape = live.shape_of(key)
        bench = provider.open(shape, M, pair(32))
        weights = [layer.w1.data_ptr() for layer in model]
        return SimpleNamespace(bench=bench, provider=provider, gpu=gpu, adopted=adopted, pair=pair, weights=weights)

    builtins.open_bench = open_bench  # type: ignore[attr-defined]


def through(layers: int) -> dict[str, object]:
    import builtins

    bed = builtins.open_bench(layers)  # type: ignore[attr-defined]
    bench, gpu, fast = bed.bench, bed.gpu, bed.pair(64)
    while not bench.prepare():
        pass
    early = bench.readiness("up", fast.up)
    ready = [builtins.readied(bench, gemm, fast.of(gemm)) for gemm in ("up", "down")]  # type: ignore[attr-defined]
    first = bench.measure("up", fast.up, 8)
    gpu.launches.clear()
    samples = []
    for _ in range(8):
        samples += bench.measure("up", fast.up, 8)
    order = list(gpu.launches)
    comparisons = []
    for case in range(bench.compare_cases):
        while (found := bench.compare(fast, case)) is None:
            pass
        comparisons.append([found.ok, found.error])
    adopted = [(bench.adopt(fast), list(bed.adopted)) for _ in range(3)]
    spent, open_pools, longest = bench.gpu_s, gpu.pools, bench.launch_us
    bench.close()
    del bench, bed.bench
    layer_of = {weight: number for number, weight in enumerate(bed.weights)}
    return {
        "ready": [early, *ready], "first": first, "samples": samples, "order": [layer_of[w] for _, w, _ in order],
        "sides": [tile for tile, _, _ in order], "routings": len({r for _, _, r in order}), "comparisons": comparisons,
        "adopted": adopted, "spent_s": spent, "pools": [open_pools, gpu.pools], "longest_us": longest,
    }  # fmt: skip


@pytest.mark.parametrize("layers", [3, 4, 1])
def test_a_pair_goes_from_set_up_to_adoption(scheduler: SchedulerProcess, layers: int) -> None:
    scheduler.run(prepare)
    told = scheduler.run(through, layers)
    assert told["ready"] == ["waiting", "ready", "ready"], "its first call records it, and does no more"
    assert told["first"] == []  # one launch, to know its length
    assert told["samples"]
    for candidate_us, baseline_us in told["samples"]:
        assert candidate_us == pytest.approx(100.0)
        assert baseline_us == pytest.approx(200.0)
    assert all(ok and error == 0.0 for ok, error in told["comparisons"])
    assert told["adopted"] == [["waiting", [64]], ["ready", [64, 64]], ["ready", [64, 64]]]
    assert told["spent_s"] > 0
    assert told["longest_us"] == pytest.approx(200.0)
    assert told["routings"] == 4
    assert told["sides"].count(64) == told["sides"].count(32)
    assert told["pools"] == [1, 0]
    following = zip(told["order"], told["order"][1:], strict=False)
    assert all(after == (before + 1) % layers for before, after in following), "a layer came sooner than the others"


def few_tokens(inner: int) -> dict[str, object]:
    import builtins
    from collections import Counter

    from sglang_moe_autotune import timing

    timing._SHORT_LAUNCH_US = 0.0 if inner == 1 else 1e6
    bed = builtins.open_bench(3, 4)  # type: ignore[attr-defined]
    bench, gpu, fast = bed.bench, bed.gpu, bed.pair(64)
    while not bench.prepare():
        pass
    builtins.readied(bench, "up", fast.up)  # type: ignore[attr-defined]
    bench.measure("up", fast.up, 1)
    gpu.launches.clear()
    rounds = []
    for _ in range(6):
        while not bench.measure("up", fast.up, 1):
            pass
        rounds.append(list(Counter((tile, routing) for tile, _, routing in gpu.launches).values()))
        gpu.launches.clear()
    other = bed.pair(128)
    builtins.readied(bench, "up", other.up)  # type: ignore[attr-defined]
    starts = []
    for config in (other.up, fast.up):
        while not bench.measure("up", config, 1):
            pass
        starts.append(next(r for tile, _, r in gpu.launches if tile == config.BLOCK_SIZE_N))
        gpu.launches.clear()
    forgotten = 0
    while not bench.wind_down():
        forgotten += 1
    bench.close()
    timing._SHORT_LAUNCH_US = 60.0
    return {"rounds": rounds, "starts": starts, "forgotten": forgotten}


@pytest.mark.parametrize("inner", [1, 4], ids=["long-launches", "short-launches"])
def test_with_few_tokens_a_sample_is_a_launch_of_each_side_with_each_of_eight_routings(
    scheduler: SchedulerProcess, inner: int
) -> None:
    scheduler.run(prepare)
    told = scheduler.run(few_tokens, inner)
    assert told["rounds"] == [[1] * 16] * 6
    assert told["starts"][0] == told["starts"][1], "each trial begins with the same routing"


def derived(fault: str) -> list[str]:
    import builtins

    import torch

    from sglang_moe_autotune.bench import Declined

    bed = builtins.open_bench(3, 4)  # type: ignore[attr-defined]
    held = bed.bench._provider.recorder
    if fault == "a grid":
        record, made = held.record, []

        def recording(*args: object, **named: object) -> object:
            """As a release would that launches as many blocks as a routing fills."""
            made.append(record(*args, **named))
            return made[-1]._replace(grid=(len(made),))

        held.record = recording
    elif fault:
        kept = held._copy

        def copying(*args: object, **named: object) -> object:
            """As a release would that makes another tensor of the ids before each launch."""
            ids = [isinstance(a, torch.Tensor) and a.dtype == torch.int32 for a in args]
            return kept(*[a.clone() if is_id else a for a, is_id in zip(args, ids, strict=True)], **named)

        held._copy = copying
    try:
        while not bed.bench.prepare():
            pass
    except Declined as declined:
        return [str(declined)]
    finally:
        bed.bench.close()
    return []


def test_a_release_that_derives_a_tensor_from_a_routing_is_declined_and_not_measured_wrong(
    scheduler: SchedulerProcess,
) -> None:
    scheduler.run(prepare)
    assert scheduler.run(derived, "") == []
    for fault in ("a copy", "a grid"):
        [reason] = scheduler.run(derived, fault)
        assert "depends on the routing" in reason


def slow_things() -> list[list[str]]:
    import builtins

    from sglang_moe_autotune import launch

    bed = builtins.open_bench(4)  # type: ignore[attr-defined]
    bench, pair, done = bed.bench, bed.pair(64), []
    while not bench.prepare():
        pass
    kept = launch.cache_hash, launch.load

    def named(*args: object) -> str:
        done.append("named")
        return kept[0](*args)

    class Read:
        """As a kernel from the disk cache; the driver's call is noted."""

        def __init__(self, binary: launch.Binary) -> None:
            done.append("read")
            self._kernel = kept[1](binary)

        def _init_handles(self) -> None:
            done.append("loaded")

        def __getitem__(self, grid: object) -> object:
            return self._kernel[grid]

    launch.cache_hash, launch.load = named, Read  # type: ignore[assignment]
    found = []

    def call(make) -> object:  # type: ignore[no-untyped-def] # its source runs elsewhere
        del done[:], bed.adopted[:]
        state = make()
        found.append([*done, *("served" for _ in bed.adopted)])
        return state

    try:
        for gemm in ("up", "down"):
            while call(lambda gemm=gemm: bench.readiness(gemm, pair.of(gemm))) == "waiting":
                pass
        while call(lambda: bench.adopt(pair)) == "waiting":
            pass
    finally:
        launch.cache_hash, launch.load = kept
        bench.close()
    return found


def test_a_call_does_one_thing_at_most_that_takes_a_millisecond(scheduler: SchedulerProcess) -> None:
    """To name a binary, to read it from the disk, to hand it to the driver, to launch it as serving does."""
    scheduler.run(prepare)
    told = scheduler.run(slow_things)
    assert all(len(things) <= 1 for things in told), told
    once = ["named", "read", "loaded"]
    assert [thing for things in told for thing in things] == [*once, *once, "served", "served"]


def refusals() -> dict[str, object]:
    import builtins

    found: dict[str, object] = {}
    bed = builtins.open_bench(4)  # type: ignore[attr-defined]
    while not bed.bench.prepare():
        pass
    wrong = bed.pair(128)
    bed.gpu.wrong = 128
    while (comparison := bed.bench.compare(wrong, 0)) is None:
        pass
    found["wrong"] = comparison.ok
    bed.gpu.refuse = 256
    huge = bed.pair(256).up
    found["before"] = builtins.readied(bed.bench, "up", huge)  # type: ignore[attr-defined]
    found["measured"] = bed.bench.measure("up", huge, 4)
    found["after"] = [bed.bench.readiness("up", huge), bed.bench.reason("up", huge)]
    bed.bench.close()
    bed.gpu.free = 1 << 30
    found["memory"] = builtins.open_bench(4).bench  # type: ignore[attr-defined]
    bed.gpu.free = 8 << 30
    unserved = builtins.open_bench(4)  # type: ignore[attr-defined]
    from sglang_moe_autotune import launch
    from sglang_moe_autotune.bench import Declined

    kept, launch.loaded = launch.loaded, lambda *_: None
    try:
        while not unserved.bench.prepare():
            pass
    except Declined as declined:
        found["unserved"] = str(declined)
    finally:
        launch.loaded = kept
        unserved.bench.close()
    return found


def test_what_is_wrong_refused_too_large_or_not_what_serves_is_told(scheduler: SchedulerProcess) -> None:
    scheduler.run(prepare)
    told = scheduler.run(refusals)
    assert told["wrong"] is False
    assert told["before"] == "ready"
    assert told["measured"] == []
    assert told["after"][0] == "failed"
    assert "invalid argument" in told["after"][1]
    assert "MiB kept in reserve" in told["memory"]
    assert "not one that serving has made" in told["unserved"]


def quantised() -> dict[str, object]:
    import builtins

    bed = builtins.open_bench(3, fp8=True)  # type: ignore[attr-defined]
    bench, gpu, fast = bed.bench, bed.gpu, bed.pair(64)
    while not bench.prepare():
        pass
    gpu.quantised.clear()
    for tile in (64, 128, 256):
        for _ in range(4):
            builtins.readied(bench, "up", bed.pair(tile).up)  # type: ignore[attr-defined]
            bench.measure("up", bed.pair(tile).up, 8)
    timed, asked = list(gpu.quantised), gpu.asked
    while (comparison := bench.compare(fast, 0)) is None:
        pass
    bench._scratch._a["up"].normal_()
    bench._launches._candidates.clear()
    bench.readiness("up", fast.up)
    after = gpu.asked
    bench.close()
    return {
        "activations": len({(a, scale) for a, scale, _, _ in timed}),
        "weights": len({b for *_, b in timed}),
        "scales_of_weights": len({(scale, b) for *_, scale, b in timed}),
        "asked": asked, "ok": comparison.ok, "after": after - asked,
    }  # fmt: skip


def test_activations_are_quantised_once_for_all_candidates_and_anew_when_they_change(
    scheduler: SchedulerProcess,
) -> None:
    scheduler.run(prepare)
    told = scheduler.run(quantised)
    assert told["activations"] == 1, "candidate and baseline read different operands"
    assert told["asked"] == 2, "one quantisation a GEMM"
    assert told["weights"] == told["scales_of_weights"] == 3, "a layer's scales went with another layer's weights"
    assert told["ok"]
    assert told["after"] >= 1, "changed activations were taken for the old ones"


def compared(layers: int, bit_equal: bool, fault: str, share: tuple[int, int] = (0, 1)) -> list[object]:
    """All cases of a pair that is right but for one fault; and how many launches that took."""
    import builtins

    bed = builtins.open_bench(layers, bit_equal=bit_equal, share=share)  # type: ignore[attr-defined]
    bench, pair, runs = bed.bench, bed.pair(64), []
    if fault == "keeps-up":
        pair = type(pair)(bed.pair(32).up, pair.down)
    while not bench.prepare():
        pass
    for gemm in ("up", "down"):
        builtins.readied(bench, gemm, pair.of(gemm))  # type: ignore[attr-defined]
        bench.measure(gemm, pair.of(gemm), 4)

    def deed(c) -> None:  # type: ignore[no-untyped-def] # its source runs elsewhere
        runs.append(c.shape)
        if fault == "other-rounding":
            c[-1, -1] = 1.0 + 2**-7
        elif fault == "racy" and len(runs) == 400:  # in the down GEMM's part of a late case
            c[0, 0] = 1.0 + 2**-7
        elif fault == "last-tile":
            c[-1, ..., -16:] = 0.0
        elif fault == "reads-its-output":
            c.mul_(float("nan"))

    bed.gpu.deeds[64] = deed
    found = []
    for case in range(bench.compare_cases):
        while (comparison := bench.compare(pair, case)) is None:
            pass
        found.append(comparison)
        if not comparison.ok:
            break
    inputs = [bench.scratch.buffers(g, 16, "uniform", bench.scratch.output) for g in ("up", "down")]
    drawn = [float(b.a.double().sum()) for b in inputs] + [inputs[0].topk_ids.tolist()]
    bench.close()
    return [all(c.ok for c in found), found[-1].reason, len(found), len(runs), sum(c.runs for c in found), drawn]


@pytest.mark.parametrize(
    ("fault", "bit_equal", "ok"),
    [
        pytest.param("none", False, True, id="honest"),
        pytest.param("none", True, True, id="honest-bit-equal"),
        pytest.param("other-rounding", False, True, id="other-rounding"),
        pytest.param("other-rounding", True, False, id="other-rounding-bit-equal"),
        pytest.param("racy", False, False, id="racy-once"),
        pytest.param("last-tile", False, False, id="last-tile"),
        pytest.param("reads-its-output", False, False, id="reads-its-output"),
    ],
)
def test_c19_a_candidate_is_compared_over_all_cases_and_runs(
    scheduler: SchedulerProcess, fault: str, bit_equal: bool, ok: bool
) -> None:
    scheduler.run(prepare)
    taken, reason, cases, runs, *_ = scheduler.run(compared, 4, bit_equal, fault)
    assert taken is ok, reason
    if ok:
        assert (cases, runs) == (COMPARE_CASES, 2 * COMPARE_RUNS)
    elif fault == "racy":
        assert "from run to run" in reason
        assert runs < 2 * COMPARE_RUNS


def test_a_gemm_that_the_pair_leaves_as_it_is_is_not_compared_with_itself(scheduler: SchedulerProcess) -> None:
    scheduler.run(prepare)
    taken, reason, cases, launches, *_ = scheduler.run(compared, 4, False, "keeps-up")
    assert taken, reason
    assert (cases, launches) == (COMPARE_CASES, COMPARE_RUNS)


def test_ranks_share_the_runs_of_a_comparison_and_each_has_inputs_of_its_own(scheduler: SchedulerProcess) -> None:
    scheduler.run(prepare)
    drawn = []
    for rank in range(4):
        taken, reason, cases, launches, told, inputs = scheduler.run(compared, 4, False, "none", (rank, 4))
        assert taken, reason
        assert (cases, launches, told) == (COMPARE_CASES, 2 * told, COMPARE_CASES * Share(rank, 4).runs)
        drawn.append(inputs)
    assert 4 * told >= COMPARE_RUNS
    for column in zip(*drawn, strict=True):  # activations of both GEMMs, and who gets them
        assert all(one != other for place, one in enumerate(column) for other in column[:place])
    assert scheduler.run(compared, 4, False, "none", (0, 4))[-1] == drawn[0]


def raising(places: list[str]) -> list[object]:
    """What becomes of a candidate for which something raises, in each of these ways."""
    import builtins
    import json

    from triton.runtime.errors import OutOfResources

    from sglang_moe_autotune import launch

    faults = [
        OutOfResources(300_000, 232_448, "shared memory"), RuntimeError("Triton Error [CUDA]: device kernel image is"),
        AssertionError("unexpected"), json.JSONDecodeError("damaged", "{", 1), KeyError("cubin"),
    ]  # fmt: skip
    found = []
    for place in places:
        for fault in faults:
            bed = builtins.open_bench(4)  # type: ignore[attr-defined]
            bench, config = bed.bench, bed.pair(64).up
            while not bench.prepare():
                pass

            def fail(*_: object, fault: Exception = fault) -> None:
                raise fault

            module, name = (launch, "load") if place == "loading" else (launch, "binary_of")
            kept = getattr(module, name)
            setattr(module, name, fail)
            try:
                state = builtins.readied(bench, "up", config)  # type: ignore[attr-defined]
                found.append([state, bench.reason("up", config), type(fault).__name__])
            finally:
                setattr(module, name, kept)
            next_one = builtins.readied(bench, "up", bed.pair(128).up)  # type: ignore[attr-defined]
            found[-1].append([bench.readiness("up", config), next_one])
            bench.close()
    return found


@pytest.mark.parametrize("place", ["compiling", "loading"])
def test_c16_a_candidate_that_raises_is_skipped_with_its_reason(scheduler: SchedulerProcess, place: str) -> None:
    scheduler.run(prepare)
    told = scheduler.run(raising, [place])
    assert len(told) == 5
    for state, reason, name, after in told:
        assert state == "failed"
        assert name in reason
        assert after == ["failed", "ready"], "it stays refused, and the next one is not held against it"


def slow(root: str) -> dict[str, object]:
    import builtins

    bed = builtins.open_bench(4, root=root)  # type: ignore[attr-defined]
    bench, gpu, config = bed.bench, bed.gpu, bed.pair(128).up
    while not bench.prepare():
        pass

    def crawl(c: object) -> None:
        gpu.now_ms += 200.0

    gpu.deeds[128] = crawl
    while (state := bench.readiness("up", config)) == "waiting":
        pass
    found: dict[str, object] = {"before": state}
    gpu.launches.clear()
    found["measured"] = [bench.measure("up", config, 8) for _ in range(5)]
    found["launches"] = [tile for tile, *_ in gpu.launches].count(128)
    found["after"] = [bench.readiness("up", config), bench.reason("up", config)]
    bench.close()
    assert bed.provider.quarantine.journal.settled(20)
    again = builtins.open_bench(4, root=root).bench  # type: ignore[attr-defined]
    while not again.prepare():
        pass
    while (state := again.readiness("down", config)) == "waiting":
        pass
    found["restarted"] = [again.readiness("up", config), again.reason("up", config), state]
    again.close()
    return found


def test_c18_a_candidate_that_takes_a_thousand_times_as_long_is_launched_once_and_never_again(
    scheduler: SchedulerProcess, tmp_path: Path
) -> None:
    scheduler.run(prepare)
    told = scheduler.run(slow, str(tmp_path))
    assert told["before"] == "ready"
    assert told["measured"] == [[]] * 5
    assert told["launches"] == 1
    assert told["after"][0] == "failed"
    assert "1,00" in told["after"][1]
    assert "times as long" in told["after"][1]
    assert told["restarted"][0] == "failed"
    assert "in quarantine" in told["restarted"][1]
    assert told["restarted"][2] == "ready", "the other GEMM's binary is another one"


def held_up(root: str) -> dict[str, object]:
    """A bench whose journal's disk does not answer, and then does."""
    import builtins
    import threading

    from sglang_moe_autotune import held

    answers, put, append = threading.Event(), held.put, held.append
    held.put = lambda *args, **named: (answers.wait(60), put(*args, **named))[1]
    held.append = lambda *args: (answers.wait(60), append(*args))[1]
    bed = builtins.open_bench(4, root=root)  # type: ignore[attr-defined]
    bench, gpu, fast = bed.bench, bed.gpu, bed.pair(64)
    while not bench.prepare():
        pass
    gpu.launches.clear()

    def turn() -> list[object]:
        ready = [bench.readiness(gemm, fast.of(gemm)) for gemm in ("up", "down")]
        return [ready, bench.measure("up", fast.up, 4), bench.measure("down", fast.down, 4)]

    def launched() -> int:
        return [tile for tile, *_ in gpu.launches].count(64)

    try:
        found: dict[str, object] = {"before": [turn() for _ in range(20)], "launched": launched()}
        answers.set()
        while bench.readiness("up", fast.up) == "waiting" or bench.readiness("down", fast.down) == "waiting":
            pass
        for gemm in ("up", "down"):
            samples = []
            while not samples:
                samples = bench.measure(gemm, fast.of(gemm), 4)
        assert bed.provider.quarantine.journal.settled(20)
        answers.clear()
        gpu.launches.clear()
        found["compared"] = [bench.compare(fast, 0) for _ in range(200)]
        found["launched_then"] = launched()
        answers.set()
        while (comparison := bench.compare(fast, 0)) is None:
            pass
    finally:
        held.put, held.append = put, append
    bench.close()
    return found | {"ok": comparison.ok}


def test_no_candidate_is_launched_before_its_line_is_written_and_nothing_waits_for_that(
    scheduler: SchedulerProcess, tmp_path: Path
) -> None:
    scheduler.run(prepare)
    told = scheduler.run(held_up, str(tmp_path))
    assert told["before"] == [[["waiting", "waiting"], [], []]] * 20
    assert told["launched"] == 0
    assert told["compared"] == [None] * 200
    assert told["launched_then"] == 0
    assert told["ok"]


def dies(root: str, tile: int, phase: str, how: str) -> None:
    """Never returns: the candidate of that tile takes the process along, or does not end."""
    import builtins
    import os
    import signal
    import time

    bed = builtins.open_bench(4, root=root)  # type: ignore[attr-defined]
    bench, pair = bed.bench, bed.pair(tile)
    while not bench.prepare():
        pass
    for gemm in ("up", "down"):
        while bench.readiness(gemm, pair.up) == "waiting":
            time.sleep(0.001)
        if phase == "comparing":
            bench.measure(gemm, pair.up, 4)
    bed.gpu.deeds[tile] = lambda c: os.kill(os.getpid(), signal.SIGKILL) if how == "killed" else time.sleep(1e6)
    if phase == "comparing":
        bench.compare(pair, 0)
        while True:
            bench.compare(pair, 0)
    while True:
        bench.measure("up", pair.up, 4)


def restarted(root: str, tiles: list[int]) -> list[object]:
    import builtins

    bed = builtins.open_bench(4, root=root)  # type: ignore[attr-defined]
    while not bed.bench.prepare():
        pass
    found = []
    for config in (bed.pair(tile).up for tile in tiles):
        while (state := bed.bench.readiness("up", config)) == "waiting":
            pass
        found.append([state, bed.bench.reason("up", config)])
    bed.bench.close()
    return found


@pytest.mark.parametrize(
    ("tile", "phase", "how"), [(128, "measuring", "killed"), (256, "comparing", "hung")], ids=["killed", "hung"]
)
def test_c17_c18_a_candidate_that_kills_or_never_ends_is_left_out_by_the_next_start(
    scheduler: SchedulerProcess,
    start_scheduler: Callable[..., SchedulerProcess],
    tmp_path: Path,
    tile: int,
    phase: str,
    how: str,
) -> None:
    victim = start_scheduler()
    victim.run(prepare)
    if how == "killed":
        with pytest.raises(AssertionError, match="the process ended"):
            victim.run(dies, str(tmp_path), tile, phase, how)
    else:
        arguments = (AssertionError, victim.run, dies, str(tmp_path), tile, phase, how)
        ended = threading.Thread(target=pytest.raises, args=arguments)
        ended.start()
        deadline = time.monotonic() + 60
        before, told = None, only_journal(tmp_path)
        while not told.open or told != before:  # a launch that ends has said so at the next look
            assert time.monotonic() < deadline
            time.sleep(1.0)
            before, told = told, only_journal(tmp_path)
        assert told.writer is not None
        os.kill(told.writer.owner.pid, signal.SIGKILL)
        ended.join(timeout=30)
        assert not ended.is_alive()
    scheduler.run(prepare)
    for _ in range(2):  # the second start has no journal of the dead any more
        (culprit, reason), (other, _) = scheduler.run(restarted, str(tmp_path), [tile, 64])
        assert culprit == "failed"
        assert "in quarantine: a process ended in the middle" in reason
        assert other == "ready"
    for path in (tmp_path / held.FOLDER).glob("*.journal"):
        writer = journal.parse(path.read_bytes()).writer
        assert writer is not None
        assert status.start_time(writer.owner.pid) is not None, "the journal of the dead is cleared away"


def only_journal(root: Path) -> journal.Told:
    journals = list((root / held.FOLDER).glob("*.journal"))
    return journal.parse(journals[0].read_bytes()) if journals else journal.Told(None, ())


def rehearsed() -> dict[str, object]:
    """Which of PyTorch's operations, on which types, a bench runs from its set-up to its end, and the rehearsal."""
    import builtins
    import logging

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from sglang_moe_autotune.rehearsal import rehearse

    class Heard(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: set[str] = set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            self.found.add(f"{func} {[str(t.dtype) for t in tensors]}")
            return func(*args, **(kwargs or {}))

    bed = builtins.open_bench(4)  # type: ignore[attr-defined]
    bench, fast = bed.bench, bed.pair(64)
    with Heard() as tuning:
        while not bench.prepare():
            pass
        for gemm in ("up", "down"):
            builtins.readied(bench, gemm, fast.of(gemm))  # type: ignore[attr-defined]
        for _ in range(4):
            bench.measure("up", fast.up, 8)
        for case in range(bench.compare_cases):
            while bench.compare(fast, case) is None:
                pass
        while bench.adopt(fast) == "waiting":
            pass
    shape, align = bench._shape, bed.provider.serving.align
    bench.close()
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sglang.moe_autotune").addHandler(handler)
    before = bed.gpu.pools
    state = torch.get_rng_state()
    with Heard() as before_serving:
        rehearse([shape], align)
    same = bool(torch.equal(state, torch.get_rng_state()))
    good = list(warnings)
    rehearse([shape], lambda *_: None)  # type: ignore[arg-type, return-value]
    return {
        "missing": sorted(tuning.found - before_serving.found), "count": len(tuning.found), "warnings": good,
        "after_a_fault": warnings, "pools": [before, bed.gpu.pools], "same_random_state": same,
    }  # fmt: skip


def test_the_rehearsal_runs_every_operation_that_a_bench_will_run(scheduler: SchedulerProcess) -> None:
    """On a GPU the first launch of each costs milliseconds, which a request must not wait for."""
    scheduler.run(prepare)
    told = scheduler.run(rehearsed)
    assert told["missing"] == []
    assert told["count"] > 30
    assert told["warnings"] == []
    assert told["same_random_state"]
    assert len(told["after_a_fault"]) == 1
    assert "could not prepare" in told["after_a_fault"][0]
    assert told["pools"] == [0, 0]
