"""The suite ``generation``: answers that a program judges, drawn by our own engine, so that several samples of a question can be taken.

Not here: questions and prompts (``assets/tasks``, ``ops/tasks``), drawing (``ops/tasks/generated_answers.py``), judging (``ops/tasks/generated.py``).
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from assay.ops.suites.subject import (
    PER_TASK,
    Result,
    Subject,
    eos_ids,
    mean_metric,
    mean_over_tasks,
    metric,
    runner_of,
    sampling_of,
    tokenizer_of,
)
from assay.schemas.tasks import Generation

if TYPE_CHECKING:
    import torch

    from assay.ops.tasks.generated import Judged
    from assay.ops.tasks.generated_answers import Answer

SHOWN = 24


class Asked(NamedTuple):
    """The questions of one task: rows of the harness, their prompts as text and as ids, the strings that end an answer, where the data is."""

    rows: list[dict[str, Any]]
    prompts: list[str]
    ids: list[list[int]]
    stops: list[str]
    source: dict[str, Any]


def generation(protocol: Generation, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """Ask each task's questions, draw their answers, and judge them; standard errors are over questions.

    ``task_score`` is the share of right samples, for the two tasks of instructions by the loose reading and ``task_score_strict`` by the strict one. A
    number that was cut off is no answer. ``task_sample_spread`` is the standard deviation, over the numbers of the samples, of the score of all questions'
    samples of that number: how far one run of sampling is from another. Over all tasks the score is their unweighted mean. With ``chat`` an answer ends
    where the model ends its turn, and by no stop string. A draft changes no distribution and is not used.

    Raises:
        PermissionError: a task runs generated code, and that is not allowed; before anything is generated.
        ValueError: a task has fewer solved questions than ``shots``, there is no chat template, or a prompt and its answer are too long for the model.
    """
    import torch

    from assay.ops.tasks.generated import TASKS
    from assay.ops.tasks.generated_answers import draw_answers, require_positions
    from assay.ops.tasks.generated_documents import unverifiable_share

    notes: dict[str, Any] = {}
    if any(TASKS[name].runs_code for name in protocol.tasks):
        notes["network"] = _sandboxed()
    tokenizer = tokenizer_of(subject.checkpoint)
    asked = {name: _asked(name, protocol, tokenizer) for name in sorted(protocol.tasks)}
    for name, each in asked.items():
        require_positions(subject.checkpoint, max(map(len, each.ids)) + protocol.max_new_tokens, f"a prompt of {name}")
    if "ifbench" in asked:
        notes["ifbench_left_out_share"] = unverifiable_share(**asked["ifbench"].source)
    runner, eos = runner_of(subject.checkpoint, protocol.dtype), eos_ids(subject.checkpoint) | frozenset(tokenizer.all_special_ids)
    metrics: list[dict[str, Any]] = []
    items: list[dict[str, Any]] = []
    examples: list[dict[str, Any]] = []
    for name, each in asked.items():
        task, rows = TASKS[name], each.rows

        def generator_of(question: int, sample: int, name: str = name, rows: Any = rows) -> "torch.Generator":
            seed = Random(f"{protocol.seed}/{name}/{rows[question]['line']}/{sample}").getrandbits(63)
            return torch.Generator(device=runner.device).manual_seed(seed)

        answers = draw_answers(
            runner, tokenizer, each.ids, sampling=sampling_of(protocol.sampling), max_new_tokens=protocol.max_new_tokens, samples=protocol.samples,
            generator_of=generator_of, stops=() if protocol.chat else each.stops, eos_ids=eos, kv_format=subject.kv_format, rows=protocol.batch,
        )  # fmt: skip
        judged = [[task.judge(row, answer.text, cut=answer.cut) for answer in of_row] for row, of_row in zip(rows, answers, strict=True)]
        grades = [row["grade"] for row in rows] if task.graded else []
        metrics += task_facts(name, answers, judged, grades, protocol.ks if protocol.samples > 1 else (), task.voted, runner.path)
        scores = [fmean(one.score for one in of_row) for of_row in judged]
        place = sorted(TASKS).index(name) * PER_TASK
        items += [{"item": place + row["line"], "metric": f"score/{name}", "value": score} for row, score in zip(rows, scores, strict=True)]
        examples += [
            {"task": name, "line": row["line"], "prompt": prompt[-400:], "said": of_row[0].text, "score": score}
            for row, prompt, of_row, score in zip(rows, each.prompts, answers, scores, strict=True)
        ][: SHOWN // len(asked)]
        notes.setdefault("first_ids", {})[name] = each.ids[0][:8]
    return Result([*over_tasks(metrics), *metrics], items, {}, {**notes, "examples": examples})


def task_facts(
    name: str,
    answers: "Sequence[Sequence[Answer]]",
    judged: "Sequence[Sequence[Judged]]",
    grades: Sequence[str],
    ks: Sequence[int],
    voted: bool,
    path: str,
) -> list[dict[str, Any]]:
    """The facts of one task, from what was said and judged of each sample [question][sample]; by grade, where questions have grades."""
    from assay.ops.decode.votes import majority_at_k
    from assay.ops.evaluate.pass_at_k import mean_pass_at_k

    def row(metric_name: str, values: Sequence[float], unit: str = "1", kind: str = "task", part: str = "") -> dict[str, Any]:
        return mean_metric(metric_name, values, unit, slice_kind=kind, slice=name + part, path=path)

    scores = [fmean(one.score for one in each) for each in judged]
    rows = [row("task_score", scores)]
    for grade in sorted(set(grades)):
        rows.append(row("task_score", [score for score, one in zip(scores, grades, strict=True) if one == grade], part=f"/{grade}"))
    if judged[0][0].strict is not None:
        rows.append(row("task_score_strict", [fmean(float(one.strict or 0) for one in each) for each in judged]))
    rows += [
        row("task_unparsed_share", [fmean(float(one.silent) for one in each) for each in judged]),
        row("task_truncated_share", [fmean(float(one.cut) for one in each) for each in answers]),
        row("answer_tokens", [fmean(float(one.tokens) for one in each) for each in answers], "token"),
    ]
    samples = len(judged[0])
    if samples > 1:
        runs = [fmean(each[number].score for each in judged) for number in range(samples)]
        rows.append(metric("task_sample_spread", stdev(runs), "1", samples, slice_kind="task", slice=name, path=path))
    right = [int(sum(one.score for one in each)) for each in judged]
    for k in ks:
        found = mean_pass_at_k([(samples, one) for one in right], k)
        where: dict[str, Any] = {"slice_kind": "task_k", "slice": f"{name}/{k}", "path": path}
        rows.append(metric("task_pass_at_k", found.value, "1", found.problems, found.standard_error, **where))
        if voted:
            votes = []
            for one, each in zip(right, judged, strict=True):
                wrong = Counter(sample.vote for sample in each if sample.vote is not None and not sample.score)
                votes.append(majority_at_k(one, list(wrong.values()), k, silent=samples - one - wrong.total()))
            rows.append(row("task_majority_at_k", votes, kind="task_k", part=f"/{k}"))
    return rows


def over_tasks(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of what every task has, the unweighted mean over tasks; tasks are independent, so their errors add up as squares."""
    names = ("task_score", "task_unparsed_share", "task_truncated_share", "answer_tokens")
    wholes = [row for row in rows if row["slice_kind"] == "task" and "/" not in row["slice"]]
    return [mean_over_tasks([row for row in wholes if row["metric"] == name]) for name in names]


