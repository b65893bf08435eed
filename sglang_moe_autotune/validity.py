"""Which values may be served or written: sizes, configs and figures that make sense.

A file can be edited, copied from elsewhere or written by another version, and what it says reaches a launch.
"""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING

import msgspec

from sglang_moe_autotune.records import Environment, Evidence, Forgotten, Record, ShapeNote
from sglang_moe_autotune.shapes import KernelConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sglang_moe_autotune.shapes import ConfigPair, MoeShape

_MAX_INT = (1 << 31) - 1
_MAX_COUNT = (1 << 53) - 1
_MAX_M = 1 << 24
_WORD = re.compile(r"[A-Za-z0-9_.+:=-]{1,64}")
_FIELDS = frozenset(KernelConfig.__struct_fields__)
_LAUNCH_OPTIONS = frozenset({"waves_per_eu", "matrix_instr_nonkdim", "kpack", "num_ctas", "maxnreg", "USE_TMA"})


def problem(value: Environment | Record | ShapeNote | Forgotten) -> str | None:
    """Why a value must not be served or written, or None."""
    if isinstance(value, Environment):
        return next(_environment_problems(value), None)
    if reason := _shape_problem(value.shape):
        return f"shape: {reason}"
    if isinstance(value, ShapeNote):
        return next(_note_problems(value), None)
    if not (1 <= value.M <= _MAX_M and 0 <= value.generation <= _MAX_INT):
        return f"M must be 1 to {_MAX_M}, generation 0 to {_MAX_INT}, not {value.M} and {value.generation}"
    if isinstance(value, Record) and not 0 <= value.revision <= _MAX_INT:
        return f"revision must be 0 to {_MAX_INT}, not {value.revision}"
    return _record_problem(value) if isinstance(value, Record) else None


def _environment_problems(environment: Environment) -> Iterator[str]:
    for name, value in msgspec.structs.asdict(environment).items():
        if isinstance(value, str) and (len(value) > 256 or not value.isprintable()):
            yield f"{name} must be printable and at most 256 characters, not {value[:40]!r}"
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and not 0 <= number <= _MAX_COUNT:
                yield f"{name} must be 0 to {_MAX_COUNT}, not {number}"


@functools.lru_cache(maxsize=4096)
def _shape_problem(shape: MoeShape) -> str | None:
    """Kept: a store holds the same few hundred shapes and pairs in all its records."""
    return next(_shape_problems(shape), None)


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


def shape_is_sound(shape: MoeShape) -> bool:
    return _shape_problem(shape) is None


def pair_is_sound(pair: ConfigPair, *, served: bool) -> bool:
    """``served``: its extra keys must be known launch options. False does not yet mean that it has a problem."""
    return _nameless_pair_problem(pair, _LAUNCH_OPTIONS if served else None) is None


def figures_are_sound(row: Record) -> bool:
    """Quickly, whether a record whose shape and pairs are sound has no problem: a store has 10,000 to check."""
    e = row.evidence
    return (
        1 <= row.M <= _MAX_M
        and 0 <= row.generation <= _MAX_INT
        and 0 <= row.revision <= _MAX_INT
        and 0 <= e.baseline_us <= _MAX_COUNT
        and 0 <= e.chosen_us <= _MAX_COUNT
        and -_MAX_COUNT <= e.gain <= _MAX_COUNT
        and -_MAX_COUNT <= e.gain_low <= _MAX_COUNT
        and -_MAX_COUNT <= e.gain_high <= _MAX_COUNT
        and 0 <= e.samples <= _MAX_COUNT
        and 0 <= e.measured <= _MAX_COUNT
        and 0 <= e.looks <= _MAX_COUNT
        and 0 <= e.firm <= 1
        and 0 <= e.runs <= _MAX_COUNT
        and 0 <= e.gpu_s <= _MAX_COUNT
        and (e.max_error is None or 0 <= e.max_error <= _MAX_COUNT)
        and (e.tolerance is None or 0 <= e.tolerance <= _MAX_COUNT)
        and 0 <= row.unix_s <= _MAX_COUNT
        and len(row.sglang) <= 256 >= len(row.driver)
    )


def _record_problem(record: Record) -> str | None:
    if reason := _pair_problem("baseline", record.baseline, None):
        return reason
    keys = {key for config in (record.baseline.up, record.baseline.down) for key, _ in config.extra}
    if reason := _pair_problem("pair", record.pair, _LAUNCH_OPTIONS | keys):
        return reason
    if reason := next(_evidence_problems(record.evidence), None):
        return reason
    if not 0 <= record.unix_s <= _MAX_COUNT:
        return f"unix_s must be 0 to {_MAX_COUNT}, not {record.unix_s}"
    if max(len(record.sglang), len(record.driver)) > 256:
        return "sglang and driver must have at most 256 characters"
    return None


def _evidence_problems(evidence: Evidence) -> Iterator[str]:
    for name, value in msgspec.structs.asdict(evidence).items():
        if value is not None and not (math.isfinite(value) and -_MAX_COUNT <= value <= _MAX_COUNT):
            yield f"evidence.{name} must be a finite number, not {value}"
        if value is not None and value < 0 and not name.startswith("gain"):
            yield f"evidence.{name} must not be negative, but is {value}"


def _note_problems(note: ShapeNote) -> Iterator[str]:
    for m in (*note.baselines, *note.served, *note.unfit):
        if not 1 <= m <= _MAX_M:
            yield f"M must be 1 to {_MAX_M}, not {m}"
    for m, count in note.served.items():
        if not 0 <= count <= _MAX_COUNT:
            yield f"served[{m}] must be 0 to {_MAX_COUNT}, not {count}"
    for name, pairs in (("baselines", note.baselines), ("unfit", note.unfit)):
        for m, pair in pairs.items():
            if reason := _pair_problem(f"{name}[{m}]", pair, None):
                yield reason


def _pair_problem(name: str, pair: ConfigPair, options: frozenset[str] | None) -> str | None:
    reason = _nameless_pair_problem(pair, options)
    return None if reason is None else f"{name}{reason}"


@functools.lru_cache(maxsize=4096)
def _nameless_pair_problem(pair: ConfigPair, options: frozenset[str] | None) -> str | None:
    return next(_pair_problems(pair, options), None)


def _pair_problems(pair: ConfigPair, options: frozenset[str] | None) -> Iterator[str]:
    for gemm, config in (("up", pair.up), ("down", pair.down)):
        for reason in _config_problems(config, options):
            yield f".{gemm}: {reason}"
    if pair.up.BLOCK_SIZE_M != pair.down.BLOCK_SIZE_M:
        sizes = f"{pair.up.BLOCK_SIZE_M} and {pair.down.BLOCK_SIZE_M}"
        yield f": up and down must share BLOCK_SIZE_M (one sort of the tokens), not have {sizes}"


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
