"""The Triton kernels of an SGLang's source, and the hash that learned rows count for."""

from __future__ import annotations

import ast
import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_moe_autotune.source import Source


def kernels(source: Source, module: str, name: str) -> list[ast.FunctionDef]:
    """The Triton kernels that a function names, in the order of their names. Raises UnreadError."""
    home, function = source.home(module, name)
    if not isinstance(function, ast.FunctionDef):
        return []
    named = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    tree = source.tree(home)
    top = tree.body if tree is not None else []
    found = [n for n in top if isinstance(n, ast.FunctionDef) and n.name in named and _is_kernel(n)]
    return sorted(found, key=lambda kernel: kernel.name)


def _is_kernel(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(d.func if isinstance(d, ast.Call) else d) == "triton.jit" for d in function.decorator_list)


def kernel_hash(source: Source, module: str, name: str) -> str:
    """What ``releases.kernel_hash`` gives for this source: learned rows count for one such hash. "" where there is
    no such function; raises UnreadError."""
    home, function = source.home(module, name)
    if not isinstance(function, ast.FunctionDef):
        return ""
    lines = source.text(home).splitlines(keepends=True)
    first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
    digest = hashlib.sha256("".join(lines[first - 1 : function.end_lineno]).encode())
    for kernel in kernels(source, module, name):
        # Triton keeps a kernel's text from its def on.
        digest.update("".join(lines[kernel.lineno - 1 : kernel.end_lineno]).encode())
    return digest.hexdigest()[:16]
