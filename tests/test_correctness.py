"""Equal tiles agree, a wrong element anywhere does not; SGLang's real kernel is run by Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from sglang_moe_autotune import correctness  # noqa: E402 - needs torch, which not every environment has
from sglang_moe_autotune.bench import COMPARE_CASES  # noqa: E402 - as above
from sglang_moe_autotune.correctness import (  # noqa: E402 - as above
    GUARD_ELEMENTS,
    RUNS_PER_ROUTING,
    Terms,
    Written,
    differ,
    largest_error,
    poison,
    poison_ids,
    steps,
    tolerance,
    topk_ids,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_moe_autotune.bench import Comparison


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def close(output: torch.Tensor, reference: torch.Tensor) -> bool:
    return float(largest_error(output, reference)) <= tolerance("bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_two_roundings_of_one_result_agree(dtype: Any) -> None:
    exact = torch.randn(512, 256, generator=torch.Generator().manual_seed(1))
    other = exact * (1 + 1e-6 * torch.randn(512, 256, generator=torch.Generator().manual_seed(2)))
    one, two = (t.to(getattr(torch, dtype)) for t in (exact, other))
    assert not torch.equal(one, two)
    assert float(largest_error(two, one)) <= tolerance(dtype) / 2


def test_a_float32_sum_in_another_order_agrees_and_an_fp8_sum_has_more_room() -> None:
    a, b = torch.randn(64, 4096), torch.randn(4096, 64)
    parts = sum(a[:, i : i + 64] @ b[i : i + 64] for i in range(0, 4096, 64))
    assert float(largest_error(parts.to(torch.bfloat16), (a @ b).to(torch.bfloat16))) <= tolerance("bfloat16")
    assert tolerance("bfloat16", "int8_w8a8") == tolerance("bfloat16", "int4_w4a16") == tolerance("bfloat16")
    assert tolerance("bfloat16", "fp8_w8a8") > tolerance("bfloat16") > tolerance("float16") > tolerance("float32")


def last_element(out: torch.Tensor) -> None:
    out[-1, -1] += out[-1].float().norm() / out.shape[1] ** 0.5


def one_element_zero(out: torch.Tensor) -> None:
    out[-1, int(out[-1].abs().argmax())] = 0


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


SPOILED = [last_element, one_element_zero, last_tile_zero, not_written, infinite, rows_swapped, zeros_not_kept]


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda f: f.__name__)
def test_c19_a_wrong_output_is_refused(spoil: object) -> None:
    reference = bf16(4096, 512)
    reference[3] = 0  # a row that experts of other ranks would fill
    output = reference.clone()
    assert close(output, reference)
    spoil(output)  # type: ignore[operator]
    assert not close(output, reference)


def test_a_poisoned_output_that_nobody_writes_is_refused() -> None:
    output = bf16(8, 8)
    poison(output)
    assert not close(output, bf16(8, 8))


def test_long_outputs_are_judged_in_chunks_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(correctness, "_CHUNK_BYTES", 4 * 64 * 10)
    reference = bf16(101, 64)
    for row in range(101):
        output = reference.clone()
        output[row] *= 3
        assert float(largest_error(output, reference)) > 1.0, row
        assert bool(differ(output.view(-1), reference.view(-1)))
    assert not bool(differ(reference.clone().view(-1), reference.view(-1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_bits_differ_where_values_do_not(dtype: torch.dtype) -> None:
    one = torch.zeros(1000, dtype=dtype)
    other = one.clone()
    other[999] = -0.0
    assert bool(differ(one, other))
    poison(one)
    assert not bool(differ(one, one.clone())), "not-a-number is a value as any other here"


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
        assert len(local) == len(set(local)) or routing in ("one-expert", "ragged")
    local_share = float((ids >= 0).float().mean())
    assert abs(local_share - share) < 0.05


def test_the_skewed_routing_is_skewed_and_the_one_sided_one_uses_top_k_experts() -> None:
    generator = torch.Generator().manual_seed(4)
    skewed = topk_ids("skewed", 500, 64, 4, 1.0, generator).flatten().bincount(minlength=64)
    assert int(skewed[:4].sum()) > 3 * int(skewed[-4:].sum())
    assert topk_ids("one-sided", 500, 64, 4, 1.0, generator).unique().numel() == 4


@pytest.mark.parametrize("rows", [1, 8, 64, 130, 4096])
@pytest.mark.parametrize("experts", [1, 2, 8, 256])
def test_the_last_two_routings_have_the_loads_that_they_are_named_after(rows: int, experts: int) -> None:
    generator = torch.Generator().manual_seed(5)
    assert topk_ids("one-expert", rows, experts, 1, 1.0, generator).unique().tolist() == [experts - 1]
    loads = topk_ids("ragged", rows, experts, 1, 1.0, generator).flatten().bincount(minlength=experts).tolist()
    assert sum(loads) == rows
    assert all(load % 16 in (0, 1, 15) for load in loads[:-1] if load not in (rows, max(loads))), loads
    if rows > 20 and experts > 2:
        assert loads[:2] == [1, 15]


def test_what_lies_behind_the_last_block_exists_and_is_wrong() -> None:
    sorted_ids, experts = torch.full((48,), 1 << 30, dtype=torch.int32), torch.full((3,), 1 << 30, dtype=torch.int32)
    sorted_ids[:16], experts[0] = torch.arange(16), 2
    poison_ids(sorted_ids, experts, torch.tensor([16], dtype=torch.int32), 16, 5)
    assert sorted_ids.tolist() == [*range(16), *[0] * 32]
    assert experts.tolist() == [2, 4, 4]


ROWS, COLUMNS = 12, 40


def place() -> Written:
    whole = torch.zeros(ROWS * COLUMNS + COLUMNS + GUARD_ELEMENTS, dtype=torch.bfloat16)
    return Written(whole, whole[: ROWS * COLUMNS].view(ROWS, COLUMNS))


class Kernel:
    """Writes one and the same output, spoiled in the runs that ``at`` names."""

    def __init__(self, spoil: Callable[[Written], None] | None = None, *, at: Callable[[int], bool] = bool) -> None:
        self.runs = 0
        self._spoil, self._at = spoil, at

    def __call__(self, written: Written) -> None:
        self.runs += 1
        written.rows.copy_(bf16(ROWS, COLUMNS))
        if self._spoil is not None and self._at(self.runs):
            self._spoil(written)


def verdict(candidate: Callable[[Written], None], **terms: Any) -> Comparison:
    *before, last = steps(Kernel(), candidate, place(), place(), Terms(tolerance("bfloat16"), **terms))
    assert before == [None] * len(before)
    assert last is not None
    return last


def one_bit(written: Written) -> None:
    written.rows[5, 5] = torch.nextafter(written.rows[5, 5], torch.tensor(9.0, dtype=torch.bfloat16))


def behind(written: Written) -> None:
    written.whole[written.rows.numel()] = 1.0


def as_before(written: Written) -> None:
    poison(written.rows[-1])


def test_a_correct_kernel_is_run_as_often_as_asked_and_taken() -> None:
    candidate = Kernel()
    found = verdict(candidate, runs=54, at_once=8)
    assert (found.ok, found.error, candidate.runs) == (True, 0.0, 54)


@pytest.mark.parametrize(
    ("spoil", "at", "words"),
    [
        pytest.param(lambda w: poison(w.rows), lambda n: True, "differs by inf", id="writes-nothing"),
        pytest.param(as_before, lambda n: n == 1, "differs by inf", id="nan-in-the-first-run"),
        pytest.param(as_before, lambda n: n == 30, "from run to run", id="nan-in-the-30th-run"),
        pytest.param(one_bit, lambda n: n == 30, "from run to run", id="one-bit-in-the-30th-run"),
        pytest.param(one_bit, lambda n: n == 1, "from run to run", id="one-bit-in-the-first-run"),
        pytest.param(behind, lambda n: True, "behind the end", id="behind-the-end"),
        pytest.param(behind, lambda n: n == 54, "from run to run", id="behind-the-end-in-the-last-run"),
    ],
)
@pytest.mark.parametrize("at_once", [1, 7, 100])
def test_c19_what_is_wrong_in_any_run_is_refused(spoil: Any, at: Any, words: str, at_once: int) -> None:
    found = verdict(Kernel(spoil, at=at), at_once=at_once)
    assert not found.ok
    assert words in found.reason


@pytest.mark.parametrize("value", [9.0, float("nan")], ids=["wrong", "not-a-number"])
@pytest.mark.parametrize("row", range(ROWS))
def test_an_output_is_judged_part_by_part_and_no_part_is_left_out(
    monkeypatch: pytest.MonkeyPatch, row: int, value: float
) -> None:
    monkeypatch.setattr(correctness, "_CHUNK_BYTES", 4 * COLUMNS * 5)

    def spoil(written: Written) -> None:
        written.rows[row, row] = value

    def all_steps(candidate: Kernel) -> list[Comparison | None]:
        return list(steps(Kernel(), candidate, place(), place(), Terms(tolerance("bfloat16"), runs=1)))

    *parts, right = all_steps(Kernel())
    assert (len(parts), right and right.ok) == (2 + 3, True), "two launches and three parts of at most five rows"
    *_, wrong = all_steps(Kernel(spoil))
    assert wrong is not None
    assert not wrong.ok
    assert "output differs" in wrong.reason


def test_c19_a_kernel_that_is_wrong_in_one_run_of_twenty_is_caught() -> None:
    """Over all routings of a pair; each trial is a seed of its own."""
    admitted = 0
    for seed in range(60):
        random = Random(seed)  # noqa: S311 - a test
        flaky = Kernel(one_bit, at=lambda _, random=random: random.random() < 0.05)
        admitted += all(verdict(flaky, runs=RUNS_PER_ROUTING, at_once=16).ok for _ in range(5))
    assert admitted == 0
    assert len(correctness.ROUTINGS) == COMPARE_CASES
    assert 10_000 * 0.95 ** (5 * RUNS_PER_ROUTING) <= 0.01


def test_c19_a_kernel_that_writes_only_where_it_finds_not_a_number_is_caught() -> None:
    """As one that adds to what is there, or keeps it: the poison of the first run would look like an empty place."""

    def keeps(written: Written) -> None:
        old = written.rows.clone()
        written.rows.copy_(torch.where(old.isnan(), bf16(ROWS, COLUMNS), old))

    for at_once in (1, 4, 5):
        assert "from run to run" in verdict(keeps, at_once=at_once).reason


def negative_zero(written: Written) -> None:
    written.rows[0, 0] = -0.0


def test_bit_equal_takes_equal_bits_only_and_an_error_of_zero_says_that_they_are() -> None:
    rounded = Kernel(one_bit, at=lambda n: True)
    loose, strict = verdict(rounded), verdict(rounded, bit_equal=True)
    assert loose.ok
    assert 0.0 < loose.error < tolerance("bfloat16")
    assert (strict.ok, strict.tolerance) == (False, 0.0)
    assert verdict(Kernel(), bit_equal=True).ok

    class Zero(Kernel):
        def __call__(self, written: Written) -> None:
            super().__call__(written)
            if self._spoil is None:
                written.rows[0, 0] = 0.0

    zeros = Kernel(negative_zero, at=lambda n: True)
    *_, found = steps(Zero(), zeros, place(), place(), Terms(1e-2, bit_equal=True))
    assert found is not None
    assert not found.ok
    *_, found = steps(Zero(), zeros, place(), place(), Terms(1e-2))
    assert found is not None
    assert found.ok
    assert found.error > 0.0


INTERPRETED = textwrap.dedent(
    """
    import json, sys
    import torch
    import triton.language as tl
    import sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe as fused
    import interpreter
    from sglang_moe_autotune import correctness

    interpreter.mend()
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
            errors[name] = [float(correctness.largest_error(x, y)) for x, y in ((base, exact), (other, base))]
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
        "PYTHONPATH": os.pathsep.join(str(Path(__file__).parents[1] / part) for part in ("", "scripts")),
    }
    done = subprocess.run([sys.executable, "-c", INTERPRETED], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    errors = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(errors) == 2 * len(correctness.ROUTINGS)
    for name, pair in errors.items():
        assert max(pair) < tolerance("float16"), (name, pair)
