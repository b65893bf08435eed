"""A server's ranks in one process and in virtual time: the real tuner, checks, leases, board and store, a recorded
device for each. Whichever rank is behind in its time goes on; each has a compile process of its own."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from record_values import H200
from synthetic import landscape as synthetic

from sglang_moe_autotune.agenda import Agenda
from sglang_moe_autotune.council import Place
from sglang_moe_autotune.lookup import Lookup
from sglang_moe_autotune.peers import Peers
from sglang_moe_autotune.prior import Prior
from sglang_moe_autotune.ranks import POLL_S, Ranks
from sglang_moe_autotune.replay import ReplayProvider
from sglang_moe_autotune.settings import Settings
from sglang_moe_autotune.store import Store
from sglang_moe_autotune.tuner import Tuner, TunerOptions
from sglang_moe_autotune.votes import Votes

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from sglang_moe_autotune.bench import Readiness
    from sglang_moe_autotune.landscape import Landscape
    from sglang_moe_autotune.records import Record
    from sglang_moe_autotune.shapes import Gemm, KernelConfig

MS = tuple(range(1, 9)) + tuple(range(16, 129, 8)) + (160, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)


class CachedProvider(ReplayProvider):
    """Binaries lie in one cache on disk: what another rank has compiled is ready here too."""

    cache: dict[KernelConfig, float]

    def readiness(self, M: int, gemm: Gemm, config: KernelConfig) -> Readiness:  # noqa: N803
        if self.cache.get(config, math.inf) <= self.now_s:
            return "failed" if self.landscape.latency_us(M, gemm, config) is None else "ready"
        state = super().readiness(M, gemm, config)
        if (ready_s := self._ready_at_s.get(config)) is not None:
            self.cache[config] = min(ready_s, self.cache.get(config, math.inf))
        return state


class SharedRank:
    """One rank, as ``Serving`` wires it."""

    def __init__(
        self,
        folder: Path,
        place: Place,
        recorded: Landscape,
        compile_s: float,
        cache: dict[KernelConfig, float],
        noise: float = 2.0,
        **settings: Any,
    ) -> None:
        self.recorded = recorded
        self.provider = CachedProvider(
            recorded, seed=7 + place.rank, noise_percent=noise, compile_s=compile_s, polls=1
        )
        self.provider.cache = cache
        self.store = Store.open(folder, H200)
        self.lookup = Lookup()
        self.agenda = Agenda()
        self.tuner = Tuner(
            self.provider,
            self.learned,
            Prior(),
            TunerOptions(source="learned"),
            space=lambda _: recorded.candidates,
            clock=self.provider.clock,
            agenda=self.agenda,
            tried=self.tried,
        )
        overlay = SimpleNamespace(
            lookup=self.lookup,
            shape_of=lambda _: recorded.shape,
            may_serve=lambda _: True,
            stands=lambda _: True,
            source="learned",
        )
        self.adopted: list[Any] = []
        self.votes = Votes()
        self.peers = Peers(
            *(place, Settings(**settings), self.store, self.provider, overlay, self.tuner, self.agenda, self.votes),
            lambda *row: self.adopted.append(row),
            clock=self.provider.clock,
        )
        self.turned_s = -1.0
        self.idle = 0

    def learned(self, record: Record) -> None:
        if self.peers.learned(record):
            return
        self.store.submit(record=record)
        if record.verdict == "faster":
            self.lookup.publish([(key_of(record), record.M, record.pair)])

    def tried(self, shape: Any, M: int, trials: Any) -> None:  # noqa: N803
        self.peers.tried(shape, M, trials)

    def add(self, ms: tuple[int, ...]) -> None:
        for M in ms:  # noqa: N806
            self.tuner.add(self.recorded.shape, M, self.recorded.baselines[M].pair)

    def step(self) -> str:
        """One idle pass, and a turn of the thread where one is due or asked for."""
        ranks, now_s = self.peers.ranks, self.provider.now_s
        if now_s - self.turned_s > POLL_S or ranks._event.is_set():
            ranks._event.clear()
            self.turned_s = now_s
            ranks.turn()
        result = self.peers.step(self.provider.now_s, deep_idle=True)
        self.provider.wait(5e-6 if result == "worked" else 0.005)
        self.idle = self.idle + 1 if result == "nothing" else 0
        return result

    @property
    def rows(self) -> dict[int, Any]:
        return {M: pair for table in self.lookup.rows().values() for M, pair in table.items()}


def key_of(record: Record) -> Any:
    from sglang_moe_autotune.layers import call_key  # noqa: PLC0415 - imports torch

    return call_key(record.shape)


def server(
    monkeypatch: pytest.MonkeyPatch, folder: Path, ranks: int, recorded: Landscape, *, compile_s: float = 1.0
) -> list[SharedRank]:
    """The ranks of a server; their threads are the test's to turn."""
    monkeypatch.setattr(Ranks, "start", lambda _: None)
    cache: dict[KernelConfig, float] = {}
    return [SharedRank(folder, Place(rank, ranks, 1), recorded, compile_s, cache) for rank in range(ranks)]


def tune(group: list[SharedRank], most_s: float = 3600.0) -> float:
    """Until all have been idle for a while of virtual time; the latest time at which one of them worked."""
    last_s = 0.0
    for rank in group:
        rank.idle = 0
    while True:
        rank = min(group, key=lambda rank: rank.provider.now_s)
        before_s = rank.provider.now_s
        if rank.step() == "worked":
            last_s = max(last_s, rank.provider.now_s)
        assert before_s < most_s, [r.peers.ranks.waits for r in group]
        if all(r.idle > 400 for r in group):
            return last_s


def recorded(ms: tuple[int, ...] = MS, seed: int = 3) -> Landscape:
    return synthetic(ms=ms, seed=seed)
