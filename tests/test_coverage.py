"""Every case of docs/coverage.md: SGLang's real layers on the CPU, and a table that says what was shown and no more."""
# ruff: noqa: PLC0415 - what runs in the other process imports there

from __future__ import annotations

import ast
import importlib.metadata
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = str(ROOT / "scripts")
sys.path.insert(0, SCRIPTS)

import coverage_rows  # noqa: E402 - found on the path set above
from coverage_rows import CASES, available  # noqa: E402 - as above

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from scheduler_process import SchedulerProcess


def here() -> str:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return "0"


LAYERS = [c.name for c in CASES if c.quant is not None and available(c, here())]
INTERPRETED = [c.name for c in CASES if c.shown == "interpreted" and available(c, here())]


def prepare(scripts: str) -> None:
    """Leave ``bed`` in the process: SGLang's layers on the CPU."""
    import builtins
    import logging
    import sys

    sys.path.insert(0, scripts)
    import coverage_bed
    import torch

    logging.disable(logging.WARNING)  # SGLang tells of each file that it has not
    torch.set_grad_enabled(False)
    coverage_bed.set_up()
    builtins.bed = coverage_bed  # type: ignore[attr-defined]


def leave() -> None:
    """End the groups: a process that has some does not come to its end by itself."""
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def both(start_scheduler: Callable[..., SchedulerProcess]) -> Iterator[tuple[SchedulerProcess, SchedulerProcess]]:
    """One process that compiles and one that interprets; they start side by side."""
    compiles = start_scheduler(TORCHDYNAMO_DISABLE="1")
    interprets = start_scheduler(plugins=False, TORCHDYNAMO_DISABLE="1", TRITON_INTERPRET="1")
    yield compiles, interprets
    for process in (compiles, interprets):
        process.run(leave)


@pytest.fixture(scope="module")
def bed(both: tuple[SchedulerProcess, SchedulerProcess]) -> SchedulerProcess:
    both[0].run(prepare, SCRIPTS)
    return both[0]


@pytest.fixture(scope="module")
def interpreter(both: tuple[SchedulerProcess, SchedulerProcess]) -> SchedulerProcess:
    both[1].run(prepare, SCRIPTS)
    return both[1]


# -- layers -----------------------------------------------------------------------------------------------------


def show(name: str) -> dict[str, object]:
    import builtins

    return builtins.bed.show(name)  # type: ignore[attr-defined,no-any-return]


@pytest.mark.sglang
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_found_as_sglang_looks_it_up_and_its_launches_are_sglangs_and_compile(
    bed: SchedulerProcess, name: str
) -> None:
    told = bed.run(show, name)
    assert told["key"] == told["asked"], "the lookup is told something else than the layer's key"
    assert told["differences"] == []
    assert told["illegal"] == [None, None], "SGLang's own config counts as illegal"
    for compiled, least in told["compiled"]:
        assert compiled >= least, "the least that a launch can take is more than it takes"


def interpret(name: str, wrong: dict[str, int] | None = None, intermediate: int = 0) -> dict[str, object]:
    import builtins

    return builtins.bed.interpret(name, wrong, intermediate)  # type: ignore[attr-defined,no-any-return]


@pytest.mark.sglang
@pytest.mark.parametrize("name", INTERPRETED)
def test_two_configs_give_one_output_by_the_interpreter(interpreter: SchedulerProcess, name: str) -> None:
    told = interpreter.run(interpret, name)
    assert told["finite"]
    assert told["norm"] > 0.1
    assert told["error"] < 4e-3


@pytest.mark.sglang
def test_c04_c05_a_tile_over_two_scales_is_wrong_and_the_rule_that_forbids_it_is_needed(
    interpreter: SchedulerProcess,
) -> None:
    right = interpreter.run(interpret, "fp8-block-64", {"BLOCK_SIZE_K": 64}, 320)
    assert right["error"] < 4e-3, "C04: the tail columns of N=320"
    wrong = interpreter.run(interpret, "fp8-block-64", {"BLOCK_SIZE_K": 128}, 320)
    assert wrong["error"] > 0.05, "C05: one scale for two groups should not have gone unnoticed"


