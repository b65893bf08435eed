"""Do two configs compute the same? Outputs on the same inputs, poisoned before each run, run again and again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_moe_autotune.bench import ALONE, Comparison
from sglang_moe_autotune.shapes import GEMMS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_moe_autotune.scratch import Scratch
    from sglang_moe_autotune.shapes import ActivationDtype, Gemm

ROUTINGS = ("uniform", "skewed", "one-sided", "one-expert", "ragged")
"""The routings every pair is compared on, each with activations of its own: even loads; a few hot experts; all
tokens on the same ``top_k`` experts; all rows on the last expert, whose weights end where the tensor ends; and
experts whose rows just miss or just pass the end of a tile."""

RUNS_PER_ROUTING = ALONE.runs

GUARD_ELEMENTS = 256
"""after an output, besides one row: as far as the widest tile reaches over its end"""

TEMPORARIES = 3
"""float32 copies of a part of an output that live at a time while it is compared"""

_RAGGED = (1, 15, 17, 31, 33, 63, 65, 127, 129, 255, 257)
_CHUNK_BYTES = 32 << 20
_OTHER_BITS = 1e-30
_OLD_OUTPUT = 1.0
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32}

_ROUNDING: dict[ActivationDtype, float] = {"bfloat16": 1.6e-2, "float16": 2e-3, "float32": 1e-3}
_IMPRECISE_SUM = 5e-2

Launch = Callable[["Written"], None]
"""makes one launch that writes there"""


class Written(NamedTuple):
    """Where a launch writes."""

    whole: torch.Tensor
    """1-D: the output and what lies behind it, where no launch may write"""
    rows: torch.Tensor
    """(..., columns), the first part of ``whole``"""


class Terms(NamedTuple):
    """What a comparison asks for."""

    tolerance: float
    runs: int = RUNS_PER_ROUTING
    at_once: int = 1
    """runs in one step"""
    bit_equal: bool = False
    """the bits must be the baseline's"""


def tolerance(activations: ActivationDtype, weights: str | None = None) -> float:
    """Largest ``largest_error`` that rounding can make. weights: the ``dtype`` of a MoeShape.

    Both configs sum the same products in float32, in another order, and round once to the output's type: an element
    then differs by one unit in the last place, 2^-7 of it in bf16, 2^-10 in fp16; the bound is twice that. In float32
    the products are rounded to tf32 and the sums differ. Integer products (int8) are exact, and weights that are
    unpacked (int4, int8 with 16-bit activations) are the same numbers in every tile. Sums in fp8 are not: the tensor
    cores of sm90 keep about 14 bits of them, so that long sums differ by some percent of a row's size.
    """
    return _IMPRECISE_SUM if weights == "fp8_w8a8" else _ROUNDING[activations]


def topk_ids(
    routing: str, tokens: int, experts: int, top_k: int, local_share: float, generator: torch.Generator
) -> torch.Tensor:
    """Expert ids (tokens, top_k), int32; -1 for experts of other ranks. Distinct in each row but for the last two
    routings, which no model makes and every kernel must compute.

    ``local_share`` below 1 turns that part of the ids into -1, as expert parallelism does.
    """
    device = generator.device
    rows = tokens * top_k
    if routing == "one-sided":
        ids = torch.arange(top_k, device=device).expand(tokens, top_k).contiguous()
    elif routing == "one-expert":
        ids = torch.full((tokens, top_k), experts - 1, device=device)
    elif routing == "ragged":
        # Loads of 1, 15, 17, ... rows for the first experts; what is left goes to the last one.
        edges = torch.tensor(_RAGGED[: max(0, experts - 1)], device=device).cumsum(0)
        owner = torch.searchsorted(edges, torch.arange(rows, device=device), right=True)
        owner = torch.where(owner == edges.numel(), experts - 1, owner)
        ids = owner[torch.randperm(rows, device=device, generator=generator)].view(tokens, top_k)
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


def poison_ids(
    sorted_ids: torch.Tensor, expert_ids: torch.Tensor, post_padded: torch.Tensor, block_m: int, experts: int
) -> None:
    """Make what lies behind the last block a trap: ids of row 0 for the last expert, in place.

    A kernel stops at ``post_padded`` ids. One that goes on finds ids that exist, so that it spoils a row and is
    refused; garbage there would have it read anywhere and take the process along.
    """
    place = torch.arange(sorted_ids.numel(), device=sorted_ids.device)
    sorted_ids.masked_fill_(place >= post_padded, 0)
    expert_ids.masked_fill_(place[: expert_ids.numel()] * block_m >= post_padded, experts - 1)


