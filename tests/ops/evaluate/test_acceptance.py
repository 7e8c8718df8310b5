"""Comparing speculated with plain text, and rates over prompts."""

import math

import pytest

from assay.ops.evaluate.acceptance import differing, ratio


def test_positions_that_differ_are_counted_and_a_shorter_text_differs_at_its_end():
    assert differing([1, 2, 3], [1, 2, 3]) == 0
    assert differing([1, 2, 3, 4], [1, 9, 3, 8]) == 2
    assert differing([1, 2, 3], [1, 2]) == 1


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
