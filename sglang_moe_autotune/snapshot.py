"""The tuner at a moment, for people. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from sglang_moe_autotune.job import Phase  # noqa: TC001 - msgspec reads annotations when it runs

if TYPE_CHECKING:
    from sglang_moe_autotune.agenda import Agenda, Entry


class Snapshot(msgspec.Struct, frozen=True):
    """Keys are (slug of the shape, M)."""

    queue: tuple[tuple[str, int], ...]
    """hottest first"""
    current: tuple[str, int] | None
    phase: Phase | None
    deferred: dict[tuple[str, int], str]
    failed: tuple[tuple[str, int], ...]
    faster: int
    baseline: int
    compiled: dict[str, int]
    """configs ordered by shape"""
    gpu_s: float


def take(
    agenda: Agenda, current: Entry | None, phase: Phase | None, compiled: dict[str, int], gpu_s: float
) -> Snapshot:
    """Of what is searched now and what was settled; compiled: configs ordered by shape."""
    learned = {key: entry.record for key, entry in agenda.entries.items() if entry.record is not None}
    verdicts = [record.verdict for record in (agenda.stored | learned).values()]
    return Snapshot(
        queue=tuple((e.shape.slug, e.M) for e in agenda.queued()),
        current=(current.shape.slug, current.M) if current else None,
        phase=phase,
        deferred={(shape.slug, m): d.reason for (shape, m), d in agenda.deferred.items()},
        failed=tuple((e.shape.slug, e.M) for e in agenda.entries.values() if e.state == "failed"),
        faster=verdicts.count("faster"),
        baseline=verdicts.count("baseline"),
        compiled=compiled,
        gpu_s=gpu_s,
    )
