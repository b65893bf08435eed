"""What of SGLang the plugin hooks, and whether an SGLang still has it: its source is read, not imported.

Pure: importing SGLang takes many seconds and a GPU's libraries, reading four definitions takes neither.
"""

from __future__ import annotations

import ast
import warnings
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class HookTarget(NamedTuple):
    """A function or method by module and dotted name."""

    module: str
    name: str
    arguments: tuple[str, ...] | None = None
    """the exact argument names that the hook counts on; None: it passes on whatever comes"""

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


LOOKUP = HookTarget(
    "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config",
    "try_get_optimal_moe_config",
    (
        "w1_shape",
        "w2_shape",
        "top_k",
        "dtype",
        "M",
        "is_marlin",
        "block_shape",
        "per_channel_quant",
        "return_down_config",
    ),
)
IDLE = HookTarget("sglang.srt.managers.scheduler", "Scheduler.maybe_sleep_on_idle")
BATCH = HookTarget("sglang.srt.managers.scheduler", "Scheduler.run_batch")
LOAD = HookTarget("sglang.srt.model_executor.model_runner", "ModelRunner.load_model")
REQUESTS = HookTarget("sglang.srt.managers.scheduler", "Scheduler.process_input_requests")
TARGETS = (LOOKUP, IDLE, BATCH, LOAD, REQUESTS)
SERVER_INFO = HookTarget("sglang.srt.managers.scheduler", "Scheduler.get_internal_state")
CONTROL = HookTarget("sglang.srt.managers.scheduler", "Scheduler.set_internal_state")
CAPTURE = HookTarget("sglang.srt.model_executor.model_runner", "ModelRunner.init_cuda_graphs")
CAPTURE_BEFORE_0516 = HookTarget("sglang.srt.model_executor.model_runner", "ModelRunner.init_device_graphs")
OPTIONAL = (SERVER_INFO, CONTROL, CAPTURE, CAPTURE_BEFORE_0516)
"""Not in ``TARGETS``: without them the server says less, is switched by the file alone, has no window before its graphs
are captured, and tunes all the same."""


class Finding(NamedTuple):
    """How a target stands, and the reason in a few words; ``unread``: the source tells nothing."""

    state: Literal["there", "moved", "changed", "unread"]
    reason: str = ""


_THERE = Finding("there")
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_MAX_BASES = 40


class Source:
    """The source below ``root``, the folder that holds ``sglang/``. Each file is read and parsed once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._trees: dict[str, ast.Module | Finding] = {}

    def _module(self, name: str) -> ast.Module | Finding:
        if name not in self._trees:
            self._trees[name] = self._parse(name)
        return self._trees[name]

    def _parse(self, name: str) -> ast.Module | Finding:
        path = self._root.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        try:
            text = path.read_bytes()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an odd escape in SGLang is not our user's concern
                return ast.parse(text, str(path))
        except FileNotFoundError:
            return Finding("moved", f"there is no module {name}")
        except OSError as error:
            return Finding("unread", f"{path} cannot be read: {error.strerror}")
        except (SyntaxError, ValueError) as error:
            # A server on a newer Python may read what this one cannot.
            return Finding("unread", f"{path} does not parse in this Python: {error}")

    def find(self, target: HookTarget) -> Finding:
        """Whether the target is as its hook needs it."""
        tree = self._module(target.module)
        if isinstance(tree, Finding):
            return tree
        owner, _, name = target.name.rpartition(".")
        if owner:
            found = self._method(target.module, owner, name, _MAX_BASES)
        else:
            found = next((n for n in _definitions(tree.body, name)), None)
        if found is None:
            return Finding("moved", f"{target.module} has no {target.name}")
        if target.arguments is None or not isinstance(found, _Function):
            return _THERE
        has = tuple(a.arg for a in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs))
        if has == target.arguments:
            return _THERE
        expected = ", ".join(target.arguments)
        return Finding("changed", f"{target.name} takes ({', '.join(has)}), not ({expected})")

    def _method(self, module: str, owner: str, name: str, depth: int) -> ast.stmt | None:
        """The definition of ``owner.name``, also in a base class that the module defines or imports."""
        tree = self._module(module)
        if isinstance(tree, Finding) or depth == 0:
            return None
        for node in _definitions(tree.body, owner):
            if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                alias = next(a for a in node.names if (a.asname or a.name) == owner)
                return self._method(node.module, alias.name, name, depth - 1)
            if isinstance(node, ast.ClassDef):
                own = next((n for n in _definitions(node.body, name)), None)
                bases = (b.id for b in node.bases if isinstance(b, ast.Name))
                inherited = (self._method(module, b, name, depth - 1) for b in bases)
                return own or next((n for n in inherited if n is not None), None)
        return None


def _definitions(body: list[ast.stmt], name: str) -> Iterator[ast.stmt]:
    """Each statement that binds ``name`` in this body, also below ``if`` and ``try``."""
    for node in body:
        if isinstance(node, (*_Function, ast.ClassDef)):
            if node.name == name:
                yield node
        elif isinstance(node, (ast.ImportFrom, ast.Import)):
            if any((a.asname or a.name) == name for a in node.names):
                yield node
        elif isinstance(node, ast.Assign):
            if any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                yield node
        else:
            for _, value in ast.iter_fields(node):
                if isinstance(value, list):
                    nested = [n for v in value for n in (v.body if isinstance(v, ast.ExceptHandler) else [v])]
                    yield from _definitions([n for n in nested if isinstance(n, ast.stmt)], name)
