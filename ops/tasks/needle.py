"""Long prompts in which something stands that is asked for at their end: how they are put together, as ids. Not here: asking (``ops/suites/needle.py``).

A prompt is pieces of ids, one after another: a beginning, sentences of a haystack with the needles between them, the question. Each piece is encoded by
itself and without special tokens, so that a needle's ids do not depend on where it stands, and it can be looked up in the whole.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

Ids = list[int]
BORDER = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
FIRST = ("amber", "silver", "crimson", "quiet", "golden", "narrow", "hidden", "copper", "violet", "frozen", "marble", "hollow")
SECOND = ("harbour", "bridge", "lantern", "orchard", "tower", "meadow", "compass", "violin", "glacier", "chapel", "falcon", "windmill")
INTRODUCTION = "Some codes are hidden in the following text. Remember them: one of them will be asked for at the end.\n\n"


class Frame(NamedTuple):
    """What stands before and after all that is asked: special tokens, or a chat template's turns; ``leads`` where the answer's first words are given."""

    before: Ids
    after: Ids
    leads: bool


class Prompt(NamedTuple):
    """``answer`` is asked for, and ``needle``, which says it, stands at ``offset`` of ``ids``, behind ``share`` of the haystack's tokens."""

    ids: Ids
    answer: int
    needle: Ids
    offset: int
    share: float


class Asked(NamedTuple):
    """Needles as sentences, the one with the answer first; the question, the beginning of its answer, and the answer."""

    needles: list[str]
    question: str
    lead: str
    answer: int


def frame(tokenizer: Any, *, chat: bool) -> Frame:
    """What the tokenizer, or its chat template, puts around a text.

    Raises:
        ValueError: ``chat``, and the tokenizer has no template.
    """
    if not chat:
        begun = tokenizer("")["input_ids"][:1]
        return Frame(begun if begun == [tokenizer.bos_token_id] else [], [], True)
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; leave chat out, or take a base that has one")
    mark = "\N{OBJECT REPLACEMENT CHARACTER}"
    said = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True)
    before, _, after = said.partition(mark)
    begun = bool(tokenizer.bos_token) and before.startswith(tokenizer.bos_token)
    return Frame(tokenizer(before, add_special_tokens=not begun)["input_ids"], encode(tokenizer, after), False)


def encode(tokenizer: Any, text: str) -> Ids:
    """The ids of a piece, without special tokens."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def haystack(tokenizer: Any, texts: Iterable[str], tokens: int) -> list[Ids]:
    """Sentences of ``texts`` in their order, each with the blank before it, until they have ``tokens`` tokens.

    Raises:
        ValueError: there are fewer.
    """
    found, total = [], 0
    for text in texts:
        for sentence in BORDER.split(" ".join(text.split())):
            if sentence:
                found.append(encode(tokenizer, f" {sentence}"))
                total += len(found[-1])
            if total >= tokens:
                return found
    raise ValueError(f"the haystack has {total:,} tokens, fewer than the {tokens:,} that its longest prompts want; take a longer text")


def ask(kind: str, *, keys: int, random: Random) -> Asked:
    """Needles with codes drawn by ``random``, and a question about one of them.

    ``single``: one code. ``multiple``: ``keys`` of them. ``hops``: two chains of ``keys`` // 2 links; the first link of each is a code, every later one says
    that it has the code of the one before, and the last of one chain is asked for.

    Raises:
        ValueError: the kind is unknown, or there are not so many keys.
    """
    names = [f"{first} {second}" for first in FIRST for second in SECOND]
    count = {"single": 1, "multiple": keys, "hops": 2 * (keys // 2)}.get(kind)
    if count is None or not 1 <= count <= len(names):
        raise ValueError(f"kind={kind!r} with keys={keys}; expected single, multiple or hops, and up to {len(names)} keys")
    chosen = random.sample(names, count)
    codes = random.sample(range(10_000, 100_000), count)
    if kind != "hops":
        needles = [f" The code of the {name} is {code}." for name, code in zip(chosen, codes, strict=True)]
        last = chosen[0]
    else:
        needles = []
        for chain, code in ((chosen[: count // 2], codes[0]), (chosen[count // 2 :], codes[1])):
            needles.append(f" The code of the {chain[0]} is {code}.")
            needles += [f" The code of the {name} is the code of the {before}." for before, name in pairwise(chain)]
        last = chosen[count // 2 - 1]
    return Asked(needles, f"\n\nWhat is the code of the {last}?", f" The code of the {last} is", codes[0])


def build(
    asked: Asked, sentences: Sequence[Ids], around: Frame, *, length: int, depth_pct: int, random: Random, encoded: Callable[[str], Ids]
) -> Prompt:
    """A prompt of at most ``length`` tokens: sentences from one that ``random`` draws on, as many as fit, and the needle with the answer at its depth.

    It stands at the border between sentences that is nearest to ``depth_pct`` % of the haystack's tokens, first of the needles there: 0 is before the
    first sentence, 100 after the last. Other needles stand at borders that ``random`` draws.

    Args:
        encoded: gives the ids of a piece, without special tokens.
    Raises:
        ValueError: ``length`` has no room for a sentence beside needles and question, or the needle does not stand exactly once where it was put.
    """
    needles = [encoded(needle) for needle in asked.needles]
    begin = around.before + encoded(INTRODUCTION)
    end = encoded(asked.question) + (encoded(asked.lead) if around.leads else encoded(" Answer with the code alone.")) + around.after
    room = length - len(begin) - len(end) - sum(map(len, needles))
    hay = _sentences(sentences, room, random)
    if not hay:
        raise ValueError(
            f"a prompt of {length} tokens has no room for a sentence of the haystack beside its {len(needles)} needles and its question, "
            f"which take {length - room}; ask for {length - room + 64} tokens or more"
        )
    ends = [0]
    for sentence in hay:
        ends.append(ends[-1] + len(sentence))
    border = min(range(len(ends)), key=lambda index: abs(100 * ends[index] - depth_pct * ends[-1]))
    at = [border, *(random.randrange(len(ends)) for _ in needles[1:])]
    ids, offset = list(begin), 0
    for index in range(len(ends)):
        for number, needle in enumerate(needles):
            if at[number] == index:
                offset = offset if number else len(ids)
                ids += needle
        ids += hay[index] if index < len(hay) else []
    ids += end
    if places(ids, needles[0]) != [offset] or len(ids) > length:
        raise ValueError(
            f"the needle stands at {places(ids, needles[0])} of {len(ids)} tokens; expected it once, at {offset}, and {length} tokens at most"
        )
    return Prompt(ids, asked.answer, needles[0], offset, ends[border] / ends[-1])


def places(ids: Sequence[int], part: Sequence[int]) -> list[int]:
    """Where ``part`` begins in ``ids``, each time that it occurs."""
    width = len(part)
    return [at for at in range(len(ids) - width + 1) if ids[at] == part[0] and list(ids[at : at + width]) == list(part)]


def _sentences(sentences: Sequence[Ids], room: int, random: Random) -> list[Ids]:
    """Sentences from one that is drawn on, from the first again after the last, without those for which no room is left; ``room`` tokens at most."""
    first = random.randrange(len(sentences))
    found = []
    for sentence in [*sentences[first:], *sentences[:first]]:
        if len(sentence) <= room:
            found.append(sentence)
            room -= len(sentence)
    return found
