"""The prior: winners in the config files of the installed SGLang and in our own records, and what they suggest to try.

A config tuned for another shape, GPU or Triton still says which tiles are worth a compile at about this M. No file is
read before the first question, and then only the files of the asked dtype class.
"""

from __future__ import annotations

import logging
import math
import re
from functools import lru_cache
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from sglang_moe_autotune import regimes
from sglang_moe_autotune.search_space import AXES, filled, neighbours
from sglang_moe_autotune.sglang_json import parse_name
from sglang_moe_autotune.shapes import GEMMS, Gemm, KernelConfig, MoeShape

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet
    from pathlib import Path

    from sglang_moe_autotune.records import Record

logger = logging.getLogger("sglang.moe_autotune")

DtypeClass = tuple[str | None, bool, bool]
"""SGLang's selector, whether scales are block-wise, whether they are per channel."""

_FAMILIES: Final = (
    ("other", re.compile(r"AMD|Intel|^$")),
    ("hopper", re.compile(r"\b(G?H[128]00|H20)", re.ASCII)),
    ("blackwell", re.compile(r"\b(G?B[23]00|GB10|RTX_(PRO|50))", re.ASCII)),
)

# How fast trust in a winner fades. The file names say neither K nor top-k, so the fade is gentle. Checked by
# leaving one shape out of the shipped files in turn: any of them halved or doubled moves the hit rate by 0.02.
_PER_OCTAVE_OF_M: Final = 1.0
_PER_OCTAVE_OF_E: Final = 1.0
_PER_OCTAVE_OF_N: Final = 0.6
_OTHER_FAMILY: Final = 0.3
_OTHER_VENDOR: Final = 0.05
_OTHER_GEMM: Final = 0.6
_SAME_SHAPE: Final = 3.0
_PER_OCTAVE_OF_K: Final = 0.3
_PER_OCTAVE_OF_TOP_K: Final = 0.6
_OWN: Final = 3.0
"""a record of ours was confirmed by a second test, and says K and top-k; a file's row is a noisy minimum"""
_NEIGHBOUR: Final = 0.1
_FARTHEST_OCTAVES: Final = 3.0
_LEAST_WEIGHT: Final = 0.01
"""of the weightiest file's; lighter ones are not counted"""


class Winners(NamedTuple):
    """The rows of one file: what was best for that shape and GPU at each M when its author tuned it."""

    E: int
    N: int
    device_name: str
    gemms: tuple[Gemm, ...]
    rows: tuple[tuple[int, KernelConfig], ...]


class ConfigFile(NamedTuple):
    """What a file's name says. ``down``: it holds rows for the down GEMM only."""

    path: Path
    E: int
    N: int
    device_name: str
    dtype_class: DtypeClass
    down: bool


class _Table:
    """The winners of a dtype class by number, so that a ranking (a slice on the serving thread) hashes nothing."""

    def __init__(self) -> None:
        self.files: list[tuple[Winners, dict[int, int]]] = []
        self.ms: set[int] = set()
        self.numbers: dict[KernelConfig, int] = {}
        self.near: dict[int, tuple[int, ...]] = {}

        self.own: dict[tuple[MoeShape, bool], dict[Gemm, dict[int, int]]] = {}
        """rows that were learned on this GPU, by shape, and whether in this environment"""

    def add(self, winners: Winners) -> None:
        self.files.append((winners, {m: self._row(m, config) for m, config in winners.rows}))

    def learn(self, record: Record, *, here: bool) -> None:
        rows = self.own.setdefault((record.shape, here), {"up": {}, "down": {}})
        for gemm in GEMMS:
            rows[gemm][record.M] = self._row(record.M, filled(record.pair.of(gemm)))

    def _row(self, m: int, config: KernelConfig) -> int:
        number = self._number(config)
        self.ms.add(m)
        if number not in self.near:
            self.near[number] = tuple(self._number(step) for step in neighbours(config))
        return number

    def _number(self, config: KernelConfig) -> int:
        return self.numbers.setdefault(config, len(self.numbers))


