"""Streams, windows and prompts of tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from assay.ops.data.texts import Document
from assay.ops.data.tokens import SEPARATOR, calibration_windows, prompts, token_stream, vocabulary_digest


@pytest.fixture
def tokenizer(tl8_dir):
    return AutoTokenizer.from_pretrained(tl8_dir)


def english(*texts):
    return [Document(text, "en", str(index)) for index, text in enumerate(texts)]


def test_documents_are_joined_by_a_blank_line_and_cut_to_exactly_so_many_tokens(tokenizer):
    stream = token_stream(tokenizer, english("ab", "cd", "never read"), 7)
    assert tokenizer.decode(stream.ids) == "ab\n\ncd\n"
    assert stream.ids.tolist() == tokenizer("ab\n\ncd\n", add_special_tokens=False)["input_ids"]


def test_a_text_that_is_too_short_says_how_many_tokens_it_has(tokenizer):
    with pytest.raises(ValueError, match="the text has 6 tokens, fewer than the 7 asked for"):
        token_stream(tokenizer, english("ab", "cd"), 7)
    with pytest.raises(ValueError, match="the text has 0 tokens"):
        token_stream(tokenizer, [], 1)


def test_only_as_many_documents_are_read_as_are_needed(tokenizer):
    def endless():
        for number in range(1000):
            read.append(number)
            yield Document("x" * 100, "en", "")

    read: list[int] = []
    assert len(token_stream(tokenizer, endless(), 1000).ids) == 1000
    assert len(read) < 60


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.text("ab \n", max_size=40), min_size=1, max_size=12), data=st.data())
def test_the_stream_is_a_prefix_of_the_tokens_of_the_whole_text(shared_tokenizer, texts, data):
    whole = shared_tokenizer(SEPARATOR.join(texts), add_special_tokens=False)["input_ids"]
    if not whole:
        return
    tokens = data.draw(st.integers(1, len(whole)))
    assert token_stream(shared_tokenizer, english(*texts), tokens).ids.tolist() == whole[:tokens]


@pytest.fixture(scope="module")
def shared_tokenizer(tmp_path_factory):
    """A tokenizer with merges, so that a cut in the text can change a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["a", "b", "Ġ", "Ċ", "ab", "aba", "Ġa", "ĊĊ"])}
    merges = [("a", "b"), ("ab", "a"), ("Ġ", "a"), ("Ċ", "Ċ")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_each_token_knows_the_language_of_its_document(tokenizer):
    stream = token_stream(tokenizer, [Document("aa", "en", ""), Document("bb", "de", ""), Document("cc", "en", "")], 10)
    named = [stream.languages[index] for index in stream.language.tolist()]
    assert named == ["en"] * 4 + ["de"] * 4 + ["en"] * 2  # the separator belongs to the document before it


def test_several_languages_need_a_tokenizer_that_gives_offsets():
    class Slow:
        is_fast = False

        def __call__(self, text, **options):
            return {"input_ids": [ord(character) for character in text]}

    assert token_stream(Slow(), english("ab"), 2).ids.tolist() == [97, 98]
    with pytest.raises(ValueError, match="2 languages"):
        token_stream(Slow(), [Document("ab", "en", ""), Document("cd", "de", "")], 4)


def test_calibration_windows_are_the_stream_cut_up_and_always_the_same(tokenizer):
    source = english("abc" * 50, "def" * 50)
    first, second = (calibration_windows(tokenizer, source, 3, 16) for _ in range(2))
    assert first.shape == (3, 16) and first.equal(second)
    assert first.flatten().equal(token_stream(tokenizer, source, 48).ids)


def test_prompts_begin_where_documents_begin_and_pass_over_short_ones(tokenizer):
    source = english("abcdef", "x", "ghijkl" + "m" * 100)
    assert [tokenizer.decode(row) for row in prompts(tokenizer, source, 2, 4)] == ["abcd", "ghij"]
    again = prompts(tokenizer, source, 4, 3)
    assert [tokenizer.decode(row) for row in again] == ["abc", "ghi", "def", "jkl"]  # the documents ran out: their next pieces
    with pytest.raises(ValueError, match="3 pieces of 50 tokens, fewer than the 9"):
        prompts(tokenizer, english("a" * 150, "b" * 20), 9, 50)


def test_a_vocabulary_is_known_by_its_tokens_not_by_the_object(tokenizer, tl8_dir):
    again = AutoTokenizer.from_pretrained(tl8_dir)
    assert vocabulary_digest(again) == vocabulary_digest(tokenizer)
    again.add_tokens(["new"])
    assert vocabulary_digest(again) != vocabulary_digest(tokenizer)


def test_no_special_token_enters_a_stream(tokenizer):
    adds = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    from tokenizers.processors import TemplateProcessing

    adds.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    assert adds("ab")["input_ids"][0] == 1
    assert not torch.isin(token_stream(adds, english("ab", "cd"), 6).ids, torch.tensor([1, 2])).any()
