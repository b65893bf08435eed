#!/usr/bin/env python3
"""The layers that SGLang's Triton MoE path serves, one case a row: how SGLang builds it, and where it was shown.

A case with a builder makes SGLang's real ``FusedMoE`` layer with its real quantisation method, fills its weights and
runs its ``process_weights_after_loading``; tests/test_coverage.py does that on the CPU, scripts/gpu_coverage.py on a
GPU. Run as a script it prints the table of docs/coverage.md; a test compares.
"""
# ruff: noqa: PLC0415 - the table is printed without torch and SGLang

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ROOT: Final = Path(__file__).resolve().parent.parent
GPU_RESULTS: Final = ROOT / "docs" / "coverage_gpu.json"
"""what scripts/gpu_coverage.py found; a case counts as shown on a GPU where it stands there with equal outputs"""

Shown = Literal["interpreted", "compiled", "called"]
"""On the CPU. ``called``: SGLang's own path makes the very lookup and the very two calls that the bench rebuilds.
``compiled``: that, and the recorded launches compile for sm_90. ``interpreted``: that, and Triton's interpreter gives
equal outputs for two configs."""


class Size(NamedTuple):
    """What a model would say of its MoE layers."""

    experts: int
    hidden: int
    intermediate: int
    top_k: int


SMALL: Final = Size(8, 256, 128, 2)
LARGE: Final = Size(128, 2048, 768, 8)


class Case(NamedTuple):
    """One row. Without ``quant`` there is no layer to build: tests named in ``tests`` show it."""

    name: str
    says: str
    quant: str | None = None
    """a key of ``_CONFIGS``"""
    shown: Shown = "compiled"
    dtype: str = "bfloat16"
    layer: Mapping[str, Any] = MappingProxyType({})
    """arguments of ``FusedMoE`` beside the sizes"""
    runner: Mapping[str, Any] = MappingProxyType({})
    """fields of the runner's config that models set, and no argument of a layer does"""
    shared: int = 0
    """shared experts fused into the routed ones: E + n experts, top-k + n"""
    ep: int = 1
    """ranks that the experts are spread over"""
    padding: int = 0
    """columns that SGLang pads the weights by, SGLANG_MOE_PADDING"""
    since: str = ""
    """first release that has it; "" where all have"""
    tuned: bool = True
    tests: tuple[str, ...] = ()
    note: str = ""


def _test(module: str, name: str) -> str:
    return f"tests/test_{module}.py::{name}"


