"""YAML that is only data: no tags, no anchors, no duplicate keys, no surprises. Not here: what the data must look like (``schemas/load.py``)."""

import math
from dataclasses import dataclass
from typing import Any

import yaml

LARGEST_FILE = 1_000_000
DEEPEST = 40

Path_ = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where (``axes.quantize.int4[0].bits``), what came, what would work."""

    path: Path_
    message: str
    remedy: str = ""
    line: int | None = None

    def __str__(self) -> str:
        where = spell(self.path) or "the file"
        return f"{where}: {self.message}" + (f"; {self.remedy}" if self.remedy else "")


def spell(path: Path_) -> str:
    """``('axes', 'prune', 'd4', 0)`` as ``axes.prune.d4[0]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else str(part))
    return text


@dataclass(frozen=True)
class Document:
    """The data of a file, the line of every path in it, and what is wrong with it as YAML."""

    data: Any
    lines: dict[Path_, int]
    problems: list[Problem]


def read(text: str) -> Document:
    """Parse ``text``; problems are returned, all at once where the parser can go on."""
    if len(text) > LARGEST_FILE:
        return Document(None, {}, [Problem((), f"the file has {len(text):,} characters", f"an experiment has at most {LARGEST_FILE:,}")])
    problems: list[Problem] = []
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                return Document(None, {}, [Problem((), f"nested deeper than {DEEPEST} levels", line=event.start_mark.line + 1)])
            if getattr(event, "anchor", None):
                kind = "alias *" if isinstance(event, yaml.AliasEvent) else "anchor &"
                problems.append(
                    Problem(
                        (),
                        f"the YAML {kind}{event.anchor} is not allowed",
                        "write the steps out, or use an axis",
                        event.start_mark.line + 1,
                    )
                )
        if problems:
            return Document(None, {}, problems)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        return Document(
            None, {}, [Problem((), f"not YAML: {what}", "check the indentation and the brackets", mark.line + 1 if mark else None)]
        )
    except RecursionError:
        return Document(None, {}, [Problem((), f"nested deeper than {DEEPEST} levels")])
    if root is None:
        return Document(None, {}, [Problem((), "the file is empty", "start from `assay new`")])
    lines: dict[Path_, int] = {}
    data = _convert(root, (), lines, problems)
    return Document(data, lines, problems)


def _convert(node: yaml.Node, path: Path_, lines: dict[Path_, int], problems: list[Problem]) -> Any:
    line = node.start_mark.line + 1
    lines[path] = line
    if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.startswith("tag:yaml.org,2002:python"):
        problems.append(Problem(path, f"the YAML tag {node.tag} is not allowed", "write plain data", line))
        return None
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = _scalar(key_node, path, problems)
            if not isinstance(key, str):
                given = getattr(key_node, "value", key)
                problems.append(
                    Problem(path, f"the key {given if isinstance(given, str) else '…'!r} is read as {_kind(key)}, not as text",
                            f'quote it: "{given}"' if isinstance(given, str) else "keys are text", key_node.start_mark.line + 1)
                )  # fmt: skip
                continue
            if key == "<<":
                problems.append(Problem(path, "the YAML merge key << is not allowed", "write the keys out", key_node.start_mark.line + 1))
                continue
            if key in result:
                problems.append(Problem((*path, key), "is given twice", "keep one", key_node.start_mark.line + 1))
                continue
            result[key] = _convert(value_node, (*path, key), lines, problems)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_convert(child, (*path, index), lines, problems) for index, child in enumerate(node.value)]
    return _scalar(node, path, problems)


def _scalar(node: yaml.Node, path: Path_, problems: list[Problem]) -> Any:
    if not isinstance(node, yaml.ScalarNode):
        return None
    line = node.start_mark.line + 1
    try:
        value = yaml.SafeLoader("").construct_object(node)
    except (ValueError, yaml.YAMLError, OverflowError) as error:
        problems.append(Problem(path, f"{node.value[:40]!r} cannot be read: {str(error).splitlines()[0]}", "quote it if it is text", line))
        return None
    if isinstance(value, float) and not math.isfinite(value):
        problems.append(Problem(path, f"{node.value} is not a finite number", "give a finite number", line))
        return None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**53:
        problems.append(
            Problem(path, f"the number {node.value[:20]}{'…' if len(node.value) > 20 else ''} is too large", "at most 2^53", line)
        )
        return None
    if value is not None and not isinstance(value, str | int | float | bool):
        problems.append(Problem(path, f"{node.value!r} is read as a {type(value).__name__}", f'quote it: "{node.value}"', line))
        return None
    return value


def _kind(value: Any) -> str:
    return "nothing" if value is None else "yes or no" if isinstance(value, bool) else f"a {type(value).__name__}"
