"""The suite ``lm_eval``: any tasks of lm-evaluation-harness, by its names or out of a directory, with its own scores.

Not here: the model that the harness asks (``ops/tasks/harness.py``), our own packaged tasks (``choice``, ``generation``).
"""

import os
from pathlib import Path
from typing import Any

from assay.ops.suites.subject import Result, Subject, metric
from assay.ops.suites.tasks import evaluate, open_lm, quiet
from assay.schemas.tasks import LmEval

ALLOWED = "ASSAY_RUN_GENERATED_CODE"
TRUSTED = "ASSAY_RUN_TASK_FILES"


def lm_eval(protocol: LmEval, subject: Subject, *, reference: Path | None, experiment_dir: Path | None) -> Result:
    """Run the tasks and keep every number that the harness reports, as ``harness_score`` of the slice ``task/metric`` or ``task/metric/filter``.

    A number that a sample has of its own is an item ``metric/task`` or ``metric/task/filter``, under the sample's number in its data set. Scores of groups
    are kept beside those of their tasks. Standard errors are the harness's, where it has any.

    Raises:
        ValueError: a task is unknown, or runs code that the model writes, which ``ASSAY_RUN_GENERATED_CODE=1`` alone allows.
        ConnectionError: a task's data are on the hub, and neither that nor a copy can be reached.
    """
    loaded = load(protocol, experiment_dir)
    unsafe = os.environ.get(ALLOWED) == "1"
    refused = sorted(name for name, task in loaded["tasks"].items() if getattr(task, "UNSAFE_CODE", False) and not unsafe)
    if refused:
        raise ValueError(f"the task {refused[0]} runs code that the model writes; set {ALLOWED}=1 on a machine where that may happen")
    lm = open_lm(subject, dtype=protocol.dtype, batch=protocol.batch, seed=protocol.seed)
    found = evaluate(lm, loaded, chat=protocol.chat, limit=protocol.questions, unsafe=unsafe)
    counts = {name: count["effective"] for name, count in found["n-samples"].items()}
    metrics = [row for name, scores in found["results"].items() for row in rows(name, scores, counts, lm.runner.path)]
    items = [item for name, samples in found["samples"].items() for sample in samples for item in items_of(name, sample)]
    shots = {name: count for name, count in found["n-shot"].items() if name in counts}
    notes = {"versions": found["versions"], "shots": shots, "truncated": lm.truncated, "cut": lm.cut, "first_ids": lm.first_ids}
    return Result(metrics, items, {}, notes)


def load(protocol: LmEval, experiment_dir: Path | None) -> dict[str, Any]:
    """The tasks as the harness's TaskManager loads them, with the protocol's shots and seed; its own tasks where ``include`` has none of a name.

    Raises:
        PermissionError: ``include`` is given without ``ASSAY_RUN_TASK_FILES=1``: a task file can name functions and templates, which is to run code.
        ValueError: ``include`` is no directory, or a task is unknown.
        ConnectionError: a task's data cannot be reached.
    """
    from lm_eval.tasks import TaskManager

    include = None if protocol.include is None else Path(experiment_dir or ".") / Path(protocol.include).expanduser()
    if include is not None and not include.is_dir():
        raise ValueError(f"include={protocol.include} is no directory; looked at {include.absolute()}")
    if include is not None and os.environ.get(TRUSTED) != "1":
        raise PermissionError(
            f"task files can run code by the functions and templates that they name; read those of {include.absolute()}, and set {TRUSTED}=1 to use them"
        )
    with quiet():
        manager = TaskManager(include_path=include)
        unknown = [name for name in protocol.tasks if name not in manager.all_tasks]
        if unknown:
            near = [name for name in manager.all_tasks if unknown[0].split("_")[0] in name][:5]
            more = f"; there is {', '.join(near)}" if near else ""
            raise ValueError(f"the harness has no task {unknown[0]!r}, and include={protocol.include} neither{more}")
        loaded: dict[str, Any] = {"tasks": {}, "groups": {}}
        for name in protocol.tasks:  # one by one, so that an error is of one task
            for part, more in _load_one(manager, name).items():
                loaded.setdefault(part, {}).update(more)
    for task in loaded["tasks"].values():
        settle(task, protocol.shots, protocol.seed)
    return loaded


def _load_one(manager: Any, name: str) -> dict[str, Any]:
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return manager.load([name])
    except (ConnectionError, DatasetNotFoundError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        data = _data_of(manager, name)
        raise ConnectionError(
            f"the data set of the task {name}{data} is not in the local cache and the hub cannot be reached; "
            f"run it once with a connection, or give a task file over local data in include ({type(error).__name__}: {error})"
        ) from error


def _data_of(manager: Any, name: str) -> str:
    """Which data set a task's file names, for an error."""
    from lm_eval.tasks._yaml_loader import load_yaml

    file = manager.task_index[name].yaml_path
    path = load_yaml(file, resolve_func=False).get("dataset_path") if file else None
    return f" ({path})" if path else ""


def settle(task: Any, shots: int | None, seed: int) -> None:
    """Give a task the protocol's shots, unless its file says that it has none, and the seed that draws them; a lone stop becomes a list of one."""
    own = task.get_config("num_fewshot")
    if own is None or (shots is not None and own != 0):
        task.set_config(key="num_fewshot", value=shots or 0)
    task.set_fewshot_seed(seed=seed)
    generation = task.get_config("generation_kwargs")
    if generation and isinstance(generation.get("until"), str):
        task.set_config(key="generation_kwargs", value={"until": [generation["until"]]}, update=True)


def rows(name: str, scores: dict[str, Any], counts: dict[str, int], path: str) -> list[dict[str, Any]]:
    """The facts of one task or group: every score with its standard error. The harness names them ``metric,filter``."""
    found = []
    for key, value in scores.items():
        score, _, kind = key.partition(",")
        if not kind or score.endswith("_stderr") or not _number(value):
            continue
        error = scores.get(f"{score}_stderr,{kind}")
        count = int(scores.get("sample_count", {}).get(key, counts.get(name, scores.get("sample_len", 0))))
        found.append(
            metric(
                "harness_score", _finite(value), "1", count, _finite(error) if _number(error) else None,
                slice_kind="task_metric", slice=named(name, score, kind), path=path,
            )
        )  # fmt: skip
    return found


def items_of(name: str, sample: dict[str, Any]) -> list[dict[str, Any]]:
    """The numbers that one sample has."""
    return [
        {"item": sample["doc_id"], "metric": named(score, name, sample["filter"]), "value": float(sample[score])}
        for score in sample["metrics"]
        if _number(sample[score]) and _finite(sample[score]) is not None
    ]


def named(first: str, second: str, kind: str) -> str:
    """Two names and a filter, unless that is none."""
    return "/".join([first, second] + ([kind] if kind != "none" else []))


def _number(value: Any) -> bool:
    from numbers import Real

    return isinstance(value, Real)


def _finite(value: Any) -> float | None:
    from math import isfinite

    return float(value) if isfinite(value) else None
