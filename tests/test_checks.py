"""Checks: each proposal gets a finding, long launches wait for deep idle, and what cannot be measured is put off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from record_values import record
from synthetic import bf16_shape, landscape

from sglang_moe_autotune.accord import Finding, Proposal, propose
from sglang_moe_autotune.bench import COMPARE_CASES, Comparison, Declined, Share
from sglang_moe_autotune.checks import Checks
from sglang_moe_autotune.replay import ReplayBench, ReplayProvider

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPE = bf16_shape()
RECORDED = landscape(SHAPE)


def proposal(M: int = 64, pair: Any = None) -> Proposal:  # noqa: N803
    best = RECORDED.best(M)[0] if pair is None else pair
    return propose(record(M, SHAPE, pair=best, baseline=RECORDED.baselines[M].pair), None)


class Rank:
    """Checks on a recorded device, and what they found."""

    def __init__(self, slice_us: float = 1e6, **options: Any) -> None:
        self.provider = ReplayProvider(RECORDED, polls=1, **options)
        self.found: list[Finding] = []
        self.checks = Checks(
            self.provider, lambda _, finding: self.found.append(finding), self.provider.clock, slice_us
        )

    def run(self, steps: int = 5000, *, deep_idle: bool = True) -> str:
        result = "nothing"
        for _ in range(steps):
            result = self.checks.step(deep_idle=deep_idle)
            if result == "nothing":
                break
            if result == "waiting":
                self.provider.wait(0.005)
        return result


def test_a_faster_pair_holds_with_this_ranks_own_gain_and_no_other_is_asked_twice() -> None:
    rank, asked = Rank(), proposal()
    rank.checks.add(asked)
    rank.checks.add(asked)
    assert rank.run() == "nothing"
    (finding,) = rank.found
    us = RECORDED.pair_us(64, asked.record.baseline)
    assert finding.outcome == "holds"
    assert finding.gain == pytest.approx(1 - RECORDED.best(64)[1] / us, abs=0.05)
    assert finding.low > 0
    assert rank.checks.gpu_s > 0
    assert len(rank.checks) == 0


@pytest.mark.parametrize(("ranks", "runs"), [(1, 270), (2, 135), (4, 70), (8, 35)])
def test_a_rank_makes_its_share_of_the_runs_in_every_case_and_says_how_many(
    monkeypatch: pytest.MonkeyPatch, ranks: int, runs: int
) -> None:
    compare, cases = ReplayBench.compare, []
    monkeypatch.setattr(ReplayBench, "compare", lambda bench, p, case: cases.append(case) or compare(bench, p, case))
    rank = Rank()
    rank.provider.share = Share(ranks - 1, ranks)
    rank.checks.add(proposal())
    rank.run()
    assert [(f.outcome, f.runs) for f in rank.found] == [("holds", runs)]
    assert cases == list(range(COMPARE_CASES))


def test_a_pair_that_is_not_faster_here_is_refused() -> None:
    asked = proposal(pair=RECORDED.baselines[64].pair)
    rank = Rank()
    rank.checks.add(asked)
    rank.run()
    assert [finding.outcome for finding in rank.found] == ["refused"]


def test_an_output_that_differs_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayBench, "compare", lambda *_: Comparison(ok=False, error=1.0, tolerance=0.01))
    rank = Rank()
    rank.checks.add(proposal())
    rank.run()
    (finding,) = rank.found
    assert finding.outcome == "refused"
    assert "output differs" in finding.reason


def test_what_serving_would_have_to_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayBench, "adopt", lambda *_: "failed")
    rank = Rank()
    rank.checks.add(proposal())
    rank.run()
    assert rank.found[0].outcome == "refused"


def test_launches_longer_than_a_slice_wait_for_deep_idle() -> None:
    rank = Rank(slice_us=1.0)
    rank.checks.add(proposal())
    assert rank.run(deep_idle=False) == "nothing"
    assert rank.found == []
    assert not rank.checks.busy
    assert not rank.checks.ready(deep_idle=False)
    assert rank.checks.ready(deep_idle=True)
    rank.run()
    assert [finding.outcome for finding in rank.found] == ["holds"]


def declines(*_: Any) -> str:
    return "no memory"


def raises(*_: Any) -> str:
    raise Declined("no memory")


@pytest.mark.parametrize("opening", [declines, raises])
def test_what_cannot_be_measured_now_is_unsure_and_tried_again_later(opening: Callable[..., str]) -> None:
    rank = Rank()
    kept, rank.provider.open = rank.provider.open, opening  # type: ignore[method-assign]
    rank.checks.add(proposal())
    assert rank.run() == "nothing"
    assert [(f.outcome, f.reason) for f in rank.found] == [("unsure", "no memory")]
    assert not rank.checks.ready(deep_idle=True)
    rank.provider.open = kept  # type: ignore[method-assign]
    rank.provider.wait(6.0)
    rank.run()
    assert [f.outcome for f in rank.found] == ["unsure", "holds"]


def test_a_binary_that_is_not_ready_holds_nobody_up() -> None:
    rank = Rank(compile_s=30.0)
    rank.checks.add(proposal())
    while not rank.found:
        rank.run(steps=1)
    assert rank.found[0].outcome == "unsure"
    assert rank.provider.now_s < 20
    rank.provider.wait(60.0)
    while len(rank.found) < 2:
        rank.run(steps=1)
        rank.provider.wait(1.0)
    assert rank.found[-1].outcome in ("holds", "unsure")


def test_requests_between_two_looks_at_a_binary_put_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, answers = Rank(), iter(["waiting", "waiting"])
    kept = ReplayBench.adopt

    def adopt(bench: ReplayBench, pair: Any) -> Any:
        if (answer := next(answers, None)) is None:
            return kept(bench, pair)
        rank.provider.wait(60.0)
        return answer

    monkeypatch.setattr(ReplayBench, "adopt", adopt)
    rank.checks.add(proposal())
    rank.run()
    assert [f.outcome for f in rank.found] == ["holds"]


def test_a_fault_of_the_bench_refuses_its_proposal_and_leaves_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    rank.checks.add(proposal())
    rank.checks.add(proposal(8))
    measure = ReplayBench.measure

    def faulty(bench: ReplayBench, *args: Any) -> Any:
        if bench._M == 64:
            raise RuntimeError("planted")
        return measure(bench, *args)

    monkeypatch.setattr(ReplayBench, "measure", faulty)
    with pytest.raises(RuntimeError, match="planted"):
        rank.run()
    assert rank.found[0].outcome == "refused"
    rank.run()
    assert rank.found[1].outcome == "holds"


def test_what_is_not_asked_for_any_more_is_dropped_also_in_the_middle() -> None:
    rank, asked = Rank(), proposal()
    rank.checks.add(asked)
    rank.run(steps=3)
    assert rank.checks.busy
    rank.checks.keep(frozenset())
    assert not rank.checks.busy
    assert len(rank.checks) == 0
    assert rank.run() == "nothing"
    assert rank.found == []


def test_an_abandoned_check_starts_again() -> None:
    rank = Rank()
    rank.checks.add(proposal())
    rank.run(steps=3)
    rank.checks.abandon()
    assert not rank.checks.busy
    rank.run()
    assert [finding.outcome for finding in rank.found] == ["holds"]
