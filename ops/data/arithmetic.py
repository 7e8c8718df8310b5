"""Generated arithmetic with exact answers: problems by seed, the prompt that asks them, how an answer is read. Not here: asking (``ops/suites/arithmetic.py``).

A problem is asked as a line of a list of solved ones, ``12 + 7 =``; its answer is what stands before the next line.
"""

import operator
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from random import Random
from typing import Any, NamedTuple

OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "add": ("+", operator.add), "subtract": ("-", operator.sub), "multiply": ("*", operator.mul),
}  # fmt: skip
# A comma belongs to a number between groups of three digits alone, also as TeX writes it; any other ends it.
NUMBER = re.compile(r"[-−+]?(?:[0-9]{1,3}(?:(?:,|\{,\})[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?")
UNFINISHED = re.compile(r"[0-9.,{}]*")


class Problem(NamedTuple):
    """``left`` and ``right`` are at least 0; a difference may be below it."""

    left: int
    operation: str
    right: int

    @property
    def question(self) -> str:
        return f"{self.left} {OPERATIONS[self.operation][0]} {self.right} ="

    @property
    def answer(self) -> int:
        return OPERATIONS[self.operation][1](self.left, self.right)


def operands(digits: int) -> range:
    """The numbers of ``digits`` digits; 0 is none of them."""
    return range(10 ** (digits - 1), 10**digits)


def problems(count: int, *, digits: Sequence[int], operations: Sequence[str], seed: int) -> list[Problem]:
    """Distinct problems, in turn of each grade: an operation on two numbers of so many digits. More of them begin with the same ones.

    Args:
        digits: of both numbers, one grade each.
        operations: of :data:`OPERATIONS`.
    Raises:
        ValueError: there is no grade, an unknown operation, numbers without digits, or fewer distinct problems of a grade than its share of ``count``.
    """
    grades = [(operation, size) for size in digits for operation in operations]
    unknown = [name for name in operations if name not in OPERATIONS]
    if unknown or not grades or min(digits) < 1:
        raise ValueError(
            f"digits={list(digits)}, operations={list(operations)}; expected digits from 1 on and some of {', '.join(OPERATIONS)}"
        )
    share = -(-count // len(grades))
    drawn = []
    for operation, size in grades:
        numbers = operands(size)
        if share > len(numbers) ** 2:
            raise ValueError(
                f"{count} problems over {len(grades)} grades are {share} each, and of {size}-digit numbers there are {len(numbers) ** 2}; "
                f"ask for {len(numbers) ** 2 * len(grades)} at most, or for more digits"
            )
        random = Random(f"{seed}/{operation}/{size}")
        pairs: dict[tuple[int, int], None] = {}
        while len(pairs) < share:
            pairs[random.choice(numbers), random.choice(numbers)] = None
        drawn.append([Problem(left, operation, right) for left, right in pairs])
    return [drawn[index % len(grades)][index // len(grades)] for index in range(count)]


def prompt(problem: Problem, shots: Sequence[Problem]) -> str:
    """Solved lines and the one to solve, which ends with its "=": the blank after it belongs to the answer, whose first token it may be part of."""
    return "".join(f"{shot.question} {shot.answer}\n" for shot in shots) + problem.question


def stop_ids(tokenizer: Any) -> frozenset[int]:
    """The ids that end an answer: those whose text has a line break, and special ones."""
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    return frozenset(token for token, text in enumerate(texts) if "\n" in text) | frozenset(tokenizer.all_special_ids)


def first_number(text: str, *, cut: bool = False) -> Decimal | None:
    """The first number of the first line of ``text``, exactly; None if there is none.

    A number starts and ends with a digit; separators of thousands are removed and a sign right before it is kept, so that 1,234.50 and 1234.5 are equal.

    Args:
        cut: the text was cut off: a number that it may have gone on with is none.
    """
    line, broken, _ = text.partition("\n")
    found = NUMBER.search(line)
    if found is None or (cut and not broken and UNFINISHED.fullmatch(line, found.end())):
        return None
    return as_number(found[0])


def as_number(found: str) -> Decimal:
    """What :data:`NUMBER` found: separators removed, the sign kept."""
    return Decimal(re.sub("[,{}]", "", found).replace("−", "-"))
