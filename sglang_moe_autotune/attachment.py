"""What a process joins at its first idle pass, when its scheduler is there: ranks, graphs, sockets, metrics."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang_moe_autotune import absence, metrics, releases
from sglang_moe_autotune.council import Place
from sglang_moe_autotune.doorbell import Doorbell
from sglang_moe_autotune.peers import Peers

if TYPE_CHECKING:
    from sglang_moe_autotune.serving import Serving

logger = logging.getLogger("sglang.moe_autotune")


def attach(serving: Serving, scheduler: Any) -> None:
    """Once, on the serving thread."""
    serving.place = Place(*releases.place(scheduler), releases.setting(scheduler.server_args, "port") or 0)
    serving.never = serving.never or releases.why_never(scheduler.server_args)
    if serving.never:
        serving.state, serving.reason = "off", serving.never
        logger.info("MoE autotune tunes nothing in this server: %s.", serving.never)
    else:
        _join(serving)
    serving.doorbell = Doorbell(scheduler)
    serving.intake.captured = releases.captured_sizes(scheduler)
    serving.recapture.attach(scheduler, serving.doorbell, wanted=serving.store is not None)
    serving.metrics = metrics.of(scheduler)
    serving.passes.lengths_s = serving.metrics.slices_s if serving.metrics is not None else None


def _join(serving: Serving) -> None:
    """Take part in what the processes of this server and of this folder share."""
    store, harvest, place = serving.store, serving.harvest, serving.place
    if store is None or harvest is None:
        return
    tuner, marked = serving.tuner, serving.passes.marked
    if tuner is not None and marked is not None:
        ours = serving.settings, store, marked, serving.overlay, tuner, serving.agenda, serving.votes
        serving.peers = harvest.peers = Peers(place, *ours, serving.recapture.adopted)
        serving.doubts.join(store, marked, tuner, serving.let_go, place.ranks == 1, serving.settings.slice_us)
        serving.steps.on = serving.settings.mode != "restart"
    elif serving.died and place.ranks > 1:
        absence.tell(store, place, serving.reason)
