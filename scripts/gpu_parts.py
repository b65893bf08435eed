"""The parts of a script that runs on a GPU for a limited time: each is timed, and what it found is kept at once."""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LIMIT_S = 540.0
"""of a whole script, by default: machines are lent for ten minutes at a time, and unpacking takes some of them"""


class Parts:
    """Runs parts one after the other. One that raises is told with its traceback, and the others go on.

    ``found`` is written to ``path`` after each part, with ``seconds`` and ``faults`` by part in it.
    """

    def __init__(self, path: Path, found: dict[str, Any], limit_s: float = LIMIT_S) -> None:
        self.path, self.found = path, found
        self._begun_s, self._limit_s = time.monotonic(), limit_s
        found.setdefault("seconds", {})
        found.setdefault("faults", {})

    @property
    def left_s(self) -> float:
        """Until the limit."""
        return self._limit_s - (time.monotonic() - self._begun_s)

    @property
    def failed(self) -> bool:
        return bool(self.found["faults"])

    def run(self, name: str, part: Callable[[], object], need_s: float = 0.0) -> bool:
        """Run one part; False where it raised, or was left out because less than ``need_s`` is left."""
        if self.left_s < need_s:
            self._fault(name, f"left out: it needs {need_s:.0f} s, and {self.left_s:.0f} s are left")
            return False
        print(f"--- {name}, {self._limit_s - self.left_s:.0f} s after the start", flush=True)
        begun_s = time.monotonic()
        try:
            part()
        except Exception:  # noqa: BLE001 - told, and the exit status says it
            self._fault(name, traceback.format_exc())
            return False
        finally:
            self.found["seconds"][name] = round(time.monotonic() - begun_s, 1)
            print(f"    {name} took {self.found['seconds'][name]:.0f} s", flush=True)
            self.write()
        return True

    def write(self) -> None:
        """Whole or not at all."""
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self.found, indent=1, default=str))
        temporary.replace(self.path)

    def _fault(self, name: str, text: str) -> None:
        self.found["faults"][name] = text
        print(f"[FAIL] {name}: {text[-3000:]}", flush=True)
        self.write()


def end_on_terminate() -> None:
    """A SIGTERM ends this process as an exception does, so that the servers it started are ended too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
