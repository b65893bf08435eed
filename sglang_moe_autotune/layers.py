"""The live MoE layers of a model that run SGLang's Triton path, and the two GEMM calls each of them makes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_moe_autotune.lookup import CallKey
from sglang_moe_autotune.shapes import ActivationDtype, Gemm, MoeShape

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ACTIVATION_DTYPES: dict[torch.dtype, ActivationDtype] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}
_QUANT_FLAGS = ("use_fp8_w8a8", "use_int8_w8a8", "use_int4_w4a16", "use_int8_w8a16")


class LiveLayer(NamedTuple):
    """One MoE layer of the model that serves; weights are fetched anew for every use (they can be rebound)."""

    module: torch.nn.Module
    key: CallKey
    """what the config lookup is told about this layer; top_k is 0 where the model does not say it"""
    activation_dtype: ActivationDtype
    ep: bool
    variant: tuple[str, ...]

    def makes(self, key: CallKey) -> bool:
        """Is this a lookup that this layer makes, whatever top_k it has?"""
        return self.key == key._replace(top_k=self.key.top_k)

    def shape(self, key: CallKey) -> MoeShape:
        """The shape for a lookup of this layer; ``key`` knows the top_k of the call."""
        return MoeShape(
            key.w1_shape, key.w2_shape, key.top_k, key.dtype, key.block_shape, key.per_channel_quant,
            self.activation_dtype, self.ep, self.variant,
        )  # fmt: skip


class LiveLayers:
    """All layers of the models of this process, and which shape a lookup stands for."""

    def __init__(self) -> None:
        self._layers: list[LiveLayer] = []
        self._shapes: dict[CallKey, MoeShape | None] = {}

    def __len__(self) -> int:
        return len(self._layers)

    def add(self, layers: Iterable[LiveLayer]) -> None:
        self._layers += layers
        self._shapes.clear()

    @property
    def keys(self) -> frozenset[CallKey]:
        """The unlike calls that these layers make."""
        return frozenset(layer.key for layer in self._layers)

    def shape_of(self, key: CallKey) -> MoeShape | None:
        """The shape of a call; None where no layer makes it, or layers of unlike kinds share it."""
        if key not in self._shapes:
            shapes = {layer.shape(key) for layer in self._layers if layer.makes(key)}
            self._shapes[key] = shapes.pop() if len(shapes) == 1 else None
        return self._shapes[key]

    def of(self, shape: MoeShape) -> list[LiveLayer]:
        """The layers of a shape."""
        key = call_key(shape)
        return [layer for layer in self._layers if layer.makes(key) and layer.shape(key) == shape]


def call_key(shape: MoeShape) -> CallKey:
    """What the config lookup is told about a layer of this shape."""
    return CallKey(
        shape.w1_shape, shape.w2_shape, shape.top_k, shape.dtype, shape.block_shape, shape.per_channel_quant
    )


class Buffers(NamedTuple):
    """Operands of one GEMM besides the weights.

    a: (M, K) for up, (M * top_k, N) for down; c: (M * top_k, 2N) for up, (M, top_k, K) for down;
    topk_weights and topk_ids: (M, top_k); the last three as ``moe_align_block_size`` returns them.
    """

    a: torch.Tensor
    c: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_tokens_post_padded: torch.Tensor


def find_layers(model: torch.nn.Module, activation_dtype: torch.dtype, padding: int) -> Iterator[LiveLayer]:
    """Every layer whose quantisation method chose the Triton runner.

    ``padding`` is SGLang's own padding of K in 8-bit weights without blocks. Source: the arguments that
    ``_prepare_fused_moe_run`` hands to the lookup.
    """
    for module in model.modules():
        if (quant := quant_info(module)) is None or quant.w13_weight.dim() != 3:
            continue
        runner_config = getattr(module, "moe_runner_config", None)
        block = (quant.block_shape[0], quant.block_shape[1]) if quant.block_shape else None
        eight_bit = quant.use_fp8_w8a8 or quant.use_int8_w8a8
        padded = padding if eight_bit and block is None else 0
        w1, w2 = quant.w13_weight, quant.w2_weight
        key = CallKey(
            (w1.shape[0], w1.shape[1], w1.shape[2]),
            (w2.shape[0], w2.shape[1], w2.shape[2] - padded),
            getattr(runner_config, "top_k", None) or 0,
            _dtype_selector(quant, activation_dtype),
            block,
            bool(quant.per_channel_quant),
        )
        ep = _filters_experts(runner_config)
        yield LiveLayer(module, key, _ACTIVATION_DTYPES[activation_dtype], ep, _variant(quant, runner_config))


def quant_info(module: torch.nn.Module) -> Any | None:
    """SGLang's TritonMoeQuantInfo of a layer that runs on Triton, else None."""
    method = getattr(module, "quant_method", None)
    if method is None or not hasattr(method, "get_triton_quant_info") or not hasattr(module, "moe_runner_config"):
        return None
    runner = getattr(method, "runner", None) or getattr(getattr(module, "scheme", None), "runner", None)
    backend = getattr(runner, "runner_backend", None)
    if backend is None or not backend.is_triton():
        return None
    try:
        quant = method.get_triton_quant_info(module)
    except (AttributeError, NotImplementedError):
        return None  # weights absent (offloaded, not loaded yet) or a method without a Triton form
    return None if getattr(quant, "use_mxfp8", False) else quant


