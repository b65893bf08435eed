"""One config under two names in the idle slices of a live server, for ``gpu_search.py``.

As a SGLang plugin it waits for ``order.json`` in the folder that ``TWIN_PROBE`` names. From then on the idle passes of
the scheduler are its own, one bench call a pass, and ``twins.json`` there tells how far it is. Tuning ends with it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twins import Twins

    from sglang_moe_autotune.shapes import ConfigPair, MoeShape

TELL_EVERY_S = 2.0
LOOK_EVERY_S = 0.5
PAUSE_SHARE, PAUSE_S = 0.01, 0.3
"""passes after which the GPU has nothing to do for up to so long: it lets its clocks fall"""


class Probe:
    """What one scheduler process does of it. Nothing is raised: it runs in SGLang's own loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rng = random.Random(0)  # noqa: S311 - pauses, not secrets
        self._twins: Twins | None = None
        self._steps: Iterator[object] | None = None
        self._ended = False
        self._looked_s = self._told_s = self._begun_s = 0.0

    def step(self) -> bool:
        """One pass; True where it was used."""
        if self._ended:
            return False
        try:
            return self._step()
        except Exception:  # noqa: BLE001 - the server must live, and the script must hear of it
            self._tell(error=traceback.format_exc())
            self._ended = True
            return False

    def _step(self) -> bool:
        now_s = time.monotonic()
        if self._steps is None:
            if now_s - self._looked_s < LOOK_EVERY_S:
                return False
            self._looked_s = now_s
            order = self._folder / "order.json"
            if not order.exists():
                return False
            self._twins = twins_here(**json.loads(order.read_text()))
            self._steps, self._begun_s = self._twins.steps(), now_s
        if next(self._steps, None) is None:
            self._ended = True
        if self._ended or now_s - self._told_s > TELL_EVERY_S:
            self._told_s = now_s
            self._tell()
        if self._rng.random() < PAUSE_SHARE:
            time.sleep(self._rng.random() * PAUSE_S)
        return True

    def _tell(self, **more: Any) -> None:
        told = self._twins.told if self._twins is not None else {}
        told |= {"ended": self._ended, "seconds": round(time.monotonic() - self._begun_s, 1), **more}
        part = self._folder / "twins.part"
        part.write_text(json.dumps(told))
        part.replace(self._folder / "twins.json")


def twins_here(ms: list[int], decisions: int) -> Twins:
    """On the live layers of this process, whose tuning ends here."""
    from twins import Twins  # noqa: PLC0415 - in schedulers only

    from sglang_moe_autotune import plugin, releases  # noqa: PLC0415 - as above
    from sglang_moe_autotune.bench import Bench, Declined  # noqa: PLC0415 - as above
    from sglang_moe_autotune.lookup import read_answer  # noqa: PLC0415 - as above

    state = plugin.serving()
    state.stop("one config under two names has the idle slices")
    if state.device is None:
        raise RuntimeError("the plugin has found no layer to tune in this server")
    provider: Any = state.device.provider
    provider.slice_us = state.settings.slice_us

    def opened(shape: MoeShape, m: int) -> tuple[ConfigPair, Bench]:
        baseline = read_answer(releases.ask_stock(shape, m))
        bench = "SGLang's own answer is no pair of plain configs" if baseline is None else None
        bench = bench or provider.open(shape, m, baseline)
        if baseline is None or isinstance(bench, str):
            raise Declined(str(bench))
        return baseline, bench

    found = {state.overlay.shape_of(key) for key in state.overlay.layers.keys}
    shapes = sorted((s for s in found if s is not None), key=lambda s: s.slug)
    places = [(f"{s.slug} M={m}", lambda s=s, m=m: opened(s, m)) for m in ms for s in shapes]
    return Twins(places, decisions)


def register() -> None:
    """The entry point; only scheduler processes have idle passes."""
    if multiprocessing.parent_process() is None or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - in schedulers only

    from sglang_moe_autotune.targets import IDLE  # noqa: PLC0415 - as above

    probe = Probe(Path(os.environ["TWIN_PROBE"]))

    def on_idle(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return None if probe.step() else original(*args, **kwargs)

    HookRegistry.register(IDLE.path, on_idle, HookType.AROUND)
