"""Our own tasks: files of ``assets/tasks`` in the format of lm-evaluation-harness, over packaged data, without a network.

The harness has tasks of the same names; what is asked for here is always ours. Not here: how a file of data is read (``questions.py``), or any model.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import yaml

from assay.ops.data.packages import entries, file_sha256, stated

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

FOLDER = Path(__file__).parents[2] / "assets" / "tasks"


def packaged_tasks(
    names: Sequence[str], *, questions: int, seed: int, shots: int = 0, changes: Mapping[str, Any] | None = None
) -> "dict[str, ConfigurableTask]":
    """The tasks ``names`` as objects of the harness, each over its first questions of an order that ``seed`` draws.

    Every row has the ``line`` of its file, so that answers pair between variants. The solved questions before each are the last ``shots`` of the same
    order; they are the same before every question, and are never asked.

    Args:
        questions: the most of each task; a file with fewer is asked whole, but for its shots.
        changes: of the harness's keys, over what each file says.
    Raises:
        ValueError: a task is not ours, or its file has too few questions.
        FileNotFoundError: the package with the data is missing.
    """
    return {name: _task(name, questions, seed, shots, changes or {}) for name in names}


def packaged_names() -> list[str]:
    """The tasks that there are."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def tasks_digest(names: Sequence[str] = (), *, include: Path | None = None) -> str:
    """sha256 (hex) of what decides the questions and scores of tasks but for code: their files, the packaged data, the harness's version.

    Args:
        names: of ours.
        include: a directory of task files, of which every one counts.
    Raises:
        ValueError: a task is not ours, or ``include`` is no directory.
        FileNotFoundError: the package with the data is missing.
    """
    identity: list[Any] = [["lm_eval", importlib.metadata.version("lm_eval")]]
    for name in sorted(names):
        identity.append([name, file_sha256(_file(name))])
        where = read(_file(name)).get("dataset_kwargs") or {}
        if "package" in where:
            files = where.get("files") or [where["file"]]
            distribution, version = where["package"].split("==")
            identity += map(stated, entries(distribution, version, files, what=f"the task {name}"))
    if include is not None:
        if not include.is_dir():
            raise ValueError(f"{include} is no directory; expected one with task files (.yaml) of lm-evaluation-harness")
        found = sorted(
            file for file in include.rglob("*") if file.suffix in (".yaml", ".py", ".json", ".jsonl") or file.name.startswith("_")
        )
        identity += [[file.relative_to(include).as_posix(), file_sha256(file)] for file in found if file.is_file()]
    return hashlib.sha256(json.dumps(identity, separators=(",", ":")).encode()).hexdigest()


def task_functions(names: Sequence[str]) -> list[str]:
    """The functions that the files of ``names`` call, as ``module:function``: code that the files bring in and no import shows."""
    found: set[str] = set()

    def look(value: Any) -> None:
        if isinstance(value, Function):
            found.add(":".join(value.rsplit(".", 1)))
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            look(each)

    for name in names:
        look(read(_file(name)))
    return sorted(found)


class Function(str):
    """The name of a function behind ``!function`` in a task file."""


class _Loader(yaml.SafeLoader):
    """YAML with the harness's ``!function``, which stays a name."""


_Loader.add_constructor("!function", lambda loader, node: Function(node.value))


@cache
def read(file: Path) -> dict[str, Any]:
    """A task file as it stands, its functions by name. Read once a process: not to be changed."""
    return yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)  # a subclass of the safe loader


def _file(name: str) -> Path:
    file = FOLDER / f"{name}.yaml"
    if name not in packaged_names():
        raise ValueError(f"{name!r} is no packaged task; there are {', '.join(packaged_names())}")
    return file


def _task(name: str, questions: int, seed: int, shots: int, changes: Mapping[str, Any]) -> "ConfigurableTask":
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    config = {**load_yaml(_file(name)), **changes, "num_fewshot": shots}
    own = "samples" in (config.get("fewshot_config") or {})  # solved questions of the task's own, so none of the file are set aside
    config["custom_dataset"] = _drawn(name, config["custom_dataset"], questions, seed, 0 if own else shots)
    if shots and not own:
        config |= {"fewshot_split": "shots", "fewshot_config": {**(config.get("fewshot_config") or {}), "sampler": "first_n"}}
    return ConfigurableTask(config=config)


def _drawn(name: str, reader: Callable[..., Any], questions: int, seed: int, shots: int) -> Callable[..., Any]:
    def drawn(**where: Any) -> dict[str, Any]:
        every = reader(**where)["test"]
        order = Random(f"{seed}/{name}").sample(range(len(every)), len(every))
        asked = order[: min(questions, len(order) - shots)]
        if len(order) - shots < 2:
            raise ValueError(f"the task {name} has {len(order)} questions, and {shots} of them are shots; expected at least 2 to ask")
        return {"test": every.select(asked), "shots": every.select(order[len(order) - shots :])}

    return drawn
