"""YAML that is only data: no tags, no anchors, no duplicate keys, no surprises. Not here: what the data must look like (``schemas/load.py``)."""

import re
import sys
from dataclasses import dataclass, field
from typing import Any

import yaml

LARGEST_FILE = 200_000
DEEPEST = 40
LARGEST_NUMBER = 2**53  # beyond it JSON readers round

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
    """``('axes', 'prune', 'd4', 0)`` as ``axes.prune.d4[0]``; a key that is no plain word is quoted, and cut after 60 characters."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        word = part if len(part) <= 60 else part[:59] + "…"
        word = word if re.fullmatch(r"[\w…-]+", word) else repr(word)
        text += f".{word}" if text else word
    return text


@dataclass(frozen=True)
class Document:
    """The data of a file, the line of every path in it, and what is wrong with it as YAML."""

    data: Any
    lines: dict[Path_, int]
    problems: list[Problem]


def read(text: str) -> Document:
    """Parse ``text``. Where it is no YAML that we read, ``data`` is None and the problem is told; smaller ones are told all at once."""
    if len(text) > LARGEST_FILE:
        return Document(None, {}, [Problem((), f"has {len(text):,} characters", f"an experiment has at most {LARGEST_FILE:,}")])
    try:
        root = _Loader(text).get_single_node()
    except _RefusedError as refused:
        return Document(None, {}, [refused.problem])
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        return Document(
            None, {}, [Problem((), f"the character {chr(int(error.character))!r} is not allowed", "save the file as plain text", line)]
        )
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = ", ".join(filter(None, [error.context, error.problem]))
        return Document(None, {}, [Problem((), f"is not YAML: {what}", _syntax_remedy(what), mark.line + 1 if mark else None)])
    if root is None:
        return Document(None, {}, [Problem((), "is empty", "start from `assay new`")])
    reader = _Reader()
    return Document(reader.convert(root, ()), reader.lines, reader.problems)


def _syntax_remedy(what: str) -> str:
    if "'\\t'" in what:
        return "indent with spaces, not tabs"
    if "another document" in what:
        return "one experiment a file, without a second ---"
    return "check the indentation, the brackets and the quotes about here"


class _RefusedError(Exception):
    def __init__(self, message: str, remedy: str, line: int):
        self.problem = Problem((), message, remedy, line)


class _Loader(yaml.SafeLoader):
    """Refuses, while it reads, what could make a small file large or deep, or call code."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            kind = "alias *" if isinstance(event, yaml.AliasEvent) else "anchor &"
            raise _RefusedError(f"the YAML {kind}{event.anchor} is not allowed", "write it out, or make it an option of an axis", line)
        if event.tag is not None:
            raise _RefusedError(f"the YAML tag {event.tag} is not allowed", "write plain data", line)
        self.depth += 1
        if self.depth > DEEPEST:
            raise _RefusedError(f"is nested deeper than {DEEPEST} levels", "an experiment needs about ten", line)
        node = super().compose_node(parent, index)  # type: ignore[arg-type]
        self.depth -= 1
        return node


# 1e-3 is a number to every reader but YAML 1.1's, which wants 1.0e-3.
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789"))


@dataclass
class _Reader:
    """Turns nodes into data, and notes lines and problems on the way; what has a problem is read as None."""

    lines: dict[Path_, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def convert(self, node: yaml.Node, path: Path_) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.convert(child, (*path, index)) for index, child in enumerate(node.value)]
        return self._scalar(node, path)

    def _mapping(self, node: yaml.MappingNode, path: Path_) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            kind = key_node.tag.rsplit(":", 1)[-1]
            if not isinstance(key, str):
                self._tell(
                    path, f"a key of it is a {'list' if isinstance(key_node, yaml.SequenceNode) else 'mapping'}", "keys are text", line
                )
            elif kind == "merge":
                self._tell(path, "the YAML merge key << is not allowed", "write the keys out", line)
            elif kind != "str":
                self._tell(path, f"YAML reads its key {_cut(key)} as {_KINDS.get(kind, kind)}", _quoted(key), line)
            elif _SURROGATE.search(key):
                self._tell(path, "a key of it has half of a surrogate pair, which is no character", "write the character itself", line)
            elif key in result:
                first = self.lines[(*path, key)]
                self._tell((*path, key), f"is given twice, first on line {first}", "keep one, or rename one", line)
            else:
                self.lines[(*path, key)] = line
                result[key] = self.convert(value_node, (*path, key))
        return result

    def _scalar(self, node: yaml.Node, path: Path_) -> Any:
        kind, text, line = node.tag.rsplit(":", 1)[-1], str(node.value), self.lines[path]
        match kind:
            case "str" if _SURROGATE.search(text):
                return self._tell(path, "has half of a surrogate pair, which is no character", "write the character itself", line)
            case "str":
                return text
            case "null":
                return None
            case "bool":
                return yaml.SafeLoader.bool_values[text.lower()]
            case "int" | "float" if _DECIMAL[kind].fullmatch(text):
                digits = text.replace("_", "")
                value = int(digits) if kind == "int" and len(digits) < 20 else float(digits)
                if abs(value) <= (LARGEST_NUMBER if kind == "int" else sys.float_info.max):
                    return value
                return self._tell(path, f"the number {_cut(text)} is too large", f"at most 2^53; if it is text, {_quoted(text)}", line)
            case "int" | "float" if text.lower().lstrip("+-.") in ("inf", "nan"):
                return self._tell(path, f"{_cut(text)} is not a finite number", "give a finite number", line)
            case _:
                remedy = "write it in decimals; if it is text, " if kind in ("int", "float") else ""
                return self._tell(path, f"YAML reads {_cut(text)} as {_KINDS.get(kind, kind)}", remedy + _quoted(text), line)

    def _tell(self, path: Path_, message: str, remedy: str, line: int) -> None:
        self.problems.append(Problem(path, message, remedy, line))


_SURROGATE = re.compile("[\ud800-\udfff]")
_KINDS = {"null": "nothing", "bool": "yes or no", "int": "a number", "float": "a number", "timestamp": "a date", "value": "a default value"}
# Not 010, 0x10 or 1:30, which YAML 1.1 reads as 8, 16 and 90.
_DECIMAL = {
    "int": re.compile(r"[-+]?(0|[1-9][0-9_]*)"),
    "float": re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?"),
}


def _cut(text: str) -> str:
    """``text`` as it is written in the file, in backticks, on one line."""
    text = text if text.isprintable() else repr(text)[1:-1]
    return f"`{text if len(text) <= 40 else text[:39] + '…'}`"


def _quoted(text: str) -> str:
    return f'quote it: "{_cut(text)[1:-1]}"'
