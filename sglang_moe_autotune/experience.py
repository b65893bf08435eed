"""What is known of a shape from all its M: measurements, binaries, failures and winners."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from sglang_moe_autotune.measurement import Measurement
from sglang_moe_autotune.search_space import AXES, filled
from sglang_moe_autotune.shapes import GEMMS, ConfigPair, Gemm, KernelConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sglang_moe_autotune.records import Record


_RECENT: Final = 64
_GAIN_PER_OCTAVE: Final = 0.25
"""how much nearer to the best a config may come from one M to another, in log time"""
_HOPELESS: Final = 0.03
"""a lag that even with that is not worth a measurement"""


class Trial(NamedTuple):
    """One GEMM under one config."""

    gemm: Gemm
    config: KernelConfig


class Experience:
    """Shared by the searches of one shape. A search adds to it, and the next one starts from it."""

    def __init__(self, space: Iterable[KernelConfig]) -> None:
        self.space = frozenset(space)
        spelt_out = [filled(config) for config in self.space]
        self.axes = {axis: tuple(sorted({int(getattr(config, axis)) for config in spelt_out})) for axis in AXES}
        """the values that the space has on each axis"""
        self.measured: dict[int, dict[Trial, Measurement]] = {}
        self.reference: dict[int, ConfigPair] = {}
        """by M the pair that its ratios are to"""
        self.reference_us: dict[int, dict[Gemm, deque[float]]] = {}
        """by M recent times of that pair's two launches"""
        self.ordered: dict[KernelConfig, None] = {}
        """configs whose binaries were asked for, oldest first"""
        self.failed: dict[Trial, str] = {}
        self.chosen: dict[int, ConfigPair] = {}
        """by M what is served there, the baseline included"""
        self.losses: dict[int, dict[KernelConfig, float]] = {}
        """by M what it would lose without each of its configs, when it was last weighed"""
        self._lags: dict[int, dict[KernelConfig, float]] = {}
        """by M, for those whose search ended, here or elsewhere, what each config lagged or could be thought to"""
        self._known: set[KernelConfig] = set()

    def at(self, M: int, reference: ConfigPair) -> dict[Trial, Measurement]:  # noqa: N803
        """The measurements of one M as ratios to ``reference``, to add to.

        Ratios to another reference (an earlier winner) are turned into ratios to this one where it was measured
        with them, and forgotten otherwise.
        """
        rows, before = self.measured.get(M, {}), self.reference.get(M)
        if before is not None and before != reference:
            shift = {gemm: self._ratio(rows, gemm, before, reference) for gemm in GEMMS}
            rows = {
                trial: Measurement(log - by for log in row.logs)
                for trial, row in rows.items()
                if (by := shift[trial.gemm]) is not None
            }
            times = self.reference_us.get(M, {})
            self.reference_us[M] = {
                gemm: deque((us * math.exp(by) for us in times.get(gemm, ())), _RECENT)
                for gemm in GEMMS
                if (by := shift[gemm]) is not None
            }
        for gemm in GEMMS:
            self.reference_us.setdefault(M, {}).setdefault(gemm, deque(maxlen=_RECENT))
        self.measured[M], self.reference[M] = rows, reference
        return rows

    @staticmethod
    def _ratio(rows: dict[Trial, Measurement], gemm: Gemm, old: ConfigPair, new: ConfigPair) -> float | None:
        if old.of(gemm) == new.of(gemm):
            return 0.0
        row = rows.get(Trial(gemm, new.of(gemm)))
        return row.centre if row and row.logs else None

    def recall(self, record: Record) -> None:
        """Take a stored record's winner: it races first at other M. An imported one has won nothing here yet."""
        if record.source != "imported":
            self.chosen[record.M] = record.pair
        if record.verdict == "faster":
            self.ordered |= dict.fromkeys(c for c in (record.pair.up, record.pair.down) if c in self.space)

    def hear(self, M: int, lags: Mapping[KernelConfig, float]) -> None:  # noqa: N803
        """Another process of this machine ended a search of this M with these lags. Its binaries exist, so they are as
        good as ordered here. They count as no measurement: what was measured here goes before."""
        self.ordered |= dict.fromkeys(config for config in lags if config in self.space)
        self.conclude(M, {**lags, **(self._lags.get(M, {}) if self.measured.get(M) else {})})

    def winners(self, but: int | None = None) -> frozenset[KernelConfig]:
        """Configs that some M, or some other one, is served with."""
        return frozenset(c for m, pair in self.chosen.items() if m != but for c in (pair.up, pair.down))

    def conclude(self, M: int, lags: dict[KernelConfig, float]) -> None:  # noqa: N803
        """Note at the end of a search how far each config that was measured is behind the best, in log time."""
        self._lags[M] = {**self.hopes(M), **lags}
        self._known.update(lags)

    def hopes(self, M: int) -> dict[KernelConfig, float]:  # noqa: N803
        """The least lag, in log time, that each config can be thought to have here by the nearest M that knows it."""
        found: dict[KernelConfig, float] = {}
        for m in self.nearest(M):
            if m in self._lags:
                gained = _GAIN_PER_OCTAVE * octaves(m, M)
                found.update((c, lag - gained) for c, lag in self._lags[m].items() if c not in found)
                if len(found) >= len(self._known):
                    break
        return found

    def promising(self, M: int) -> list[KernelConfig]:  # noqa: N803
        """What was compiled for other M, is not tried here, and may come near the best; the most hopeful first."""
        rows, hopes = self.measured.get(M, {}), self.hopes(M)
        found = [
            config
            for config in self.ordered
            if hopes.get(config, 0.0) < _HOPELESS
            and any((t := Trial(gemm, config)) not in rows and t not in self.failed for gemm in GEMMS)
        ]
        return sorted(found, key=lambda config: hopes.get(config, 0.0))

    def nearest(self, M: int) -> list[int]:  # noqa: N803
        """Other M with a winner or measurements, here or elsewhere, the nearest first."""
        known = {m for m, rows in self.measured.items() if rows} | set(self.chosen) | set(self._lags)
        return sorted(known - {M}, key=lambda m: (octaves(m, M), m))


def octaves(a: int, b: int) -> float:
    """Distance of two M."""
    return abs(math.log2(a / b))
