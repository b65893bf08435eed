"""What is known of a shape from all its M: measurements, binaries, failures and winners."""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean
from typing import TYPE_CHECKING, Final, NamedTuple

from sglang_moe_autotune.shapes import GEMMS, ConfigPair, Gemm, KernelConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from sglang_moe_autotune.records import Record


_RECENT: Final = 64


class Trial(NamedTuple):
    """One GEMM under one config."""

    gemm: Gemm
    config: KernelConfig


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


class Experience:
    """Shared by the searches of one shape. A search adds to it, and the next one starts from it."""

    def __init__(self, space: Iterable[KernelConfig]) -> None:
        self.space = frozenset(space)
        self.measured: dict[int, dict[Trial, Measurement]] = {}
        self.reference: dict[int, ConfigPair] = {}
        """by M the pair that its ratios are to"""
        self.reference_us: dict[int, dict[Gemm, deque[float]]] = {}
        """by M recent times of that pair's two launches"""
        self.ordered: dict[KernelConfig, None] = {}
        """configs whose binaries were asked for, oldest first"""
        self.failed: dict[Trial, str] = {}
        self.heard: dict[int, dict[Trial, float]] = {}
        """by M the log-ratios that another process measured; they say what to try, and count as no measurement"""
        self.chosen: dict[int, ConfigPair] = {}
        """by M what is served there, the baseline included"""

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

    def hear(self, M: int, trials: Mapping[Trial, float]) -> None:  # noqa: N803
        """Another process of this machine measured these. Their binaries exist, so they are as good as ordered here."""
        self.heard[M] = {**self.heard.get(M, {}), **trials}
        self.ordered |= dict.fromkeys(trial.config for trial in trials if trial.config in self.space)

    def winners(self) -> frozenset[KernelConfig]:
        """Configs that some M is served with."""
        return frozenset(c for pair in self.chosen.values() for c in (pair.up, pair.down))

    def untried_winners(self, M: int) -> frozenset[KernelConfig]:  # noqa: N803
        """Winners of the two nearest M that were not measured at this one."""
        near = [self.chosen[m] for m in self.nearest(M)[:2] if m in self.chosen]
        rows = self.measured.get(M, {})
        return frozenset(
            config
            for pair in near
            for gemm in GEMMS
            if (config := pair.of(gemm)) in self.ordered
            and (trial := Trial(gemm, config)) not in rows
            and trial not in self.failed
        )

    def nearest(self, M: int) -> list[int]:  # noqa: N803
        """Other M with a winner or measurements, the nearest first."""
        known = {m for m, rows in self.measured.items() if rows} | set(self.chosen) | set(self.heard)
        return sorted(known - {M}, key=lambda m: (octaves(m, M), m))

    def lags(self, M: int, within: int = 3) -> dict[KernelConfig, float]:  # noqa: N803
        """How far each config was behind the best of its GEMM at the nearest M that tried it, in log time.

        The better of its two GEMMs counts. Only the ``within`` nearest M are asked.
        """
        found: dict[KernelConfig, float] = {}
        for m in self.nearest(M)[:within]:
            rows = [(trial, row.centre) for trial, row in self.measured.get(m, {}).items() if row.logs]
            rows = rows or list(self.heard.get(m, {}).items())
            least = {gemm: min((c for t, c in rows if t.gemm == gemm), default=0.0) for gemm in GEMMS}
            here: dict[KernelConfig, float] = {}
            for (gemm, config), centre in rows:
                here[config] = min(centre - least[gemm], here.get(config, math.inf))
            found = here | found
        return found


def octaves(a: int, b: int) -> float:
    """Distance of two M."""
    return abs(math.log2(a / b))
