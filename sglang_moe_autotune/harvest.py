"""The harvest of one process: what its searches found is kept, and served or put to the other ranks."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang_moe_autotune.layers import call_key
from sglang_moe_autotune.records import succeeding
from sglang_moe_autotune.trials import TrialLog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from sglang_moe_autotune.lookup import Lookup
    from sglang_moe_autotune.peers import Peers
    from sglang_moe_autotune.recapture import Recapture
    from sglang_moe_autotune.records import Record
    from sglang_moe_autotune.settings import Mode
    from sglang_moe_autotune.shapes import MoeShape
    from sglang_moe_autotune.store import Store
    from sglang_moe_autotune.tried import Tried

logger = logging.getLogger("sglang.moe_autotune")


class Harvest:
    """``learned`` and ``tried`` are what a tuner of this process tells."""

    def __init__(
        self,
        store: Store,
        root: Path | None,
        mode: Mode,
        lookup: Lookup,
        recapture: Recapture,
        *,
        stands: Callable[[Record], bool] = lambda _: True,
    ) -> None:
        """stands: does a stored row count as searched?"""
        self.peers: Peers | None = None
        self._store, self._mode, self._lookup, self._recapture = store, mode, lookup, recapture
        self._stands = stands
        self._trials = TrialLog(root, store.contents.environment)

    def learned(self, record: Record) -> None:
        """Keep the record, and serve it where that is allowed."""
        held = self._store.contents.records.get((record.shape, record.M))
        if held is not None and not self._stands(held):
            record = succeeding(record, held)  # or the M would be searched again at every start
        if self.peers is not None and self.peers.learned(record):
            return
        self._store.submit(record=record)
        if record.verdict != "faster":
            self._take_back(record)
            return
        if held is not None and (held.pair, held.evidence.gain) == (record.pair, record.evidence.gain):
            return  # a further look found nothing better than what is served
        if self._mode != "restart":
            self._lookup.publish([row := (call_key(record.shape), record.M, record.pair)])
            self._recapture.adopted(*row)
        evidence = record.evidence
        logger.info(
            "MoE autotune learned %s M=%d: %.1f %% faster (%.1f -> %.1f us, at least %.1f %%), %s instead of %s.",
            *(record.shape.slug, record.M, 100 * evidence.gain, evidence.baseline_us, evidence.chosen_us),
            *(100 * evidence.gain_low, record.pair, record.baseline),
        )

    def _take_back(self, record: Record) -> None:
        """A further look found SGLang's own config faster than the row that is served."""
        key = call_key(record.shape)
        alone = self.peers is None or self.peers.place.ranks == 1
        held = self._store.contents.records.get((record.shape, record.M))
        if held is not None and held.source == "pinned":
            return
        if alone and self._mode != "restart" and record.M in self._lookup.rows().get(key, {}):
            self._lookup.publish([(key, record.M, None)])
            logger.info(
                "MoE autotune serves SGLang's own config for %s M=%d again: measured once more, it is the faster one.",
                *(record.shape.slug, record.M),
            )

    def tried(self, shape: MoeShape, M: int, trials: Sequence[Tried]) -> None:  # noqa: N803
        """What a search measured at its M."""
        self._trials.put(shape, M, trials)
        if self.peers is not None:
            self.peers.tried(shape, M, trials)
