"""The engine's masks against the reference on random languages and vocabularies, the traps of constrained decoding, and what is refused."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.decode.constraints import DeadEnd, apply_mask, from_json_schema, from_regex
from assay.ops.decode.fsm import TokenFsm, compile_regex

# The character that stands for each byte in a byte-level vocabulary (GPT-2's table).
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE = {byte: chr(byte) for byte in PRINTABLE} | {
    byte: chr(256 + index) for index, byte in enumerate(byte for byte in range(256) if byte not in PRINTABLE)
}
EOS = 2


def tokenizer_of(pieces):
    """A byte-level tokenizer whose ids 0 to 2 are pad, begin and end, and whose others are ``pieces``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", *("".join(BYTE[byte] for byte in piece) for piece in pieces)]
    made = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[], unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def regex(pattern, pieces, *, head_size=None, eos=(EOS,)):
    return from_regex(tokenizer_of(pieces), pattern, head_size=head_size or len(pieces) + 3, eos_ids=eos)


def reference(pattern, pieces, *, head_size=None, eos=(EOS,)):
    return TokenFsm(compile_regex(pattern), [None] * 3 + list(pieces), head_size=head_size or len(pieces) + 3, eos_ids=eos)


def ids(constraint):
    return constraint.allowed().nonzero().flatten().tolist()


def outcome(constraint):
    """The mask, or what is said instead of it."""
    try:
        return ids(constraint)
    except DeadEnd:
        return "dead end"


def texts(constraint, bound=12):
    """Every sequence of tokens that is legal and ends within ``bound`` tokens."""
    found, pending = [], [((), constraint)]
    while pending:
        text, here = pending.pop()
        for token in ids(here):
            after = here.copy()
            after.advance(token)
            if after.finished:
                found.append(text)
            elif len(text) < bound:
                pending.append(((*text, token), after))
    return found


ATOMS = ["a", "b", "0", "é", "日", ".", "[ab]", "[^a]", "[à-ÿ]", r"\d", r"\w", r"\S", r"\."]
PATTERNS = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,1}"])).map(lambda two: f"({two[0]}){two[1]}"),
    ),
    max_leaves=6,
)
BYTES = st.lists(st.sampled_from([*b"ab0. ", *"é".encode(), *"日".encode(), 0xFF]), min_size=1, max_size=3).map(bytes)


@settings(deadline=None, max_examples=120)
@given(pattern=PATTERNS, pieces=st.lists(BYTES, min_size=3, max_size=25, unique=True), seed=st.integers(0, 99), wider=st.integers(0, 9))
def test_the_engine_allows_what_the_reference_does_on_any_walk(pattern, pieces, seed, wider):
    choose, head = random.Random(seed), len(pieces) + 3 + wider
    theirs = reference(pattern, pieces, head_size=head)
    try:
        ours = regex(pattern, pieces, head_size=head)
    except DeadEnd:
        assert outcome(theirs) == "dead end"
        return
    walked = 0
    for _ in range(12):
        legal = outcome(theirs)
        assert outcome(ours) == legal
        back = choose.randrange(walked + 1)
        if legal == "dead end" or theirs.finished or choose.random() < 0.2:
            ours.rollback(back)
            theirs.rollback(back)
            walked -= back
            continue
        token = choose.choice(legal)
        for constraint in (ours, theirs):
            constraint.advance(token)
        walked += 1
        assert ours.finished == theirs.finished
        if ours.finished:
            ours.rollback(1)
            theirs.rollback(1)
            walked -= 1


@pytest.mark.parametrize(("pattern", "legal"), [("", [2]), ("0*", [2, 3, 4]), ("0+", [3, 4])])
def test_the_end_is_legal_at_once_where_the_empty_text_is(pattern, legal):
    assert ids(regex(pattern, [b"0", b"00", b"1"])) == legal


def test_the_end_is_legal_exactly_in_accepting_states_and_nothing_comes_after_it():
    text = regex("yes", [b"y", b"es", b"yes", b"s"])
    assert ids(text) == [3, 5]
    with pytest.raises(ValueError, match="token 2 is not allowed: the text may not end after 0 tokens"):
        text.advance(2)
    text.advance(5)
    assert ids(text) == [2]
    text.advance(2)
    assert text.finished
    for after in (text.allowed, lambda: text.advance(2)):
        with pytest.raises(ValueError, match="finished"):
            after()