def largest_error(output: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """max |out - ref| / (|ref| + rms of its row), as a scalar tensor (no synchronisation); infinite for not-a-number.

    output, reference: (..., columns), same shape, floating point. By element, as one wrong element does not show in
    the norm of a long row; and with the row's size, as the sum of large products can be small by chance. Rows of zeros
    in the reference (experts of other ranks) must be zeros in the output too.
    """
    return torch.stack(list(_errors(output, reference))).max()


def _errors(output: torch.Tensor, reference: torch.Tensor) -> Iterator[torch.Tensor]:
    """``largest_error`` of some rows after the other."""
    columns = output.shape[-1]
    out, ref = output.reshape(-1, columns), reference.reshape(-1, columns)
    step = max(1, _CHUNK_BYTES // (4 * columns))
    for start in range(0, out.shape[0], step):
        size = ref[start : start + step].float()
        error = out[start : start + step].float().sub_(size).abs_()
        rms = size.norm(dim=1, keepdim=True).mul_(columns**-0.5)
        # A row of zeros has no scale of its own; 1e-6 makes any difference there count as a large one.
        error.div_(size.abs_().add_(rms).clamp_min_(1e-6))
        yield error.nan_to_num_(nan=float("inf")).max()


def temporary_bytes(rows: int, columns: int) -> int:
    """The size of each of the ``TEMPORARIES`` that comparing an output of this size takes at a time, at the most."""
    return min(4 * rows * columns, _CHUNK_BYTES)


def differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Is any bit different? A scalar tensor (no synchronisation); both are 1-D, of one type and length."""
    one, other = (t.view(_SAME_SIZE[t.element_size()]) for t in (one, other))
    found = torch.zeros((), dtype=torch.bool, device=one.device)
    for start in range(0, one.numel(), _CHUNK_BYTES):
        found |= (one[start : start + _CHUNK_BYTES] != other[start : start + _CHUNK_BYTES]).any()
    return found


def steps(
    baseline: Launch,
    candidate: Launch,
    reference: Written,
    output: Written,
    terms: Terms,
    allocating: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Iterator[Comparison | None]:
    """Compare what a candidate computes with what the baseline does, on inputs that both find; the verdict comes last.

    A step makes one launch, or looks at some rows of one, or makes ``at_once`` runs. The first run is compared with the
    baseline's output within the tolerance. All others are compared with the first one bit by bit: the kernel has no
    atomic operation on this path and a fixed order of sums, so a correct binary gives the same bits each time, and a
    race shows however small the number it spoils. ``allocating``: where the temporaries of a comparison come from.
    """
    poison(reference.whole)
    baseline(reference)
    yield None
    poison(output.whole)
    candidate(output)
    yield None
    error, errors = 0.0, _errors(output.rows, reference.rows)
    while True:
        with allocating():
            if (found := next(errors, None)) is None:
                break
            error = max(error, float(found))
        yield None
    with allocating():
        spilled = not bool(_behind(output).isnan().all())
        same = bool(~differ(output.rows.view(-1), reference.rows.view(-1)))
    bound = 0.0 if terms.bit_equal else terms.tolerance
    error = error if error > 0.0 or same else _OTHER_BITS
    if error > bound:
        yield Comparison(False, error, bound)
        return
    if spilled:
        yield Comparison(False, error, bound, "it writes behind the end of the output")
        return
    left = terms.runs - 1
    while left > 0:
        yield None
        now, left = min(left, terms.at_once), left - terms.at_once
        with allocating():
            changed = torch.zeros((), dtype=torch.bool, device=output.whole.device)
            for run in range(now):
                # The baseline's output is of no more use: its place takes the next run. Every other run finds numbers
                # there, as a kernel may look at what is there and take not-a-number for an empty place.
                reference.rows.fill_(_OLD_OUTPUT if (left + run) % 2 else float("nan"))
                candidate(reference)
                changed |= differ(reference.whole, output.whole)
            if bool(changed):
                yield Comparison(False, error, bound, "its output changes from run to run on the same inputs")
                return
    yield Comparison(True, error, bound, runs=terms.runs)


def case_steps(
    scratch: Scratch,
    launches: Callable[[Gemm], tuple[Launch, Launch]],
    terms: Callable[[Gemm], Terms],
    gemms: tuple[Gemm, ...] = GEMMS,
) -> Iterator[Comparison | None]:
    """Compare both GEMMs of a pair on fresh activations. launches: of the baseline and of the candidate, with the
    routing of the case. The worse verdict comes last; a step costs what a step of ``steps`` does."""
    for _ in scratch.refresh():
        yield None
    worst: Comparison | None = None
    for gemm in gemms:
        baseline, candidate = launches(gemm)
        yield None
        reference, output = (scratch.written(gemm, buffer) for buffer in (scratch.reference, scratch.output))
        for found in steps(baseline, candidate, reference, output, terms(gemm), scratch.allocating):
            if found is None:
                yield None
            elif not found.ok:
                yield found
                return
            elif worst is None or found.error > worst.error:
                worst = found
    yield worst


def _behind(written: Written) -> torch.Tensor:
    return written.whole[written.rows.numel() :]
