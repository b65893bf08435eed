"""Slower steps are told from noise, drift and growing contexts; the intervals are those of a size's own batches."""

from __future__ import annotations

import math
import random
import time
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_moe_autotune.beat import Beat
from sglang_moe_autotune.step_times import BLOCK, LEAST_BEFORE, LOOKS, Place, Slowdown, StepTimes

GRAPHS = {"decode": [1, 2, 4, 8, 16], "prefill": [64, 128]}
TARGET = Place("decode", 16)


class World(NamedTuple):
    """What makes up the step times of a server."""

    sizes: tuple[int, ...] = (16, 8)
    """requests in the decode batches, in turns"""
    factor: float = 1.0
    """on the steps of 16 requests after the change"""
    noise: float = 0.02
    heavy: float = 0.05
    """share of steps that something else held up, by up to ten times"""
    drift: float = 0.0
    """by which all steps are slower at the end than at the start"""
    growth: float = 0.0
    """by which the context is larger after the change, and grows in between"""
    jitter: float = 0.3
    """of contexts, from one turn to the next"""
    load: float = 0.0
    """by which something else on the machine slows all steps from about the change on"""
    gusts: float = 0.0
    """by which it slows them in stretches of some hundred steps, half of the time"""
    attention: float = 0.3
    """share of a step that grows with the context"""


