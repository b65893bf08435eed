"""Never more than the allowance in an hour after a full bucket, and it refills evenly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_moe_autotune.budget import Budget


@given(st.lists(st.tuples(st.floats(0, 900), st.floats(0, 5)), max_size=60))
def test_spending_stays_below_a_full_bucket_and_what_flowed_in(steps: list[tuple[float, float]]) -> None:
    budget, now, spent = Budget(60.0), 0.0, 0.0
    for wait_s, cost_s in steps:
        now += wait_s
        if budget.left(now):
            spent += cost_s
            budget.spent_until(spent)
    assert spent <= 60.0 + now / 60.0 + 5.0  # the last slice may overdraw by itself


def test_nothing_is_left_once_it_is_spent_until_time_passes() -> None:
    budget = Budget(36.0)
    assert budget.left(0.0)
    budget.spent_until(36.0)
    assert not budget.left(0.0)
    assert budget.last_hour_s == 36.0
    assert not budget.left(170.0), "a bench that is opened for a moment achieves nothing"
    assert budget.left(180.0)
    budget.spent_until(37.0)
    assert budget.left(180.0), "and what has come back is spent to its end"
    budget.spent_until(37.9)
    assert not budget.left(180.0)
    assert budget.last_hour_s > 36.0


def test_a_budget_of_zero_is_never_there() -> None:
    budget = Budget(0.0)
    assert not any(budget.left(float(t)) for t in range(0, 7200, 600))
