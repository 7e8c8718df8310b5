"""Text as token ids: one stream of exactly so many tokens, windows to calibrate on, prompts. Not here: where text comes from (``ops/data/texts.py``)."""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from assay.ops.data.texts import Document

SEPARATOR = "\n\n"
MARGIN = 32  # tokens read beyond those kept: where a text is cut cannot change the tokens that far before the cut


class TokenStream(NamedTuple):
    """Token ids of joined documents; ``language`` indexes ``languages`` for each of them."""

    ids: Int64[Tensor, " tokens"]
    language: Int64[Tensor, " tokens"]
    languages: tuple[str, ...]


def token_stream(tokenizer: Any, documents: Iterable[Document], tokens: int) -> TokenStream:
    """The first ``tokens`` tokens of the documents joined by a blank line, without special tokens.

    Documents are taken and tokenized only as far as needed. A token that spans two documents has the language of the first.

    Raises:
        ValueError: the text has fewer tokens (says how many), or it has several languages and the tokenizer gives no offsets.
    """
    taken: list[Document] = []
    source = iter(documents)
    wanted = 4 * (tokens + MARGIN)  # characters to try; a guess that the loop corrects
    held, ended = 0, False
    while True:
        while held < wanted and not ended:
            document = next(source, None)
            if document is None:
                ended = True
            else:
                held += len(document.text) + len(SEPARATOR)
                taken.append(document)
        text = SEPARATOR.join(document.text for document in taken)
        encoded = _encode(tokenizer, text[:wanted], return_offsets_mapping=tokenizer.is_fast)
        ids: list[int] = encoded["input_ids"]
        if (ended and len(text) <= wanted) or len(ids) >= tokens + MARGIN:
            break
        wanted = max(int(1.05 * wanted * (tokens + MARGIN) / max(len(ids), 1)), wanted + 1024)
    offsets = encoded.get("offset_mapping")
    if len(ids) < tokens:
        raise ValueError(f"the text has {len(ids):,} tokens, fewer than the {tokens:,} asked for; ask for fewer, or take a longer text")
    language, languages = _languages(taken, offsets[:tokens] if offsets is not None else None, tokens)
    return TokenStream(torch.tensor(ids[:tokens]), language, languages)


def _languages(taken: list[Document], offsets: list[tuple[int, int]] | None, tokens: int) -> tuple[Tensor, tuple[str, ...]]:
    languages = tuple(dict.fromkeys(document.language for document in taken))
    if len(languages) == 1:
        return torch.zeros(tokens, dtype=torch.int64), languages
    if offsets is None:
        raise ValueError(f"the text has {len(languages)} languages, and telling them apart needs a tokenizer with offsets (a fast one)")
    starts, position = [], 0
    for document in taken:
        starts.append(position)
        position += len(document.text) + len(SEPARATOR)
    index = [languages.index(document.language) for document in taken]
    return torch.tensor([index[bisect_right(starts, start) - 1] for start, _ in offsets]), languages


def calibration_windows(tokenizer: Any, documents: Iterable[Document], windows: int, length: int) -> Int64[Tensor, "windows length"]:
    """The first ``windows`` × ``length`` tokens of the text, cut into windows: the same ones each time.

    Raises:
        ValueError: the text has fewer tokens.
    """
    return token_stream(tokenizer, documents, windows * length).ids.reshape(windows, length)


def prompts(tokenizer: Any, documents: Iterable[Document], count: int, length: int) -> Int64[Tensor, "count length"]:
    """The first ``length`` tokens of each document that has so many; when the documents run out, their next ``length`` tokens, and so on.

    So few prompts begin where documents begin and come from as many documents as possible.

    Raises:
        ValueError: the text has fewer such pieces (says how many).
    """
    found: list[list[int]] = []
    taken: list[str] = []
    for document in documents:
        ids = _first(tokenizer, document.text, length)
        if len(ids) == length:
            found.append(ids)
            taken.append(document.text)
        if len(found) == count:
            return torch.tensor(found)
    whole = [_first(tokenizer, text, length * count) for text in taken]
    for start in range(length, max(map(len, whole), default=0), length):
        for ids in whole:
            if start + length <= len(ids) and len(found) < count:
                found.append(ids[start : start + length])
    if len(found) < count:
        raise ValueError(
            f"the text has {len(found)} pieces of {length} tokens, fewer than the {count} asked for; ask for fewer or shorter ones"
        )
    return torch.tensor(found)


def _first(tokenizer: Any, text: str, tokens: int) -> list[int]:
    """The first ``tokens`` tokens; of a text with more than 16 characters a token, at the price of tokenizing it whole."""
    ids = _encode(tokenizer, text[: 16 * tokens])["input_ids"]
    return (ids if len(ids) >= tokens + MARGIN else _encode(tokenizer, text)["input_ids"])[:tokens]


def _encode(tokenizer: Any, text: str, **options: Any) -> Any:
    return tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False, **options)


def vocabulary_digest(tokenizer: Any) -> str:
    """sha256 (hex) of the token list: each token with its id. Equal for tokenizers that give ids the same meaning, whatever the head's padding."""
    listed = sorted(tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0]))
    return hashlib.sha256(json.dumps(listed, ensure_ascii=False, separators=(",", ":")).encode()).hexdigest()