CASES: Final[tuple[Case, ...]] = (
    Case("bf16", "bf16", "none"),
    Case("fp16", "fp16", "none", "interpreted", "float16"),
    Case("fp8-tensor-online", "fp8_w8a8, one scale for an expert, quantised when loaded", "fp8_online", "interpreted"),
    Case("fp8-tensor", "fp8_w8a8, one scale for an expert, from a checkpoint", "fp8_tensor", "interpreted"),
    Case("fp8-tensor-static", "the same with static scales of the activations", "fp8_static"),
    Case(
        "fp8-tensor-padded", "the same with `SGLANG_MOE_PADDING`", "fp8_tensor", "interpreted", padding=128,
        note="SGLang pads on AMD GPUs only; the lookup is told the size without the padding",
    ),
    Case("fp8-channel", "fp8_w8a8 per channel", "fp8_channel", "interpreted"),
    Case("fp8-block-128", "fp8_w8a8, blocks of [128, 128]", "fp8_block_128", "interpreted"),
    Case("fp8-block-64", "fp8_w8a8, blocks of [64, 64]", "fp8_block_64", "interpreted"),
    Case("fp8-block-64x128", "fp8_w8a8, blocks of [64, 128]", "fp8_block_64x128", "interpreted"),
    Case("fp8-block-128x64", "fp8_w8a8, blocks of [128, 64]", "fp8_block_128x64"),
    Case("int8-channel", "int8_w8a8 per channel", "int8_channel", "interpreted"),
    Case("int8-block-128", "int8_w8a8, blocks of [128, 128]", "int8_block", "interpreted"),
    Case("int8-w8a16", "int8_w8a16 (GPTQ)", "gptq_8", "interpreted"),
    Case(
        "int4-w4a16", "int4_w4a16 (GPTQ): BLOCK_SIZE_K divides both depths, N is packed", "gptq_4", "interpreted"
    ),
    Case("int4-w4a16-zero-points", "int4_w4a16 with zero points", "gptq_4_zp", "interpreted"),
    Case("bias", "biases", "none", "interpreted", layer={"with_bias": True}),
    Case("bias-fp8", "biases with fp8", "fp8_block_128", layer={"with_bias": True}),
    Case("gelu", "activation gelu", "none", layer={"activation": "gelu"}),
    Case(
        "swiglu-alpha", "activation of GPT-OSS: swiglu with alpha and limit", "none", "interpreted",
        layer={"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0},
    ),
    Case("swiglu-clamp", "silu with a limit", "none", layer={"gemm1_clamp_limit": 7.0}),
    Case(
        "relu2-ungated", "activation relu2, without a gate", "none", "interpreted",
        layer={"activation": "relu2", "is_gated": False},
    ),
    Case(
        "silu-ungated", "activation silu, without a gate", "none", layer={"is_gated": False},
    ),
    Case(
        "router-weight-on-input", "`apply_router_weight_on_input`", "none", "interpreted",
        layer={"apply_router_weight_on_input": True},
    ),
    Case(
        "no-combine", "`no_combine`", "none", "interpreted", layer={"no_combine": True, "inplace": False},
    ),
    Case(
        "no-combine-weighted", "`no_combine` that keeps the router's weights", "none", "interpreted",
        layer={"no_combine": True, "inplace": False}, runner={"no_combine_keep_router_weight": True}, since="0.5.23",
    ),
    Case("outplace", "outputs that are not written over the inputs", "none", layer={"inplace": False}),
    Case("scaled", "`routed_scaling_factor`", "none", layer={"routed_scaling_factor": 2.5}),
    Case("shared-expert", "fused shared experts: E + 1 experts, top-k + 1", "none", "interpreted", shared=1),
    Case(
        "ep", "expert parallel: local experts, ids of -1", "none", "interpreted", ep=4,
        note="one process with a quarter of the experts",
    ),
    Case("ep-fp8", "expert parallel with fp8 blocks", "fp8_block_128", ep=4),
    Case(
        "lora", "LoRA's and other synthetic lookups: passed through",
        tests=(_test("plugin", "test_c35_synthetic_lookups_pass_through_and_their_valueerror_reaches_the_caller"),),
        tuned=False,
    ),
    Case(
        "tma", "down configs and rows with `USE_TMA`: left to SGLang",
        tests=(_test("lookup", "test_only_a_plain_pair_is_a_baseline"),), tuned=False,
    ),
    Case(
        "swap-ab", "swap_ab: fp8 tiles of few rows on Hopper",
        tests=(_test("coverage", "test_variants_that_the_launcher_chooses_are_recorded"),),
    ),
    Case(
        "pdl", "programmatic dependent launch", since="0.5.20",
        tests=(_test("coverage", "test_variants_that_the_launcher_chooses_are_recorded"),),
    ),
    Case(
        "fused-epilogue", "fused epilogue (`SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED`): recorded, not tuned",
        since="0.5.20",
        tests=(_test("coverage", "test_a_fused_epilogue_is_named_and_not_tuned"),), tuned=False,
    ),
    Case(
        "batch-invariant", "batch-invariant mode: SGLang's fixed tile stands",
        tests=(_test("plugin", "test_c28_deterministic_inference_keeps_sglangs_fixed_tile_and_records_nothing"),),
        tuned=False,
    ),
    Case(
        "speculative", "speculative decoding: M = batch x draft tokens",
        tests=(_test("coverage", "test_c34_m_is_batch_times_draft_tokens_and_each_is_settled"),),
    ),
    Case(
        "quantised-once", "activations quantised once for a layer (`SGLANG_OPT_MOE_QUANT_ONCE`)", since="0.5.20",
        tuned=False, note="a launch that is rebuilt and that serving has not made is never tuned",
    ),
    Case(
        "small-gpu", "fp8 where SGLang's own config needs more shared memory than the GPU has: made to fit",
        tests=(
            _test("fitting", "test_c01_the_config_that_ends_small_gpus_loses_a_stage_and_nothing_else"),
            _test("coverage", "test_c01_c02_c03_the_lookup_of_a_small_gpu_answers_with_a_config_that_fits"),
            _test("coverage", "test_c01_the_fitted_config_compiles_into_what_the_gpu_has"),
        ),
    ),
    Case(
        "two-models", "several unlike MoE shapes in one process (target and draft model)",
        tests=(_test("coverage", "test_unlike_layers_of_one_process_keep_apart"),),
    ),
    Case(
        "one-key-two-kinds", "layers that share a lookup and differ in what they compute: left to SGLang",
        tests=(_test("coverage", "test_unlike_layers_of_one_process_keep_apart"),), tuned=False,
    ),
    Case(
        "not-triton", "layers on Marlin, DeepGEMM, FlashInfer: nothing is recorded",
        tests=(_test("layers", "test_layers_are_found_and_named_as_the_lookup_is_told"),), tuned=False,
    ),
)  # fmt: skip


def case(name: str) -> Case:
    return next(c for c in CASES if c.name == name)


# -- SGLang's quantisation configs ------------------------------------------------------------------------------


def _quantisation(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"sglang.srt.layers.quantization.{module}"), name)


