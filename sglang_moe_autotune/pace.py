"""How long a pass of tuning may keep the scheduler, and the watch over whether it does. Pure."""

from __future__ import annotations

import bisect
from typing import Final, NamedTuple

HARD_US: Final = 2000.0
"""what a request may wait for, except for launches of deep idle"""

LOAD_US: Final = 5000.0
"""what a pass may take that launches nothing: loading a binary is one call of the driver, of about 2 ms"""

UNKNOWN_RATIO: Final = 4.0
"""A candidate that never ran is taken to be this many times slower than its baseline at most: of the launches that were
recorded on an H200 99 % are up to 1,024 tokens."""

MAX_SPIN_US: Final = 800.0
"""of a slice, for the host to get ahead of short launches"""

SMALL_SLICES: Final = 8
SMALL_SHARE: Final = 0.4
"""The first slices after a request aim at this share of the others' length."""

BUCKETS_US: Final = (100, 200, 300, 500, 700, 1000, 1500, 2000, 3000, 5000, 10_000, 50_000, 200_000)

_HOST_US: Final = 100.0
_LONG_FACTOR: Final = 8.0
_WINDOW_S: Final = 60.0
_RARE: Final = 100
_FAR: Final = 4.0
_FIRST_PAUSE_S: Final = 2.0
_LONGEST_PAUSE_S: Final = 600.0


def longest_launch_us(slice_us: float) -> float:
    """Baseline launches up to this may be tuned outside deep idle: with them even a first launch of a candidate, beside
    one of the baseline, is expected to stay below ``HARD_US``."""
    return min(slice_us, (HARD_US - _HOST_US) / (1 + UNKNOWN_RATIO))


def bound_us(launch_us: float, slice_us: float, *, launched: bool) -> float:
    """What a pass may take that works on launches of this length; those of deep idle have a bound of their own."""
    if not launched:
        return LOAD_US
    if launch_us <= longest_launch_us(slice_us):
        return HARD_US
    return HARD_US + _LONG_FACTOR * launch_us


def pairs_within(pair_us: float, host_us: float, count: int, slice_us: float) -> int:
    """Pairs of launches that one slice may hold, one at least: neither the device's time for them nor the host's, both
    by what is known, takes more than the share of the slice that is left beside the spin."""
    return max(1, min(count, int(0.6 * slice_us / max(pair_us, host_us, 1.0))))


class Pause(NamedTuple):
    """Why nothing is tuned until a moment of the watch's clock."""

    until_s: float
    reason: str
    longest: str
    """the pass that was one too many, for the log"""


class _Break(NamedTuple):
    at_s: float
    number: int
    far: bool


class Watch:
    """Counts how long passes took, and pauses tuning where a bound was broken twice within a minute: by passes that are
    more than one in a hundred, or by several times what they may take.

    A pause doubles with each one, from two seconds to ten minutes; after ten minutes without it starts small again.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_US) + 1)
        """passes by length: the last bucket is open"""
        self.broken = 0
        self.longest_us = 0.0
        self.longest_did = ""
        """what the longest pass did"""
        self.pauses = 0
        self.pause: Pause | None = None
        self._paused_until_s = float("-inf")
        self._last: _Break | None = None
        self._passes = 0
        self._pause_s = _FIRST_PAUSE_S

    def observe(self, taken_us: float, bound: float, now_s: float, did: str = "") -> Pause | None:
        """Note a pass, and what it did; the pause if one begins with it."""
        self.counts[bisect.bisect_left(BUCKETS_US, taken_us)] += 1
        if taken_us > self.longest_us:
            self.longest_us, self.longest_did = taken_us, did
        self._passes += 1
        if taken_us <= bound:
            return None
        self.broken += 1
        before, self._last = self._last, _Break(now_s, self._passes, far=taken_us > _FAR * bound)
        if before is None or now_s - before.at_s > _WINDOW_S:
            return None
        if self._passes - before.number >= _RARE and not (before.far and self._last.far):
            return None
        if now_s - self._paused_until_s > _LONGEST_PAUSE_S:
            self._pause_s = _FIRST_PAUSE_S
        # No figure but the pause in it: it is a label of a metric.
        reason = f"paused for {self._pause_s:g} s: two passes of tuning within a minute took longer than they may"
        longest = f"{taken_us / 1e3:.1f} ms of {bound / 1e3:.1f}" + (f", {did}" if did else "")
        self.pause = Pause(now_s + self._pause_s, reason, longest)
        self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)
        self._paused_until_s, self._last = self.pause.until_s, None
        self.pauses += 1
        return self.pause

    def why_paused(self, now_s: float) -> str:
        """The reason while a pause lasts, empty otherwise."""
        if self.pause is None:
            return ""
        if now_s >= self.pause.until_s:
            self.pause = None
            return ""
        return self.pause.reason

    def quantile_us(self, q: float) -> float:
        """The upper end of the bucket that holds the quantile; 0 before the first pass."""
        if not (total := sum(self.counts)):
            return 0.0
        passed = 0
        for count, end in zip(self.counts, BUCKETS_US, strict=False):
            passed += count
            if passed >= q * total:
                return float(end)
        return self.longest_us
