"""Layers are read as SGLang's own lookup sees them, and the two GEMM calls are those that its sequence makes."""
# ruff: noqa: PLC0415 - what runs in the other process imports there

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sglang_ways import has

if TYPE_CHECKING:
    from scheduler_process import SchedulerProcess

pytestmark = pytest.mark.sglang


def prepare() -> None:
    """Leave ``layer(**changes)`` in the process: a module that looks as an MoE layer of SGLang does."""
    import builtins
    from types import SimpleNamespace

    import torch
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    from sglang_moe_autotune import releases

    releases.publish_server_args()

    class Layer(torch.nn.Module):
        def __init__(self, backend: str, quant: dict[str, object], config: dict[str, object]) -> None:
            super().__init__()
            e, n, k = 6, 32, 64
            weights = {
                "w13_weight": torch.zeros(e, 2 * n, k, dtype=torch.bfloat16),
                "w2_weight": torch.zeros(e, k, n, dtype=torch.bfloat16),
            }
            facts = {"num_experts": e, "num_local_experts": e, "top_k": 2}
            self.moe_runner_config = MoeRunnerConfig(**{**facts, **config})
            runner = SimpleNamespace(runner_backend=getattr(MoeRunnerBackend, backend))
            self.quant_method = SimpleNamespace(
                runner=runner, get_triton_quant_info=lambda _layer: TritonMoeQuantInfo(**{**weights, **quant})
            )

    def layer(backend: str = "TRITON", quant: object = None, **config: object) -> Layer:
        return Layer(backend, quant or {}, config)  # type: ignore[arg-type]

    builtins.layer = layer  # type: ignore[attr-defined]


def found(padding: int) -> list[object]:
    import builtins

    import torch

    from sglang_moe_autotune.layers import find_layers

    make = builtins.layer  # type: ignore[attr-defined]
    fp8 = torch.zeros(6, 64, 192, dtype=torch.uint8), torch.zeros(6, 64, 160, dtype=torch.uint8)
    eight_bit = {"use_fp8_w8a8": True, "w13_weight": fp8[0], "w2_weight": fp8[1]}
    model = torch.nn.ModuleList([
        make(),
        torch.nn.Linear(3, 3),
        make("MARLIN"),
        make("DEEP_GEMM"),
        make(num_experts=24),
        make(apply_router_weight_on_input=True, no_combine=True, inplace=False),
        make(quant={"b13": torch.zeros(6, 64)}),
        make(quant=eight_bit),
        make(quant={**eight_bit, "block_shape": [128, 128]}),
        make(quant={**eight_bit, "per_channel_quant": True}),
        make(quant={"use_int4_w4a16": True, "block_shape": [0, 128]}),
    ])  # fmt: skip
    return [[*x.key, x.ep, list(x.variant), x.shape(x.key).slug] for x in find_layers(model, torch.bfloat16, padding)]


def test_layers_are_found_and_named_as_the_lookup_is_told(scheduler: SchedulerProcess) -> None:
    scheduler.run(prepare)
    rows = scheduler.run(found, 128)
    assert len(rows) == 8  # Marlin and DeepGEMM layers are not Triton's
    plain, ep, on_input, bias, tensor, block, channel, int4 = rows
    assert plain == [[6, 64, 64], [6, 64, 32], 2, None, None, False, False, [], "E6-N32-K64-top2-bf16"]
    assert ep[6] is True
    assert on_input[7] == ["no-combine", "router-weight-on-input"]
    assert bias[7] == ["bias"]
    # SGLang takes its padding off 8-bit weights without blocks, and off nothing else
    assert (tensor[1], tensor[3], tensor[4]) == ([6, 64, 32], "fp8_w8a8", None)
    assert (block[1], block[4]) == ([6, 64, 160], [128, 128])
    assert (channel[1], channel[5]) == ([6, 64, 32], True)
    assert (int4[3], int4[4]) == ("int4_w4a16", [0, 128])
    assert len({row[8] for row in rows}) == 8


