"""Which way the installed SGLang goes where releases differ, as the contract words it, read from its source."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest

from sglang_moe_autotune import doctor, fit
from sglang_moe_autotune.source import Source

if TYPE_CHECKING:
    from sglang_moe_autotune.contract import Part


def has(module: str, owner: str, name: str) -> bool:
    """Has this class of the installed SGLang this field or method?"""
    root = doctor.sglang_root()
    assert root is not None
    attributes = Source(root).attributes(module, owner)
    assert attributes, f"there is no {module}.{owner}"
    return name in attributes


@functools.cache
def ways(part: Part) -> tuple[str, ...]:
    """The words of this part's ways. Raises AssertionError where a rule of the part does not hold: then a test that
    would be skipped for its way must fail."""
    root = doctor.sglang_root()
    assert root is not None
    found = fit.examine(Source(root), [part])[part]
    assert not found.unread, found.unread
    assert not found.lacks, found.lacks
    return found.ways


def skip_unless(part: Part, way: str, reason: str) -> None:
    """Skip the test where SGLang goes another way; the reason says what it does instead."""
    if way not in ways(part):
        pytest.skip(f"this SGLang ({', '.join(ways(part))}) {reason}")
