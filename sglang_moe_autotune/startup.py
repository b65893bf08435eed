"""The window before the first graph capture: the same tuner, with a budget of time, for graphs that hold its rows."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

from sglang_moe_autotune import releases
from sglang_moe_autotune.device import before_serving
from sglang_moe_autotune.marked import MarkedProvider

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_moe_autotune.serving import Serving
    from sglang_moe_autotune.tuner import Tuner

logger = logging.getLogger("sglang.moe_autotune")

_SAY_EVERY_S: Final = 15.0
_WAIT_S: Final = 0.005
_MAX_FAULTS: Final = 3


def tune(serving: Serving, model_runner: Any) -> None:
    """Spend at most ``startup_s`` on the M that are about to be captured; the server waits for it.

    Nothing was served yet, so no M is hotter than another: the small ones of decoding and the large ones of prefilling
    come first in turn. Raises what a bench raises several times in a row.
    """
    if serving.device is None or serving.tuner is None or serving.switch.why:
        return
    if never := releases.why_never(model_runner.server_args):
        logger.info("MoE autotune tunes nothing before the capture: %s.", never)
        return
    if releases.ranks(model_runner.server_args) > 1:
        logger.info("MoE autotune tunes nothing before the capture: several ranks agree on rows while they serve.")
        return
    sizes = releases.sizes_to_capture(model_runner)
    provider = before_serving(serving.device, serving.compiles)
    tuner = serving.new_tuner(provider if serving.mark is None else MarkedProvider(provider, serving.mark))
    queued = _queue(serving, tuner, in_turn(sizes.get("decode", ()), sizes.get("prefill", ())))
    if not queued:
        return
    begun_s = time.monotonic()
    logger.info("MoE autotune has %g s for %d M before the graphs are captured.", serving.settings.startup_s, queued)
    try:
        _run(serving, tuner, begun_s, queued)
    finally:
        tuner.abandon()
        if serving.store is not None:
            made = serving.store.contents.records.values()
            for record in (r for r in made if r.source == serving.device.source):
                serving.tuner.learn(record)
    done = tuner.snapshot()
    logger.info(
        "MoE autotune decided %d of %d M in %.0f s before the graphs are captured: %d faster, %d kept.",
        *(done.faster + done.baseline, queued, time.monotonic() - begun_s, done.faster, done.baseline),
    )


def in_turn(decode: Sequence[int], prefill: Sequence[int]) -> list[int]:
    """Each M once: the smallest of decoding, the largest of prefilling, the next smallest, and so on."""
    small, large = sorted(set(decode)), sorted(set(prefill) - set(decode), reverse=True)
    both = [m for pair in zip(small, large, strict=False) for m in pair]
    return both + small[len(large) :] + large[len(small) :]


def _queue(serving: Serving, tuner: Tuner, ms: Sequence[int]) -> int:
    found = {serving.overlay.shape_of(key) for key in serving.overlay.layers.keys}
    for shape in sorted((s for s in found if s is not None), key=lambda s: s.slug):
        if serving.overlay.tunable(shape):
            for m in ms:
                baseline, _ = serving.overlay.stock(shape, m)
                if m <= serving.settings.max_m and baseline is not None:
                    tuner.add(shape, m, baseline)
    return len(tuner.snapshot().queue)


def _run(serving: Serving, tuner: Tuner, begun_s: float, queued: int) -> None:
    until_s, say_s, faults = begun_s + serving.settings.startup_s, begun_s + _SAY_EVERY_S, 0
    while (now := time.monotonic()) < until_s:
        if now >= say_s:
            say_s += _SAY_EVERY_S
            left = len(tuner.snapshot().queue)
            logger.info("MoE autotune before the capture: %.0f s, %d of %d M.", now - begun_s, queued - left, queued)
        try:
            with serving.compiles:
                result = tuner.step(deep_idle=True)
        except Exception:
            faults += 1
            if faults >= _MAX_FAULTS:
                raise
            logger.exception("MoE autotune put an M off because of a fault in tuning it before the capture.")
            continue
        if result == "waiting":
            time.sleep(_WAIT_S)
        elif result == "nothing" and not any(d.retry_at_s <= until_s for d in tuner.deferred.values()):
            return
        elif result == "nothing":
            time.sleep(_WAIT_S)
