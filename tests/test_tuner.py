"""One slice a step, the hottest first, nothing adopted that did not prove itself, nothing lost when it is cut short."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import effort
import msgspec
import pytest
import synthetic
from record_values import H200

from sglang_moe_autotune import job, noise
from sglang_moe_autotune.agenda import FINISHED_LOOKS
from sglang_moe_autotune.bench import ALONE, Bench, Comparison, Declined, Share
from sglang_moe_autotune.decision import PairedTest
from sglang_moe_autotune.experience import Trial
from sglang_moe_autotune.records import Contents, Evidence, Record, merge
from sglang_moe_autotune.replay import ReplayProvider
from sglang_moe_autotune.routings import Sampling, sampling
from sglang_moe_autotune.search import SearchOptions
from sglang_moe_autotune.search_space import filled
from sglang_moe_autotune.shapes import ConfigPair
from sglang_moe_autotune.tuner import Step, Tuner, TunerOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sglang_moe_autotune.landscape import Landscape
    from sglang_moe_autotune.shapes import MoeShape
    from sglang_moe_autotune.tried import Tried

LANDSCAPE = synthetic.landscape(ms=(3, 12, 24, 512), ruggedness=0.02)  # C34: M of speculative decoding, too
SHAPE = LANDSCAPE.shape
FEW = SearchOptions(compiled_per_shape=12)
ONE_LOOK = TunerOptions(search=SearchOptions(looks=1))
CALLS = ("prepare", "readiness", "measure", "compare", "adopt", "wind_down", "close")


class Watched:
    """A replay whose bench calls are counted and can be answered by a test instead."""

    def __init__(self, landscape: Landscape = LANDSCAPE, **answers: Callable[..., Any]) -> None:
        self.replay = ReplayProvider(landscape, noise_percent=1.0)
        self.calls: list[str] = []
        self.answers = answers
        self.open_benches = 0
        self.share = ALONE

    def open(self, shape: MoeShape, M: int, baseline: ConfigPair) -> Bench | str:  # noqa: N803
        self.calls.append(f"open {M}")
        if "open" in self.answers and (answer := self.answers["open"](M)) is not None:
            return str(answer)
        bench = self.replay.open(shape, M, baseline)
        assert not isinstance(bench, str)
        self.open_benches += 1
        return WatchedBench(self, bench)  # type: ignore[return-value]


class WatchedBench:
    def __init__(self, provider: Watched, bench: Bench) -> None:
        self._provider, self._bench = provider, bench

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._bench, name)
        if name not in CALLS:
            return self._provider.answers[name]() if name in self._provider.answers else value

        def call(*args: Any) -> Any:
            self._provider.calls.append(name)
            if name == "close":
                self._provider.open_benches -= 1
            answer = self._provider.answers.get(name, lambda *_: None)(*args)
            return value(*args) if answer is None else answer

        return call


class Bed:
    """A tuner on a watched replay, and what came out of it."""

    def __init__(self, provider: Watched | None = None, options: TunerOptions | None = None, **more: Any) -> None:
        self.provider = provider or Watched()
        self.records: list[Record] = []
        self.tuner = Tuner(
            self.provider,
            more.pop("sink", self.records.append),
            options=options or TunerOptions(search=FEW, source="replayed"),
            space=lambda _: self.provider.replay.landscape.candidates,
            clock=self.provider.replay.clock,
            unix_clock=lambda: 7.0,
            **more,
        )

    def add(self, *ms: int) -> Bed:
        for M in ms:  # noqa: N806
            self.tuner.add(SHAPE, M, self.provider.replay.landscape.baselines[M].pair)
        return self

    def run(self, *, deep_idle: bool = True, steps: int = 100_000) -> Iterator[Step]:
        for _ in range(steps):
            step = self.tuner.step(deep_idle)
            yield step
            if step == "nothing":
                return
            if step == "waiting":
                self.provider.replay.wait(0.01)
        raise AssertionError(f"not at rest after {steps} steps")

    def finish(self, *, deep_idle: bool = True) -> list[Record]:
        for _ in self.run(deep_idle=deep_idle):
            pass
        return self.records


def last(records: list[Record]) -> dict[int, Record]:
    return {record.M: record for record in records}


# -- what was tried ----------------------------------------------------------------------------------------------------


def test_what_was_tried_is_told_once_for_each_m_that_is_settled() -> None:
    told: list[tuple[int, list[Tried]]] = []
    bed = Bed(
        options=TunerOptions(search=SearchOptions(compiled_per_shape=12, looks=1), source="replayed"),
        tried=lambda shape, m, rows: told.append((m, list(rows))),
    ).add(3, 12, 24, 512)
    records = last(bed.finish())
    assert sorted(m for m, _ in told) == sorted(records) == [3, 12, 24, 512]
    for m, rows in told:
        measured = bed.tuner.experience(SHAPE).measured[m]
        assert {(row.gemm, row.config) for row in rows} == set(measured)
        assert {row.config for row in rows} >= {records[m].pair.up, records[m].pair.down} - {records[m].baseline.up}
        assert all(row.samples == len(measured[Trial(row.gemm, row.config)].logs) for row in rows)


def test_ratios_are_to_sglangs_own_config_after_a_second_look_too() -> None:
    told: dict[int, list[list[Tried]]] = {}
    bed = Bed(
        options=TunerOptions(search=FEW, source="replayed"),
        tried=lambda shape, m, rows: told.setdefault(m, []).append(list(rows)),
    ).add(3, 12, 24, 512)
    bed.finish()
    assert max(map(len, told.values())) > 1, "some M was searched again"
    assert any(bed.tuner.experience(SHAPE).reference[m] != LANDSCAPE.baselines[m].pair for m in told)
    for m, looks in told.items():
        baseline = LANDSCAPE.baselines[m].pair
        for row in (row for rows in looks for row in rows if row.samples >= 8):
            us, base_us = (LANDSCAPE.latency_us(m, row.gemm, c) for c in (row.config, baseline.of(row.gemm)))
            assert us is not None
            assert base_us is not None
            assert row.ratio == pytest.approx(us / base_us, rel=0.03)


def test_a_sink_that_fails_tells_nothing_of_its_m() -> None:
    told: list[int] = []

    def sink(record: Record) -> None:
        raise OSError("full")

    bed = Bed(sink=sink, tried=lambda shape, m, rows: told.append(m)).add(3)
    with pytest.raises(OSError, match="full"):
        bed.finish()
    assert told == []


# -- slices ------------------------------------------------------------------------------------------------------------


def test_a_step_makes_at_most_one_bench_call() -> None:
    bed = Bed().add(3, 512)
    before = 0
    for _ in bed.run():
        assert len([c for c in bed.provider.calls[before:] if c != "close"]) <= 1
        before = len(bed.provider.calls)
    assert before > 100


def test_a_step_without_work_is_a_few_lines() -> None:
    bed = Bed().add(3)
    bed.finish()
    while bed.tuner.step(deep_idle=False) != "nothing":
        pass
    for deep in (False, True):
        assert effort.lines(lambda deep=deep: bed.tuner.step(deep_idle=deep)) < 20  # type: ignore[misc]


def test_thinking_between_slices_stays_short() -> None:
    bed = Bed(options=TunerOptions()).add(3, 12, 24, 512)
    lines: list[int] = []
    step: Step = "worked"

    def one_step() -> None:
        nonlocal step
        step = bed.tuner.step(deep_idle=True)

    while step != "nothing":
        lines.append(effort.lines(one_step))
        bed.provider.replay.wait(0.01)
    lines.sort()
    assert lines[len(lines) // 2] < 200
    assert lines[int(len(lines) * 0.99)] < 4_000
    assert lines[-1] < 150_000, "the first step of a shape looks at its whole space once"


def test_while_everything_compiles_it_waits_without_measuring() -> None:
    provider = Watched()
    provider.replay.compile_s = 5.0
    bed = Bed(provider).add(3)
    steps = []
    for step in bed.run():
        steps.append(step)
        if provider.replay.now_s > 4.0:
            break
    assert "measure" not in provider.calls
    assert steps.count("waiting") > 100
    assert provider.calls.count("readiness") < 250 * 24  # 4 s of looks, 20 ms apart, at 12 configs of two GEMMs
    bed.finish()
    assert bed.records


def test_a_binary_that_never_comes_does_not_hold_up_the_job_for_ever() -> None:
    stuck: list[Any] = []

    def readiness(gemm: str, config: Any) -> str | None:
        stuck[:] = stuck or [config]
        return "waiting" if config == stuck[0] else None

    provider = Watched(readiness=readiness)
    bed = Bed(provider).add(3)
    for step in bed.run():
        if step == "waiting":
            provider.replay.wait(1.0)
    assert set(last(bed.records)) == {3}


def test_a_server_that_was_busy_for_an_hour_drops_nothing_that_was_compiled_meanwhile() -> None:
    """A binary that is there takes some more questions to be loaded."""
    asked: dict[tuple[str, Any], int] = {}
    compiled = False

    def readiness(gemm: str, config: Any) -> str | None:
        if not compiled:
            return "waiting"
        count = asked[gemm, config] = asked.get((gemm, config), 0) + 1
        return "waiting" if count < 4 else None

    bed = Bed(Watched(readiness=readiness)).add(3)
    for _ in range(200):
        bed.tuner.step(deep_idle=True)
    bed.provider.replay.wait(3600.0)
    compiled = True
    bed.finish()
    experience = bed.tuner.experience(SHAPE)
    known = {trial.config for trial in (*experience.measured[3], *experience.failed)}
    assert known == set(experience.ordered)
    assert len(known) > len({trial.config for trial in experience.failed})


# -- order -------------------------------------------------------------------------------------------------------------


def test_the_hottest_goes_first() -> None:
    bed = Bed().add(3, 12, 24)
    for M, count in ((12, 5), (24, 50), (3, 1), (24, 1)):  # noqa: N806
        bed.tuner.heat(SHAPE, M, count)
    bed.finish()
    assert list(dict.fromkeys(record.M for record in bed.records)) == [24, 12, 3]


def test_long_launches_run_in_deep_idle_only_and_do_not_hold_up_short_ones() -> None:
    launch_us = max(LANDSCAPE.baselines[24].up_us, LANDSCAPE.baselines[24].down_us)
    bed = Bed(options=TunerOptions(search=FEW, slice_us=launch_us + 1)).add(512, 3, 24)
    bed.tuner.heat(SHAPE, 512, 100)
    bed.finish(deep_idle=False)
    assert set(last(bed.records)) == {3, 24}
    bed.finish()
    assert set(last(bed.records)) == {3, 24, 512}


def test_what_is_tuned_in_deep_idle_only_has_its_share_of_the_configs_kept_for_it() -> None:
    launch_us = max(LANDSCAPE.baselines[24].up_us, LANDSCAPE.baselines[24].down_us)
    options = TunerOptions(search=SearchOptions(compiled_per_shape=40), slice_us=launch_us + 1)
    bed = Bed(options=options).add(3, 12, 24, 512)
    bed.finish(deep_idle=False)
    ordered = bed.tuner.experience(SHAPE).ordered
    assert set(last(bed.records)) == {3, 12, 24}
    assert 20 < len(ordered) <= 30, "the three short ones have three quarters, and take them"
    bed.finish()
    assert 512 in last(bed.records)
    assert 36 < len(ordered) <= 40


def test_a_long_job_gives_way_when_deep_idle_ends() -> None:
    launch_us = max(LANDSCAPE.baselines[24].up_us, LANDSCAPE.baselines[24].down_us)
    bed = Bed(options=TunerOptions(search=FEW, slice_us=launch_us + 1)).add(512)
    for _ in range(60):
        bed.tuner.step(deep_idle=True)
    spent_s = bed.tuner.gpu_s
    assert bed.tuner.step(deep_idle=False) == "nothing"
    bed.add(3)
    for _ in range(2):  # the long one's bench is closed first
        assert bed.tuner.step(deep_idle=False) == "worked"
        assert bed.tuner.snapshot().current is None
    assert bed.tuner.step(deep_idle=False) == "worked"
    assert bed.tuner.snapshot().current == (SHAPE.slug, 3)
    assert bed.provider.open_benches <= 1
    assert bed.tuner.gpu_s == spent_s


# -- judgement ---------------------------------------------------------------------------------------------------------


def test_records_state_the_truth_within_their_bounds() -> None:
    options = TunerOptions(source="replayed", sglang="0.5.23", driver="580")
    records = last(Bed(options=options).add(3, 12, 24, 512).finish())
    assert set(records) == {3, 12, 24, 512}
    for M, record in records.items():  # noqa: N806
        baseline = LANDSCAPE.baselines[M]
        assert record.baseline == baseline.pair
        assert (record.source, record.sglang, record.driver, record.unix_s) == ("replayed", "0.5.23", "580", 7.0)
        truth = 1 - LANDSCAPE.pair_us(M, record.pair) / (baseline.up_us + baseline.down_us)
        evidence = record.evidence
        if record.verdict == "faster":
            assert evidence.gain_low <= evidence.gain <= evidence.gain_high
            assert evidence.gain == pytest.approx(truth, abs=0.015)
            assert truth > 0
            assert evidence.max_error == 0.0
        else:
            assert record.pair == baseline.pair
            assert evidence.gain == 0.0
        assert evidence.baseline_us == pytest.approx(baseline.up_us + baseline.down_us, rel=0.02)
        assert evidence.gpu_s > 0
        assert evidence.measured > 0
    assert {record.verdict for record in records.values()} == {"faster", "baseline"} or records[512].verdict == "faster"


def test_c19_a_pair_with_another_output_is_refused_and_the_next_one_is_taken() -> None:
    once = TunerOptions(search=SearchOptions(compiled_per_shape=12, looks=1))
    chosen = last(Bed(options=once).add(512).finish())[512].pair
    bad: list[ConfigPair] = []

    def compare(pair: ConfigPair, case: int) -> Comparison | None:
        if not bad:
            bad.append(pair)
        return Comparison(ok=False, error=float("inf"), tolerance=0.01) if pair in bad and case == 1 else None

    record = last(Bed(Watched(compare=compare), once).add(512).finish())[512]
    assert bad[0] == chosen
    assert record.pair != chosen
    assert record.verdict == "faster"


def test_where_every_output_differs_the_baseline_stays() -> None:
    refuse = Comparison(ok=False, error=1.0, tolerance=0.01)
    bed = Bed(Watched(compare=lambda pair, case: refuse)).add(512)
    record = last(bed.finish())[512]
    assert (record.verdict, record.pair) == ("baseline", LANDSCAPE.baselines[512].pair)
    assert "adopt" not in bed.provider.calls


def test_every_case_is_compared_before_adoption() -> None:
    cases: list[tuple[ConfigPair, int]] = []
    bed = Bed(Watched(compare=lambda pair, case: cases.append((pair, case)), compare_cases=lambda: 5)).add(512)
    record = last(bed.finish())[512]
    assert {case for pair, case in cases if pair == record.pair} == set(range(5))
    calls = [c for c in bed.provider.calls if c in {"compare", "adopt"}]
    assert calls.index("adopt") >= 5


def test_a_pair_that_serving_would_have_to_compile_is_not_adopted() -> None:
    bed = Bed(Watched(adopt=lambda pair: "failed")).add(512)
    assert last(bed.finish())[512].verdict == "baseline"


def test_an_adoption_that_waits_is_asked_again() -> None:
    answers = iter(["waiting", "waiting", "ready"])
    bed = Bed(Watched(adopt=lambda pair: next(answers, None))).add(512)
    assert last(bed.finish())[512].verdict == "faster"


def test_nothing_is_accepted_where_every_candidate_is_the_baseline_under_another_name() -> None:
    def same(M: int, gemm: Any, row: dict[Any, float]) -> dict[Any, float]:  # noqa: N803
        us = LANDSCAPE.baselines[M].up_us if gemm == "up" else LANDSCAPE.baselines[M].down_us
        return dict.fromkeys(row, us)

    for _ in range(3):
        bed = Bed(Watched(synthetic.mapped(LANDSCAPE, same))).add(3, 12, 24, 512)
        bed.provider.replay.noise = noise.LaunchNoise(0.05, random.Random(0))  # noqa: S311 - no secret
        assert {record.verdict for record in bed.finish()} == {"baseline"}


def test_an_empty_space_is_answered_with_the_baseline() -> None:
    bed = Bed(Watched(msgspec.structs.replace(LANDSCAPE, candidates=()))).add(512)
    assert last(bed.finish())[512].verdict == "baseline"


def test_a_bench_that_never_measures_puts_its_m_off_and_decides_nothing() -> None:
    bed = Bed(Watched(measure=lambda *_: [])).add(512)
    assert bed.finish() == []
    (deferral,) = bed.tuner.deferred.values()
    assert "dirty" in deferral.reason


def test_a_second_look_finds_what_other_m_found_and_says_what_it_gains_over_sglangs_own() -> None:
    one = last(Bed(options=ONE_LOOK).add(512, 12, 24, 3).finish())
    records = Bed(options=TunerOptions()).add(512, 12, 24, 3).finish()
    again = [record for record in records if record != next(r for r in records if r.M == record.M)]
    assert again
    for record in again:
        first = one[record.M]
        assert LANDSCAPE.pair_us(record.M, record.pair) <= LANDSCAPE.pair_us(record.M, first.pair)
        both = (Contents(H200, {(SHAPE, record.M): r}) for r in (first, record))
        assert merge(*both).records[SHAPE, record.M] == record
        baseline = LANDSCAPE.baselines[record.M]
        truth = 1 - LANDSCAPE.pair_us(record.M, record.pair) / (baseline.up_us + baseline.down_us)
        assert record.evidence.gain == pytest.approx(truth, abs=0.02)


def test_what_a_pair_leaves_as_it_was_is_neither_compared_nor_timed_again() -> None:
    bed = Bed(options=TunerOptions()).add(512, 12, 24, 3)
    found: list[tuple[set[str], set[str]]] = []
    seen: dict[str, set[str]] = {"deciding": set(), "confirming": set()}

    def measured(gemm: str, *_: object) -> None:
        if (phase := bed.tuner.snapshot().phase) in seen:
            seen[phase].add(gemm)

    def adopted(pair: ConfigPair) -> None:
        found.append((set(pair.unlike(bed.tuner.experience(SHAPE).reference[current()])), set.union(*seen.values())))

    def current() -> int:
        key = bed.tuner.snapshot().current
        assert key is not None
        return key[1]

    def opened(_: int) -> None:
        for gemms in seen.values():
            gemms.clear()

    bed.provider.answers |= {"measure": measured, "adopt": adopted, "open": opened}
    bed.finish()
    assert {"up", "down"} in [changed for changed, _ in found]
    assert any(len(changed) == 1 for changed, _ in found)
    for changed, launched in found:
        assert launched == changed


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_other_ranks_put_to_a_second_test_has_one_here_by_all_routings(
    monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    bed, tests, phases = Bed(options=ONE_LOOK), [], set()
    bed.provider.share = Share(0, ranks)

    def tested(*args: Any, sampling: Sampling) -> PairedTest:
        phases.add(bed.tuner.snapshot().phase)
        tests.append(sampling)
        return PairedTest(*args, sampling=sampling)

    monkeypatch.setattr(job, "PairedTest", tested)
    found = bed.add(512).finish()
    assert [record.verdict for record in found] == ["faster"]
    full = sampling(SHAPE, 512)
    assert full.per_round > 1
    assert (phases, tests) == (
        ({"deciding"}, [full]) if ranks > 1 else ({"deciding", "confirming"}, [Sampling(full.per_sample), full])
    )


def test_a_winner_that_a_further_look_finds_slower_than_sglangs_own_is_given_up_for_all_copies() -> None:
    own = LANDSCAPE.baselines[12].pair
    spelt_out, slow = filled(own.up), LANDSCAPE.best(12)[0].up
    assert spelt_out != own.up
    few = synthetic.mapped(LANDSCAPE, lambda _m, _gemm, row: {spelt_out: row[spelt_out], slow: 3 * row[spelt_out]})
    few = msgspec.structs.replace(few, candidates=tuple(c for c in LANDSCAPE.candidates if c in {spelt_out, slow}))
    evidence = msgspec.structs.replace(stored(12).evidence, looks=FINISHED_LOOKS - 1)
    before = stored(12, pair=ConfigPair(slow, slow), evidence=evidence)
    bed = Bed(Watched(few), TunerOptions(search=FEW))
    bed.tuner.learn(before)
    (after,) = bed.add(12).finish()
    assert (after.verdict, after.pair) == ("baseline", own), "not SGLang's own config under another spelling"
    found = after.evidence
    assert (found.gain, found.gain_low, found.gain_high, found.max_error) == (0.0, 0.0, 0.0, None)
    assert found.chosen_us == found.baseline_us
    first, second = (Contents(H200, {(SHAPE, 12): record}) for record in (before, after))
    assert merge(first, second).records[SHAPE, 12] == after


@pytest.mark.parametrize(
    ("times", "verdict"),
    [pytest.param(1.2, "baseline", id="slower than SGLang's"), pytest.param(0.9, "faster", id="faster than SGLang's")],
)
def test_what_beats_a_winner_that_has_become_slow_must_beat_sglangs_own_config_too(times: float, verdict: str) -> None:
    own = LANDSCAPE.baselines[12].pair
    candidates = [c for c in LANDSCAPE.candidates if c.BLOCK_SIZE_M == own.up.BLOCK_SIZE_M and filled(own.up) != c]
    slow, new = candidates[:2]
    few = synthetic.mapped(
        LANDSCAPE,
        lambda _m, _gemm, row: {slow: 1.5 * row[filled(own.up)], new: times * row[filled(own.up)]},
    )
    few = msgspec.structs.replace(few, candidates=(slow, new))
    evidence = msgspec.structs.replace(stored(12).evidence, looks=FINISHED_LOOKS - 1)
    bed = Bed(Watched(few), TunerOptions(search=FEW))
    bed.tuner.learn(before := stored(12, pair=ConfigPair(slow, slow), evidence=evidence))
    (after,) = bed.add(12).finish()
    assert (after.verdict, after.pair) == (verdict, ConfigPair(new, new) if verdict == "faster" else own)
    truth = max(0.0, 1 - times)
    assert after.evidence.gain == pytest.approx(truth, abs=0.02), "not what the old evidence promised"
    assert after.evidence.gain_low <= truth <= after.evidence.gain_high
    first, second = (Contents(H200, {(SHAPE, 12): record}) for record in (before, after))
    assert merge(first, second).records[SHAPE, 12] == after


def test_where_sglangs_own_config_cannot_be_launched_beside_them_the_row_stays_as_it_was() -> None:
    own = LANDSCAPE.baselines[12].pair

    def readiness(gemm: str, config: Any) -> str | None:
        return "failed" if config in (own.up, own.down, filled(own.up), filled(own.down)) else None

    evidence = msgspec.structs.replace(stored(12).evidence, looks=FINISHED_LOOKS - 1)
    slow = next(c for c in LANDSCAPE.candidates if c.BLOCK_SIZE_M == own.up.BLOCK_SIZE_M and filled(own.up) != c)
    bed = Bed(Watched(LANDSCAPE, readiness=readiness), TunerOptions(search=FEW))
    bed.tuner.learn(stored(12, pair=ConfigPair(slow, slow), evidence=evidence))
    (after,) = bed.add(12).finish()
    assert (after.pair, after.evidence.gain) == (ConfigPair(slow, slow), evidence.gain)


# -- trouble -----------------------------------------------------------------------------------------------------------


def test_a_reason_defers_without_spinning_and_a_later_try_succeeds() -> None:
    provider = Watched(open=lambda m: "200 MiB free, 300 needed" if m == 512 else None)
    bed = Bed(provider, TunerOptions(search=FEW, retry_s=10.0)).add(512, 3)
    bed.finish()
    assert set(last(bed.records)) == {3}
    assert [d.reason for d in bed.tuner.deferred.values()] == ["200 MiB free, 300 needed"]
    for _ in range(1000):
        assert bed.tuner.step(deep_idle=True) == "nothing"
    assert provider.calls.count("open 512") == 1
    for _ in range(6000):
        provider.replay.wait(0.1)
        bed.tuner.step(deep_idle=True)
    assert 5 <= provider.calls.count("open 512") <= 7  # 10 minutes: after 10, 30, 70, 150, 310 s
    del provider.answers["open"]
    provider.replay.wait(3600)
    bed.finish()
    assert set(last(bed.records)) == {3, 512}
    assert not bed.tuner.deferred


def test_an_m_whose_offsets_would_overflow_is_declined_before_a_bench_is_opened() -> None:
    packed = synthetic.MoeShape((8, 8192, 2048), (8, 4096, 2048), 8, "int4_w4a16", (0, 32))
    bed = Bed()
    bed.tuner.add(packed, 1 << 17, LANDSCAPE.baselines[512].pair)
    assert bed.finish() == []
    assert not bed.provider.calls
    assert ["32-bit" in d.reason for d in bed.tuner.deferred.values()] == [True]


def test_c18_what_takes_a_thousand_times_as_long_is_launched_once_to_load_and_once_to_measure() -> None:
    endless = synthetic.mapped(
        LANDSCAPE, lambda _, gemm, row: {c: us * (1000 if c.num_stages == 3 else 1) for c, us in row.items()}
    )
    launched: dict[tuple[int, str, Any], int] = {}
    at = [0]
    provider = Watched(
        endless,
        open=lambda m: at.__setitem__(0, m),
        measure=lambda gemm, config, count: launched.__setitem__(
            key := (at[0], gemm, config), launched.get(key, 0) + 1
        ),
    )
    records = last(Bed(provider, TunerOptions(source="replayed")).add(3, 512).finish())
    slow = {count for (_, _, config), count in launched.items() if config.num_stages == 3 and config.num_warps}
    assert slow
    # Each M has a bench for each of its looks, and a bench loads what it has not loaded yet.
    assert max(slow) <= 2
    assert all(record.pair.up.num_stages != 3 for record in records.values() if record.verdict == "faster")


def test_an_m_that_is_put_off_in_its_second_look_holds_up_no_other() -> None:
    opened: list[int] = []
    provider = Watched(open=lambda m: opened.append(m) or ("no memory" if m == 512 and opened.count(512) > 1 else None))
    bed = Bed(provider, TunerOptions(source="replayed", retry_s=1e6)).add(512, 3, 12, 24)
    bed.finish()
    assert opened.count(512) == 2
    assert min(opened.count(m) for m in (3, 12, 24)) >= FINISHED_LOOKS
    assert len(bed.tuner.experience(SHAPE).ordered) > 60


@pytest.mark.parametrize("answered", [True, False])
def test_an_m_that_waits_for_deep_idle_holds_up_no_other(answered: bool) -> None:
    launch_us = max(LANDSCAPE.baselines[24].up_us, LANDSCAPE.baselines[24].down_us)
    bed = Bed(options=TunerOptions(source="replayed", slice_us=launch_us + 1)).add(512, 3, 12, 24)
    bed.tuner.heat(SHAPE, 512, 100)
    if answered:
        next(None for step in bed.run() if bed.records)
    bed.finish(deep_idle=False)
    assert {512} & set(last(bed.records)) == ({512} if answered else set())
    assert {m: r.evidence.looks for m, r in last(bed.records).items() if m != 512}.keys() == {3, 12, 24}
    assert len(bed.tuner.experience(SHAPE).ordered) == 60  # what is kept for the fourth is not theirs


def test_a_long_job_that_waits_for_deep_idle_holds_up_no_further_look() -> None:
    """It is begun once every other M has a first answer, and deep idle may not come again for hours."""
    launch_us = max(LANDSCAPE.baselines[24].up_us, LANDSCAPE.baselines[24].down_us)
    bed = Bed(options=TunerOptions(source="replayed", slice_us=launch_us + 1)).add(512, 3, 12, 24)
    while len(last(bed.records)) < 3:
        bed.tuner.step(deep_idle=False)
        bed.provider.replay.wait(0.01)
    while bed.tuner.snapshot().current != (SHAPE.slug, 512):
        bed.tuner.step(deep_idle=True)
    for _ in range(60):
        bed.tuner.step(deep_idle=True)
    assert bed.tuner.snapshot().current == (SHAPE.slug, 512)
    for _ in range(60_000):
        bed.tuner.step(deep_idle=False)
        bed.provider.replay.wait(0.01)
    assert len(bed.tuner.experience(SHAPE).ordered) == 60  # what is kept for the fourth is not theirs
    assert bed.provider.open_benches == 0
    bed.finish()
    assert set(last(bed.records)) == {3, 12, 24, 512}


def test_a_bench_may_decline_in_the_middle() -> None:
    def decline(*_: Any) -> None:
        raise Declined("the weights are offloaded")

    provider = Watched(measure=decline)
    bed = Bed(provider).add(512)
    bed.finish()
    assert [d.reason for d in bed.tuner.deferred.values()] == ["the weights are offloaded"]
    assert provider.open_benches == 0


def test_a_bench_that_declines_while_it_is_prepared_is_asked_ever_less_often() -> None:
    def decline() -> None:
        raise Declined("no live layer")

    provider = Watched(prepare=decline)
    bed = Bed(provider, TunerOptions(search=FEW, retry_s=10.0)).add(512)
    for _ in range(6000):
        provider.replay.wait(0.1)
        bed.tuner.step(deep_idle=True)
    assert 5 <= provider.calls.count("open 512") <= 7


def test_an_exception_goes_to_the_caller_and_the_tuner_goes_on() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: misaligned address")

    provider = Watched(compare=fail)
    bed = Bed(provider, TunerOptions(search=FEW, max_faults=2, retry_s=1.0)).add(512)
    for fault in (1, 2):
        with pytest.raises(RuntimeError, match="misaligned"):
            bed.finish()
        assert provider.open_benches == 0
        assert len(bed.tuner.deferred) == 2 - fault
        provider.replay.wait(2.0)
    del provider.answers["compare"]
    bed.add(3).finish()
    assert set(last(bed.records)) == {3}
    assert bed.tuner.snapshot().failed == ((SHAPE.slug, 512),)


def test_a_sink_that_fails_loses_nothing() -> None:
    kept: list[Record] = []

    def sink(record: Record) -> None:
        if not kept:
            kept.append(record)
            raise OSError("disk full")
        kept.append(record)

    bed = Bed(sink=sink).add(3)
    with pytest.raises(OSError, match="disk full"):
        bed.finish()
    bed.provider.replay.wait(60)
    bed.finish()
    assert [record.M for record in kept][:2] == [3, 3]


def test_abandoning_closes_at_once_and_what_was_measured_is_not_measured_again() -> None:
    once = TunerOptions(search=SearchOptions(compiled_per_shape=12, looks=1))
    bed, whole = Bed(options=once).add(512), Bed(options=once).add(512)
    whole.finish()
    for _ in range(whole.provider.calls.index("compare")):
        bed.tuner.step(deep_idle=True)
    bed.tuner.abandon()
    assert bed.provider.open_benches == 0
    assert bed.tuner.snapshot().current is None
    bed.finish()
    samples, of_whole = (
        sum(len(row.logs) for row in x.tuner.experience(SHAPE).measured[512].values()) for x in (bed, whole)
    )
    assert samples < 1.3 * of_whole
    assert last(bed.records)[512].verdict == "faster"


def lingering(steps: int = 3) -> Watched:
    """A bench takes so many steps to be given back."""
    done = itertools.cycle([*[False] * (steps - 1), True])
    return Watched(wind_down=lambda: next(done))


def test_a_bench_is_given_back_a_step_at_a_time_before_the_next_one_is_opened() -> None:
    bed = Bed(lingering()).add(3, 12)
    for _ in bed.run():
        assert bed.provider.open_benches <= 1
    calls = bed.provider.calls
    assert calls.count("close") >= 2
    for place, call in enumerate(calls):
        if call == "close":
            assert calls[place - 3 : place] == ["wind_down"] * 3
    assert bed.provider.open_benches == 0


def test_a_bench_whose_m_is_decided_elsewhere_is_given_back_a_step_at_a_time() -> None:
    for end in (lambda tuner: tuner.learn(stored(12)), lambda tuner: tuner.settled(SHAPE, 12)):
        bed = Bed(lingering()).add(12)
        for _ in range(50):
            bed.tuner.step(deep_idle=True)
        assert bed.tuner.snapshot().current == (SHAPE.slug, 12)
        bed.provider.calls.clear()
        end(bed.tuner)
        assert bed.provider.calls == [], "telling it costs no slice"
        bed.finish()
        assert bed.provider.calls == [*["wind_down"] * 3, "close"]


def test_what_is_being_given_back_is_closed_at_once_where_it_must_be() -> None:
    bed = Bed(lingering(1000)).add(3)
    while "wind_down" not in bed.provider.calls:
        bed.tuner.step(deep_idle=True)
    assert bed.provider.open_benches == 1
    bed.tuner.abandon()
    assert bed.provider.open_benches == 0
    assert bed.tuner.give_way()


def test_a_bench_whose_giving_back_raises_is_closed_all_the_same() -> None:
    def fails() -> bool:
        raise RuntimeError("the device says no")

    bed = Bed(Watched(wind_down=fails)).add(3)
    with pytest.raises(RuntimeError, match="says no"):
        bed.finish()
    assert bed.provider.open_benches == 0
    assert set(last(bed.records)) == {3}


def test_abandoned_again_and_again_it_still_ends() -> None:
    bed = Bed().add(3)
    for _ in range(40_000):
        for _ in range(300):
            step = bed.tuner.step(deep_idle=True)
        bed.tuner.abandon()
        if bed.records:
            break
        if step == "waiting":
            bed.provider.replay.wait(0.02)
    assert bed.records


# -- records of earlier runs -------------------------------------------------------------------------------------------


def stored(M: int, verdict: str = "faster", **changes: Any) -> Record:  # noqa: N803
    pair = LANDSCAPE.best(M)[0]
    evidence = Evidence(100.0, 80.0, 0.2, 0.19, 0.21, 24, 30, 0.1)
    record = Record(SHAPE, M, verdict, pair, LANDSCAPE.baselines[M].pair, evidence)  # type: ignore[arg-type]
    return msgspec.structs.replace(record, **changes)


def test_c37_a_restart_goes_on_at_the_first_m_without_a_record() -> None:
    bed = Bed()
    for M in (3, 12):  # noqa: N806
        bed.tuner.learn(stored(M))
    bed.add(3, 12, 24).finish()
    assert set(last(bed.records)) == {24}


@pytest.mark.parametrize("part", [0.15, 0.4, 0.7, 0.95])
def test_c37_a_search_that_was_killed_anywhere_goes_on_where_it_stood(part: float) -> None:
    def bed() -> Bed:
        return Bed(options=TunerOptions(source="learned"))

    whole = bed().add(3, 12, 24, 512)
    steps = sum(1 for _ in whole.run())
    killed = bed().add(3, 12, 24, 512)
    for _, _ in zip(range(int(part * steps)), killed.run(), strict=False):
        pass
    kept = last(killed.records)
    again = bed()
    for record in kept.values():
        again.tuner.learn(record)
    again.add(3, 12, 24, 512).finish()
    finished = {M for M, record in kept.items() if record.evidence.looks >= FINISHED_LOOKS}
    assert not finished & {record.M for record in again.records}
    records = kept | last(again.records)
    assert set(records) == {3, 12, 24, 512}
    for M, record in records.items():  # noqa: N806
        if M in kept and record != kept[M]:
            both = (Contents(H200, {(SHAPE, M): r}) for r in (kept[M], record))
            assert merge(*both).records[SHAPE, M] == record
            assert record.evidence.gpu_s > kept[M].evidence.gpu_s
    best = last(whole.records)
    lags = [LANDSCAPE.pair_us(M, r.pair) / LANDSCAPE.pair_us(M, best[M].pair) for M, r in records.items()]
    assert sum(lags) / len(lags) < 1.06


def test_a_stored_first_answer_has_its_second_look_and_keeps_its_evidence_where_that_finds_nothing() -> None:
    evidence = msgspec.structs.replace(stored(12).evidence, looks=1)
    bed = Bed()
    bed.tuner.learn(stored(12, evidence=evidence, source="learned"))
    bed.add(12).finish()
    (record,) = bed.records  # what was stored is the best of the landscape; told once, when it is finished
    assert (record.pair, record.verdict) == (stored(12).pair, "faster")
    found = record.evidence
    assert (found.gain, found.gain_low, found.looks) == (evidence.gain, evidence.gain_low, FINISHED_LOOKS)
    assert found.samples > evidence.samples
    assert found.gpu_s > evidence.gpu_s


def test_a_further_look_ends_where_another_decides_of_its_m() -> None:
    evidence = msgspec.structs.replace(stored(12).evidence, looks=1)
    bed = Bed()
    bed.tuner.learn(stored(12, evidence=evidence))
    bed.add(12)
    for _ in range(5):
        bed.tuner.step(deep_idle=True)
    assert bed.provider.open_benches == 1
    bed.tuner.learn(stored(12, evidence=evidence))  # the same again changes nothing
    assert bed.provider.open_benches == 1
    baseline = LANDSCAPE.baselines[12].pair
    bed.tuner.learn(stored(12, "baseline", pair=baseline, evidence=evidence))  # one rank refused it
    assert bed.tuner.snapshot().current is None
    bed.finish()
    for record in bed.records:  # what is found now was measured against what is served now
        assert record.verdict == "faster"
        truth = 1 - LANDSCAPE.pair_us(12, record.pair) / LANDSCAPE.pair_us(12, baseline)
        assert abs(record.evidence.gain - truth) < 0.25


def test_a_stored_winner_races_first_at_another_m() -> None:
    asked: list[Any] = []
    bed = Bed(Watched(readiness=lambda gemm, config: asked.append(config)))
    bed.tuner.learn(stored(12))
    bed.add(24).finish()
    assert asked[0] in {LANDSCAPE.best(12)[0].up, LANDSCAPE.best(12)[0].down}


@pytest.mark.parametrize(("source", "tuned"), [("learned", True), ("imported", True), ("pinned", False)])
def test_a_record_against_another_baseline_is_tuned_again_unless_pinned(source: str, tuned: bool) -> None:
    bed = Bed(options=TunerOptions(search=FEW))
    bed.tuner.learn(stored(12, baseline=LANDSCAPE.best(512)[0], source=source))
    bed.add(12).finish()
    assert (12 in last(bed.records)) == tuned
    if tuned:
        both = (stored(12, baseline=LANDSCAPE.best(512)[0], source=source), last(bed.records)[12])
        first, second = (Contents(H200, {(SHAPE, 12): record}) for record in both)
        assert merge(first, second).records[SHAPE, 12] == both[1]


def test_c23_what_another_process_decided_in_the_meantime_is_taken_over() -> None:
    bed = Bed().add(512, 12)
    for _ in range(100):
        bed.tuner.step(deep_idle=True)
    assert bed.tuner.snapshot().current == (SHAPE.slug, 512)
    bed.tuner.learn(stored(512))
    assert bed.tuner.snapshot().current is None
    bed.finish()
    assert set(last(bed.records)) == {12}


def test_settled_m_are_left_alone() -> None:
    bed = Bed().add(3, 12)
    for _ in range(50):
        bed.tuner.step(deep_idle=True)
    bed.tuner.settled(SHAPE, 3)
    bed.add(3).finish()
    assert set(last(bed.records)) == {12}


# -- account -----------------------------------------------------------------------------------------------------------


def test_every_launch_is_on_the_account() -> None:
    bed = Bed(options=TunerOptions()).add(3, 12, 24, 512)
    bed.finish()
    assert bed.tuner.gpu_s == pytest.approx(bed.provider.replay.gpu_s)
    assert sum(bed.tuner.gpu_s_per_m(SHAPE).values()) == pytest.approx(bed.tuner.gpu_s)


def test_the_snapshot_tells_queue_and_counts() -> None:
    bed = Bed().add(3, 12, 512)
    bed.tuner.heat(SHAPE, 12, 9)
    bed.tuner.learn(stored(24))
    for _ in range(30):
        bed.tuner.step(deep_idle=True)
    snapshot = bed.tuner.snapshot()
    assert snapshot.queue == ((SHAPE.slug, 12), (SHAPE.slug, 3), (SHAPE.slug, 512))
    assert snapshot.current == (SHAPE.slug, 12)
    assert snapshot.phase == "searching"
    bed.finish()
    after = bed.tuner.snapshot()
    assert (after.queue, after.current) == ((), None)
    assert after.faster + after.baseline == 4
    assert after.compiled == {SHAPE.slug: len(bed.tuner.experience(SHAPE).ordered)}
