"""The agenda: which (shape, M) wait to be tuned, which are put off, and which is next. Pure bookkeeping."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import msgspec

from sglang_moe_autotune.shapes import ConfigPair, MoeShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang_moe_autotune.records import Record

State = Literal["queued", "settled", "failed"]

Key = tuple[MoeShape, int]

FINISHED_LOOKS: Final = 3
"""searches after which an M is left alone by the next process: a quick one, one of what others compiled, a full one"""
_NEVER: Final = float("inf")
_LONGEST_WAIT_S: Final = 3600.0
_ASKED_AT_ONCE: Final = 2


class Deferral(msgspec.Struct, frozen=True):
    """Why an M is not tuned now."""

    reason: str
    retry_at_s: float
    """on the tuner's clock"""
    times: int


class Entry:
    """What is kept of one (shape, M)."""

    __slots__ = (
        *("M", "barren", "baseline", "earlier_s", "faults", "finished", "firm", "gpu_s", "inherited", "long"),
        *("looks", "record", "shape", "state"),
    )

    def __init__(self, shape: MoeShape, M: int, baseline: ConfigPair) -> None:  # noqa: N803
        self.shape, self.M, self.baseline = shape, M, baseline
        self.state: State = "queued"
        self.faults = 0
        self.inherited = False
        """was its first answer found by an earlier process?"""
        self.finished = self.firm = False
        """did an earlier process search it to its end? Was it found that winners of other M do not do as well here?"""
        self.long = False
        """its launches are longer than a slice: for deep idle"""
        self.gpu_s = self.earlier_s = 0.0
        """spent on it in this process, and before"""
        self.record: Record | None = None
        """learned here, or from the store where its search goes on"""
        self.looks = 0
        """searches that ended"""
        self.barren = 0
        """how many in a row compiled something and found nothing better than what this M had"""

    @property
    def key(self) -> Key:
        return self.shape, self.M


def _everything(_: Entry) -> bool:
    return True


