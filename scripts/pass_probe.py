"""Notes each pass of tuning that took longer than it may, with the stacks of all threads while it did. Where several
slices were held in one go, the stacks are those of all of them.

As a SGLang plugin it does so in schedulers, into the folder that ``PASS_PROBE_NOTES`` names, and nothing without it. It
takes SIGALRM and the real-time timer. The interpreter is not needed for a sample: it shows who has it.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import call_watch

SAMPLES_S = 0.003, 0.002
"""into a pass: the first one, and how often then"""
_BYTES = 4 << 20
"""of samples that are read: a server has many threads, and faulthandler writes the first one, which serves, last"""
_FRAMES = 5
_RESTING = ("wait", "select", "sleep", "poll", "accept", "get", "read", "_recv", "recv", "epoll", "run_forever")
"""innermost functions of threads that wait; what they wait for says nothing"""


def register() -> None:
    """The entry point; scheduler processes only."""
    folder = os.environ.get("PASS_PROBE_NOTES")
    if folder and multiprocessing.parent_process() is not None and "sglang.srt.managers.scheduler" in sys.modules:
        _watch(Path(folder))


def _watch(folder: Path) -> IO[bytes]:
    """The file that samples go to."""
    from sglang_moe_autotune.pace import Watch  # noqa: PLC0415 - in schedulers only
    from sglang_moe_autotune.serving import Serving  # noqa: PLC0415 - as above

    idle, observe = Serving.idle, Watch.observe
    samples = (folder / f"samples-{os.getpid()}").open("w+b", buffering=0)
    faulthandler.register(signal.SIGALRM, samples, all_threads=True)
    over: list[dict[str, Any]] = []

    def noted_observe(self: Any, taken_us: float, bound: float, now_s: float, did: str = "") -> Any:
        if taken_us > bound:
            over.append({"now_s": round(now_s, 3), "us": round(taken_us), "bound_us": round(bound), "did": did})
        return observe(self, taken_us, bound, now_s, did)

    def watched_idle(self: Any, scheduler: Any) -> bool:
        own_s, began_s = time.thread_time(), time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, *SAMPLES_S)
        try:
            return idle(self, scheduler)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            if over:
                notes = {"computed_us": round(1e6 * (time.thread_time() - own_s)), "threads": _stacks(samples)}
                with (folder / f"long-{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(one | notes) + "\n" for one in over)
                over.clear()
            elif time.monotonic() - began_s > SAMPLES_S[0]:
                _stacks(samples)  # of a pass that was short enough after all

    Watch.observe = noted_observe  # type: ignore[method-assign]
    Serving.idle = watched_idle  # type: ignore[method-assign]
    return samples


def _stacks(samples: IO[bytes]) -> list[str]:
    """The innermost frames of each thread that did not rest, in each sample; this one's first."""
    text = os.pread(samples.fileno(), _BYTES, 0).decode(errors="replace")
    samples.seek(0)
    samples.truncate()
    return told(text, threading.get_ident(), {thread.ident: thread.name for thread in threading.enumerate()})


def told(text: str, own: int, names: dict[int | None, str]) -> list[str]:
    """Lines for people out of what faulthandler writes."""
    lines = []
    for ident, frames in call_watch.sampled(text):
        if ident == own or (frames and not frames[0][2].startswith(_RESTING)):
            at = call_watch.in_a_line(frames[:_FRAMES])
            lines.append(f"{'serving' if ident == own else names.get(ident, hex(ident))}: {at}")
    return lines
