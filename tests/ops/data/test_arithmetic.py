"""Generated problems: exact, distinct, of every grade, by seed; the prompt; and how an answer is read."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as some

from assay.ops.data.arithmetic import OPERATIONS, Problem, first_number, problems, prompt, stop_ids

ALL = tuple(OPERATIONS)


def test_answers_worked_by_hand():
    assert [Problem(12, name, 30).answer for name in ALL] == [42, -18, 360]
    assert Problem(3, "multiply", 4).question == "3 * 4 ="


@given(count=some.integers(0, 60), digits=some.sets(some.integers(1, 9), min_size=1), operations=some.sets(some.sampled_from(ALL), min_size=1),
       seed=some.integers(0, 9))  # fmt: skip
def test_problems_are_distinct_of_each_grade_in_turn_and_more_begin_alike(count, digits, operations, seed):
    asked = {"digits": sorted(digits), "operations": sorted(operations), "seed": seed}
    found = problems(count, **asked)
    assert len(found) == len(set(found)) == count
    grades = [(name, size) for size in asked["digits"] for name in asked["operations"]]
    for index, each in enumerate(found):
        operation, size = grades[index % len(grades)]
        assert each.operation == operation and len(str(each.left)) == len(str(each.right)) == size and min(each.left, each.right) > 0
    assert problems(count + 7, **asked)[:count] == found == problems(count, **asked)


def test_another_seed_draws_others():
    one, other = (problems(30, digits=(3,), operations=ALL, seed=seed) for seed in (0, 1))
    assert not set(one) & set(other)


def test_every_problem_of_a_grade_can_be_had_and_no_more():
    assert len(set(problems(81, digits=(1,), operations=("add",), seed=0))) == 81
    with pytest.raises(ValueError, match="there are 81; ask for 162 at most"):
        problems(163, digits=(1,), operations=("add", "multiply"), seed=0)


@pytest.mark.parametrize("wrong", [{"digits": ()}, {"digits": (0,)}, {"operations": ("divide",)}, {"operations": ()}])
def test_grades_that_there_are_not_are_refused(wrong):
    with pytest.raises(ValueError, match="expected digits from 1 on and some of add, subtract, multiply"):
        problems(3, **{"digits": (1,), "operations": ALL, "seed": 0, **wrong})


def test_a_prompt_is_solved_lines_and_the_question_with_no_blank_behind_it():
    shots = [Problem(3, "add", 4), Problem(2, "subtract", 9)]
    assert prompt(Problem(5, "multiply", 5), shots) == "3 + 4 = 7\n2 - 9 = -7\n5 * 5 ="
    assert prompt(Problem(5, "multiply", 5), []) == "5 * 5 ="


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (" 72 clips, altogether.", "72"), (" 10,000", "10000"), (" 9{,}500", "9500"), (" -3", "-3"), (" −3", "-3"), ("$-3$", "-3"), ("18.00", "18"),
        ("3 5", "3"), (" 19.", "19"), ("+7", "7"), ("1,234.50", "1234.5"), ("1,2345", "1"), ("12, 345", "12"), (" , 8", "8"), ("12,345,678", "12345678"),
        ("0.5", "0.5"), (" 4\n5", "4"), ("no number.", None), ("", None), (",", None), ("-", None), ("\n7", None),
    ],
)  # fmt: skip
def test_the_first_number_starts_and_ends_with_a_digit_and_keeps_its_sign_but_no_separator(text, number):
    assert first_number(text) == (None if number is None else Decimal(number))


@given(some.integers(-(10**18), 10**18), some.booleans(), some.sampled_from(["", ".", ",", " and 4", ".00", "!"]))
def test_a_number_is_read_as_it_was_written(value, grouped, after):
    assert first_number(f" {value:,}{after}" if grouped else f" {value}{after}") == value


@pytest.mark.parametrize(
    ("text", "number"), [("12", None), ("12,", None), ("12.", None), ("12{,", None), ("12,34", None), ("12 ", 12), ("12\n", 12), ("12 or 3", 12), ("x", None)]
)  # fmt: skip
def test_a_number_that_may_have_gone_on_where_a_text_was_cut_is_none(text, number):
    assert first_number(text, cut=True) == number


def test_an_answer_ends_at_a_line_break_inside_any_token_and_at_special_ones():
    class Tokenizer:
        texts = ("<pad>", "</s>", "a", "\n", " b\n\n", "c n", "\r\n")
        all_special_ids = (0, 1)

        def __len__(self):
            return len(self.texts)

        def batch_decode(self, rows):
            return ["".join(self.texts[token] for token in row) for row in rows]

    assert stop_ids(Tokenizer()) == {0, 1, 3, 4, 6}