def test_any_of_several_end_tokens_ends_the_text_and_none_is_text():
    text = regex("a*", [b"a", b"aa"], eos=(2, 4))
    assert ids(text) == [2, 3, 4]
    text.advance(4)
    assert text.finished
    assert ids(regex("a+", [b"a", b"aa"], eos=(2, 4))) == [3]


def test_taking_back_an_end_token_takes_back_one_token():
    """The engine does not count an end token that comes where nothing else could."""
    text = regex("yes", [b"y", b"es", b"yes"])
    for rounds in range(3):
        text.advance(3)
        text.advance(4)
        text.advance(2)
        text.rollback(2)
        assert not text.finished and ids(text) == [4]
        text.rollback(1 if rounds else 0)
        text.rollback(0 if rounds else 1)
        assert ids(text) == [3, 5]
    with pytest.raises(ValueError, match="1 tokens back from a text of 0"):
        text.rollback(1)


def test_ids_beyond_the_tokenizer_have_probability_zero():
    """A head of 128, a tokenizer of 120."""
    text = regex(".*", [bytes([97 + index // 26, 97 + index % 26]) for index in range(117)], head_size=128)
    mask = text.allowed()
    assert mask.shape == (128,) and not mask[120:].any() and mask[2:120].all()
    p = apply_mask(torch.zeros(128), mask).softmax(dim=-1)
    assert (p[120:] == 0).all() and p[2:120].allclose(torch.tensor(1 / 118))
    for foreign in (120, 127, 128, 10**6, -1):
        with pytest.raises(ValueError, match=f"token {foreign} is not allowed"):
            text.advance(foreign)
    text.advance(5)  # nothing broke


def test_a_head_narrower_than_the_tokenizer_gets_a_mask_of_its_width():
    assert ids(regex("a|b", [b"a", b"b"], head_size=4)) == [3]


def test_a_dead_end_is_an_error_of_its_own_and_one_can_step_back_from_it():
    text = regex("ab|cd", [b"a", b"c", b"d"])  # the tokenizer cannot write b
    text.advance(3)
    other = text.copy()
    for _ in range(2):
        with pytest.raises(DeadEnd, match="after 1 tokens"):
            text.allowed()
    for stuck in (text, other):
        stuck.rollback(1)
        stuck.advance(4)
        assert ids(stuck) == [5]


def test_a_row_of_a_mask_that_allows_nothing_is_a_dead_end():
    logits = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    masked = apply_mask(logits, torch.tensor([[True, False], [False, True]]))
    assert masked.tolist() == [[1.0, -torch.inf], [-torch.inf, 4.0]] and logits.isfinite().all()
    with pytest.raises(DeadEnd, match="allows no token"):
        apply_mask(logits, torch.tensor([[True, False], [False, False]]))


@pytest.mark.parametrize("empty", [r"a[^\s\S]", r"[^\s\S]", "b"])  # the last is not empty, but no token begins it
def test_an_empty_language_is_refused_when_it_is_made(empty):
    with pytest.raises(DeadEnd, match="admits no text"):
        regex(empty, [b"a"])


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": []},
        {"type": "string", "enum": [1]},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "^a$", "minLength": 5}}, "required": ["a"]},
    ],
)
def test_a_schema_that_nothing_satisfies_is_refused_when_it_is_made(schema):
    with pytest.raises(DeadEnd, match="nsatisfiable"):
        from_json_schema(tokenizer_of([b"a"]), schema, head_size=4, eos_ids=[2])


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "nope"}, "nope"),
    ],
)
def test_a_keyword_that_the_engine_lacks_is_refused_by_name(schema, named):
    with pytest.raises(ValueError, match=named):
        from_json_schema(tokenizer_of([b"a"]), schema, head_size=4, eos_ids=[2])


@pytest.mark.parametrize("pattern", ["(", "a(?=b)", r"(a)\1", r"\bfoo"])
def test_a_pattern_that_the_engine_cannot_read_is_refused_with_the_pattern(pattern):
    with pytest.raises(ValueError, match="cannot be followed") as caught:
        regex(pattern, [b"a"])
    assert repr(pattern) in str(caught.value) and "<state>" not in str(caught.value)


def test_every_cut_of_a_legal_text_into_tokens_is_legal():
    """Where one text is left, the engine by itself would allow only the cut that the tokenizer makes."""
    assert sorted(texts(regex("yes", [b"y", b"e", b"s", b"ye", b"es", b"yes"]))) == sorted([(8,), (3, 7), (6, 5), (3, 4, 5)])


