"""The reference itself: its automata against brute force, its reading of bytes, and the traps of constrained decoding by hand."""

import re
from itertools import islice, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.decode.constraints import DeadEnd
from assay.ops.decode.fsm import TokenFsm, characters_from, compile_regex

LETTERS = "ab0"
SMALL = st.recursive(
    st.sampled_from([*LETTERS, "[ab]", "[^a]"]).map(lambda atom: (atom, False)),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda two: (two[0][0] + two[1][0], two[0][1] or two[1][1])),
        st.tuples(inner, inner).map(lambda two: (f"({two[0][0]}|{two[1][0]})", two[0][1] or two[1][1])),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}"])).map(lambda two: (f"({two[0][0]}){two[1]}", two[0][1] or two[1] in "*+")),
    ),
    max_leaves=5,
)


def fsm(pattern, pieces, *, eos=(0,), head_size=None):
    """A constraint whose id 0 is the end token."""
    return TokenFsm(compile_regex(pattern), [None, *pieces], head_size=head_size or len(pieces) + 1, eos_ids=eos)


def ids(constraint):
    return constraint.allowed().nonzero().flatten().tolist()


@settings(deadline=None, max_examples=100)
@given(SMALL)
def test_a_language_is_infinite_where_something_repeats_without_bound(made):
    pattern, endless = made
    assert compile_regex(pattern).finite != endless


@settings(deadline=None, max_examples=100)
@given(SMALL)
def test_the_texts_up_to_a_length_are_those_that_brute_force_finds(made):
    pattern = made[0].replace("[^a]", "[b0]")
    everything = ("".join(letters) for length in range(4) for letters in product(sorted(LETTERS), repeat=length))
    assert list(compile_regex(pattern).strings(3)) == [text for text in everything if re.fullmatch(pattern, text)]


def test_finite_languages_are_listed_whole_and_infinite_ones_need_a_bound():
    assert list(compile_regex("(yes|no)!?").strings()) == ["no", "no!", "yes", "yes!"]
    assert list(compile_regex("").strings()) == [""]
    with pytest.raises(ValueError, match="infinite"):
        next(compile_regex("a*").strings())
    assert list(islice(compile_regex("[0-9]{4}-[0-9]{2}-[0-9]{2}").strings(), 2)) == [
        "0000-00-00",
        "0000-00-01",
    ]  # 10^8 texts, none made in vain


def test_an_automaton_by_hand_has_no_state_that_leads_nowhere():
    dfa = compile_regex("ab|ac")
    assert dfa.moves == (((97, 97, 1),), ((98, 99, 2),), ()) and dfa.accepting == {2}
    nowhere = compile_regex("a[^\\s\\S]|b")
    assert nowhere.moves == (((98, 98, 1),), ()) and nowhere.accepting == {1}
    empty = compile_regex("a[^\\s\\S]")
    assert empty.empty and empty.finite and empty.moves == ((),) and list(empty.strings()) == []


def test_a_language_too_large_for_a_reference_is_refused():
    with pytest.raises(ValueError, match="more than 1000 states"):
        compile_regex("(a|b)*a(a|b){10}")


def test_the_characters_that_begin_with_some_bytes_are_known():
    assert characters_from(b"a") == (97, 97, True)
    assert characters_from(b"\xc3") == (0xC0, 0xFF, False) and characters_from("é".encode()) == (0xE9, 0xE9, True)
    assert characters_from(b"\xe0") == (0x800, 0xFFF, False) and characters_from(b"\xf4") == (0x100000, 0x10FFFF, False)
    every = {}
    for code in (*range(0xD800), *range(0xE000, 0x110000, 7)):
        every.setdefault(chr(code).encode()[:2], []).append(code)
    for first, second in product(range(256), range(256)):
        found = characters_from(bytes([first, second]))
        if first < 0x80 or (first == 0xED and second >= 0xA0):  # one character and a second one; surrogates
            continue
        begun = every.get(bytes([first, second]))
        assert (found is None) == (begun is None), (first, second)
        if found and begun:
            assert found[0] <= min(begun) and max(begun) <= found[1] and min(begun) - found[0] < 7 > found[1] - max(begun)


@pytest.mark.parametrize(("pattern", "legal"), [("", [0]), ("0*", [0, 1, 2]), ("0+", [1, 2])])
def test_the_end_is_legal_at_once_where_the_empty_text_is(pattern, legal):
    assert ids(fsm(pattern, [b"0", b"00", b"1"])) == legal


def test_ids_beyond_the_tokenizer_are_never_allowed():
    wide = fsm(".*", [b"a"] * 119, head_size=128)
    assert wide.allowed().shape == (128,) and ids(wide) == list(range(120))
    with pytest.raises(ValueError, match="token 125 is not allowed"):
        wide.advance(125)


def test_the_end_is_legal_exactly_in_accepting_states_and_nothing_comes_after_it():
    text = fsm("ab?", [b"a", b"b", b"ab"])
    assert ids(text) == [1, 3]
    text.advance(1)
    assert ids(text) == [0, 2] and not text.finished
    text.advance(0)
    assert text.finished
    for after in (text.allowed, lambda: text.advance(0)):
        with pytest.raises(ValueError, match="finished"):
            after()
    text.rollback(1)
    assert ids(text) == [0, 2]
    text.rollback(1)
    assert ids(text) == [1, 3]


def test_a_dead_end_is_an_error_of_its_own_and_one_can_step_back_from_it():
    text = fsm("ab|cd", [b"a", b"c", b"d"])  # there is no b
    text.advance(1)
    with pytest.raises(DeadEnd, match="after 1 tokens"):
        text.allowed()
    text.rollback(1)
    text.advance(2)
    assert ids(text) == [3]
    with pytest.raises(DeadEnd, match="the language is empty"):
        fsm("a[^\\s\\S]", [b"a"])


def test_a_character_may_be_split_over_tokens_and_the_text_cannot_end_inside_it():
    """é is c3 a9; à is c3 a0; 日 is e6 97 a5."""
    pieces = [b"\xc3", b"\xa9", b"\xa0", b"\xe6\x97", b"\xa5", b"\xa9x", b"x"]
    text = fsm("[éz]x?", pieces)
    assert ids(text) == [1]
    text.advance(1)
    assert ids(text) == [2, 6]
    text.advance(2)
    assert ids(text) == [0, 7]
    text = fsm("日?", pieces)
    text.advance(4)
    assert ids(text) == [5]


def test_special_tokens_and_empty_pieces_are_no_text():
    text = TokenFsm(compile_regex(".*"), [None, b"", b"a", None], head_size=4, eos_ids=[0])
    assert ids(text) == [0, 2]


def test_a_copy_goes_its_own_way():
    one = fsm("a*", [b"a"])
    one.advance(1)
    two = one.copy()
    two.advance(0)
    assert two.finished and not one.finished and ids(one) == [0, 1]
    with pytest.raises(ValueError, match="3 tokens back from a text of 2"):
        two.rollback(3)
    two.rollback(0)
    assert two.finished


def test_a_long_expression_is_compiled():
    assert compile_regex("[a-z]{200}").accepts("q" * 200)
