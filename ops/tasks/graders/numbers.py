"""The number that an answer comes to. Not here: what a number looks like (``ops/data/arithmetic.py``), the problems (``ops/tasks/generated_documents.py``)."""

import re
from decimal import Decimal

from assay.ops.data.arithmetic import NUMBER, UNFINISHED, as_number

MARKS = re.compile(r"####|\banswer\s+is\b|\banswer\s*:", re.IGNORECASE)  # what stands before the number that is meant
LEADING = re.compile(r"[\s:=*$€£#(]*")


def final_number(text: str, *, cut: bool = False) -> Decimal | None:
    """The number that ``text`` gives as its answer: right after its last "####", "answer is" or "answer:", otherwise its last one; None if there is none.

    Nothing but blanks, a currency sign or marks of emphasis may stand between such words and their number; where something else does ("the answer is
    between 3 and 5"), or no number follows, the last number of the text counts.

    Args:
        cut: the text ended because no more tokens were allowed: a number at its very end may have gone on, and is none.
    """
    for mark in reversed(list(MARKS.finditer(text))):
        start = LEADING.match(text, mark.end())
        found = NUMBER.match(text, start.end() if start else mark.end())
        if found is not None:
            return None if _unfinished(text, found.end(), cut) else as_number(found[0])
    numbers = list(NUMBER.finditer(text))
    if not numbers or _unfinished(text, numbers[-1].end(), cut):
        return None
    return as_number(numbers[-1][0])


def _unfinished(text: str, end: int, cut: bool) -> bool:
    return cut and UNFINISHED.fullmatch(text, end) is not None
