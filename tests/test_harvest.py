"""What becomes of what a search found: kept, served, and taken back where it turned out wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from record_values import H200, pair, record, shape

from sglang_moe_autotune.harvest import Harvest
from sglang_moe_autotune.layers import call_key
from sglang_moe_autotune.lookup import Lookup
from sglang_moe_autotune.records import pin, succeeding
from sglang_moe_autotune.store import Store

if TYPE_CHECKING:
    from sglang_moe_autotune.records import Record
    from sglang_moe_autotune.settings import Mode

SHAPE = shape(64)


def found(verdict: str, samples: int, gain: float = 0.2) -> Record:
    row = record(64, SHAPE)
    evidence = msgspec.structs.replace(row.evidence, samples=samples, gain=gain)
    pair = row.baseline if verdict == "baseline" else row.pair
    return msgspec.structs.replace(row, verdict=verdict, pair=pair, evidence=evidence)


class Bed:
    def __init__(self, mode: Mode = "miss") -> None:
        self.lookup, self.adopted = Lookup(), 0
        self.store = Store.open(None, H200)
        self.harvest = Harvest(self.store, None, mode, self.lookup, SimpleNamespace(adopted=self._adopt))  # type: ignore[arg-type]

    def _adopt(self, *_: Any) -> None:
        self.adopted += 1

    @property
    def served(self) -> Any:
        return self.lookup.rows().get(call_key(SHAPE), {}).get(64)


def test_a_row_is_served_until_a_further_look_finds_sglangs_own_config_faster() -> None:
    bed = Bed()
    first = found("faster", 48)
    bed.harvest.learned(first)
    assert bed.served == first.pair
    bed.harvest.learned(succeeding(found("baseline", 12), first))
    assert bed.served is None
    assert bed.store.contents.records[SHAPE, 64].verdict == "baseline"


@pytest.mark.parametrize("mode", ["miss", "all", "restart"])
def test_a_tie_changes_nothing_that_is_served(mode: Mode) -> None:
    bed = Bed(mode)
    bed.harvest.learned(found("baseline", 120))
    assert (bed.served, bed.adopted, bed.lookup.epoch) == (None, 0, 0)


def test_with_ranks_no_rank_changes_its_table_alone() -> None:
    bed = Bed()
    bed.lookup.publish([(call_key(SHAPE), 64, found("faster", 48).pair)])
    bed.harvest.peers = SimpleNamespace(learned=lambda _: False, place=SimpleNamespace(ranks=2))  # type: ignore[assignment]
    bed.harvest.learned(found("baseline", 120))
    assert bed.served is not None


def test_a_pair_that_a_user_pinned_is_not_taken_back() -> None:
    bed = Bed()
    bed.store.submit(record=pin(bed.store.contents, SHAPE, 64, pair(16)).records[SHAPE, 64])
    bed.lookup.publish([(call_key(SHAPE), 64, pair(16))])
    bed.harvest.learned(found("baseline", 120))
    assert bed.served == pair(16)


def test_another_pair_of_the_same_gain_is_served_all_the_same() -> None:
    bed = Bed()
    bed.harvest.learned(found("faster", 48))
    other = msgspec.structs.replace(found("faster", 96), pair=pair(64))
    bed.harvest.learned(other)
    assert bed.served == pair(64)


def test_what_replaces_a_row_that_does_not_stand_stays_though_it_gains_less() -> None:
    bed = Bed()
    bed.store.submit(record=found("faster", 48, gain=0.3))
    bed.harvest._stands = lambda _: False
    other = msgspec.structs.replace(found("faster", 48, gain=0.1), pair=pair(128))
    bed.harvest.learned(other)
    assert bed.served == other.pair
    assert bed.store.contents.records[SHAPE, 64].pair == other.pair
