"""Noise: what one slice of interleaved launches reads on a device, made from true times. Pure, for simulations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal, Protocol

from sglang_moe_autotune.bench import Sample

if TYPE_CHECKING:
    import random

NoiseModel = Literal["launch", "idle"]
"""``launch``: each launch varies on its own. ``idle``: the clocks of an idle GPU besides, see ``IdleNoise``."""


class Noise(Protocol):
    """Asked slice by slice; deterministic for a seed and the same questions."""

    def slice(self, candidate_us: float, baseline_us: float, count: int, *, begins: bool = True) -> list[Sample]:
        """``count`` pairs whose two launches truly take these times, as one slice would read them that begins with the
        candidate, or does not."""


class LaunchNoise:
    """Each launch by itself is log-normal with a standard deviation of ``sigma``, as a fraction."""

    def __init__(self, sigma: float, rng: random.Random) -> None:
        self._sigma, self._rng = sigma, rng

    def slice(
        self, candidate_us: float, baseline_us: float, count: int, *, begins: bool = True  # noqa: ARG002 - no clocks
    ) -> list[Sample]:
        return [Sample(self._launch(candidate_us), self._launch(baseline_us)) for _ in range(count)]

    def _launch(self, us: float) -> float:
        return us * math.exp(self._rng.gauss(0.0, self._sigma))


_LEVELS: Final = (1.0, 1.06, 1.15, 1.33)
"""time at each clock, in units of that at the highest one"""
_STEP_BETWEEN: Final = 0.05
"""probability of another clock at a slice's start"""
_STEP_WITHIN: Final = 0.01
"""probability that the clock changes while a slice runs, at any of its launches"""
_DRIFT: Final = 0.03
"""how far the time wanders around its level"""
_DRIFT_US: Final = 20_000.0
"""device time after which a wandering is forgotten"""
_COLD: Final = 0.25
"""a slice's first launch takes so much longer where the GPU had idled, fading by half with each launch"""
_IDLED: Final = 0.3
"""probability that it had, before a slice"""
_SPIKE: Final = 0.01
"""probability that a launch is held up (other work on the device, a refresh, an interrupt)"""


class IdleNoise:
    """What idle GPUs do beside the noise of each launch.

    The clock drifts, steps between slices, now and then within one; the first launches after idling are cold;
    one launch in a hundred is held up, by up to several times its length. The two launches of a pair run one after
    the other, each side first in turn, and each feels the clock of its own moment.
    """

    def __init__(self, sigma: float, rng: random.Random) -> None:
        self._sigma, self._rng = sigma, rng
        self._level, self._drift = 1.0, 0.0

    def slice(self, candidate_us: float, baseline_us: float, count: int, *, begins: bool = True) -> list[Sample]:
        rng = self._rng
        if rng.random() < _STEP_BETWEEN:
            self._level = rng.choice(_LEVELS)
        step_at = rng.randrange(2 * count) if rng.random() < _STEP_WITHIN else -1
        cold = _COLD if rng.random() < _IDLED else 0.0
        samples, launched = [], 0
        for pair in range(count):
            times_us = [0.0, 0.0]
            for side in (0, 1) if begins == (pair % 2 == 0) else (1, 0):
                if launched == step_at:
                    self._level = rng.choice(_LEVELS)
                us = (candidate_us, baseline_us)[side] * (1 + cold)
                times_us[side] = self._launch(us)
                cold /= 2
                launched += 1
            samples.append(Sample(*times_us))
        return samples

    def _launch(self, us: float) -> float:
        rng = self._rng
        kept = math.exp(-us / _DRIFT_US)
        self._drift = self._drift * kept + rng.gauss(0.0, _DRIFT * math.sqrt(1 - kept * kept))
        us *= self._level * math.exp(self._drift + rng.gauss(0.0, self._sigma))
        if rng.random() < _SPIKE:
            us *= 1 + min(8.0, 0.2 * (rng.paretovariate(1.5)))
        return us


def make(model: NoiseModel, sigma: float, rng: random.Random) -> Noise:
    return IdleNoise(sigma, rng) if model == "idle" else LaunchNoise(sigma, rng)
