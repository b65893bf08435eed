"""An observer beside the plugin, for ``bench_serving.py``: what a server does, on the clock that all processes share.

As a SGLang plugin it writes events, four 64-bit numbers each, to ``SERVING_PROBE/<role>.events``: in the launcher
before and after a request is handed to the scheduler, in the scheduler when it is received, when batches begin and
end, and when an idle pass of the plugin did work. Commands lie as files in the same folder and are answered beside
them.
"""

from __future__ import annotations

import array
import collections
import copy
import importlib
import inspect
import json
import multiprocessing
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import steady_probe

if TYPE_CHECKING:
    from collections.abc import Callable

SLICE, RECEIVED, BATCH, RESULT, LEARNED, SENT, INTRUDED, HANDED, STEP, TURN = range(1, 11)
"""kinds of events: (kind, begin_ns, end_ns, value). STEP is (kind, begin_ns, block, requests that decode, 0 for another
batch): a batch that began while tuning is switched between steps. TURN is a turn of one of the plugin's threads."""

FLIPS = "flips"
"""a pipe that is told of each switch between steps"""
SEED = 0
"""of the coin that orders these blocks"""

PREFIX = "bench-"
"""of a request's id; a number follows"""

_BLOCKS, _CALLS = 15, 1000
_PRIOR = 2
"""place of the prior among a tuner's arguments"""
_now = time.monotonic_ns
_events: collections.deque[tuple[int, int, int, int]] = collections.deque()


def number_of(rid: Any) -> int:
    """The number of one of the bench's own requests, -1 for others (health probes)."""
    text = str(rid)
    return int(text.removeprefix(PREFIX)) if text.startswith(PREFIX) else -1


