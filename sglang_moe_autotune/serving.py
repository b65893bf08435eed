"""One scheduler process: from its misses to published rows, and when to stand aside."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from sglang_moe_autotune import __version__, deaths, live, metrics, pace, releases, startup, switch
from sglang_moe_autotune.budget import Budget
from sglang_moe_autotune.device import make_tuner, open_device
from sglang_moe_autotune.doorbell import Doorbell
from sglang_moe_autotune.heat import Heat
from sglang_moe_autotune.idle_time import IdleTime
from sglang_moe_autotune.layers import call_key, find_layers
from sglang_moe_autotune.listener import CompileCount
from sglang_moe_autotune.marked import MarkedProvider
from sglang_moe_autotune.overlay import Overlay
from sglang_moe_autotune.recapture import Recapture
from sglang_moe_autotune.settings import Settings, cache_root
from sglang_moe_autotune.shape_notes import ShapeNotes
from sglang_moe_autotune.store import Store, file_name, relatives
from sglang_moe_autotune.switch import Switch
from sglang_moe_autotune.trials import TrialLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_moe_autotune.bench import BenchmarkProvider
    from sglang_moe_autotune.device import Device
    from sglang_moe_autotune.lookup import Call, Missed
    from sglang_moe_autotune.metrics import Metrics
    from sglang_moe_autotune.records import Origin, Record, ShapeNote
    from sglang_moe_autotune.status import State
    from sglang_moe_autotune.tuner import Step, Tuner

logger = logging.getLogger("sglang.moe_autotune")

_MAX_FAULTS = 5
_NEWS_AT_ONCE = 8
_MAX_ADDED = 1024
"""M that are tuned in one process: a server with many eager sizes meets new ones for months"""
_LONG_PREFILL = 1024
_SMALL_SCRATCH_BYTES = 128 << 20
_STATES: dict[Step, State] = {"worked": "tuning", "waiting": "waiting", "nothing": "idle"}
_ORIGIN_WORDS: dict[Origin, str] = {
    "miss": "no config file",
    "fallback": "a file of another Triton",
    "exact": "its own file",
}


class Serving:
    """The plugin's state in one process. Every method but ``__init__`` is called inside a fence."""

    def __init__(self, settings: Settings, hooks: Callable[[], dict[str, bool]]) -> None:
        self.settings = settings
        self.hooks = hooks
        self.overlay = Overlay(settings.mode, bit_equal=settings.bit_equal)
        self.lookup = self.overlay.lookup
        self.recapture = Recapture(settings, self.lookup, lambda: self.overlay.shapes)
        self.heat = Heat()
        self.compiles = CompileCount()
        self.compiles.install()
        self.overlays = True
        """False where SGLang's own answers must stand: then lookups are not even read"""
        self.switch = Switch()
        self.state: State = "idle"
        self.reason = ""
        self.store: Store | None = None
        self.tuner: Tuner | None = None
        self.device: Device | None = None
        self.root = cache_root(settings, os.environ)
        self.since_unix_s = time.time()
        self.watch = pace.Watch()
        self.mark: deaths.Mark | None = None
        self.died = ""
        """why nothing is tuned after deaths; from any thread"""
        self.slices = 0
        self.metrics: Metrics | None = None
        self.budget = Budget(settings.budget_s)
        self._never = ""
        self._deterministic = False
        self._attached = False
        self._faults = 0
        self._added = 0
        self._notes = ShapeNotes(self._submit_note, self.overlay.stock)
        self._captured: Any = {}
        self._startup_done = False
        self._doorbell: Doorbell | None = None
        self._marked: MarkedProvider | None = None
        self._window = 0
        """slices since the last request"""
        self._last_request_s = time.monotonic()
        self.idle_time = IdleTime(self._last_request_s)

    def answer(self, key: Call, M: int, return_down_config: bool) -> Any | None:  # noqa: N803
        """A learned row; None on a miss or under SGLang's own ``override_config``."""
        answer = self.lookup.answer(key, M, return_down_config)
        return None if answer is not None and releases.overridden() else answer

    def missed(self, key: Call, M: int, answer: Any) -> Any | None:  # noqa: N803
        return None if releases.overridden() else self.lookup.miss(key, M, answer)

    def batch(self, scheduler: Any, batch: Any) -> None:
        if (found := releases.batch_tokens(scheduler, batch)) is not None:
            self._last_request_s = time.monotonic()
            self.heat.batch(*found)
            if found[0] == "prefill" and found[1] >= _LONG_PREFILL and self._scratch_bytes() > _SMALL_SCRATCH_BYTES:
                self._let_go()  # it may need the memory, and takes far longer than giving it back

    def requests(self, requests: Any) -> None:
        """What the scheduler has just received: weights, caches and adapters move after this."""
        if releases.disturbs(requests):
            self._let_go()

    def switched(self) -> None:
        """Follow the switch: at the next lookup and the next idle pass. From any thread."""
        self.overlays = self.switch.level != "off" and not self._deterministic

    def stop(self, reason: str) -> None:
        """Tune no more in this process; learned rows stay in use."""
        if self.state != "off":
            self.state, self.reason = "off", reason
            self._let_go()
            self.tuner = None

    def loaded(self, model_runner: Any) -> None:
        """After the weights of a model (or of its draft model) are there, before any graph is captured."""
        if releases.deterministic():
            self.overlays, self._deterministic = False, True
            self._never = "deterministic inference is on, so SGLang's fixed configs stand"
            logger.info("MoE autotune stands aside: %s.", self._never)
            return
        fresh = list(find_layers(model_runner.model, model_runner.dtype, releases.padding()))
        self.overlay.layers.add(fresh)
        if self.device is None and fresh:
            self.start(open_device(self.settings, self.root, self.overlay.layers, self.compiles))
        elif fresh and self.store is not None:
            self.overlay.publish_stored(self.store.contents)
        self._log_start()

    def idle(self, scheduler: Any) -> bool:
        """One idle pass: at most one slice. True if it did work, so that SGLang's sleep is skipped."""
        now = time.monotonic()
        if not self._attached:
            self._attach(scheduler)
        if self.recapture.idle(scheduler, now - self._last_request_s, self._let_go, overlays=self.overlays):
            return True
        if self._never or self.tuner is None:
            return False
        if reason := self._why_not_now(scheduler, now):
            self._stand_aside(reason)
            return False
        quiet_s = now - self._last_request_s
        deep = quiet_s >= self.settings.deep_idle_s
        self.idle_time.passed(now, quiet_s, deep=deep, queued=self.state in {"tuning", "waiting"})
        if quiet_s < self.settings.grace_s:
            self.state, self._window = "busy", 0
            return False
        if self._doorbell is not None and self._doorbell.rung():
            return False
        return self._turn(self.tuner, now, deep=deep)

    def _turn(self, tuner: Tuner, now: float, *, deep: bool) -> bool:
        """At most one slice; True if it did work."""
        began_s = time.perf_counter()
        if self._take_news(now):
            self._observe(began_s, now, launched=False)
            return True
        if not self.budget.left(now):
            self._stand_aside(f"this hour's {self.settings.budget_s:g} GPU seconds are spent")
            return False
        if releases.capturing():
            self._stand_aside("graphs are being captured")
            return False
        before_s = tuner.gpu_s
        self._pace_slice()
        result = self._step(deep_idle=deep)
        self.state, self.reason = _STATES[result], ""
        if result == "worked":
            launched = tuner.gpu_s > before_s
            self.slices += launched
            self.budget.spent_until(tuner.gpu_s)
            self._observe(began_s, now, launched=launched)
        return result == "worked"

    def _why_not_now(self, scheduler: Any, now: float) -> str:
        """Why this pass launches nothing: the first reason of the table in docs/limits.md that holds."""
        return self.switch.why or self.died or self.watch.why_paused(now) or releases.why_not_now(scheduler)

    def _pace_slice(self) -> None:
        """The first slices of a window are small: a request often comes soon after another."""
        self._window += 1
        if self._window in {1, pace.SMALL_SLICES + 1} and self.device is not None:
            provider: Any = self.device.provider
            share = pace.SMALL_SHARE if self._window == 1 else 1.0
            provider.slice_us = share * self.settings.slice_us

    def _step(self, *, deep_idle: bool) -> Step:
        """One step of the tuner. A fault drops its job, and the tuner goes on with another one; after a few in a
        row it is the fence's turn."""
        assert self.tuner is not None  # noqa: S101 - for the type checker
        try:
            with self.compiles:
                return self.tuner.step(deep_idle=deep_idle)
        except Exception:
            self._faults += 1
            if self._faults >= _MAX_FAULTS:
                raise
            if self._faults == 1:
                logger.exception("MoE autotune put an M off because of a fault in tuning it.")
            return "worked"

    def _observe(self, began_s: float, now: float, *, launched: bool) -> None:
        """Note how long a pass kept the scheduler: what a request may have waited for."""
        taken_s = time.perf_counter() - began_s
        if self.metrics is not None:
            self.metrics.slices_s.append(taken_s)
        if self.overlay.source == "replayed":
            return  # a recording keeps no request waiting, and its passes are as long as the simulation takes
        launch_us = self._marked.launch_us if self._marked is not None else 0.0
        bound_us = pace.bound_us(launch_us, self.settings.slice_us, launched=launched)
        if (pause := self.watch.observe(taken_s * 1e6, bound_us, now)) is not None and self.watch.pauses == 1:
            logger.warning("MoE autotune %s, the last one %s. Status shows later pauses.", pause.reason, pause.longest)

    def _scratch_bytes(self) -> int:
        return getattr(self.device.provider, "scratch_bytes", 0) if self.device is not None else 0

    def _let_go(self) -> None:
        """Close the bench that is open, if any: its memory and its hold on weights end here."""
        if self.tuner is not None:
            self.tuner.abandon()

    def start(self, device: Device) -> None:
        """Open the store of the device's environment, publish what it holds, and get ready to tune."""
        self.device = self.overlay.begin(device)
        self.switch.of_file = switch.read(self.root)
        self.switched()
        self.died = deaths.sentence(deaths.read(self.root, file_name(device.environment)))
        if self.died:
            self.state, self.reason = "off", f"read-only: {self.died}"
            logger.warning("MoE autotune starts read-only: %s.", self.died)
        self.store = Store.open(self.root, device.environment, read_only=self.read_only)
        self.overlay.publish_stored(self.store.contents)
        if not self.read_only:
            self.mark = deaths.Mark.open(self.root, file_name(device.environment))
            self._marked = MarkedProvider(device.provider, self.mark)
            self.tuner = self.new_tuner(self._marked)
        live.start(self)

    def new_tuner(self, provider: BenchmarkProvider) -> Tuner:
        """A tuner that knows what is stored and serves what it learns."""
        assert self.device is not None  # noqa: S101 - for the type checker
        assert self.store is not None  # noqa: S101 - as above
        tried = TrialLog(self.root, self.device.environment).put
        known = filter(self.overlay.bits_hold, self.store.contents.records.values())  # others are searched again
        seeds = relatives(self.root, self.device.environment)
        return make_tuner(self.device, provider, self.settings, (known, seeds), self._learned, tried)

    def before_capture(self, model_runner: Any) -> None:
        """Once, when all that graphs need is there but the graphs."""
        if not self._startup_done:
            self._startup_done = True
            startup.tune(self, model_runner)

    @property
    def read_only(self) -> bool:
        return self.settings.mode == "read-only" or (bool(self.died) and self.tuner is None)

    def _attach(self, scheduler: Any) -> None:
        self._attached = True
        self._never = self._never or releases.why_never(scheduler.server_args)
        if self._never:
            self.state, self.reason = "off", self._never
            logger.info("MoE autotune tunes nothing in this server: %s.", self._never)
        self._doorbell = Doorbell(scheduler)
        self._captured = releases.captured_sizes(scheduler)
        self.recapture.attach(scheduler, self._doorbell, wanted=self.store is not None)
        self.metrics = metrics.of(scheduler)

    def _log_start(self) -> None:
        missing = [path for path, there in self.hooks().items() if not there]
        if missing:
            logger.warning(
                "MoE autotune %s: NOT hooked: %s. SGLang's loader says why above; see `sglang-moe-autotune doctor`.",
                *(__version__, ", ".join(missing)),
            )
            return
        shapes, rows = len(self.overlay.layers.keys), sum(len(rows) for rows in self.lookup.rows().values())
        logger.info(
            "MoE autotune %s: hooks in place; shapes on the Triton path: %d; learned rows: %d; mode %s; store %s.",
            *(__version__, shapes, rows, self.settings.mode),
            self.store.path if self.store is not None else "not opened",
        )

    def _learned(self, record: Record) -> None:
        """The tuner's sink: keep the record, and serve it where that is allowed."""
        assert self.store is not None  # noqa: S101 - for the type checker
        self._faults = 0
        held = self.store.contents.records.get((record.shape, record.M))
        self.idle_time.settled += 1
        self.store.submit(record=record)
        if record.verdict != "faster" or (held is not None and held.evidence.gain == record.evidence.gain):
            return  # nothing to serve, or a further look found nothing better than what is served
        if self.settings.mode != "restart":
            self.lookup.publish([row := (call_key(record.shape), record.M, record.pair)])
            self.recapture.adopted(*row)
        evidence = record.evidence
        logger.info(
            "MoE autotune learned %s M=%d: %.1f %% faster (%.1f -> %.1f us, at least %.1f %%), %s instead of %s.",
            *(record.shape.slug, record.M, 100 * evidence.gain, evidence.baseline_us, evidence.chosen_us),
            *(100 * evidence.gain_low, record.pair, record.baseline),
        )

    def _take_news(self, now: float) -> bool:
        """Misses and heat into the tuner, notes into the store; True if that cost what a slice may cost."""
        if self.lookup.seen:
            for miss in self.lookup.take_seen(_NEWS_AT_ONCE):
                self._add(miss)
        if served := self.heat.take(self._captured):
            self._notes.count(served)
            self.recapture.served(served)
            assert self.tuner is not None  # noqa: S101 - for the type checker
            for shape in self.overlay.shapes:
                for M, count in served.items():  # noqa: N806
                    self.tuner.heat(shape, M, count)
        return self._notes.step(now)

    def _add(self, miss: Missed) -> None:
        if (shape := self.overlay.shape_of(miss.key)) is None or self.tuner is None:
            return
        if shape not in self._notes:
            words = _ORIGIN_WORDS[self.overlay.origin(shape)]
            logger.info("MoE autotune recorded %s: SGLang has %s for it.", shape.slug, words)
            self._notes.begin(shape, self.overlay.origin(shape))
        small = self.settings.max_m >= miss.M and self._added < _MAX_ADDED
        if miss.baseline is not None and small and self.overlay.tunable(shape):
            self._added += 1
            self.tuner.add(shape, miss.M, miss.baseline)

    def _submit_note(self, note: ShapeNote) -> None:
        assert self.store is not None  # noqa: S101 - for the type checker
        self.store.submit(note=note)

    def _stand_aside(self, reason: str) -> None:
        if self.reason != reason and self.tuner is not None:
            self.tuner.abandon()
        self.state, self.reason = "standing aside", reason
