"""A hooked function is found in SGLang's source however it got there, and nothing is imported."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from sglang_moe_autotune.source import Source
from sglang_moe_autotune.targets import LOOKUP, TARGETS, HookTarget

METHOD = HookTarget("pkg.scheduler", "Scheduler.idle")
FUNCTION = HookTarget("pkg.lookup", "answer", ("a", "b", "c"))


def write(root: Path, **modules: str) -> Source:
    for name, text in modules.items():
        path = root / "pkg" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return Source(root)


@pytest.mark.parametrize(
    ("text", "state"),
    [
        pytest.param("class Scheduler:\n def idle(self): ...", "there", id="plain"),
        pytest.param("class Scheduler:\n async def idle(self): ...", "there", id="async"),
        pytest.param("class Scheduler:\n @property\n def idle(self): ...", "there", id="decorated"),
        pytest.param("if True:\n class Scheduler:\n  def idle(self): ...", "there", id="below an if"),
        pytest.param("try: x\nexcept E:\n class Scheduler:\n  def idle(): ...", "there", id="in an except"),
        pytest.param("class Scheduler:\n def x(self): ...\n idle = x", "there", id="an alias"),
        pytest.param("class B:\n def idle(self): ...\nclass Scheduler(B): ...", "there", id="a base here"),
        pytest.param("from pkg.mixin import M\nclass Scheduler(int, M): ...", "there", id="a base elsewhere"),
        pytest.param("from pkg.mixin import M as Scheduler", "there", id="re-exported"),
        pytest.param("class Scheduler(Scheduler): ...", "moved", id="its own base"),
        pytest.param("from pkg.scheduler import Scheduler", "moved", id="imports itself"),
        pytest.param("class Scheduler: ...", "moved", id="no method"),
        pytest.param("def idle(self): ...", "moved", id="no class"),
        pytest.param("class Scheduler:\n def x(self):\n  def idle(): ...", "moved", id="in a method"),
        pytest.param("", "moved", id="empty"),
        pytest.param("class Scheduler(:", "unread", id="does not parse"),
        pytest.param("\0", "unread", id="NUL"),
    ],
)
def test_a_method(tmp_path: Path, text: str, state: str) -> None:
    found = write(tmp_path, scheduler=text, mixin="class M:\n def idle(self): ...").find(METHOD)
    assert found.state == state
    assert bool(found.reason) is (state != "there")


@pytest.mark.parametrize(
    ("text", "state"),
    [
        pytest.param("def answer(a, b, c): ...", "there", id="as expected"),
        pytest.param("def answer(a, b: int = 1, *, c=None): ...", "there", id="defaults and keywords"),
        pytest.param("def answer(a, b): ...", "changed", id="one less"),
        pytest.param("def answer(a, b, c, d=0): ...", "changed", id="one more"),
        pytest.param("def answer(b, a, c): ...", "changed", id="another order"),
        pytest.param("from pkg.other import answer", "there", id="re-exported, arguments unknown"),
        pytest.param("x = 1", "moved", id="gone"),
    ],
)
def test_a_function_with_its_arguments(tmp_path: Path, text: str, state: str) -> None:
    assert write(tmp_path, lookup=text).find(FUNCTION).state == state


def test_a_missing_module_is_moved_and_named(tmp_path: Path) -> None:
    found = Source(tmp_path).find(METHOD)
    assert found.state == "moved"
    assert "pkg.scheduler" in found.reason


def test_a_package_is_read_from_its_init(tmp_path: Path) -> None:
    (tmp_path / "pkg" / "lookup").mkdir(parents=True)
    (tmp_path / "pkg" / "lookup" / "__init__.py").write_text("def answer(a, b, c): ...")
    assert Source(tmp_path).find(FUNCTION).state == "there"


def test_warnings_of_the_source_are_not_ours(tmp_path: Path) -> None:
    assert write(tmp_path, lookup="x = '\\d'\ndef answer(a, b, c): ...").find(FUNCTION).state == "there"


@pytest.mark.sglang
def test_the_installed_sglang_has_every_target_and_is_not_imported() -> None:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    before = set(sys.modules)
    source = Source(Path(spec.submodule_search_locations[0]).parent)
    assert [source.find(target).state for target in TARGETS] == ["there"] * len(TARGETS)
    assert not [name for name in set(sys.modules) - before if name.startswith("sglang.")]


def test_the_lookup_counts_on_its_arguments() -> None:
    assert LOOKUP.path.endswith(".fused_moe_triton_config.try_get_optimal_moe_config")
    assert LOOKUP.arguments is not None
    assert LOOKUP.arguments[:5] == ("w1_shape", "w2_shape", "top_k", "dtype", "M")
