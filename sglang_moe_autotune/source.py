"""SGLang's source, read and not imported: importing it takes many seconds and a GPU's libraries."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import warnings
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sglang_moe_autotune.targets import HookTarget


class Finding(NamedTuple):
    """How a target stands, and the reason in a few words; ``unread``: the source tells nothing."""

    state: Literal["there", "moved", "changed", "unread"]
    reason: str = ""


class UnreadError(Exception):
    """A file of the source is there and cannot be read or parsed; the text says which and why."""


Function = ast.FunctionDef | ast.AsyncFunctionDef

_THERE = Finding("there")


class Source:
    """The source below ``root``, the folder that holds ``sglang/``. Each file is read and parsed once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.read: dict[str, str] = {}
        """SHA-256 of each module that was read so far, "" where there is none: what an answer rests on"""
        self._trees: dict[str, ast.Module | UnreadError | None] = {}
        self._attributes: dict[tuple[str, str], set[str] | None] = {}

    def tree(self, module: str) -> ast.Module | None:
        """The module parsed, None where there is none. Raises UnreadError."""
        if module not in self._trees:
            self._trees[module] = self._parse(module)
        found = self._trees[module]
        if isinstance(found, UnreadError):
            raise found
        return found

    def text(self, module: str) -> str:
        """The module's text, "" where there is none. Raises UnreadError."""
        try:
            return io.TextIOWrapper(io.BytesIO(self._content(module)), "utf-8").read()
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            raise UnreadError(f"{self._path(module)} cannot be read: {error}") from error

    def digest(self, module: str) -> str:
        """SHA-256 of the module's file as it is now, "" where there is none. Raises UnreadError."""
        try:
            with contextlib.suppress(FileNotFoundError):
                self._content(module)
        except OSError as error:
            raise UnreadError(f"{self._path(module)} cannot be read: {error}") from error
        return self.read[module]

    def _content(self, module: str) -> bytes:
        """Raises OSError."""
        self.read[module] = ""
        content = self._path(module).read_bytes()
        self.read[module] = hashlib.sha256(content).hexdigest()
        return content

    def _path(self, module: str) -> Path:
        path = self._root.joinpath(*module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def _parse(self, module: str) -> ast.Module | UnreadError | None:
        path = self._path(module)
        try:
            content = self._content(module)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an odd escape in SGLang is not our user's concern
                return ast.parse(content, str(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            return UnreadError(f"{path} cannot be read: {error.strerror}")
        except (SyntaxError, ValueError) as error:
            # A server on a newer Python may read what this one cannot.
            return UnreadError(f"{path} does not parse in this Python: {error}")

    def find(self, target: HookTarget) -> Finding:
        """Whether the target is as its hook needs it."""
        try:
            if self.tree(target.module) is None:
                return Finding("moved", f"there is no module {target.module}")
            found = self.definition(target.module, target.name)
        except UnreadError as error:
            return Finding("unread", str(error))
        if found is None:
            return Finding("moved", f"{target.module} has no {target.name}")
        if target.arguments is None or not isinstance(found, Function):
            return _THERE
        has = arguments(found)
        if has == target.arguments:
            return _THERE
        expected = ", ".join(target.arguments)
        return Finding("changed", f"{target.name} takes ({', '.join(has)}), not ({expected})")

    def definition(self, module: str, name: str) -> ast.stmt | None:
        """What binds ``name`` or ``Class.name``, through imports and base classes; an import of a module that
        is not in the source is itself the answer. Raises UnreadError."""
        return self.home(module, name)[1]

    def home(self, module: str, name: str) -> tuple[str, ast.stmt | None]:
        """The same, with the name of the module in which it stands."""
        owner, _, last = name.rpartition(".")
        if owner:
            members = (next(_definitions(node.body, last), None) for node in self._classes(module, owner, set()))
            return module, next((node for node in members if node is not None), None)
        seen: set[str] = set()
        while module not in seen and (tree := self.tree(module)) is not None:
            seen.add(module)
            node = next(_definitions(tree.body, name), None)
            if not isinstance(node, ast.ImportFrom) or self.tree(origin := self._origin(module, node)) is None:
                return module, node
            module, name = origin, _original(node, name)
        return module, None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        """The full name of the module that an import in ``module`` takes from."""
        if not node.level:
            return node.module or ""
        up = node.level - self._path(module).name.startswith("__init__.")
        return ".".join([*module.split(".")[: -up or None], *([node.module] if node.module else [])])

    def _classes(self, module: str, owner: str, seen: set[tuple[str, str]]) -> Iterator[ast.ClassDef]:
        """The class and then its bases, wherever they are defined."""
        if (module, owner) in seen or (tree := self.tree(module)) is None:
            return
        seen.add((module, owner))
        node = next(_definitions(tree.body, owner), None)
        if isinstance(node, ast.ImportFrom):
            yield from self._classes(self._origin(module, node), _original(node, owner), seen)
        elif isinstance(node, ast.ClassDef):
            yield node
            for base in node.bases:
                if isinstance(base, ast.Name):
                    yield from self._classes(module, base.id, seen)

    def attributes(self, module: str, owner: str) -> set[str] | None:
        """Names that instances of a class have: fields, methods, and what its methods put on ``self``, also in its
        bases. None where there is no such class. Raises UnreadError."""
        if (module, owner) not in self._attributes:
            found = [_bound(node.body) | _put_on_self(node) for node in self._classes(module, owner, set())]
            self._attributes[module, owner] = set().union(*found) if found else None
        return self._attributes[module, owner]

    def names(self, module: str) -> set[str] | None:
        """Names that a module binds at its top; None where there is no such module. Raises UnreadError."""
        tree = self.tree(module)
        return None if tree is None else _bound(tree.body)


def arguments(function: Function) -> tuple[str, ...]:
    """The names of its arguments in order, without * and ** ones."""
    return tuple(a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs))


def required(function: Function) -> tuple[str, ...]:
    """The names of the arguments without a default."""
    positional = [*function.args.posonlyargs, *function.args.args]
    without = positional[: len(positional) - len(function.args.defaults)]
    named = [a for a, default in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if not default]
    return tuple(a.arg for a in (*without, *named))


def _original(node: ast.ImportFrom, name: str) -> str:
    return next(a.name for a in node.names if (a.asname or a.name) == name)


def _nested(node: ast.stmt) -> Iterator[ast.stmt]:
    """The statements below ``if``, ``try``, ``with`` and loops."""
    for _, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else ():
            below = child.body if isinstance(child, ast.ExceptHandler) else [child]
            yield from (n for n in below if isinstance(n, ast.stmt))


def _bindings(node: ast.stmt) -> set[str] | None:
    """The names that a statement binds; None for one that only holds others."""
    if isinstance(node, Function | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.ImportFrom | ast.Import):
        return {a.asname or a.name for a in node.names}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return None


def _definitions(body: list[ast.stmt], name: str) -> Iterator[ast.stmt]:
    """Each statement that binds ``name`` in this body, also below ``if`` and ``try``."""
    for node in body:
        bound = _bindings(node)
        if bound is None:
            yield from _definitions(list(_nested(node)), name)
        elif name in bound:
            yield node


def _bound(body: list[ast.stmt]) -> set[str]:
    found: set[str] = set()
    for node in body:
        bound = _bindings(node)
        found |= _bound(list(_nested(node))) if bound is None else bound
    return found


def _put_on_self(node: ast.ClassDef) -> set[str]:
    stores = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return {n.attr for n in stores if isinstance(n.value, ast.Name) and n.value.id == "self"}
