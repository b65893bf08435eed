"""Values that the tests of records, store and export share: builders with defaults."""

from __future__ import annotations

from typing import Any

from sglang_moe_autotune.records import (
    Contents,
    Environment,
    Evidence,
    Record,
    ShapeNote,
)
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig, MoeShape

H200 = Environment("NVIDIA H200", (9, 0), 132, 232448, 60 << 20, "3.8.0", "k1")

SMALL = KernelConfig(16, 32, 64, 1)
LARGE = KernelConfig(64, 64, 32, 8)


def shape(experts: int = 128, **changes: Any) -> MoeShape:
    fields = {"w1_shape": (experts, 1536, 2048), "w2_shape": (experts, 2048, 768), "top_k": 8}
    return MoeShape(**{**fields, **changes})


def heuristic(m: int, experts: int = 128) -> ConfigPair:
    """What SGLang answers for bf16 where it has no file."""
    config = SMALL if m <= experts else LARGE
    return ConfigPair(config, config)


def pair(block_m: int = 32) -> ConfigPair:
    return ConfigPair(KernelConfig(block_m, 64, 64, 8, 4, 3), KernelConfig(block_m, 128, 64, 1, 8, 4))


def record(m: int = 64, of: MoeShape | None = None, samples: int = 40, **changes: Any) -> Record:
    of = shape() if of is None else of
    evidence = Evidence(200.0, 180.0, 0.1, 0.08, 0.12, samples, 30, 1.5, 1e-3, 1e-2)
    fields = {"verdict": "faster", "pair": pair(), "baseline": heuristic(m, of.E), "evidence": evidence}
    return Record(of, m, **{**fields, **changes})


def note(of: MoeShape | None = None, *seen: int, served: dict[int, int] | None = None) -> ShapeNote:
    of = shape() if of is None else of
    return ShapeNote(of, {m: heuristic(m, of.E) for m in seen}, served or {})


def contents(*values: Record | ShapeNote, environment: Environment = H200) -> Contents:
    records = {(v.shape, v.M): v for v in values if isinstance(v, Record)}
    notes = {v.shape: v for v in values if isinstance(v, ShapeNote)}
    return Contents(environment, records, notes)
