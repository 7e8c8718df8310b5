"""The class of each token: digits, code symbols, the first token of a word, other. Not here: what is averaged by class."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

CLASSES = ("digits", "code_symbols", "word_start", "other")
DIGITS, CODE_SYMBOLS, WORD_START, OTHER = range(4)
CODE_CHARACTERS = frozenset("{}[]()<>=+*/\\|&^%$#@~`_;")


class Pieces(NamedTuple):
    """What the text of each id of a vocabulary looks like, once for all positions."""

    code: Int64[Tensor, " vocab"]  # DIGITS, CODE_SYMBOLS, or OTHER for what is neither
    begins_with_letter: Bool[Tensor, " vocab"]  # after white space, if any
    begins_with_space: Bool[Tensor, " vocab"]
    ends_in_word: Bool[Tensor, " vocab"]  # a letter, a digit or part of a character: a letter after it begins no word


def pieces(tokenizer: Any) -> Pieces:
    """Decode each id of the vocabulary behind an anchor, so that the leading space that decoders strip is kept."""
    vocabulary = len(tokenizer)
    anchor = tokenizer("a", add_special_tokens=False)["input_ids"]
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    skip = len(tokenizer.decode(anchor, **options))
    texts = [text[skip:] for text in tokenizer.batch_decode([[*anchor, token] for token in range(vocabulary)], **options)]
    code, letter, space, ends = [], [], [], []
    for text in texts:
        bare = text.strip()
        if bare and all(character.isnumeric() for character in bare):
            code.append(DIGITS)
        elif bare and not any(map(str.isalnum, bare)) and not CODE_CHARACTERS.isdisjoint(bare):
            code.append(CODE_SYMBOLS)
        else:
            code.append(OTHER)
        letter.append(bare[:1].isalpha())
        space.append(text[:1].isspace())
        ends.append(text[-1:].isalnum() or text.endswith("\ufffd") or text in ("'", "’"))
    special = torch.tensor(tokenizer.all_special_ids, dtype=torch.int64)
    found = Pieces(torch.tensor(code), torch.tensor(letter), torch.tensor(space), torch.tensor(ends))
    inside = special[special < vocabulary]
    found.code[inside] = OTHER
    found.begins_with_letter[inside] = False
    return found


def token_classes(ids: Int64[Tensor, " tokens"], of: Pieces) -> Int64[Tensor, " tokens"]:
    """Index into ``CLASSES`` for each token of a stream.

    A token begins a word if it begins with a letter and either a space before the letter or the end of the token before it starts one afresh
    (``(The``, or a new line). Digits are tokens of digits alone; code symbols have no letter or digit and at least one of ``CODE_CHARACTERS``.
    """
    code = of.code[ids]
    after_break = torch.ones_like(ids, dtype=torch.bool)
    after_break[1:] = ~of.ends_in_word[ids[:-1]]
    starts = of.begins_with_letter[ids] & (of.begins_with_space[ids] | after_break)
    return torch.where(starts & (code == OTHER), WORD_START, code)
