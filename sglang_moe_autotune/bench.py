"""The seam to the device: what the tuner asks of a bench, and of whoever opens benches. Pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from sglang_moe_autotune.routings import Sampling
    from sglang_moe_autotune.shapes import ConfigPair, Gemm, KernelConfig, MoeShape

COMPARE_CASES: Final = 5
COMPARE_RUNS: Final = 270
"""of each GEMM of a pair, over all cases: a kernel that is wrong in one run of twenty gets through with a probability
of 0.95 ** 270 = 1e-6, so that of 10,000 such kernels none does in 99 of 100 times"""

DIRTY: Final = "its measurements stayed dirty: this process gets too little CPU, or something else keeps the GPU busy"

_LEAST_RUNS: Final = 2

Readiness = Literal["ready", "waiting", "failed"]
"""Of a candidate's binary: launchable now; being compiled; not launchable (``Bench.reason`` says why)."""


class Sample(NamedTuple):
    """One interleaved measurement, device time of one launch each."""

    candidate_us: float
    baseline_us: float


class Share(NamedTuple):
    """The part of each comparison that falls to one process: a server's ranks make its runs together, each with inputs
    of its own in every case."""

    rank: int = 0
    ranks: int = 1

    @property
    def runs(self) -> int:
        """Of each GEMM in each case: all ranks together make at least ``COMPARE_RUNS``, and each one enough to see its
        output change."""
        return max(_LEAST_RUNS, math.ceil(COMPARE_RUNS / (COMPARE_CASES * self.ranks)))


ALONE: Final = Share()


class Comparison(NamedTuple):
    """The candidate's output against the baseline's on the same inputs."""

    ok: bool
    error: float
    """largest |out - ref| / (|ref| + rms of its row); infinite where an element is not a number or was not written,
    zero only where every bit is the same"""
    tolerance: float
    why: str = ""
    """what is wrong where it is not the error"""
    runs: int = 0
    """of each GEMM that stand behind it"""

    @property
    def reason(self) -> str:
        """Why it is not ok."""
        return self.why or f"its output differs by {self.error:.3g}, and {self.tolerance:.3g} is allowed"


class Declined(Exception):  # noqa: N818 - an answer, not a fault
    """Raised by a bench method: this M cannot be tuned now, for the reason given; the job is deferred."""


class Bench(Protocol):
    """Measures one (shape, M) against its baseline. Each method but ``close`` costs at most one slice."""

    def prepare(self) -> bool:
        """Do one step of the set-up (buffers, routings, the baseline's binaries); True when done."""

    def readiness(self, gemm: Gemm, config: KernelConfig) -> Readiness:
        """Ask for the binary of this exact launch; one of the first calls orders it, and none waits for a compile.
        Those that find it made load it step by step, or find that it cannot be loaded."""

    def reason(self, gemm: Gemm, config: KernelConfig) -> str:
        """Why the readiness is ``failed``, for the log and the record."""

    def measure(self, gemm: Gemm, config: KernelConfig, count: int) -> list[Sample]:
        """Up to ``count`` paired samples, as many as fit the slice; empty when this slice only warmed up, was dirty,
        or did not complete a sample. The config must be ready."""

    @property
    def sampling(self) -> Sampling:
        """How samples are put together; see ``routings``."""

    def compare(self, pair: ConfigPair, case: int) -> Comparison | None:
        """One step of comparing the outputs in routing case 0, 1, ... ``compare_cases`` - 1, of each GEMM whose
        config is not the baseline's; None while this case needs more slices."""

    @property
    def compare_cases(self) -> int: ...

    def adopt(self, pair: ConfigPair) -> Readiness:
        """Launch the pair once through the very call that serves, a GEMM at a call, so that serving finds it loaded;
        ``failed`` if that would have compiled anything."""

    @property
    def launch_us(self) -> float:
        """Device time of the longer of the baseline's two launches, known after ``prepare``: launches longer
        than a slice wait for deep idle."""

    @property
    def gpu_s(self) -> float:
        """Device seconds spent in this bench so far, every launch counted."""

    def wind_down(self) -> bool:
        """One step of giving back what takes time to give back; True when ``close`` is quick. Nothing else follows."""

    def close(self) -> None:
        """Give back everything at once."""


class BenchmarkProvider(Protocol):
    """The seam to the device. ``benchmark`` is the real one, ``replay`` plays back a recording."""

    share: Share
    """of the comparisons of benches that are opened from now on"""

    def open(self, shape: MoeShape, M: int, baseline: ConfigPair) -> Bench | str:  # noqa: N803
        """A bench, or the reason why this M cannot be tuned now (no memory, no live layer, ...)."""
