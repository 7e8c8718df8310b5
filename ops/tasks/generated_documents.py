"""The questions of the tasks whose answers are generated, as lm-evaluation-harness takes a data set; the task files of ``assets/tasks`` name these readers.

Each row has its ``line``: of the file, or of the list that is generated, which is always the same. Not here: prompts (the task files), which questions are
asked (``packaged.py``), whether an answer is right (``graders``).
"""

import gzip
import json
import re
from collections.abc import Iterable
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

from assay.ops.data.packages import entries
from assay.ops.tasks.graders.instructions import said

Row = dict[str, Any]
AMOUNT = re.compile(r"(-?[0-9]+(?:\.[0-9]+)?)(?:\s[^0-9]*)?")  # a number and what it counts; not 3:4, 6th, half past 2

# So many terms of so many digits, added, added and subtracted, or multiplied: small models have some of the first ones right and none of the last.
GRADES = (
    ("add_2x1", 2, 1), ("subtract_2x1", 2, 1), ("multiply_2x1", 2, 1), ("add_2x2", 2, 2), ("add_3x1", 3, 1), ("subtract_2x2", 2, 2), ("mixed_3x1", 3, 1),
    ("add_2x3", 2, 3), ("mixed_3x2", 3, 2), ("multiply_2x2", 2, 2),
)  # fmt: skip
PER_GRADE = 80
SHOTS_PER_GRADE = 4

TOPICS = (
    "a rainy day", "the sea", "your favourite season", "an old bridge", "why people keep cats", "how bread is made", "a walk in the forest", "the moon",
    "learning to swim", "a train journey", "the use of maps", "a market in the morning", "what makes a good friend", "how bees live", "a broken clock",
    "the colour green", "growing tomatoes", "a letter from far away", "winter in the mountains", "how to boil an egg", "a library at night", "wind and sails",
    "the first day at school", "an honest shopkeeper", "rivers", "why we sleep", "a garden behind a house", "the sound of bells", "a lost key", "birds in spring",
)  # fmt: skip
KEYWORDS = ("water", "light", "morning", "stone", "river", "paper", "music", "garden", "winter", "silver")
PHRASES = ("That is all I know.", "Thank you for reading.", "Nothing more was said.", "And so the day ended.", "I hope this helps.")
# The parameters of each instruction, easy ones and hard ones.
PARAMETERS: dict[str, tuple[Row, ...]] = {
    "words_at_most": tuple({"count": count} for count in (5, 10, 20, 40)),
    "words_at_least": tuple({"count": count} for count in (20, 40, 60, 80)),
    "lower_case": ({},),
    "capitals": ({},),
    "keyword": tuple({"word": word, "count": count} for word in KEYWORDS for count in (1, 2, 3)),
    "ends_with": tuple({"phrase": phrase} for phrase in PHRASES),
    "starts_with": tuple({"word": word.capitalize()} for word in KEYWORDS),
    "bullets": tuple({"count": count} for count in (2, 3, 4, 5)),
    "sentences": tuple({"count": count} for count in (1, 2, 3, 4)),
    "json": ({},),
}
PER_KIND, TWO_AT_ONCE = 30, 60
# Instructions that no answer, or hardly one, follows together.
AT_ODDS = {
    frozenset(pair)
    for pair in (
        ("lower_case", "capitals"), ("words_at_most", "words_at_least"), ("words_at_most", "bullets"), ("words_at_most", "sentences"),
        ("words_at_most", "ends_with"), ("words_at_least", "sentences"), ("bullets", "sentences"), ("lower_case", "ends_with"), ("capitals", "ends_with"),
        ("lower_case", "starts_with"), ("capitals", "starts_with"), ("bullets", "starts_with"), ("sentences", "ends_with"), ("words_at_most", "keyword"),
        *(("json", other) for other in PARAMETERS if other != "json"),
    )
}  # fmt: skip


def word_problems(*, package: str, file: str, **_: Any) -> Any:
    """ASDiv's problems whose answer is one number of something; times, ratios, ordinals, names and yes or no are left out."""
    rows = []
    with _packaged(package, file, "asdiv").open(encoding="utf-8") as stream:
        for line, text in enumerate(stream, start=1):
            row = json.loads(text)
            amount = AMOUNT.fullmatch(row["answer"].strip())
            if amount:
                question = f"{row['passage'].strip()} {row['question'].strip()}".strip()
                rows.append({"line": line, "question": question, "gold": amount[1], "grade": ""})
    return _data_set(rows)


