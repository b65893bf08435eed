"""GPU seconds that tuning may spend in an hour: an idle GPU that tunes draws power. Pure."""

from __future__ import annotations

_HOUR_S = 3600.0
_REOPEN = 0.05
"""of the hour's allowance must have come back before a spent one is used again: to open a bench for less would spend it
on opening benches"""


class Budget:
    """A bucket that holds an hour's allowance, starts full, and refills evenly."""

    def __init__(self, gpu_s_per_hour: float) -> None:
        self._size = gpu_s_per_hour
        self._left = gpu_s_per_hour
        self._filled_s: float | None = None
        self._spent = 0.0
        self._dry = False

    def left(self, now_s: float) -> bool:
        """May anything be spent now? ``now_s`` is any steady clock."""
        if self._filled_s is not None:
            grown = (now_s - self._filled_s) / _HOUR_S * self._size
            self._left = min(self._size, self._left + max(0.0, grown))
        self._filled_s = now_s
        if self._left <= 0.0:
            self._dry = True
        elif self._left >= _REOPEN * self._size:
            self._dry = False
        return not self._dry

    def spent_until(self, gpu_s: float) -> None:
        """Report the total of GPU seconds spent so far."""
        self._left -= gpu_s - self._spent
        self._spent = gpu_s

    @property
    def last_hour_s(self) -> float:
        """What of the hour's allowance is used up, at the last look."""
        return self._size - self._left
