"""The parts of a script that runs on a machine lent by the minute: what each found is on disk when it ends, one that
fails does not take the others along, and none runs past the time that was given."""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

BUDGET_S = 540.0
"""of a whole script, by default: machines are lent for ten minutes at a time, and unpacking takes some of them"""
_LAST_WORD_S = 15.0
"""after the budget, for a part that has its own eye on the clock to come to its end"""
_MOST_TEXT = 4000


def end_on_terminate() -> None:
    """A SIGTERM ends this process as an exception does, so that the servers it started are ended too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def of_this_checkout() -> None:
    """End the process where the package that would be measured is not the one beside these scripts."""
    import sglang_moe_autotune  # noqa: PLC0415 - not needed by whoever only keeps time

    root = Path(__file__).resolve().parent.parent
    if Path(str(sglang_moe_autotune.__file__)).resolve().parent.parent != root:
        sys.exit(f"{sglang_moe_autotune.__file__} would be measured: put {root} first in PYTHONPATH")


class OverError(BaseException):
    """Raised in the middle of a part by the clock. No ``Exception``: a loop that goes on after those must end too."""


class Parts:
    """Runs parts, and keeps what they found in one JSON file, written after each of them.

    found: the file's content; ``seconds`` in it has those of each, ``faults`` the traceback of those that failed.
    """

    def __init__(self, path: Path, budget_s: float, found: dict[str, Any] | None = None) -> None:
        self.path, self._until_s = path, time.monotonic() + budget_s
        self.found: dict[str, Any] = {} if found is None else found
        self.found.setdefault("seconds", {})
        self.found["faults"] = {}
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left, 0 at the least."""
        return max(0.0, self._until_s - time.monotonic())

    @property
    def failed(self) -> list[str]:
        """Names of the parts that raised, ran out of time or were left out."""
        return list(self.found["faults"])

    def write(self) -> None:
        """The file as of now; for parts that are long."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.found, indent=1, default=str) + "\n")
        part.replace(self.path)

    def run(self, name: str, function: Callable[[], object], need_s: float = 0.0) -> bool:
        """One part; False where it failed. need_s: with less time than this left it is not begun, and counts as failed.
        Parts may lie within parts."""
        if self.left_s < max(need_s, 1.0):
            self._fail(name, f"not begun: {self.left_s:.0f} s were left, {need_s:.0f} are needed")
            return False
        print(f"== {name}, {self.left_s:.0f} s are left", flush=True)
        begun_s = time.monotonic()
        before = signal.signal(signal.SIGALRM, _over)
        outer = signal.setitimer(signal.ITIMER_REAL, self.left_s + _LAST_WORD_S)
        try:
            function()
        except (Exception, SystemExit, OverError):  # noqa: BLE001 - told, and the other parts go on
            self._fail(name, traceback.format_exc()[-_MOST_TEXT:])
            return False
        finally:
            signal.setitimer(signal.ITIMER_REAL, self.left_s + _LAST_WORD_S if outer[0] else 0)
            signal.signal(signal.SIGALRM, before)
            self.found["seconds"][name] = round(time.monotonic() - begun_s, 1)
            self.write()
            print(f"== {name}: {self.found['seconds'][name]} s", flush=True)
        return True

    def _fail(self, name: str, text: str) -> None:
        self.found["faults"][name] = text
        print(f"== {name} FAILED: {text}", file=sys.stderr, flush=True)
        self.write()


def _over(_number: int, _frame: FrameType | None) -> None:
    raise OverError("the time is over")