def test_an_enum_with_a_common_prefix_has_each_of_its_texts_and_ends_behind_each():
    pieces = [b'"', b"foo", b"bar", b"foobar", b"ball", b"t", b'bar"']
    tokenizer = tokenizer_of(pieces)
    text = from_json_schema(tokenizer, {"enum": ["foo", "foobar", "football"]}, head_size=10, eos_ids=[2])
    written = {b"".join(pieces[token - 3] for token in found) for found in texts(text)}
    assert written == {b'"foo"', b'"foobar"', b'"football"'}
    text.advance(3)
    text.advance(4)
    assert ids(text) == [3, 5, 8, 9]  # the quote, bar, t and bar"
    text.advance(3)
    assert ids(text) == [2]


def test_a_character_may_be_split_over_tokens_and_the_text_cannot_end_inside_it():
    """é is c3 a9; à is c3 a0."""
    text = regex("é*", [b"\xc3", b"\xa9", b"\xa0", "é".encode(), b"\xa9\xc3"])
    assert ids(text) == [2, 3, 6]
    text.advance(3)
    assert ids(text) == [4, 7]
    text.advance(7)
    assert ids(text) == [4, 7]
    text.advance(4)
    assert ids(text) == [2, 3, 6]


def test_special_tokens_are_no_text():
    assert ids(regex(".*", [b"<", b"s", b">"])) == [2, 3, 4, 5]
    text = regex("<s>", [b"<", b"s", b">"])
    assert ids(text) == [3]


ALPHABET = [bytes([byte]) for byte in range(32, 127)]


DUMPED, COMPACT, LOOSE, SWAPPED = (
    '{"a": 1, "b": [true, true]}',
    '{"a":1,"b":[true,true]}',
    '{ "a": 1 ,"b":[ true, true] }',
    '{"b": [true, true], "a": 1}',
)


@pytest.mark.parametrize(
    ("options", "legal"),
    [({}, {DUMPED}), ({"separators": (",", ":")}, {COMPACT}), ({"separators": None}, {DUMPED, COMPACT, LOOSE})],
)
def test_json_is_written_as_json_dumps_does_unless_told_otherwise(options, legal):
    schema = {
        "type": "object",
        "properties": {"a": {"const": 1}, "b": {"type": "array", "items": {"const": True}, "minItems": 2, "maxItems": 2}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    for written in (DUMPED, COMPACT, LOOSE, SWAPPED):
        text = from_json_schema(tokenizer_of(ALPHABET), schema, head_size=98, eos_ids=[2], **options)
        try:
            for byte in written.encode():
                text.advance(byte - 32 + 3)
            text.advance(2)
        except ValueError:
            pass
        assert text.finished == (written in legal), written


def test_letters_are_ascii_and_a_slash_and_a_line_break_are_characters():
    pieces = [b"/", b"\n", b"1", "٣".encode(), b"x", "é".encode()]
    assert ids(regex(r"\d", pieces)) == [5]
    assert ids(regex(r"\w", pieces)) == [5, 7]
    assert ids(regex("a?/|\n|\\n\\n", pieces)) == [3, 4]
    assert ids(regex(".", pieces)) == [3, 5, 6, 7, 8]


def test_copies_go_their_own_ways_as_beams_do():
    one = regex("(ab|ac)*", [b"a", b"b", b"c"])
    one.advance(3)
    two = one.copy()
    one.advance(4)
    two.advance(5)
    two.advance(2)
    assert two.finished and not one.finished and ids(one) == [2, 3]
    two.rollback(3)
    assert ids(two) == [2, 3]


@pytest.mark.parametrize("eos", [(), (99,), (-1,)])
def test_a_text_that_could_never_end_is_refused(eos):
    with pytest.raises(ValueError, match="eos_ids"):
        regex("a", [b"a"], eos=eos)


def test_a_slow_tokenizer_is_refused():
    class Slow:
        is_fast = False

        def __len__(self):
            return 4

    with pytest.raises(ValueError, match="not a fast tokenizer"):
        from_regex(Slow(), "a", head_size=4, eos_ids=[2])


def test_tokens_added_to_a_tokenizer_are_seen():
    tokenizer = tokenizer_of([b"a"])
    assert ids(from_regex(tokenizer, "a+", head_size=8, eos_ids=[2])) == [3]
    tokenizer.add_tokens(["aaa"])
    assert ids(from_regex(tokenizer, "a+", head_size=8, eos_ids=[2])) == [3, 4]
