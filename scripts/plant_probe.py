"""A planted kernel in place of SGLang's own in a live server, for ``gpu_planted.py``: the module that ``PLANTED`` names
has it."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys

HOME = "sglang.kernels.ops.moe.fused_moe_triton_kernels"
KERNEL = "fused_moe_kernel"


def register() -> None:
    """The entry point; only scheduler processes launch kernels. What serves and what tunes then see the plant alike."""
    if multiprocessing.parent_process() is None or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    planted = getattr(importlib.import_module(os.environ["PLANTED"]), KERNEL)
    setattr(importlib.import_module(HOME), KERNEL, planted)
