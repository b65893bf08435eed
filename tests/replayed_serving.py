"""As much of a ``Serving`` as its descriptions read, with the real tuner, store and lookup on a made-up device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from record_values import H200
from synthetic import bf16_shape, landscape

from sglang_moe_autotune.budget import Budget
from sglang_moe_autotune.council import Place
from sglang_moe_autotune.lookup import Lookup
from sglang_moe_autotune.prior import Prior
from sglang_moe_autotune.recapture import Recapture
from sglang_moe_autotune.replay import ReplayProvider
from sglang_moe_autotune.settings import Settings
from sglang_moe_autotune.store import Store
from sglang_moe_autotune.switch import Switch
from sglang_moe_autotune.tuner import Tuner, TunerOptions

SMALL = bf16_shape(E=8, N=256, K=512, top_k=2)


def replayed_serving(ms: tuple[int, ...] = (8, 64, 512), deferred: int | None = 7) -> Any:
    """A serving process before its first slice; ``deferred`` is an M that the device has no recording of."""
    recorded = landscape(SMALL, ms)
    provider = ReplayProvider(recorded, polls=1)
    store = Store.open(None, H200)
    tuner = Tuner(
        provider,
        lambda record: store.submit(record=record),
        Prior(),
        TunerOptions(source="replayed"),
        space=lambda _: recorded.candidates,
        clock=provider.clock,
    )
    for M in ms:  # noqa: N806
        tuner.add(SMALL, M, recorded.baselines[M].pair)
    if deferred is not None:
        tuner.add(SMALL, deferred, recorded.baselines[ms[0]].pair)
    lookup = Lookup()
    return SimpleNamespace(
        settings=Settings(),
        state="idle",
        reason="",
        switch=Switch(),
        lookup=lookup,
        recapture=Recapture(Settings(), lookup, lambda: [SMALL]),
        store=store,
        tuner=tuner,
        device=SimpleNamespace(provider=provider),
        budget=Budget(600.0),
        slices=0,
        idle_time=SimpleNamespace(total_s=1.5),
        compiles=SimpleNamespace(for_tuning=0),
        overlay=SimpleNamespace(shapes=(SMALL,)),
        doubts=SimpleNamespace(told={"made-up 8": "taken back"}),
        steps=SimpleNamespace(counts={"worse": 1, "harmless": 3}),
        peers=None,
        place=Place(),
    )


def tune(serving: Any, steps: int = 100_000) -> None:
    """Step until nothing is left, or so many times."""
    for _ in range(steps):
        before_s = serving.tuner.gpu_s
        if serving.tuner.step(deep_idle=True) == "nothing":
            break
        serving.slices += serving.tuner.gpu_s > before_s
    serving.state = "idle" if serving.tuner.snapshot().current is None else "tuning"
