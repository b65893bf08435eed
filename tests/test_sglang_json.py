"""Files for stock SGLang: its names, its text, and no learned row answers where it was not learned."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import record_strategies as s
import record_values as v
import stock_sglang
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_moe_autotune.errors import ExportError
from sglang_moe_autotune.export import EVIDENCE, export
from sglang_moe_autotune.records import Environment, Record, pin
from sglang_moe_autotune.sglang_json import (
    GRID,
    encode,
    file_name,
    folder_name,
    parse,
    table,
    unseen,
)
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig, MoeShape

if TYPE_CHECKING:
    from sglang_moe_autotune.records import Contents

FP8 = v.shape(256, dtype="fp8_w8a8", block_shape=(128, 128))
INT4 = MoeShape((256, 1024, 1024), (256, 2048, 256), 8, "int4_w4a16", (0, 128))

NAMES = [
    pytest.param(v.shape(), "E=128,N=768,device_name=NVIDIA_H200", id="C07 bf16 has no dtype part"),
    pytest.param(
        v.shape(dtype="float32", activation_dtype="float32"),
        "E=128,N=768,device_name=NVIDIA_H200,dtype=float32",
        id="C07 fp32",
    ),
    pytest.param(
        FP8,
        "E=256,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128, 128]",
        id="C07 a blank in the block shape",
    ),
    pytest.param(INT4, "E=256,N=256,device_name=NVIDIA_H200,dtype=int4_w4a16", id="C06 packed N, no block"),
    pytest.param(
        v.shape(dtype="int8_w8a8", per_channel_quant=True),
        "E=128,N=768,device_name=NVIDIA_H200,dtype=int8_w8a8,per_channel_quant=True",
        id="per channel",
    ),
    pytest.param(v.shape(top_k=2, ep=True), "E=128,N=768,device_name=NVIDIA_H200", id="top_k is not in it"),
]


@pytest.mark.parametrize(("shape", "name"), NAMES)
def test_file_names(shape: MoeShape, name: str) -> None:
    assert file_name(shape, "NVIDIA H200") == f"{name}.json"
    assert file_name(shape, "NVIDIA H200", down=True) == f"{name}_down.json"


def test_folder_names() -> None:
    assert folder_name("3.8.0") == "triton_3_8_0"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "7", '{"1": 3}', '{"a": {}}', '{"1": {"BLOCK_SIZE_M": 16}}', "[" * 100_000],
    ids=["empty", "list", "number", "row no object", "key no M", "keys missing", "nested without end"],
)
def test_a_text_that_is_no_table_is_a_reason(text: str) -> None:
    assert isinstance(parse(text), str)


def test_a_text_has_its_keys_in_order_and_is_indented_by_four() -> None:
    text = encode({16: v.LARGE, 2: v.pair().up})
    assert list(json.loads(text)) == ["2", "16"]
    assert text.startswith('{\n    "2": {\n        "BLOCK_SIZE_M": 32,\n')
    assert "num_warps" not in json.loads(text)["16"]


@pytest.mark.sglang
def test_every_file_that_sglang_ships_survives() -> None:
    paths = list(stock_sglang.folder().glob("configs/triton_*/*.json"))
    assert len(paths) > 100
    for path in paths:
        rows = parse(path.read_text())
        assert isinstance(rows, dict), (path, rows)
        assert json.loads(encode(rows)) == json.loads(path.read_text())


def _answer(rows: dict[int, Any], m: int) -> Any:
    """As SGLang reads a table: the nearest key, the first of two."""
    return rows[min(rows, key=lambda key: abs(key - m))]


_learned_m = st.sets(st.sampled_from([1, 2, 3, 8, 127, 128, 129, 130, 200, 256, 4096, 5000]), min_size=1, max_size=6)
_seen_m = st.sets(st.integers(1, 5200), max_size=5)


@s.QUICK
@given(st.sampled_from([8, 128, 8192]), _learned_m, _seen_m)
@example(128, {128}, set())
@example(8192, {4096}, set())
@example(128, set(GRID), set())
def test_c09_a_learned_row_answers_for_its_own_m(experts: int, learned: set[int], seen: set[int]) -> None:
    shape = v.shape(experts)
    records = [v.record(m, shape) for m in learned]
    note = v.note(shape, 1, 9000, *seen)
    up, down = (parse(encode(rows)) for rows in table(shape, records, note))
    assert isinstance(up, dict)
    assert isinstance(down, dict)
    assert up.keys() == down.keys()
    assert up.keys() >= {*GRID, *learned, *note.baselines}
    known = sorted({*GRID, *learned, *note.baselines})
    spans = [(a, b) for a, b in itertools.pairwise(known) if {a, b} <= learned]
    for m in range(1, max(up) + 300):
        answer = ConfigPair(_answer(up, m), _answer(down, m))
        if m in learned:
            assert answer == v.pair()
        elif not any(a < m < b for a, b in spans):
            assert answer == v.heuristic(m, experts), m


@pytest.mark.parametrize("m", [1, 64, 127, 129, 256, 8192])
def test_c08_learned_at_128_only(m: int) -> None:
    up, down = table(v.shape(), [v.record(128)], v.note(None, 1, 4096))
    assert (_answer(up, m), _answer(down, m)) == (v.heuristic(m).up, v.heuristic(m).down)
    assert (_answer(up, 128), _answer(down, 128)) == (v.pair().up, v.pair().down)


def test_a_record_that_found_nothing_faster_counts_as_sglangs_answer() -> None:
    nothing = v.record(256, verdict="baseline", pair=v.heuristic(256))
    up, _ = table(v.shape(), [v.record(64), nothing], None)
    assert up[256] == v.heuristic(256).up
    assert table(v.shape(), [nothing], v.note(None, 1)) == ({}, {})


def test_a_side_of_e_that_was_never_seen_is_named() -> None:
    assert unseen(v.shape(), [v.record(64)], v.note(None, 1, 256)) is None
    assert "M > 128 was never seen" in (unseen(v.shape(), [v.record(64)], None) or "")
    assert "M <= 128 was never seen" in (unseen(v.shape(), [v.record(256)], None) or "")


def test_c30_both_rows_have_one_block_m() -> None:
    """A pair with two is no learned pair, and SGLang itself forces its own down config to the up config's."""
    odd = ConfigPair(KernelConfig(32, 64, 64, 1, 4, 3), KernelConfig(64, 64, 64, 1, 4, 3))
    note = msgspec.structs.replace(v.note(None, 1, 4096), baselines={1: odd, 4096: odd})
    up, down = table(v.shape(), [v.record(64), v.record(128, pair=odd)], note)
    assert all(up[m].BLOCK_SIZE_M == down[m].BLOCK_SIZE_M for m in up)
    assert up[128] == v.heuristic(128).up


