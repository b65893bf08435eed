"""How much idle time a server had, what it sufficed for, and how much more its queue needs. Pure."""

from __future__ import annotations

from typing import Final

_GAP_S: Final = 1.0
"""Between two idle passes; more is a batch, a pause or SGLang's own sleep, of which this much counts at most."""
SCARCE: Final = 0.01
"""share of the time below which idle time is too little to wait for"""
_SOON_S: Final = 600.0


class IdleTime:
    """Told of every idle pass of the scheduler; times are seconds of one steady clock."""

    def __init__(self, now_s: float) -> None:
        self.total_s = self.deep_s = self.used_s = 0.0
        self.windows = 0
        self.settled = 0
        """searches that ended"""
        self._last_s = now_s
        self._quiet_s = 0.0

    def passed(self, now_s: float, quiet_s: float, *, deep: bool, queued: bool) -> None:
        """One idle pass: ``quiet_s`` after the last request, with something to tune or not."""
        passed_s = min(now_s - self._last_s, _GAP_S)
        self._last_s = now_s
        if quiet_s < self._quiet_s or not self.windows:
            self.windows += 1
        self._quiet_s = quiet_s
        self.total_s += passed_s
        if deep:
            self.deep_s += passed_s
        if queued:
            self.used_s += passed_s

    def expected_s(self, queued: int) -> float | None:
        """Idle time that as many searches take, by those that ended so far; None before the first one ended."""
        return queued * self.used_s / self.settled if self.settled else None


def scarce(idle_s: float, alive_s: float) -> bool:
    """Is this a server that hardly ever idles?"""
    return alive_s > _SOON_S and idle_s < SCARCE * alive_s
