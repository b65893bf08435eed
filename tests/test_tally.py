"""The tally counts each M of a shape once, by how far it is."""

from __future__ import annotations

import pytest
from record_values import record, shape

from sglang_moe_autotune.records import Evidence, Record
from sglang_moe_autotune.snapshot import Snapshot
from sglang_moe_autotune.tally import ShapeTally, tally

SHAPE, OTHER = shape(128), shape(64)
SLUG = SHAPE.slug


def snapshot(
    queue: tuple[int, ...] = (),
    deferred: tuple[int, ...] = (),
    failed: tuple[int, ...] = (),
    current: int | None = None,
) -> Snapshot:
    return Snapshot(
        queue=tuple((SLUG, m) for m in queue),
        current=None if current is None else (SLUG, current),
        phase=None,
        deferred={(SLUG, m): "no memory" for m in deferred},
        failed=tuple((SLUG, m) for m in failed),
        faster=0,
        baseline=0,
        compiled={},
        gpu_s=0.0,
    )


def learned(m: int, gain: float) -> Record:
    return record(m, SHAPE, evidence=Evidence(100.0, 100 * (1 - gain), gain, gain / 2, gain, 40, 30, 1.0))


@pytest.mark.parametrize(
    ("taken", "expected"),
    [
        pytest.param(None, ShapeTally("settled"), id="no-tuner"),
        pytest.param(snapshot(), ShapeTally("settled"), id="nothing-to-do"),
        pytest.param(snapshot(queue=(1, 2)), ShapeTally("queued", queued=2), id="queued"),
        pytest.param(snapshot(queue=(1, 2), deferred=(2,)), ShapeTally("queued", queued=1, deferred=1), id="mixed"),
        pytest.param(snapshot(queue=(2,), deferred=(2,)), ShapeTally("deferred", deferred=1), id="only-deferred"),
        pytest.param(snapshot(queue=(1,), current=1), ShapeTally("tuning", queued=1), id="on-the-bench"),
        pytest.param(snapshot(failed=(4,)), ShapeTally("settled", failed=1), id="failed"),
    ],
)
def test_what_the_tuner_has_before_it(taken: Snapshot | None, expected: ShapeTally) -> None:
    assert tally([SHAPE], {}, taken) == {SLUG: expected}


def test_records_of_the_shapes_asked_for_and_of_no_others() -> None:
    rows = [learned(16, 0.5), learned(32, 0.0), record(64, SHAPE, verdict="baseline"), record(64, OTHER)]
    (found,) = tally([SHAPE], {(r.shape, r.M): r for r in rows}, None).values()
    assert (found.learned, found.baseline, found.best_gain) == (2, 1, 0.5)
    assert found.mean_gain == pytest.approx(1 - 0.5**0.5)
