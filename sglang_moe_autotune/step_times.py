"""Step times by served size, and whether they got worse when a row took effect there. Pure.

What is timed is the interval between two calls of SGLang's ``run_batch``. In its plain loop a call launches a batch and
its result is awaited before the next one, so the interval is the batch's own time. In the overlap loop, the default, a
call launches batch n, then the result of batch n - 1 is awaited, then comes the next call: with a busy GPU the
interval from call n to call n + 1 is the GPU's time for batch n - 1, and without one it is the host's, in which no
kernel config shows. So an interval counts for a size where that size ran three times in a row, with no idle
pass and no message in between.

Steps are noisy, so the medians of blocks are compared. They grow with the context, so a block is compared with those
before the change that had about as many tokens in their caches. Clocks and other load drift, so what the sizes drifted
whose rows did not change in that time is taken off.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from sglang_moe_autotune.heat import BatchKind  # noqa: TC001 - a field of a tuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from sglang_moe_autotune.beat import Beat

BLOCK: Final = 16
"""intervals a block"""
BEFORE: Final = 32
"""blocks that are kept of a size, those nearest to a change"""
LEAST_BEFORE: Final = 6
LOOKS: Final = (6, 8, 12, 16, 24, 32, 48, 64)
"""Counts of blocks after a change at which it is judged; after the last one it is taken for harmless."""
ALIKE: Final = 0.05
"""difference of contexts, as a fraction, up to which two blocks are compared"""
EXCESS: Final = 0.03
"""which a median must exceed to be worse, as a fraction, where other sizes tell the drift"""
EXCESS_ALONE: Final = 0.06
"""the same where none does"""
SPREADS: Final = 3.0
"""and by how many spreads of the blocks it must be worse; and by a quarter more than nine in ten blocks were off
before, since a load that comes and goes has a small spread while it stays"""

MOST_PLACES: Final = 256
"""that are timed at a time"""
_IN_A_ROW: Final = 3
_PARTNERS: Final = 3
_THINNED: Final = 8
_MOST_AFTER: Final = 512
_CONTROLS: Final = 3
_CONTROL_BLOCKS: Final = 4
_WINDOW: Final = 32
"""blocks of a control on each side, the last ones: a judgement is made between two batches, in less than half a ms"""
_ALONE_FROM: Final = 24
"""Blocks from which on a size that has not run since the change is not waited for."""
_TO_SIGMA: Final = 1.4826
"""a median of absolute deviations times this is the standard deviation of a normal distribution"""

Outcome = Literal["worse", "harmless", "not comparable", "too few before"]


class Place(NamedTuple):
    """What batches run as: the smallest captured graph that holds them, or their own size where they run eagerly."""

    kind: BatchKind
    M: int

    def __str__(self) -> str:
        return f"{self.kind} M={self.M}"


class Block(NamedTuple):
    """Consecutive intervals at a place."""

    log_s: float
    """of their median"""
    context: int
    """tokens in the caches of its requests; 0: not known"""
    at_s: float


class Slowdown(NamedTuple):
    """Steps at a place got worse with its last change."""

    place: Place
    excess: float
    """by which steps take longer, a fraction, without the drift"""
    drift: float
    """of other sizes in the same time, a fraction"""
    steps: int
    """after the change, that were compared"""
    controls: int
    """sizes that the drift is of"""

    def __str__(self) -> str:
        others = f"{self.controls} other sizes drifted {100 * self.drift:+.1f} %" if self.controls else "no other size"
        return f"{self.steps} steps of {self.place} took {100 * self.excess:.1f} % longer than before ({others})"


class _Series:
    """What is kept of one place; its blocks all ran with the same rows."""

    __slots__ = (
        *("after", "at_s", "before", "blocks", "context", "controls", "dropped", "older", "open", "residuals"),
        *("restarts", "usual", "used_s"),
    )

    def __init__(self) -> None:
        self.open: list[float] = []
        self.blocks: deque[Block] = deque(maxlen=BEFORE)
        self.older: deque[Block] = deque(maxlen=BEFORE)
        """one in eight of those before: what is usual there"""
        self.dropped = self.context = 0
        self.before: tuple[Block, ...] = ()
        """the blocks before the change that is watched; none: nothing is"""
        self.at_s = self.used_s = self.usual = 0.0
        self.controls: list[tuple[_Series, int, list[Block]]] = []
        """other places at the change, how often they had begun anew by then, and their blocks before it"""
        self.restarts = 0
        self.residuals: list[float] = []
        """of the blocks after it to their likes before it"""
        self.after = 0

    def restart(self) -> None:
        self.open, self.residuals, self.before, self.controls, self.after = [], [], (), [], 0
        self.restarts += 1
        self.blocks.clear()
        self.older.clear()

    def add(self, block: Block) -> None:
        if len(self.blocks) == BEFORE:
            self.dropped += 1
            if self.dropped % _THINNED == 0:
                self.older.append(self.blocks[0])
        self.blocks.append(block)


class StepTimes:
    """``ran`` before every batch, ``block`` where that says so, ``changed`` where rows took effect."""

    def __init__(
        self,
        captured: Callable[[], Mapping[BatchKind, Sequence[int]]],
        opened: Callable[[Place], object],
        context_of: Callable[[Any], int],
        beat: Beat,
    ) -> None:
        """captured: tokens of the graphs by kind, ascending. opened: told of each place that is timed from now on.
        context_of: tokens in the caches of a batch's requests, 0 where that is not known; asked for some batches.
        beat: times the steps that follow a batch like it."""
        self.on = False
        """is anything timed? Not where no row changes in this process"""
        self.counts: dict[Outcome, int] = {}
        """changes by what was found of them"""
        self._captured, self._opened, self._context_of = captured, opened, context_of
        self._series: dict[Place, _Series] = {}
        self._found: tuple[BatchKind, int] | None = None
        self._place: Place | None = None
        self._row = 0
        self._open: list[float] = []
        self._beat = beat

    @property
    def places(self) -> Iterable[Place]:
        return self._series.keys()

    @property
    def watching(self) -> int:
        """Places where a change is being judged."""
        return sum(bool(series.before) for series in self._series.values())

    def ran(self, found: tuple[BatchKind, int], now_s: float, batch: Any) -> bool:
        """A batch of this kind and so many tokens is about to run. True where its place has a block full."""
        self._beat.pause()
        if not self.on:
            return False
        if found != self._found:
            self._found = found
            place = self._place_of(*found)
            if place != self._place:
                self._place, self._row, self._beat.last_s = place, 1, now_s
                return False
        if self._row < _IN_A_ROW:
            self._row += 1
            if self._row < _IN_A_ROW:
                self._beat.last_s = now_s
                return False
            self._open = self._take_up(self._context_of(batch)).open
        self._open.append(now_s - self._beat.last_s)
        self._beat.last_s = now_s
        return len(self._open) >= BLOCK

    @property
    def follow(self) -> tuple[list[float] | None, int]:
        """For ``Beat.begin``, after ``ran`` and ``block``: a block's last interval is not the beat's to take."""
        if not self.on:
            return None, BLOCK
        if self._found is None or self._row < _IN_A_ROW:
            return None, 0
        return self._open, max(0, BLOCK - 1 - len(self._open))

    def pause(self) -> None:
        """Something came between two batches: an idle pass, a message, a batch that is not timed."""
        self._found = self._place = None
        self._beat.pause()

    def block(self, batch: Any, now_s: float) -> Slowdown | None:
        """Close the block that is full with this batch; a finding where the judgement needed just that."""
        place = self._place
        series = self._series.get(place) if place is not None else None
        if place is None or series is None or not series.open:
            return None
        series.context = self._context_of(batch)
        block = Block(math.log(max(1e-9, median(series.open))), series.context, now_s)
        series.open.clear()
        series.used_s = now_s
        series.add(block)
        return self._judge(place, series, block) if series.before else None

    def changed(self, place: Place, now_s: float, *, watch: bool = True) -> bool:
        """Other rows are in effect there from now on. True where it is watched what that does to the steps.

        A change that comes before the last one was judged counts with it, against what was before both.
        """
        if (series := self._series.get(place)) is None:
            return False
        before = series.before or tuple(series.blocks)
        known = before + tuple(series.older)
        series.restart()
        if place == self._place:
            self.pause()
        if not watch:
            return False
        if len(before) < LEAST_BEFORE:
            self._count("too few before")
            return False
        series.before, series.at_s = before, now_s
        series.controls = self._controls(series)
        series.usual = _usual([shift for block in known if (shift := _shift(block, known)) is not None])
        return True

    # -- the places ----------------------------------------------------------------------------------------------------

    def _place_of(self, kind: BatchKind, tokens: int) -> Place:
        sizes = self._captured().get(kind, ())
        place = bisect.bisect_left(sizes, tokens)
        return Place(kind, sizes[place] if place < len(sizes) else tokens)

    def _take_up(self, context: int) -> _Series:
        place = self._place
        assert place is not None  # noqa: S101 - for the type checker
        if (series := self._series.get(place)) is None:
            if len(self._series) >= MOST_PLACES:  # eager sizes can be any: the one that was not met for longest goes
                del self._series[min(self._series, key=lambda other: self._series[other].used_s)]
            series = self._series[place] = _Series()
            series.used_s = self._beat.last_s
            self._opened(place)
        if abs(context - series.context) > ALIKE * context:
            series.open.clear()  # other requests: a block is of one context
        series.context = context
        return series

    # -- the judgement -------------------------------------------------------------------------------------------------

    def _judge(self, place: Place, series: _Series, block: Block) -> Slowdown | None:
        series.after += 1
        shift = _shift(block, series.before)
        if shift is None:
            if series.after >= _MOST_AFTER:
                self._end(series, "not comparable")
            return None
        series.residuals.append(shift)
        count = len(series.residuals)
        if count not in LOOKS:
            return None
        drifts, known = self._drifts(series, count)
        drift, unrest = (median(column) for column in zip(*drifts, strict=True)) if drifts else (0.0, 0.0)
        excess = median(series.residuals) - drift
        usual = max(series.usual, unrest, SPREADS * _spread(series.residuals))
        least = math.log1p(EXCESS if drifts else EXCESS_ALONE)
        if known and excess > max(least, usual):
            self._end(series, "worse")
            return Slowdown(place, math.expm1(excess), math.expm1(drift), count * BLOCK, len(drifts))
        if count == LOOKS[-1]:
            self._end(series, "harmless")
        return None

    def _drifts(self, series: _Series, count: int) -> tuple[list[tuple[float, float]], bool]:
        """How much the places drifted whose rows stayed the same, and what is usual there; and whether that is all: of
        those that run on not enough may be known yet, and for one that was not seen since the change some blocks are
        waited for."""
        drifts: list[tuple[float, float]] = []
        known = True
        for other, restarts, before in series.controls:
            if other.restarts != restarts:
                continue
            after = [b for b in other.blocks if b.at_s >= series.at_s][-_WINDOW:]
            shifts = [shift for block in after if (shift := _shift(block, before)) is not None]
            if len(shifts) >= _CONTROL_BLOCKS:
                drift = median(shifts)
                drifts.append((drift, _usual([shift - drift for shift in shifts])))
            elif after or count < _ALONE_FROM:
                known = False
        return drifts, known or bool(drifts)

    def _controls(self, series: _Series) -> list[tuple[_Series, int, list[Block]]]:
        """The places that were used last, with what is known of each before a change elsewhere."""
        found: list[tuple[_Series, int, list[Block]]] = []
        for other in sorted(self._series.values(), key=lambda other: -other.used_s):
            if len(found) == _CONTROLS:
                break
            before = [b for b in other.blocks if b.at_s >= series.before[0].at_s][-_WINDOW:]
            if other is not series and not other.before and len(before) >= _CONTROL_BLOCKS:
                found.append((other, other.restarts, before))
        return found

    def _end(self, series: _Series, outcome: Outcome) -> None:
        series.before, series.controls, series.residuals = (), [], []
        self._count(outcome)

    def _count(self, outcome: Outcome) -> None:
        self.counts[outcome] = self.counts.get(outcome, 0) + 1


def _shift(block: Block, before: Sequence[Block]) -> float | None:
    """By how much the block is slower than those with such a context, in log time; None where there are too few."""
    margin = ALIKE * block.context
    partners = [b.log_s for b in before if abs(b.context - block.context) <= margin and b is not block]
    return block.log_s - median(partners) if len(partners) >= _PARTNERS else None


def _usual(shifts: Sequence[float]) -> float:
    """What a block may be off by without anything having changed."""
    if not shifts:
        return math.inf
    return max(SPREADS * _spread(shifts), 1.25 * sorted(map(abs, shifts))[int(0.9 * len(shifts))])


def _spread(shifts: Sequence[float]) -> float:
    """The standard deviation, by the median of absolute deviations; infinite of fewer than three."""
    if len(shifts) < 3:
        return math.inf
    centre = median(shifts)
    return _TO_SIGMA * median([abs(shift - centre) for shift in shifts])
