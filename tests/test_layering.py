"""Imports point one way (people -> edge -> disk -> pure), and the core runs where nothing else is there."""

from __future__ import annotations

import ast
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from import_table import LAYERS, PACKAGE, Layer, modules

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = PACKAGE.name
MODULES = modules()

# What a layer may import: other layers of the package, and packages besides the standard library.
REACHES: dict[Layer, set[Layer]] = {
    "pure": {"pure"},
    "disk": {"pure", "disk"},
    "edge": {"pure", "disk", "edge"},
    "people": {"pure", "disk", "people"},
}
USES: dict[Layer, set[str]] = {
    "pure": {"msgspec"},
    "disk": {"msgspec", "filelock", "platformdirs"},
    "edge": {"msgspec", "torch", "triton", "sglang", "prometheus_client"},
    "people": {"msgspec", "click", "rich", "filelock", "platformdirs"},
}
# Written once, in ``targets``: the plugin hooks the paths, the shell looks them up in SGLang's source.
NAMES_HOOKS = {"plugin", "targets"}
HOOKED = ("HookRegistry", "maybe_sleep_on_idle", "try_get_optimal_moe_config", "ModelRunner.load_model")

BLOCKED = ("torch", "triton", "sglang", "click", "rich", "filelock", "platformdirs")


def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"), str(MODULES[name]))


def imports(name: str) -> Iterator[tuple[str, int]]:
    """Full names that a module imports anywhere, functions and TYPE_CHECKING included, with the line."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: imports are absolute, so that this table can read them"
            module = node.module or ""
            if module == NAME:  # from package import module
                yield from ((f"{NAME}.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield module, node.lineno


def docstrings(module: ast.Module) -> set[int]:
    """The ids of the constants that are docstrings or bare texts, which may name anything."""
    return {id(node.value) for node in ast.walk(module) if isinstance(node, ast.Expr)}


def test_the_table_holds_every_module() -> None:
    missing = sorted(set(MODULES) - set(LAYERS))
    assert not missing, f"{missing} are in no layer: add them to LAYERS in tests/import_table.py"
    gone = sorted(set(LAYERS) - set(MODULES))
    assert not gone, f"{gone} are no modules: take them out of LAYERS in tests/import_table.py"


@pytest.mark.parametrize("name", sorted(set(MODULES) & set(LAYERS)))
def test_a_module_imports_only_what_its_layer_may(name: str) -> None:
    layer = LAYERS[name]
    for target, line in imports(name):
        where = f"{name}.py:{line} ({layer}) imports {target}"
        top = target.partition(".")[0]
        if top == NAME:
            own = target.removeprefix(NAME).lstrip(".") or "__init__"
            own = own if own in MODULES else "__init__"  # from package import __version__
            assert LAYERS.get(own) in REACHES[layer], f"{where}, a layer above it"
        else:
            assert top in sys.stdlib_module_names or top in USES[layer], f"{where}: not in {sorted(USES[layer])}"


@pytest.mark.parametrize("name", sorted(set(MODULES) - NAMES_HOOKS))
def test_hooked_paths_are_named_in_one_place(name: str) -> None:
    module = tree(name)
    prose = docstrings(module)
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            text = node.value if node.value.startswith(("sglang.", "Scheduler.", "ModelRunner.")) else ""
        elif isinstance(node, ast.Name | ast.alias):
            text = node.id if isinstance(node, ast.Name) else node.name
            text = text if text == "HookRegistry" else ""
        else:
            continue
        hit = [hooked for hooked in HOOKED if hooked in text]
        assert not hit, f"{name}.py:{node.lineno} names {hit[0]}: only {sorted(NAMES_HOOKS)} do"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_no_module_is_long(name: str) -> None:
    lines = len(MODULES[name].read_text(encoding="utf-8").splitlines())
    assert lines <= 350, f"{name}.py has {lines} lines: split it at a noun"


def test_the_median_module_is_short() -> None:
    lengths = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in MODULES.items()}
    assert statistics.median(lengths.values()) <= 150, lengths


@pytest.mark.parametrize("name", sorted(n for n in MODULES if LAYERS.get(n) != "people"))
def test_only_the_shell_prints(name: str) -> None:
    calls = [node for node in ast.walk(tree(name)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    prints = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    # The compiling child talks to its parent over its standard output.
    assert name == "compile_child" or not prints, f"{name}.py:{prints} prints: use logging"


@pytest.mark.parametrize("name", sorted(n for n in MODULES if LAYERS.get(n) == "pure"))
def test_the_core_catches_no_exception_it_cannot_name(name: str) -> None:
    broad = [
        handler.lineno
        for handler in ast.walk(tree(name))
        if isinstance(handler, ast.ExceptHandler)
        and (handler.type is None or "Exception" in {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)})
    ]
    assert not broad, f"{name}.py:{broad}: name the exception; only a hook has a fence"


CHILD = """
import importlib, json, sys

class Blocked:
    def __init__(self, names): self.names = names
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ImportError(f"{name} is blocked in this process")

blocked, names = json.loads(sys.argv[1])
sys.meta_path.insert(0, Blocked(set(blocked)))
failures = {}
for name in names:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failures[name] = str(error)
print(json.dumps([failures, sorted({name.partition(".")[0] for name in sys.modules} & set(blocked))]))
"""


def import_with_blocked(blocked: tuple[str, ...], names: list[str]) -> tuple[dict[str, str], list[str]]:
    child = subprocess.run(
        [sys.executable, "-W", "error", "-c", CHILD, json.dumps([blocked, names])],
        cwd=Path(PACKAGE).parent, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    failures, loaded = json.loads(child.stdout)
    return failures, loaded


@pytest.mark.parametrize(
    ("layers", "blocked"),
    [
        pytest.param({"pure"}, BLOCKED, id="core-with-the-rest-blocked"),
        pytest.param(
            {"disk"},
            ("torch", "triton", "sglang", "click", "rich"),
            id="disk-without-the-device-and-the-shell",
        ),
        pytest.param({"people"}, ("torch", "triton", "sglang"), id="shell-without-the-device"),
    ],
)
def test_a_layer_loads_without_what_it_must_not_need(layers: set[Layer], blocked: tuple[str, ...]) -> None:
    names = [NAME if n == "__init__" else f"{NAME}.{n}" for n in MODULES if LAYERS.get(n) in layers]
    failures, loaded = import_with_blocked(blocked, names)
    assert failures == {}
    assert loaded == []


def test_the_block_blocks() -> None:
    failures, _ = import_with_blocked(("msgspec",), [f"{NAME}.shapes"])
    assert list(failures) == [f"{NAME}.shapes"]


def test_status_loads_in_a_server_without_click_and_rich() -> None:
    failures, _ = import_with_blocked(("click", "rich", "torch"), [f"{NAME}.status"])
    assert failures == {}
