"""A model with unlike MoE shapes, for ``gpu_search.py``: as a SGLang plugin it gives every other layer of a
Qwen3-MoE the experts that ``MIXED_MODEL`` names, as ``EXPERTS,WIDTH,TOP_K``."""

from __future__ import annotations

import copy
import multiprocessing
import os
import sys
from typing import Any

TARGET = "sglang.srt.models.qwen3_moe.Qwen3MoeSparseMoeBlock.__init__"


def register() -> None:
    """The entry point; only scheduler processes build a model."""
    if multiprocessing.parent_process() is None or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - in schedulers only

    HookRegistry.register(TARGET, other_experts, HookType.BEFORE)


def other_experts(block: Any, layer_id: int, config: Any, *args: Any, **kwargs: Any) -> Any:
    """BEFORE the block is built: the odd layers get another config."""
    if layer_id % 2 == 0:
        return None
    experts, width, top_k = map(int, os.environ["MIXED_MODEL"].split(","))
    config = copy.copy(config)
    config.num_experts, config.moe_intermediate_size, config.num_experts_per_tok = experts, width, top_k
    return (block, layer_id, config, *args), kwargs