def dry_run(name: str) -> dict[str, object]:
    """The GPU script's own row of a case, as far as it goes without one: layers, baseline, files, whole layers."""
    from types import SimpleNamespace

    import coverage_rows
    import gpu_coverage

    from sglang_moe_autotune import benchmark, releases
    from sglang_moe_autotune.records import Environment
    from sglang_moe_autotune.shapes import ConfigPair, KernelConfig, MoeShape

    benchmark.DeviceProvider = lambda *_, **__: SimpleNamespace(compiler=None)
    releases.environment = lambda _: Environment("NVIDIA H200", (9, 0), 132, 232448, 1, "3.6.0", "k")
    gpu_coverage.LARGE = coverage_rows.SMALL
    row = gpu_coverage.open_rows(1, "cpu")(coverage_rows.case(name)._replace(dtype="float16"))
    tile = KernelConfig(32, 64, 32, 1)
    assert row.whole is not None
    return {
        "slug": row.shape.slug,
        "baseline": str(row.baseline(row.shape, 3)),
        "file": [str(part) for part in row.shipped(MoeShape((128, 1536, 2048), (128, 2048, 768), 8), 16) or ()],
        "whole": row.whole(3, ConfigPair(tile, tile)),
    }


@pytest.mark.sglang
def test_the_gpu_scripts_row_serves_a_learned_pair_through_the_hook(interpreter: SchedulerProcess) -> None:
    told = interpreter.run(dry_run, "bf16")
    assert told["slug"] == "E8-N128-K256-top2-fp16"
    assert told["baseline"] == "16x32x64 g1"
    assert "E=128,N=768,device_name=NVIDIA_H200.json, row of 16" in told["file"][1]
    error, served = told["whole"]
    assert served, "the learned pair did not reach the layer, or SGLang's own answer was not asked for before"
    assert error < 4e-3


def variants() -> dict[str, object]:
    import builtins
    import sys

    from sglang_moe_autotune import releases

    kernels = sys.modules[releases.invoke_function().__module__]
    names = [n for n in ("should_enable_swap_ab", "is_arch_support_pdl") if hasattr(kernels, n)]
    kept = {name: getattr(kernels, name) for name in names}
    found = {}
    try:
        for name in names:
            setattr(kernels, name, lambda *_: True)
            found[name] = builtins.bed.variant("fp8-block-128")  # type: ignore[attr-defined]
            setattr(kernels, name, kept[name])
    finally:
        vars(kernels).update(kept)
    return {"plain": builtins.bed.variant("fp8-block-128"), **found}  # type: ignore[attr-defined]


@pytest.mark.sglang
def test_variants_that_the_launcher_chooses_are_recorded(bed: SchedulerProcess) -> None:
    told = bed.run(variants)
    plain = told.pop("plain")
    assert not plain["swap_ab"]
    assert told["should_enable_swap_ab"]["swap_ab"], "the recorded launch has another swap_ab than the launcher's"
    if "is_arch_support_pdl" in told:
        assert told["is_arch_support_pdl"]["pdl"], "the recorded launch lacks PDL"
    assert len({plain["hash"], *(other["hash"] for other in told.values())}) == len(told) + 1


def fused_epilogue() -> object:
    import builtins

    return builtins.bed.fused_epilogue()  # type: ignore[attr-defined]


@pytest.mark.sglang
def test_a_fused_epilogue_is_named_and_not_tuned(bed: SchedulerProcess) -> None:
    if not available(coverage_rows.case("fused-epilogue"), here()):
        pytest.skip(f"SGLang {here()} has no fused epilogue")
    variant, reason = bed.run(fused_epilogue)
    assert "fused-swiglu" in variant
    assert "not tuned" in reason


def together() -> dict[str, object]:
    import builtins

    return builtins.bed.together()  # type: ignore[attr-defined,no-any-return]


@pytest.mark.sglang
def test_unlike_layers_of_one_process_keep_apart(bed: SchedulerProcess) -> None:
    told = bed.run(together)
    expected = ["E8-N128-K256-top2-bf16", "E8-N128-K256-top2-fp8_w8a8-block128x128", "E9-N128-K256-top3-bf16"]
    assert told["slugs"] == expected
    assert told["counts"] == [2, 1, 1]
    assert told["mixed"] is None, "one call stands for two kinds: neither may be answered"


