"""Which values may be served or written: sizes, configs and figures that make sense.

A file can be edited, copied from elsewhere or written by another version, and what it says reaches a launch.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import msgspec

from sglang_moe_autotune.records import Environment, Forgotten, Record, ShapeNote
from sglang_moe_autotune.shapes import KernelConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_moe_autotune.shapes import ConfigPair, MoeShape

_MAX_INT = (1 << 31) - 1
_MAX_COUNT = (1 << 53) - 1
_MAX_M = 1 << 24
_WORD = re.compile(r"[A-Za-z0-9_.+:=-]{1,64}")
_FIELDS = frozenset(KernelConfig.__struct_fields__)
_LAUNCH_OPTIONS = frozenset(
    {"waves_per_eu", "matrix_instr_nonkdim", "kpack", "num_ctas", "maxnreg", "USE_TMA"}
)


def problem(value: Environment | Record | ShapeNote | Forgotten) -> str | None:
    """Why a value must not be served or written, or None."""
    if isinstance(value, Environment):
        return next(_environment_problems(value), None)
    if reason := next(_shape_problems(value.shape), None):
        return f"shape: {reason}"
    if isinstance(value, ShapeNote):
        return next(_note_problems(value), None)
    return next(_place_problems(value), None) or (
        next(_record_problems(value), None) if isinstance(value, Record) else None
    )


def _environment_problems(environment: Environment) -> Iterator[str]:
    for name, value in msgspec.structs.asdict(environment).items():
        if isinstance(value, str) and (len(value) > 256 or not value.isprintable()):
            yield f"{name} must be printable and at most 256 characters, not {value[:40]!r}"
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and not 0 <= number <= _MAX_COUNT:
                yield f"{name} must be 0 to {_MAX_COUNT}, not {number}"


def _shape_problems(shape: MoeShape) -> Iterator[str]:
    if not all(1 <= size <= _MAX_INT for size in (*shape.w1_shape, *shape.w2_shape, shape.top_k)):
        yield f"sizes must be 1 to {_MAX_INT}, not {shape.w1_shape}, {shape.w2_shape}, top_k {shape.top_k}"
    if shape.w1_shape[0] != shape.w2_shape[0]:
        yield f"w1 and w2 must have as many experts, not {shape.w1_shape[0]} and {shape.w2_shape[0]}"
    if shape.block_shape is not None and not all(0 <= size <= _MAX_INT for size in shape.block_shape):
        yield f"block_shape must be 0 to {_MAX_INT}, not {shape.block_shape}"
    words = shape.variant if shape.dtype is None else (shape.dtype, *shape.variant)
    if len(words) > 32 or not all(_WORD.fullmatch(word) for word in words):
        yield f"dtype and variant must be short words, not {str(words)[:80]}"


def _place_problems(value: Record | Forgotten) -> Iterator[str]:
    if not 1 <= value.M <= _MAX_M:
        yield f"M must be 1 to {_MAX_M}, not {value.M}"
    if not 0 <= value.generation <= _MAX_INT:
        yield f"generation must be 0 to {_MAX_INT}, not {value.generation}"


def _record_problems(record: Record) -> Iterator[str]:
    baseline_keys = {key for config in (record.baseline.up, record.baseline.down) for key, _ in config.extra}
    yield from _pair_problems("pair", record.pair, _LAUNCH_OPTIONS | baseline_keys)
    yield from _pair_problems("baseline", record.baseline, None)
    for name, value in msgspec.structs.asdict(record.evidence).items():
        if value is not None and not (math.isfinite(value) and -_MAX_COUNT <= value <= _MAX_COUNT):
            yield f"evidence.{name} must be a finite number, not {value}"
        if value is not None and value < 0 and not name.startswith("gain"):
            yield f"evidence.{name} must not be negative, but is {value}"
    if not 0 <= record.unix_s <= _MAX_COUNT:
        yield f"unix_s must be 0 to {_MAX_COUNT}, not {record.unix_s}"
    if max(len(record.sglang), len(record.driver)) > 256:
        yield "sglang and driver must have at most 256 characters"


def _note_problems(note: ShapeNote) -> Iterator[str]:
    for m in (*note.baselines, *note.served):
        if not 1 <= m <= _MAX_M:
            yield f"M must be 1 to {_MAX_M}, not {m}"
    for m, count in note.served.items():
        if not 0 <= count <= _MAX_COUNT:
            yield f"served[{m}] must be 0 to {_MAX_COUNT}, not {count}"
    for m, pair in note.baselines.items():
        yield from _pair_problems(f"baselines[{m}]", pair, None)


def _pair_problems(name: str, pair: ConfigPair, options: frozenset[str] | None) -> Iterator[str]:
    for gemm, config in (("up", pair.up), ("down", pair.down)):
        for reason in _config_problems(config, options):
            yield f"{name}.{gemm}: {reason}"
    if pair.up.BLOCK_SIZE_M != pair.down.BLOCK_SIZE_M:
        sizes = f"{pair.up.BLOCK_SIZE_M} and {pair.down.BLOCK_SIZE_M}"
        yield f"{name}: up and down must share BLOCK_SIZE_M (one sort of the tokens), not have {sizes}"


def _config_problems(config: KernelConfig, options: frozenset[str] | None) -> Iterator[str]:
    """``options``: the extra keys that a launch takes (another one is a TypeError there); None for any."""
    for key in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K"):
        size = getattr(config, key)
        if not 1 <= size <= 1024 or size & (size - 1):
            yield f"{key} must be a power of two up to 1024, not {size}"
    if not 1 <= config.GROUP_SIZE_M <= 1024:
        yield f"GROUP_SIZE_M must be 1 to 1024, not {config.GROUP_SIZE_M}"
    warps, stages = config.num_warps, config.num_stages
    if warps is not None and (not 1 <= warps <= 32 or warps & (warps - 1)):
        yield f"num_warps must be a power of two up to 32, not {warps}"
    if stages is not None and not 1 <= stages <= 16:
        yield f"num_stages must be 1 to 16, not {stages}"
    if len(config.extra) > 16:
        yield f"a config has at most 16 extra keys, not {len(config.extra)}"
    for key, value in config.extra:
        launchable = options is None or key in options
        if not launchable or key in _FIELDS or not _WORD.fullmatch(key):
            yield f"{key!r} is no launch option"
        elif not -_MAX_INT <= value <= _MAX_INT:
            yield f"{key} must be within {_MAX_INT}, not {value}"
