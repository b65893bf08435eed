"""Counts what Triton compiles in this process, and how much of that was done for tuning (which must be none)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from triton import knobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class CompileCount:
    """Triton's compilation listener, chained to one that was there before."""

    def __init__(self) -> None:
        self.compiled = 0
        self.for_tuning = 0
        self._tuning = False
        self._next: Callable[..., None] | None = None

    def install(self) -> CompileCount:
        """Be told of every compile from now on; itself."""
        self._next = knobs.compilation.listener
        knobs.compilation.listener = self
        return self

    def __enter__(self) -> None:
        """What is compiled inside is counted as done for tuning."""
        self._tuning = True

    def __exit__(self, *_: object) -> None:
        self._tuning = False

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """What is compiled within is serving's own, wherever this is entered."""
        before, self._tuning = self._tuning, False
        try:
            yield
        finally:
            self._tuning = before

    def __call__(self, *, cache_hit: bool, **rest: Any) -> None:
        if not cache_hit:
            self.compiled += 1
            self.for_tuning += self._tuning
        if self._next is not None:
            self._next(cache_hit=cache_hit, **rest)
