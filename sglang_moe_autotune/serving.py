"""One scheduler process: from its misses to published rows, and when to stand aside."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Any

from sglang_moe_autotune import __version__, live, metrics, releases
from sglang_moe_autotune.budget import Budget
from sglang_moe_autotune.device import open_device
from sglang_moe_autotune.heat import Heat
from sglang_moe_autotune.layers import call_key, find_layers
from sglang_moe_autotune.listener import CompileCount
from sglang_moe_autotune.overlay import Overlay
from sglang_moe_autotune.prior import Prior, find_files
from sglang_moe_autotune.recapture import Recapture
from sglang_moe_autotune.settings import Settings, cache_root
from sglang_moe_autotune.shape_notes import ShapeNotes
from sglang_moe_autotune.store import Store
from sglang_moe_autotune.trials import TrialLog
from sglang_moe_autotune.tuner import Step, Tuner, TunerOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_moe_autotune.device import Device
    from sglang_moe_autotune.lookup import CallKey, Missed
    from sglang_moe_autotune.metrics import Metrics
    from sglang_moe_autotune.records import Origin, Record, ShapeNote
    from sglang_moe_autotune.status import State

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
        self.state: State = "idle"
        self.reason = ""
        self.store: Store | None = None
        self.tuner: Tuner | None = None
        self.device: Device | None = None
        self.root = cache_root(settings, os.environ)
        self.since_unix_s = time.time()
        self.idle_s = 0.0
        self.slices = 0
        self.metrics: Metrics | None = None
        self.budget = Budget(settings.budget_s)
        self._never = ""
        self._attached = False
        self._faults = 0
        self._added = 0
        self._notes = ShapeNotes(self._submit_note)
        self._captured: Any = {}
        self._last_request_s = self._last_idle_s = time.monotonic()

    def answer(self, key: CallKey, M: int, return_down_config: bool) -> Any | None:  # noqa: N803
        """A learned row; None on a miss or under SGLang's own ``override_config``."""
        answer = self.lookup.answer(key, M, return_down_config)
        return None if answer is not None and releases.overridden() else answer

    def missed(self, key: CallKey, M: int, answer: Any) -> None:  # noqa: N803
        if not releases.overridden():
            self.lookup.miss(key, M, answer)

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

    def stop(self, reason: str) -> None:
        """Tune no more in this process; learned rows stay in use."""
        if self.state != "off":
            self.state, self.reason = "off", reason
            self._let_go()
            self.tuner = None

    def loaded(self, model_runner: Any) -> None:
        """After the weights of a model (or of its draft model) are there, before any graph is captured."""
        if releases.deterministic():
            self.overlays = False
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
        return self._captured_again(scheduler, now) or self._tuned(scheduler, now)

    def _tuned(self, scheduler: Any, now: float) -> bool:
        if self._never or self.tuner is None:
            return False
        if reason := releases.why_not_now(scheduler):
            self._stand_aside(reason)
            return False
        quiet_s = now - self._last_request_s
        self.idle_s += min(now - self._last_idle_s, 1.0)
        self._last_idle_s = now
        if quiet_s < self.settings.grace_s:
            self.state = "busy"
            return False
        began_s = time.perf_counter()
        if self._take_news(now):
            self._observe(began_s)
            return True
        if not self.budget.left(now):
            self._stand_aside(f"this hour's {self.settings.budget_s:g} GPU seconds are spent")
            return False
        before_s = self.tuner.gpu_s
        result = self._step(deep_idle=quiet_s >= self.settings.deep_idle_s)
        self.slices += self.tuner.gpu_s > before_s
        self.budget.spent_until(self.tuner.gpu_s)
        self.state, self.reason = _STATES[result], ""
        if result == "worked":
            self._observe(began_s)
        return result == "worked"

    def _captured_again(self, scheduler: Any, now: float) -> bool:
        """At most one graph, also where nothing is tuned any more: rows that were taken back leave the graphs too."""
        if not self.recapture.ready(now - self._last_request_s, overlays=self.overlays):
            return False
        return not releases.why_not_now(scheduler) and self.recapture.step(self._let_go)

    def _step(self, *, deep_idle: bool) -> Step:
        """One step of the tuner. A fault drops its job, and the tuner goes on with another one; after a few in a
        row it is the fence's turn."""
        assert self.tuner is not None  # noqa: S101 - for the type checker
        try:
            with self.compiles.tuning():
                return self.tuner.step(deep_idle=deep_idle)
        except Exception:
            self._faults += 1
            if self._faults >= _MAX_FAULTS:
                raise
            if self._faults == 1:
                logger.exception("MoE autotune put an M off because of a fault in tuning it.")
            return "worked"

    def _observe(self, began_s: float) -> None:
        """Note how long a pass kept the scheduler: what a request may have waited for."""
        if self.metrics is not None:
            self.metrics.slices_s.append(time.perf_counter() - began_s)

    def _scratch_bytes(self) -> int:
        return getattr(self.device.provider, "scratch_bytes", 0) if self.device is not None else 0

    def _let_go(self) -> None:
        """Close the bench that is open, if any: its memory and its hold on weights end here."""
        if self.tuner is not None:
            self.tuner.abandon()

    def start(self, device: Device) -> None:
        """Open the store of the device's environment, publish what it holds, and get ready to tune."""
        self.device, self.overlay.source = device, device.source
        self.store = Store.open(self.root, device.environment, read_only=self.settings.mode == "read-only")
        self.overlay.publish_stored(self.store.contents)
        if self.settings.mode != "read-only":
            options = TunerOptions(
                min_gain=self.settings.min_gain_percent / 100,
                slice_us=self.settings.slice_us,
                seed=self.settings.seed,
                source=device.source,
                sglang=releases.version(),
                driver=releases.driver_version(),
            )
            prior = Prior(find_files(releases.shipped_folder()), device.environment.device_name)
            limit = device.environment.shared_memory_bytes
            tried = TrialLog(self.root, device.environment).put
            self.tuner = Tuner(device.provider, self._learned, prior, options, shared_memory_bytes=limit, tried=tried)
            for record in self.store.contents.records.values():
                # What a recording taught is of no use here, and what is not served is searched again.
                if record.source in ("pinned", "imported", device.source) and self.overlay.bits_hold(record):
                    self.tuner.learn(record)
        live.start(self)

    def _attach(self, scheduler: Any) -> None:
        self._attached = True
        self._never = self._never or releases.why_never(scheduler.server_args)
        if self._never:
            self.state, self.reason = "off", self._never
            logger.info("MoE autotune tunes nothing in this server: %s.", self._never)
        self._captured = releases.captured_sizes(scheduler)
        if self.store is not None:
            self.recapture.attach(scheduler)
        self.lookup.asked = None
        self.metrics = metrics.of(scheduler)

    def _log_start(self) -> None:
        missing = [path for path, there in self.hooks().items() if not there]
        if missing:
            logger.warning(
                "MoE autotune %s: NOT hooked: %s. SGLang's loader says why above; see `sglang-moe-autotune doctor`.",
                *(__version__, ", ".join(missing)),
            )
            return
        shapes = len(self.overlay.layers.keys)
        rows = sum(len(rows) for rows in self.lookup.rows().values())
        logger.info(
            "MoE autotune %s: hooks in place; shapes on the Triton path: %d; learned rows: %d; mode %s; store %s.",
            *(__version__, shapes, rows, self.settings.mode),
            self.store.path if self.store is not None else "not opened",
        )

    def _learned(self, record: Record) -> None:
        """The tuner's sink: keep the record, and serve it where that is allowed."""
        assert self.store is not None  # noqa: S101 - for the type checker
        self._faults = 0
        self.store.submit(record=record)
        if record.verdict != "faster":
            return
        if self.settings.mode != "restart":
            key = call_key(record.shape)
            self.recapture.adopted(key, record.M, record.pair)
            self.lookup.publish([(key, record.M, record.pair)])
        evidence = record.evidence
        logger.info(
            "MoE autotune learned %s M=%d: %.1f %% faster (%.1f -> %.1f us, at least %.1f %%), %s instead of %s.",
            *(record.shape.slug, record.M, 100 * evidence.gain, evidence.baseline_us, evidence.chosen_us),
            *(100 * evidence.gain_low, record.pair, record.baseline),
        )

    def _take_news(self, now: float) -> bool:
        """Misses and heat into the tuner, notes into the store; True if that cost what a slice may cost."""
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