LEARNED = v.contents(v.record(64), v.record(128), v.note(None, 1, 256))


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_an_export_is_what_sglang_expects_and_can_be_repeated(tmp_path: Path) -> None:
    first = export(LEARNED, tmp_path / "out")
    names = [file_name(v.shape(), "NVIDIA H200", down=down) for down in (False, True)]
    folder = tmp_path / "out" / "configs" / "triton_3_8_0"
    assert first.paths == tuple(folder / name for name in names)
    assert [path.name for path in (tmp_path / "out" / "configs").iterdir()] == ["triton_3_8_0"]
    before = _files(tmp_path)
    more = v.contents(*LEARNED.records.values(), v.record(256), *LEARNED.notes.values())
    assert export(more, tmp_path / "out").paths == first.paths
    assert _files(tmp_path) == before
    rows = parse(first.paths[0].read_text())
    assert isinstance(rows, dict)
    assert rows[256] == v.pair().up


def test_nothing_learned_writes_nothing(tmp_path: Path) -> None:
    nothing = v.record(1, verdict="baseline", pair=v.heuristic(1))
    assert export(v.contents(nothing, v.note(None, 1)), tmp_path / "out").paths == ()
    assert not (tmp_path / "out").exists()


def test_a_second_triton_stands_beside_the_first(tmp_path: Path) -> None:
    export(LEARNED, tmp_path)
    newer = msgspec.structs.replace(LEARNED, environment=msgspec.structs.replace(v.H200, triton="3.9.0"))
    export(newer, tmp_path)
    assert {p.name for p in (tmp_path / "configs").iterdir()} == {"triton_3_8_0", "triton_3_9_0"}


