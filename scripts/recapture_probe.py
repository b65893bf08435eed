"""A driver inside the server, for ``gpu_recapture.py``: captures graphs on command, and breaks captures on command.

As a SGLang plugin it looks for a command file in idle passes (folder in RECAPTURE_PROBE), does one capture a pass, so
that SGLang's loop takes requests between two, and leaves a result file. A command is a JSON object:

    count    how often to go through the sizes
    sizes    like "prefill 1024"; all sizes where it is left out
    fault    "warm-up" or "capture": raise there, at the end of the model's forward
    clear    false: leave the index buffers as the last batch left them (the fault that clearing prevents)
    hand     true: ask for stale graphs as a user would by hand, and capture nothing here
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_EVERY_S = 0.05
_FAULTY_CALL = {"warm-up": 1, "capture": 3}
_work: Iterator[None] | None = None
_next_look_s = 0.0


def register() -> None:
    """The entry point; only scheduler processes are driven."""
    if multiprocessing.parent_process() is None or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - schedulers only

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.maybe_sleep_on_idle", on_idle, HookType.BEFORE)


def on_idle(_scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    global _work, _next_look_s  # noqa: PLW0603 - one process, one command at a time
    if _work is not None:
        try:
            over = next(_work, "done") == "done"
        except Exception as error:  # noqa: BLE001 - told to who asked; raised here it would end the server
            over = True
            _tell({"reason": f"{type(error).__name__}: {error}", "captures": []})
        if over:
            _work = None
        return
    if time.monotonic() < _next_look_s:
        return
    _next_look_s = time.monotonic() + _EVERY_S
    command = Path(os.environ["RECAPTURE_PROBE"]) / "command.json"
    if command.exists():
        asked = json.loads(command.read_text())
        command.unlink()
        _work = _obey(asked)


def _obey(asked: dict[str, Any]) -> Iterator[None]:
    """One capture a step; the result file at the end."""
    from sglang_moe_autotune import graphs, plugin  # noqa: PLC0415 - after the plugin's own start

    recapture = plugin.serving().recapture
    result: dict[str, Any] = {"reason": recapture.reason, "mode": recapture.mode, "captures": []}
    if asked.get("hand"):
        result["said"] = recapture.request()
    else:
        kept = graphs.clear
        if asked.get("clear") is False:
            graphs.clear = lambda _: None
        try:
            for turn in range(asked.get("count", 1)):
                for some in recapture._graphs:
                    for size in some.sizes():
                        if str(size) in asked.get("sizes", [str(size)]):
                            result["captures"].append(_capture(some, size, turn, asked.get("fault")))
                            yield
        finally:
            graphs.clear = kept
    _tell(result)


def _tell(result: dict[str, Any]) -> None:
    folder = Path(os.environ["RECAPTURE_PROBE"])
    (folder / "result.part").write_text(json.dumps(result))
    (folder / "result.part").replace(folder / "result.json")


def _capture(some: Any, size: Any, turn: int, fault: str | None) -> dict[str, Any]:
    backend = some._backend
    if fault is not None:
        backend.capture_one = _failing(backend, fault)
    begun_s, began_unix_s = time.perf_counter(), time.time()
    try:
        reason = some.capture(size.size)
    except Exception as error:  # noqa: BLE001 - as above
        reason = f"raised {type(error).__name__}: {error}"
    finally:
        if fault is not None:
            del backend.capture_one
    taken_ms = (time.perf_counter() - begun_s) * 1e3
    return {"size": str(size), "turn": turn, "ms": taken_ms, "unix_s": began_unix_s, "reason": reason}


def _failing(backend: Any, fault: str) -> Any:
    def capture_one(shape_key: Any, forward_fn: Any, *args: Any, **kwargs: Any) -> Any:
        calls = 0

        def forward() -> Any:
            nonlocal calls
            calls += 1
            output = forward_fn()
            if calls == _FAULTY_CALL[fault]:
                raise RuntimeError(f"planted by the probe in the {fault}")
            return output

        return type(backend).capture_one(backend, shape_key, forward, *args, **kwargs)

    return capture_one
