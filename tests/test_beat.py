"""Steps that go on are counted and timed as if each had been looked at."""

from __future__ import annotations

import random
import weakref
from enum import Enum, auto
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_moe_autotune import beat as beat_module
from sglang_moe_autotune.beat import Beat
from sglang_moe_autotune.heat import Heat
from sglang_moe_autotune.step_times import BLOCK, StepTimes

if TYPE_CHECKING:
    from collections.abc import Callable

GRAPHS = {"decode": (1, 2, 4, 8), "prefill": (64,)}


class Mode(Enum):
    """SGLang's members are compared by identity here, as its own are."""

    DECODE = auto()
    EXTEND = auto()


class Loop:
    """What ``Serving.batch`` and ``on_batch`` do with a batch, and what comes of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, looks_always: bool, timed: bool = True) -> None:
        self.beat = Beat()
        self.heat = Heat(self.beat)
        self.steps = StepTimes(lambda: GRAPHS, lambda _: None, lambda batch: batch.context, self.beat)  # type: ignore[arg-type, return-value]
        self.steps.on = timed
        self.looks_always, self.looked, self.now_s = looks_always, 0, 0.0
        self.blocks: list[tuple[float, ...]] = []
        monkeypatch.setattr(beat_module, "monotonic", lambda: self.now_s)

    def run(self, batch: Any, each_s: float) -> None:
        self.now_s += each_s
        if not self.looks_always and self.beat.goes_on(batch):
            return
        self.looked += 1
        found = ("decode", len(batch.reqs)) if batch.forward_mode is Mode.DECODE else ("prefill", 50)
        self.heat.batch(found)  # type: ignore[arg-type]
        if self.steps.ran(found, self.now_s, batch):  # type: ignore[arg-type]
            self.blocks.append(tuple(self.steps._open))
            self.steps.block(batch, self.now_s)
        if found[0] == "decode":
            self.beat.begin(batch, *self.steps.follow)


def decoding(count: int) -> Any:
    return SimpleNamespace(reqs=[object() for _ in range(count)], forward_mode=Mode.DECODE, context=1000)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("decode"), st.integers(1, 70)),
        st.tuples(st.sampled_from(["join", "join unseen", "leave", "prefill", "message", "take"]), st.just(1)),
    ),
    max_size=25,
)


@given(EVENTS, st.booleans())
def test_whether_each_step_is_looked_at_or_goes_on_makes_no_difference(
    events: list[tuple[str, int]], timed: bool
) -> None:
    found = []
    for looks_always in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            loop, random_ = Loop(patch, looks_always=looks_always, timed=timed), random.Random(0)  # noqa: S311 - noise
            batch, taken = decoding(3), []
            for what, times in events:
                if what == "decode":
                    for _ in range(times):
                        loop.run(batch, random_.uniform(0.001, 0.01))
                elif what == "join":  # a prefill comes before, and SGLang makes another list
                    loop.run(SimpleNamespace(reqs=[object()], forward_mode=Mode.EXTEND, context=9), 0.02)
                    batch.reqs = [*batch.reqs, object()]
                elif what == "join unseen":  # as SGLang 0.5.13 merges what HiSparse or PD multiplexing made ready
                    batch.reqs.append(object())
                elif what == "leave":
                    batch.reqs = batch.reqs[1:] or [object()]
                elif what == "prefill":  # the same list: what was prefilled decodes on
                    batch.forward_mode = Mode.EXTEND
                    loop.run(batch, 0.02)
                    batch.forward_mode = Mode.DECODE
                elif what == "message":
                    loop.steps.pause()
                else:
                    taken.append(loop.heat.take({}))
            taken.append(loop.heat.take({}))
            found.append((taken, loop.blocks, list(loop.steps._open)))
    assert found[0] == found[1]


def test_one_step_in_sixteen_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, batch = Loop(monkeypatch, looks_always=False), decoding(4)
    for _ in range(3 + 100 * BLOCK):
        loop.run(batch, 0.01)
    assert loop.looked <= 3 + 100
    assert loop.heat.take({}) == {4: 3 + 100 * BLOCK}


@pytest.mark.parametrize("what", ["another list", "more in it", "another mode", "a pause", "the end"])
def test_what_is_not_the_same_does_not_go_on(what: str) -> None:
    beat, batch = Beat(), decoding(4)
    beat.begin(batch, None, BLOCK)
    assert beat.goes_on(batch)
    if what == "another list":
        batch.reqs = list(batch.reqs)
    elif what == "more in it":  # SGLang 0.5.11 and 0.5.13 merge so
        batch.reqs.append(object())
    elif what == "another mode":
        batch.forward_mode = Mode.EXTEND
    elif what == "a pause":
        beat.pause()
    else:
        beat.end()
        beat.begin(batch, None, BLOCK)
    assert not beat.goes_on(batch)


class Requests(list[object]):
    """That a weak reference can be made to."""


@pytest.mark.parametrize("over", [Beat.pause, Beat.end])
def test_requests_are_not_kept_alive_once_they_are_over(over: Callable[[Beat], None]) -> None:
    beat, batch = Beat(), decoding(0)
    batch.reqs = Requests([object()])
    gone = weakref.ref(batch.reqs)
    beat.begin(batch, None, BLOCK)
    over(beat)
    del batch
    assert gone() is None
