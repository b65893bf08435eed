"""The passes of tuning in one process: how long the next one may be, how long each was, and the pause they cause."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang_moe_autotune import pace

if TYPE_CHECKING:
    import collections

    from sglang_moe_autotune.marked import MarkedProvider
    from sglang_moe_autotune.status import State

logger = logging.getLogger("sglang.moe_autotune")

REST_S = 0.001
"""for which passes ask nothing after one that found nothing to do. What brings work (a batch, a message, the switch)
ends it; what other processes say waits that long."""
TOGETHER_S = 0.0007
"""Several ranks go through SGLang's loop in lockstep: each pass costs a broadcast, and lasts as long as the longest of
theirs. In deep idle one holds as many slices as begin within this time, where a lone one has its next pass sooner."""
RESTFUL: frozenset[State] = frozenset({"idle", "standing aside", "off"})
"""states of passes that found nothing to do"""


class Passes:
    """Told of every pass that worked; ``watch`` says when tuning must pause. Used by the serving thread alone."""

    def __init__(self, slice_us: float) -> None:
        self.watch = pace.Watch()
        self.marked: MarkedProvider | None = None
        """the benches that are open in this process; None: nothing is tuned"""
        self.lengths_s: collections.deque[float] | None = None
        """for whoever keeps a histogram, and empties it"""
        self._slice_us = slice_us
        self._window = 0

    def requested(self) -> None:
        """A request was served a moment ago: a new window begins with the next pass."""
        self._window = 0

    def begin(self, provider: Any) -> None:
        """The first slices of a window are small: a request often comes soon after another."""
        if self._window in {0, pace.SMALL_SLICES}:
            share = pace.SMALL_SHARE if self._window == 0 else 1.0
            provider.slice_us = share * self._slice_us

    def end(self, taken_s: float, now: float, *, launched: bool, watched: bool = True) -> None:
        """Note how long a pass kept the scheduler: what a request may have waited for.

        Not watched: a recording keeps no request waiting, and its passes are as long as the simulation takes.
        """
        self._window += launched
        if self.lengths_s is not None:
            self.lengths_s.append(taken_s)
        if not watched:
            return
        launch_us, did = 0.0, ""
        if self.marked is not None:
            launch_us, did, self.marked.did = self.marked.launch_us, self.marked.did, ""
        bound_us = pace.bound_us(launch_us, self._slice_us, launched=launched)
        if (pause := self.watch.observe(taken_s * 1e6, bound_us, now, did)) is not None and self.watch.pauses == 1:
            logger.warning("MoE autotune %s, the last one %s. Status shows later pauses.", pause.reason, pause.longest)
