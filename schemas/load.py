"""From a YAML file to an :class:`Experiment`, or to every reason why not: each with its path in the file, what came and what would work.

Nothing is loaded or computed before a file has passed here. Not here: the rules of a single spec (its own module).
"""

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from assay.schemas import experiment as models
from assay.schemas.base import Base, Packaged, Shape
from assay.schemas.experiment import Experiment, ExperimentFile
from assay.schemas.fit import judge
from assay.schemas.protocols import Protocol
from assay.schemas.steps import RUNTIME_STEPS, STEP_KINDS, WEIGHT_STEPS, Calibration, Text
from assay.schemas.yaml import Path_, Problem, read


@dataclass(frozen=True)
class Registries:
    """What names may stand for. ``shape_of`` gives a base's shape without loading it, or None where it cannot be known yet."""

    bases: Mapping[str, Base]
    protocols: Mapping[str, Protocol]
    texts: frozenset[str]
    shape_of: Callable[[Base], Shape | None] = lambda base: base.shape
    reserved: frozenset[str] = field(default=frozenset())


class ExperimentError(ValueError):
    """Everything that is wrong with one experiment file."""

    def __init__(self, file: Path, problems: list[Problem]):
        self.file, self.problems = file, problems
        lines = [f"{file}:{problem.line}: {problem}" if problem.line else f"{file}: {problem}" for problem in problems]
        super().__init__("\n".join(lines))


def load_experiment(file: Path, registries: Registries) -> Experiment:
    """Read and judge ``file``.

    Raises:
        ExperimentError: with every problem of the file.
        FileNotFoundError: there is no such file.
    """
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ExperimentError(file, [Problem((), f"not UTF-8 text (byte {error.start})", "save the file as UTF-8")]) from None
    return parse_experiment(text, file, registries)


def parse_experiment(text: str, file: Path, registries: Registries) -> Experiment:
    """Like :func:`load_experiment`, for the text of a file; relative paths in it are relative to ``file``."""
    document = read(text)
    problems = list(document.problems)
    if not problems:
        problems, experiment = _resolve(document.data, file, registries)
        if experiment is not None and not problems:
            return experiment
    raise ExperimentError(file, [replace(each, line=each.line or _line(document.lines, each.path)) for each in problems])


def _line(lines: dict[Path_, int], path: Path_) -> int | None:
    while path and path not in lines:
        path = path[:-1]
    return lines.get(path)


def _resolve(data: Any, file: Path, registries: Registries) -> tuple[list[Problem], Experiment | None]:
    if not isinstance(data, dict):
        return [Problem((), f"an experiment is a mapping; got {_shown(data)}", "start from `assay new`")], None
    try:
        parsed = ExperimentFile.model_validate_json(json.dumps(data))
    except ValidationError as error:
        return _problems(error, data), None
    problems: list[Problem] = []
    base = _base(parsed, file, registries, problems)
    protocols = _protocols(parsed, registries, problems)
    for path, text in _texts(parsed):
        _check_text(path, text, file, registries, problems)
    if base is None:
        return problems, None
    draft_bases = {}
    for axis, options in parsed.axes.items():
        for option, steps in options.items():
            for index, step in enumerate(steps):
                name = getattr(step, "base", None)
                if name is not None and name in registries.bases:
                    draft_bases[name] = _with_shape(registries.bases[name], registries)
                elif name is not None:
                    problems.append(Problem(("axes", axis, option, index, "base"), *_unknown("base", name, registries.bases)))
    experiment = Experiment(
        name=parsed.name, question=parsed.question, base=base,
        axes={axis: {option: tuple(steps) for option, steps in options.items()} for axis, options in parsed.axes.items()},
        points=(), protocols=protocols, budgets=tuple(parsed.budgets), seed=parsed.seed, resources=parsed.resources, file=file, draft_bases=draft_bases,
    )  # fmt: skip
    found, points = judge(experiment, parsed, registries.reserved)
    return problems + found, replace(experiment, points=points)


