"""Instructions on the form of an answer that a program can verify: how each is put into words, and whether an answer follows it.

Not here: which prompts carry which of them (``ops/tasks/generated_documents.py``), the instructions of IFBench (``ifbench.py``).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

WORD = re.compile(r"[^\W_]+(?:['’-][^\W_]+)*")
BULLET = re.compile(r"^[ \t]*[*•-][ \t]+\S", re.MULTILINE)
SENTENCE = re.compile(r"[.!?…]+[\"'”’)]*(?=\s|$)")


class Rule(NamedTuple):
    """How an instruction is said, with the fields of its parameters; and whether a text follows it, given these."""

    said: str
    follows: Callable[..., bool]


def words(text: str) -> list[str]:
    """The words of ``text``, in lower case: letters and digits, with apostrophes and hyphens inside."""
    return [word.casefold() for word in WORD.findall(text)]


def sentences(text: str) -> int:
    """How many sentences ``text`` has: marks that end one before a blank or the end, and what is left over if it has a word."""
    ends = list(SENTENCE.finditer(text))
    rest = text[ends[-1].end() :] if ends else text
    return len(ends) + bool(words(rest))


def _case(text: str, same: Callable[[str], str]) -> bool:
    return any(letter.isalpha() for letter in text) and text == same(text)


def _json(text: str) -> bool:
    """Whether ``text`` is a JSON object, alone or inside a fence of three backticks."""
    fenced = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", text.strip(), re.DOTALL)
    try:
        return isinstance(json.loads(fenced[1] if fenced else text), dict)
    except json.JSONDecodeError:
        return False


def _ends(text: str, phrase: str) -> bool:
    return text.strip().strip("\"'”*").casefold().endswith(phrase.casefold())


RULES: dict[str, Rule] = {
    "words_at_most": Rule("Use at most {count} words.", lambda text, count: 0 < len(words(text)) <= count),
    "words_at_least": Rule("Use at least {count} words.", lambda text, count: len(words(text)) >= count),
    "lower_case": Rule("Write everything in lower case letters, without any capital letter.", lambda text: _case(text, str.lower)),
    "capitals": Rule("Write everything in capital letters.", lambda text: _case(text, str.upper)),
    "keyword": Rule('Use the word "{word}" at least {count} times.', lambda text, word, count: words(text).count(word.casefold()) >= count),
    "ends_with": Rule('End with exactly this phrase: "{phrase}"', _ends),
    "starts_with": Rule('Begin your answer with the word "{word}".', lambda text, word: words(text)[:1] == [word.casefold()]),
    "bullets": Rule(
        "Give exactly {count} bullet points, each on a line that begins with *.", lambda text, count: len(BULLET.findall(text)) == count
    ),
    "sentences": Rule("Answer in exactly {count} sentences.", lambda text, count: sentences(text) == count),
    "json": Rule("Answer with one JSON object and nothing else.", _json),
}


def said(kind: str, parameters: Mapping[str, Any]) -> str:
    """The instruction in words; "1 times" is not said."""
    rule = RULES[kind].said.format(**parameters)
    return rule if parameters.get("count") != 1 else rule.replace("at least 1 times", "at least once").replace("1 sentences", "1 sentence")


def follows(text: str, kind: str, parameters: Mapping[str, Any]) -> bool:
    """Whether ``text``, as it is, follows the instruction; an empty text follows none.

    Raises:
        ValueError: there is no such instruction.
    """
    if kind not in RULES:
        raise ValueError(f"{kind!r} is no instruction that can be verified; there are {', '.join(RULES)}")
    return bool(text.strip()) and RULES[kind].follows(text.strip(), **parameters)


def loosened(text: str) -> Iterator[str]:
    """``text`` itself, without its first line, its last, both (an opening or closing phrase is forgiven), each also without asterisks; empty ones left out.

    Source:
        Zhou et al. 2023 (IFEval), section 2.3, arXiv:2311.07911.
    """
    lines = text.split("\n")
    for part in (lines, lines[1:], lines[:-1], lines[1:-1]):
        whole = "\n".join(part).strip()
        for each in dict.fromkeys([whole, whole.replace("*", "")]):
            if each:
                yield each
