"""The statistics of steady load: blocks of steps with tuning on and off in turn. Standard library only.

Four neighbouring blocks are on, off, off, on or the other way round, by a coin. Their difference, the logarithm of on
against off, is free of a drift that is even over the four, and its sign is the coin's where tuning does nothing: hence
Wilcoxon's signed-rank interval holds whatever the host does, for whichever way its speed is distributed and however
long it remembers.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
import statistics
from typing import TYPE_CHECKING, Any, NamedTuple

from bench_figures import quantile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from bench_figures import Piece

_Z = 1.959964
"""of a normal distribution, for an interval of 95 %"""
LEAST_STEPS = 6
"""that count, of a block that counts"""
LEAST_FOURS = 10
_MOST_FOURS = 1500
_RESAMPLES = 1000


class Step(NamedTuple):
    """A batch that began: when, in which block, and how many requests decode in it, 0 for another batch."""

    at_ns: int
    block: int
    size: int


class Block(NamedTuple):
    """Steps of one batch size with the same state of tuning, those dropped after the switch left out."""

    number: int
    tuning: bool
    begin_ns: int
    end_ns: int
    spans_ms: tuple[float, ...]
    """of the steps that count"""
    gaps_ms: tuple[float, ...] = ()
    """between the tokens of a stream, as it sees them"""
    compiling: int | None = None
    """compile processes that were busy in it; None: not known"""

    @property
    def counts(self) -> bool:
        return len(self.spans_ms) >= LEAST_STEPS


def blocks_of(steps: Sequence[Step], size: int, dropped: int, tuning_in: Callable[[int], bool]) -> list[Block]:
    """steps: ordered. A step counts where it, the one before and the one after are decode steps of this batch size in
    its block: a result is awaited one step later. The last block, which is not whole, is left out."""
    found = []
    of_blocks = [(number, list(of)) for number, of in itertools.groupby(steps, key=lambda step: step.block)]
    for number, of in of_blocks[:-1]:
        kept = of[dropped:]
        if number < 0 or len(kept) < 2:
            continue
        spans = [
            (after.at_ns - step.at_ns) / 1e6
            for before, step, after in zip(of[dropped - 1 :], kept, kept[1:], strict=False)
            if before.size == step.size == after.size == size
        ]
        found.append(Block(number, tuning_in(number), kept[0].at_ns, kept[-1].at_ns, tuple(spans)))
    return found


def with_gaps(blocks: Sequence[Block], requests: Iterable[Sequence[Piece]]) -> list[Block]:
    """With what the streams saw: gaps that lie within a block. A piece of several tokens shares its time."""
    begins = [block.begin_ns for block in blocks]
    gaps: list[list[float]] = [[] for _ in blocks]
    for pieces in requests:
        for before, piece in itertools.pairwise(pieces[1:]):
            place = bisect.bisect_right(begins, before.at_ns) - 1
            fresh = piece.tokens - before.tokens
            if place >= 0 and piece.at_ns <= blocks[place].end_ns and fresh > 0:
                gaps[place] += [(piece.at_ns - before.at_ns) / fresh / 1e6] * fresh
    return [block._replace(gaps_ms=tuple(of)) for block, of in zip(blocks, gaps, strict=True)]


def with_compiling(blocks: Sequence[Block], busy: Mapping[int, int]) -> list[Block]:
    """busy: by the number of the block; it is not known of those that are missing."""
    return [block._replace(compiling=busy.get(block.number)) for block in blocks]


def fours(blocks: Sequence[Block]) -> list[tuple[Block, Block, Block, Block]]:
    """Four neighbours each, where all of them count."""
    whole = []
    for _, of in itertools.groupby(blocks, key=lambda block: block.number // 4):
        four = tuple(block for block in of if block.counts)
        if len(four) == 4:
            whole.append(four)
    return whole


def differences(four: Sequence[Sequence[Block]], of: Callable[[Block], float | None]) -> list[float]:
    """log on - log off of each four; those in which a block has no such figure are left out."""
    found = []
    for blocks in four:
        values = [of(block) for block in blocks]
        if all(values):
            signs = [1 if block.tuning else -1 for block in blocks]
            found.append(math.fsum(s * math.log(v) for s, v in zip(signs, values, strict=True) if v) / 2)
    return found


def centre(values: Sequence[float]) -> dict[str, float]:
    """Hodges and Lehmann's: the median of the means of any two, and Wilcoxon's interval about it. Raises ValueError for
    fewer than ``LEAST_FOURS``."""
    count = len(values)
    if count < LEAST_FOURS:
        raise ValueError(f"{count} differences, and {LEAST_FOURS} are the least")
    ordered = sorted(values)
    means = sorted((a + b) / 2 for i, a in enumerate(ordered) for b in ordered[i:])
    tail = count * (count + 1) / 4 - _Z * math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    low = max(0, math.floor(tail))
    return {"value": statistics.median(means), "low": means[low], "high": means[-1 - low]}


def mean(values: Sequence[float], seed: int = 0) -> dict[str, float]:
    """The plain mean with a bootstrap interval: what is rare and long counts here, and what a host did too."""
    random_ = random.Random(seed)  # noqa: S311 - no secret
    drawn = [math.fsum(random_.choices(values, k=len(values))) / len(values) for _ in range(_RESAMPLES)]
    return {"value": statistics.fmean(values), "low": quantile(drawn, 0.025), "high": quantile(drawn, 0.975)}


def step_p50(block: Block) -> float | None:
    return statistics.median(block.spans_ms)


def tokens_s(block: Block) -> float | None:
    """Tokens a second but for the number of streams, which is the same in all blocks."""
    return 1e3 / statistics.fmean(block.spans_ms)


def itl_p50(block: Block) -> float | None:
    return statistics.median(block.gaps_ms) if block.gaps_ms else None


def itl_mean(block: Block) -> float | None:
    return statistics.fmean(block.gaps_ms) if block.gaps_ms else None


FIGURES: dict[str, Callable[[Block], float | None]] = {
    "throughput": tokens_s,
    "inter-token latency": itl_p50,
    "mean inter-token latency": itl_mean,
    "median step": step_p50,
}


def compared(blocks: Sequence[Block], limit: float) -> dict[str, Any]:
    """On against off by figure, as fractions; empty where there is too little. ``mean``: of the same differences."""
    whole = fours(blocks)[:_MOST_FOURS]
    found: dict[str, Any] = {}
    for name, of in FIGURES.items():
        logs = differences(whole, of)
        if len(logs) < LEAST_FOURS:
            continue
        ends, plain = ({k: math.expm1(v) for k, v in one.items()} for one in (centre(logs), mean(logs)))
        found[name] = {
            **ends,
            "pairs": 2 * len(logs),
            "half_width": (ends["high"] - ends["low"]) / 2,
            "interval_within_the_limit": -limit <= ends["low"] and ends["high"] <= limit,
            "mean": plain,
        }
    return found


def by_compiling(blocks: Sequence[Block]) -> dict[str, list[Block]]:
    """Fours in which nothing compiled in the blocks with tuning (``none``), in which something did in both
    (``some``; it is stopped in those without), in one (``between``), and those of which nobody counted it
    (``unknown``)."""
    sides: dict[str, list[Block]] = {"none": [], "some": [], "between": [], "unknown": []}
    for four in fours(blocks):
        on = [block.compiling for block in four if block.tuning]
        name = "unknown" if None in on else "some" if all(on) else "between" if any(on) else "none"
        sides[name] += four
    return sides


def beside_turns(blocks: Sequence[Block], steps: Sequence[Step], turns: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """What turns of the plugin's threads add to the steps beside them: too rare for a median to see. turns: begins and
    ends in ns."""
    usual = {block.number: statistics.median(block.spans_ms) for block in blocks if block.counts}
    begins, added = [step.at_ns for step in steps], []
    for begin, end in turns:
        low, high = max(0, bisect.bisect_right(begins, begin) - 1), bisect.bisect_left(begins, end)
        those = [
            (after.at_ns - step.at_ns) / 1e6 - usual[step.block]
            for step, after in itertools.pairwise(steps[low : high + 1])
            if step.block in usual and step.block == after.block and step.size and step.size == after.size
        ]
        if those:
            added.append(math.fsum(those))
    lengths = [(end - begin) / 1e6 for begin, end in turns]
    if not added:
        return {"turns": len(turns)}
    return {"turns": len(turns), "turn_p50_ms": quantile(lengths, 0.5), "turn_max_ms": max(lengths),
            "added_ms_a_turn": {"mean": statistics.fmean(added), "p50": quantile(added, 0.5)},
            "compared": len(added)}  # fmt: skip
