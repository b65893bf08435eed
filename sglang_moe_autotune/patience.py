"""How long a bench may say ``waiting``: by the time in which it was asked. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_GAP_S: Final = 1.0
"""between two questions that follow each other"""


class Patience:
    """Ends after ``limit_s`` of asking in vain.

    A server that has requests, or has spent its budget, asks nothing for minutes. What was being compiled is there
    when it asks again, and takes some more questions to be loaded: the time between does not count.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float]) -> None:
        self._limit_s, self._clock = limit_s, clock
        self.renew()

    def renew(self) -> None:
        """Something moved: it begins again."""
        self._asked_s, self._waited_s = self._clock(), 0.0

    def ended(self) -> bool:
        """Once for each question in vain."""
        now_s = self._clock()
        self._waited_s += min(now_s - self._asked_s, _GAP_S)
        self._asked_s = now_s
        return self._waited_s > self._limit_s
