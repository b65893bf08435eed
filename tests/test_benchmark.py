"""The bench from its first step to its last, with the real launches of SGLang recorded and a stand-in for the GPU."""
# ruff: noqa: PLC0415 - what runs in the other process imports there

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from scheduler_process import SchedulerProcess

pytestmark = pytest.mark.sglang


def prepare() -> None:
    """Leave ``open_bench(layers, M, fp8)`` in the process, on a GPU that is a clock and a list of launches."""
    import builtins
    from contextlib import nullcontext
    from types import SimpleNamespace

    import torch
    import triton
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
    from sglang.srt.layers.moe.utils import MoeRunnerBackend
    from triton.backends.compiler import GPUTarget

    from sglang_moe_autotune import benchmark, compile_child, launch, releases, scratch
    from sglang_moe_autotune.layers import LiveLayers, find_layers
    from sglang_moe_autotune.lookup import CallKey
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

    def open_bench(layers: int, M: int = 40, fp8: bool = False) -> SimpleNamespace:  # noqa: N803
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
        provider = benchmark.DeviceProvider(lent, compiler, 1 << 30, 3000.0)
        provider.serving = lent._replace(invoke=lambda *args, **named: adopted.append(args[14]["BLOCK_SIZE_N"]))
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
    ready = [bench.readiness(gemm, fast.of(gemm)) for gemm in ("up", "down")]
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
    adopted = [bench.adopt(fast), list(bed.adopted)]
    spent, open_pools, longest = bench.gpu_s, gpu.pools, bench.launch_us
    bench.close()
    del bench, bed.bench
    layer_of = {weight: number for number, weight in enumerate(bed.weights)}
    return {
        "ready": ready, "first": first, "samples": samples, "order": [layer_of[w] for _, w, _ in order],
        "sides": [tile for tile, _, _ in order], "routings": len({r for _, _, r in order}), "comparisons": comparisons,
        "adopted": adopted, "spent_s": spent, "pools": [open_pools, gpu.pools], "longest_us": longest,
    }  # fmt: skip


@pytest.mark.parametrize("layers", [3, 4, 1])
def test_a_pair_goes_from_set_up_to_adoption(scheduler: SchedulerProcess, layers: int) -> None:
    scheduler.run(prepare)
    told = scheduler.run(through, layers)
    assert told["ready"] == ["ready", "ready"]
    assert told["first"] == []  # one launch, to know its length
    assert told["samples"]
    for candidate_us, baseline_us in told["samples"]:
        assert candidate_us == pytest.approx(100.0)
        assert baseline_us == pytest.approx(200.0)
    assert all(ok and error == 0.0 for ok, error in told["comparisons"])
    assert told["adopted"] == ["ready", [64, 64]]
    assert told["spent_s"] > 0
    assert told["longest_us"] == pytest.approx(200.0)
    assert told["routings"] == 4
    assert told["sides"].count(64) == told["sides"].count(32)
    assert told["pools"] == [1, 0]
    following = zip(told["order"], told["order"][1:], strict=False)
    assert all(after == (before + 1) % layers for before, after in following), "a layer came sooner than the others"


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
    found["before"] = bed.bench.readiness("up", huge)
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
            bench.readiness("up", bed.pair(tile).up)
            bench.measure("up", bed.pair(tile).up, 8)
    timed, asked = list(gpu.quantised), gpu.asked
    while (comparison := bench.compare(fast, 0)) is None:
        pass
    bench._scratch._a["up"].normal_()
    bench._candidates.clear()
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
