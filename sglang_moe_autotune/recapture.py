"""When a captured graph is captured again: in deep idle, one an idle pass, and only where its answer has changed."""

from __future__ import annotations

import collections
import logging
import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from sglang_moe_autotune import graphs, releases, status
from sglang_moe_autotune.captures import Captures, Size, Stale
from sglang_moe_autotune.lookup import CallKey
from sglang_moe_autotune.scratch import scratch_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from sglang_moe_autotune.doorbell import Doorbell
    from sglang_moe_autotune.heat import BatchKind
    from sglang_moe_autotune.lookup import Call, Lookup
    from sglang_moe_autotune.settings import RecaptureMode, Settings
    from sglang_moe_autotune.shapes import ConfigPair, MoeShape

logger = logging.getLogger("sglang.moe_autotune")

Outcome = Literal["recaptured", "put off", "failed", "withdrawn"]
"""``put off``: nothing was touched. ``failed``: the old graph serves on. ``withdrawn``: the size runs without a graph
of its own, because its old one held an answer that was taken back."""

SHOWN: frozenset[tuple[str, str, str]] = frozenset(
    ("0.5.16", "triton", pool) for pool in ("MHATokenToKVPool", "HybridLinearKVPool")
)
"""release, attention backend and KV pool that one rank was shown with on a GPU, by ``scripts/gpu_recapture.py``; with
the first pool ``scripts/gpu_soak.py --recapture`` ran too. There it is the default; ``Found.unlike`` says where not."""

_QUIET_S = 10.0
"""no shorter, whatever the settings say: a capture takes far longer than a slice"""
_SETTLE_S = 20.0
"""for which a size's answers must stand: several shapes, or a second look, change them in one go"""
_PUT_OFF_S = 300.0
_LOOK_S = 0.25
"""between two looks for a graph that is due: an idle pass takes microseconds"""
_MOST = 512
_MOST_PER_SIZE = 4
_MOST_FAILURES = 3
_BYTES_PER_ELEMENT = 32
"""of the hidden state, per token: what a layer keeps beside its MoE activations, with room"""


class Done(NamedTuple):
    """What became of one size."""

    size: Size
    outcome: Outcome
    pause_s: float = 0.0
    """for which the scheduler did nothing else"""
    reason: str = ""