def _fp8(serialized: bool, block: tuple[int, int] | None = None, scheme: str = "dynamic") -> Any:
    return _quantisation("fp8", "Fp8Config")(
        is_checkpoint_fp8_serialized=serialized,
        activation_scheme=scheme,
        weight_block_size=list(block) if block else None,
    )


def _wna16(bits: int, *, zero_points: bool = False) -> Any:
    checkpoint = {
        "quant_method": "gptq", "bits": bits, "group_size": 128, "sym": not zero_points, "desc_act": False,
        "lm_head": False,
    }  # fmt: skip
    return _quantisation("moe_wna16", "MoeWNA16Config")("gptq", bits, 128, zero_points, False, None, checkpoint)


_CONFIGS: Final[dict[str, Callable[[], Any]]] = {
    "none": lambda: None,
    "fp8_online": lambda: _fp8(False),
    "fp8_tensor": lambda: _fp8(True),
    "fp8_static": lambda: _fp8(True, scheme="static"),
    "fp8_channel": lambda: _quantisation("w8a8_fp8", "W8A8Fp8Config")(True),
    "fp8_block_128": lambda: _fp8(True, (128, 128)),
    "fp8_block_64": lambda: _fp8(True, (64, 64)),
    "fp8_block_64x128": lambda: _fp8(True, (64, 128)),
    "fp8_block_128x64": lambda: _fp8(True, (128, 64)),
    "int8_channel": lambda: _quantisation("w8a8_int8", "W8A8Int8Config")({}),
    "int8_block": lambda: _quantisation("blockwise_int8", "BlockInt8Config")(True, "dynamic", None, [128, 128]),
    "gptq_8": lambda: _wna16(8),
    "gptq_4": lambda: _wna16(4),
    "gptq_4_zp": lambda: _wna16(4, zero_points=True),
}


# -- layers -----------------------------------------------------------------------------------------------------


def set_up() -> None:
    """Publish a server's arguments and open groups of one rank, once for a process."""
    from sglang_moe_autotune import releases

    releases.publish_server_args()
    state = importlib.import_module("sglang.srt.distributed.parallel_state")
    if state.model_parallel_is_initialized():
        return
    with tempfile.NamedTemporaryFile(prefix="moe-autotune-group-", delete=False) as file:
        path = file.name
    Path(path).unlink()
    context = importlib.import_module("sglang.srt.runtime_context") if _has("sglang.srt.runtime_context") else None
    if hasattr(context, "derive_spawn_ranks"):  # from 0.5.23 on a layer asks this, and not the groups
        one = dict.fromkeys(("tp_size", "attn_cp_size", "attn_tp_size", "moe_dp_size", "moe_ep_size"), 1)
        ranks = context.derive_spawn_ranks(world_rank=0, ep_join_rank_offset=0, **one)
        context.get_parallel().override_permanently(**ranks)
    state.init_distributed_environment(
        world_size=1, rank=0, distributed_init_method=f"file://{path}", local_rank=0, backend="gloo"
    )
    state.initialize_model_parallel()


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def build(of: Case, size: Size, device: str, layer_id: int = 0) -> Any:
    """SGLang's layer with made-up weights, processed as after loading. Raises what SGLang raises."""
    import torch
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    if of.quant is None:
        raise ValueError(f"{of.name} has no layer of its own: {', '.join(of.tests)} show it")
    dtype = getattr(torch, of.dtype)
    extra = {"num_fused_shared_experts": of.shared} if of.shared else {}
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            layer = FusedMoE(
                num_experts=size.experts + of.shared,
                hidden_size=size.hidden,
                intermediate_size=size.intermediate,
                layer_id=layer_id,
                top_k=size.top_k + of.shared,
                quant_config=_CONFIGS[of.quant](),
                params_dtype=dtype,
                **extra,
                **of.layer,
            )
            generator = torch.Generator(device=device).manual_seed(100 + layer_id)
            for name, _ in list(layer.named_parameters()):
                _fill(of, layer, name, generator)
            layer.quant_method.process_weights_after_loading(layer)
    finally:
        torch.set_default_dtype(before)
    if of.padding:
        for name in ("w13_weight", "w2_weight"):
            padded = torch.nn.functional.pad(getattr(layer, name).data, (0, of.padding))
            setattr(layer, name, torch.nn.Parameter(padded, requires_grad=False))
    # The config is one object that layer, method and runner share; SGLang counts all ranks' experts in it.
    layer.moe_runner_config.num_experts *= of.ep
    for name, value in of.runner.items():
        setattr(layer.moe_runner_config, name, value)
    return layer


