"""A store made up for the tests of the shell and for its page in docs/: two shapes, and a live server."""

from __future__ import annotations

import json
import shutil
import time
from typing import TYPE_CHECKING

from sglang_moe_autotune import held, status
from sglang_moe_autotune.records import Environment, Evidence, Record, ShapeNote
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig, MoeShape
from sglang_moe_autotune.store import Store, file_name

if TYPE_CHECKING:
    from pathlib import Path

H200 = Environment("NVIDIA H200", (9, 0), 132, 232_448, 62_914_560, "3.6.0", "3f2a9c")
H100 = Environment("NVIDIA H100 80GB HBM3", (9, 0), 132, 232_448, 52_428_800, "3.6.0", "3f2a9c")
MANY = MoeShape((128, 1536, 2048), (128, 2048, 768), 8)
FP8 = MoeShape((256, 512, 7168), (256, 7168, 256), 8, "fp8_w8a8", (128, 128))
HEURISTIC = ConfigPair(KernelConfig(64, 64, 32, 8), KernelConfig(64, 64, 32, 8))
SMALL_M = ConfigPair(KernelConfig(16, 64, 128, 1, 4, 4), KernelConfig(16, 64, 128, 1, 4, 4))
WINNER = ConfigPair(KernelConfig(64, 128, 64, 32, 4, 3), KernelConfig(64, 256, 64, 16, 8, 4))
NOW = 1_800_000_000.0


def record(shape: MoeShape, M: int, baseline_us: float, chosen_us: float) -> Record:  # noqa: N803
    """A record of these times: faster where they say so, else baseline."""
    gain = 1 - chosen_us / baseline_us
    faster = gain > 0
    evidence = Evidence(
        baseline_us, chosen_us, gain, gain - 0.004, gain + 0.004, 24, 31, 0.42,
        0.002 if faster else None, 0.01 if faster else None,
    )  # fmt: skip
    pair = WINNER if faster else HEURISTIC
    verdict = "faster" if faster else "baseline"
    return Record(shape, M, verdict, pair, HEURISTIC, evidence, sglang="0.5.16", unix_s=NOW)  # type: ignore[arg-type]


RECORDS = (
    record(MANY, 16, 218.1, 218.1),
    record(MANY, 256, 445.0, 308.9),
    record(MANY, 1024, 539.0, 364.1),
    record(FP8, 128, 488.0, 367.0),
)
NOTES = (
    ShapeNote(MANY, dict.fromkeys((16, 64, 256, 1024), HEURISTIC), {16: 5210, 64: 812, 256: 40}),
    ShapeNote(FP8, dict.fromkeys((128, 512), HEURISTIC), {128: 77}, "fallback"),
)


def fill(root: Path, environment: Environment = H200) -> Path:
    """Put the records and notes into the store at ``root``; the file they are in."""
    store = Store.open(root, environment)
    for note in NOTES:
        store.submit(note=note)
    for value in RECORDS:
        store.submit(record=value)
    assert store.close(10.0)
    assert store.path is not None
    return store.path


def hold(root: Path) -> None:
    """Put a candidate into the quarantine of the store."""
    key = file_name(H200).removesuffix(".json")
    reason = "its first launch took 1,023 times as long as SGLang's own"
    candidate = held.Candidate(key, MANY, "down", WINNER.down)
    held.keep(root / held.FOLDER, held.Held(candidate, reason, 256, time.time(), rows_stay=True))


def rewrite(path: Path, document: object) -> None:
    """Put another document in place of a file of the store, the copies beside it included."""
    shutil.rmtree(path.with_name(f"{path.name}.d"), ignore_errors=True)
    path.write_text(json.dumps(document), encoding="utf-8")


def live(owner: status.Owner | None = None, **fields: object) -> status.LiveStatus:
    """What this process would write if it were a server that tunes."""
    owner = owner or status.this_process()
    values: dict[str, object] = {
        **owner._asdict(),
        "unix_s": NOW,
        "since_unix_s": NOW - 5400,
        "sglang": "0.5.16",
        "triton": "3.6.0",
        "device_name": "NVIDIA H200",
        "hooks": {"sglang.srt.managers.scheduler.Scheduler.run_batch": True},
        "state": "tuning",
        "epoch": 3,
        "queue": ((MANY.slug, 64), (MANY.slug, 512), (MANY.slug, 2048), (MANY.slug, 4096)),
        "current": (MANY.slug, 64),
        "rows": 3,
        "slices": 9120,
        "gpu_s": 4.61,
        "gpu_s_last_hour": 1.87,
        "budget_s": 600.0,
        "idle_s": 840.0,
        "deep_idle_s": 180.0,
        "idle_windows": 96,
        "searches": 40,
        "idle_needed_s": {MANY.slug: 84.0},
        "pass_p99_us": 1000.0,
        "pass_longest_us": 1740.0,
        "compile": status.CompileCounts(66, 61, 2),
        "deferred": {f"{MANY.slug} 16384": "needs 1.9 GB of scratch, 1.2 GB are free beyond the reserve"},
        **fields,
    }
    return status.LiveStatus(**values)  # type: ignore[arg-type]
