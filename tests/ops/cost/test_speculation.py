"""Speculation's arithmetic: the published speed-ups, and where it stops paying."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.ops.cost.speculation import (
    best_gamma,
    break_even_acceptance,
    break_even_batch,
    expected_speedup,
    expected_tokens,
    speedup_at_batch,
)

ALPHA, GAMMA, COST = st.floats(0, 1), st.integers(1, 16), st.floats(0, 0.9)


def test_d02_expected_tokens_and_the_published_speedups():
    assert expected_tokens(0.7, 3) == pytest.approx(2.533)
    assert expected_speedup(0.7, 3, 0.05) == pytest.approx(2.2, abs=0.01)
    assert expected_speedup(0.7, 3, 0.11) == pytest.approx(1.9, abs=0.01)
    assert expected_speedup(0.8, 4, 0.1) == pytest.approx(2.4, abs=0.01)


def test_d14_the_second_token_of_mtp_at_85_to_90_percent_is_1_8_times():
    assert [round(expected_speedup(alpha, 1, 0.04), 2) for alpha in (0.85, 0.9)] == [1.78, 1.83]


@given(gamma=GAMMA, cost=COST)
def test_the_break_even_acceptance_wins_nothing(gamma, cost):
    alpha = break_even_acceptance(gamma, cost)
    assert alpha is not None
    assert expected_speedup(alpha, gamma, cost) == pytest.approx(1, abs=1e-9)


def test_break_even_worked_by_hand():
    """One proposal at c = 0.25 wins from α = 0.25 on, since E = 1 + α; two from α + α² = 0.5; a draft as slow as its target never."""
    assert break_even_acceptance(1, 0.25) == pytest.approx(0.25)
    assert break_even_acceptance(2, 0.25) == pytest.approx((3**0.5 - 1) / 2)
    assert break_even_acceptance(4, 1.0) is None
    with pytest.raises(ValueError, match="gamma=0"):
        break_even_acceptance(0, 0.1)


def test_d11_speculation_stops_paying_at_large_batch():
    """At ridge 295 a chain of 4 (5 positions) is free up to batch 59; at α 0.8 and c 0.1 it pays up to E = 0.4 + 5 B / 295."""
    at = [speedup_at_batch(0.8, 4, 0.1, batch=batch, ridge_tokens=295) for batch in (1, 59, 118, 295, 1000)]
    assert at[0] == at[1] == pytest.approx(expected_speedup(0.8, 4, 0.1))
    assert at[2] == pytest.approx(3.3616 / 2.4) and at[3] == at[4] == pytest.approx(3.3616 / 5.4)
    assert break_even_batch(0.8, 4, 0.1, ridge_tokens=295) == 175  # 2.9616 · 59 = 174.7


def test_d12_weights_in_4_bits_move_the_break_even_to_smaller_batches():
    assert break_even_batch(0.8, 4, 0.1, ridge_tokens=295 / 4) == 44


@given(alpha=ALPHA, gamma=GAMMA, cost=COST, ridge=st.floats(1, 1000))
def test_the_break_even_batch_loses_and_the_one_before_wins(alpha, gamma, cost, ridge):
    batch = break_even_batch(alpha, gamma, cost, ridge_tokens=ridge)
    assert speedup_at_batch(alpha, gamma, cost, batch=batch, ridge_tokens=ridge) <= 1 + 1e-9
    assert batch == 1 or speedup_at_batch(alpha, gamma, cost, batch=batch - 1, ridge_tokens=ridge) > 1


@given(alpha=ALPHA, cost=COST)
def test_the_best_gamma_is_the_best_of_all(alpha, cost):
    best = best_gamma(alpha, cost, 16)
    assert all(expected_speedup(alpha, best, cost) >= expected_speedup(alpha, gamma, cost) - 1e-12 for gamma in range(1, 17))
