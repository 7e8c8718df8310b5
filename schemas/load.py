"""From a YAML file to an :class:`Experiment`, or to every reason why not: each with its path in the file, what came and what would work.

Nothing is loaded or computed before a file has passed here. Not here: the rules of a single spec (its own module), whether the whole can be
done (``schemas/fit.py``), the wording of pydantic's errors (``schemas/explain.py``).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from assay.schemas.base import Base, Shape, Source
from assay.schemas.experiment import Experiment, ExperimentFile, named
from assay.schemas.explain import explain, shown, unknown
from assay.schemas.fit import judge
from assay.schemas.metrics import METRICS
from assay.schemas.protocols import Protocol, Speed
from assay.schemas.steps import Draft, Step, TrainedStep
from assay.schemas.texts import Text
from assay.schemas.yaml import LARGEST_FILE, Path_, Problem, read


@dataclass(frozen=True)
class Registries:
    """What names may stand for. ``shape_of`` gives a base's shape without loading it, or None where it cannot be known yet."""

    bases: Mapping[str, Base]
    protocols: Mapping[str, Protocol]
    texts: frozenset[str]
    shape_of: Callable[[Base], Shape | None] = lambda base: base.shape
    reserved: frozenset[str] = field(default=frozenset())


MOST_TOLD = 50  # problems in the text of an error


class ExperimentError(ValueError):
    """Everything that is wrong with one experiment file: all of it in ``problems``, the first of it in the text."""

    def __init__(self, file: Path, problems: list[Problem]):
        self.file, self.problems = file, problems
        lines = [f"{file}:{problem.line}: {problem}" if problem.line else f"{file}: {problem}" for problem in problems[:MOST_TOLD]]
        if len(problems) > MOST_TOLD:
            lines.append(f"{file}: and {len(problems) - MOST_TOLD:,} more problems")
        super().__init__("\n".join(lines))


def load_experiment(file: Path, registries: Registries) -> Experiment:
    """Read and judge ``file``.

    Raises:
        ExperimentError: with every problem of the file.
        FileNotFoundError: there is no such file.
    """
    try:
        with file.open("rb") as stream:
            content = stream.read(4 * LARGEST_FILE + 1)  # UTF-8 has at most four bytes a character
        return parse_experiment(content.decode("utf-8"), file, registries)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ExperimentError(file, [Problem((), f"is not UTF-8 text (byte {error.start})", "save the file as UTF-8", line)]) from None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ExperimentError(file, [Problem((), f"cannot be read: {error.strerror}", "give a YAML file")]) from None


def parse_experiment(text: str, file: Path, registries: Registries) -> Experiment:
    """Like :func:`load_experiment`, for the text of a file; relative paths in it are relative to ``file``."""
    document = read(text)
    problems = list(document.problems)
    if document.data is not None or not problems:
        found, experiment = _resolve(document.data, file, registries, {problem.path[0] for problem in problems if problem.path})
        problems += found
        if experiment is not None and not problems:
            return experiment
    placed = [replace(each, line=each.line or _line(document.lines, each.path)) for each in problems]
    raise ExperimentError(file, sorted(placed, key=lambda each: each.line or 0))


def _line(lines: dict[Path_, int], path: Path_) -> int | None:
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path)


# What is judged in the place of a key that cannot be read, so that the rest of the file still is.
STAND_INS = {"name": "unreadable", "base": "unreadable", "axes": {"unreadable": {"none": []}}, "measure": ["unreadable"]}


def _resolve(data: Any, file: Path, registries: Registries, unreadable: set[str | int]) -> tuple[list[Problem], Experiment | None]:
    """Every problem that is not below an ``unreadable`` key, and the experiment where there is none."""
    if not isinstance(data, dict):
        return [Problem((), f"an experiment is a mapping; got {shown(data)}", "start from `assay new`")], None
    problems: list[Problem] = []
    try:
        parsed = ExperimentFile.model_validate_json(json.dumps(data))
    except ValidationError as error:
        problems = [problem for problem in explain(error, data) if problem.path[0] not in unreadable]
        unreadable = unreadable | {problem.path[0] for problem in problems}
        readable = {key: value for key, value in data.items() if key in ExperimentFile.model_fields and key not in unreadable}
        unreadable |= STAND_INS.keys() - readable.keys()
        parsed = ExperimentFile.model_validate_json(json.dumps({**STAND_INS, **readable}))
    if "axes" in unreadable:
        unreadable = unreadable | {"grid", "budgets"}  # these name axes and options
    experiment, found = _judged(parsed, file, registries)
    problems += [problem for problem in found if problem.path[0] not in unreadable]
    return problems, experiment


def _judged(parsed: ExperimentFile, file: Path, registries: Registries) -> tuple[Experiment, list[Problem]]:
    problems: list[Problem] = []
    base = _base(parsed.base, file, registries, problems)
    protocols = _protocols(parsed, registries, problems)
    for path, text in _texts(parsed):
        _check_text(path, text, file, registries, problems)
    draft_bases = {}
    for path, step in _steps(parsed):
        if isinstance(step, Draft) and step.base is not None:
            if step.base in registries.bases:
                draft_bases[step.base] = _with_shape(registries.bases[step.base], (*path, "base"), registries, problems)
            else:
                problems.append(Problem((*path, "base"), *unknown("base", step.base, registries.bases)))
    experiment = Experiment(
        name=parsed.name, question=parsed.question, base=base,
        axes={axis: {option: tuple(steps) for option, steps in options.items()} for axis, options in parsed.axes.items()},
        points=(), protocols=protocols, budgets=tuple(parsed.budgets), seed=parsed.seed, resources=parsed.resources, file=file, draft_bases=draft_bases,
    )  # fmt: skip
    # Where a protocol is unknown, no budget is blamed for a suite that is not measured.
    known = protocols if not any(problem.path[0] == "measure" for problem in problems) else {}
    found, points = judge(replace(experiment, protocols=known), parsed, registries.reserved)
    return replace(experiment, points=points), problems + found