def _base(parsed: ExperimentFile, file: Path, registries: Registries, problems: list[Problem]) -> Base | None:
    if isinstance(parsed.base, str):
        if parsed.base not in registries.bases:
            problems.append(Problem(("base",), *_unknown("base", parsed.base, registries.bases)))
            return None
        return _with_shape(registries.bases[parsed.base], registries)
    inline = parsed.base.model_dump(exclude_none=True)
    if "path" in inline:
        directory = Path(inline["path"]).expanduser()
        directory = directory if directory.is_absolute() else (file.parent / directory)
        if not (directory / "config.json").is_file():
            problems.append(
                Problem(
                    ("base", "path"),
                    f"{inline['path']} is no checkpoint: it has no config.json",
                    "give a directory that from_pretrained opens",
                )
            )
            return None
        inline["path"] = str(directory.resolve())
    if "package" in inline:
        inline["package"] = Packaged(**inline["package"])
    try:
        source = inline.get("hub") or inline.get("path") or inline["package"].name if len(inline) > 1 else "base"
        name = re.sub(r"[^a-z0-9._-]+", "-", str(source).rstrip("/").split("/")[-1].lower()).strip("._-")
        return _with_shape(Base(name=re.sub(r"[._-]{2,}", "-", name)[:96] or "base", **inline), registries)
    except ValidationError as error:
        problems.append(Problem(("base",), _message(error.errors()[0])))
        return None


def _with_shape(base: Base, registries: Registries) -> Base:
    shape = registries.shape_of(base)
    return base if shape is None else base.model_copy(update={"shape": shape})


def _protocols(parsed: ExperimentFile, registries: Registries, problems: list[Problem]) -> dict[str, Protocol]:
    protocols: dict[str, Protocol] = {}
    if not parsed.measure:
        problems.append(
            Problem(("measure",), "measures nothing", f"name protocols, for example [{', '.join(sorted(registries.protocols)[:3])}]")
        )
    for index, entry in enumerate(parsed.measure):
        path = ("measure", index)
        if isinstance(entry, str):
            name, protocol = entry, registries.protocols.get(entry)
            if protocol is None:
                problems.append(Problem(path, *_unknown("protocol", entry, registries.protocols)))
                continue
        else:
            name = entry.name or entry.suite
            kind = type(entry).__mro__[1]
            protocol = kind.model_validate(entry.model_dump(exclude={"name"}))
        if name in protocols:
            problems.append(Problem(path, f"the protocol {name!r} is given twice", "keep one, or give the other a name of its own"))
            continue
        protocols[name] = protocol
    drafts = any(getattr(step, "kind", "") == "draft" for options in parsed.axes.values() for steps in options.values() for step in steps)
    if drafts and not any(protocol.suite == "acceptance" for protocol in protocols.values()) and "acceptance" in registries.protocols:
        protocols["acceptance"] = registries.protocols["acceptance"]
    if drafts:
        for name, protocol in protocols.items():
            if getattr(protocol, "batch", 1) > 1 and protocol.suite == "speed":
                problems.append(
                    Problem(
                        ("measure",),
                        f"{name} times batches of {protocol.batch}, and speculation runs one row",
                        "use batch: 1 in this experiment",
                    )
                )  # type: ignore[union-attr]
    return protocols


def _texts(parsed: ExperimentFile) -> list[tuple[Path_, Text]]:
    found: list[tuple[Path_, Text]] = []
    for index, entry in enumerate(parsed.measure):
        text = getattr(entry, "text", None)
        if text is not None:
            found.append((("measure", index, "text"), text))
    for axis, options in parsed.axes.items():
        for option, steps in options.items():
            for index, step in enumerate(steps):
                calibration = getattr(step, "calibration", None)
                if calibration is not None:
                    found.append((("axes", axis, option, index, "calibration", "text"), calibration.text))
    return found


def _check_text(path: Path_, text: Text, file: Path, registries: Registries, problems: list[Problem]) -> None:
    if text.name is not None and text.name not in registries.texts:
        problems.append(Problem((*path, "name"), *_unknown("text", text.name, registries.texts)))
    if text.path is not None:
        where = file.parent / text.path
        if where.suffix not in (".txt", ".jsonl"):
            problems.append(Problem((*path, "path"), f"{text.path} is neither .txt nor .jsonl", "give one of these"))
        elif not where.is_file():
            problems.append(
                Problem(
                    (*path, "path"), f"there is no file {text.path} beside {file.name}", "a text's path is relative to the experiment file"
                )
            )


def _unknown(what: str, name: str, known: Any) -> tuple[str, str]:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"no {what} is named {name!r}", f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names) or 'none'}"


