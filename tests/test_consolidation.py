"""Few winners serve a shape: one is given up only where others do as well, and never for a row that proves no gain."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import synthetic
from record_values import H200

from sglang_moe_autotune.agenda import FINISHED_LOOKS, Entry
from sglang_moe_autotune.consolidation import MOST_LOST, TOLERANCE, Turn, bar, loss, next_turn, weigh
from sglang_moe_autotune.experience import Experience, Trial
from sglang_moe_autotune.landscape import load, shipped
from sglang_moe_autotune.measurement import Measurement
from sglang_moe_autotune.prior import Prior
from sglang_moe_autotune.records import Contents, Evidence, Record, merge
from sglang_moe_autotune.replay import ReplayProvider
from sglang_moe_autotune.search import SearchOptions
from sglang_moe_autotune.shapes import GEMMS, ConfigPair, KernelConfig
from sglang_moe_autotune.tuner import Tuner, TunerOptions

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import bench_search

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from sglang_moe_autotune.landscape import Landscape

MOST = 12
SHAPE = synthetic.bf16_shape()
CONFIGS = tuple(KernelConfig(16, 64, 64, group, 4, 3) for group in range(1, MOST + 4))
SGLANG = ConfigPair(KernelConfig(16, 32, 64, 1), KernelConfig(16, 32, 64, 1))
EVIDENCE = Evidence(100.0, 80.0, 0.2, 0.19, 0.21, 24, 30, 0.1, looks=FINISHED_LOOKS)


class Case:
    """M=1 with the first config, M=2 with the second one, and so on; the last config serves two M."""

    def __init__(self, configs: Iterable[KernelConfig] = CONFIGS) -> None:
        self.experience = Experience(CONFIGS)
        configs = [*configs]
        self.entries: dict[int, Entry] = {}
        for M, config in enumerate([*configs, configs[-1]], 1):  # noqa: N806
            self.serve(M, config)

    def serve(self, M: int, config: KernelConfig) -> None:  # noqa: N803
        pair = ConfigPair(config, config)
        entry = self.entries.setdefault(M, Entry(SHAPE, M, SGLANG))
        entry.state, entry.looks, self.experience.chosen[M] = "settled", FINISHED_LOOKS, pair
        entry.record = Record(SHAPE, M, "faster", pair, SGLANG, EVIDENCE)

    def measure(self, M: int, ratios: dict[KernelConfig, float]) -> None:  # noqa: N803
        """Log-ratios of both GEMMs to the pair that M has."""
        rows = self.experience.at(M, self.experience.chosen[M])
        for config, log in ratios.items():
            rows |= {Trial(gemm, config): Measurement([log]) for gemm in GEMMS}

    def turn(self) -> Turn | None:
        for entry in self.entries.values():
            weigh(entry, self.experience, MOST)
        return next_turn(self.experience, self.entries.values(), MOST)


def test_few_winners_are_left_alone() -> None:
    assert Case(CONFIGS[:MOST]).turn() is None
    assert Case(CONFIGS[: MOST + 1]).turn() is not None


def test_the_one_that_the_fewest_use_goes_first_and_its_m_does_with_the_others() -> None:
    case = Case()
    for M in list(case.entries)[:-2]:  # noqa: N806
        case.measure(M, dict.fromkeys(CONFIGS, 0.1))  # elsewhere all others are far behind
    assert case.turn() == (len(CONFIGS), CONFIGS[-1])
    case.measure(3, dict.fromkeys(CONFIGS, 0.004))
    assert case.turn() == (3, CONFIGS[2])


def test_of_its_m_the_one_that_would_lose_most_is_asked_first() -> None:
    case = Case()
    for M in list(case.entries)[:-2]:  # noqa: N806
        case.measure(M, dict.fromkeys(CONFIGS, 0.1))
    first, second = list(case.entries)[-2:]
    case.measure(first, dict.fromkeys(CONFIGS, 0.001))
    case.measure(second, dict.fromkeys(CONFIGS, 0.005))
    assert case.turn() == (second, CONFIGS[-1])
    case.measure(second, dict.fromkeys(CONFIGS, TOLERANCE + 0.001))
    assert case.turn() is None  # not even the M that could do without is moved: the binary would be needed all the same


@pytest.mark.parametrize(
    "changes",
    [{"verdict": "baseline"}, {"source": "pinned"}, {"evidence": msgspec.structs.replace(EVIDENCE, gain=1.0)}],
    ids=["SGLang's own", "pinned", "odd"],
)
def test_who_has_no_row_of_its_own_is_not_asked(changes: dict[str, object]) -> None:
    case = Case()
    assert case.turn() == (1, CONFIGS[0])
    record = case.entries[1].record
    assert record is not None
    case.entries[1].record = msgspec.structs.replace(record, **changes)
    assert case.turn() == (2, CONFIGS[1])
    case.entries[2].firm = True  # it has refused already
    assert case.turn() == (3, CONFIGS[2])
    del case.entries[3]  # settled by an earlier process for good, or put off
    assert case.turn() == (4, CONFIGS[3])


def test_a_loss_is_that_of_the_best_pair_with_one_tile() -> None:
    case, wide = Case(), KernelConfig(64, 64, 64, 1, 4, 3)
    assert loss(case.experience, 1, {CONFIGS[1]}) == 0.0  # nothing was measured: it must be asked
    rows = case.experience.at(1, case.experience.chosen[1])
    rows[Trial("up", CONFIGS[1])] = Measurement([0.02])
    assert loss(case.experience, 1, {CONFIGS[1]}) == float("inf")  # no down GEMM goes with it
    rows[Trial("down", CONFIGS[2])] = Measurement([0.05])
    rows[Trial("up", wide)] = Measurement([-0.5])  # its tile is another one
    assert loss(case.experience, 1, {*CONFIGS[1:], wide}) == pytest.approx(0.032, abs=0.001)
    assert loss(case.experience, 1, CONFIGS) == 0.0


@pytest.mark.parametrize(("gain", "low"), [(0.3, 0.28), (0.05, 0.04), (0.013, 0.004), (0.0101, 0.0001), (0.0, 0.0)])
@pytest.mark.parametrize("min_gain", [0.01, 0.03])
def test_what_is_left_of_the_gain_is_one_that_a_row_may_have(gain: float, low: float, min_gain: float) -> None:
    asked = bar(msgspec.structs.replace(EVIDENCE, gain=gain, gain_low=low), min_gain)
    assert 1 - (1 - gain) * (1 - asked.min_gain) >= min_gain - 1e-12
    assert 1 - (1 - low) * (1 - asked.floor) >= -1e-12
    assert asked.min_gain >= -TOLERANCE
    assert asked.floor >= -MOST_LOST


# -- whole searches ----------------------------------------------------------------------------------------------------

RECORDED = load(next(path for path in shipped() if "e256_n256_k3072" in path.name))
MS = tuple(M for M in bench_search.CAPTURED if 16 <= M <= 160)
FEW = 4


@pytest.fixture(scope="module")
def crowded() -> Landscape:
    """Many M, and at most of them many configs that are nearly as good."""
    return bench_search.between(RECORDED, MS)


class Bed:
    """A tuner on a landscape, and its records in order."""

    def __init__(
        self, landscape: Landscape, stored: Iterable[Record] = (), most: int = FEW, ms: Iterable[int] = MS
    ) -> None:
        self.provider = ReplayProvider(landscape, 1)
        self.records: list[Record] = []
        self.tuner = Tuner(
            self.provider,
            self.records.append,
            Prior(),
            TunerOptions(source="learned", search=SearchOptions(most_winners=most)),
            space=lambda _: landscape.candidates,
            clock=self.provider.clock,
            unix_clock=lambda: 7.0,
        )
        for record in stored:
            self.tuner.learn(record)
        for M in ms:  # noqa: N806
            self.tuner.add(landscape.shape, M, landscape.baselines[M].pair)

    def steps(self) -> Iterator[None]:
        while (step := self.tuner.step(deep_idle=True)) != "nothing":
            if step == "waiting":
                self.provider.wait(0.02)
            yield

    def finish(self) -> Bed:
        for _ in self.steps():
            pass
        return self

    @property
    def rows(self) -> dict[int, Record]:
        return {record.M: record for record in self.records}


def winners(rows: Iterable[Record]) -> int:
    return len({config for row in rows for config in (row.pair.up, row.pair.down)})


@pytest.fixture(scope="module")
def whole(crowded: Landscape) -> Bed:
    return Bed(crowded).finish()


@pytest.fixture(scope="module")
def without(crowded: Landscape) -> Bed:
    return Bed(crowded, most=1000).finish()


def test_all_m_are_served_with_few_winners_for_little(crowded: Landscape, whole: Bed, without: Bed) -> None:
    assert winners(without.rows.values()) > FEW + 1
    assert winners(whole.rows.values()) <= FEW
    slower = [
        crowded.pair_us(M, whole.rows[M].pair) / crowded.pair_us(M, without.rows[M].pair) - 1 for M in MS
    ]
    assert sum(slower) / len(slower) < 0.003
    assert max(slower) < 0.02
    assert whole.provider.gpu_s < without.provider.gpu_s * 1.2


def test_every_row_is_still_faster_than_sglangs_own(crowded: Landscape, whole: Bed, without: Bed) -> None:
    begun = len(without.records)
    assert whole.records[:begun] == without.records  # it comes when everything else is done
    assert len(whole.records) > begun
    known = without.rows
    for record in whole.records[begun:]:
        before, known[record.M] = known[record.M], record
        assert record.evidence.firm == (record.pair == before.pair)
        both = (Contents(H200, {(r.shape, r.M): r}) for r in (before, record))
        assert merge(*both).records[record.shape, record.M] == record
        assert record.evidence.gpu_s > before.evidence.gpu_s
        assert record.evidence.gain_low > 0
        assert record.evidence.gain >= 0.01
        baseline = crowded.baselines[record.M]
        truth = 1 - crowded.pair_us(record.M, record.pair) / (baseline.up_us + baseline.down_us)
        assert record.evidence.gain == pytest.approx(truth, abs=0.03)
        assert truth > 0


def test_the_same_seed_gives_the_same_rows(crowded: Landscape, whole: Bed) -> None:
    assert Bed(crowded).finish().records == whole.records


@pytest.mark.parametrize("moved", [0, 1])
def test_c37_what_is_killed_goes_on_and_what_is_done_is_not_done_again(
    crowded: Landscape, whole: Bed, without: Bed, moved: int
) -> None:
    known = {record.M: record for record in whole.records[: len(without.records) + moved]}
    finished = [record for record in known.values() if record.evidence.looks >= FINISHED_LOOKS]
    again = Bed(crowded, finished, ms=[record.M for record in finished]).finish()
    rows = {record.M: record for record in finished} | again.rows
    assert winners(rows.values()) < winners(known.values())
    assert all(row.verdict == "faster" and row.evidence.gain_low > 0 for row in rows.values())
    third = Bed(crowded, rows.values(), ms=[*rows]).finish()
    assert third.records == []
    assert third.provider.gpu_s == 0.0
