"""Comparing speculated with plain text, and rates over prompts."""

import math

import pytest

from assay.ops.evaluate.acceptance import NEAR_TIE, compare_tokens, ratio


def never(position):
    raise AssertionError("no gap is needed here")


def test_equal_texts_have_no_difference():
    assert compare_tokens([1, 2, 3], [1, 2, 3], never) == (None, 0, 3, False)


def test_positions_that_differ_are_counted_and_a_shorter_text_differs_at_its_end():
    assert compare_tokens([1, 2, 3, 4], [1, 9, 3, 8], lambda _: 1.0) == (1, 2, 4, False)
    assert compare_tokens([1, 2, 3], [1, 2], never) == (2, 1, 3, False)


def test_a_flip_is_forgiven_only_where_the_two_best_logits_tie():
    """Products of several rows and of one row round differently, so near ties flip; anything else is a wrong cache or a wrong rule."""
    asked = []

    def gap(position):
        asked.append(position)
        return NEAR_TIE / 2

    assert compare_tokens([1, 2, 3, 4], [1, 9, 9, 9], gap) == (1, 0, 1, True)
    assert asked == [1]
    assert compare_tokens([1, 2, 3, 4], [1, 9, 9, 9], lambda _: NEAR_TIE).differing == 3


def test_rates_worked_by_hand():
    """Accepted 4, 0 and 2 of 4: half of the proposals, and 3 tokens a round."""
    assert ratio([(6, 12)]) == (0.5, None)
    assert ratio([(5 + 1 + 3, 3)]) == (3.0, None)


def test_the_error_of_a_rate_is_over_prompts():
    value, error = ratio([(3, 4), (1, 4), (2, 4)])
    assert value == 0.5 and error == pytest.approx(math.sqrt(1.5 * (1 + 1 + 0)) / 12)  # sd of .75, .25, .5 over √3
    assert error == pytest.approx(0.25 / math.sqrt(3))


def test_where_nothing_was_proposed_there_is_no_rate():
    assert ratio([(0, 0), (0, 0)]) == (None, None)
    assert ratio([(0, 0), (1, 2)]) == (0.5, None)