class Agenda:
    """Entries, heat and deferrals. ``next_entry`` is asked once a job; ``resting`` is what an idle pass costs."""

    def __init__(self, retry_s: float = 30.0) -> None:
        self.entries: dict[Key, Entry] = {}
        self.stored: dict[Key, Record] = {}
        self.deferred: dict[Key, Deferral] = {}
        self.admits: Callable[[Entry], bool] = _everything
        """may this one be begun now? ``wake`` when an answer changes"""
        self.elsewhere: frozenset[Key] = frozenset()
        """what another process works on: it keeps nobody from second searches"""
        self.sharing = 1
        """processes that search the same shapes at the same time, each some of the M"""
        self.held = False
        """begin nothing: what is open goes on"""
        self._retry_s = retry_s
        self._heat: dict[Key, int] = {}
        self._closed: set[Key] = set()
        self._rest_until_s = {False: 0.0, True: 0.0}
        self._asked = 0
        self._deep = False
        """is the idle time deep, as of the last question?"""

    def add(self, shape: MoeShape, M: int, baseline: ConfigPair) -> None:  # noqa: N803
        """Queue an M, unless it is known here, closed, or a stored record holds against the same baseline; where that
        one is of a first look, the second one is still to come, and its consolidation where it had none."""
        key = (shape, M)
        if key in self.entries or key in self._closed:
            return
        entry = Entry(shape, M, baseline)
        if self._holds(key, baseline):
            stored = self.stored[key]
            looks = stored.evidence.looks
            entry.finished, entry.firm = looks >= FINISHED_LOOKS, stored.evidence.firm
            through = entry.finished and (entry.firm or stored.verdict == "baseline" or self.sharing > 1)
            if stored.source == "pinned" or looks == 0 or through:
                return
            entry.state, entry.record, entry.looks = "settled", stored, looks
            entry.earlier_s, entry.inherited = stored.evidence.gpu_s, True
        self.entries[key] = entry
        self.wake()

    def store(self, record: Record) -> bool:
        """Note a stored record; True if it takes its M off the queue, or changes what its searches start from."""
        key = (record.shape, record.M)
        self.stored[key] = record
        entry = self.entries.get(key)
        if entry is not None and entry.record is not None and record.source != "imported":
            before, entry.record = entry.record, record  # found here, and decided elsewhere
            entry.firm = record.evidence.firm
            return before.pair != record.pair
        if entry is None or entry.state != "queued" or not self._holds(key, entry.baseline):
            return False
        del self.entries[key]
        self.deferred.pop(key, None)
        return True

    def _holds(self, key: Key, baseline: ConfigPair) -> bool:
        stored = self.stored.get(key)
        if stored is None or stored.source == "imported":
            return False  # an imported row is a candidate, not an outcome
        return stored.source == "pinned" or stored.baseline == baseline

    def heat(self, key: Key, count: int) -> None:
        self._heat[key] = self._heat.get(key, 0) + count

    def close(self, key: Key) -> None:
        """Never offer this one."""
        self._closed.add(key)
        self.entries.pop(key, None)
        self.deferred.pop(key, None)

    def defer(self, entry: Entry, reason: str, now_s: float) -> None:
        """Put off: the wait doubles with each time in a row."""
        times = self.deferred[entry.key].times + 1 if entry.key in self.deferred else 1
        wait_s = min(_LONGEST_WAIT_S, self._retry_s * 2.0 ** (times - 1))
        self.deferred[entry.key] = Deferral(reason, now_s + wait_s, times)
        self.wake()

    def note_long(self, entry: Entry) -> None:
        """More tokens take no less time: larger M of the shape need not be opened to find out."""
        for other in self.entries.values():
            other.long = other.long or (other.shape == entry.shape and other.M >= entry.M)

    def sharers(self, entry: Entry) -> list[Entry]:
        """Itself and the M of its shape that are still searched: not those that are put off."""
        mine = (e for e in self.entries.values() if e.shape == entry.shape)
        return [e for e in mine if e is entry or (e.key not in self.deferred and not e.finished)]

    def is_later(self, other: Entry, entry: Entry) -> bool:
        """Does it wait for deeper idle than this one needs, and than there was at last?"""
        return other.long > (entry.long or self._deep)

    def peers(self, entry: Entry) -> list[Entry]:
        """Of its sharers those that it may wait for."""
        return [e for e in self.sharers(entry) if not self.is_later(e, entry)]

    def of(self, shape: MoeShape) -> list[Entry]:
        """The M of a shape that may be begun, now or in deeper idle."""
        mine = (entry for entry in self.entries.values() if entry.shape == shape and entry.key not in self.deferred)
        return [entry for entry in mine if self.admits(entry)]

    def queued(self) -> list[Entry]:
        """What has no answer yet, the hottest first, equals in the order of arrival."""
        return sorted((e for e in self.entries.values() if e.state == "queued"), key=self._order)

    def wanted(self, now_s: float, far: Callable[[Key], float], *, deep_idle: bool) -> list[Key]:
        """What would be begun now, admitted or not: the hottest first, of equals the least ``far``."""
        found = [e for e in self._in_state("queued") if self._may_run(e, now_s, deep_idle=deep_idle)]
        return [entry.key for entry in sorted(found, key=lambda entry: (self._order(entry), far(entry.key)))]

    def resting(self, now_s: float, *, deep_idle: bool) -> bool:
        """True while ``next_entry`` would find nothing; costs one comparison."""
        return self.held or now_s < self._rest_until_s[deep_idle]

    @property
    def asking(self) -> bool:
        """Did ``next_entry`` leave settled M unasked, and may it be asked again?"""
        return self._asked > 0 and not self.held

    def wake(self) -> None:
        self._rest_until_s = {False: 0.0, True: 0.0}

    def next_entry(self, now_s: float, *again: Callable[[Entry], bool], deep_idle: bool) -> Entry | None:
        """The hottest without an answer; when there is none, a settled one for which the first ``again`` holds; when
        there is none of these, one for which the next does."""
        self._deep = deep_idle
        found = [e for e in self._in_state("queued") if self._ripe(e, now_s, deep_idle=deep_idle)]
        if found:
            return min(found, key=self._order)
        if all(self._holds_up_nobody(e, deep_idle=deep_idle) for e in self._in_state("queued")):
            settled = [e for e in self._in_state("settled") if self._ripe(e, now_s, deep_idle=deep_idle)]
            settled.sort(key=self._order)
            asked = [(rule, entry) for rule in again for entry in settled]
            few = asked[self._asked : self._asked + _ASKED_AT_ONCE]
            if (first := next((e for rule, e in few if rule(e)), None)) is not None:
                self._asked = 0
                return first
            self._asked += _ASKED_AT_ONCE
            if self._asked < len(asked):
                return None  # ``again`` compares with all other M: the rest is asked in later passes
            self._asked = 0
        times = (d.retry_at_s for key, d in self.deferred.items() if deep_idle or not self.entries[key].long)
        self._rest_until_s[deep_idle] = min((t for t in times if t > now_s), default=_NEVER)
        return None

    def _holds_up_nobody(self, entry: Entry, *, deep_idle: bool) -> bool:
        return entry.key in self.deferred or entry.key in self.elsewhere or (entry.long and not deep_idle)

    def _ripe(self, entry: Entry, now_s: float, *, deep_idle: bool) -> bool:
        return self._may_run(entry, now_s, deep_idle=deep_idle) and self.admits(entry)

    def _may_run(self, entry: Entry, now_s: float, *, deep_idle: bool) -> bool:
        deferral = self.deferred.get(entry.key)
        return (deep_idle or not entry.long) and (deferral is None or deferral.retry_at_s <= now_s)

    def _in_state(self, state: State) -> Iterator[Entry]:
        return (e for e in self.entries.values() if e.state == state)

    def _order(self, entry: Entry) -> int:
        return -self._heat.get(entry.key, 0)
