"""The order of answers: override, pinned, SGLang's exact file, learned, another Triton's file, the heuristic."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import record_values as v

from sglang_moe_autotune import config_folder
from sglang_moe_autotune.config_folder import StockAnswer
from sglang_moe_autotune.explain import Files, Manner, Source, answer, explain, kept_back
from sglang_moe_autotune.records import ShapeNote, pin
from sglang_moe_autotune.sglang_json import encode, file_name
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig

if TYPE_CHECKING:
    from pathlib import Path

    from sglang_moe_autotune.records import Contents
    from sglang_moe_autotune.settings import Mode

M = 64
SHAPE = v.shape()
FILE = ConfigPair(KernelConfig(32, 64, 64, 8, 4, 3), KernelConfig(32, 64, 64, 8, 4, 3))
SEEN = ShapeNote(SHAPE, {M: v.heuristic(M)})


def pinned(contents: Contents) -> Contents:
    return pin(contents, SHAPE, M, v.pair(16))


def stored(source: str | None, verdict: str = "faster", baseline: ConfigPair | None = None) -> Contents:
    if source is None:
        return v.contents(SEEN)
    base = baseline or v.heuristic(M)
    chosen = v.pair() if verdict == "faster" else base
    return v.contents(SEEN, v.record(M, source=source, verdict=verdict, pair=chosen, baseline=base))


def files(origin: Any, tmp_path: Path) -> Files:
    return Files(readable=True, answer=None if origin is None else StockAnswer(origin, tmp_path / "f.json", M, FILE))


CASES: list[Any] = [
    pytest.param(stored(None), None, "miss", "heuristic", id="nothing learned, no file"),
    pytest.param(stored("learned"), None, "miss", "learned", id="learned beats the heuristic"),
    pytest.param(stored("learned", "baseline"), None, "miss", "heuristic", id="nothing was faster"),
    pytest.param(stored("imported"), None, "miss", "heuristic", id="imported is no answer"),
    pytest.param(stored("replayed"), None, "miss", "heuristic", id="replayed is no answer"),
    pytest.param(stored("learned"), "exact", "miss", "exact file", id="an exact file wins"),
    pytest.param(stored("learned", baseline=FILE), "exact", "all", "learned", id="unless the mode challenges it"),
    pytest.param(stored("learned"), "exact", "all", "exact file", id="and it was measured against that file"),
    pytest.param(stored("learned", baseline=FILE), "fallback", "miss", "learned", id="learned beats another Triton's"),
    pytest.param(stored("learned"), "fallback", "miss", "fallback file", id="SGLang's answer has changed since"),
    pytest.param(pinned(stored("learned")), "exact", "miss", "pinned", id="a pin beats all"),
    pytest.param(pinned(stored("learned")), None, "off", "heuristic", id="off leaves a pin unused"),
    pytest.param(stored("learned"), None, "off", "heuristic", id="off leaves a row unused"),
    pytest.param(stored("learned"), None, "read-only", "learned", id="read-only serves"),
]


@pytest.mark.parametrize(("contents", "origin", "mode", "expected"), CASES)
def test_who_answers(contents: Contents, origin: str | None, mode: Mode, expected: Source, tmp_path: Path) -> None:
    steps = explain(SHAPE, M, contents, Manner(mode), files(origin, tmp_path))
    found = answer(steps)
    assert found is not None
    assert found.source == expected
    assert all(step.says for step in steps)


@pytest.mark.parametrize("contents", [c.values[0] for c in CASES])
@pytest.mark.parametrize("origin", [None, "exact", "fallback"])
@pytest.mark.parametrize("mode", ["miss", "all", "off"])
def test_one_answer_and_what_stands_behind_it(
    contents: Contents, origin: str | None, mode: Mode, tmp_path: Path
) -> None:
    steps = explain(SHAPE, M, contents, Manner(mode), files(origin, tmp_path))
    assert [s.standing for s in steps].count("answers") == 1
    assert len({s.source for s in steps}) == len(steps) == 6
    for before, after in itertools.pairwise([s for s in steps if s.pair is not None]):
        assert after.standing == "behind"
        assert steps.index(before) < steps.index(after)


@pytest.mark.parametrize(
    ("manner", "contents", "says"),
    [
        pytest.param(Manner(level="off"), stored("learned"), "switched off", id="switched off"),
        pytest.param(Manner(level="off"), pinned(stored("learned")), "switched off", id="a pin, switched off"),
        pytest.param(Manner("off"), stored("learned"), "mode off", id="mode off"),
        pytest.param(Manner(bit_equal=True), stored("learned"), "BIT_EQUAL", id="not SGLang's own bits"),
        pytest.param(Manner(), stored("imported"), "raced first", id="imported"),
        pytest.param(Manner(), stored("replayed"), "recording", id="replayed"),
        pytest.param(Manner(deterministic=True), stored("learned"), "deterministic", id="deterministic"),
        pytest.param(Manner(), stored("learned", baseline=FILE), "another now", id="SGLang's answer has changed"),
        pytest.param(
            Manner(),
            msgspec.structs.replace(
                pinned(stored("learned")), environment=msgspec.structs.replace(v.H200, shared_memory_bytes=1024)
            ),
            "a block may use 1024",
            id="a pin that cannot be launched",
        ),
    ],
)
def test_what_keeps_a_row_back_is_said_and_it_does_not_answer(manner: Manner, contents: Contents, says: str) -> None:
    kept = kept_back(SHAPE, M, contents, manner, Files(readable=True))
    assert says in kept
    steps = explain(SHAPE, M, contents, manner, Files(readable=True))
    assert all(s.standing != "answers" and s.pair is None for s in steps if s.source in {"learned", "pinned"}) or (
        manner.deterministic
    )


@pytest.mark.parametrize("manner", [Manner(), Manner(level="rows"), Manner("read-only"), Manner("all")])
def test_a_row_that_is_served_is_kept_back_by_nothing(manner: Manner) -> None:
    for contents in (stored("learned"), pinned(stored("learned")), stored("learned", "baseline"), stored(None)):
        assert kept_back(SHAPE, M, contents, manner, Files(readable=True)) == ""


def test_an_exact_file_keeps_a_row_back_but_for_mode_all(tmp_path: Path) -> None:
    contents, found = stored("learned", baseline=FILE), files("exact", tmp_path)
    assert "SGLang's own file" in kept_back(SHAPE, M, contents, Manner(), found)
    assert kept_back(SHAPE, M, contents, Manner("all"), found) == ""


def test_where_all_is_off_sglangs_own_answer_is_not_made_to_fit() -> None:
    own = ConfigPair(*[KernelConfig(128, 256, 128, 1, 8, 4)] * 2)
    small = msgspec.structs.replace(v.H200, shared_memory_bytes=101_376)
    contents = v.contents(ShapeNote(SHAPE, {M: FILE}, unfit={M: own}), environment=small)
    for manner, pair in ((Manner(), FILE), (Manner(level="off"), own)):
        found = answer(explain(SHAPE, M, contents, manner, Files(readable=True)))
        assert found is not None
        assert found.pair == pair


def test_c28_deterministic_inference_is_asked_before_all() -> None:
    steps = explain(SHAPE, M, pinned(stored("learned")), Manner(deterministic=True), Files(readable=True))
    found = answer(steps)
    assert found is not None
    assert (found.source, found.pair) == ("override", None)
    assert {s.standing for s in steps if s.pair is not None} == {"behind"}


@pytest.mark.parametrize(("origin", "source"), [("exact", "exact file"), ("fallback", "fallback file")])
def test_without_sglang_the_note_says_what_a_server_saw(origin: Any, source: str) -> None:
    seen = ShapeNote(SHAPE, {M: FILE}, origin=origin)
    found = answer(explain(SHAPE, M, v.contents(seen), Manner(), Files(readable=False)))
    assert found is not None
    assert (found.source, found.pair) == (source, FILE)
    assert answer(explain(SHAPE, 7, v.contents(seen), Manner(), Files(readable=False))) is None


def test_c08_a_row_of_another_m_is_named_and_no_answer() -> None:
    contents = v.contents(v.record(128), v.note(None, 1, M))
    steps = explain(SHAPE, M, contents, Manner(), Files(readable=True))
    (learned,) = (s for s in steps if s.source == "learned")
    assert (learned.standing, learned.pair) == ("no", None)
    assert "own M only, and those are 128" in learned.says


def test_what_is_not_legal_is_never_the_answer() -> None:
    """C05: a row with BLOCK_SIZE_K 256 on blocks of 128 would scale with the wrong numbers."""
    fp8 = v.shape(dtype="fp8_w8a8", block_shape=(128, 128))
    bad = ConfigPair(*[KernelConfig(16, 64, 256, 1, 4, 3)] * 2)
    contents = v.contents(v.record(M, fp8, pair=bad), ShapeNote(fp8, {M: v.heuristic(M)}))
    steps = explain(fp8, M, contents, Manner(), Files(readable=True))
    assert any("BLOCK_SIZE_K=256" in s.says for s in steps)
    assert all(s.pair != bad for s in steps)


# SGLang's folder


def put(root: Path, triton: str, rows: dict[int, KernelConfig], down: bool = False) -> Path:
    folder = root / f"triton_{triton.replace('.', '_')}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(SHAPE, "NVIDIA H200", down=down)
    path.write_text(encode(rows))
    return path


def ask(root: Path, m: int = M) -> StockAnswer | None:
    return config_folder.answer(root, "3.8.0", SHAPE, "NVIDIA H200", m)


def test_the_files_of_this_triton_come_first_then_the_newest(tmp_path: Path) -> None:
    assert ask(tmp_path) is None
    put(tmp_path, "3.4.0", {1: v.LARGE})
    newest = put(tmp_path, "3.10.0", {1: v.SMALL})
    (tmp_path / "triton_nightly").mkdir()
    found = ask(tmp_path)
    assert found is not None
    assert (found.origin, found.path, found.pair.up) == ("fallback", newest, v.SMALL)
    own = put(tmp_path, "3.8.0", {1: v.LARGE})
    found = ask(tmp_path)
    assert found is not None
    assert (found.origin, found.path, found.pair.up) == ("exact", own, v.LARGE)


def test_sglang_0_5_11_takes_no_other_versions_than_the_four_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "3.6.0", {1: v.LARGE})
    assert ask(tmp_path) is not None
    monkeypatch.setattr(config_folder.doctor, "version_of", lambda _name: "0.5.11")
    assert ask(tmp_path) is None
    known = put(tmp_path, "3.4.0", {1: v.SMALL})
    assert getattr(ask(tmp_path), "path", None) == known


def test_c10_the_nearest_row_is_served_and_named(tmp_path: Path) -> None:
    put(tmp_path, "3.8.0", {96: v.SMALL, 1024: v.LARGE})
    for m, key in ((1, 96), (96, 96), (4096, 1024)):
        found = ask(tmp_path, m)
        assert found is not None
        assert found.key == key
    steps = explain(SHAPE, 1, v.contents(SEEN), Manner(), Files(readable=True, answer=ask(tmp_path, 1)))
    assert any("extrapolated from M=96" in s.says for s in steps)


def test_a_down_file_is_forced_to_the_block_m_of_the_up_file(tmp_path: Path) -> None:
    put(tmp_path, "3.8.0", {64: v.SMALL})
    put(tmp_path, "3.8.0", {64: v.LARGE}, down=True)
    found = ask(tmp_path)
    assert found is not None
    assert found.pair.down == msgspec.structs.replace(v.LARGE, BLOCK_SIZE_M=v.SMALL.BLOCK_SIZE_M)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"1": {}}', "\xff"])
def test_a_broken_file_is_passed_over(tmp_path: Path, text: str) -> None:
    put(tmp_path, "3.8.0", {1: v.SMALL}).write_text(text, encoding="latin-1")
    assert ask(tmp_path) is None
    put(tmp_path, "3.7.0", {1: v.SMALL})
    assert getattr(ask(tmp_path), "origin", None) == "fallback"


@pytest.mark.sglang
def test_the_installed_sglang_agrees(tmp_path: Path) -> None:
    """Each file that SGLang ships for the H200 is found by the rules of its own lookup."""
    root = config_folder.where({})
    assert root is not None
    assert config_folder.readable(root)
    fp8 = v.shape(256, w1_shape=(256, 512, 7168), w2_shape=(256, 7168, 256), dtype="fp8_w8a8", block_shape=(128, 128))
    found = config_folder.answer(root, "3.1.0", fp8, "NVIDIA H200", 128)
    assert found is not None
    assert found.pair.up.to_dict() == json.loads(found.path.read_text())["128"]
    assert config_folder.where({"SGLANG_MOE_CONFIG_DIR": str(tmp_path)}) == tmp_path / "configs"
