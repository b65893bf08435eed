"""What this process says of itself to the shell, written by a thread of its own."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from sglang_moe_autotune import releases, status

if TYPE_CHECKING:
    from sglang_moe_autotune.serving import Serving

logger = logging.getLogger("sglang.moe_autotune")

_EVERY_S = 3.0


def start(serving: Serving) -> None:
    """Write the live file and the metrics every few seconds, off the serving thread, until the process ends."""
    threading.Thread(target=_loop, args=(serving,), name="moe-autotune-status", daemon=True).start()


def _loop(serving: Serving) -> None:
    told = False
    while True:
        try:
            if serving.root is not None:
                status.write(serving.root, describe(serving))
            if serving.metrics is not None:
                serving.metrics.update(serving)
        except RuntimeError:
            pass  # a dict that the serving thread changed while it was read here: the next turn succeeds
        except Exception:
            # What people see must not end with the first fault; nothing that serves depends on this thread.
            if not told:
                logger.exception("MoE autotune could not say how it is; it goes on and tries again.")
            told = True
        time.sleep(_EVERY_S)


def describe(serving: Serving) -> status.LiveStatus:
    """The present state. Reads only what the serving thread replaces whole, or what RuntimeError tells apart."""
    owner = status.this_process()
    device, tuner = serving.device, serving.tuner
    snapshot = tuner.snapshot() if tuner is not None else None
    compiler = getattr(device.provider, "compiler", None) if device is not None else None
    held = getattr(device.provider, "quarantine", None) if device is not None else None
    return status.LiveStatus(
        pid=owner.pid,
        boot_id=owner.boot_id,
        start_time=owner.start_time,
        host=owner.host,
        pid_namespace=owner.pid_namespace,
        unix_s=time.time(),
        since_unix_s=serving.since_unix_s,
        sglang=releases.version(),
        triton=device.environment.triton if device is not None else "",
        device_name=device.environment.device_name if device is not None else "",
        mode=serving.settings.mode,
        hooks=serving.hooks(),
        state=serving.state,
        reason=serving.reason,
        epoch=serving.lookup.epoch,
        queue=snapshot.queue if snapshot is not None else (),
        current=snapshot.current if snapshot is not None else None,
        rows=sum(len(rows) for rows in serving.lookup.rows().values()),
        slices=serving.slices,
        gpu_s=tuner.gpu_s if tuner is not None else 0.0,
        gpu_s_last_hour=serving.budget.last_hour_s,
        budget_s=serving.settings.budget_s,
        idle_s=serving.idle_s,
        compile=status.CompileCounts(**compiler.counts) if compiler is not None else status.CompileCounts(),
        serving_compiles_for_tuning=serving.compiles.for_tuning,
        quarantine={str(one.candidate): one.reason for one in held.held} if held is not None else {},
        deferred={f"{slug} {M}": reason for (slug, M), reason in snapshot.deferred.items()} if snapshot else {},
        graphs=serving.recapture.snapshot(),
    )
