"""Triton's interpreter beside a current numpy."""

from __future__ import annotations

import importlib
from typing import Any


class _WholeMeta(type):
    def __call__(cls, value: Any = 0, *rest: Any) -> int:
        return int(value.item() if getattr(value, "size", 0) == 1 else value, *rest)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, int)


class Whole(metaclass=_WholeMeta):
    """``int`` for Triton's interpreter: up to 3.6 it takes an array of one element for a number, and numpy 2.4 does
    not any more."""


def mend() -> None:
    """Once for a process that was started with TRITON_INTERPRET=1."""
    vars(importlib.import_module("triton.runtime.interpreter"))["int"] = Whole
