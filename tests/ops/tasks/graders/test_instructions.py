"""Each instruction against answers that follow it and answers that do not, and what is forgiven in the loose reading."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from assay.ops.tasks.generated_documents import PARAMETERS
from assay.ops.tasks.graders.instructions import RULES, follows, loosened, said, sentences, words


@pytest.mark.parametrize(
    ("kind", "parameters", "right", "wrong"),
    [
        ("words_at_most", {"count": 3}, ["One two three.", "Don't", "well-known fact"], ["one two three four", "...", ""]),
        ("words_at_least", {"count": 3}, ["one two three", "a b c d"], ["one two", "well-known fact"]),
        ("lower_case", {}, ["all of it, 5 times.", "naïve"], ["Not this", "123", ""]),
        ("capitals", {}, ["ALL OF IT!", "É"], ["ALL OF it", "5 - 3"]),
        ("keyword", {"word": "stone", "count": 2}, ["Stone on stone.", "a stone; two stone, three stone"], ["stones on stone", "one stone", "stone-stone"]),
        ("ends_with", {"phrase": "That is all."}, ["So. That is all.", 'He said: "that is all."\n', "**That is all.**"], ["That is all. Bye", "That is"]),
        ("starts_with", {"word": "River"}, ["River beds", '"River," he said', "* river"], ["Rivers run", "A river", ""]),
        ("bullets", {"count": 2}, ["* one\n* two", "Here:\n- one\n  - two", "• a\n• b"], ["* one", "* a\n* b\n* c", "*a\n*b", "**bold** text"]),
        ("sentences", {"count": 2}, ["One. Two!", "It costs 3.50 today. Good", 'He said "no." She left.'], ["One.", "One. Two. Three.", ""]),
        ("json", {}, ['{"a": [1, 2]}', '```json\n{"a": 1}\n```', '```\n{}\n```'], ["[1, 2]", "{'a': 1}", '{"a": 1} done', "{"]),
    ],
)  # fmt: skip
def test_each_instruction_worked_by_hand(kind, parameters, right, wrong):
    assert [follows(text, kind, parameters) for text in right] == [True] * len(right)
    assert [follows(text, kind, parameters) for text in wrong] == [False] * len(wrong)


def test_every_instruction_is_said_with_its_parameters_and_has_some():
    assert set(RULES) == set(PARAMETERS)
    for kind, choices in PARAMETERS.items():
        for parameters in choices:
            told = said(kind, parameters)
            assert "{" not in told and all(str(value) in told for value in parameters.values() if value != 1)
    assert said("keyword", {"word": "sea", "count": 1}).endswith('"sea" at least once.') and "1 sentence." in said(
        "sentences", {"count": 1}
    )


def test_an_unknown_instruction_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'rhyme' is no instruction .*; there are words_at_most, "):
        follows("text", "rhyme", {})


def test_the_loose_reading_forgives_a_line_around_the_answer_and_asterisks():
    assert list(loosened("Sure:\nall in *lower* case\nBye")) == [
        "Sure:\nall in *lower* case\nBye", "Sure:\nall in lower case\nBye", "all in *lower* case\nBye", "all in lower case\nBye",
        "Sure:\nall in *lower* case", "Sure:\nall in lower case", "all in *lower* case", "all in lower case",
    ]  # fmt: skip
    assert list(loosened("one line")) == ["one line"] and not list(loosened(" \n"))
    assert any(follows(each, "lower_case", {}) for each in loosened("Sure:\nquiet words"))


@given(st.text(max_size=60))
def test_counts_are_of_what_is_there(text):
    assert follows(text, "words_at_least", {"count": 1}) == bool(words(text))
    assert 0 <= sentences(text) <= sum(text.count(mark) for mark in ".!?…") + 1
    assert (
        not (follows(text, "lower_case", {}) and follows(text, "capitals", {}))
        or text.strip() == text.strip().upper() == text.strip().lower()
    )
