"""What was checked of each SGLang release: a table that ``scripts/check_releases --record`` makes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from sglang_moe_autotune.contract import NEEDED, Part


class Release(msgspec.Struct, frozen=True, kw_only=True):
    """One release. ``lacks`` and ``ways`` are by part of the contract, parts with nothing to say left out."""

    version: str
    torch: str = ""
    """the version that its package asks for"""
    kernel: str = ""
    """``releases.kernel_hash``: releases that share it, and their Triton, share learned rows"""
    lacks: dict[Part, tuple[str, ...]] = {}
    ways: dict[Part, tuple[str, ...]] = {}
    calls: tuple[str, ...] | None = None
    """what was wrong when its lookup was called; None: it was not called"""
    loaded: str | None = None
    """"" where the whole SGLang was imported and every hook was in place; else what went wrong; None: not tried"""
    unsupported: str = ""
    """why this package does not support it, "" where it does"""

    @property
    def state(self) -> Literal["fits", "less", "aside", "unsupported"]:
        """``less``: a part is missing without which less is done; ``aside``: one that is needed is."""
        if self.unsupported:
            return "unsupported"
        if self.calls or any(part in NEEDED for part in self.lacks):
            return "aside"
        return "less" if self.lacks else "fits"


class Matrix(msgspec.Struct, frozen=True):
    """Releases from the oldest to the newest."""

    releases: tuple[Release, ...]


PATH = Path(__file__).with_name("matrix.json")


def load() -> Matrix:
    """The table that came with the package."""
    return decode(PATH.read_bytes())


def decode(text: bytes) -> Matrix:
    """Raises msgspec.MsgspecError for what is no such table."""
    return msgspec.json.decode(text, type=Matrix)


def encode(matrix: Matrix) -> bytes:
    return msgspec.json.format(msgspec.json.encode(matrix), indent=1) + b"\n"


_WORDS = {"fits": "fits", "aside": "stands aside", "unsupported": "not supported"}
_LOSSES: dict[Part, str] = {
    "graphs": "look at captured graphs",
    "recapture": "re-capture in service",
    "server info": "part in /server_info",
    "ranks": "ranks",
    "vote": "vote of ranks",
}
"""what a release goes without where a part is missing that is not needed"""


def words(release: Release) -> str:
    """How a release stands, and what it goes without."""
    if release.state != "less":
        return _WORDS[release.state]
    return f"fits, no {', no '.join(_LOSSES.get(part, part) for part in release.lacks)}"


def rows(matrix: Matrix) -> list[tuple[str, str, str, str, str, str]]:
    """For people, a row a release: version, torch, kernel, how it stands, how that was shown, ways."""
    return [
        (
            release.version,
            release.torch,
            release.kernel[:8],
            words(release),
            _shown(release),
            ", ".join(way for ways in release.ways.values() for way in ways),
        )
        for release in matrix.releases
    ]


HEADINGS = ("SGLang", "torch", "kernel", "state", "shown by", "ways")


def _shown(release: Release) -> str:
    called = ["calls"] if release.calls is not None else []
    return ", ".join(["source", *called, *(["load"] if release.loaded == "" else [])])


def markdown(matrix: Matrix) -> str:
    """The table of docs/coverage.md."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *rows(matrix)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
