"""Do two configs compute the same? Outputs on the same inputs, poisoned before each run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_moe_autotune.bench import Comparison

if TYPE_CHECKING:
    from sglang_moe_autotune.shapes import ActivationDtype

ROUTINGS = ("uniform", "skewed", "one-sided")
"""The routings every pair is compared on: even loads, a few hot experts (ragged tails), and all tokens on the
same ``top_k`` experts (long runs of one expert, most experts empty)."""

_CHUNK_BYTES = 32 << 20

TOLERANCE: dict[ActivationDtype, float] = {"bfloat16": 1.6e-2, "float16": 4e-3, "float32": 1e-3}
"""Largest ||row - row_ref|| / ||row_ref|| of any row of the output.

Both configs accumulate the same products in float32, in another order, and round once to the output's type:
a row of rounding errors has a relative norm of about 2^-9 in bf16 and 2^-12 in fp16. The bound is eight times
that. A tile that is wrong in one row puts at least 0.1 there, also in the last tile of a long output,
because rows are judged one by one and not averaged."""


def topk_ids(
    routing: str, tokens: int, experts: int, top_k: int, local_share: float, generator: torch.Generator
) -> torch.Tensor:
    """Expert ids (tokens, top_k), int32, distinct in each row; -1 for experts of other ranks.

    ``local_share`` below 1 turns that part of the ids into -1, as expert parallelism does.
    """
    device = generator.device
    if routing == "one-sided":
        ids = torch.arange(top_k, device=device).expand(tokens, top_k).contiguous()
    else:
        weights = torch.ones(experts, device=device)
        if routing == "skewed":
            # The most popular expert gets about eight times the mean of 256 experts, as in served models.
            weights = torch.arange(1, experts + 1, device=device, dtype=torch.float32).rsqrt()
        noise = torch.rand(tokens, experts, device=device, generator=generator).clamp_min_(1e-20)
        # Exponential race: the top_k smallest arrival times are a weighted sample without replacement.
        ids = (noise.log().neg_() / weights).topk(top_k, dim=1, largest=False).indices
    ids = ids.to(torch.int32)
    if local_share < 1.0:
        foreign = torch.rand(tokens, top_k, device=device, generator=generator) >= local_share
        ids = ids.masked_fill(foreign, -1)
    return ids.contiguous()


def poison(output: torch.Tensor) -> None:
    """Fill with not-a-number, so that an element that is not written is seen."""
    output.fill_(float("nan"))


def row_error(output: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Largest relative error of a row, as a scalar tensor (no synchronisation); infinite for not-a-number.

    output, reference: (..., columns), same shape, floating point. Rows of zeros in the reference (experts of
    other ranks) must be zeros in the output too.
    """
    columns = output.shape[-1]
    out, ref = output.reshape(-1, columns), reference.reshape(-1, columns)
    step = max(1, _CHUNK_BYTES // (4 * columns))
    worst = torch.zeros((), device=out.device)
    for start in range(0, out.shape[0], step):
        b = ref[start : start + step].float()
        difference = (out[start : start + step].float() - b).norm(dim=1)
        # A row of zeros has no scale of its own; 1e-6 makes any difference there count as a large one.
        error = difference / b.norm(dim=1).clamp_min(1e-6)
        worst = torch.maximum(worst, error.nan_to_num(nan=float("inf")).max())
    return worst


def judge(error: float, dtype: ActivationDtype) -> Comparison:
    """The verdict on an error found."""
    tolerance = TOLERANCE[dtype]
    return Comparison(error <= tolerance, error, tolerance)
