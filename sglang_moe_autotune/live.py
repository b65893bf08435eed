"""What this process says of itself to the shell, written by a thread of its own."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from typing import TYPE_CHECKING

from sglang_moe_autotune import __version__, releases, status, switch
from sglang_moe_autotune.breath import Breath, no_breath

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sglang_moe_autotune.serving import Serving

logger = logging.getLogger("sglang.moe_autotune")

_EVERY_S = 3.0
_DEATHS_EVERY = 20
_SWEEP_EVERY = 1200
_ENDED_KEPT_S = 86400.0
_TORN_IN_A_ROW = 5


def start(serving: Serving) -> None:
    """Write the live file and the metrics every few seconds, off the serving thread, until the process ends."""
    threading.Thread(target=_loop, args=(serving,), name="moe-autotune-status", daemon=True).start()


def log_start(serving: Serving) -> None:
    """One line of a start: what is hooked, found and stored."""
    missing = [path for path, there in serving.hooks().items() if not there]
    if missing:
        logger.warning(
            "MoE autotune %s: NOT hooked: %s. SGLang's loader says why above; see `sglang-moe-autotune doctor`.",
            *(__version__, ", ".join(missing)),
        )
        return
    shapes, rows = len(serving.overlay.layers.keys), sum(len(rows) for rows in serving.lookup.rows().values())
    logger.info(
        "MoE autotune %s: hooks in place; shapes on the Triton path: %d; learned rows: %d; mode %s; store %s.",
        *(__version__, shapes, rows, serving.settings.mode),
        serving.store.path if serving.store is not None else "not opened",
    )


def _loop(serving: Serving) -> None:
    teller, turns, breathe = Teller(), 0, Breath()
    while True:
        teller.turn(functools.partial(_turn, serving, turns, breathe))
        turns += 1
        time.sleep(_EVERY_S)


class Teller:
    """Makes turns that may fail: what people see must not end with a fault, and a fault must be seen, once."""

    def __init__(self) -> None:
        self._told, self._torn = False, 0

    def turn(self, turn: Callable[[], None]) -> None:
        """Make one. A dict that the serving thread changes while it is read here is a RuntimeError, and the next turn
        succeeds; several of them in a row are something else."""
        try:
            turn()
        except Exception as error:
            self._torn += 1
            if not self._told and not (isinstance(error, RuntimeError) and self._torn < _TORN_IN_A_ROW):
                logger.exception("MoE autotune could not say how it is; it goes on and tries again.")
                self._told = True
        else:
            self._torn = 0


def _turn(serving: Serving, number: int, breathe: Callable[[], None] = no_breath) -> None:
    if number % _DEATHS_EVERY == 0:
        look_for_deaths(serving)
        breathe()
    follow(serving)
    if serving.root is not None and serving.settings.mode != "read-only":  # whose folder may be an image's
        if number % _SWEEP_EVERY == 0:
            sweep(serving.root, breathe)
        live = describe(serving, breathe)
        breathe()
        status.write(serving.root, live)
        breathe()
    if serving.device is not None and serving.device.binaries is not None:
        serving.device.binaries.keep(breathe)
    if serving.metrics is not None:
        serving.metrics.update(serving)


def sweep(root: Path, breathe: Callable[[], None] = no_breath) -> None:
    """Remove the live files of processes that ended more than a day ago. Never raises OSError.

    SGLang ends its schedulers by SIGKILL, so no process removes its own, and each command of the shell reads all.
    """
    with contextlib.suppress(OSError):
        old_s = time.time() - _ENDED_KEPT_S
        for server in status.read(root, breathe=breathe).servers:
            if server.presence == "gone" and server.live.unix_s < old_s:
                server.path.unlink(missing_ok=True)
        for path in (root / status.FOLDER).glob(".*.tmp"):
            breathe()
            if path.stat(follow_symlinks=False).st_mtime < old_s:
                path.unlink(missing_ok=True)


def follow(serving: Serving) -> None:
    """Do what the switch in the store's folder says now; a change is logged."""
    level = switch.read(serving.root)
    if level != serving.switch.of_file:
        serving.switch.of_file = level
        serving.switched()
        logger.info("MoE autotune: the store's switch says %s; it is %s now.", level, serving.switch.level)


def look_for_deaths(serving: Serving) -> None:
    """Other processes on this environment may have died since the start, and deaths may have been forgotten."""
    if serving.mark is not None:
        serving.died = serving.look_for_deaths()


def _needed(serving: Serving, slugs: list[str]) -> dict[str, float]:
    """Idle seconds that the searches of each queued shape take, by those that ended so far."""
    found = {slug: serving.idle_time.expected_s(slugs.count(slug)) for slug in dict.fromkeys(slugs)}
    return {slug: seconds for slug, seconds in found.items() if seconds is not None}


def describe(serving: Serving, breathe: Callable[[], None] = no_breath) -> status.LiveStatus:
    """The present state. Reads only what the serving thread replaces whole, or what RuntimeError tells apart."""
    owner = status.this_process()
    device, tuner, peers = serving.device, serving.tuner, serving.peers
    breathe()
    snapshot = tuner.snapshot() if tuner is not None else None
    compiler = getattr(device.provider, "compiler", None) if device is not None else None
    held = getattr(device.provider, "quarantine", None) if device is not None else None
    breathe()
    needed = _needed(serving, [slug for slug, _ in snapshot.queue] if snapshot is not None else [])
    quarantine = {}
    for one in held.held if held is not None else ():
        breathe()
        quarantine[str(one.candidate)] = one.reason
    breathe()
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
        switch=serving.switch.level,
        switched_by=serving.switch.by,
        reason=serving.reason,
        epoch=serving.lookup.epoch if peers is None else peers.epoch,
        rank=serving.place.rank,
        ranks=serving.place.ranks,
        waits=() if peers is None else peers.ranks.waits,
        queue=snapshot.queue if snapshot is not None else (),
        current=snapshot.current if snapshot is not None else None,
        fitted=serving.lookup.fitted,
        rows=sum(len(rows) for rows in serving.lookup.rows().values()),
        slices=serving.slices,
        gpu_s=tuner.gpu_s if tuner is not None else 0.0,
        gpu_s_last_hour=serving.budget.last_hour_s,
        budget_s=serving.settings.budget_s,
        idle_s=serving.idle_time.total_s,
        deep_idle_s=serving.idle_time.deep_s,
        idle_windows=serving.idle_time.windows,
        searches=serving.idle_time.settled,
        idle_needed_s=needed,
        pass_p99_us=serving.watch.quantile_us(0.99),
        pass_longest_us=serving.watch.longest_us,
        pass_longest_did=serving.watch.longest_did,
        passes_over=serving.watch.broken,
        pauses=serving.watch.pauses,
        compile=status.CompileCounts(**compiler.counts) if compiler is not None else status.CompileCounts(),
        serving_compiles_for_tuning=serving.compiles.for_tuning,
        quarantine=quarantine,
        deferred={f"{slug} {M}": reason for (slug, M), reason in snapshot.deferred.items()} if snapshot else {},
        graphs=serving.recapture.snapshot(),
        doubts=serving.doubts.told,
        step_changes={str(outcome): count for outcome, count in serving.steps.counts.items()},
    )
