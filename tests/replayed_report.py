"""A store with what the real tuner finds on the shipped recording, for the report's picture in docs/.

``python tests/replayed_report.py FILE`` writes the page; the report's test takes the trials of a few M.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from report_store import H200, START_UNIX_S

from sglang_moe_autotune import landscape
from sglang_moe_autotune.figures import gather
from sglang_moe_autotune.prior import Prior
from sglang_moe_autotune.records import Contents, Record, ShapeNote
from sglang_moe_autotune.replay import ReplayProvider
from sglang_moe_autotune.report import page
from sglang_moe_autotune.trials import merged
from sglang_moe_autotune.tuner import Tuner, TunerOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_moe_autotune.shapes import MoeShape
    from sglang_moe_autotune.tried import Tried


class Replayed(NamedTuple):
    contents: Contents
    trials: dict[MoeShape, dict[int, list[Tried]]]


@functools.lru_cache
def replayed(*ms: int) -> Replayed:
    """Tune these M of the recording, all of them by default."""
    path, *_ = landscape.shipped()
    recorded = landscape.load(path)
    provider = ReplayProvider(recorded)
    shape = recorded.shape
    records: dict[int, Record] = {}
    trials: dict[int, list[Tried]] = {}

    def tried(_: MoeShape, m: int, rows: Sequence[Tried]) -> None:
        trials[m] = merged([*trials.get(m, ()), *rows])

    tuner = Tuner(
        provider,
        lambda record: records.update({record.M: record}),
        Prior(),
        TunerOptions(source="replayed"),
        space=lambda _: recorded.candidates,
        clock=provider.clock,
        unix_clock=lambda: START_UNIX_S + provider.clock(),
        tried=tried,
    )
    for m in ms or recorded.ms:
        tuner.add(shape, m, recorded.baselines[m].pair)
    while (step := tuner.step(deep_idle=True)) != "nothing":
        provider.wait(0.02 if step == "waiting" else 0.0)
    note = ShapeNote(shape, {m: recorded.baselines[m].pair for m in records}, {min(records): 4096})
    environment = msgspec.structs.replace(H200, kernel_hash="that of the recording")
    return Replayed(Contents(environment, {(shape, m): r for m, r in records.items()}, {shape: note}), {shape: trials})


if __name__ == "__main__":
    contents, found = replayed()
    Path(sys.argv[1]).write_text(page([gather("NVIDIA H200, replayed from a recording", contents, found)]), "utf-8")
