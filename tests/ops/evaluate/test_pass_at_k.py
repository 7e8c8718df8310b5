"""pass@k: worked values, an enumeration of all choices, and the ways in which it is usually got wrong."""

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.ops.evaluate.pass_at_k import mean_pass_at_k, pass_at_k


@pytest.mark.parametrize(
    ("samples", "right", "k", "expected"),
    [
        (10, 2, 5, 7 / 9),
        (5, 1, 1, 0.2),
        (10, 3, 5, 11 / 12),
        (200, 1, 1, 0.005),
        (5, 0, 5, 0.0),
        (5, 5, 1, 1.0),
        (4, 2, 3, 1.0),
        (1, 1, 1, 1.0),
    ],
)
def test_worked_values(samples, right, k, expected):
    assert pass_at_k(samples, right, k) == pytest.approx(expected, rel=1e-15)


def test_it_is_not_the_biased_estimate():
    assert pass_at_k(10, 3, 5) == pytest.approx(0.916667, abs=1e-6)
    biased = 1 - (1 - 3 / 10) ** 5
    assert biased == pytest.approx(0.831930, abs=1e-6)


@given(data=st.data(), samples=st.integers(1, 8))
def test_it_is_the_share_of_choices_that_have_a_right_sample(data, samples):
    right, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    choices = list(combinations(range(samples), k))
    assert pass_at_k(samples, right, k) == pytest.approx(sum(min(choice) < right for choice in choices) / len(choices), rel=1e-12)


def test_thousands_of_samples_neither_overflow_nor_round_to_one():
    assert 1 - 1e-8 < pass_at_k(10_000, 4_000, 40) < 1
    assert pass_at_k(10_000, 1, 10) == pytest.approx(0.001, rel=1e-12)


@pytest.mark.parametrize("right", [0, 1, 2])
def test_more_than_there_are_samples_is_refused_and_an_unsolved_problem_never_passes(right):
    with pytest.raises(ValueError, match="k=5 with 2 samples"):
        pass_at_k(2, right, 5)
    assert pass_at_k(2, 0, 2) == 0


@pytest.mark.parametrize(
    ("samples", "right", "k", "told"), [(5, 6, 1, "6 of 5"), (5, -1, 1, "-1 of 5"), (5, 2, 0, "k=0"), (0, 0, 1, "k=1 with 0")]
)
def test_impossible_counts_are_refused(samples, right, k, told):
    with pytest.raises(ValueError, match=told):
        pass_at_k(samples, right, k)


@pytest.mark.parametrize("right", [True, 0.98, "1"])
def test_a_truth_value_or_a_share_is_no_count(right):
    with pytest.raises(ValueError, match="right="):
        pass_at_k(10, right, 1)


def test_problems_are_averaged_and_not_pooled():
    found = mean_pass_at_k([(2, 2), (2, 0)], 2)
    assert found == (0.5, pytest.approx(0.5), 2)
    assert pass_at_k(4, 2, 2) == pytest.approx(0.8333, abs=1e-4)  # what pooling would say


def test_the_standard_error_is_that_of_a_mean_over_problems():
    found = mean_pass_at_k([(4, 4), (4, 0), (4, 2), (4, 2)], 1)  # 1, 0, ½, ½
    assert found.value == 0.5
    assert found.standard_error == pytest.approx(math.sqrt((0.25 + 0.25) / 3 / 4))
    assert mean_pass_at_k([(4, 2)], 1).standard_error is None


def test_one_problem_with_too_few_samples_is_named():
    with pytest.raises(ValueError, match="k=3 with 2 samples") as error:
        mean_pass_at_k([(4, 1), (2, 0)], 3)
    assert error.value.__notes__ == ["in problem 1 of 2"]
    with pytest.raises(ValueError, match="no problem"):
        mean_pass_at_k([], 1)


def test_one_sample_a_problem_says_nothing_about_ten():
    with pytest.raises(ValueError, match="k=10 with 1 samples"):
        mean_pass_at_k([(1, 1)] * 100, 10)
