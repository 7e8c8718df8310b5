"""Closed forms of speculation and the statistics of its rounds."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.ops.decode.acceptance import (
    Adaptive,
    acceptance_by_position,
    acceptance_rate,
    acceptance_when_reached,
    best_gamma,
    expected_speedup,
    expected_tokens,
    overlap,
    tokens_per_round,
)

rounds = st.lists(st.integers(0, 4).flatmap(lambda proposed: st.tuples(st.just(proposed), st.integers(0, proposed))), max_size=20)


def test_expected_tokens_and_speedup_worked_by_hand():
    assert expected_tokens(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))  # 3.3616
    assert expected_speedup(0.8, 4, 0.1) == pytest.approx(2.4, abs=0.005)  # 3.3616 / 1.4
    assert expected_tokens(0.7, 3) == pytest.approx(2.53, abs=0.005)  # 1 + .7 + .49 + .343
    assert expected_speedup(0.7, 3, 0.05) == pytest.approx(2.2, abs=0.005)
    assert expected_speedup(0.7, 3, 0.11) == pytest.approx(1.9, abs=0.005)


def test_the_ends_of_the_scale_need_no_limit():
    assert expected_tokens(1.0, 4) == 5
    assert expected_tokens(0.0, 4) == 1
    assert expected_tokens(0.9, 0) == 1


@pytest.mark.parametrize(
    ("alpha", "gamma", "cost"), [(1.1, 4, 0.1), (-0.1, 4, 0.1), (0.5, -1, 0.1), (0.5, 4, -0.1), (float("nan"), 4, 0.1)]
)
def test_impossible_numbers_are_refused(alpha, gamma, cost):
    with pytest.raises(ValueError, match="expected"):
        expected_speedup(alpha, gamma, cost)


def test_overlap_is_one_minus_the_total_variation():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    assert overlap(p, q).item() == pytest.approx(0.7)
    assert overlap(p, q).item() == pytest.approx(1 - 0.5 * (p - q).abs().sum().item())


def test_rounds_that_accept_four_none_and_two_of_four():
    proposed, accepted = [4, 4, 4], [4, 0, 2]
    assert acceptance_rate(proposed, accepted) == 0.5
    assert tokens_per_round(sum(accepted) + 3, 3) == 3.0
    # The round that accepts two tests three: the third is reached and rejected, the fourth never seen.
    assert acceptance_by_position(proposed, accepted, 4) == [(3, 2), (2, 2), (2, 1), (1, 1)]
    assert acceptance_when_reached(proposed, accepted) == 6 / 8


def test_a_shorter_proposal_does_not_count_where_it_proposed_nothing():
    assert acceptance_by_position([2, 0, 4], [2, 0, 3], 4) == [(2, 2), (2, 2), (1, 1), (1, 0)]


def test_nothing_proposed_is_no_rate_rather_than_zero():
    assert acceptance_rate([0, 0], [0, 0]) is None
    assert acceptance_when_reached([], []) is None
    assert tokens_per_round(0, 0) is None


@given(rounds)
def test_positions_add_up_to_the_totals(pairs):
    proposed, accepted = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    positions = acceptance_by_position(proposed, accepted, 4)
    assert sum(taken for _, taken in positions) == sum(accepted)
    rejections = sum(1 for offered, taken in pairs if taken < offered)
    assert sum(reached for reached, _ in positions) == sum(accepted) + rejections
    assert all(reached >= taken for reached, taken in positions)


@pytest.mark.parametrize(("proposed", "accepted", "gamma"), [([4], [4, 1], 4), ([2], [3], 4), ([2], [-1], 4), ([5], [1], 4)])
def test_lists_that_do_not_fit_are_refused(proposed, accepted, gamma):
    with pytest.raises(ValueError, match="round"):
        acceptance_by_position(proposed, accepted, gamma)


def test_the_best_gamma_worked_by_hand():
    # α = 0.8, c = 0.1: four give 3.3616 / 1.4 = 2.401, five 3.6893 / 1.5 = 2.460, six 3.9514 / 1.6 = 2.470, seven 4.1611 / 1.7 = 2.448.
    assert best_gamma(0.8, 0.1, 5) == 5
    assert best_gamma(0.8, 0.1, 20) == 6
    assert best_gamma(1.0, 0.5, 8) == 8
    assert best_gamma(0.0, 0.5, 8) == 1
    assert best_gamma(0.3, 1.0, 8) == 1  # never worth it, but a round proposes something
    assert best_gamma(0.0, 0.0, 8) == 1  # all alike: the least
    with pytest.raises(ValueError, match="most=0"):
        best_gamma(0.5, 0.1, 0)


@given(st.floats(0, 1), st.floats(0, 2), st.integers(1, 12))
def test_no_other_gamma_is_faster_than_the_best(alpha, cost, most):
    best = expected_speedup(alpha, best_gamma(alpha, cost, most), cost)
    assert all(expected_speedup(alpha, gamma, cost) <= best for gamma in range(1, most + 1))


def test_adaptive_follows_what_was_accepted_lately():
    adaptive = Adaptive(cost=0.1, most=8, memory=4)
    assert adaptive.gamma([], []) == best_gamma(0.7, 0.1, 8)
    # Of four rounds of four, all accepted: (16 + 2.8) / (16 + 4) = 0.94. A rejection tests one proposal more than it accepts: 2.8 / (4 + 4) = 0.35.
    assert adaptive.gamma([4] * 4, [4] * 4) == best_gamma(0.94, 0.1, 8) == 8
    assert adaptive.gamma([4] * 4, [0] * 4) == best_gamma(0.35, 0.1, 8) == 1
    assert adaptive.gamma([4] * 9, [0] * 5 + [4] * 4) == 8  # what is further back is forgotten
    assert adaptive.gamma([2, 0], [2, 0]) == best_gamma((2 + 2.8) / (2 + 4), 0.1, 8)
    for wrong in (
        {"cost": -1.0},
        {"cost": 0.1, "most": 0},
        {"cost": 0.1, "memory": 0},
        {"cost": 0.1, "weight": 0.0},
        {"cost": 0.1, "prior": 2.0},
    ):
        with pytest.raises(ValueError, match="expected"):
            Adaptive(**wrong)
