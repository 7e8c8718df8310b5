"""The expressions against Python's ``re`` and by hand, and what the subset refuses."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.decode.fsm import compile_regex
from assay.ops.decode.regex import (
    EMPTY,
    EVERY,
    NOTHING,
    Alt,
    Cat,
    Chars,
    Star,
    alt,
    cat,
    complement,
    derivative,
    nullable,
    parse,
    star,
    union,
)

A, B = Chars(((97, 97),)), Chars(((98, 98),))
ATOMS = ["a", "b", "0", "é", "日", ".", "[ab]", "[^a]", "[0-9b]", r"\d", r"\w", r"\S", r"\.", "-"]


@st.composite
def patterns(draw, depth=3):
    """A pattern and whether its language is infinite: nothing in it is empty, so that every unbounded repeat makes it so."""
    kind = draw(st.sampled_from(["atom", "atom", "cat", "alt", "repeat"])) if depth else "atom"
    if kind == "atom":
        return draw(st.sampled_from(ATOMS)), False
    first, endless = draw(patterns(depth - 1))
    if kind == "repeat":
        sign, unbounded = draw(st.sampled_from([("*", True), ("+", True), ("?", False), ("{2}", False), ("{1,2}", False), ("{1,}", True)]))
        return f"({first}){sign}", endless or unbounded
    second, also = draw(patterns(depth - 1))
    return (f"{first}{second}" if kind == "cat" else f"(?:{first}|{second})"), endless or also


TEXTS = st.text(alphabet="ab0é日.-\n \U0001f600", max_size=5)


@settings(deadline=None, max_examples=150)
@given(made=patterns(), texts=st.lists(TEXTS, min_size=5, max_size=5))
def test_a_text_is_in_the_language_where_pythons_re_matches_it(made, texts):
    pattern, _ = made
    dfa = compile_regex(pattern)
    for text in texts:
        assert dfa.accepts(text) == bool(re.fullmatch(pattern, text, re.ASCII)), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("", [""], ["a"]),
        ("0+", ["0", "000"], ["", "01"]),
        ("^yes$", ["yes"], ["y", "yess"]),
        ("a{2,3}", ["aa", "aaa"], ["a", "aaaa"]),
        ("a{0}b{1,}", ["b", "bb"], ["ab", ""]),
        ("(a|)b", ["ab", "b"], ["a"]),
        (r"\x41\u0042[\x43-\u0044]", ["ABC", "ABD"], ["ABE"]),
        (r"[a\-z]|[-x]|[y-]", ["-", "a", "z", "x", "y"], ["b"]),
        (r"[^\d\s]", ["a", "é", "\U0001f600"], ["1", " ", "\n"]),
        (r"\$\[\]\{\}\\", ["$[]{}\\"], [""]),
        (r"\t\n\r\f\v", ["\t\n\r\f\v"], ["tnrfv"]),
    ],
)
def test_patterns_read_by_hand(pattern, yes, no):
    dfa = compile_regex(pattern)
    assert [text for text in yes + no if dfa.accepts(text)] == yes


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("(", "not closed"),
        ("a)", "not opened"),
        ("*a", "nothing to act on"),
        ("a+?", "lazy"),
        ("a**", "doubled"),
        ("(?=a)", "only '\\(\\?:'"),
        (r"(a)\1", "no such escape"),
        (r"\bfoo", "no such escape"),
        (r"\p{Lu}", "no such escape"),
        (r"\x4", "no such escape"),
        ("\\", "no such escape"),
        ("[]", "at least one"),
        ("[a", "closed by"),
        ("[[:alpha:]]", "no classes or set operations inside"),
        ("[a&&b]", "set operations"),
        ("[z-a]", "not before it"),
        (r"[a-\d]", "not before it"),
        ("a{2", "a count is"),
        ("a{3,2}", "a count is"),
        ("a{999}", "256"),
        ("a{,2}", "expected a count"),
        ("a^b", "nothing to act on"),
        ("a$b", "nothing to act on"),
        (r"\ud800", "surrogate"),
    ],
)
def test_what_readers_disagree_on_or_the_subset_lacks_is_refused_by_name(pattern, says):
    with pytest.raises(ValueError, match=says):
        parse(pattern)


def test_expressions_are_kept_flat_and_small():
    assert cat() == EMPTY and cat(A) == A and cat(A, cat(B, A)) == Cat((A, B, A)) and cat(A, NOTHING, B) == NOTHING
    assert alt(A) == A and alt(A, A) == A and alt(A, alt(B, A)) == Alt(frozenset({A, B})) and alt() == alt(NOTHING) == NOTHING
    assert star(star(A)) == Star(A) and star(EMPTY) == EMPTY == star(NOTHING)
    assert nullable(star(A)) and nullable(EMPTY) and not nullable(alt(A, cat(A, star(B)))) and nullable(alt(A, EMPTY))


def test_derivatives_by_hand():
    assert derivative(parse("ab|ac"), 97) == Alt(frozenset({B, Chars(((99, 99),))}))
    assert derivative(parse("a*b"), 97) == parse("a*b") and derivative(parse("a*b"), 98) == EMPTY
    assert derivative(parse("ab"), 98) == NOTHING


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)).map(sorted).map(tuple), max_size=5))
def test_a_set_of_characters_and_its_complement_are_all_characters_once(pairs):
    found = union(tuple(pairs))
    inside = {code for low, high in pairs for code in range(low, high + 1)}
    assert {code for low, high in found for code in range(low, high + 1)} == inside
    assert union(found, complement(found)) == EVERY
    assert not inside & {code for low, high in complement(found) for code in range(low, min(high, 400) + 1)}
