"""Imported rows: config files of SGLang and vLLM, and rows of other stores, as records to be raced.

Pure. A file's name tells E and N, not K and top-k, so its rows go to the known shapes that it fits. An imported
record carries no measurement. Its baseline is its own pair: a stand-in that no server takes for SGLang's answer.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from sglang_moe_autotune.fitting import limit_of, unfit
from sglang_moe_autotune.records import Environment, Evidence, Record
from sglang_moe_autotune.sglang_json import FileName, Rows, parse, parse_name
from sglang_moe_autotune.shapes import ConfigPair, KernelConfig, MoeShape
from sglang_moe_autotune.validity import problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Dialect = Literal["sglang", "vllm", "either"]
"""Whose file it is. They differ in the N of int4 names: vLLM counts columns unpacked, SGLang as stored."""

UNMEASURED = Evidence(0.0, 0.0, 0.0, -1.0, 1.0, 0, 0, 0.0)
"""Nothing is known of the gain."""

_DTYPES = {"float8": "fp8_w8a8"}
"""What older releases of both called a dtype."""


class ConfigTable(NamedTuple):
    """One config file: its name and its rows by M."""

    name: FileName
    rows: Rows
    dialect: Dialect
    triton: str | None
    """the version that it was tuned with, where the file or its folder says so"""


class Imported(NamedTuple):
    """Records made of a file, and a sentence for each row that was refused."""

    records: tuple[Record, ...]
    refused: tuple[str, ...]


def read_table(file: str, folder: str, text: str) -> ConfigTable | str:
    """A config file by its name, the name of its folder and its text; or the reason why it is none."""
    name = parse_name(file)
    if name is None:
        return "its name is not E=...,N=...,device_name=...[,dtype=...][,block_shape=[n, k]].json"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        return str(error)
    if not isinstance(content, dict):
        return f"it holds a {type(content).__name__} where an object of rows by M belongs"
    stated = content.pop("triton_version", None)
    rows = parse(json.dumps({m: _plain(row) for m, row in content.items()}))
    if isinstance(rows, str):
        return rows
    if not rows:
        return "it has no rows"
    dialect: Dialect = "either"
    if stated is not None or (",block_shape=[" in file and ", " not in file):
        dialect = "vllm"
    elif name.down or folder.startswith("triton_") or ", " in file:
        dialect = "sglang"
    beside = folder.removeprefix("triton_").replace("_", ".") if re.fullmatch(r"triton_\d+(_\d+)*", folder) else None
    dtype = name.dtype if name.dtype is None else _DTYPES.get(name.dtype, name.dtype)
    return ConfigTable(name._replace(dtype=dtype), rows, dialect, stated if isinstance(stated, str) else beside)


def _plain(row: Any) -> Any:
    """Without the keys that say the default, and without TMA, which a plain row cannot carry."""
    if not isinstance(row, dict):
        return row
    dropped = {key for key, value in row.items() if key == "USE_TMA" or (key == "SPLIT_K" and value == 1)}
    return {key: value for key, value in row.items() if key not in dropped}


def matching(table: ConfigTable, shapes: Iterable[MoeShape]) -> tuple[MoeShape, ...]:
    """The shapes that the file was, or could have been, tuned for."""
    return tuple(sorted((shape for shape in shapes if _fits(table, shape)), key=lambda s: (s.slug, repr(s))))


def _fits(table: ConfigTable, shape: MoeShape) -> bool:
    name = table.name
    widths = {"sglang": {shape.N}, "vllm": {_unpacked(shape)}, "either": {shape.N, _unpacked(shape)}}
    block = shape.block_shape if shape.block_shape is not None and all(shape.block_shape) else None
    channel = table.dialect == "vllm" or shape.per_channel_quant == name.per_channel_quant
    same = (shape.E, shape.dtype, block) == (name.E, name.dtype, name.block_shape)
    return same and channel and name.N in widths[table.dialect]


def _unpacked(shape: MoeShape) -> int:
    return shape.N * 2 if shape.dtype == "int4_w4a16" else shape.N


def from_tables(up: ConfigTable, down: ConfigTable | None, shape: MoeShape, environment: Environment) -> Imported:
    """The rows of a file, with those of its down file where there is one, as records of this shape."""
    pairs = {m: ConfigPair(config, _down(config, m, down)) for m, config in up.rows.items()}
    return from_pairs(pairs, shape, environment)


def _down(up: KernelConfig, m: int, table: ConfigTable | None) -> KernelConfig:
    """As SGLang reads it: the nearest row, forced to the up GEMM's BLOCK_SIZE_M."""
    if table is None:
        return up
    nearest = min(table.rows, key=lambda key: abs(key - m))
    return msgspec.structs.replace(table.rows[nearest], BLOCK_SIZE_M=up.BLOCK_SIZE_M)


def from_pairs(pairs: Mapping[int, ConfigPair], shape: MoeShape, environment: Environment) -> Imported:
    """Records of what could run here; the rest is refused, with the reason."""
    records, refused = [], []
    for m, pair in sorted(pairs.items()):
        record = Record(shape, m, "faster", pair, pair, UNMEASURED, "imported")
        reason = problem(record) or unfit(pair, shape, limit_of(environment))
        if reason is None:
            records.append(record)
        else:
            refused.append(f"{shape.slug} M={m}: {reason}")
    return Imported(tuple(records), tuple(refused))
