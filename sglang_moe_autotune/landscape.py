"""A landscape: the latency of every candidate of a shape as recorded on a device, and its replay.

The file is JSON, gzipped or not: E, N, K, topk, dtype, block_shape, a list of ``candidates``, ``up_us`` and
``down_us`` by M and candidate index, ``default`` by M (SGLang's heuristic, timed with the rest) and
``out_of_resources`` by candidate index. ``replay`` stands in for the device on it.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import msgspec

from sglang_moe_autotune.errors import LandscapeError
from sglang_moe_autotune.shapes import ConfigPair, Gemm, KernelConfig, MoeShape


class _Default(msgspec.Struct):
    config: dict[str, Any]
    up_us: float
    down_us: float
    down_config: dict[str, Any] | None = None


class _File(msgspec.Struct):
    E: int
    N: int
    K: int
    topk: int
    candidates: list[dict[str, Any]]
    up_us: dict[str, dict[str, float]]
    down_us: dict[str, dict[str, float]]
    default: dict[str, _Default]
    dtype: str | None = None
    block_shape: tuple[int, int] | None = None
    per_channel_quant: bool = False
    out_of_resources: dict[str, str] = {}
    device_name: str = ""
    triton: str = ""
    max_shared_memory_bytes: int | None = None


class Baseline(msgspec.Struct, frozen=True):
    """SGLang's own answer for one M, and what it took."""

    pair: ConfigPair
    up_us: float
    down_us: float


class Landscape(msgspec.Struct, frozen=True):
    """What was recorded; latencies in microseconds without noise."""

    shape: MoeShape
    candidates: tuple[KernelConfig, ...]
    up_us: dict[int, dict[KernelConfig, float]]
    down_us: dict[int, dict[KernelConfig, float]]
    baselines: dict[int, Baseline]
    out_of_resources: dict[KernelConfig, str] = {}
    device_name: str = ""
    triton: str = ""
    max_shared_memory_bytes: int | None = None

    @property
    def ms(self) -> tuple[int, ...]:
        """The recorded M, ascending."""
        return tuple(sorted(self.baselines))

    def latency_us(self, M: int, gemm: Gemm, config: KernelConfig) -> float | None:  # noqa: N803
        """One launch at M, None where it was not recorded."""
        baseline = self.baselines[M]
        if config == baseline.pair.of(gemm):
            return baseline.up_us if gemm == "up" else baseline.down_us
        return (self.up_us if gemm == "up" else self.down_us)[M].get(config)

    def pair_us(self, M: int, pair: ConfigPair) -> float:  # noqa: N803
        """Up + down of a pair at M. Raises LandscapeError where one was not recorded."""
        up, down = self.latency_us(M, "up", pair.up), self.latency_us(M, "down", pair.down)
        if up is None or down is None:
            raise LandscapeError(f"{pair} was not recorded at M={M}; take configs from the landscape's candidates")
        return up + down

    def best(self, M: int) -> tuple[ConfigPair, float]:  # noqa: N803
        """The fastest pair with one BLOCK_SIZE_M at M, and its up + down. The baseline's two configs go with those of
        candidates too, unless keys of their own (USE_TMA, ...) tie them together."""
        baseline = self.baselines[M]
        pair, least = baseline.pair, baseline.up_us + baseline.down_us
        up_us, down_us = self.up_us[M], self.down_us[M]
        if not (pair.up.extra or pair.down.extra):
            up_us, down_us = up_us | {pair.up: baseline.up_us}, down_us | {pair.down: baseline.down_us}
        for tile in sorted({c.BLOCK_SIZE_M for c in self.candidates}):
            ups = {c: us for c, us in up_us.items() if tile == c.BLOCK_SIZE_M}
            downs = {c: us for c, us in down_us.items() if tile == c.BLOCK_SIZE_M}
            if ups and downs and (total := min(ups.values()) + min(downs.values())) < least:
                pair, least = ConfigPair(min(ups, key=ups.__getitem__), min(downs, key=downs.__getitem__)), total
        return pair, least