def decode(text: bytes) -> list[tuple[int, int, int, int]]:
    """The events of a file, in the order of their ends; a last one that was being written is left out."""
    numbers = array.array("q")
    numbers.frombytes(text[: len(text) // 32 * 32])
    return list(zip(numbers[0::4], numbers[1::4], numbers[2::4], numbers[3::4], strict=True))


def register() -> None:
    """The entry point, in the launcher and in schedulers."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - there is an SGLang here

    folder = Path(os.environ["SERVING_PROBE"])
    if multiprocessing.parent_process() is None:
        tokenizer = "sglang.srt.managers.tokenizer_manager.TokenizerManager._send_one_request"
        HookRegistry.register(tokenizer, _on_sent, HookType.BEFORE)
        HookRegistry.register(tokenizer, _on_handed, HookType.AFTER)
        threading.Thread(target=_write, args=(folder / "launcher.events",), daemon=True).start()
        return
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}.process_input_requests", _on_received, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}.run_batch", _on_batch, HookType.BEFORE)
    HookRegistry.register(f"{scheduler}.process_batch_result", _on_result, HookType.AFTER)
    HookRegistry.register(f"{scheduler}.on_idle", _on_idle, HookType.BEFORE)
    threading.Thread(target=_write, args=(folder / "scheduler.events",), daemon=True).start()
    threading.Thread(target=_listen, args=(folder,), daemon=True).start()
    if os.environ.get("SERVING_PROBE_STOCK") != "1":
        _watch_plugin()


def _write(path: Path) -> None:
    with path.open("ab", buffering=0) as file:
        while True:
            time.sleep(0.2)
            numbers = array.array("q")
            while _events:
                numbers.extend(_events.popleft())
            file.write(numbers.tobytes())


# -- what is observed ----------------------------------------------------------------------------------------------

_running = {"batches": 0}
_counts = {"passes": 0}


def _on_sent(_manager: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
    at = _now()
    _events.append((SENT, at, at, number_of(getattr(request, "rid", ""))))


def _on_handed(_result: Any, _manager: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
    at = _now()
    _events.append((HANDED, at, at, number_of(getattr(request, "rid", ""))))


def _on_received(_scheduler: Any, requests: Any, *_args: Any, **_kwargs: Any) -> None:
    if requests:
        at = _now()
        for request in requests:
            _events.append((RECEIVED, at, at, number_of(getattr(request, "rid", ""))))


def _on_batch(_scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    _running["batches"] += 1
    at = _now()
    _events.append((BATCH, at, at, len(batch.reqs)))
    alternation: steady_probe.Alternation | None = _memory.get("alternation")
    if alternation is not None:
        decoding = len(batch.reqs) if batch.forward_mode.is_decode() else 0
        _events.append((STEP, at, alternation.step(), decoding))


def _on_result(_result: Any, _scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    _running["batches"] -= 1
    at = _now()
    _events.append((RESULT, at, at, len(batch.reqs)))


def _watch_plugin() -> None:
    from sglang_moe_autotune import live  # noqa: PLC0415 - schedulers only
    from sglang_moe_autotune.breath import Breath  # noqa: PLC0415 - as above
    from sglang_moe_autotune.ranks import Ranks  # noqa: PLC0415 - as above
    from sglang_moe_autotune.serving import Serving  # noqa: PLC0415 - as above
    from sglang_moe_autotune.store import Store  # noqa: PLC0415 - as above
    from sglang_moe_autotune.tuner import Tuner  # noqa: PLC0415 - as above

    breathe = Breath.__call__
    idle, submit, add, make, learn = Serving.idle, Store.submit, Tuner.add, Tuner.__init__, Tuner.learn

    def watched_idle(self: Any, scheduler: Any) -> bool:
        begin = _now()
        worked = idle(self, scheduler)
        if worked:
            _counts["passes"] += 1
            entry = getattr(self.tuner, "_current", None)
            _events.append((SLICE, begin, _now(), 0 if entry is None else entry.M))
            if _running["batches"]:
                _events.append((INTRUDED, begin, _now(), _running["batches"]))
        return worked

    def watched_submit(self: Any, *args: Any, record: Any = None, **kwargs: Any) -> Any:
        if record is not None:
            _events.append((LEARNED, _now(), record.M, int(record.verdict == "faster")))
        return submit(self, *args, record=record, **kwargs)

    def watched_add(self: Any, shape: Any, M: int, baseline: Any) -> None:  # noqa: N803 - the field's name for it
        _memory.setdefault("added", {})[shape, M] = baseline
        add(self, shape, M, baseline)

    def watched_make(self: Any, *args: Any, **kwargs: Any) -> None:
        if "made" not in _memory:
            _memory["made"], _memory["prior"] = (args, kwargs), copy.deepcopy(args[_PRIOR])
        make(self, *args, **kwargs)

    def watched_learn(self: Any, record: Any) -> None:
        if record.unix_s >= _memory.get("forgot_unix_s", 0.0):  # what is forgotten still lies in the store
            learn(self, record)

    def held_turn(turn: Callable[..., Any]) -> Callable[..., Any]:
        def held(*args: Any, **kwargs: Any) -> Any:
            _hold.wait()
            begin = _now()
            try:
                return turn(*args, **kwargs)
            finally:
                _events.append((TURN, begin, _now(), 0))

        return held

    def held_breath(self: Any) -> None:
        _hold.wait()
        breathe(self)

    live._turn, Ranks.turn = held_turn(live._turn), held_turn(Ranks.turn)
    Breath.__call__ = held_breath
    Serving.idle, Store.submit = watched_idle, watched_submit
    Tuner.add, Tuner.__init__, Tuner.learn = watched_add, watched_make, watched_learn


# -- commands --------------------------------------------------------------------------------------------------------

_memory: dict[str, Any] = {}
_hold = steady_probe.Hold()
_pending: collections.deque[tuple[str, Path]] = collections.deque()


def _listen(folder: Path) -> None:
    """A file ``NAME.ask`` is a command; its answer is ``NAME.json``."""
    while True:
        time.sleep(0.05)
        for path in folder.glob("*.ask"):
            command = path.stem
            path.unlink(missing_ok=True)
            known = {"memory": memory, "passes": passes, "settle": settle, "alternate": lambda: alternate(folder)}
            if (wanted := known.get(command.partition("-")[0])) is not None:
                _answer_by(wanted, folder / command)
            else:
                _pending.append((command, folder / command))


def _answer(path: Path, value: Any) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(value))
    temporary.replace(path.with_suffix(".json"))


def _on_idle(scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Commands that belong on the serving thread."""
    if _pending:
        command, path = _pending.popleft()
        known = {"forget": forget, "renew": renew, "micro": micro}
        _answer_by(lambda: known[command.partition("-")[0]](scheduler), path)


def _answer_by(function: Callable[[], Any], path: Path) -> None:
    try:
        _answer(path, function())
    except Exception as error:  # noqa: BLE001 - the server must not die of what asks it
        _answer(path, {"error": f"{type(error).__name__}: {error}"})


def memory() -> dict[str, int]:
    """By the driver's count. From any thread."""
    free, total = sys.modules["torch"].cuda.mem_get_info()
    return {"free": free, "total": total}


def passes() -> dict[str, int]:
    """Passes of tuning so far, and pauses that the plugin's watch over itself has made. From any thread."""
    from sglang_moe_autotune import plugin  # noqa: PLC0415 - schedulers only

    return {"passes": _counts["passes"], "pauses": plugin.serving().watch.pauses}


def alternate(folder: Path) -> dict[str, bool]:
    """From the next batch on tuning is switched on and off between steps. From any thread."""
    settle()
    flips = steady_probe.Flips(folder / FLIPS)
    _memory["alternation"] = steady_probe.Alternation(SEED, steady_probe.put_plugin(), _hold, flips)
    return {"compile_processes_watched": flips.heard}


def settle() -> dict[str, int]:
    """Tuning stays on. From any thread."""
    alternation: steady_probe.Alternation | None = _memory.pop("alternation", None)
    return {"blocks": 0 if alternation is None else alternation.end()}


def forget(scheduler: Any) -> dict[str, int]:
    """A tuner that has learned nothing takes over, with every M that was ever met in its queue. What was compiled for
    the one before is there still."""
    from sglang_moe_autotune import plugin  # noqa: PLC0415 - schedulers only

    serving = plugin.serving()
    serving.tuner.abandon()
    _memory["forgot_unix_s"] = time.time()
    install(serving, *fresh_tuner(serving))
    for (shape, m), baseline in list(_memory["added"].items()):
        serving.tuner.experience(shape)  # its space takes longer to make than a pass may: a server does it at its start
        serving.tuner.add(shape, m, baseline)
    serving.budget.spent_until(0.0)
    return renew(scheduler)


def renew(_scheduler: Any) -> dict[str, int]:
    """Tuning goes on where the plugin has put a stop to itself: a pause of its watch ends, and the next one is as short
    as a first one. Requests then meet more passes than in a server that is left alone, not fewer."""
    from sglang_moe_autotune import pace, plugin  # noqa: PLC0415 - schedulers only

    serving = plugin.serving()
    watch = serving.watch
    lifted = watch.pause is not None
    watch.pause, watch._paused_until_s, watch._pause_s = None, float("-inf"), pace._FIRST_PAUSE_S
    return {"queued": len(serving.tuner.snapshot().queue), "lifted": int(lifted)}


def fresh_tuner(serving: Any) -> tuple[Any, Any]:
    """A tuner as the first one was made, and its agenda, in which nothing is queued."""
    from sglang_moe_autotune.agenda import Agenda  # noqa: PLC0415 - schedulers only
    from sglang_moe_autotune.tuner import Tuner  # noqa: PLC0415 - as above

    args, kwargs = _memory["made"]
    agenda = Agenda()
    agenda.admits, agenda.sharing = serving.agenda.admits, serving.agenda.sharing
    args = (*args[:_PRIOR], copy.deepcopy(_memory["prior"]), *args[_PRIOR + 1 :])
    return Tuner(*args, **{**kwargs, "agenda": agenda}), agenda


def install(serving: Any, tuner: Any, agenda: Any) -> None:
    """In the place of the tuner that there is, also with the peers, through which each step goes."""
    serving.tuner, serving.agenda = tuner, agenda
    serving.doubts._tuner = tuner  # it counts the GPU seconds of its checks there
    if (peers := serving.peers) is not None:
        peers.abandon()
        peers._tuner, peers._agenda = tuner, agenda
        peers._wish_at_s, peers._leased = 0.0, None


def turns(functions: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Nanoseconds a call of each, the median of blocks made in turn."""
    found: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(_BLOCKS):
        for name, function in functions.items():
            begun = time.perf_counter_ns()
            for _ in range(_CALLS):
                function()
            found[name].append((time.perf_counter_ns() - begun) / _CALLS)
    return {name: statistics.median(values) for name, values in found.items()}


def micro(scheduler: Any) -> dict[str, Any]:
    """Costs of the hooks on the thread that serves: lookups, and an idle pass with nothing to tune as the loop meets it
    (``hooked``) and where it does not rest (``looking``)."""
    from sglang_moe_autotune import plugin, releases  # noqa: PLC0415 - schedulers only
    from sglang_moe_autotune.layers import call_key  # noqa: PLC0415 - as above
    from sglang_moe_autotune.shapes import ConfigPair, KernelConfig  # noqa: PLC0415 - as above

    serving = plugin.serving()
    hooked = type(scheduler).maybe_sleep_on_idle
    stock = inspect.unwrap(hooked)
    kept, asked = (serving.tuner, serving.agenda), serving.switch.asked
    found: dict[str, Any] = {"calls": _BLOCKS * _CALLS, "sleeps": scheduler.idle_sleeper is not None}
    if scheduler.idle_sleeper is None:
        serving.tuner.abandon()
        idle: dict[str, dict[str, float]] = {}

        def looking() -> None:
            serving._rest_until_s = 0.0
            hooked(scheduler)

        for state, level in (("nothing left", "on"), ("switched off", "rows")):
            install(serving, *fresh_tuner(serving))
            serving.switch.asked = level
            passes = {"hooked": lambda: hooked(scheduler), "looking": looking, "stock": lambda: stock(scheduler)}
            idle[state] = turns(passes)
        install(serving, *kept)
        serving.switch.asked = asked
        found["idle_ns"] = idle
    shape = next(iter(_memory["added"]))[0]
    look, plain = importlib.import_module(releases.LOOKUP.module).try_get_optimal_moe_config, releases.stock_lookup()
    row = KernelConfig(32, 64, 64, 1, 4, 3)
    hit, miss = 37, 39
    common = {"block_shape": list(shape.block_shape) if shape.block_shape else None, "return_down_config": True}
    arguments = (shape.w1_shape, shape.w2_shape, shape.top_k, shape.dtype)
    serving.lookup.publish([(call_key(shape), hit, ConfigPair(row, row))])
    try:
        found["lookup_ns"] = turns({
            "hooked hit": lambda: look(*arguments, hit, **common),
            "stock on the same M": lambda: plain(*arguments, hit, **common),
            "hooked miss": lambda: look(*arguments, miss, **common),
            "stock on a miss": lambda: plain(*arguments, miss, **common),
        })  # fmt: skip
    finally:
        serving.lookup.publish([(call_key(shape), hit, None)])
    return found
