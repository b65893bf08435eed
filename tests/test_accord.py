"""The accord: one decision for all ranks, made of what each measured; the slowest rank's gain counts."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_values import H200, pair, record

from sglang_moe_autotune import accord
from sglang_moe_autotune.accord import Finding, decide, propose
from sglang_moe_autotune.bench import COMPARE_CASES, COMPARE_RUNS, Sample, Share
from sglang_moe_autotune.decision import PairedTest
from sglang_moe_autotune.epochs import Table
from sglang_moe_autotune.records import Contents, Record, merge

RANKS = 4
SHARE = COMPARE_CASES * Share(0, RANKS).runs
PROPOSAL = propose(record(), None)


def holds(gain: float, rank: int = 0) -> Finding:
    return Finding(PROPOSAL.id, "holds", gain, gain - 0.01, gain + 0.01, 24 + rank, runs=SHARE)


REFUSED = Finding(PROPOSAL.id, "refused", reason="slower here")
UNSURE = Finding(PROPOSAL.id, "unsure", reason="no memory")


def test_the_slowest_ranks_gain_is_what_the_row_says() -> None:
    found = {rank: holds(gain, rank) for rank, gain in enumerate((0.2, 0.12, 0.05, 0.3))}
    row = decide(PROPOSAL, found, RANKS, None, 0.01)
    assert isinstance(row, Record)
    assert (row.evidence.gain, row.evidence.gain_low) == (0.05, pytest.approx(0.04))
    assert row.evidence.chosen_us == pytest.approx(row.evidence.baseline_us * 0.95)
    assert row.evidence.samples == 24 + 25 + 26 + 27
    assert (row.verdict, row.pair) == ("faster", PROPOSAL.record.pair)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        pytest.param({3: None}, "open", id="a-rank-that-has-not-answered"),
        pytest.param({3: UNSURE}, "open", id="a-rank-that-cannot-measure-it-now"),
        pytest.param({3: REFUSED}, "dismissed", id="one-refusal"),
        pytest.param({2: None, 3: REFUSED}, "dismissed", id="a-refusal-need-not-wait-for-the-rest"),
        pytest.param({3: holds(0.009)}, "dismissed", id="one-rank-gains-less-than-the-least"),
        pytest.param({3: msgspec.structs.replace(holds(0.2), runs=0)}, "dismissed", id="runs-that-nobody-made"),
    ],
)
def test_what_is_not_confirmed_by_every_rank_is_not_published(
    changed: dict[int, Finding | None], expected: str
) -> None:
    found = {rank: holds(0.2) for rank in range(RANKS)} | changed
    present = {rank: finding for rank, finding in found.items() if finding is not None}
    assert decide(PROPOSAL, present, RANKS, None, 0.01) == expected


def test_a_proposal_against_what_is_not_served_any_more_is_outdated() -> None:
    served = record(pair=pair(64))
    found = {rank: holds(0.2) for rank in range(RANKS)}
    assert decide(PROPOSAL, found, RANKS, served, 0.01) == "dismissed"


def test_a_second_step_comes_on_top_of_the_first_for_every_rank() -> None:
    first = record()
    better = propose(record(pair=pair(64), evidence=msgspec.structs.replace(first.evidence, gain=0.28)), first)
    assert better.against == first.pair
    own = accord.own_finding(better, first)
    assert (own.gain, own.whole) == (0.28, True)
    found = {0: own, 1: Finding(better.id, "holds", 0.1, 0.05, 0.15, 30, runs=COMPARE_RUNS)}
    row = decide(better, found, 2, first, 0.01)
    assert isinstance(row, Record)
    assert row.evidence.gain == pytest.approx(1 - 0.9 * 0.9)


def test_a_row_says_no_more_than_its_finder_measured_against_sglangs_own_config() -> None:
    first = record(evidence=msgspec.structs.replace(record().evidence, gain=0.3, gain_low=0.29, gain_high=0.31))
    now = msgspec.structs.replace(first.evidence, gain=0.02, gain_low=0.01, gain_high=0.03)  # the first is slow now
    better = propose(record(pair=pair(64), evidence=now), first)
    other = Finding(better.id, "holds", 0.1, 0.05, 0.15, 9, runs=COMPARE_RUNS)
    found = {0: accord.own_finding(better, first), 1: other}
    row = decide(better, found, 2, first, 0.01)
    assert isinstance(row, Record)
    assert (row.evidence.gain, row.evidence.gain_low, row.evidence.gain_high) == (0.02, 0.01, 0.03)
    first_there, then_here = (Contents(H200, {(r.shape, r.M): r}) for r in (first, row))
    assert merge(first_there, then_here).records[row.shape, row.M] == row


def test_a_dropped_row_is_settled_with_sglangs_own_answer() -> None:
    row = accord.settled(PROPOSAL, {0: holds(0.2), 1: REFUSED})
    assert (row.verdict, row.pair) == ("baseline", PROPOSAL.record.baseline)
    assert (row.evidence.gain, row.evidence.chosen_us) == (0.0, row.evidence.baseline_us)
    assert row.evidence.samples >= PROPOSAL.record.evidence.samples


def test_the_runs_of_a_row_are_those_that_its_ranks_made_each_counted_once() -> None:
    mine = msgspec.structs.replace(record().evidence, runs=SHARE)
    proposal = propose(record(evidence=mine), None)
    own = accord.own_finding(proposal, None)
    assert own.runs == SHARE
    others = msgspec.structs.replace(holds(0.2), id=proposal.id)
    row = decide(proposal, {0: own, 1: others, 2: others, 3: others}, RANKS, None, 0.01)
    assert isinstance(row, Record)
    assert row.evidence.runs == RANKS * SHARE >= COMPARE_RUNS
    better = propose(record(pair=pair(64), evidence=mine), row)
    second = accord.own_finding(better, row)
    assert second.runs == SHARE  # those of the pair before stand behind that pair
    assert accord.settled(proposal, {0: own}).evidence.runs == 0


@given(st.integers(1, 4096))
def test_the_shares_of_all_ranks_add_up_and_each_sees_a_change(ranks: int) -> None:
    runs = Share(0, ranks).runs
    assert ranks * COMPARE_CASES * runs >= COMPARE_RUNS
    assert runs >= 2
    assert runs == 2 or ranks * COMPARE_CASES * (runs - 1) < COMPARE_RUNS
    assert ranks > 1 or COMPARE_CASES * runs == COMPARE_RUNS


@given(st.permutations(range(RANKS)), st.lists(st.floats(0.001, 0.5), min_size=RANKS, max_size=RANKS))
def test_the_order_in_which_findings_come_does_not_matter(order: list[int], gains: list[float]) -> None:
    found = {rank: holds(gains[rank], rank) for rank in order}
    assert decide(PROPOSAL, found, RANKS, None, 0.01) == decide(
        PROPOSAL, dict(sorted(found.items())), RANKS, None, 0.01
    )


def test_c23_two_ranks_that_measure_the_same_pair_with_noise_get_one_decision() -> None:
    """Each rank's own test says what it says; what is served is the same on both, and never what one did not find
    faster. With a gain of 1 % and 2 % noise a launch the two often differ."""
    rng = random.Random(4)  # noqa: S311 - no secret
    differed = published = 0
    for _ in range(60):
        findings = {}
        for rank in (0, 1):
            test = PairedTest(0.0)
            while test.outcome == "undecided":
                up, down = test.wanted
                test.add([noisy(rng) for _ in range(up)], [noisy(rng) for _ in range(down)])
            outcome = "holds" if test.outcome == "faster" else "refused"
            findings[rank] = Finding(PROPOSAL.id, outcome, *test.estimate, test.samples, runs=COMPARE_RUNS // 2)
        differed += findings[0].outcome != findings[1].outcome
        decided = decide(PROPOSAL, findings, 2, None, 0.01)
        assert decided != "open"
        if isinstance(decided, Record):
            published += 1
            assert all(f.outcome == "holds" and f.low > 0 for f in findings.values())
            assert decided.evidence.gain == min(f.gain for f in findings.values())
    assert differed > 0
    assert published > 0


def noisy(rng: random.Random) -> Sample:
    return Sample(99.0 * rng.lognormvariate(0, 0.02), 100.0 * rng.lognormvariate(0, 0.02))


def test_a_table_counts_epochs_and_says_what_came_after_one() -> None:
    table = Table()
    for m in (1, 2, 3, 2):
        table = table.with_row(record(m, samples=40 + table.epoch))
    assert table.epoch == 4
    assert [row.M for row in table.rows] == [1, 3, 2]
    assert [row.M for row in table.after(0)] == [1, 3, 2]
    assert [row.M for row in table.after(1)] == [3, 2]
    assert [row.M for row in table.after(3)] == [2]
    assert table.after(4) == ()
    row = table.row((record().shape, 2))
    assert row is not None
    assert row.evidence.samples == 43
    assert table.row((record().shape, 9)) is None
