"""The suite ``choice``: which of the listed options a model finds likeliest, on packaged questions with known answers.

Not here: the questions (``assets/tasks``), likelihoods (``ops/tasks/harness.py``), the scores themselves, which are the harness's.
"""

from math import exp
from pathlib import Path
from typing import Any, NamedTuple, get_args

from assay.ops.suites.subject import PER_TASK, Result, Subject, mean_metric, mean_over_tasks
from assay.ops.suites.tasks import evaluate, open_lm, quiet
from assay.schemas.tasks import Choice, ChoiceTask

PLACES = sorted(get_args(ChoiceTask))  # of a task, by which its items are numbered
METRICS = ("accuracy", "accuracy_normalised", "option_mass")


class Answer(NamedTuple):
    """One question: its line, whether the likeliest option is right, alone and a byte, Σ p of the options, and by how much the right one leads, in nats."""

    line: int
    accuracy: float
    accuracy_normalised: float
    option_mass: float
    margin_nats: float


def choice(protocol: Choice, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """Ask the same questions of every variant, through the harness's own evaluation.

    ``accuracy`` takes the likeliest option; ``accuracy_normalised`` the likeliest a byte of its text in UTF-8, the harness's ``acc_bytes``;
    ``option_mass`` is Σ p(option | prompt) over the listed options, averaged over questions: how much of all that could be said is one of them. It is a
    sum of probabilities of whole continuations that may go on, so an option that begins as another does counts twice and more than 1 is possible.
    Standard errors of a task are over its questions, s / √n; of all tasks, whose mean counts each the same, √Σ se² / tasks.
    """
    from assay.ops.tasks.packaged import packaged_tasks

    with quiet():
        tasks = packaged_tasks(protocol.tasks, questions=protocol.questions, seed=protocol.order, shots=protocol.shots)
    lm = open_lm(subject, dtype=protocol.dtype, batch=protocol.batch)
    samples = evaluate(lm, tasks, chat=protocol.chat)["samples"]
    found = {name: [answer(sample) for sample in samples[name]] for name in protocol.tasks}
    items = [
        {"item": PLACES.index(name) * PER_TASK + each.line, "metric": f"{kind}/{name}", "value": getattr(each, kind)}
        for name, answers in found.items()
        for kind in ("accuracy", "accuracy_normalised", "margin_nats")
        for each in answers
    ]
    notes = {
        "first_ids": lm.first_ids, "truncated": lm.truncated,
        "examples": [example(name, sample) for name in protocol.tasks for sample in samples[name][:4]],
    }  # fmt: skip
    return Result([row for name in METRICS for row in facts(name, found, lm.runner.path)], items, {}, notes)


def answer(sample: dict[str, Any]) -> Answer:
    """What one logged sample of the harness says."""
    values = [value for value, _ in sample["filtered_resps"]]
    right = sample["target"]
    wrong = max(value for place, value in enumerate(values) if place != right)
    return Answer(sample["doc"]["line"], sample["acc"], sample["acc_bytes"], sum(map(exp, values)), values[right] - wrong)


def facts(name: str, found: dict[str, list[Answer]], path: str) -> list[dict[str, Any]]:
    """The rows of one metric: all tasks, then each."""
    rows = [
        mean_metric(name, [getattr(one, name) for one in answers], slice_kind="task", slice=task, path=path)
        for task, answers in found.items()
    ]
    return [mean_over_tasks(rows), *rows]


def example(task: str, sample: dict[str, Any]) -> dict[str, Any]:
    """A question as it was put, for a reader."""
    values = [value for value, _ in sample["filtered_resps"]]
    options = [continuation for _, continuation in sample["arguments"]]
    chosen = options[values.index(max(values))]
    return {"task": task, "prompt": sample["arguments"][0][0], "options": options, "right": options[sample["target"]], "chosen": chosen}