class Recapture:
    """The captured graphs of this process, kept in step with the rows that are served."""

    def __init__(
        self, settings: Settings, lookup: Lookup, shapes: Callable[[], Iterable[MoeShape]],
        *, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.mode: RecaptureMode = "off"
        self.reason = "no graph was looked at yet"
        """why not ``idle``, or what cannot be captured again"""
        self.pauses_s: dict[Size, float] = {}
        """of the last capture of each size"""
        self.new_pauses_s: collections.deque[float] = collections.deque(maxlen=1024)
        """for whoever keeps a histogram, and empties it"""
        self.counts: dict[Outcome, int] = {}
        self.put_off: dict[Size, str] = {}
        self.stale: dict[Size, Stale] = {}
        self.made = 0
        """grows whenever graphs may hold other answers than before"""
        self._settings, self._lookup, self._shapes, self._clock = settings, lookup, shapes, clock
        self._graphs: tuple[graphs.Graphs, ...] = ()
        self._captures = Captures((), {})
        self._scheduler: Any = None
        self._doorbell: Doorbell | None = None
        self._alone = True
        self._by_hand: set[Size] = set()
        self._slow: set[int] = set()
        self._seen: tuple[int, bool] | None = None
        self._look_s = 0.0
        self._since_s: dict[Size, float] = {}
        self._again_s: dict[Size, float] = {}
        self._tries: dict[Size, int] = {}
        self._failures: dict[Size, int] = {}
        self._adopted: set[tuple[CallKey, int, ConfigPair]] = set()
        self._heat: dict[int, int] = {}

    # -- what is known -------------------------------------------------------------------------------------------------

    def attach(self, scheduler: Any, doorbell: Doorbell | None = None, *, wanted: bool = True) -> None:
        """Look at the graphs, once they are captured. Not wanted: no layer asks for configs, so none is in a graph."""
        asked, self._lookup.asked = self._lookup.asked or {}, None
        if not wanted:
            return
        self._scheduler, self._doorbell = scheduler, doorbell
        found = self._find()
        self.mode, self.reason = self._choose(scheduler, found)
        if self.mode == "off":
            return
        self._graphs = found.graphs
        self._captures = Captures((size for some in found.graphs for size in some.sizes()), asked)
        self._adopted.update((CallKey(*key), M, pair) for (key, M), pair in asked.items() if pair is not None)
        self._alone = releases.ranks(scheduler.server_args) == 1
        if refused := "; ".join(f"{kind} graphs: {why}" for kind, why in found.refused.items()):
            self.reason = refused if not self.reason else f"{self.reason}; {refused}"
        if not found.graphs:
            self.mode, self.reason = "off", refused or "this server has no captured graphs"

    def _find(self) -> graphs.Found:
        try:
            return graphs.find(self._scheduler)
        except (AttributeError, TypeError, KeyError, ImportError) as error:
            logger.warning("MoE autotune captures no graph again: this SGLang keeps them otherwise.", exc_info=True)
            return graphs.Found((), {"all": f"this SGLang keeps them otherwise ({error})"})

    def _choose(self, scheduler: Any, found: graphs.Found) -> tuple[RecaptureMode, str]:
        if self._settings.mode in ("restart", "off"):
            return "off", f"mode {self._settings.mode}: answers do not change while a server lives"
        asked = self._settings.recapture
        if releases.ranks(scheduler.server_args) > 1 and asked != "off":
            return asked or "restart", "several ranks would have to capture together, which was not shown on a GPU"
        if asked is not None:
            return asked, "" if asked == "idle" else f"set to {asked}"
        backend = str(releases.setting(scheduler.server_args, "attention_backend"))
        if (releases.version(), backend, found.pool) not in SHOWN:
            with_what = f"SGLang {releases.version()}, attention backend {backend} and {found.pool}"
            return "restart", f"not shown on a GPU with {with_what}"
        return ("restart", f"not shown with {found.unlike}") if found.unlike else ("idle", "")

    def adopted(self, key: CallKey, M: int, pair: ConfigPair) -> None:  # noqa: N803
        """The binaries of this row are loaded: a capture will compile nothing."""
        self._adopted.add((key, M, pair))

    def held(self, kind: BatchKind, M: int) -> Mapping[CallKey, ConfigPair | None]:  # noqa: N803
        """The learned pairs that the graph of so many tokens was captured with, None for SGLang's own; nothing where no
        graph is known."""
        return self._captures.held(kind, M)

    def take_out(self, M: int) -> None:  # noqa: N803
        """A row of this M made steps slower and was taken back: out of its graphs too, also in mode ``restart``, where
        a request by hand brought it in."""
        self._slow.add(M)

    def served(self, counts: Mapping[int, int]) -> None:
        """Count batches by M: the hottest graphs go first."""
        for M, count in counts.items():  # noqa: N806 - the field's name for it
            self._heat[M] = self._heat.get(M, 0) + count

    def request(self) -> str:
        """Asked for by hand: capture all stale graphs at the next deep idle, also in mode ``restart``, and what was
        put off at once. What will come of it, in a sentence."""
        if self.mode == "off" or not self._alone:
            return f"graphs are not captured again: {self.reason}"
        self._by_hand = set(self.stale)
        self._again_s.clear()
        self._since_s = dict.fromkeys(self._since_s, self._clock() - _SETTLE_S)
        return f"{len(self.stale)} graphs are captured again at the next deep idle"

    def snapshot(self) -> status.GraphCounts:
        """For people; read by another thread than the one that serves."""
        return status.GraphCounts(
            recapture=self.mode,
            reason=self.reason,
            captured=len(self._captures),
            stale=tuple(map(str, self.stale)),
            put_off={str(size): why for size, why in self.put_off.items()},
            outcomes={str(outcome): count for outcome, count in self.counts.items()},
            pause_ms={str(size): round(pause_s * 1e3, 1) for size, pause_s in self.pauses_s.items()},
        )

    # -- when ----------------------------------------------------------------------------------------------------------

    def idle(self, scheduler: Any, quiet_s: float, prepare: Callable[[], object], *, overlays: bool) -> bool:
        """One idle pass: at most one capture; True if there was one. Also where nothing is tuned any more, since rows
        that were taken back leave the graphs too."""
        if not self.ready(quiet_s, overlays=overlays) or releases.why_not_now(scheduler) or releases.capturing():
            return False
        return not (self._doorbell is not None and self._doorbell.rung()) and self.step(prepare)

    def step(self, prepare: Callable[[], object]) -> bool:
        """The capture of one idle pass, after ``ready`` has said yes; False where none was made: several ranks must
        capture together, or the graph that was due is put off.

        prepare: called before, to give memory back.
        """
        if not self._alone:
            return False
        prepare()
        return any(done.outcome != "put off" for done in self.capture(self.due()[:1]))

    def ready(self, quiet_s: float, *, overlays: bool = True) -> bool:
        """Is something due here, and the server idle for long enough? Asked in every idle pass; with several ranks
        this is a rank's vote.

        quiet_s: since the last user's request. overlays: are learned rows served at all?
        """
        if self.mode == "off":
            return False
        self._refresh(overlays=overlays)
        now_s = self._clock()
        if not self.stale or quiet_s < max(_QUIET_S, self._settings.deep_idle_s) or now_s < self._look_s:
            return False
        if self.due():
            return True
        self._look_s = now_s + _LOOK_S
        return False

    def _refresh(self, *, overlays: bool) -> None:
        if any(not some.current for some in self._graphs):
            self._graphs = self._find().graphs
            self.made += 1
            self._captures.forget(size for some in self._graphs for size in some.sizes())
            self._seen = None
        if self._seen == (self._lookup.epoch, overlays):
            return
        self._seen = (self._lookup.epoch, overlays)
        stale = self._captures.stale(self._lookup.rows() if overlays else {})
        now_s = self._clock()
        same = {size for size, found in stale.items() if size in self.stale and self.stale[size] == found}
        self._since_s = {size: self._since_s[size] if size in same else now_s for size in stale}
        self.stale = stale

    def due(self) -> list[Size]:
        """The sizes to capture now: what was taken back, then the hottest."""
        now_s = self._clock()
        total = sum(self.counts.values())
        due = []
        for size, stale in self.stale.items():
            asked = size in self._by_hand or (stale.taken_back and size.M in self._slow)
            if self.mode != "idle" and not asked:
                continue
            if now_s < self._again_s.get(size, now_s) or self._failures.get(size, 0) >= _MOST_FAILURES:
                continue
            capped = total >= _MOST or self._tries.get(size, 0) >= _MOST_PER_SIZE
            settled = now_s >= self._since_s[size] + _SETTLE_S
            if stale.taken_back or (settled and not capped):
                due.append(size)
        return sorted(due, key=lambda size: (not self.stale[size].taken_back, -self._heat.get(size.M, 0), size.M))

    # -- what ----------------------------------------------------------------------------------------------------------

    def capture(self, sizes: Iterable[Size]) -> list[Done]:
        """Capture these stale sizes one after the other, now. For the caller to choose the moment: no request runs,
        and where there are several ranks all of them call this for the same sizes."""
        return [self._capture(size) for size in sizes]

    def _capture(self, size: Size) -> Done:
        began_s = time.perf_counter()
        stale = self.stale[size]
        self._by_hand.discard(size)
        if reason := self._why_not(stale):
            self._again_s[size] = self._clock() + _PUT_OFF_S
            self.put_off[size] = reason
            return Done(size, "put off", 0.0, reason)
        self.put_off.pop(size, None)
        some = next(found for found in self._graphs if found.kind == size.kind)
        self._tries[size] = self._tries.get(size, 0) + 1
        asked: dict[tuple[Call, int], ConfigPair | None] = {}
        if self._seen is not None and not self._seen[1]:
            asked = {(key, size.M): None for key in stale.served}  # lookups pass by: every answer is SGLang's own
        self._lookup.asked = asked
        try:
            reason = some.capture(size.size)
        finally:
            self._lookup.asked = None
        done = self._account(stale, some, asked, reason, began_s)
        self.counts[done.outcome] = self.counts.get(done.outcome, 0) + 1
        self.made += 1
        self.pauses_s[size] = done.pause_s
        self.new_pauses_s.append(done.pause_s)
        self._seen = None
        return done

    def _account(
        self, stale: Stale, some: graphs.Graphs, asked: dict[tuple[Call, int], ConfigPair | None], reason: str,
        began_s: float,
    ) -> Done:  # fmt: skip
        size = stale.size
        if not reason:
            if self._captures.captured(size, asked):
                pause_s = time.perf_counter() - began_s
                logger.info("MoE autotune captured %s again in %.0f ms (M=%d).", size, pause_s * 1e3, size.M)
                return Done(size, "recaptured", pause_s)
            reason = "its capture asked for other configs than the first one"
        self._failures[size] = self._failures.get(size, 0) + 1
        self._again_s[size] = self._clock() + _PUT_OFF_S
        if not stale.taken_back:
            logger.warning("MoE autotune could not capture %s again, its old graph serves on: %s", size, reason)
            return Done(size, "failed", time.perf_counter() - began_s, reason)
        some.withdraw(size.size)
        self._captures.drop(size)
        logger.warning("MoE autotune could not take a row out of the graph %s, which serves no more: %s", size, reason)
        return Done(size, "withdrawn", time.perf_counter() - began_s, reason)

    def _why_not(self, stale: Stale) -> str:
        size = stale.size
        for key, pair in stale.served.items():
            if pair is not None and (key, size.M, pair) not in self._adopted:
                return "a row's binaries are not known to be loaded here"
        need = max((scratch_bytes(s, size.M, flush=False) + _BYTES_PER_ELEMENT * size.M * s.K for s in self._shapes()),
                   default=0)  # fmt: skip
        free, _ = torch.cuda.mem_get_info()
        reserve = self._settings.reserve_mb << 20
        if need > free - reserve:
            return f"may need {need >> 20} MiB, and {free >> 20} MiB are free with {reserve >> 20} MiB kept in reserve"
        return ""