def _asked(name: str, protocol: Generation, tokenizer: Any) -> Asked:
    """The prompts of a task, each after the same solved questions."""
    from assay.ops.tasks.generated_answers import prompt_ids
    from assay.ops.tasks.generated_shots import word_problems
    from assay.ops.tasks.packaged import packaged_tasks

    steps = {"fewshot_config": {"sampler": "first_n", "samples": word_problems, "doc_to_target": "{{steps}}"}}
    changes = steps if protocol.reasoning and name == "asdiv" else {}
    task = packaged_tasks([name], questions=protocol.questions, seed=protocol.order, changes=changes)[name]
    solved = task.fewshot_cfg.samples() if callable(task.fewshot_cfg.samples) else []
    if solved and len(solved) < protocol.shots:
        raise ValueError(f"shots = {protocol.shots}, and the task {name} has {len(solved)} solved questions; ask for {len(solved)} at most")
    rows: list[Any] = list(task.eval_docs)
    prompts = [str(task.fewshot_context(row, min(protocol.shots, len(solved)))) for row in rows]
    ids = [prompt_ids(tokenizer, prompt, chat=protocol.chat) for prompt in prompts]
    return Asked(rows, prompts, ids, list((task.config.generation_kwargs or {}).get("until") or []), dict(task.config.dataset_kwargs or {}))


def _sandboxed() -> str:
    """What keeps generated code from the network; asks first whether it may run, and whether a program that is right passes here."""
    from assay.ops.tasks.sandbox import run_program

    ran = run_program("assert sum([1, 2]) == 3")
    if ran.outcome != "passed":
        raise RuntimeError(f"a program that is right does not pass in the sandbox of this machine: {ran.told}")
    return ran.network
