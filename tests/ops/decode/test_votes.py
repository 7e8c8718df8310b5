"""Votes and best-of-n: worked by hand, and maj@k against an enumeration of every choice and order."""

import math
from decimal import Decimal
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.decode.votes import best_of_n, last_number, majority, majority_at_k, plain
from assay.ops.evaluate.pass_at_k import pass_at_k


def test_the_answer_of_most_samples_wins_whatever_its_spelling():
    assert majority(["Paris", " paris\n", "Lyon", "PARIS", "Lyon"]) == ("paris", 3, 5)
    assert majority(["It is 1,234.50 euros", "1234.5", "1,235"], last_number) == (Decimal("1234.5"), 2, 3)


def test_of_equally_frequent_answers_the_one_that_came_first_wins():
    assert majority(["b", "a", "a", "b", "c"]).answer == "b"
    assert majority(["a", "b", "b", "a", "c"]).answer == "a"


def test_a_sample_without_an_answer_has_no_vote():
    assert majority(["no idea", "none at all", "7"], last_number) == (Decimal(7), 1, 1)
    assert majority(["", "  "]) == (None, 0, 0)
    assert majority([]) == (None, 0, 0)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5 + 13 = 18.", 18),
        ("18.0", 18),
        ("-3", -3),
        ("1,000,000", 1_000_000),
        ("x", None),
        ("1,23", 23),
        ("9{,}500", 9500),
        ("it is −3", -3),
        ("0.10", Decimal("0.1")),
    ],
)
def test_the_last_number_of_a_text_is_its_answer(text, number):
    assert last_number(text) == number


def test_plain_text_has_one_case_and_single_blanks():
    assert plain("  The  Cat\n") == "the cat" and plain(" \n") is None


def enumerated(right, wrong, silent, k):
    """Every order of the samples: the vote of its first k, the first answer of those with most votes."""
    samples = ["right"] * right + [f"w{index}" for index, count in enumerate(wrong) for _ in range(count)] + [""] * silent
    orders = [majority(order[:k]).answer == "right" for order in permutations(samples)]
    return sum(orders) / len(orders)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), right=st.integers(0, 3), wrong=st.lists(st.integers(0, 2), max_size=2), silent=st.integers(0, 1))
def test_maj_at_k_is_the_share_of_orders_that_the_right_answer_wins(data, right, wrong, silent):
    samples = right + sum(wrong) + silent
    if samples:
        k = data.draw(st.integers(1, samples))
        assert majority_at_k(right, wrong, k, silent=silent) == pytest.approx(enumerated(right, wrong, silent, k), abs=1e-12)


def test_maj_at_k_worked_by_hand():
    assert majority_at_k(2, [1], 3) == 1
    assert majority_at_k(1, [1], 2) == 0.5
    assert majority_at_k(1, [2], 3) == 0
    assert majority_at_k(2, [1, 1], 2) == pytest.approx((1 + 4 / 2) / 6)  # of six pairs one is right twice, four are a draw


@given(right=st.integers(0, 20), wrong=st.lists(st.integers(1, 8), max_size=6))
def test_a_vote_of_one_is_a_single_sample_and_no_vote_beats_having_one_right(right, wrong):
    samples = right + sum(wrong)
    if not samples:
        return
    assert majority_at_k(right, wrong, 1) == pytest.approx(right / samples)
    for k in {1, (samples + 1) // 2, samples}:
        assert majority_at_k(right, wrong, k) <= pass_at_k(samples, right, k) + 1e-12


def test_a_vote_beats_a_single_sample_where_the_right_answer_is_the_commonest_and_harms_where_it_is_not():
    commonest = [majority_at_k(16, [6, 6, 6, 6], k) for k in (1, 5, 40)]
    assert commonest[0] == pytest.approx(0.4) and commonest[0] < commonest[1] < commonest[2] == 1
    second = [majority_at_k(16, [24], k) for k in (1, 5, 40)]
    assert second[0] == pytest.approx(0.4) and second[0] > second[1] > second[2] == 0


@pytest.mark.parametrize(("right", "wrong", "k"), [(2, [1], 4), (2, [1], 0), (-1, [5], 1), (1, [-1, 5], 1)])
def test_impossible_votes_are_refused(right, wrong, k):
    with pytest.raises(ValueError, match="expected"):
        majority_at_k(right, wrong, k)


def test_the_mean_and_the_total_log_probability_choose_differently():
    short, long = [math.log(0.5)], [math.log(0.6)] * 3  # .5 in all against .216; .5 a token against .6
    assert best_of_n([long, short], by="total") == 1
    assert best_of_n([short, long], by="mean") == 1
    assert best_of_n([short, short]) == 0


def test_samples_that_cannot_be_ranked_are_refused():
    for samples, told in [([], "no sample"), ([[-1.0], []], "sample 1 has no token"), ([[math.nan]], "NaN"), ([[0.5]], "above 0")]:
        with pytest.raises(ValueError, match=told):
            best_of_n(samples)
    assert best_of_n([[-math.inf], [-3.0]]) == 1
