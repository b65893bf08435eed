"""Config files of others become rows to be raced: by name, for the shapes that they fit, and only what could run."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import record_values as v

from sglang_moe_autotune.agenda import Agenda
from sglang_moe_autotune.experience import Experience
from sglang_moe_autotune.imports import ConfigTable, from_tables, matching, read_table
from sglang_moe_autotune.records import Record, merge
from sglang_moe_autotune.search_space import full_space
from sglang_moe_autotune.sglang_json import FileName, encode, file_name, parse_name
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig, MoeShape
from sglang_moe_autotune.validity import problem

CONFIG = KernelConfig(16, 64, 64, 1, 4, 3)
ROW = CONFIG.to_dict()
FP8 = v.shape(256, dtype="fp8_w8a8", block_shape=(128, 128))
INT4 = MoeShape((256, 1024, 1024), (256, 2048, 256), 8, "int4_w4a16", (0, 128))
CHANNEL = v.shape(dtype="fp8_w8a8", per_channel_quant=True)
SHAPES = (v.shape(), v.shape(top_k=2), FP8, INT4, CHANNEL)


def table(name: str, rows: Any = None, folder: str = "configs") -> ConfigTable:
    found = read_table(name, folder, json.dumps({"64": ROW} if rows is None else rows))
    assert isinstance(found, ConfigTable), found
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.slug)
@pytest.mark.parametrize("down", [False, True], ids=["up", "down"])
def test_a_name_is_read_back_as_it_was_written(shape: MoeShape, down: bool) -> None:
    found = parse_name(file_name(shape, "NVIDIA H200", down=down))
    block = shape.block_shape if shape.block_shape and all(shape.block_shape) else None
    name = FileName(shape.E, shape.N, "NVIDIA_H200", shape.dtype, block, shape.per_channel_quant, down)
    assert found == name


@pytest.mark.parametrize(
    "name",
    [
        "config.json", "E=128,N=768.json", "E=x,N=768,device_name=H.json", "E=0,N=768,device_name=H.json",
        "E=128,N=768,device_name=../../x.json", "E=128,N=768,device_name=H.json.bak", "", "E=1,N=1,dtype=float32.json",
        f"E={'9' * 40},N=1,device_name=H.json",
    ],
)  # fmt: skip
def test_another_name_is_no_config_file(name: str) -> None:
    assert parse_name(name) is None
    assert isinstance(read_table(name, "configs", "{}"), str)


MATCHES = [
    pytest.param("E=128,N=768,device_name=NVIDIA_H200.json", SHAPES[:2], id="both top-k of one name"),
    pytest.param("E=256,N=768,device_name=B,dtype=fp8_w8a8,block_shape=[128, 128].json", (FP8,), id="sglang block"),
    pytest.param("E=256,N=768,device_name=B,dtype=fp8_w8a8,block_shape=[128,128].json", (FP8,), id="vllm block"),
    pytest.param("E=256,N=512,device_name=B,dtype=int4_w4a16.json", (INT4,), id="C06 int4 as vllm counts"),
    pytest.param("E=256,N=256,device_name=B,dtype=int4_w4a16.json", (INT4,), id="C06 int4 as sglang counts"),
    pytest.param("E=128,N=768,device_name=B,dtype=float8,per_channel_quant=True.json", (CHANNEL,), id="an old word"),
    pytest.param("E=128,N=768,device_name=B,dtype=float32.json", (), id="another dtype"),
    pytest.param("E=64,N=768,device_name=B.json", (), id="other experts"),
]


@pytest.mark.parametrize(("name", "expected"), MATCHES)
def test_a_file_goes_to_the_shapes_that_it_fits(name: str, expected: tuple[MoeShape, ...]) -> None:
    assert set(matching(table(name), SHAPES)) == set(expected)


@pytest.mark.parametrize(("folder", "width"), [("triton_3_4_0", 256), ("", 512)])
def test_c06_whose_file_it_is_decides_the_width_of_int4(folder: str, width: int) -> None:
    rows = {"64": ROW} if folder else {"triton_version": "3.4.0", "64": ROW}
    for n in (256, 512):
        found = table(f"E=256,N={n},device_name=B,dtype=int4_w4a16.json", rows, folder)
        assert found.triton == "3.4.0"
        assert bool(matching(found, SHAPES)) == (n == width)


BROKEN = ["", "[]", "{}", "null", '{"1": 3}', '{"x": {}}', '{"triton_version": "3"}', "[" * 9999]


@pytest.mark.parametrize("text", BROKEN, ids=lambda text: text[:20] or "empty")
def test_a_text_that_is_no_table_is_a_reason(text: str) -> None:
    assert isinstance(read_table("E=1,N=1,device_name=H.json", "configs", text), str)


def test_a_seed_is_valid_and_loses_to_whatever_was_measured() -> None:
    made = from_tables(table(file_name(v.shape(), "B")), None, v.shape(), v.H200)
    (seed,) = made.records
    assert made.refused == ()
    assert problem(seed) is None
    assert (seed.source, seed.evidence.samples, seed.M, seed.pair) == ("imported", 0, 64, ConfigPair(CONFIG, CONFIG))
    poor = v.record(64, samples=0, verdict="baseline", pair=v.heuristic(64))
    for learned in (v.record(64, samples=1), poor):
        both = merge(v.contents(seed), v.contents(learned))
        assert both.records[v.shape(), 64] == learned


REFUSED = [
    pytest.param(FP8, KernelConfig(16, 128, 256, 1, 4, 3), "BLOCK_SIZE_K=256", id="C05 one scale over two groups"),
    pytest.param(v.shape(), KernelConfig(256, 256, 128, 1, 8, 4), "shared memory", id="more than the chip has"),
    pytest.param(v.shape(), KernelConfig(48, 64, 64, 1, 4, 3), "BLOCK_SIZE_M", id="no power of two"),
    pytest.param(v.shape(), KernelConfig(16, 64, 64, 1, 4, 3, (("rm -rf", 1),)), "option", id="an odd key"),
]


@pytest.mark.parametrize(("shape", "config", "reason"), REFUSED)
def test_what_could_not_run_is_refused_row_by_row(shape: MoeShape, config: KernelConfig, reason: str) -> None:
    text = json.dumps({"8": config.to_dict(), "64": KernelConfig(16, 128, 128, 1, 4, 2).to_dict()})
    found = read_table(file_name(shape, "B"), "configs", text)
    assert isinstance(found, ConfigTable)
    made = from_tables(found, None, shape, v.H200)
    assert [r.M for r in made.records] == [64]
    assert len(made.refused) == 1
    assert reason in made.refused[0]
    assert "M=8" in made.refused[0]


def test_both_gemms_get_the_block_m_of_the_up_file() -> None:
    up = table(file_name(v.shape(), "B"), {"1": ROW, "64": ROW})
    large = KernelConfig(64, 128, 64, 8, 8, 4)
    down = read_table(file_name(v.shape(), "B", down=True), "triton_3_8_0", encode({60: large}))
    assert isinstance(down, ConfigTable)
    made = from_tables(up, down, v.shape(), v.H200)
    forced = msgspec.structs.replace(large, BLOCK_SIZE_M=16)
    assert [(r.M, r.pair) for r in made.records] == [(m, ConfigPair(CONFIG, forced)) for m in (1, 64)]


@pytest.mark.parametrize("key", ["SPLIT_K", "USE_TMA"])
def test_keys_that_say_the_default_are_dropped(key: str) -> None:
    assert table(file_name(v.shape(), "B"), {"64": {**ROW, key: 1}}).rows == {64: CONFIG}


def test_an_imported_record_is_never_taken_for_sglangs_answer() -> None:
    """Its baseline is its own pair, so a server that compares it with SGLang's answer finds another one."""
    made = from_tables(table(file_name(v.shape(), "B")), None, v.shape(), v.H200)
    assert all(isinstance(r, Record) and r.baseline == r.pair for r in made.records)


def test_a_seed_settles_nothing_and_its_configs_are_raced() -> None:
    (seed,) = from_tables(table(file_name(v.shape(), "B")), None, v.shape(), v.H200).records
    agenda = Agenda(30.0)
    agenda.store(seed)
    agenda.add(v.shape(), 64, v.heuristic(64))
    assert [entry.M for entry in agenda.queued()] == [64]
    experience = Experience(full_space())
    experience.recall(seed)
    assert seed.pair.up in experience.ordered
