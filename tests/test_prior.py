"""The prior ranks by the files that lie there, tolerates whatever else lies there, and fits a slice."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sglang_moe_autotune import regimes
from sglang_moe_autotune.prior import Prior, find_files
from sglang_moe_autotune.records import Evidence, Record
from sglang_moe_autotune.search_space import full_space, legal_space
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig, MoeShape

SHAPE = MoeShape((128, 1536, 2048), (128, 2048, 768), 8)
FP8_BLOCK = MoeShape((256, 512, 7168), (256, 7168, 256), 8, "fp8_w8a8", (128, 128))
SPACE = frozenset(full_space())
RARE = KernelConfig(256, 32, 256, 64, 4, 5)
OTHER = KernelConfig(16, 256, 256, 64, 8, 5)


def write(folder: Path, name: str, rows: dict[str, Any] | str, triton: str = "triton_3_4_0") -> None:
    path = folder / triton / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(rows if isinstance(rows, str) else json.dumps(rows))


def row(config: KernelConfig, **more: object) -> dict[str, Any]:
    return config.to_dict() | more


def test_winners_near_the_asked_m_come_first(tmp_path: Path) -> None:
    write(tmp_path, "E=128,N=704,device_name=NVIDIA_H200", {"8": row(RARE), "4096": row(OTHER)})
    prior = Prior(find_files(tmp_path), "NVIDIA H200")
    assert prior.rank(SHAPE, 16, "up", SPACE)[0] == RARE
    assert prior.rank(SHAPE, 2048, "up", SPACE)[0] == OTHER


@pytest.mark.parametrize(
    ("near", "far"),
    [
        pytest.param("E=128,N=768,device_name=NVIDIA_H200", "E=8,N=14336,device_name=NVIDIA_H200", id="shape"),
        pytest.param("E=128,N=768,device_name=NVIDIA_H200", "E=128,N=768,device_name=NVIDIA_A100", id="gpu"),
        pytest.param("E=64,N=768,device_name=NVIDIA_B200", "E=64,N=768,device_name=AMD_Instinct_MI300X", id="vendor"),
    ],
)
def test_the_closer_file_has_more_weight(tmp_path: Path, near: str, far: str) -> None:
    write(tmp_path, near, {"64": row(RARE)})
    write(tmp_path, far, {"64": row(OTHER)})
    order = Prior(find_files(tmp_path), "NVIDIA H200").rank(SHAPE, 64, "up", SPACE)
    assert order[0] == RARE


def test_a_down_file_speaks_for_down_and_hides_the_up_row(tmp_path: Path) -> None:
    write(tmp_path, "E=128,N=704,device_name=NVIDIA_H200", {"64": row(RARE)})
    write(tmp_path, "E=128,N=704,device_name=NVIDIA_H200_down", {"64": row(OTHER, USE_TMA=True)})
    prior = Prior(find_files(tmp_path), "NVIDIA H200")
    assert prior.rank(SHAPE, 64, "up", SPACE)[0] == RARE
    assert prior.rank(SHAPE, 64, "down", SPACE)[0] == OTHER


def test_other_dtype_classes_do_not_vote_and_are_not_read(tmp_path: Path) -> None:
    write(tmp_path, "E=256,N=256,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128]", {"64": row(RARE)})
    prior = Prior(find_files(tmp_path), "NVIDIA H200")
    assert prior.load(SHAPE) == 0
    assert prior.load(FP8_BLOCK) == 1


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("", id="empty"),
        pytest.param("[1, 2]", id="list"),
        pytest.param('{"64": {"BLOCK_SIZE_M": 64}}', id="keys-missing"),
        pytest.param('{"64": {"BLOCK_SIZE_M": "a"}}', id="text"),
        pytest.param('{"triton_version": "3.4", "-1": {}, "0": 3}', id="keys-that-are-no-m"),
    ],
)
def test_odd_files_are_passed_over(tmp_path: Path, content: str) -> None:
    write(tmp_path, "E=128,N=768,device_name=NVIDIA_H200", content)
    write(tmp_path, "E=128,N=704,device_name=NVIDIA_H200", {"64": row(RARE, waves_per_eu=2), "x": {}})
    write(tmp_path, "README", "{}")
    prior = Prior(find_files(tmp_path), "NVIDIA H200")
    assert prior.rank(SHAPE, 64, "up", SPACE)[0] == RARE


def test_without_files_there_is_an_order_by_rows_an_expert(tmp_path: Path) -> None:
    prior = Prior(find_files(tmp_path / "absent"))
    few, many = (prior.rank(SHAPE, M, "up", SPACE) for M in (4, 8192))
    assert {c.BLOCK_SIZE_M for c in few[:8]} == {16}
    assert {c.BLOCK_SIZE_M for c in many[:8]} <= {64, 128, 256}


@pytest.mark.parametrize("limit", [101_376, 232_448])
def test_only_members_are_ranked_each_once(tmp_path: Path, limit: int) -> None:
    off_the_axes = KernelConfig(16, 16, 16, 1, 2, 1)
    write(tmp_path, "E=128,N=704,device_name=NVIDIA_H200", {"64": row(RARE), "128": row(off_the_axes)})
    space = frozenset(legal_space(SHAPE, limit))
    order = Prior(find_files(tmp_path)).rank(SHAPE, 64, "up", space, count=200)
    assert len(set(order)) == len(order) == 200
    assert set(order) <= space


def test_what_a_start_prepares_no_ranking_works_out_again() -> None:
    """Milliseconds on the serving thread otherwise, at the first M of each range."""
    regimes._order.cache_clear()
    regimes.prepare()
    before = regimes._order.cache_info()
    for M in (1, 64, 256, 1024, 8192, 65536):  # noqa: N806 - the field's name for it
        Prior().rank(SHAPE, M, "up", SPACE)
    after = regimes._order.cache_info()
    assert after.misses == before.misses == len(regimes.REGIMES)
    assert after.hits > before.hits


def test_a_small_space_is_ranked_whole() -> None:
    space = frozenset(c for c in full_space() if c.num_stages == 3 and c.BLOCK_SIZE_M == 16 and c.GROUP_SIZE_M == 1)
    order = Prior().rank(SHAPE, 4, "up", space)
    assert set(order) == space
    assert len(order) == len(space)
    assert Prior().rank(SHAPE, 4, "up", frozenset()) == []


# -- our own records ---------------------------------------------------------------------------------------------------

NEAR_SHAPE = MoeShape((128, 1408, 2048), (128, 2048, 704), 8)
WON = ConfigPair(RARE, KernelConfig(256, 64, 64, 16, 8, 2))


def won(shape: MoeShape = NEAR_SHAPE, M: int = 64, **changes: Any) -> Record:  # noqa: N803
    evidence = Evidence(100.0, 80.0, 0.2, 0.19, 0.21, 24, 30, 0.1)
    return msgspec.structs.replace(Record(shape, M, "faster", WON, ConfigPair(OTHER, OTHER), evidence), **changes)


def test_a_winner_of_a_near_shape_comes_first_each_gemm_its_own(tmp_path: Path) -> None:
    write(tmp_path, "E=128,N=512,device_name=NVIDIA_H200", {"64": row(OTHER)})
    prior = Prior(find_files(tmp_path), "NVIDIA H200")
    prior.learn(won(), here=True)
    assert prior.rank(SHAPE, 96, "up", SPACE)[0] == WON.up
    assert prior.rank(SHAPE, 96, "down", SPACE)[0] == WON.down


def test_of_two_learned_shapes_the_nearer_one_has_more_weight() -> None:
    far = MoeShape((8, 28672, 4096), (8, 4096, 14336), 2)
    for first, second in ((far, NEAR_SHAPE), (NEAR_SHAPE, far)):
        prior = Prior()
        for shape in (first, second):
            prior.learn(won(shape, pair=WON if shape == NEAR_SHAPE else ConfigPair(OTHER, OTHER)), here=True)
        assert prior.rank(SHAPE, 64, "up", SPACE)[0] == WON.up


def test_c31_a_winner_of_an_older_triton_seeds_its_own_shape_and_one_of_today_does_not() -> None:
    """The searches of a shape know what won there today; the prior would only say it twice."""
    for here in (True, False):
        prior = Prior()
        prior.learn(won(SHAPE), here=here)
        assert (prior.rank(SHAPE, 64, "up", SPACE)[0] == WON.up) == (not here)


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(won(verdict="baseline"), id="nothing-won"),
        pytest.param(won(source="imported"), id="measured-by-nobody-here"),
        pytest.param(won(source="pinned"), id="somebodys-word"),
        pytest.param(won(FP8_BLOCK), id="another-dtype"),
    ],
)
def test_what_did_not_win_here_for_this_dtype_has_no_vote(record: Record) -> None:
    prior = Prior()
    prior.learn(record, here=False)
    assert prior.rank(SHAPE, 64, "up", SPACE) == Prior().rank(SHAPE, 64, "up", SPACE)


def test_what_is_learned_between_two_rankings_counts_in_the_second() -> None:
    prior = Prior()
    assert prior.rank(SHAPE, 64, "up", SPACE)[0] != WON.up
    prior.learn(won(), here=True)
    assert prior.rank(SHAPE, 64, "up", SPACE)[0] == WON.up


@pytest.mark.sglang
def test_leave_one_out_of_the_installed_files_finds_most_winners() -> None:
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations is not None
    root = Path(package.submodule_search_locations[0])
    files = find_files(root / "srt/layers/moe/moe_runner/triton_utils/configs")
    assert len(files) > 300
    assert Prior(files, "NVIDIA H200").load(SHAPE) > 1000
    bf16 = [f for f in files if f.dtype_class == (None, False, False) and f.device_name == "NVIDIA_H200" and not f.down]
    found, asked = 0, 0
    for left_out in bf16[::4]:
        shape = MoeShape((left_out.E, 2 * left_out.N, 4096), (left_out.E, 4096, left_out.N), 8)
        prior = Prior([f for f in files if (f.E, f.N) != (left_out.E, left_out.N)], "NVIDIA H200")
        for m, config in json.loads(left_out.path.read_text()).items():
            if m in {"1", "16", "256", "4096"} and isinstance(config, dict):
                config.pop("USE_TMA", None)
                asked += 1
                found += KernelConfig.from_dict(config) in prior.rank(shape, int(m), "up", SPACE, count=24)
    assert asked >= 16
    assert found / asked > 0.5
