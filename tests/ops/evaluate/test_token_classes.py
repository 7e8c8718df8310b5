"""Classes of tokens, on a real tokenizer where the packaged base is there and on the tiny one."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from assay.ops.evaluate.token_classes import CLASSES, pieces, token_classes

BYTE_LEVEL = ["a", "The", "Ġthe", "Ġ", "Ċ", "ing", "12", "Ġ7", "==", "Ġ->", ".", "Ġ,", "x1", "(", "'", "s", "Ġ'", "é", "don", "Ã"]
METASPACE = ["a", "The", "▁the", "▁", "\n", "ing", "12", "▁7", "==", "▁->", ".", "▁,", "x1", "(", "'", "s", "▁'", "é", "don"]


def tokenizer_of(tokens: list[str], *, metaspace: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(
        models.WordLevel({"<unk>": 0, "</s>": 1} | {token: index + 2 for index, token in enumerate(tokens)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Metaspace(prepend_scheme="never") if metaspace else pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
    tokenizer.decoder = (
        decoders.Sequence([decoders.Metaspace(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]) if metaspace else decoders.ByteLevel()
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def classes_of(tokenizer, tokens: list[str]) -> list[str]:
    ids = torch.tensor(tokenizer.convert_tokens_to_ids(tokens))
    return [CLASSES[index] for index in token_classes(ids, pieces(tokenizer)).tolist()]


@pytest.mark.parametrize("metaspace", [False, True])
def test_classes_worked_by_hand(metaspace):
    """With a decoder that strips the leading space as well: by the decoded piece alone, no word would ever begin there."""
    tokenizer = tokenizer_of(METASPACE if metaspace else BYTE_LEVEL, metaspace=metaspace)
    space, newline = ("▁", "\n") if metaspace else ("Ġ", "Ċ")
    tokens = [
        "The",
        f"{space}the",
        "ing",
        f"{space}7",
        "12",
        "==",
        f"{space}->",
        ".",
        f"{space},",
        newline,
        "The",
        "ing",
        "(",
        "a",
        "don",
        "'",
        "s",
    ]
    assert classes_of(tokenizer, tokens) == [
        "word_start", "word_start", "other", "digits", "digits", "code_symbols", "code_symbols", "other", "other", "other",
        "word_start", "other", "code_symbols", "word_start", "other", "other", "other",
    ]  # fmt: skip


def test_a_quote_after_a_space_opens_a_word_and_one_inside_does_not():
    assert classes_of(tokenizer_of(BYTE_LEVEL, metaspace=False), ["Ġ'", "a", "'", "s"]) == ["other", "word_start", "other", "other"]


def test_part_of_a_character_is_inside_a_word():
    assert classes_of(tokenizer_of(BYTE_LEVEL, metaspace=False), ["Ã", "a"]) == ["other", "other"]


def test_a_special_token_is_no_code_symbol():
    assert classes_of(tokenizer_of(BYTE_LEVEL, metaspace=False), ["</s>", "The"]) == ["other", "word_start"]


def test_every_character_of_a_line_of_code(tl8_dir):
    tokenizer = AutoTokenizer.from_pretrained(tl8_dir)
    named = classes_of(tokenizer, tokenizer.tokenize("if x2[0] == 10: go"))
    assert (
        "".join({"digits": "d", "code_symbols": "c", "word_start": "w", "other": "."}[name] for name in named)
        == "w..w" + "dcdc" + ".cc.dd..w."
    )