class Prior:
    """Ranks candidates for a (shape, M). Not for two threads at once."""

    def __init__(self, files: Iterable[ConfigFile] = (), device_name: str = "") -> None:
        self._files = tuple(files)
        self._with_down = {_key(f) for f in self._files if f.down}
        self._device_name = device_name.replace(" ", "_")
        self._tables: dict[DtypeClass, _Table] = {}
        self._unread: dict[DtypeClass, list[ConfigFile]] = {}
        self._weighed: dict[tuple[MoeShape, Gemm], list[tuple[float, dict[int, int]]]] = {}

    def learn(self, record: Record, *, here: bool) -> None:
        """Note a winner on this GPU. here: in this environment, and then for other shapes only: the searches of its
        own know it. Otherwise (an older Triton) for all. What was not measured faster says nothing."""
        if record.verdict == "faster" and record.source in ("learned", "replayed"):
            self._table(dtype_class(record.shape)).learn(record, here=here)

    def _table(self, wanted: DtypeClass) -> _Table:
        return self._tables.setdefault(wanted, _Table())

    def load_step(self, shape: MoeShape) -> bool:
        """Read one more file of this shape's dtype class, about 0.3 ms; True when all are read."""
        wanted = dtype_class(shape)
        if wanted not in self._unread:
            self._unread[wanted] = [f for f in self._files if f.dtype_class == wanted]
        if unread := self._unread[wanted]:
            file = unread.pop()
            if (winners := read_winners(file, with_down=_key(file) in self._with_down)) is not None:
                self._table(wanted).add(winners)
        return not unread

    def load(self, shape: MoeShape) -> int:
        """Read all files of this shape's dtype class, once, for about 0.1 s; the count of rows."""
        while not self.load_step(shape):
            pass
        return sum(len(rows) for _, rows in self._table(dtype_class(shape)).files)

    def rank(
        self,
        shape: MoeShape,
        M: int,  # noqa: N803
        gemm: Gemm,
        space: AbstractSet[KernelConfig],
        count: int = 64,
    ) -> list[KernelConfig]:
        """The ``count`` most promising members of the space; where files support fewer, a built-in order follows."""
        self.load(shape)
        table = self._table(dtype_class(shape))
        configs = list(table.numbers)
        votes = [0.0] * len(configs)
        near = [(m, far) for m in table.ms if (far := abs(math.log2(m / M))) <= _FARTHEST_OCTAVES]
        fades = [(m, math.exp(-_PER_OCTAVE_OF_M * far)) for m, far in near]
        own = (
            (_own_weight(other, shape), rows[gemm])
            for (other, here), rows in table.own.items()
            if not (here and other == shape)
        )
        for weight, rows in chain(self._weigh(table, shape, gemm), own):
            for m, fade in fades:
                if (number := rows.get(m)) is not None:
                    votes[number] += weight * fade
        smooth = list(votes)
        least = _LEAST_WEIGHT * max(votes, default=0.0)
        for number, vote in enumerate(votes):
            if vote > least:
                rub_off = vote * _NEIGHBOUR
                for step in table.near[number]:
                    smooth[step] += rub_off
        order = sorted((n for n, vote in enumerate(smooth) if vote), key=smooth.__getitem__, reverse=True)
        supported = list(islice((configs[n] for n in order if configs[n] in space), count))
        if len(supported) < count:
            rest = chain(regimes.order(shape, M), sorted(space, key=str) if len(space) < count else ())
            known = set(supported)
            for config in rest:
                if len(supported) == count:
                    break
                if config in space and config not in known:
                    known.add(config)
                    supported.append(config)
        return supported

    def _weigh(self, table: _Table, shape: MoeShape, gemm: Gemm) -> list[tuple[float, dict[int, int]]]:
        """The files that count for a shape; kept, since a ranking must fit a slice."""
        if (shape, gemm) not in self._weighed:
            weighed = [(self._weight(file, shape, gemm), rows) for file, rows in table.files]
            least = _LEAST_WEIGHT * max((weight for weight, _ in weighed), default=0.0)
            self._weighed[shape, gemm] = [(weight, rows) for weight, rows in weighed if weight >= least]
        return self._weighed[shape, gemm]

    def _weight(self, file: Winners, shape: MoeShape, gemm: Gemm) -> float:
        weight = math.exp(
            -_PER_OCTAVE_OF_E * abs(math.log2(file.E / shape.E)) - _PER_OCTAVE_OF_N * abs(math.log2(file.N / shape.N))
        )
        if (file.E, file.N) == (shape.E, shape.N):
            weight *= _SAME_SHAPE
        if gemm not in file.gemms:
            weight *= _OTHER_GEMM
        if self._device_name and file.device_name != self._device_name:
            families = {_family(file.device_name), _family(self._device_name)}
            if len(families) > 1:
                weight *= _OTHER_VENDOR if "other" in families else _OTHER_FAMILY
        return weight