def weight_operands(gemm: Gemm, quant: Any) -> tuple[torch.Tensor | None, ...]:
    """What one GEMM reads of a layer: weight, bias, the weight's scale and zero points."""
    if gemm == "up":
        return quant.w13_weight, quant.b13, quant.w13_scale, quant.w13_zp
    return quant.w2_weight, quant.b2, quant.w2_scale, quant.w2_zp


def gemm_call(
    gemm: Gemm, layer: LiveLayer, quant: Any, buffers: Buffers, top_k: int, config: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of ``invoke_fused_moe_kernel`` as ``_fused_moe_kernel_sequence`` builds them.

    The caller drops what the release's function does not take; whether the result is the launch that serves
    is proven by the binary it needs, which serving must have loaded already.
    """
    import triton.language as tl  # noqa: PLC0415 - only its two dtypes are needed

    up = gemm == "up"
    on_input = "router-weight-on-input" in layer.variant
    a = buffers.a
    compute_type = tl.bfloat16 if a.dtype == torch.bfloat16 else tl.float16
    weight, bias, scale, zero_points = weight_operands(gemm, quant)
    positional = (
        a,
        weight,
        bias,
        buffers.c,
        quant.a13_scale if up else quant.a2_scale,
        scale,
        zero_points,
        buffers.topk_weights,
        buffers.topk_ids,
        buffers.sorted_token_ids,
        buffers.expert_ids,
        buffers.num_tokens_post_padded,
        on_input if up else not on_input and ("no-combine" not in layer.variant or "keeps-weight" in layer.variant),
        top_k if up else 1,
        config,
    )
    named: dict[str, Any] = {flag: getattr(quant, flag) for flag in _QUANT_FLAGS}
    named |= {
        "compute_type": compute_type,
        "per_channel_quant": quant.per_channel_quant,
        "block_shape": quant.block_shape,
        "filter_expert": layer.ep,
    }
    if not up:
        named["router_topk"] = top_k
    return positional, named


def _dtype_selector(quant: Any, activation_dtype: torch.dtype) -> str | None:
    for flag in _QUANT_FLAGS:
        if getattr(quant, flag):
            return flag.removeprefix("use_")
    return "float32" if activation_dtype == torch.float32 else None


def _filters_experts(runner_config: Any) -> bool:
    experts = getattr(runner_config, "num_experts", None)
    return experts is None or experts != getattr(runner_config, "num_local_experts", None)


def _variant(quant: Any, runner_config: Any) -> tuple[str, ...]:
    flags = {
        "bias": quant.b13 is not None or quant.b2 is not None,
        "fused-swiglu": getattr(quant, "fuse_swiglu_interleaved", False),
        "keeps-weight": getattr(runner_config, "no_combine_keep_router_weight", False),
        "no-combine": getattr(runner_config, "no_combine", False),
        "router-weight-on-input": getattr(runner_config, "apply_router_weight_on_input", False),
        "ungated": not getattr(runner_config, "is_gated", True),
        "zero-points": quant.w13_zp is not None or quant.w2_zp is not None,
    }
    return tuple(sorted(name for name, on in flags.items() if on))
