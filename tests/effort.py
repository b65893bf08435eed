"""How much a call does, as a count: the same on any machine, where seconds would not be."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from sglang_moe_autotune.breath import Breath

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


def lines(call: Callable[[], object]) -> int:
    """Lines of Python that ``call`` executes, those of everything it calls included."""
    count = 0

    def trace(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    _traced(call, trace)
    return count


def native(call: Callable[[], object]) -> list[str]:
    """Names of the built-in functions that ``call`` calls, each once."""
    names: set[str] = set()

    def profile(_frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            names.add(argument.__name__)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return sorted(names - {"setprofile"})


def stretch(call: Callable[[], object]) -> int:
    """The most lines of Python that ``call`` executes from one breath to the next, those before the first and after the
    last one included."""
    longest = count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal longest, count
        if frame.f_code is Breath.__call__.__code__:
            count = 0
            return None
        count += event == "line"
        longest = max(longest, count)
        return trace

    _traced(call, trace)
    return longest


def _traced(call: Callable[[], object], trace: Callable[[FrameType, str, Any], Any]) -> None:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
