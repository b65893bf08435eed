"""The entry point in group ``sglang.srt.plugins``: which functions are hooked, and the fence around each hook.

SGLang calls ``register`` in every process before logging is set up. Hooks are registered in scheduler
processes only; everything else happens at their first calls.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import multiprocessing
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sglang_moe_autotune import controls, matrix, server_info, vetting
from sglang_moe_autotune.contract import NEEDED
from sglang_moe_autotune.settings import Settings, cache_root
from sglang_moe_autotune.source import Source
from sglang_moe_autotune.targets import (
    BATCH,
    CAPTURE,
    CAPTURE_BEFORE_0516,
    CONTROL,
    IDLE,
    LOAD,
    LOOKUP,
    RECEIVE,
    REQUESTS,
    SERVER_INFO,
    TARGETS,
    HookTarget,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_moe_autotune.serving import Serving

logger = logging.getLogger("sglang.moe_autotune")

_T = TypeVar("_T")
_serving: Serving | None = None


class Fence:
    """Keeps a fault of ours away from SGLang: logged once, then this hook stands aside for good."""

    def __init__(self, name: str, consequence: str) -> None:
        self.name, self._consequence = name, consequence
        self.broken = False

    def call(self, function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T | None:
        """``function(...)``, or None once it has ever raised."""
        if self.broken:
            return None
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - logged there
            self.trip(error)
            return None

    def trip(self, error: Exception) -> None:
        """Stand aside from now on, and log why."""
        self.broken = True
        logger.error("MoE autotune failed in its %s hook; %s.", self.name, self._consequence, exc_info=error)


_FENCES = {
    LOOKUP.name: Fence("lookup", "SGLang's own configs are used from now on"),
    IDLE.name: Fence("idle", "nothing is tuned any more, learned rows stay in use"),
    BATCH.name: Fence("batch", "nothing is tuned any more, learned rows stay in use"),
    LOAD.name: Fence("load", "nothing stored is used and nothing is tuned"),
    REQUESTS.name: Fence("request", "nothing is tuned any more, learned rows stay in use"),
    SERVER_INFO.name: Fence("server info", "/server_info does not show it any more"),
    CAPTURE.name: Fence("capture", "nothing more is tuned before the graphs are captured"),
    CONTROL.name: Fence("control", "/set_internal_state does not switch it any more, the file does"),
    RECEIVE.name: Fence("receive", "several ranks capture no graph anew in service any more"),
}
_LOOKUP_FENCE, _IDLE_FENCE = _FENCES[LOOKUP.name], _FENCES[IDLE.name]
_REQUEST_FENCE, _BATCH_FENCE = _FENCES[REQUESTS.name], _FENCES[BATCH.name]


def register() -> None:
    """Register the hooks if this is a scheduler process. Called by SGLang's plugin loader; never raises for
    what a user can cause."""
    global _serving  # noqa: PLW0603 - one server process has one plugin state, as SGLang's registry has
    settings, warnings = Settings.from_environ(os.environ)
    if settings.mode == "off" or not in_scheduler_process():
        return
    for warning in warnings:
        logger.warning("%s", warning)
    if changed := _unfit(settings):
        from sglang_moe_autotune import releases  # noqa: PLC0415 - as below

        tested = [release.version for release in matrix.load().releases]
        logger.warning(
            "MoE autotune stands aside, as if it were not installed: %s. SGLang is %s; tested are %s to %s."
            " Update sglang-moe-autotune, or run `sglang-moe-autotune doctor`.",
            "; ".join(changed), releases.version(), tested[0], tested[-1],
        )  # fmt: skip
        return

    from sglang_moe_autotune.serving import Serving  # noqa: PLC0415 - needs torch and Triton: schedulers only

    _serving = Serving(settings, hooks=hooks_in_place)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - as above

    for target, (hook, kind) in _HOOKS.items():
        HookRegistry.register(target.path, hook, HookType[kind])
    for target, (hook, kind) in _OPTIONAL_HOOKS.items():
        wanted = (hook is not on_capture or settings.startup_s > 0) and (
            hook is not on_receive or settings.recapture == "idle"  # several ranks capture again only where asked to
        )
        if wanted and _why_unusable(target) is None:
            HookRegistry.register(target.path, hook, HookType[kind])


def serving() -> Serving:
    """This process's plugin state, for tests and demonstrations. Raises RuntimeError outside a scheduler."""
    if _serving is None:
        raise RuntimeError("the plugin is active in SGLang's scheduler processes only; load it through SGLang there")
    return _serving


