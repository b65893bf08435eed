"""Whether an SGLang fits the contract: each rule held against its source. Pure; ``contract`` is the data."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, NamedTuple

from sglang_moe_autotune.contract import (
    CONTRACT,
    Calls,
    Has,
    Hooked,
    Lacks,
    LaunchesTriton,
    OneOf,
    Part,
    Returns,
    Rule,
    Says,
    Takes,
)
from sglang_moe_autotune.kernel_source import kernels
from sglang_moe_autotune.source import Function, Source, UnreadError, arguments, required

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


class PartFit(NamedTuple):
    """How a part of the contract stands in a release."""

    lacks: tuple[str, ...] = ()
    """a sentence for each rule that does not hold"""
    ways: tuple[str, ...] = ()
    """the way that was found where releases differ"""
    unread: str = ""
    """why the source does not tell, "" where it does"""


def examine(source: Source, parts: Iterable[Part] = tuple(CONTRACT)) -> Mapping[Part, PartFit]:
    """Each part of the contract against this source."""
    return {part: _part(source, CONTRACT[part]) for part in parts}


def _part(source: Source, rules: Iterable[Rule]) -> PartFit:
    lacks: list[str] = []
    ways: list[str] = []
    try:
        for rule in rules:
            lacks += why_not(source, rule)
            if isinstance(rule, OneOf):
                ways += [word for word, needs in rule.ways if word and not _lacking(source, needs)]
    except UnreadError as error:
        return PartFit(tuple(lacks), tuple(ways), str(error))
    return PartFit(tuple(lacks), tuple(ways))


def why_not(source: Source, rule: Rule) -> list[str]:
    """What the source lacks for a rule, nothing where it holds. Raises UnreadError."""
    if isinstance(rule, Hooked):
        found = source.find(rule.target)
        if found.state == "unread":
            raise UnreadError(found.reason)
        return [found.reason] if found.reason else []
    if isinstance(rule, OneOf):
        reasons = [_lacking(source, needs) for _, needs in rule.ways]
        return [] if not all(reasons) else [" or else ".join(dict.fromkeys(each[0] for each in reasons))]
    return list(_plain(source, rule))


def _lacking(source: Source, rules: Iterable[Rule]) -> list[str]:
    return [reason for rule in rules for reason in why_not(source, rule)]


def _plain(source: Source, rule: Takes | Has | Lacks | Calls | Says | Returns | LaunchesTriton) -> Iterator[str]:
    if isinstance(rule, Takes):
        yield from _takes(source, rule)
    elif isinstance(rule, Has):
        names = source.attributes(rule.module, rule.owner) if rule.owner else source.names(rule.module)
        whose = rule.owner or rule.module
        if names is None:
            yield f"there is no {f'{rule.module}.{rule.owner}' if rule.owner else rule.module}"
        elif missing := [name for name in rule.names if name not in names]:
            yield f"{whose} has no {', '.join(missing)}"
    elif isinstance(rule, Lacks):
        if rule.name in (source.names(rule.module) or ()):
            yield f"{rule.module} has {rule.name}"
    elif isinstance(rule, Calls):
        if not any(_calls(source, module, rule.name) for module in rule.modules):
            yield f"{rule.modules[0]} does not call {rule.name}"
    elif isinstance(rule, Says):
        words = _words(source, rule.module)
        if missing := [word for word in rule.words if word not in words]:
            yield f"{rule.module} does not say {', '.join(missing)}"
    elif isinstance(rule, Returns):
        yield from _returns(source, rule)
    elif not kernels(source, rule.module, rule.name):
        yield f"{rule.name} names no Triton kernel of its module"


def _takes(source: Source, rule: Takes) -> Iterator[str]:
    function = source.definition(rule.module, rule.name)
    if not isinstance(function, Function):
        yield f"there is no function {rule.module}.{rule.name}"
        return
    has = arguments(function)
    if has[: len(rule.leading)] != rule.leading:
        yield f"{rule.name} takes ({', '.join(has[: len(rule.leading)])}, ...), not ({', '.join(rule.leading)}, ...)"
    known = {*rule.leading, *rule.named}
    if new := [name for name in required(function) if name not in known]:
        yield f"{rule.name} needs {', '.join(new)}"


def _calls(source: Source, module: str, name: str) -> bool:
    tree = source.tree(module)
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)] if tree is not None else []
    return any(getattr(f, "attr", None) == name or getattr(f, "id", None) == name for f in calls)


def _words(source: Source, module: str) -> set[str]:
    tree = source.tree(module)
    found: set[str] = set()
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


def _returns(source: Source, rule: Returns) -> Iterator[str]:
    function = source.definition(rule.module, rule.name)
    if not isinstance(function, Function):
        yield f"there is no function {rule.module}.{rule.name}"
        return
    forms = {_form(node.value) for node in ast.walk(function) if isinstance(node, ast.Return)}
    if forms != set(rule.forms):
        yield f"{rule.name} returns {' or '.join(sorted(forms))}, not {' or '.join(sorted(rule.forms))}"


def _form(value: ast.expr | None) -> str:
    return f"({', '.join(map(_form, value.elts))})" if isinstance(value, ast.Tuple) else "_"