def test_c34_m_is_batch_times_draft_tokens_and_each_is_settled() -> None:
    pytest.importorskip("torch")
    from types import SimpleNamespace

    import synthetic

    from sglang_moe_autotune import releases
    from sglang_moe_autotune.replay import ReplayProvider
    from sglang_moe_autotune.search import SearchOptions
    from sglang_moe_autotune.tuner import Tuner, TunerOptions

    decode = SimpleNamespace(is_extend=lambda: False)
    runner = SimpleNamespace(decode_cuda_graph_runner=SimpleNamespace(capture_bs=[1, 4, 8]))
    scheduler = SimpleNamespace(
        server_args=SimpleNamespace(speculative_num_draft_tokens=3), tp_worker=SimpleNamespace(model_runner=runner)
    )
    served = [
        releases.batch_tokens(scheduler, SimpleNamespace(reqs=[SimpleNamespace(rid="r")] * n, forward_mode=decode))
        for n in (1, 4, 8)
    ]
    assert served == [("decode", 3), ("decode", 12), ("decode", 24)]
    assert releases.captured_sizes(scheduler) == {"decode": [3, 12, 24]}
    landscape = synthetic.landscape(ms=(3, 12, 24), ruggedness=0.02)
    records = []
    few = TunerOptions(search=SearchOptions(compiled_per_shape=12))
    tuner = Tuner(ReplayProvider(landscape, noise_percent=1.0), records.append, options=few)
    for _, m in served:
        tuner.add(landscape.shape, m, landscape.baselines[m].pair)
    while tuner.step(deep_idle=True) != "nothing":
        pass
    assert {record.M for record in records} == {3, 12, 24}


# -- a GPU with little shared memory ----------------------------------------------------------------------------


def small_gpu(limit: int, ms: list[int]) -> list[object]:
    """What the hooked lookup answers for SGLang's heuristic on a GPU of this size."""
    import builtins

    return builtins.bed.small_gpu(limit, ms)  # type: ignore[attr-defined,no-any-return]


@pytest.mark.sglang
@pytest.mark.parametrize("limit", [65_536, 101_376, 232_448])
def test_c01_c02_c03_the_lookup_of_a_small_gpu_answers_with_a_config_that_fits(
    bed: SchedulerProcess, limit: int
) -> None:
    told = bed.run(small_gpu, limit, [1, 127, 128, 129, 4096, 65536])
    for own, served, need, broken in told:
        assert need <= limit
        assert not broken
        needs = 73_728 if own["BLOCK_SIZE_N"] == 128 else 147_456
        assert (own == served) == (needs <= limit), "SGLang's own answer stands wherever it can be launched"


def compile_fitted(arch: int) -> list[int]:
    import builtins

    return builtins.bed.compile_fitted(arch)  # type: ignore[attr-defined,no-any-return]


@pytest.mark.sglang
def test_c01_the_fitted_config_compiles_into_what_the_gpu_has(bed: SchedulerProcess) -> None:
    own, fitted = bed.run(compile_fitted, 89)
    assert own == 147_456
    assert fitted == 98_304


# -- the table --------------------------------------------------------------------------------------------------


def test_the_page_has_the_table_that_the_rows_make() -> None:
    page = (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8")
    assert coverage_rows.table() in page, "write the output of scripts/coverage_rows.py into docs/coverage.md"


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_case_says_it_was_shown_only_by_tests_that_exist(case: coverage_rows.Case) -> None:
    for name in case.tests:
        path, _, test = name.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert test in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, f"{name} is gone"
    if case.quant is None and not case.tests:
        assert coverage_rows.state(case, {}) == "not shown"


def test_a_row_counts_as_shown_on_a_gpu_only_with_equal_outputs() -> None:
    case = coverage_rows.case("bf16")
    assert "GPU (NVIDIA H200)" in coverage_rows.state(case, {"bf16": {"equal": True, "device": "NVIDIA H200"}})
    assert "GPU" not in coverage_rows.state(case, {"bf16": {"equal": False, "device": "NVIDIA H200"}})
