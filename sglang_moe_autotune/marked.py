"""A bench whose first launches are marked, so that a death in one of them can be told from any other end. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from sglang_moe_autotune.bench import Bench, Declined

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_moe_autotune.bench import BenchmarkProvider, Comparison, Readiness, Sample, Share
    from sglang_moe_autotune.routings import Sampling
    from sglang_moe_autotune.shapes import ConfigPair, Gemm, KernelConfig, MoeShape

_T = TypeVar("_T")


class Marking(Protocol):
    """Where the mark is made; see ``journal.Journal``."""

    def step(self, what: str) -> bool: ...
    def pause(self) -> None: ...
    def end(self) -> None: ...
    def fault(self) -> None: ...


class MarkedProvider:
    """Opens the benches of another provider, marked."""

    def __init__(self, provider: BenchmarkProvider, mark: Marking) -> None:
        self._provider, self.mark = provider, mark
        self._bench: Bench | None = None
        self.did = ""
        """what was asked of a bench last, for whoever says what a long pass did, and empties it"""

    @property
    def share(self) -> Share:
        return self._provider.share

    @share.setter
    def share(self, share: Share) -> None:
        self._provider.share = share

    @property
    def launch_us(self) -> float:
        """Of the longer one of the baseline's two launches in the bench that was opened last; 0 where it is unknown."""
        return self._bench.launch_us if self._bench is not None else 0.0

    def open(self, shape: MoeShape, M: int, baseline: ConfigPair) -> Bench | str:  # noqa: N803
        self.did = "opening a bench"
        bench = self._provider.open(shape, M, baseline)
        self._bench = None if isinstance(bench, str) else MarkedBench(bench, self, f"{shape.slug} M={M}")
        return bench if self._bench is None else self._bench


class MarkedBench:
    """See ``bench.Bench``. Marked are the set-up, adopting, and every fault; the bench itself marks its candidates.

    What cannot be marked yet is not done yet.
    """

    def __init__(self, bench: Bench, of: MarkedProvider, where: str) -> None:
        self._bench, self._of, self._mark, self._where = bench, of, of.mark, where

    def _fenced(self, step: Callable[[], _T]) -> _T:
        try:
            return step()
        except Declined:
            self._mark.end()
            raise
        except BaseException:
            self._mark.fault()
            raise

    def prepare(self) -> bool:
        self._of.did = "setting up a bench"
        if not self._mark.step(f"{self._where} set-up"):
            return False
        done = self._fenced(self._bench.prepare)
        if done:
            self._mark.end()
        else:
            self._mark.pause()
        return done

    def readiness(self, gemm: Gemm, config: KernelConfig) -> Readiness:
        self._of.did = "loading a binary"
        return self._bench.readiness(gemm, config)

    def reason(self, gemm: Gemm, config: KernelConfig) -> str:
        return self._bench.reason(gemm, config)

    def measure(self, gemm: Gemm, config: KernelConfig, count: int) -> list[Sample]:
        self._of.did = "measuring"
        return self._fenced(lambda: self._bench.measure(gemm, config, count))

    def compare(self, pair: ConfigPair, case: int) -> Comparison | None:
        self._of.did = "comparing"
        return self._fenced(lambda: self._bench.compare(pair, case))

    @property
    def sampling(self) -> Sampling:
        return self._bench.sampling

    @property
    def compare_cases(self) -> int:
        return self._bench.compare_cases

    def adopt(self, pair: ConfigPair) -> Readiness:
        self._of.did = "adopting a row"
        if not self._mark.step(f"{self._where} {pair} adopted"):
            return "waiting"
        state = self._fenced(lambda: self._bench.adopt(pair))
        self._mark.end()
        return state

    @property
    def launch_us(self) -> float:
        return self._bench.launch_us

    @property
    def gpu_s(self) -> float:
        return self._bench.gpu_s

    def wind_down(self) -> bool:
        self._of.did = "closing a bench"
        return self._bench.wind_down()

    def close(self) -> None:
        self._of.did = self._of.did or "closing a bench"
        self._bench.close()
