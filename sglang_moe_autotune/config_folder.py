"""SGLang's folder of config files, read as its own lookup reads it: for a shape and an M, which file and row.

Neither SGLang nor Triton is imported; the folder is found beside the installed package.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from sglang_moe_autotune import doctor
from sglang_moe_autotune.sglang_json import Rows, file_name, folder_name, parse
from sglang_moe_autotune.shapes import ConfigPair

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sglang_moe_autotune.records import Origin
    from sglang_moe_autotune.shapes import MoeShape


_OF_0_5_11 = ("triton_3_4_0", "triton_3_3_1", "triton_3_2_0", "triton_3_1_0")
"""the only other versions that this release looks for; later ones take whatever is there"""


class StockAnswer(NamedTuple):
    """What a file of SGLang says for one M."""

    origin: Origin
    """``exact`` or ``fallback``"""
    path: Path
    key: int
    """the M of the row: the nearest that the file has"""
    pair: ConfigPair


def where(environ: Mapping[str, str]) -> Path | None:
    """The folder ``configs`` that a server started with ``environ`` in this Python would read."""
    if root := environ.get("SGLANG_MOE_CONFIG_DIR"):
        return Path(root) / "configs"
    installed = doctor.sglang_root()
    return None if installed is None else installed / doctor.CONFIGS


def readable(folder: Path | None) -> bool:
    """Can the folder be listed?"""
    return folder is not None and _versions(folder) is not None


def answer(folder: Path, triton: str, shape: MoeShape, device_name: str, M: int) -> StockAnswer | None:  # noqa: N803
    """What SGLang's files say, None where it would fall back to its heuristic (or cannot read the file)."""
    found = _table(folder, triton, file_name(shape, device_name))
    if found is None:
        return None
    origin, path, rows = found
    key = _nearest(rows, M)
    up = rows[key]
    below = _table(folder, triton, file_name(shape, device_name, down=True))
    down = up if below is None else below[2][_nearest(below[2], M)]
    return StockAnswer(
        origin, path, key, ConfigPair(up, msgspec.structs.replace(down, BLOCK_SIZE_M=up.BLOCK_SIZE_M))
    )


def _nearest(rows: Rows, m: int) -> int:
    return min(rows, key=lambda key: abs(key - m))


def _table(folder: Path, triton: str, name: str) -> tuple[Origin, Path, Rows] | None:
    """The file of this Triton, else of the newest other one that has it."""
    own = folder_name(triton)
    others = [version for version in _versions(folder) or [] if version != own]
    if doctor.version_of("sglang") == "0.5.11":
        others = [version for version in others if version in _OF_0_5_11]
    for version in (own, *others):
        path = folder / version / name
        try:
            rows = parse(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
        if isinstance(rows, dict) and rows:
            return ("exact" if version == own else "fallback"), path, rows
    return None


def _versions(folder: Path) -> list[str] | None:
    """The folders of Triton versions, newest first; None where the folder cannot be listed."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return None
    plain = [name for name in names if re.fullmatch(r"triton_[0-9]+(_[0-9]+)*", name)]
    return sorted(plain, key=lambda name: tuple(map(int, name.split("_")[1:])), reverse=True)
