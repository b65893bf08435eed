"""The search asks for few configs, cuts what is slow, respects what failed, and ends with good pairs."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest
import synthetic

from sglang_moe_autotune.experience import Experience, Trial
from sglang_moe_autotune.hearsay import Heard
from sglang_moe_autotune.prior import Prior
from sglang_moe_autotune.search import Search, SearchOptions
from sglang_moe_autotune.shapes import GEMMS, ConfigPair, KernelConfig

if TYPE_CHECKING:
    from sglang_moe_autotune.landscape import Landscape

LANDSCAPE = synthetic.landscape(ms=(8, 512), ruggedness=0.02)


def race(
    landscape: Landscape,
    M: int,  # noqa: N803
    experience: Experience,
    *,
    allowance: int = 30,
    noise: float = 0.02,
    seed: int = 0,
    options: SearchOptions | None = None,
) -> tuple[Search, list[Trial]]:
    """Answer a search from a landscape; the search and every trial it asked for, in order."""
    rng, baseline = random.Random(seed), landscape.baselines[M].pair  # noqa: S311 - no secret
    search = Search(landscape.shape, M, baseline, experience, Prior(), options, allowance=allowance)
    asked = []
    while not search.done:
        for trial in search.ask():
            asked.append(trial)
            us = landscape.latency_us(M, *trial)
            theirs = landscape.latency_us(M, trial.gemm, baseline.of(trial.gemm))
            if us is None or theirs is None:
                search.fail(trial, "not launchable")
                continue
            noises = [(rng.gauss(0, noise), rng.gauss(0, noise)) for _ in range(search.count(trial))]
            search.tell(trial, [(us * math.exp(a), theirs * math.exp(b)) for a, b in noises])
            assert not search.count(trial)
    return search, asked


def regret(landscape: Landscape, M: int, search: Search) -> float:  # noqa: N803
    return landscape.pair_us(M, search.ranked()[0].pair) / landscape.best(M)[1] - 1


@pytest.mark.parametrize("M", [8, 512])
def test_few_compiles_come_near_the_best_of_the_space(M: int) -> None:  # noqa: N803
    experience = Experience(LANDSCAPE.candidates)
    search, _ = race(LANDSCAPE, M, experience)
    assert len(experience.ordered) <= 30
    assert regret(LANDSCAPE, M, search) < 0.06


def test_the_same_answers_give_the_same_questions() -> None:
    first, second = (race(LANDSCAPE, 512, Experience(LANDSCAPE.candidates)) for _ in range(2))
    assert first[1] == second[1]
    assert first[0].ranked() == second[0].ranked()


def test_experience_of_one_m_saves_compiles_at_the_next() -> None:
    experience = Experience(LANDSCAPE.candidates)
    first, _ = race(LANDSCAPE, 512, experience)
    experience.chosen[512] = first.ranked()[0].pair
    near = synthetic.landscape(ms=(640,), ruggedness=0.02)
    before = len(experience.ordered)
    second, asked = race(near, 640, experience, allowance=2)
    assert len(experience.ordered) - before <= 4
    assert asked[0].config == first.ranked()[0].pair.up  # the neighbour's winner races first
    assert regret(near, 640, second) < 0.06


def test_nothing_new_is_compiled_without_allowance_or_beyond_the_cap() -> None:
    experience = Experience(LANDSCAPE.candidates)
    search, asked = race(LANDSCAPE, 8, experience, allowance=0)
    assert asked == []
    assert search.ranked()[0].pair == LANDSCAPE.baselines[8].pair
    race(LANDSCAPE, 8, experience, allowance=50, options=SearchOptions(compiled_per_shape=11))
    assert len(experience.ordered) == 11


def test_pairs_share_a_tile_and_the_baseline_is_among_them() -> None:
    search, _ = race(LANDSCAPE, 512, Experience(LANDSCAPE.candidates))
    ranked = search.ranked(1000)
    baseline = LANDSCAPE.baselines[512].pair
    assert {pair.up.BLOCK_SIZE_M == pair.down.BLOCK_SIZE_M for pair, _ in ranked} == {True}
    assert [r.relative for r in ranked if r.pair == baseline] == [pytest.approx(1.0)]


def test_slow_trials_get_one_sample_only() -> None:
    experience = Experience(LANDSCAPE.candidates)
    race(LANDSCAPE, 512, experience)
    least = {gemm: min(r.centre for t, r in experience.measured[512].items() if t.gemm == gemm) for gemm in GEMMS}
    slow = [r for t, r in experience.measured[512].items() if r.centre > least[t.gemm] + math.log(1.4)]
    assert slow
    assert {len(row.logs) for row in slow} == {1}


def test_c16_failed_trials_are_recorded_and_not_asked_again() -> None:
    broken = synthetic.mapped(
        LANDSCAPE, lambda _, gemm, row: {c: us for c, us in row.items() if c.num_stages != 3 or gemm == "up"}
    )
    experience = Experience(broken.candidates)
    search, _ = race(broken, 512, experience)
    assert any(t.config.num_stages == 3 for t in experience.failed)
    assert all(pair.down.num_stages != 3 for pair, _ in search.ranked(1000) if pair.down in experience.space)
    failed = set(experience.failed)
    _, asked = race(broken, 8, experience)
    assert not failed & set(asked)


def test_within_the_tie_a_config_in_use_goes_first() -> None:
    a, b = (KernelConfig(64, 64, 64, 1, 4, stages) for stages in (3, 4))
    baseline = ConfigPair(KernelConfig(16, 32, 64, 1), KernelConfig(16, 32, 64, 1))
    for in_use in (a, b):
        experience = Experience([a, b])
        experience.chosen[1024] = ConfigPair(in_use, in_use)
        search = Search(LANDSCAPE.shape, 512, baseline, experience, Prior(), allowance=2)
        for gemm in GEMMS:
            search.tell(Trial(gemm, a), [(50.0, 100.0)] * 8)
            search.tell(Trial(gemm, b), [(50.02, 100.0)] * 8)
        assert search.ranked()[0].pair == ConfigPair(in_use, in_use)


def test_half_of_a_baseline_with_tma_is_paired_with_nothing() -> None:
    baseline = ConfigPair(
        KernelConfig(64, 64, 64, 1, 4, 3), KernelConfig(64, 128, 64, 1, 4, 3, extra=(("USE_TMA", True),))
    )
    candidate = KernelConfig(64, 128, 64, 1, 4, 4)
    search = Search(LANDSCAPE.shape, 512, baseline, Experience([candidate]), Prior(), allowance=1)
    search.tell(Trial("up", candidate), [(50.0, 100.0)] * 8)
    assert [r.pair for r in search.ranked()] == [baseline]
    search.tell(Trial("down", candidate), [(90.0, 100.0)] * 8)
    assert [r.pair for r in search.ranked()] == [ConfigPair(candidate, candidate), baseline]


def test_an_empty_space_ends_at_once_with_the_baseline() -> None:
    search, asked = race(LANDSCAPE, 512, Experience(()))
    assert asked == []
    assert [r.pair for r in search.ranked()] == [LANDSCAPE.baselines[512].pair]


def test_a_candidate_spelled_like_the_baseline_is_no_candidate() -> None:
    experience = Experience([KernelConfig(16, 32, 64, 1, 4, 3)])
    _, asked = race(LANDSCAPE, 8, experience)
    assert asked == []


def test_a_second_look_starts_from_the_ratios_of_the_first() -> None:
    experience = Experience(LANDSCAPE.candidates)
    search, _ = race(LANDSCAPE, 512, experience)
    winner = search.ranked()[0].pair
    before = {t: row.centre for t, row in experience.measured[512].items()}
    rows = experience.at(512, winner)
    trial = Trial("up", winner.up)
    assert rows[trial].centre == pytest.approx(0.0, abs=1e-9)
    other = next(t for t in before if t.gemm == "up" and t != trial)
    assert experience.reference_us[512]["up"][0] == pytest.approx(LANDSCAPE.latency_us(512, "up", winner.up), rel=0.2)
    assert rows[other].centre - rows[trial].centre == pytest.approx(before[other] - before[trial])


def test_what_another_rank_measured_is_tried_and_counts_as_no_measurement() -> None:
    near = synthetic.landscape(ms=(512, 640), ruggedness=0.02)
    other = Experience(near.candidates)
    race(near, 512, other)
    rows = [(t.gemm, t.config, math.exp(row.centre)) for t, row in other.measured[512].items()]
    heard = Heard(near.shape, 512, (*rows, ("up", near.candidates[0], math.nan)))
    experience = Experience(near.candidates)
    experience.hear(heard.M, heard.lags())
    assert set(experience.ordered) == {config for _, config, _ in rows}
    assert experience.measured == {}
    assert experience.nearest(640) == [512]
    # As far as it can be known without the shares of the two GEMMs, it hopes for what the other one hopes for.
    ours, theirs = experience.hopes(640), other.hopes(640)
    known = [config for config in ours if math.isfinite(theirs[config])]
    assert len(known) > len(rows) / 4
    assert all(abs(ours[config] - theirs[config]) < 0.15 for config in known)
    best = min(known, key=theirs.__getitem__)
    assert best in experience.promising(640)[:3]
    race(near, 640, experience, allowance=0)
    assert best in {trial.config for trial in experience.measured[640]}


def test_own_measurements_go_before_what_is_heard() -> None:
    experience = Experience(LANDSCAPE.candidates)
    race(LANDSCAPE, 512, experience)
    before = experience.hopes(640)
    experience.hear(512, dict.fromkeys(before, 1.0))
    assert experience.hopes(640) == before