def in_scheduler_process() -> bool:
    """Can this process be a scheduler? SGLang spawns them, and unpickling their target imports the module.

    A process that merely imports the scheduler module, such as one that embeds the engine, is no child, or
    never calls a hooked method.
    """
    return "sglang.srt.managers.scheduler" in sys.modules and multiprocessing.parent_process() is not None


def on_lookup(
    original: Callable[..., Any],
    w1_shape: tuple[int, int, int],
    w2_shape: tuple[int, int, int],
    top_k: int,
    dtype: str | None,
    M: int,  # noqa: N803 - SGLang's name
    is_marlin: bool = False,
    block_shape: tuple[int, int] | list[int] | None = None,
    per_channel_quant: bool = False,
    return_down_config: bool = False,
) -> Any:
    """AROUND ``try_get_optimal_moe_config``: a learned row, or SGLang's answer (made to fit) and a count.

    Two calls a layer in eager batches: hence SGLang's own arguments, and a fence of two lines in place of calls.
    """
    state = _serving
    # Where an answer was made to fit, SGLang's own would end the server, also when the plugin is switched off.
    if state is not None and (is_marlin or _LOOKUP_FENCE.broken or not (state.overlays or state.lookup.fitted)):
        state = None
    if state is not None:
        try:
            # torch.Size is a tuple with an equal hash, so a table keyed by tuples finds it as it is.
            block = (block_shape[0], block_shape[1]) if block_shape else None
            key = (w1_shape, w2_shape, top_k, dtype, block, per_channel_quant)
            if state.overlays and (answer := state.lookup.answer(key, M, return_down_config)) is not None:
                return answer
        except Exception as error:  # noqa: BLE001 - logged there
            _LOOKUP_FENCE.trip(error)
            state = None
    answer = original(
        w1_shape, w2_shape, top_k, dtype, M, is_marlin, block_shape, per_channel_quant, return_down_config
    )
    if state is not None:
        try:
            fitted = state.lookup.miss(key, M, answer)
            answer = answer if fitted is None else fitted
        except Exception as error:  # noqa: BLE001 - logged there
            _LOOKUP_FENCE.trip(error)
    return answer


