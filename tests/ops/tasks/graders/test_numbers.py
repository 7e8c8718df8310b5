"""The number of an answer, worked by hand (trap E07) and by laws."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.ops.tasks.graders.numbers import final_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72 clips, altogether.", "72"), ("It costs 10,000 dollars", "10000"), ("9{,}500", "9500"), ("-3", "-3"), ("18.00", "18"), ("3 5", "5"),
        ("The answer is 12.", "12"), ("6 * 12 = 72. The answer is 72, which is more than 5.", "72"), ("#### 1,234.50", "1234.5"), ("Answer: $7 of 9", "7"),
        ("the answer is **42** and not 43", "42"), ("the answer is between 3 and 5", "5"), ("The answer is 4. No, the answer is 6. I counted 2 twice.", "6"),
        ("#### 5\n#### none", "5"), ("The answer is\n 8", "8"), ("ANSWER IS = −3", "-3"), ("1, 2, and 3.", "3"), ("a swan answers: 4 then 5", "5"),
        ("$2.50.", "2.5"),
    ],
)  # fmt: skip
def test_numbers_worked_by_hand(text, number):
    """Trap E07."""
    assert final_number(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "none at all", "The answer is unknown.", ",.,"])
def test_a_text_without_a_number_has_none(text):
    assert final_number(text) is None and final_number(text, cut=True) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("That makes 12", None), ("That makes 12.", None), ("That makes 12 ", "12"), ("The answer is 1,0", None), ("The answer is 12. I am", "12"),
        ("First 3, then 45", None), ("12 clips and", "12"),
    ],
)  # fmt: skip
def test_a_number_that_may_go_on_is_none(text, number):
    """Trap E07: a sign or digit lost at the token limit makes another number."""
    assert final_number(text, cut=True) == (None if number is None else Decimal(number))


@given(
    st.integers(-(10**9), 10**9),
    st.sampled_from(["{}", "{:,}", "{}.00", "I say {} pieces.", "1 and 2 make 4, no: #### {}\n", "the answer is {} of 77"]),
)
def test_what_is_written_is_read(number, form):
    assert final_number(form.format(number)) == number


@given(st.text(alphabet="0123456789,.- abc#=\n", max_size=40))
def test_cutting_a_text_only_ever_takes_its_number_away(text):
    whole, cut = final_number(text), final_number(text, cut=True)
    assert cut is None or cut == whole
    assert final_number(f"{text} x", cut=True) == final_number(f"{text} x")