def load(path: Path) -> Landscape:
    """Read a landscape file. Raises LandscapeError naming what is wrong, OSError where it cannot be read."""
    try:
        return parse(path.read_bytes())
    except LandscapeError as error:
        raise LandscapeError(f"{path.name} is no landscape: {error}") from error


def shipped() -> tuple[Path, ...]:
    """The landscape files that come with the package."""
    return tuple(sorted((Path(__file__).parent / "landscapes").glob("*.json.gz")))


def parse(content: bytes) -> Landscape:
    """Bytes of a file, gzipped or not, to a landscape. Raises LandscapeError with the field and the cure."""
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise LandscapeError(f"its gzip stream is cut or damaged ({error}); copy the file again") from error
    try:
        file = msgspec.json.decode(content, type=_File)
    except msgspec.DecodeError as error:
        raise LandscapeError(f"{error}; record it again or compare it with a shipped file") from error
    candidates = tuple(_config(c) for c in file.candidates)
    if len(set(candidates)) != len(candidates):
        raise LandscapeError("two of its candidates are equal; each config must be listed once")
    if not file.default:
        raise LandscapeError("it has no M; 'default' must hold the baseline of each recorded M")
    for field, table in (("up_us", file.up_us), ("down_us", file.down_us)):
        if odd := sorted(set(file.default) ^ set(table)):
            raise LandscapeError(f"M={odd[0]} is in only one of 'default' and {field}; record both at the same M")
    return Landscape(
        shape=MoeShape(
            (file.E, 2 * file.N, file.K),
            (file.E, file.K, file.N),
            file.topk,
            file.dtype,
            file.block_shape,
            file.per_channel_quant,
        ),
        candidates=candidates,
        up_us=_latencies("up_us", file.up_us, candidates),
        down_us=_latencies("down_us", file.down_us, candidates),
        baselines={_number("default", m): _baseline(m, default) for m, default in file.default.items()},
        out_of_resources={
            _candidate("out_of_resources", i, candidates): reason for i, reason in file.out_of_resources.items()
        },
        device_name=file.device_name,
        triton=file.triton,
        max_shared_memory_bytes=file.max_shared_memory_bytes,
    )


def _baseline(m: str, default: _Default) -> Baseline:
    up = _config(default.config)
    down = up if default.down_config is None else _config(default.down_config)
    for name, us in (("up_us", default.up_us), ("down_us", default.down_us)):
        _check_time(f"default[{m}].{name}", us)
    return Baseline(ConfigPair(up, down), default.up_us, default.down_us)


def _latencies(
    field: str, table: dict[str, dict[str, float]], candidates: tuple[KernelConfig, ...]
) -> dict[int, dict[KernelConfig, float]]:
    result: dict[int, dict[KernelConfig, float]] = {}
    for m, row in table.items():
        for index, us in row.items():
            _check_time(f"{field}[{m}][{index}]", us)
        result[_number(field, m)] = {_candidate(field, i, candidates): us for i, us in row.items()}
    return result


def _check_time(name: str, us: float) -> None:
    if not (us > 0 and math.isfinite(us)):
        raise LandscapeError(f"{name} must be a positive time in microseconds, not {us}")


def _config(config: dict[str, Any]) -> KernelConfig:
    try:
        return KernelConfig.from_dict(config)
    except ValueError as error:
        raise LandscapeError(str(error)) from error


def _candidate(field: str, index: str, candidates: tuple[KernelConfig, ...]) -> KernelConfig:
    number = int(index) if index.isdecimal() else len(candidates)
    if number >= len(candidates):
        raise LandscapeError(f"{field} names candidate {index!r}, and there are {len(candidates)}; indices start at 0")
    return candidates[number]


def _number(field: str, m: str) -> int:
    if not m.isdecimal() or int(m) < 1:
        raise LandscapeError(f"{field} has the key {m!r}, which is no M; keys are token counts from 1 on")
    return int(m)
