"""The measurement of one trial at one M: its samples and their centre. Pure."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Measurement:
    """The paired log-ratios candidate/baseline of one trial at one M, and their centre."""

    __slots__ = ("_centre", "logs")

    def __init__(self, logs: Iterable[float] = ()) -> None:
        self.logs = list(logs)
        self._centre: float | None = None

    def extend(self, logs: Iterable[float]) -> None:
        self.logs.extend(logs)
        self._centre = None

    @property
    def centre(self) -> float:
        """The mean of the middle half: nearly as sharp as the mean, and an interrupted launch moves it little."""
        if self._centre is None:
            ordered = sorted(self.logs)
            quarter = len(ordered) // 4
            self._centre = fmean(ordered[quarter : len(ordered) - quarter])
        return self._centre