# --- pydantic's errors, in our words ---------------------------------------------------------------------------------------------------------


def _problems(error: ValidationError, data: Any) -> list[Problem]:
    """One problem a place; a union that took a name or a mapping reports only the branch that the input meant."""
    found: dict[Path_, Problem] = {}
    for each in error.errors(include_url=False):
        path, parent, tags = _walk(each, data)
        value = each.get("input")
        if isinstance(value, dict) and each["type"] in ("string_type", "literal_error"):
            continue  # the other branch of a name-or-mapping union
        if (
            isinstance(value, str | bool | int | float)
            and each["type"] in ("model_type", "model_attributes_type", "dict_type")
            and path in found
        ):
            continue
        if path in found and each["type"] in ("string_type", "model_attributes_type", "model_type", "literal_error", "list_type"):
            continue
        message, remedy = _message(each), ""
        if each["type"] == "extra_forbidden":
            known = _known_keys(path[:-1], parent, tags)
            close = difflib.get_close_matches(str(path[-1]), known, n=1)
            message = f"unknown key {path[-1]!r}"
            remedy = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(known)}"
        elif each["type"] == "missing":
            message = "is missing" + (f"; known keys: {', '.join(_known_keys(path[:-1], parent, tags))}" if tags or len(path) == 1 else "")
        elif each["type"] in ("union_tag_invalid", "union_tag_not_found"):
            key = "suite" if path and path[0] == "measure" else "kind"
            kinds = (
                [model.model_fields["suite"].default for model in get_args(get_args(Protocol)[0])] if key == "suite" else list(STEP_KINDS)
            )
            given = value.get(key) if isinstance(value, dict) else value
            close = difflib.get_close_matches(str(given), kinds, n=1)
            message = f"{key} {given!r} is not known" if given is not None else f"needs a {key}"
            remedy = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(kinds)}"
        elif each["type"] == "string_pattern_mismatch" and "a-z0-9" in str(each.get("ctx", {}).get("pattern", "")):
            message, remedy = f"{_shown(value)} is no name", "names are lower-case letters and digits joined by single underscores"
        found[path] = Problem(path, message, remedy)
    return list(found.values())


def _walk(error: Any, data: Any) -> tuple[Path_, Any, list[str]]:
    """The path of an error within the data (pydantic's has the names of union branches in between), its parent, and those names."""
    path: list[str | int] = []
    tags: list[str] = []
    here, parent, loc = data, data, error["loc"]
    for index, part in enumerate(loc):
        last = index == len(loc) - 1
        inside = (isinstance(here, dict) and part in here) or (isinstance(here, list) and isinstance(part, int) and part < len(here))
        if part == "[key]":
            break
        if inside:
            parent, here = here, here[part]
            path.append(part)
        elif last and error["type"] == "missing":
            parent = here
            path.append(part)
        else:
            tags.append(str(part))
    return tuple(path), parent, tags


def _known_keys(path: Path_, parent: Any, tags: list[str]) -> list[str]:
    by_kind: dict[str, type[BaseModel]] = {model.model_fields["kind"].default: model for model in (*WEIGHT_STEPS, *RUNTIME_STEPS)}
    by_suite = {
        "divergence": models.InlineDivergence,
        "bytes": models.InlineBytes,
        "acceptance": models.InlineAcceptance,
        "speed": models.InlineSpeed,
    }
    by_name: dict[str, type[BaseModel]] = {"grid": models.Grid, "base": models.InlineBase, "package": Packaged, "resources": models.Resources,
                                           "budgets": models.Budget, "calibration": Calibration, "text": Text}  # fmt: skip
    name = next((part for part in reversed(path) if isinstance(part, str)), None)
    model: type[BaseModel] | None = ExperimentFile if not path else by_name.get(str(name))
    if model is None and isinstance(parent, dict):
        model = by_kind.get(str(parent.get("kind"))) or by_suite.get(str(parent.get("suite")))
    if model is None:
        return []
    return [info.alias or key for key, info in model.model_fields.items()]


def _message(error: Any) -> str:
    kind, value, context = error["type"], error.get("input"), error.get("ctx", {})
    if kind == "value_error":
        return str(context.get("error", error["msg"]))
    expected = error["msg"][0].lower() + error["msg"][1:]
    return f"{expected.replace('input should', 'should')}; got {_shown(value)}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "…"
