"""The thread that says how a process is: no fault ends it, none goes unsaid, and what ended long ago is swept away."""

from __future__ import annotations

import pytest

from sglang_moe_autotune import live

TORN = RuntimeError("dictionary changed size during iteration")


def turns(teller: live.Teller, *faults: Exception | None) -> None:
    for fault in faults:

        def turn(fault: Exception | None = fault) -> None:
            if fault is not None:
                raise fault

        teller.turn(turn)


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        pytest.param([TORN], 0, id="a dict that changed while it was read"),
        pytest.param([TORN, TORN, None] * 9, 0, id="now and then"),
        pytest.param([RuntimeError("CUDA error: an illegal memory access")] * 40, 1, id="each turn"),
        pytest.param([TypeError("of another kind")], 1, id="another kind"),
        pytest.param([TypeError("of another kind"), None] * 9, 1, id="another kind, again and again"),
    ],
)
def test_a_fault_that_stays_is_said_once(
    caplog: pytest.LogCaptureFixture, faults: list[Exception | None], said: int
) -> None:
    turns(live.Teller(), *faults)
    assert [r.message for r in caplog.records] == [
        "MoE autotune could not say how it is; it goes on and tries again."
    ] * said
    assert all(r.exc_info for r in caplog.records)