def find_files(configs_folder: Path) -> tuple[ConfigFile, ...]:
    """The config files of SGLang's folder of ``triton_X_Y_Z`` folders by name alone; none where it is missing."""
    found = []
    for path in sorted(configs_folder.glob("triton_*/*.json")):
        if (name := parse_name(path.name)) is not None:
            selector = (name.dtype, name.block_shape is not None, name.per_channel_quant)
            found.append(ConfigFile(path, name.E, name.N, name.device_name, selector, name.down))
    return tuple(found)


def read_winners(file: ConfigFile, *, with_down: bool) -> Winners | None:
    """The rows of a file; rows that are not understood are passed over, and so is a file that cannot be read.

    with_down: the down GEMM has a file of its own beside this one.
    """
    gemms: tuple[Gemm, ...] = ("down",) if file.down else ("up",) if with_down else ("up", "down")
    try:
        content = msgspec.json.decode(file.path.read_bytes(), type=dict[str, msgspec.Raw])
    except (OSError, msgspec.DecodeError) as error:
        logger.debug("config file %s passed over: %s", file.path, error)
        return None
    rows = ((int(m), _config(raw)) for m, raw in content.items() if m.isdecimal() and int(m) > 0)
    return Winners(file.E, file.N, file.device_name, gemms, tuple((m, c) for m, c in rows if c is not None))


def dtype_class(shape: MoeShape) -> DtypeClass:
    """The class whose winners carry over to this shape."""
    return (shape.dtype, bool(shape.block_shape and all(shape.block_shape)), shape.per_channel_quant)


def _own_weight(other: MoeShape, shape: MoeShape) -> float:
    fades = (
        (_PER_OCTAVE_OF_E, other.E, shape.E),
        (_PER_OCTAVE_OF_N, other.N, shape.N),
        (_PER_OCTAVE_OF_K, other.K, shape.K),
        (_PER_OCTAVE_OF_TOP_K, other.top_k, shape.top_k),
    )
    weight = _OWN * math.exp(-sum(fade * abs(math.log2(theirs / ours)) for fade, theirs, ours in fades))
    return weight * (_SAME_SHAPE if other == shape else 1.0)


def _key(file: ConfigFile) -> tuple[str, str]:
    return file.path.parent.name, file.path.name.removesuffix(".json").removesuffix("_down")


def _config(raw: msgspec.Raw) -> KernelConfig | None:
    try:
        row = msgspec.json.decode(raw, type=dict[str, Any])
        tiles = {key: value for key, value in row.items() if key in AXES}  # not USE_TMA, waves_per_eu, ...
        return filled(KernelConfig.from_dict(tiles))
    except (msgspec.DecodeError, ValueError):
        return None


@lru_cache
def _family(device_name: str) -> str:
    return next((name for name, pattern in _FAMILIES if pattern.search(device_name)), "older")
