"""Questions with answers out of packaged files, as lm-evaluation-harness takes a data set. A task file of ``assets/tasks`` names one reader.

Each gives rows with the ``line`` of the file, from 1; a line whose answer cannot be told is left out. Not here: which questions are asked
(``packaged.py``), prompts (the task files).
"""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from assay.ops.data.packages import entries

Row = dict[str, Any]


def lettered(**where: Any) -> Any:
    """Lines with ``question``, ``options`` ("A. …", "B. …", a line each) and the whole right option as ``answer``."""
    return _data_set(filter(None, (_lettered(line, row) for line, row in _lines(**where))))


def yes_no(**where: Any) -> Any:
    """Lines with ``title``, ``passage``, ``question`` and ``answer``: True or False. The passage follows its title, as SuperGLUE has it."""
    return _data_set(
        {"line": line, "passage": f"{row['title']} -- {row['passage']}", "question": row["question"], "gold": ["False", "True"].index(row["answer"])}
        for line, row in _lines(**where)
    )  # fmt: skip


def continued(**where: Any) -> Any:
    """Lines with ``question``, the beginning of a story, and four endings, called ``answer``, of which the file does not say which is right.

    It shows it where the next line goes on with the same story: that question begins with the unfinished sentence of this one and one of the endings, which
    is the one that happened. Lines without such a successor are left out.
    """
    rows = list(_lines(**where))
    return _data_set(filter(None, (_continued(line, row, after) for (line, row), (_, after) in pairwise(rows))))


def as_they_are(**where: Any) -> Any:
    """Lines of JSON with the fields that they have."""
    return _data_set({"line": line, **row} for line, row in _lines(**where))


def _lettered(line: int, row: Row) -> Row | None:
    question, listed = row["question"].strip(), row["options"]
    if listed.endswith("?") and not question.endswith("?"):
        listed = listed[:-1]  # the question's mark, put behind the options by whoever made the file
    parts = re.split(r"(?:^|\n)([A-Z])\. ", listed)
    letters, options = parts[1::2], parts[2::2]
    whole = [f"{letter}. {option}" for letter, option in zip(letters, options, strict=True)]
    if letters != [chr(ord("A") + place) for place in range(len(letters))] or whole.count(row["answer"]) != 1:
        return None
    return {"line": line, "question": question, "options": options, "gold": whole.index(row["answer"])}


def _continued(line: int, row: Row, after: Row) -> Row | None:
    before, stop, last = row["question"].rpartition(". ")
    told = _words(after["question"])
    happened = [place for place, ending in enumerate(row["answer"]) if f"{told} ".startswith(f"{_words(f'{last} {ending}')} ")]
    happened = happened or [
        place for place, ending in enumerate(row["answer"]) if f" {_words(row['question'] + ' ' + ending)} " in f" {told} "
    ]
    if len(happened) != 1:
        return None
    return {"line": line, "question": f"{before}{stop}{last[:1].upper()}{last[1:]}", "options": row["answer"], "gold": happened[0]}


def _words(text: str) -> str:
    return re.sub(r"\W+", " ", text.casefold()).strip()


def _lines(*, package: str, file: str, **_: Any) -> Iterator[tuple[int, Row]]:
    """The objects of a packaged file of JSON lines, with their line numbers; what else a task file says of itself is not for a reader."""
    distribution, version = package.split("==")
    (entry,) = entries(distribution, version, [file], what=f"the task's {file}")
    with Path(str(entry.locate())).open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, json.loads(line)


def _data_set(rows: Iterable[Row]) -> Any:
    from datasets import Dataset

    return {"test": Dataset.from_list(list(rows))}
