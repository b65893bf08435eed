"""The intake of one process: misses and served sizes on their way into the tuner, the notes and the graphs' heat."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang_moe_autotune.shape_notes import ShapeNotes

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_moe_autotune.heat import Heat
    from sglang_moe_autotune.lookup import Missed
    from sglang_moe_autotune.overlay import Overlay
    from sglang_moe_autotune.recapture import Recapture
    from sglang_moe_autotune.records import Origin, ShapeNote
    from sglang_moe_autotune.tuner import Tuner

logger = logging.getLogger("sglang.moe_autotune")

_NEWS_AT_ONCE = 8
_MAX_ADDED = 1024
"""M that are tuned in one process: a server with many eager sizes meets new ones for months"""
_ORIGIN_WORDS: dict[Origin, str] = {
    "miss": "no config file",
    "fallback": "a file of another Triton",
    "exact": "its own file",
}


class Intake:
    """``step`` takes in what has come since the last idle pass; a little at a time."""

    def __init__(
        self, overlay: Overlay, heat: Heat, recapture: Recapture, max_m: int, submit: Callable[[ShapeNote], object]
    ) -> None:
        """submit: told of notes for the store."""
        self.captured: Any = {}
        """tokens of the captured graphs, by kind of batch"""
        self.notes = ShapeNotes(submit, overlay.stock)
        self._overlay, self._heat, self._recapture, self._max_m = overlay, heat, recapture, max_m
        self._added = 0

    def step(self, tuner: Tuner, now: float) -> bool:
        """Misses and heat into the tuner, notes into the store; True if that cost what a slice may cost."""
        if self._overlay.lookup.seen:
            for miss in self._overlay.lookup.take_seen(_NEWS_AT_ONCE):
                self.add(tuner, miss)
        if served := self._heat.take(self.captured):
            self.notes.count(served)
            self._recapture.served(served)
            for shape in self._overlay.shapes:
                for M, count in served.items():  # noqa: N806
                    tuner.heat(shape, M, count)
        return self.notes.step(now)

    def add(self, tuner: Tuner, miss: Missed) -> None:
        """Queue its M, where the shape is one that is tuned."""
        if (shape := self._overlay.shape_of(miss.key)) is None:
            return
        if shape not in self.notes:
            words = _ORIGIN_WORDS[self._overlay.origin(shape)]
            logger.info("MoE autotune recorded %s: SGLang has %s for it.", shape.slug, words)
            self.notes.begin(shape, self._overlay.origin(shape))
        small = self._max_m >= miss.M and self._added < _MAX_ADDED
        if miss.baseline is not None and small and self._overlay.tunable(shape):
            self._added += 1
            tuner.add(shape, miss.M, miss.baseline)
