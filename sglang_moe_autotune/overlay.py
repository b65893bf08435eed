"""The overlay: which learned rows are laid over SGLang's own answers, for the layers of this process."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from sglang_moe_autotune import held, releases
from sglang_moe_autotune.fitting import Limit, fit, limit_of
from sglang_moe_autotune.hindrance import Terms, bits_hold, hindrance
from sglang_moe_autotune.layers import LiveLayers, call_key
from sglang_moe_autotune.lookup import CallKey, Lookup, read_answer
from sglang_moe_autotune.shapes import ConfigPair, MoeShape

if TYPE_CHECKING:
    from sglang_moe_autotune.device import Device
    from sglang_moe_autotune.quarantine import Quarantine
    from sglang_moe_autotune.records import Contents, Origin, Record, Source
    from sglang_moe_autotune.settings import Mode


logger = logging.getLogger("sglang.moe_autotune")


class Overlay:
    """The live layers, where SGLang's answers for them come from, and the rows that are served instead."""

    def __init__(self, mode: Mode, *, bit_equal: bool = False) -> None:
        """bit_equal: of learned rows only those whose output was the baseline's in every bit."""
        self._bit_equal = bit_equal
        self.lookup = Lookup()
        self.lookup.overridden = releases.overridden
        self.layers = LiveLayers()
        self.source: Source | None = None
        """of the records made in this process; None before it has a device"""
        self._mode = mode
        self._origins: dict[MoeShape, Origin] = {}
        self._limit = Limit(0)
        self._told: set[CallKey] = set()
        self._quarantine: Quarantine | None = None

    def publish_stored(self, contents: Contents) -> None:
        """Serve the stored rows that hold here, and take back those whose call stands for no one shape any more."""
        rows: list[tuple[CallKey, int, ConfigPair | None]] = []
        for key, table in self.lookup.rows().items():
            if self.shape_of(key) is None:  # a model that was loaded later shares this call and is another kind
                rows += ((key, M, None) for M in table)
        for record in contents.records.values():
            key = call_key(record.shape)
            if record.verdict == "faster" and self.shape_of(key) == record.shape and self.may_serve(record):
                rows.append((key, record.M, record.pair))
        self.lookup.publish(rows)

    def may_serve(self, record: Record) -> bool:
        """Does nothing keep the record from being served here?"""
        terms = Terms(self._limit, self.source, self._bit_equal, self.tunable, self._answer, self._deadly)
        return not hindrance(record, terms)

    def _deadly(self, record: Record) -> str:
        return "" if self._quarantine is None else held.deadly(record, self._quarantine.held)

    def _answer(self, shape: MoeShape, M: int) -> ConfigPair | None:  # noqa: N803
        return self.stock(shape, M)[0]

    def begin(self, device: Device) -> Device:
        """The process has found its device."""
        self.source = device.source
        self._quarantine = getattr(device.provider, "quarantine", None)  # a recording launches nothing
        self.fit_to(limit_of(device.environment))
        return device

    def fit_to(self, limit: Limit) -> None:
        """From now on, what SGLang answers and this GPU cannot launch is made to fit."""
        self._limit = limit
        self.lookup.fit = self._fit

    def stock(self, shape: MoeShape, M: int) -> tuple[ConfigPair | None, ConfigPair | None]:  # noqa: N803
        """See ``stock``."""
        return stock(shape, M, self._limit)

    def _fit(self, key: CallKey, M: int, pair: ConfigPair) -> ConfigPair | None:  # noqa: N803
        shape = MoeShape(*key)
        fitted = fit(pair, shape, self._limit)
        if fitted is not None and key not in self._told:
            self._told.add(key)
            logger.warning(
                "SGLang's own config for %s at M=%d, %s, needs %d bytes of shared memory and this GPU has %d:"
                " MoE autotune serves %s in its place, here and wherever SGLang's does not fit.",
                *(shape.slug, M, pair, max(self._limit.need(c, shape) for c in (pair.up, pair.down))),
                *(self._limit.bytes, fitted),
            )
        return fitted

    def stands(self, record: Record) -> bool:
        """Does the record say what a search of its M found? Where it is not as equal to SGLang's answer as the user
        asks, or a config of it has killed, the M is searched again, and nothing is measured against it."""
        safe = record.source == "pinned" or not self._deadly(record)
        return safe and bits_hold(record, bit_equal=self._bit_equal)

    @property
    def shapes(self) -> tuple[MoeShape, ...]:
        """The shapes that lookups of this process have asked for, or that have a learned row here."""
        return tuple(self._origins)

    def origin(self, shape: MoeShape) -> Origin:
        """Where SGLang's answer comes from; the folder is read once a shape."""
        if shape not in self._origins:
            self._origins[shape] = releases.origin(shape)
        return self._origins[shape]

    def tunable(self, shape: MoeShape) -> bool:
        """May a learned row answer for this shape, as the mode says?"""
        return self._mode == "all" or self.origin(shape) != "exact"

    def shape_of(self, key: CallKey) -> MoeShape | None:
        """The one shape of live layers that a call stands for; on a recorded device every call stands for itself."""
        if not self.layers and self.source == "replayed":
            return MoeShape(*key)
        return self.layers.shape_of(key)


def stock(shape: MoeShape, M: int, limit: Limit) -> tuple[ConfigPair | None, ConfigPair | None]:  # noqa: N803
    """What is served without a learned row (None where that is no plain pair), and SGLang's own answer where that one
    cannot be launched within the limit. Reads files the first time: never on the hot path."""
    own = read_answer(releases.ask_stock(shape, M))
    fitted = None if own is None else fit(own, shape, limit)
    return (own, None) if fitted is None else (fitted, own)