def on_idle(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND ``Scheduler.maybe_sleep_on_idle``: an idle pass; SGLang's own sleep only when no work is ready.

    Thousands of calls a second where nothing happens: hence a fence of two lines here too.
    """
    state = _serving
    if state is not None and not (_IDLE_FENCE.broken or _REQUEST_FENCE.broken or _BATCH_FENCE.broken):
        try:
            if state.idle(scheduler):
                return None
        except Exception as error:  # noqa: BLE001 - logged there
            _IDLE_FENCE.trip(error)
            state.stop("tuning ended with a fault; the log has it")
    return original(scheduler, *args, **kwargs)


def on_batch(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE ``Scheduler.run_batch``: count what is served, and when. Once a step: hence a fence of two lines again."""
    state = _serving
    if state is not None:
        try:
            batch = args[0] if args else _first(args, kwargs)
            if not (state.beat.goes_on(batch) or _BATCH_FENCE.broken):
                state.batch(scheduler, batch)
        except Exception as error:  # noqa: BLE001 - logged there
            _BATCH_FENCE.trip(error)
            state.stop("when requests run can no longer be followed; the log has it")


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first argument after ``self``, whatever SGLang calls it: a TypeError in a hook would be SGLang's."""
    return args[0] if args else next(iter(kwargs.values()), None)


def on_requests(_scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE ``Scheduler.process_input_requests``, in every pass: let go of the device before weights move."""
    state, requests = _serving, _first(args, kwargs)
    if requests and state is not None:
        _REQUEST_FENCE.call(state.requests, requests)
        if _REQUEST_FENCE.broken:
            state.stop("what the engine is told can no longer be followed; the log has it")


def on_receive(result: Any, *_args: Any, **_kwargs: Any) -> Any:
    """AFTER the rank that receives requests has looked for some, in every pass: where there are none, and all ranks
    are ready for it, a message to all of them. None leaves the result as it is, which on the others is None."""
    if result is None or result or _serving is None or _serving.votes.ballot is None:
        return None
    return _FENCES[RECEIVE.name].call(_serving.announce)


def on_load(_result: Any, model_runner: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER ``ModelRunner.load_model``: the weights are there and no graph is captured yet."""
    if _serving is not None:
        _FENCES[LOAD.name].call(_serving.loaded, model_runner)


def on_server_info(result: Any, _scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER ``Scheduler.get_internal_state``: our part of ``/server_info``."""
    if _serving is not None:
        _FENCES[SERVER_INFO.name].call(server_info.add, result, _serving)


def on_control(_scheduler: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
    """BEFORE ``Scheduler.set_internal_state``: take what is ours out of the request."""
    if _serving is not None:
        _FENCES[CONTROL.name].call(controls.take, request, _serving)


def on_capture(model_runner: Any, *_args: Any, **_kwargs: Any) -> None:
    """BEFORE the graphs of a model are captured: the window that ``startup_s`` opens."""
    if _serving is not None:
        _FENCES[CAPTURE.name].call(_serving.before_capture, model_runner)


_OPTIONAL_HOOKS: dict[HookTarget, tuple[Callable[..., Any], str]] = {
    SERVER_INFO: (on_server_info, "AFTER"),
    CONTROL: (on_control, "BEFORE"),
    CAPTURE: (on_capture, "BEFORE"),
    CAPTURE_BEFORE_0516: (on_capture, "BEFORE"),
    RECEIVE: (on_receive, "AFTER"),
}
"""as ``_HOOKS``; these are left out where the target is gone"""

_HOOKS: dict[HookTarget, tuple[Callable[..., Any], str]] = {
    LOOKUP: (on_lookup, "AROUND"),
    IDLE: (on_idle, "AROUND"),
    BATCH: (on_batch, "BEFORE"),
    LOAD: (on_load, "AFTER"),
    REQUESTS: (on_requests, "BEFORE"),
}
"""each needed target's hook, and the name of its SGLang ``HookType``; without one of them nothing is hooked"""


def hooks_in_place() -> dict[str, bool]:
    """Hooked path -> is our function really in the chain that SGLang calls. SGLang's loader only logs a failure."""
    return {target.path: _holds(_resolve(target), hook) for target, (hook, _) in _HOOKS.items()}


def _holds(function: Any, hook: Callable[..., Any]) -> bool:
    while function is not None:
        if any(cell.cell_contents is hook for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _resolve(target: HookTarget) -> Any:
    found: Any = importlib.import_module(target.module)
    for name in target.name.split("."):
        found = getattr(found, name, None)
    return found


def _unfit(settings: Settings) -> list[str]:
    """What this SGLang lacks of what the plugin needs, nothing where it fits: the hooked functions as they are now,
    and the rest of the contract in the source. A source that cannot be read is no reason."""
    if changed := [why for target in TARGETS if (why := _why_unusable(target))]:
        return changed
    folders: list[str] = list(importlib.import_module("sglang").__path__)
    source = Source(Path(folders[0]).parent)
    return vetting.lacks(cache_root(settings, os.environ), source, NEEDED, keep=settings.mode != "read-only")


def _why_unusable(target: HookTarget) -> str | None:
    try:
        found = _resolve(target)
    except ImportError as error:
        return f"{target.module} cannot be imported ({error})"
    if not callable(found):
        return f"{target.path} is gone"
    if target.arguments is None:
        return None
    has = tuple(inspect.signature(inspect.unwrap(found)).parameters)
    return None if has == target.arguments else f"{target.path} takes ({', '.join(has)}) now"