@pytest.mark.parametrize("name_of", [False, True], ids=["up", "down"])
@pytest.mark.parametrize("ours_before", [False, True], ids=["somebody else's", "ours, then edited"])
def test_a_file_that_is_not_ours_is_never_overwritten(tmp_path: Path, name_of: bool, ours_before: bool) -> None:
    path = tmp_path / "configs" / "triton_3_8_0" / file_name(v.shape(), "NVIDIA H200", down=name_of)
    path.parent.mkdir(parents=True)
    if ours_before:
        export(LEARNED, tmp_path)
    path.write_text('{"1": {}}')
    before = _files(tmp_path)
    with pytest.raises(ExportError, match=r"was not written by this tool.*move it away"):
        export(LEARNED, tmp_path)
    assert path.read_text() == '{"1": {}}'
    assert _files(tmp_path) == before
    path.unlink()
    assert len(export(LEARNED, tmp_path).paths) == 2


@pytest.mark.parametrize("down", [False, True], ids=["up", "down"])
def test_merging_keeps_what_is_not_ours_and_says_so(tmp_path: Path, down: bool) -> None:
    """A copy of SGLang's own folder: another shape's file, another Triton's, and one that collides with ours."""
    wide = v.shape(256)
    contents = v.contents(*LEARNED.records.values(), *LEARNED.notes.values(), v.record(64, wide), v.note(wide, 1, 300))
    folder = tmp_path / "configs" / "triton_3_8_0"
    theirs = [
        folder / file_name(v.shape(), "NVIDIA H200", down=down),
        folder / file_name(v.shape(64), "NVIDIA H200"),
        tmp_path / "configs" / "triton_3_4_0" / file_name(wide, "NVIDIA H200"),
    ]
    for path in theirs:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"1": {}}')
    done = export(contents, tmp_path, keep_foreign=True)
    assert [path.name for path in done.paths] == [file_name(wide, "NVIDIA H200", down=d) for d in (False, True)]
    assert any(v.shape().slug in note and theirs[0].name in note for note in done.notes)
    assert all(path.read_text() == '{"1": {}}' for path in theirs)
    assert not (folder / file_name(v.shape(), "NVIDIA H200", down=not down)).exists(), "both of a pair or neither"
    assert export(contents, tmp_path, keep_foreign=True) == done


def test_the_evidence_lies_beside_the_files_and_says_all(tmp_path: Path) -> None:
    done = export(LEARNED, tmp_path)
    evidence = json.loads((tmp_path / EVIDENCE).read_text())
    (key,) = evidence
    assert tmp_path / key == done.paths[0]
    rows = evidence[key]["rows"]
    assert [msgspec.convert(row, Record) for row in rows] == sorted(LEARNED.records.values(), key=lambda r: r.M)
    assert msgspec.convert(evidence[key]["environment"], Environment) == v.H200
    newer = msgspec.structs.replace(LEARNED, environment=msgspec.structs.replace(v.H200, triton="3.9.0"))
    export(newer, tmp_path)
    assert len(json.loads((tmp_path / EVIDENCE).read_text())) == 2


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '{"a": 1}'])
def test_broken_evidence_of_an_earlier_export_is_written_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / EVIDENCE).write_text(text)
    (done, _) = export(LEARNED, tmp_path)
    assert str(done[0].relative_to(tmp_path)) in json.loads((tmp_path / EVIDENCE).read_text())


