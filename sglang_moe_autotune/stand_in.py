"""Stand-ins for the MoE layers of a model: random weights of a shape, held as SGLang's own layers hold theirs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import torch

from sglang_moe_autotune.layers import LiveLayer, find_layers
from sglang_moe_autotune.shapes import GEMMS, Gemm, MoeShape

WANTED: Final = 5
"""layers that a bench rotates over"""

_ACTIVATION_DTYPES: Final = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_VARIANTS: Final = frozenset({"no-combine", "router-weight-on-input", "ungated"})
_WEIGHT_SCALE: Final = 0.02
_CURE: Final = "let a server that holds such weights tune it"


def refusal(shape: MoeShape, padding: int = 0) -> str:
    """Why no stand-in can be made for this shape, "" where one can. ``padding``: of 8-bit weights, as SGLang has it."""
    odd = ", ".join(sorted(set(shape.variant) - _VARIANTS))
    fp8, block = shape.dtype == "fp8_w8a8", shape.block_shape
    reasons = (
        (shape.ep, f"which experts the other ranks hold cannot be made up; {_CURE}"),
        (odd, f"{odd} cannot be made up without a model; {_CURE}"),
        (
            shape.activation_dtype not in _ACTIVATION_DTYPES,
            f"activations in {shape.activation_dtype} are not made up; {_CURE}",
        ),
        (
            shape.dtype is not None and not fp8,
            f"how a model packs {shape.dtype} weights is its own affair; {_CURE}",
        ),
        (
            fp8 and block is None and not shape.per_channel_quant,
            f"fp8 with one scale for an expert may come with scales for the activations; {_CURE}",
        ),
        (
            fp8 and block is None and padding,
            f"SGLang pads these weights by {padding} columns here: unset SGLANG_MOE_PADDING",
        ),
        (
            block is not None and (not fp8 or shape.N % block[0]),
            f"SGLang has no {shape.dtype or 'unquantised'} weights of N={shape.N} in blocks of {block}",
        ),
    )
    return next((reason for holds, reason in reasons if holds), "")


def layer_bytes(shape: MoeShape) -> int:
    """Device memory of one layer, scales left out."""
    width = 1 if shape.dtype == "fp8_w8a8" else 2
    return width * sum(experts * rows * columns for experts, rows, columns in (shape.w1_shape, shape.w2_shape))


def count(shape: MoeShape, free_bytes: int) -> int:
    """How many layers to make: as many as a bench rotates over, within half of what is free; 0 where none fits."""
    return min(WANTED, free_bytes // 2 // layer_bytes(shape))


def build(shape: MoeShape, layers: int, device: torch.device | str, seed: int = 0) -> list[LiveLayer]:
    """Layers that ``find_layers`` takes for a model's own. Raises ValueError where they would not be of this shape,
    torch.OutOfMemoryError where they do not fit."""
    generator = None if str(device) == "meta" else torch.Generator(device=device).manual_seed(seed)
    model = torch.nn.ModuleList(_StandIn(shape, torch.device(device), generator) for _ in range(layers))
    found = list(find_layers(model, _ACTIVATION_DTYPES[shape.activation_dtype], 0))
    for layer in found:
        if (got := layer.shape(layer.key)) != shape:
            raise ValueError(f"a stand-in for {shape.slug} looks like {got} to SGLang's lookup; {_CURE}")
    return found


class _StandIn(torch.nn.Module):
    """As much of a fused-MoE layer as is read of one."""

    def __init__(self, shape: MoeShape, device: torch.device, generator: torch.Generator | None) -> None:
        super().__init__()
        self.moe_runner_config = SimpleNamespace(
            top_k=shape.top_k,
            num_experts=shape.E,
            num_local_experts=shape.E,
            is_gated="ungated" not in shape.variant,
            no_combine="no-combine" in shape.variant,
            apply_router_weight_on_input="router-weight-on-input" in shape.variant,
        )
        self.quant_method = _Method(_quant_info(shape, device, generator))


class _Method:
    """As much of a quantisation method: its runner is the Triton one, and it tells the weights."""

    runner = SimpleNamespace(runner_backend=SimpleNamespace(is_triton=lambda: True))

    def __init__(self, quant: Any) -> None:
        self._quant = quant

    def get_triton_quant_info(self, _layer: torch.nn.Module) -> Any:
        return self._quant


def _quant_info(shape: MoeShape, device: torch.device, generator: torch.Generator | None) -> Any:
    from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo  # noqa: PLC0415 - takes seconds

    weights = {f"w{_number(gemm)}_weight": _weight(shape, gemm, device, generator) for gemm in GEMMS}
    if shape.dtype is None:
        return TritonMoeQuantInfo(**weights)
    scales = {f"w{_number(gemm)}_scale": _scale(shape, gemm, device) for gemm in GEMMS}
    return TritonMoeQuantInfo(
        **weights,
        **scales,
        use_fp8_w8a8=True,
        per_channel_quant=shape.per_channel_quant,
        block_shape=list(shape.block_shape) if shape.block_shape else None,
    )


def _number(gemm: Gemm) -> str:
    return "13" if gemm == "up" else "2"


def _size(shape: MoeShape, gemm: Gemm) -> tuple[int, int, int]:
    return shape.w1_shape if gemm == "up" else shape.w2_shape


def _weight(
    shape: MoeShape, gemm: Gemm, device: torch.device, generator: torch.Generator | None
) -> torch.Tensor:
    size, fp8 = _size(shape, gemm), shape.dtype == "fp8_w8a8"
    activation = _ACTIVATION_DTYPES[shape.activation_dtype]
    weight = torch.empty(size, dtype=torch.float8_e4m3fn if fp8 else activation, device=device)
    for expert in weight:  # one at a time: a whole fp8 layer in bf16 beside itself may not fit
        drawn = torch.empty(expert.shape, dtype=activation, device=device).normal_(generator=generator)
        expert.copy_(drawn if fp8 else drawn.mul_(_WEIGHT_SCALE))
    return weight


def _scale(shape: MoeShape, gemm: Gemm, device: torch.device) -> torch.Tensor:
    experts, rows, columns = _size(shape, gemm)
    if shape.block_shape is None:
        size = (experts, rows, 1)
    else:
        size = (experts, -(-rows // shape.block_shape[0]), -(-columns // shape.block_shape[1]))
    return torch.full(size, _WEIGHT_SCALE, dtype=torch.float32, device=device)

