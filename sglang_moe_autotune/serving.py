"""One scheduler process: from its misses to published rows, and when to stand aside."""

from __future__ import annotations

import gc
import logging
import os
import time
from typing import TYPE_CHECKING, Any

from sglang_moe_autotune import attachment, deaths, live, releases, startup, switch
from sglang_moe_autotune.agenda import Agenda
from sglang_moe_autotune.beat import Beat
from sglang_moe_autotune.budget import Budget
from sglang_moe_autotune.council import Place
from sglang_moe_autotune.device import likely, make_tuner, open_device
from sglang_moe_autotune.doubts import Doubts
from sglang_moe_autotune.harvest import Harvest
from sglang_moe_autotune.heat import Heat
from sglang_moe_autotune.idle_time import IdleTime
from sglang_moe_autotune.intake import Intake
from sglang_moe_autotune.journal import Journal
from sglang_moe_autotune.layers import find_layers
from sglang_moe_autotune.listener import CompileCount
from sglang_moe_autotune.marked import MarkedProvider
from sglang_moe_autotune.overlay import Overlay
from sglang_moe_autotune.passes import REST_S, RESTFUL, TOGETHER_S, Passes
from sglang_moe_autotune.recapture import Recapture
from sglang_moe_autotune.settings import Settings, cache_root
from sglang_moe_autotune.store import Store, relatives
from sglang_moe_autotune.switch import Switch
from sglang_moe_autotune.trials import environment_key
from sglang_moe_autotune.votes import Votes

if TYPE_CHECKING:
    from collections.abc import Callable

    from sglang_moe_autotune.bench import BenchmarkProvider
    from sglang_moe_autotune.device import Device
    from sglang_moe_autotune.doorbell import Doorbell
    from sglang_moe_autotune.metrics import Metrics
    from sglang_moe_autotune.peers import Peers
    from sglang_moe_autotune.records import Record, ShapeNote
    from sglang_moe_autotune.status import State
    from sglang_moe_autotune.tuner import Step, Tuner

logger = logging.getLogger("sglang.moe_autotune")

_MAX_FAULTS = 5
_LONG_PREFILL = 1024
_SMALL_SCRATCH_BYTES = 128 << 20
_STATES: dict[Step, State] = {"worked": "tuning", "waiting": "waiting", "nothing": "idle"}