def run(world: World, seed: int, before: int = 3000, after: int = 2500) -> list[Slowdown]:
    """What is found in a server that runs in turns of 40 steps, with the change in between."""
    rng = random.Random(seed)  # noqa: S311 - noise, no secret
    steps = StepTimes(lambda: GRAPHS, lambda _: None, int, Beat())  # type: ignore[arg-type, return-value]
    steps.on = True
    now_s, found, others, gust = 0.0, [], 1.0, False
    total = before + after
    for number in range(total * len(world.sizes)):
        step, changed = number // len(world.sizes), number >= before * len(world.sizes)
        if number == before * len(world.sizes):
            now_s += 60.0  # the idle time in which the row was found
            steps.pause()
            steps.changed(TARGET, now_s)
        size = world.sizes[number // 40 % len(world.sizes)]
        past = step / total
        context = size * 1000 * (1 + world.growth * (past if not changed else 0.3 + past))
        if number % 40 == 0:
            others = math.exp(rng.gauss(0, world.jitter))
            steps.pause()  # other requests have come
        context *= others
        length_s = 0.01 * (1 - world.attention + world.attention * context / (size * 1000))
        if number % 100 == 0:
            gust = rng.random() < 0.5
        length_s *= (1 + world.gusts * gust) * (1 + world.load * changed)
        length_s *= (1 + world.drift * past) * math.exp(rng.gauss(0, world.noise))
        if rng.random() < world.heavy:
            length_s *= rng.uniform(1, 10)
        if changed and size == TARGET.M:
            length_s *= world.factor
        now_s += length_s
        if steps.ran(("decode", size), now_s, context) and (slowdown := steps.block(context, now_s)) is not None:
            found.append(slowdown)
    return found


QUIET = {
    "noise": World(),
    "much noise": World(noise=0.15, heavy=0.2),
    "one size": World(sizes=(16,)),
    "drift, felt by others too": World(drift=0.25),
    "a small drift of the only size": World(sizes=(16,), drift=0.05),
    "growing context": World(growth=2.0),
    "growing context, one size": World(sizes=(16,), growth=1.0),
    "another load from the change on": World(load=0.2),
    "a load that comes and goes": World(gusts=0.15),
    "the same with one size": World(sizes=(16,), gusts=0.15),
    "it got faster": World(factor=0.8),
}


@pytest.mark.parametrize("name", QUIET)
def test_no_false_alarm(name: str) -> None:
    alarms = [seed for seed in range(30) if run(QUIET[name], seed)]
    assert len(alarms) <= 1, alarms


SLOWER = {
    "noise": World(factor=1.1),
    "one size": World(sizes=(16,), factor=1.1),
    "while all sizes get faster": World(factor=1.1, drift=-0.1),
    "while contexts grow": World(factor=1.1, growth=0.5),
}


@pytest.mark.parametrize("name", SLOWER)
def test_steps_that_take_a_tenth_longer_are_noticed(name: str) -> None:
    found = [run(SLOWER[name], seed) for seed in range(30)]
    assert sum(bool(one) for one in found) >= 29
    for slowdown in (one[0] for one in found if one):
        assert slowdown.place == TARGET
        assert slowdown.excess == pytest.approx(0.1, abs=0.04)
        assert slowdown.steps >= LOOKS[0] * BLOCK >= 64
    assert all(len(one) <= 1 for one in found)


# -- which intervals count ----------------------------------------------------------------------------------------


class Bed:
    """Blocks as they come, of intervals that are given."""

    def __init__(self) -> None:
        self.opened: list[Place] = []
        self.steps = StepTimes(lambda: GRAPHS, self.opened.append, int, Beat())  # type: ignore[arg-type, return-value]
        self.steps.on = True
        self.now_s = 0.0

    def batches(self, count: int, tokens: int = 16, kind: str = "decode", each_s: float = 0.01) -> int:
        """So many batches; the blocks that were full."""
        full = 0
        for _ in range(count):
            self.now_s += each_s
            if self.steps.ran((kind, tokens), self.now_s, 1000):  # type: ignore[arg-type]
                full += 1
                self.steps.block(1000, self.now_s)
        return full


def test_the_first_two_batches_in_a_row_give_no_interval() -> None:
    bed = Bed()
    assert bed.batches(2 + BLOCK - 1) == 0
    assert bed.batches(1) == 1
    assert bed.opened == [TARGET]


@pytest.mark.parametrize("what", ["a pause", "another size", "another kind"])
def test_what_comes_between_begins_a_new_row(what: str) -> None:
    bed = Bed()
    bed.batches(2 + BLOCK - 1)
    if what == "a pause":
        bed.steps.pause()
    else:
        bed.batches(1, 3) if what == "another size" else bed.batches(1, 100, "prefill")
    assert bed.batches(2) == 0
    assert bed.batches(1) == 1


def test_sizes_of_one_graph_are_one_place_and_eager_ones_their_own() -> None:
    bed = Bed()
    for _ in range(BLOCK):
        bed.batches(1, 9)
        bed.batches(1, 12)
    bed.batches(3, 17)
    assert bed.opened == [TARGET, Place("decode", 17)]


def test_a_block_is_of_one_context() -> None:
    bed = Bed()
    bed.batches(2 + BLOCK - 1)
    bed.steps.pause()
    found = [bed.steps.ran(("decode", 16), bed.now_s + n, 1100) for n in range(2 + BLOCK)]
    assert found == [False] * (1 + BLOCK) + [True], "what was begun with other requests is left out"


def test_a_change_with_too_little_before_it_is_not_watched_and_says_so() -> None:
    bed = Bed()
    assert not bed.steps.changed(TARGET, 0.0)
    bed.batches(2 + BLOCK * (LEAST_BEFORE - 1))
    assert not bed.steps.changed(TARGET, bed.now_s)
    assert bed.steps.counts == {"too few before": 1}
    bed.batches(2 + BLOCK * LEAST_BEFORE)
    assert bed.steps.changed(TARGET, bed.now_s)
    assert bed.steps.watching == 1


def test_two_changes_in_a_row_are_judged_against_what_was_before_both() -> None:
    bed = Bed()
    bed.batches(2 + BLOCK * 10)
    bed.steps.changed(TARGET, bed.now_s)
    bed.batches(2 + BLOCK * 3, each_s=0.012)
    assert bed.steps.changed(TARGET, bed.now_s)
    bed.batches(2 + BLOCK * 3, each_s=0.012)
    assert bed.steps.counts == {}
    bed.batches(BLOCK * 3, each_s=0.012)
    assert bed.steps.counts == {"worse": 1}


def test_contexts_that_are_never_alike_are_not_compared() -> None:
    bed = Bed()
    bed.batches(2 + BLOCK * 10)
    bed.steps.changed(TARGET, bed.now_s)
    for number in range(2 + BLOCK * 512):
        bed.now_s += 0.05
        if bed.steps.ran(("decode", 16), bed.now_s, 100_000 + number):
            assert bed.steps.block(100_000 + number, bed.now_s) is None
    assert bed.steps.counts == {"not comparable": 1}


@given(st.lists(st.tuples(st.integers(1, 400), st.sampled_from(["decode", "prefill"]), st.integers(0, 9))))
def test_any_sequence_keeps_its_bounds(batches: list[tuple[int, str, int]]) -> None:
    bed = Bed()
    for tokens, kind, times in batches:
        bed.batches(times, tokens, kind)
        bed.steps.changed(Place(kind, tokens), bed.now_s)  # type: ignore[arg-type]
    assert len(list(bed.steps.places)) <= 256


def test_eager_sizes_without_end_do_not_grow_it() -> None:
    bed = Bed()
    for tokens in range(1000, 1600):
        bed.batches(3, tokens, "prefill")
    assert len(list(bed.steps.places)) == 256
    assert Place("prefill", 1599) in bed.steps.places


def test_a_batch_pays_less_than_a_microsecond() -> None:
    bed = Bed()
    bed.batches(100)
    best_s = float("inf")
    for _ in range(7):
        began_s = time.perf_counter()
        for _ in range(BLOCK * 20):
            bed.now_s += 0.01
            if bed.steps.ran(("decode", 16), bed.now_s, 1000):
                bed.steps.block(1000, bed.now_s)
        best_s = min(best_s, (time.perf_counter() - began_s) / (BLOCK * 20))
    assert best_s < 1e-6
