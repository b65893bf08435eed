"""What SGLang's ``/server_info`` shows of this process, under the key ``moe_autotune``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from sglang_moe_autotune import __version__
from sglang_moe_autotune.breath import no_breath
from sglang_moe_autotune.tally import tally

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_moe_autotune.serving import Serving

KEY: Final = "moe_autotune"


def add(result: Any, serving: Serving) -> None:
    """Put our part into what ``Scheduler.get_internal_state`` returned. Raises what a moved attribute raises."""
    result.internal_state[KEY] = describe(serving)


def describe(serving: Serving, breathe: Callable[[], None] = no_breath) -> dict[str, Any]:
    """Numbers, strings, lists and dicts only: the answer travels as msgpack from SGLang 0.5.16 on.

    Seconds and counts are since the start, gains are fractions, ``current`` is [shape, M]. Costs about 0.3 ms for a
    model with 60 M, on the thread that serves; no file is read. breathe: for another thread.
    """
    tuner, store, device = serving.tuner, serving.store, serving.device
    breathe()
    snapshot = tuner.snapshot() if tuner is not None else None
    breathe()
    shapes = tally(serving.overlay.shapes, store.contents.records if store is not None else {}, snapshot, breathe)
    breathe()
    compiler = getattr(device.provider, "compiler", None) if device is not None else None
    return {
        "version": __version__,
        "mode": serving.settings.mode,
        "state": serving.state,
        "reason": serving.reason,
        "switch": serving.switch.level,
        "epoch": serving.lookup.epoch if serving.peers is None else serving.peers.epoch,
        "ranks": list(serving.peers.ranks.waits) if serving.peers is not None else [],
        "rows": sum(len(rows) for rows in serving.lookup.rows().values()),
        "queue": len(snapshot.queue) if snapshot is not None else 0,
        "current": list(snapshot.current) if snapshot is not None and snapshot.current is not None else None,
        "phase": snapshot.phase if snapshot is not None else None,
        "deferred": len(snapshot.deferred) if snapshot is not None else 0,
        "slices": serving.slices,
        "gpu_s": tuner.gpu_s if tuner is not None else 0.0,
        "gpu_s_last_hour": serving.budget.last_hour_s,
        "budget_s": serving.settings.budget_s,
        "idle_s": serving.idle_time.total_s,
        "compile": dict(compiler.counts) if compiler is not None else {},
        "compiles_for_tuning": serving.compiles.for_tuning,
        "store": {"path": str(store.path), "state": store.state} if store is not None else None,
        "graphs": msgspec.json.decode(msgspec.json.encode(serving.recapture.snapshot())),
        "doubts": dict(serving.doubts.told),
        "step_changes": dict(serving.steps.counts),
        "shapes": {slug: msgspec.to_builtins(found) for slug, found in shapes.items()},
    }
