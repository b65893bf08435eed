"""What ``gpu_ranks.py`` puts into the schedulers: different tables on the ranks, graphs that take notes.

As a SGLang plugin it acts on what its environment asks for, and on nothing else.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any


def register() -> None:
    """The entry point; scheduler processes only."""
    if multiprocessing.parent_process() is None or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    if os.environ.get("RANKS_PROBE_DIFFER"):
        _serve_on_even_gpus_only()
    if folder := os.environ.get("RANKS_PROBE_GRAPHS"):
        threading.Thread(target=_lend_graphs, args=(Path(folder),), daemon=True).start()
        _count_met(Path(folder))


def _serve_on_even_gpus_only() -> None:
    """Deliberately different tables: stored rows on one rank, SGLang's own configs on the other."""
    from sglang_moe_autotune.overlay import Overlay  # noqa: PLC0415 - in schedulers only

    publish = Overlay.publish_stored

    def publish_on_some(self: Any, contents: Any) -> None:
        import torch  # noqa: PLC0415 - imported long before

        if torch.cuda.current_device() % 2 == 0:
            publish(self, contents)

    Overlay.publish_stored = publish_on_some  # type: ignore[method-assign]


def _count_met(folder: Path) -> None:
    """How many requests came while a slice ran on this rank: what is received right after a pass that did work."""
    from sglang_moe_autotune.serving import Serving  # noqa: PLC0415 - in schedulers only

    idle, requests = Serving.idle, Serving.requests
    count = {"met": 0, "requests": 0}
    worked = False

    def noted_idle(self: Any, scheduler: Any) -> bool:
        nonlocal worked
        worked = idle(self, scheduler)
        return worked

    def noted_requests(self: Any, received: Any) -> None:
        nonlocal worked
        users = sum(type(one).__name__ == "TokenizedGenerateReqInput" for one in received)
        count["requests"] += users
        count["met"] += users if worked else 0
        worked = False
        requests(self, received)

    Serving.idle, Serving.requests = noted_idle, noted_requests  # type: ignore[method-assign]
    threading.Thread(target=_write_met, args=(folder, count), daemon=True).start()


def _write_met(folder: Path, count: dict[str, int]) -> None:
    from sglang_moe_autotune import plugin  # noqa: PLC0415 - in schedulers only

    while True:
        time.sleep(0.2)
        try:
            rank = plugin.serving().place.rank
        except RuntimeError:
            continue
        part = folder / f".met-{os.getpid()}.part"
        part.write_text(json.dumps({f"{name} {rank}": number for name, number in count.items()}))
        part.replace(folder / f"met-{rank}.json")


class NotedGraphs:
    """Notes when it was told to capture, on which rank; then does it: the graphs of these sizes in SGLang's order.
    Ready once the file ``ready-RANK`` is there."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._ready = False
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while not self._ready:
            self._ready = (self._folder / f"ready-{self._rank}").exists()
            time.sleep(0.1)

    def ready(self) -> bool:
        return self._ready

    def capture(self, sizes: tuple[int, ...]) -> None:
        note = {"rank": self._rank, "sizes": list(sizes), "unix_s": time.time()}
        with (self._folder / "captured.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(note) + "\n")
        self._capture(set(sizes))

    def _capture(self, tokens: set[int]) -> None:
        from sglang_moe_autotune import plugin  # noqa: PLC0415 - in schedulers only

        done: dict[str, dict[str, Any]] = {}
        try:
            for some in plugin.serving().recapture._graphs:
                for size in some.sizes():
                    if size.M in tokens:
                        begun_s = time.perf_counter()
                        reason = some.capture(size.size)
                        done[str(size)] = {"reason": reason, "ms": 1e3 * (time.perf_counter() - begun_s)}
        finally:
            with (self._folder / "recaptured.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"rank": self._rank, "done": done}) + "\n")

    def release(self) -> None:
        """Nothing is held."""


def _lend_graphs(folder: Path) -> None:
    from sglang_moe_autotune import plugin  # noqa: PLC0415 - in schedulers only

    while True:
        try:
            peers = plugin.serving().peers
        except RuntimeError:
            peers = None
        if peers is not None:
            peers.graphs = NotedGraphs(folder, peers.place.rank)
            return
        time.sleep(0.2)