_SPREAD: Final = {"int8": 73.0, "float8_e4m3fn": 1.0}
_PACKED_SPREAD: Final = {"gptq_8": 73.0, "gptq_4": 4.6, "gptq_4_zp": 6.5}
"""standard deviation of what is drawn for the weights of a type; scales bring it to ``_STD``"""
_STD: Final = 0.03


def _spread(of: Case, layer: Any, scale: str) -> float | None:
    """Of the weight that a scale belongs to; None where the weight is not quantised yet."""
    if scale.endswith("_scales"):
        return _PACKED_SPREAD[of.quant or ""]
    weight = getattr(layer, scale.removesuffix("_inv").removesuffix("_scale"))
    return _SPREAD.get(str(weight.dtype).removeprefix("torch."))


def _fill(of: Case, layer: Any, name: str, generator: Any) -> None:
    """Random values of a sensible size, in place."""
    import torch

    value = getattr(layer, name).data
    kind = str(value.dtype).removeprefix("torch.")
    if not value.numel() or kind == "int32":
        return
    if "input_scale" in name:
        value.fill_(0.02)
    elif "scale" in name:
        if (spread := _spread(of, layer, name)) is not None:
            drawn = torch.rand(value.shape, device=value.device, generator=generator, dtype=torch.float32)
            value.copy_((drawn + 0.5) * (_STD / spread))
    elif kind in ("int8", "uint8"):
        low, high = (-127, 128) if kind == "int8" else (0, 256)
        value.random_(low, high, generator=generator)
    else:
        std = 1.0 if kind.startswith("float8") else 0.1 if "bias" in name else _STD
        for part in value:  # one expert at a time: a whole fp8 layer in fp32 beside itself may not fit
            drawn = torch.randn(part.shape, device=value.device, generator=generator, dtype=torch.float32)
            part.copy_(drawn * std)


def forward(layer: Any, hidden: Any, weights: Any, ids: Any) -> Any:
    """The output of SGLang's own runner for this layer; ``hidden`` may be written over."""
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    dispatched = StandardDispatchOutput(
        hidden_states=hidden, hidden_states_scale=None, topk_output=StandardTopKOutput(weights, ids, None)
    )
    method = layer.quant_method
    return method.runner.run(dispatched, method.get_triton_quant_info(layer)).hidden_states


@contextlib.contextmanager
def padded(of: Case) -> Iterator[None]:
    """SGLang with the padding of a case, as if the process had been started with ``SGLANG_MOE_PADDING``."""
    from sglang_moe_autotune import releases

    modules = [releases.fused_module(), sys.modules[releases.invoke_function().__module__]]
    before = [module.padding_size for module in modules]
    for module in modules:
        module.padding_size = of.padding
    try:
        yield
    finally:
        for module, padding in zip(modules, before, strict=True):
            module.padding_size = padding


# -- the table --------------------------------------------------------------------------------------------------

_WORDS: Final = {
    "interpreted": "CPU (interpreter: equal outputs; compiled for sm_90)",
    "compiled": "CPU (compiled for sm_90)",
    "called": "CPU (the same lookup and calls)",
}


def on_gpu() -> dict[str, Any]:
    """The cases of the last runs on GPUs, by name."""
    return json.loads(GPU_RESULTS.read_text()) if GPU_RESULTS.exists() else {}


def available(of: Case, version: str) -> bool:
    """Has this release of SGLang the case?"""
    return _numbers(of.since) <= _numbers(version)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdecimal()]


def state(of: Case, gpu: dict[str, Any]) -> str:
    """Where it was shown, in words."""
    words = []
    if (found := gpu.get(of.name)) and found.get("equal"):
        words.append(f"GPU ({found['device']})")
    if of.quant is not None:
        words.append(_WORDS[of.shown])
    elif of.tests:
        words.append("CPU (test)")
    return ", ".join(words) or "not shown"


def table() -> str:
    """The table of docs/coverage.md."""
    gpu = on_gpu()
    lines = ["| case | what happens | shown on |", "|---|---|---|"]
    for of in CASES:
        does = "tuned" if of.tuned else "left to SGLang"
        more = "; ".join(filter(None, [f"since {of.since}" if of.since else "", of.note]))
        lines.append(f"| {of.says}{f' ({more})' if more else ''} | {does} | {state(of, gpu)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
