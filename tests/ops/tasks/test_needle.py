"""Prompts with needles: where these stand, how long the whole is, and that the question has one answer."""

import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing

from assay.ops.models.checkpoint import load_tokenizer
from assay.ops.tasks.needle import INTRODUCTION, Asked, Frame, ask, build, encode, frame, haystack, places

TEXT = "The rain fell on the old town. Nobody was out. A cat sat under a cart, and waited! Was it hungry? It was. So the day went by, slowly and wet."
PLAIN = Frame([1], [], True)


@pytest.fixture(scope="module")
def tokenizer(make_llama, save_checkpoint_dir, tmp_path_factory):
    """One id a byte."""
    return load_tokenizer(save_checkpoint_dir(make_llama(layers=1), tmp_path_factory.mktemp("base")))


def built(tokenizer, kind="single", *, length=700, depth=50, keys=4, seed=0, around=PLAIN):
    asked = ask(kind, keys=keys, random=Random(seed))
    sentences = haystack(tokenizer, [TEXT] * 60, 4 * length)
    encoded = lambda text: encode(tokenizer, text)  # noqa: E731
    return asked, build(asked, sentences, around, length=length, depth_pct=depth, random=Random(seed), encoded=encoded)


@pytest.mark.parametrize("depth", [0, 50, 100])
@pytest.mark.parametrize("kind", ["single", "multiple", "hops"])
def test_the_needle_stands_once_where_it_is_said_to(tokenizer, kind, depth):
    """Trap E10: special tokens are not inserted between the pieces, and the needle's ids are found once, at the offset that is told."""
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    asked, prompt = built(tokenizer, kind, length=900, depth=depth)
    assert places(prompt.ids, prompt.needle) == [prompt.offset] and prompt.ids.count(1) == 1 and 2 not in prompt.ids
    text = tokenizer.decode(prompt.ids[1:])
    assert text.count(asked.needles[0]) == 1 and all(text.count(needle) == 1 for needle in asked.needles)
    assert text.startswith(INTRODUCTION) and text.endswith(asked.question + asked.lead)
    assert abs(100 * prompt.share - depth) < 6
    if depth == 0:
        assert prompt.offset == 1 + len(INTRODUCTION)
    if depth == 100 and kind == "single":
        assert text.endswith(asked.needles[0] + asked.question + asked.lead)
    assert 900 - 16 < len(prompt.ids) <= 900


@settings(max_examples=12, deadline=None)
@given(
    length=st.integers(400, 1500), depth=st.integers(0, 100), kind=st.sampled_from(["single", "multiple", "hops"]), seed=st.integers(0, 99)
)
def test_a_prompt_is_as_long_as_its_sentences_allow_and_never_longer(tokenizer, length, depth, kind, seed):
    asked, prompt = built(tokenizer, kind, length=length + 200, depth=depth, seed=seed)
    shortest = min(len(f" {sentence}") for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", TEXT))
    assert length + 200 - shortest <= len(prompt.ids) <= length + 200
    assert places(prompt.ids, prompt.needle) == [prompt.offset]
    assert str(prompt.answer) in asked.needles[0] and tokenizer.decode(prompt.needle) == asked.needles[0]


def test_one_code_is_asked_for_and_nothing_else_leads_to_it():
    for seed in range(20):
        (only,), multiple, hops = ask("single", keys=4, random=Random(seed)).needles, *(ask(kind, keys=5, random=Random(seed)) for kind in ("multiple", "hops"))  # fmt: skip
        assert re.fullmatch(r" The code of the [a-z]+ [a-z]+ is [1-9][0-9]{4}\.", only)
        assert len(multiple.needles) == 5 and len(hops.needles) == 4
        for asked in (multiple, hops):
            says = dict(
                re.fullmatch(r" The code of the ([a-z ]+) is (?:the code of the )?(.+)\.", needle).groups() for needle in asked.needles
            )
            assert len(says) == len(asked.needles)
            name = re.fullmatch(r"\n\nWhat is the code of the (.+)\?", asked.question)[1]
            steps = 0
            while name in says:
                name, steps = says[name], steps + 1
            assert int(name) == asked.answer and steps == (1 if asked is multiple else 2) and str(asked.answer) in asked.needles[0]
            assert sum(str(asked.answer) in needle for needle in asked.needles) == 1


def test_longer_chains_take_more_hops():
    needles = ask("hops", keys=8, random=Random(0)).needles
    assert len(needles) == 8 and [any(letter.isdigit() for letter in needle) for needle in needles] == [True, False, False, False] * 2


@pytest.mark.parametrize(("kind", "keys"), [("rhyme", 4), ("multiple", 145), ("hops", 1)])
def test_an_unknown_kind_or_too_many_keys_are_refused(kind, keys):
    with pytest.raises(ValueError, match=f"kind='{kind}' with keys={keys}; expected single, multiple or hops, and up to 144 keys"):
        ask(kind, keys=keys, random=Random(0))


def test_what_is_too_short_is_refused_with_what_would_do(tokenizer):
    with pytest.raises(
        ValueError, match=r"a prompt of 300 tokens has no room for a sentence of the haystack beside its 4 needles .*, which take \d+; ask"
    ):
        built(tokenizer, "multiple", length=300)
    with pytest.raises(ValueError, match=r"the haystack has 142 tokens, fewer than the 500"):
        haystack(tokenizer, [TEXT], 500)


def test_a_needle_that_also_stands_in_the_haystack_is_refused(tokenizer):
    asked = Asked([" Nobody was out."], "\n\nWho was out?", " It was", 0)
    sentences = haystack(tokenizer, [TEXT], 100)
    with pytest.raises(ValueError, match=r"the needle stands at \[\d+, \d+\] of \d+ tokens; expected it once"):
        build(asked, sentences, PLAIN, length=400, depth_pct=0, random=Random(0), encoded=lambda text: encode(tokenizer, text))


def test_a_chat_template_stands_around_the_whole_and_the_answer_is_not_begun(tokenizer):
    tokenizer.chat_template = "<s>{% for message in messages %}[{{ message.role }}] {{ message.content }} [end]\n{% endfor %}[bot]"
    around = frame(tokenizer, chat=True)
    asked, prompt = built(tokenizer, around=around)
    text = tokenizer.decode(prompt.ids)
    assert prompt.ids.count(1) == 1 and text.startswith(f"<s>[user] {INTRODUCTION}")
    assert text.endswith(f"{asked.question} Answer with the code alone. [end]\n[bot]")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        frame(tokenizer, chat=True)


def test_a_plain_prompt_begins_as_the_tokenizer_begins_texts(tokenizer):
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    assert frame(tokenizer, chat=False) == Frame([1], [], True)
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    assert frame(tokenizer, chat=False) == Frame([], [], True)
