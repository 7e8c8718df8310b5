"""What an answer to a question of a generated task is worth: one judgement for all tasks, and the scores that lm-evaluation-harness takes from it.

Not here: the graders themselves (``graders``), the questions (``generated_documents.py``), drawing answers (``generated_answers.py``).
"""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from assay.ops.tasks.graders import code, ifbench
from assay.ops.tasks.graders.instructions import follows, loosened
from assay.ops.tasks.graders.numbers import final_number

Row = Mapping[str, Any]


class Judged(NamedTuple):
    """``score`` is 0 or 1. ``strict`` is None where a task has no stricter reading; ``vote`` is what samples can agree on, None where this one has nothing.

    ``silent`` says that no answer could be read: no number, no word, no Python.
    """

    score: float
    silent: bool
    strict: float | None = None
    vote: Hashable | None = None


def number(row: Row, text: str, *, cut: bool = False) -> Judged:
    """Whether the number that ``text`` comes to equals ``row["gold"]``, exactly."""
    found = final_number(text, cut=cut)
    return Judged(float(found == Decimal(row["gold"])), found is None, vote=found)


def number_of_line(row: Row, text: str, *, cut: bool = False) -> Judged:
    """:func:`number` of the first line."""
    line, broken, _ = text.partition("\n")
    return number(row, line, cut=cut and not broken)


def form(row: Row, text: str, *, cut: bool = False) -> Judged:
    """Whether all instructions on the form are followed: strictly by the text as it is, else by one of its loosened forms, the same for all of them.

    A text that was cut off is judged as it is: it had its tokens.
    """
    rules = json.loads(row["rules"])

    def all_followed(each: str) -> bool:
        return all(follows(each, rule["kind"], rule["parameters"]) for rule in rules)

    strict = all_followed(text)
    return Judged(float(strict or any(map(all_followed, loosened(text)))), not text.strip(), float(strict))


def form_of_ifbench(row: Row, text: str, *, cut: bool = False) -> Judged:
    """As :func:`form`, by IFBench's verifiers; loosely, each instruction may be followed by another loosened form, as IFBench has it."""
    names, parameters = json.loads(row["rules"])
    strict = all(ifbench.followed(text, names, parameters, row["question"]))
    loose = strict or all(ifbench.loosely(text, names, parameters, row["question"]))
    return Judged(float(loose), not text.strip(), float(strict))


def program(row: Row, text: str, *, cut: bool = False) -> Judged:
    """Whether the function passes its tests; runs what the model has written (``ops/tasks/sandbox.py``)."""
    if not code.parses(code.solution(row, text)):
        return Judged(0.0, True)
    return Judged(float(code.passes(row, text).outcome == "passed"), False)


class Task(NamedTuple):
    """How a task's answers are judged; ``voted`` where samples can vote; ``graded`` where rows have a grade to be told apart by."""

    judge: Callable[..., Judged]
    voted: bool = False
    graded: bool = False
    runs_code: bool = False


TASKS: dict[str, Task] = {
    "asdiv": Task(number, voted=True),
    "graded_arithmetic": Task(number_of_line, voted=True, graded=True),
    "humaneval": Task(program, runs_code=True),
    "ifbench": Task(form_of_ifbench),
    "instructions": Task(form, graded=True),
}


# What the harness takes; it does not tell whether an answer was cut off.
def number_results(doc: Row, results: Sequence[str]) -> dict[str, float]:
    """Scores of one answer to a word problem."""
    return _scores(number(doc, results[0]))


def number_of_line_results(doc: Row, results: Sequence[str]) -> dict[str, float]:
    """Scores of one answer to a line of arithmetic."""
    return _scores(number_of_line(doc, results[0]))


def form_results(doc: Row, results: Sequence[str]) -> dict[str, float]:
    """Scores of one answer to instructions on its form."""
    return _scores(form(doc, results[0]))


def form_of_ifbench_results(doc: Row, results: Sequence[str]) -> dict[str, float]:
    """Scores of one answer to a prompt of IFBench."""
    return _scores(form_of_ifbench(doc, results[0]))


def program_results(doc: Row, results: Sequence[str]) -> dict[str, float]:
    """Scores of one completion of a function."""
    return _scores(program(doc, results[0]))


def _scores(judged: Judged) -> dict[str, float]:
    strict = {} if judged.strict is None else {"strict": judged.strict}
    return {"score": judged.score, "unparsed": float(judged.silent), **strict}