def _steps(parsed: ExperimentFile) -> Iterator[tuple[Path_, Step]]:
    for axis, options in parsed.axes.items():
        for option, steps in options.items():
            for index, step in enumerate(steps):
                yield ("axes", axis, option, index), step


def _base(asked: str | Source, file: Path, registries: Registries, problems: list[Problem]) -> Base:
    """The base that is meant; one without a shape, which fits everything, where it cannot be told."""
    nothing = Base(name="unknown", path=".")
    if isinstance(asked, str):
        if asked not in registries.bases:
            problems.append(Problem(("base",), *unknown("base", asked, registries.bases)))
            return nothing
        return _with_shape(registries.bases[asked], ("base",), registries, problems)
    source = asked.model_dump(exclude_none=True)
    if asked.path is not None:
        directory = _beside(file, asked.path)
        if directory is None or not _is_file(directory / "config.json"):
            message = f"{shown(asked.path)} is no checkpoint: no config.json in {shown(str(directory or asked.path), 300)}"
            problems.append(
                Problem(("base", "path"), message, "give a directory that from_pretrained opens, relative to the experiment file")
            )
            return nothing
        source["path"] = str(directory.resolve())
    called = asked.hub or source.get("path") or (asked.package.name if asked.package else "")
    name = re.sub(r"[^a-z0-9._-]+", "-", called.rstrip("/").split("/")[-1].lower())
    name = re.sub(r"[._-]{2,}", "-", name)[:96].strip("._-")
    return _with_shape(Base.model_validate({"name": name or "base", **source}), ("base",), registries, problems)


def _with_shape(base: Base, path: Path_, registries: Registries, problems: list[Problem]) -> Base:
    try:
        shape = registries.shape_of(base)
    except (OSError, ValueError, TypeError, KeyError) as error:
        problems.append(Problem(path, f"the config of {base.name} cannot be read: {error}", "give a directory that from_pretrained opens"))
        return base
    return base if shape is None else base.model_copy(update={"shape": shape})


def _protocols(parsed: ExperimentFile, registries: Registries, problems: list[Problem]) -> dict[str, Protocol]:
    protocols: dict[str, Protocol] = {}
    drafts = any(isinstance(step, Draft) for _, step in _steps(parsed))
    for index, entry in enumerate(parsed.measure):
        path = ("measure", index)
        if isinstance(entry, str):
            name, protocol = entry, registries.protocols.get(entry)
            if protocol is None:
                problems.append(Problem(path, *unknown("protocol", entry, registries.protocols)))
                continue
        else:
            name, protocol = named(entry)
        if name in METRICS and name != protocol.suite:
            problems.append(
                Problem((*path, "name"), f"{name!r} is the name of another suite", f"choose another, for example my_{protocol.suite}")
            )
        elif name in protocols:
            problems.append(Problem(path, f"the protocol {name!r} is given twice", "keep one, or give the other a name of its own"))
        elif isinstance(protocol, Speed) and protocol.batch > 1 and drafts:
            place = path if isinstance(entry, str) else (*path, "batch")
            problems.append(
                Problem(
                    place,
                    f"{name} times batches of {protocol.batch}, but a draft speculates for one row",
                    "time with batch: 1 where there are drafts",
                )
            )
        protocols[name] = protocol
    if drafts and "acceptance" in registries.protocols and not any(protocol.suite == "acceptance" for protocol in protocols.values()):
        protocols["acceptance"] = registries.protocols["acceptance"]
    return protocols


def _texts(parsed: ExperimentFile) -> Iterator[tuple[Path_, Text]]:
    for index, entry in enumerate(parsed.measure):
        if isinstance(text := getattr(entry, "text", None), Text):
            yield ("measure", index, "text"), text
    for path, step in _steps(parsed):
        if isinstance(step, TrainedStep):
            yield (*path, "text"), step.text
        for number, domain in enumerate(getattr(step, "domains", None) or ()):
            yield (*path, "domains", number, "text"), domain.text
        if (calibration := getattr(step, "calibration", None)) is not None:
            yield (*path, "calibration", "text"), calibration.text
        if (distill := getattr(step, "distill", None)) is not None:
            yield (*path, "distill", "text"), distill.text


def _check_text(path: Path_, text: Text, file: Path, registries: Registries, problems: list[Problem]) -> None:
    if text.name is not None and text.name not in registries.texts:
        problems.append(Problem((*path, "name"), *unknown("text", text.name, registries.texts)))
    if text.path is not None:
        where = _beside(file, text.path)
        if where is None or where.suffix not in (".txt", ".jsonl"):
            problems.append(Problem((*path, "path"), f"{shown(text.path)} is neither .txt nor .jsonl", "give one of these"))
        elif not _is_file(where):
            problems.append(
                Problem((*path, "path"), f"there is no file {shown(str(where), 300)}", "a text's path is relative to the experiment file")
            )


def _beside(file: Path, path: str) -> Path | None:
    """``path`` as it is meant in ``file``; None where it names a home that is not there."""
    try:
        return file.parent / Path(path).expanduser()
    except RuntimeError:
        return None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name longer than the file system takes
        return False
