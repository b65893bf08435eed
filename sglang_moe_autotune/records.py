"""What is kept on disk: records with their evidence, notes on shapes, and how two copies merge.

Pure: bytes in, values out. ``store`` opens the files.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from sglang_moe_autotune.shapes import ConfigPair, MoeShape

SCHEMA = 1

Verdict = Literal["faster", "baseline"]
"""``faster``: the pair was measured faster than the baseline and is served. ``baseline``: the search
ended and nothing beat what SGLang uses; nothing is served, and the M is not searched again."""

Source = Literal["learned", "imported", "pinned", "replayed"]


class Environment(msgspec.Struct, frozen=True):
    """Where a latency holds. Two environments that differ in a field never share records."""

    device_name: str
    capability: tuple[int, int]
    sm_count: int
    shared_memory_bytes: int
    l2_bytes: int
    triton: str
    kernel_hash: str


class Evidence(msgspec.Struct, frozen=True):
    """Why a record says what it says. Gains are 1 - chosen/baseline over up + down, as fractions."""

    baseline_us: float
    chosen_us: float
    gain: float
    gain_low: float
    gain_high: float
    samples: int
    measured: int
    """candidates measured, both GEMMs counted once"""
    gpu_s: float
    max_error: float | None = None
    """largest ||out - baseline_out|| / ||baseline_out|| over the comparisons made; None for baseline"""
    tolerance: float | None = None


class Record(msgspec.Struct, frozen=True):
    """The outcome for one (shape, M)."""

    shape: MoeShape
    M: int
    verdict: Verdict
    pair: ConfigPair
    """what is served (the baseline pair where the verdict is ``baseline``)"""
    baseline: ConfigPair
    evidence: Evidence
    source: Source = "learned"
    sglang: str = ""
    driver: str = ""
    unix_s: float = 0.0


class ShapeNote(msgspec.Struct, frozen=True):
    """What was seen of a shape: SGLang's own answers by M, and how often each M was served."""

    shape: MoeShape
    baselines: dict[int, ConfigPair] = {}
    served: dict[int, int] = {}
    origin: Literal["miss", "fallback", "exact"] = "miss"
