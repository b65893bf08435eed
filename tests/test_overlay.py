"""Under BIT_EQUAL a learned row needs its proof; a pin is the user's own word."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("torch")

from typing import TYPE_CHECKING

from made_up_store import MANY, record

from sglang_moe_autotune.bench import Comparison
from sglang_moe_autotune.decision import Estimate
from sglang_moe_autotune.job import Outcome
from sglang_moe_autotune.overlay import Overlay

if TYPE_CHECKING:
    from sglang_moe_autotune.records import Evidence, Record


def row(error: float | None, source: str = "learned", chosen_us: float = 300.0) -> Record:
    made = record(MANY, 256, 445.0, chosen_us)
    evidence = msgspec.structs.replace(made.evidence, max_error=error)
    return msgspec.structs.replace(made, evidence=evidence, source=source)


@pytest.mark.parametrize(
    ("found", "holds"),
    [
        pytest.param(row(0.0), True, id="every-bit-the-same"),
        pytest.param(row(1e-30), False, id="a-zero-of-another-sign"),
        pytest.param(row(0.004), False, id="rounded-otherwise"),
        pytest.param(row(None), False, id="without-a-comparison"),
        pytest.param(row(None, chosen_us=445.0), True, id="sglangs-own"),
        pytest.param(row(0.004, "pinned"), True, id="pinned"),
    ],
)
def test_a_learned_row_needs_its_proof(found: Record, holds: bool) -> None:
    assert Overlay("miss", bit_equal=True).bits_hold(found) is holds
    assert Overlay("miss").bits_hold(found)


def test_a_pair_that_was_compared_with_a_learned_one_has_the_errors_of_both() -> None:
    before = row(0.004).evidence
    outcome = Outcome(row(None).pair, Estimate(0.1, 0.09, 0.11), 300.0, 10, 5, Comparison(True, 0.0, 0.016))
    found: Evidence = outcome.evidence(1.0, before)
    assert found.max_error == 0.004
    assert outcome.evidence(1.0, None).max_error == 0.0