def test_imported_rows_are_not_exported_and_a_pin_without_any_answer_of_sglang_is_left_out(tmp_path: Path) -> None:
    seed = v.record(64, source="imported", baseline=v.pair())
    assert export(v.contents(seed, v.note(None, 1, 256)), tmp_path).paths == ()
    done = export(pin(v.contents(), v.shape(), 64, v.pair()), tmp_path)
    assert done.paths == ()
    assert "was never seen" in done.notes[0]
    done = export(pin(v.contents(v.note(None, 1, 256)), v.shape(), 64, v.pair()), tmp_path)
    rows = parse(done.paths[0].read_text())
    assert isinstance(rows, dict)
    assert (rows[64], rows[63]) == (v.pair().up, v.heuristic(63).up)


def test_rows_of_a_recording_are_exported_only_when_asked_for(tmp_path: Path) -> None:
    contents = v.contents(v.record(64), v.record(128, source="replayed"), v.note(None, 64, 128))
    done = export(contents, tmp_path / "out")
    assert any("1 rows are left out" in note for note in done.notes)
    without = parse(done.paths[0].read_text())
    every = parse(export(contents, tmp_path / "all", replayed=True).paths[0].read_text())
    assert isinstance(without, dict)
    assert isinstance(every, dict)
    assert without[64] == every[64] == v.pair().up
    assert without[128] == v.heuristic(128).up
    assert every[128] == v.pair().up


def _change(**environment: Any) -> Contents:
    return msgspec.structs.replace(LEARNED, environment=msgspec.structs.replace(v.H200, **environment))


@pytest.mark.parametrize(
    ("contents", "odd", "reason"),
    [
        pytest.param(_change(triton="3.8.0+git5"), None, "plain version", id="Triton with a local part"),
        pytest.param(_change(triton="../../x"), None, "plain version", id="Triton as a path"),
        pytest.param(_change(device_name="../../x"), None, "no file of its own", id="device as a path"),
        pytest.param(_change(device_name="x" * 250), None, "cannot be", id="name too long"),
        pytest.param(LEARNED, "configs/triton_nightly", "move it away", id="SGLang raises on such a folder"),
        pytest.param(LEARNED, "configs", "cannot be listed", id="configs is a file"),
    ],
)
def test_an_export_that_would_mislead_writes_nothing(
    tmp_path: Path, contents: Contents, odd: str | None, reason: str
) -> None:
    root = tmp_path / "out"
    if odd is not None:
        (root / odd).parent.mkdir(parents=True)
        (root / odd).touch()
    before = _files(tmp_path)
    with pytest.raises(ExportError, match=reason):
        export(contents, root)
    assert _files(tmp_path) == before


def test_of_two_shapes_with_one_name_the_one_served_more_is_written(tmp_path: Path) -> None:
    wide = v.shape(w1_shape=(128, 1536, 4096), w2_shape=(128, 4096, 768))
    other = ConfigPair(*[KernelConfig(16, 64, 64, 1, 4, 2)] * 2)
    served = [v.note(v.shape(), 1, 256, served={64: 5}), v.note(wide, 1, 256, served={8: 2, 64: 4})]
    both = v.contents(v.record(64), v.record(64, wide, pair=other), *served)
    done = export(both, tmp_path)
    rows = parse(done.paths[0].read_text())
    assert isinstance(rows, dict)
    assert rows[64] == other.up
    assert len(done.paths) == 2
    assert f"{v.shape().slug} is left out: {wide.slug} has the same name" in done.notes[0]
    assert "6 times against 5" in done.notes[0]


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.mark.parametrize("call", range(1, 7))
@pytest.mark.parametrize("step", ["replace", "rename", "unlink", "mkdir"])
@pytest.mark.parametrize("fresh", [True, False], ids=["new folder", "over an older export"])
def test_c30_a_crash_never_leaves_half_of_two_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, call: int, fresh: bool
) -> None:
    new = v.contents(v.record(64, pair=v.pair(64)), v.note(None, 1, 256))
    if not fresh:
        export(LEARNED, tmp_path)
    real, calls = getattr(os, step), itertools.count(1)

    def fatal(*args: Any, **kwargs: Any) -> Any:
        # SGLang may list this folder at any moment, and raises on names that it does not know
        assert {p.name for p in tmp_path.glob("configs/*")} <= {"triton_3_8_0"}
        if next(calls) == call:
            raise Killed
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, step, fatal)
        with contextlib.suppress(Killed):
            export(new, tmp_path)
    up, down = (tmp_path / "configs/triton_3_8_0" / file_name(v.shape(), "NVIDIA H200", down=d) for d in (False, True))
    assert up.exists() >= down.exists()
    if down.exists():
        rows = [parse(path.read_text()) for path in (up, down)]
        tables = [table(v.shape(), list(c.records.values()), c.notes[v.shape()]) for c in (LEARNED, new)]
        assert tuple(rows) in tables
    assert len(export(new, tmp_path).paths) == 2