class Serving:
    """The plugin's state in one process. Every method but ``__init__`` is called inside a fence."""

    def __init__(self, settings: Settings, hooks: Callable[[], dict[str, bool]]) -> None:
        self.settings = settings
        self.hooks = hooks
        self.overlay = Overlay(settings.mode, bit_equal=settings.bit_equal)
        self.lookup = self.overlay.lookup
        self.recapture = Recapture(settings, self.lookup, lambda: self.overlay.shapes)
        self.beat = Beat()
        self.heat = Heat(self.beat)
        self.compiles = CompileCount().install()
        self.overlays = True
        """False where SGLang's own answers must stand: then lookups are not even read"""
        self.switch = Switch()
        self.state: State = "idle"
        self.reason = ""
        self.store: Store | None = None
        self.harvest: Harvest | None = None
        self.tuner: Tuner | None = None
        self.device: Device | None = None
        self.root = cache_root(settings, os.environ)
        self.since_unix_s = time.time()
        self.passes = Passes(settings.slice_us)
        self.watch = self.passes.watch
        self.mark: Journal | None = None
        self.died = ""
        """why nothing is tuned after deaths; from any thread"""
        self.slices = 0
        self.metrics: Metrics | None = None
        self.budget = Budget(settings.budget_s)
        self.place = Place()
        self.votes = Votes()
        self.agenda = Agenda()
        self.peers: Peers | None = None
        self.never = ""
        """why nothing is ever tuned in this process"""
        self._deterministic = self._attached = self._startup_done = False
        self._faults = 0
        self._idled = False
        """was the last thing this loop did a pass in deep idle?"""
        self.intake = Intake(self.overlay, self.heat, self.recapture, settings.max_m, self._submit_note)
        self.doubts = Doubts(self.overlay, self.recapture, lambda: self.intake.captured, self.beat)
        self.steps = self.doubts.steps
        self.doorbell: Doorbell | None = None
        self._rest_until_s = 0.0
        self._last_request_s = time.monotonic()
        self._served = False
        """was there a batch since the last idle pass? Its hook runs before it, and it may take seconds"""
        self.idle_time = IdleTime(self._last_request_s)

    def batch(self, scheduler: Any, batch: Any) -> None:
        """A batch that does not merely go on is about to run."""
        self._idled, self._rest_until_s = False, 0.0
        if (found := releases.batch_tokens(scheduler, batch)) is None:
            self.steps.pause()
            self._served = self._served or releases.is_filler(batch)  # another rank is not idle, so this one is not
            return
        self._served = True
        self.heat.batch(found)
        if self.steps.ran(found, now := time.monotonic(), batch):
            self.doubts.block(batch, now)
        if found[0] == "decode":
            self.beat.begin(batch, *self.steps.follow)
        elif found[1] >= _LONG_PREFILL and self._scratch_bytes() > _SMALL_SCRATCH_BYTES:
            self.let_go()  # it may need the memory, and takes far longer than giving it back

    def requests(self, requests: Any) -> None:
        """What the scheduler has just received: weights, caches and adapters move after this."""
        self._rest_until_s = 0.0
        self.steps.pause()
        if releases.disturbs(requests):
            self.votes.cancel(self.peers.graphs if self.peers is not None else None)
            self.let_go()
        elif self.peers is not None:
            self.peers.requests(requests)

    def announce(self) -> list[Any] | None:
        """Where requests are received and there are none: the start of a re-capture, if all ranks are ready and
        no batch ran since the last idle pass. Ranks run the same batches, so none has one under way then."""
        if self.peers is None or not self._idled:
            return None
        message = self.votes.announcement(self.peers.ranks.votes)
        return None if message is None else [releases.announcement(message)]

    def switched(self) -> None:
        """Follow the switch: at the next lookup and the next idle pass. From any thread."""
        self.overlays = self.switch.level != "off" and not self._deterministic
        self._rest_until_s = 0.0

    def stop(self, reason: str) -> None:
        """A hook broke: tune no more in this process, and count on no hook; learned rows stay in use. Never raises."""
        self.beat.end()
        self._idled = False
        if self.state != "off":
            self.state, self.reason = "off", reason
            try:
                if self.peers is not None:
                    self.peers.stop(reason)
                self.let_go()
            except Exception:
                logger.exception("MoE autotune could not give everything back when it stopped.")
            self.tuner, self.steps.on = None, False

    def loaded(self, model_runner: Any) -> None:
        """After the weights of a model (or of its draft model) are there, before any graph is captured."""
        if releases.deterministic():
            self.overlays, self._deterministic = False, True
            self.never = "deterministic inference is on, so SGLang's fixed configs stand"
            logger.info("MoE autotune stands aside: %s.", self.never)
            return
        fresh = list(find_layers(model_runner.model, model_runner.dtype, releases.padding()))
        self.overlay.layers.add(fresh)
        if self.device is None and fresh:
            self.start(open_device(self.settings, self.root, self.overlay.layers, self.compiles))
        elif fresh and self.store is not None:
            self.overlay.publish_stored(self.store.contents)
        if self.tuner is not None:
            for shape in likely(self.overlay.layers):
                self.tuner.experience(shape)  # its space takes milliseconds to make, which no request may wait for
        live.log_start(self)

    def idle(self, scheduler: Any) -> bool:
        """One idle pass: at most one slice, but see ``TOGETHER_S``. True if it worked: SGLang's sleep is skipped."""
        now = time.monotonic()
        if now < self._rest_until_s:
            return False
        worked = more = self._pass(scheduler, now)
        while more and self._idled and self.place.ranks > 1 and time.monotonic() - now < TOGETHER_S:
            more = self._pass(scheduler, time.monotonic())
        self.doubts.look(now, overlays=self.overlays)
        if not worked and self.state in RESTFUL:
            self._rest_until_s = now + REST_S
        return worked

    def _pass(self, scheduler: Any, now: float) -> bool:
        if self._served:
            self._served, self._last_request_s = False, now
        if not self._attached:
            self._attached = True
            attachment.attach(self, scheduler)
        if self.recapture.idle(scheduler, now - self._last_request_s, self.let_go, overlays=self.overlays):
            return True
        if self.never or self.tuner is None:
            return False
        urgent = releases.why_not_now(scheduler)
        if reason := self.switch.why or self.died or self.watch.why_paused(now) or urgent:
            return self._retire(reason, now, at_once=bool(urgent))  # the first that holds of those in docs/limits.md
        quiet_s = now - self._last_request_s
        deep = quiet_s >= self.settings.deep_idle_s
        self.idle_time.passed(now, quiet_s, deep=deep, queued=self.state in {"tuning", "waiting"})
        if quiet_s < self.settings.grace_s:
            self.state = "busy"
            self.passes.requested()
            return False
        self._idled = deep
        if self.doorbell is not None and self.doorbell.rung():
            return False
        return self._turn(self.tuner, now, deep=deep)

    def _turn(self, tuner: Tuner, now: float, *, deep: bool) -> bool:
        """At most one slice; True if it did work."""
        began_s = time.perf_counter()
        if self.intake.step(tuner, now):
            self._observe(began_s, now, launched=False)
            return True
        if not self.budget.left(now):
            return self._retire(f"this hour's {self.settings.budget_s:g} GPU seconds are spent", now)
        if releases.capturing():
            self._stand_aside("graphs are being captured")
            return False
        before_s = tuner.gpu_s
        if self.device is not None:
            self.passes.begin(self.device.provider)
        result = self._step(deep_idle=deep)
        self.state, self.reason = _STATES[result], ""
        if result == "worked":
            launched = tuner.gpu_s > before_s
            self.slices += launched
            self.budget.spent_until(tuner.gpu_s)
            self._observe(began_s, now, launched=launched)
        return result == "worked"

    def _step(self, *, deep_idle: bool) -> Step:
        """One step of the tuner. A fault drops its job, and the tuner goes on with another one; after a few in a
        row it is the fence's turn. No garbage is collected in it: that goes over the young objects of all of SGLang,
        for milliseconds."""
        assert self.tuner is not None  # noqa: S101 - for the type checker
        collects = gc.isenabled()
        gc.disable()
        try:
            with self.compiles:
                if self.doubts.ready(deep_idle=deep_idle):
                    return self.doubts.step(deep_idle=deep_idle)
                if self.peers is not None:
                    return self.peers.step(time.monotonic(), deep_idle=deep_idle)
                return self.tuner.step(deep_idle=deep_idle)
        except Exception:
            self._faults += 1
            if self._faults >= _MAX_FAULTS:
                raise
            if self._faults == 1:
                logger.exception("MoE autotune put an M off because of a fault in tuning it.")
            return "worked"
        finally:
            if collects:
                gc.enable()

    def _observe(self, began_s: float, now: float, *, launched: bool) -> None:
        taken_s = time.perf_counter() - began_s
        self.passes.end(taken_s, now, launched=launched, watched=self.overlay.source != "replayed")

    def _scratch_bytes(self) -> int:
        return getattr(self.device.provider, "scratch_bytes", 0) if self.device is not None else 0

    def let_go(self) -> None:
        """Close the bench that is open, if any: its memory and its hold on weights end here."""
        if self.tuner is not None:
            self.tuner.abandon()
        if self.peers is not None:
            self.peers.abandon()
        self.doubts.abandon()

    def start(self, device: Device) -> None:
        """Open the store of the device's environment, publish what it holds, and get ready to tune."""
        self.device = self.overlay.begin(device)
        self.switch.of_file = switch.read(self.root)
        self.switched()
        self.died = self.look_for_deaths()
        if self.died:
            self.state, self.reason = "off", f"read-only: {self.died}"
            logger.warning("MoE autotune starts read-only: %s.", self.died)
        self.store = Store.open(self.root, device.environment, read_only=self.read_only)
        self.overlay.publish_stored(self.store.contents)
        kept = self.store, self.root, self.settings.mode, self.lookup, self.recapture
        self.harvest = Harvest(*kept, stands=self.overlay.stands)
        if not self.read_only:
            held = getattr(device.provider, "quarantine", None)  # a recording launches nothing
            self.mark = held.journal if held is not None else Journal()
            self.passes.marked = MarkedProvider(device.provider, self.mark)
            self.tuner = self.new_tuner(self.passes.marked, self.agenda)
        live.start(self)

    def look_for_deaths(self) -> str:
        """Why nothing may be tuned after deaths on this environment; from any thread but the serving one."""
        if self.device is None:
            return ""
        key, read_only = environment_key(self.device.environment), self.settings.mode == "read-only"
        return deaths.sentence(deaths.read(self.root, key, read_only=read_only))

    def new_tuner(self, provider: BenchmarkProvider, agenda: Agenda | None = None) -> Tuner:
        """A tuner that knows what is stored and serves what it learns. agenda: a fresh one."""
        assert self.device is not None  # noqa: S101 - for the type checker
        assert self.store is not None  # noqa: S101 - as above
        assert self.harvest is not None  # noqa: S101 - as above
        known = filter(self.overlay.stands, self.store.contents.records.values())  # others are searched again
        seeds = relatives(self.root, self.device.environment)
        found = self._learned, self.harvest.tried
        return make_tuner(self.device, provider, self.settings, (known, seeds), found, agenda)

    def before_capture(self, model_runner: Any) -> None:
        """Once, when all that graphs need is there but the graphs."""
        if not self._startup_done:
            self._startup_done = True
            startup.tune(self, model_runner)

    @property
    def read_only(self) -> bool:
        return self.settings.mode == "read-only" or (bool(self.died) and self.tuner is None)

    def _learned(self, record: Record) -> None:
        """The tuner's sink."""
        assert self.harvest is not None  # noqa: S101 - for the type checker
        self._faults, self.idle_time.settled = 0, self.idle_time.settled + 1
        self.harvest.learned(record)

    def _submit_note(self, note: ShapeNote) -> None:
        assert self.store is not None  # noqa: S101 - for the type checker
        self.store.submit(note=note)

    def _retire(self, reason: str, now: float, *, at_once: bool = False) -> bool:
        """Stand aside. Where there is no hurry a job's bench is given back in steps, one a pass, which are work."""
        began_s = time.perf_counter()
        if not at_once and self.tuner is not None and not self.tuner.give_way():
            self._observe(began_s, now, launched=False)
            return True
        self._stand_aside(reason)
        return False

    def _stand_aside(self, reason: str) -> None:
        if self.reason != reason:
            self.let_go()
        if self.peers is not None:
            self.peers.stand_aside(reason)
        self._idled = False
        self.state, self.reason = "standing aside", reason
