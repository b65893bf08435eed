"""An SGLang whose source was found to fit, remembered by the hashes of what was read of it.

Reading and hashing some thirty files takes milliseconds, parsing them up to a second or so of a start.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from sglang_moe_autotune import fit, whole_file
from sglang_moe_autotune.source import Source, UnreadError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sglang_moe_autotune.contract import Part

FOLDER: Final = "vetted"
_RULES: Final = ("contract.py", "graph_contract.py", "targets.py", "fit.py", "source.py", "kernel_source.py")
"""files of this package that the answer hangs on"""
_MOST_MODULES: Final = 1000


class _Vetted(msgspec.Struct, frozen=True):
    modules: dict[str, str]
    """SHA-256 of each module's file by its name; "" where there is none"""


def lacks(root: Path | None, source: Source, parts: Iterable[Part], *, keep: bool = True) -> list[str]:
    """What this source lacks of these parts of the contract, nothing where it fits, or where it cannot be read.

    root: of the store, where an answer of "nothing" is looked for, and kept where ``keep``. Raises no OSError.
    """
    parts = tuple(parts)
    path = None if root is None else root / FOLDER / _name(parts)
    if path is not None and _holds(path, source):
        return []
    found = fit.examine(source, parts).values()
    lacking = [why for part in found for why in part.lacks]
    if path is not None and keep and not lacking and not any(part.unread for part in found):
        with contextlib.suppress(OSError):  # the next start looks again
            path.parent.mkdir(parents=True, exist_ok=True)
            whole_file.replace(path, msgspec.json.encode(_Vetted(source.read)))
    return lacking


def _name(parts: tuple[Part, ...]) -> str:
    """Of the file: another one for other rules, another Python, or another release of SGLang."""
    try:
        release = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        release = ""
    digest = hashlib.sha256(repr((parts, release, sys.version_info[:2])).encode())
    for name in _RULES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    return f"{digest.hexdigest()[:16]}.json"


def _holds(path: Path, source: Source) -> bool:
    """Is everything as it was when it was found to fit?"""
    try:
        read = whole_file.read(path, follow=False)
        modules = {} if read is None else msgspec.json.decode(read[0], type=_Vetted).modules
        return 0 < len(modules) < _MOST_MODULES and all(source.digest(name) == of for name, of in modules.items())
    except (OSError, UnreadError, ValueError):
        return False
