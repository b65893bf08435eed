"""The switch: how much of the plugin is active, by a word in a file of the store's folder and by request.

The file may be written by hand, ``echo off > FOLDER/switch``: it has to work when nothing else does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, get_args

from sglang_moe_autotune import whole_file

if TYPE_CHECKING:
    from pathlib import Path

FILE: Final = "switch"

Level = Literal["off", "rows", "on"]
"""``off``: SGLang's own answers, nothing is tuned. ``rows``: learned rows are served, nothing is tuned."""

LEVELS: Final[tuple[Level, ...]] = get_args(Level)
"""from least to most"""

_MAX_BYTES: Final = 64


def parse(text: bytes) -> Level:
    """The level that a file's text names; an empty one names none, so all is on. What cannot be understood was
    written to stop something: it stops the tuning."""
    word = text.decode("utf-8", "replace").strip().lower()
    if not word:
        return "on"
    return next((level for level in LEVELS if level == word), "rows")


def read(root: Path | None) -> Level:
    """The level of the file; ``on`` where there is none. A file that cannot be read stops the tuning. Off the
    serving thread: costs file access."""
    if root is None:
        return "on"
    try:
        found = whole_file.read(root / FILE)
    except OSError:
        return "rows"
    return "on" if found is None else parse(found[0][:_MAX_BYTES])


def write(root: Path, level: Level) -> Path:
    """Set the file's level, and return its path; ``on`` takes the file away. Raises OSError."""
    path = root / FILE
    if level == "on":
        path.unlink(missing_ok=True)
    else:
        root.mkdir(parents=True, exist_ok=True)
        whole_file.replace(path, level.encode() + b"\n")
    return path


class Switch:
    """The level of one process: the lower one of the file's and of what was asked by request."""

    def __init__(self) -> None:
        self.of_file: Level = "on"
        """as the file said it when it was last read"""
        self.asked: Level = "on"
        """by request, until this process ends"""

    @property
    def level(self) -> Level:
        return min(self.of_file, self.asked, key=LEVELS.index)

    @property
    def why(self) -> str:
        """Why nothing is tuned; "" where it is on. Asked in every idle pass."""
        if self.of_file == self.asked == "on":
            return ""
        return f"switched to {self.level!r} by {self.by}"

    @property
    def by(self) -> str:
        """Who keeps it below ``on``, for people; "" where it is on."""
        who = (("the file switch in the store", self.of_file), ("a request", self.asked))
        return " and ".join(name for name, level in who if level != "on")
