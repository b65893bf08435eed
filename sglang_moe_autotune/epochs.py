"""Epochs: the table that all ranks of a server serve, each of its versions an epoch. Pure."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

import msgspec

from sglang_moe_autotune.records import Record  # noqa: TC001 - msgspec reads the annotations

if TYPE_CHECKING:
    from sglang_moe_autotune.records import Key


class Table(msgspec.Struct, frozen=True):
    """What a server's ranks serve beyond what they started with, as rank 0 decided it."""

    epoch: int = 0
    rows: tuple[Record, ...] = ()
    """in the order in which they were decided; a row whose verdict is ``baseline`` takes one back"""
    since: tuple[int, ...] = ()
    """of each row the epoch that it came with, ascending"""
    dismissed: tuple[str, ...] = ()
    """ids of proposals that some rank refused, or that are outdated"""

    def after(self, epoch: int) -> tuple[Record, ...]:
        """The rows that came after an epoch."""
        return self.rows[bisect.bisect_right(self.since, epoch) :]

    def row(self, key: Key) -> Record | None:
        shape, M = key  # noqa: N806
        return next((row for row in self.rows if row.M == M and row.shape == shape), None)

    def with_row(self, record: Record) -> Table:
        """The next epoch, with this row in the place of the one at its M."""
        old = self.row((record.shape, record.M))
        others = [(row, since) for row, since in zip(self.rows, self.since, strict=True) if row is not old]
        rows, sinces = tuple(row for row, _ in others), tuple(since for _, since in others)
        return Table(self.epoch + 1, (*rows, record), (*sinces, self.epoch + 1), self.dismissed)

    def dismissing(self, proposal: str) -> Table:
        return msgspec.structs.replace(self, dismissed=(*self.dismissed, proposal))