def compare_with_the_real_sequence(config: dict[str, object]) -> dict[str, object]:
    import builtins
    import inspect

    import torch

    from sglang_moe_autotune import releases
    from sglang_moe_autotune.layers import Buffers, find_layers, gemm_call, quant_info

    fused = releases.fused_module()
    module = builtins.layer(**config)  # type: ignore[attr-defined]
    (layer,) = find_layers(torch.nn.ModuleList([module]), torch.bfloat16, 0)
    quant, runner = quant_info(module), module.moe_runner_config
    m, top_k, k, n = 3, 2, 64, 32
    hidden, weights = torch.randn(m, k).bfloat16(), torch.rand(m, top_k)
    ids = torch.randint(0, 6, (m, top_k), dtype=torch.int32)
    order = [torch.zeros(96, dtype=torch.int32), torch.zeros(6, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)]
    tile = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1}
    calls: list[inspect.BoundArguments] = []
    invoke = releases.invoke_function()
    signature = inspect.signature(invoke)

    class EnoughError(Exception):
        """Both calls are seen; what follows needs a GPU."""

    def keep(*args: object, **kwargs: object) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        calls.append(bound)
        if len(calls) == 2:
            raise EnoughError

    sequence = fused._fused_moe_kernel_sequence
    named = {
        "b1": quant.b13, "b2": quant.b2, "use_fp8_w8a8": False, "use_int8_w8a8": False, "use_int8_w8a16": False,
        "use_int4_w4a16": False, "per_channel_quant": False, "w1_scale": None, "w2_scale": None, "w1_zp": None,
        "w2_zp": None, "a1_scale": None, "a2_scale": None, "block_shape": None, "activation": runner.activation,
        "no_combine_keep_router_weight": getattr(runner, "no_combine_keep_router_weight", False),
        "is_gated": True, "no_combine": runner.no_combine, "inplace": not runner.no_combine,
        "apply_router_weight_on_input": runner.apply_router_weight_on_input, "routed_scaling_factor": None,
        "gemm1_alpha": None, "gemm1_limit": None, "filter_expert": layer.ep,
        "hidden_states": hidden, "w1": quant.w13_weight, "w2": quant.w2_weight, "topk_weights": weights,
        "topk_ids": ids, "sorted_token_ids": order[0], "expert_ids": order[1], "num_tokens_post_padded": order[2],
        "config": tile, "down_config": None, "down_moe_use_tma": False, "up_moe_use_tma": False,
    }  # fmt: skip
    parameters = inspect.signature(sequence).parameters
    fused.invoke_fused_moe_kernel = keep
    try:
        sequence(**{name: value for name, value in named.items() if name in parameters})
    except EnoughError:
        pass
    finally:
        fused.invoke_fused_moe_kernel = invoke
    differences: list[str] = []
    for gemm, real in zip(("up", "down"), calls, strict=True):
        a = torch.empty(m, k) if gemm == "up" else torch.empty(m * top_k, n)
        c = torch.empty(m * top_k, 2 * n) if gemm == "up" else torch.empty(m, top_k, k)
        buffers = Buffers(a.bfloat16(), c.bfloat16(), weights, ids, *order)
        args, kwargs = gemm_call(gemm, layer, quant, buffers, top_k, tile)  # type: ignore[arg-type]
        ours = signature.bind(*args, **{k: v for k, v in kwargs.items() if k in signature.parameters})
        ours.apply_defaults()
        for name, theirs in real.arguments.items():
            mine = ours.arguments[name]
            if isinstance(theirs, torch.Tensor) and isinstance(mine, torch.Tensor):
                # Without a combine SGLang puts one more dimension in front of C; the kernel reads the last two.
                same = theirs.numel() == mine.numel() and theirs.dtype == mine.dtype
                same = same and theirs.shape[-2:] == mine.shape[-2:] and theirs.stride()[-2:] == mine.stride()[-2:]
            else:
                same = theirs is mine or theirs == mine
            if not same:
                differences.append(f"{gemm} {name}: SGLang {theirs}, ours {mine}")
    return {"differences": differences, "calls": len(calls)}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param({}, id="plain"),
        pytest.param({"num_experts": 24}, id="c15-experts-of-other-ranks"),
        pytest.param({"apply_router_weight_on_input": True}, id="router-weight-on-input"),
        pytest.param({"no_combine": True, "inplace": False}, id="no-combine"),
        pytest.param(
            {"no_combine": True, "inplace": False, "no_combine_keep_router_weight": True},
            id="no-combine-keeps-the-weight",
        ),
    ],
)
def test_the_two_calls_are_those_of_sglangs_own_sequence(
    scheduler: SchedulerProcess, config: dict[str, object]
) -> None:
    for name in config:
        if not has("sglang.srt.layers.moe.moe_runner.base", "MoeRunnerConfig", name):
            pytest.skip(f"SGLang's MoeRunnerConfig has no field {name} here")
    scheduler.run(prepare)
    told = scheduler.run(compare_with_the_real_sequence, config)
    assert told == {"differences": [], "calls": 2}
