"""Equal tiles agree, a wrong element anywhere does not; SGLang's real kernel is run by Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from sglang_moe_autotune import correctness  # noqa: E402 - needs torch, which not every environment has
from sglang_moe_autotune.correctness import judge, poison, row_error, topk_ids  # noqa: E402 - as above

if TYPE_CHECKING:
    from pathlib import Path


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def test_two_roundings_of_one_result_agree() -> None:
    exact = torch.randn(512, 256, generator=torch.Generator().manual_seed(1))
    other = exact * (1 + 1e-3 * torch.randn(512, 256, generator=torch.Generator().manual_seed(2)))
    assert judge(float(row_error(other.to(torch.bfloat16), exact.to(torch.bfloat16))), "bfloat16").ok


def last_element(out: torch.Tensor) -> None:
    out[-1, -16:] += out[-1].float().norm().to(out.dtype) / 4


def last_tile_zero(out: torch.Tensor) -> None:
    out[-16:, -64:] = 0


def not_written(out: torch.Tensor) -> None:
    out[77, 3] = float("nan")


def infinite(out: torch.Tensor) -> None:
    out[0, 0] = float("inf")


def rows_swapped(out: torch.Tensor) -> None:
    out[[5, 6]] = out[[6, 5]]


def zeros_not_kept(out: torch.Tensor) -> None:
    out[3] = 1e-3


SPOILED = [last_element, last_tile_zero, not_written, infinite, rows_swapped, zeros_not_kept]


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda f: f.__name__)
def test_c19_a_wrong_output_is_refused(spoil: object) -> None:
    reference = bf16(4096, 512)
    reference[3] = 0  # a row that experts of other ranks would fill
    output = reference.clone()
    assert judge(float(row_error(output, reference)), "bfloat16").ok
    spoil(output)  # type: ignore[operator]
    assert not judge(float(row_error(output, reference)), "bfloat16").ok


def test_a_poisoned_output_that_nobody_writes_is_refused() -> None:
    output = bf16(8, 8)
    poison(output)
    assert not judge(float(row_error(output, bf16(8, 8))), "bfloat16").ok


def test_long_outputs_are_judged_in_chunks_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "_CHUNK_BYTES", 4 * 64 * 10)
    reference = bf16(101, 64)
    for row in range(101):
        output = reference.clone()
        output[row] *= 2
        assert float(row_error(output, reference)) == pytest.approx(1.0, rel=1e-2), row


@pytest.mark.parametrize("routing", correctness.ROUTINGS)
@pytest.mark.parametrize("share", [1.0, 0.25], ids=["all-local", "c15-ep4"])
def test_routings_are_valid_ids(routing: str, share: float) -> None:
    ids = topk_ids(routing, 300, 64, 6, share, torch.Generator().manual_seed(3))
    assert ids.shape == (300, 6)
    assert ids.dtype == torch.int32
    assert int(ids.max()) < 64
    assert int(ids.min()) >= (0 if share == 1.0 else -1)
    for row in ids.tolist():
        local = [i for i in row if i >= 0]
        assert len(local) == len(set(local))
    local_share = float((ids >= 0).float().mean())
    assert abs(local_share - share) < 0.05


def test_the_skewed_routing_is_skewed_and_the_one_sided_one_uses_top_k_experts() -> None:
    generator = torch.Generator().manual_seed(4)
    skewed = topk_ids("skewed", 500, 64, 4, 1.0, generator).flatten().bincount(minlength=64)
    assert int(skewed[:4].sum()) > 3 * int(skewed[-4:].sum())
    assert topk_ids("one-sided", 500, 64, 4, 1.0, generator).unique().numel() == 4


INTERPRETED = textwrap.dedent(
    """
    import json, sys
    import torch
    import triton.language as tl
    import sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe as fused
    from sglang_moe_autotune import correctness

    E, N, K, TOP_K, M = 5, 48, 64, 2, 11
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(M, K, generator=generator).half()
    w = (torch.randn(E, N, K, generator=generator) / 8).half()
    weights = torch.rand(M, TOP_K, generator=generator)

    def align(ids, block):
        # The reference of moe_align_block_size: ids sorted by expert, each expert padded to whole blocks.
        flat, pad = ids.flatten().tolist(), ids.numel()
        order, experts = [], []
        for expert in sorted({e for e in flat if e >= 0}) + [-1]:
            mine = [i for i, e in enumerate(flat) if e == expert]
            if mine:
                mine += [pad] * (-len(mine) % block)
                order += mine
                experts += [expert] * (len(mine) // block)
        i32 = lambda x: torch.tensor(x, dtype=torch.int32)
        return i32(order), i32(experts), i32([len(order)])

    def run(config, ids):
        sorted_ids, experts, post_padded = align(ids, config["BLOCK_SIZE_M"])
        out = torch.empty(M * TOP_K, N, dtype=torch.half)
        correctness.poison(out)
        fused.invoke_fused_moe_kernel(
            a, w, None, out, None, None, None, weights, ids, sorted_ids, experts, post_padded, False, TOP_K, config,
            compute_type=tl.float16, use_fp8_w8a8=False, use_int8_w8a8=False, use_int8_w8a16=False,
            use_int4_w4a16=False, per_channel_quant=False, block_shape=None,
        )
        return out

    errors = {}
    for routing in correctness.ROUTINGS:
        for share in (1.0, 0.5):
            ids = correctness.topk_ids(routing, M, E, TOP_K, share, generator)
            base = run(dict(BLOCK_SIZE_M=16, BLOCK_SIZE_N=32, BLOCK_SIZE_K=64, GROUP_SIZE_M=1), ids)
            exact = torch.einsum("mk,mtnk->mtn", a.float(), w.float()[ids.clamp_min(0).long()]).reshape(M * TOP_K, N)
            exact = torch.where(ids.reshape(-1, 1) >= 0, exact, torch.zeros(())).half()
            other = run(dict(BLOCK_SIZE_M=32, BLOCK_SIZE_N=64, BLOCK_SIZE_K=32, GROUP_SIZE_M=4), ids)
            name = f"{routing}-{share}"
            errors[name] = [float(correctness.row_error(base, exact)), float(correctness.row_error(other, base))]
    json.dump(errors, sys.stdout)
    """
)


@pytest.mark.sglang
def test_sglangs_real_kernel_agrees_with_torch_and_with_itself_under_another_config(tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(errors) == 6
    for name, pair in errors.items():
        assert max(pair) < correctness.TOLERANCE["float16"], (name, pair)