def _job(shape: MoeShape) -> dict[str, Any]:
    block_n, block_k = shape.block_shape or (0, 0)
    key = {"E": shape.E, "N": shape.N, "dtype": shape.dtype, "per_channel_quant": shape.per_channel_quant}
    return {**key, "block_n": block_n, "block_k": block_k}


def _call(shape: MoeShape) -> dict[str, Any]:
    arguments = msgspec.structs.asdict(shape)
    keys = ("w1_shape", "w2_shape", "top_k", "dtype", "block_shape", "per_channel_quant")
    return {key: arguments[key] for key in keys}


@pytest.mark.sglang
def test_c33_stock_sglang_reads_an_export_as_it_was_meant(tmp_path: Path) -> None:
    """A fresh process with SGLANG_MOE_CONFIG_DIR: its own names, tables and answers, for up and down."""
    shapes = [param.values[0] for param in NAMES[:5]]
    learned_m = (1, 16, 24, 300)
    installed = msgspec.structs.replace(v.H200, triton=importlib.metadata.version("triton"))
    values: list[Any] = []
    for shape in shapes:
        values += [v.record(m, shape) for m in learned_m]
        values.append(v.note(shape, 1, 4096))
    contents = v.contents(*values, environment=installed)
    done = export(contents, tmp_path)
    assert done.notes == ()
    asked = [1, 2, 16, 20, 24, 25, 128, 129, 256, 257, 299, 300, 301, 8192]
    jobs = {
        "device_name": installed.device_name,
        "names": [
            {
                **{k: j[k] for k in ("E", "N", "dtype", "per_channel_quant")},
                "block_shape": [j["block_n"], j["block_k"]],
                "down_moe": down,
            }
            for j in map(_job, shapes)
            for down in (False, True)
        ],
        "tables": [{**_job(shape), "down_moe": down} for shape in shapes for down in (False, True)],
        "lookups": [(_call(shape), asked) for shape in shapes],
    }
    child = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(stock_sglang.__file__))],
        input=json.dumps(jobs),
        env={**os.environ, "SGLANG_MOE_CONFIG_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    answers = json.loads(child.stdout[child.stdout.index("{") :])
    assert answers["triton"] == installed.triton
    assert sorted(answers["names"]) == sorted(path.name for path in done.paths)
    by_name = {path.name: json.loads(path.read_text()) for path in done.paths}
    assert answers["tables"] == [by_name[name] for name in answers["names"]]
    for shape, found in zip(shapes, answers["lookups"], strict=True):
        for m, (up, (down, _)) in zip(asked, found, strict=True):
            learned: Record | None = contents.records.get((shape, m))
            meant = learned.pair if learned else v.heuristic(m, shape.E)
            if m != 20:  # lies between two learned keys
                assert (up, down) == (meant.up.to_dict(), meant.down.to_dict()), (shape.slug, m)