def graded_arithmetic(**_: Any) -> Any:
    """Arithmetic by reasoning-gym, in turn of each grade of :data:`GRADES`, each expression once."""
    return _data_set(_arithmetic()[SHOTS_PER_GRADE * len(GRADES) :])


def graded_arithmetic_shots() -> list[Row]:
    """Solved problems in turn of each grade, none of which is asked."""
    return _arithmetic()[: SHOTS_PER_GRADE * len(GRADES)]


@cache
def _arithmetic() -> list[Row]:
    from reasoning_gym.factory import create_dataset

    columns = []
    for number, (grade, terms, digits) in enumerate(GRADES):
        wanted, found, seed = PER_GRADE + SHOTS_PER_GRADE, dict[str, str](), 1_000_000 * number  # a problem is drawn by its seed and place
        while len(found) < wanted:
            made = create_dataset(
                "products" if grade.startswith("multiply") else "chain_sum",
                min_terms=terms, max_terms=terms, min_digits=digits, max_digits=digits, seed=seed, size=4 * wanted,
            )  # fmt: skip
            told = {each["metadata"]["expression"]: each["answer"] for each in made}  # type: ignore[union-attr]
            found |= {
                question: answer
                for question, answer in told.items()
                if grade.startswith("multiply") or ("-" in question) != grade.startswith("add")
            }
            seed += 1000
        columns.append([{"question": question, "gold": gold, "grade": grade} for question, gold in list(found.items())[:wanted]])
    turns = [row for turn in zip(*columns, strict=True) for row in turn]
    return [{"line": line, **row} for line, row in enumerate(turns, start=1 - SHOTS_PER_GRADE * len(GRADES))]


def instructions(**_: Any) -> Any:
    """Short pieces to write about a topic with one instruction on their form, or two of different kinds that go together."""
    random = Random("instructions")
    asked: dict[str, Row] = {}

    def ask(*kinds: str) -> bool:
        rules = [{"kind": kind, "parameters": random.choice(PARAMETERS[kind])} for kind in kinds]
        prompt = " ".join([f"Write about {random.choice(TOPICS)}.", *(said(rule["kind"], rule["parameters"]) for rule in rules)])
        new = prompt not in asked
        asked.setdefault(prompt, {"question": prompt, "rules": json.dumps(rules), "grade": kinds[0] if len(kinds) == 1 else "two"})
        return new

    pairs = [pair for pair in combinations(PARAMETERS, 2) if frozenset(pair) not in AT_ODDS]
    for kind in PARAMETERS:
        while sum(row["grade"] == kind for row in asked.values()) < PER_KIND:
            ask(kind)
    while sum(row["grade"] == "two" for row in asked.values()) < TWO_AT_ONCE:
        ask(*random.choice(pairs))
    return _data_set({"line": line, **row} for line, row in enumerate(asked.values(), start=1))


def ifbench(*, package: str, files: list[str], **_: Any) -> Any:
    """IFBench's prompts all of whose instructions can be verified on this machine; see :func:`unverifiable_share` for the others."""
    return _data_set(row for row, works in _ifbench(package, files[0]) if works)


def unverifiable_share(*, package: str, files: list[str], **_: Any) -> float:
    """The share of IFBench's prompts that are not asked, since a verifier lacks its data here."""
    rows = _ifbench(package, files[0])
    return sum(not works for _, works in rows) / len(rows)


@cache
def _ifbench(package: str, file: str) -> list[tuple[Row, bool]]:
    from assay.ops.tasks.graders.ifbench import works

    found = []
    for line, text in enumerate(_packaged(package, file, "ifbench").read_text(encoding="utf-8").splitlines(), start=1):
        row = json.loads(text)
        names, parameters = row["instruction_id_list"], row["kwargs"]
        question = {"line": line, "question": row["prompt"], "rules": json.dumps([names, parameters]), "grade": ""}
        found.append((question, works(names, parameters, row["prompt"])))
    return found


def humaneval(*, package: str, file: str, **_: Any) -> Any:
    """HumanEval's problems: the beginning of a function, its name and its tests."""
    with gzip.open(_packaged(package, file, "humaneval"), "rt", encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    return _data_set(
        {"line": line, "grade": "", **{key: row[key] for key in ("prompt", "entry_point", "test", "canonical_solution")}}
        for line, row in enumerate(rows, start=1)
    )


def _packaged(package: str, file: str, task: str) -> Path:
    distribution, _, version = package.partition("==")
    (entry,) = entries(distribution, version, [file], what=f"the task {task}")
    return Path(str(entry.locate()))


def _data_set(rows: Iterable[Row]) -> Any:
    from datasets import Dataset

    return {"test": Dataset.from_list(list(rows))}
