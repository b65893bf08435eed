"""A bench's small operations, each once and on tiny tensors, before anything is served.

CUDA loads a kernel of PyTorch's when it is first launched, which takes up to some milliseconds. In the first passes of
tuning that would be many times what a pass may take, one operation after the other; at a server's start it is nothing.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final

import torch

from sglang_moe_autotune import correctness, routings
from sglang_moe_autotune.scratch import Scratch
from sglang_moe_autotune.shapes import GEMMS
from sglang_moe_autotune.timing import PairTimer, Rotation

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_moe_autotune.scratch import Align
    from sglang_moe_autotune.shapes import Gemm, MoeShape
    from sglang_moe_autotune.timing import Side

logger = logging.getLogger("sglang.moe_autotune")

_TOKENS: Final = 4
_MANY: Final = 1 << 16
"""ids above which a permutation is sorted by another kernel than a few are"""
_MOST_S: Final = 0.3
"""after which no further shape is begun: shapes differ in few operations"""
_SPIN_US: Final = 100.0


def rehearse(shapes: Iterable[MoeShape], align: Align) -> None:
    """Run what benches of these shapes will run besides the GEMMs. Leaves no memory behind, and never raises: what it
    cannot do now is done later, at the price of a longer pass."""
    begun_s = time.perf_counter()
    try:
        for shape in shapes:
            if time.perf_counter() - begun_s < _MOST_S:
                _one(shape, align)
    except Exception:
        logger.warning("MoE autotune could not prepare its first passes; they may take longer.", exc_info=True)
    else:
        logger.info("MoE autotune prepared its first passes in %.0f ms.", 1e3 * (time.perf_counter() - begun_s))


def _one(shape: MoeShape, align: Align) -> None:
    local_share = 0.5 if shape.ep else 1.0
    scratch = Scratch(shape, _TOKENS, align, local_share, flush=False)
    try:
        for _ in scratch.fill((*routings.MANY, *correctness.ROUTINGS)):
            pass
        with scratch.allocating():
            torch.randperm(_MANY, device=scratch.output.device, generator=scratch.generator)
        scratch.buffers("up", 16, routings.MANY[0], scratch.output)
        for _ in correctness.case_steps(scratch, _launches, _terms):
            pass
        PairTimer().time(_side(scratch), _side(scratch), Rotation(1, 1), (1.0, 1.0), 1, _SPIN_US)
        torch.cuda.current_stream().synchronize()
    finally:
        scratch.close()


def _launches(_: Gemm) -> tuple[correctness.Launch, correctness.Launch]:
    """Two that agree, so that a comparison goes on to its end."""
    return _write, _write


def _write(written: correctness.Written) -> None:
    written.rows.fill_(1.0)


def _terms(_: Gemm) -> correctness.Terms:
    return correctness.Terms(tolerance=1.0, runs=4, at_once=2)


def _side(scratch: Scratch) -> Side:
    view = scratch.view(GEMMS[0], scratch.output)

    def launch(_routing: int, _layer: int) -> None:
        view.fill_(1.0)

    return launch
