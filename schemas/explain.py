"""pydantic's errors in the words of the file: where, what came, what would work. One problem a place.

What would work is read from the JSON Schema, so that a new step or protocol explains itself. Not here: any rule.
"""

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter, ValidationError

from assay.schemas.experiment import NAME, OTHER
from assay.schemas.json_schema import experiment_json_schema
from assay.schemas.spec import Name
from assay.schemas.yaml import Path_, Problem

NAME_PATTERN = TypeAdapter(Name).json_schema()["pattern"]
NAME_RULE = "at most 48 lower-case letters and digits, joined by single underscores"
TAGS = ("kind", "suite")  # the keys that say which of several forms a mapping has

DID_YOU_MEAN, MISSING = "did you mean ", "is missing"

Schema = dict[str, Any]


def explain(error: ValidationError, data: Any) -> list[Problem]:
    """Every problem that pydantic found in ``data``, once a place; a key that is missing because it is misspelt is one problem, not two."""
    found: dict[Path_, Problem] = {}
    meant: set[Path_] = set()
    for each in error.errors(include_url=False):
        problem = _problem(each, data)
        found.setdefault(problem.path, problem)
        if each["type"] == "extra_forbidden" and problem.remedy.startswith(DID_YOU_MEAN):
            meant.add((*problem.path[:-1], problem.remedy.removeprefix(DID_YOU_MEAN).rstrip("?")))
    return [problem for path, problem in found.items() if path not in meant or not problem.message.startswith(MISSING)]


def unknown(what: str, name: Any, known: Iterable[str]) -> tuple[str, str]:
    """The message and the remedy for a name that stands for nothing."""
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    listed = f"{', '.join(names[:20])}{', …' if len(names) > 20 else ''}"
    return (
        f"no {what} is named {shown(name)}",
        f"{DID_YOU_MEAN}{close[0]}?" if close else f"there is {listed}" if names else "there is none",
    )


def shown(value: Any, longest: int = 60) -> str:
    """``value`` on one line of at most ``longest`` characters, as JSON, so that text and numbers look different."""
    text = json.dumps(value, ensure_ascii=not str(value).isprintable(), default=str)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _problem(error: Any, data: Any) -> Problem:
    kind, value = error["type"], error.get("input")
    path = _path(error["loc"], data)
    if path[-1] == "[key]" and kind.startswith("string"):  # pydantic's word for the key itself
        path = path[:-1]
        return Problem(path, f"{shown(path[-1])} is no name; expected {NAME_RULE}", _as_name(str(path[-1])))
    if kind == "value_error":
        message, _, remedy = str(error["ctx"]["error"]).partition("; ")
        return Problem(path, message, remedy)
    if kind == "extra_forbidden":
        known = list(dict.fromkeys(key for schema in _at(path[:-1], data) for key in schema.get("properties", ())))
        close = difflib.get_close_matches(str(path[-1]), known, n=1)
        return Problem(path, "is no key of this mapping", f"{DID_YOU_MEAN}{close[0]}?" if close else f"the keys are {', '.join(known)}")
    schemas = _at(path, data)
    tag = next((tag for tag in TAGS if isinstance(value, dict) and kind.startswith("union_tag") and _tags(schemas, tag)), None)
    if tag and tag in value:
        return Problem((*path, tag), *unknown(tag, value[tag], _tags(schemas, tag)))
    if tag:
        return Problem(path, f"has no {tag}", f"write {tag}: {_either(_tags(schemas, tag))}")
    expected = _expected(schemas)
    if kind == "missing":
        return Problem(path, MISSING, f"expected {expected}")
    close = difflib.get_close_matches(str(value), [str(each) for schema in schemas for each in _choices(schema)], n=1)
    remedy = f"{DID_YOU_MEAN}{close[0]}?" if close and close[0] != value else _hint(value, schemas)
    return Problem(path, f"got {_summary(value)}; expected {expected}", remedy)


def _path(loc: tuple[str | int, ...], data: Any) -> Path_:
    """pydantic's location as a path in ``data``: without the names of union branches."""
    path: list[str | int] = []
    for part in loc:
        if part in (NAME, OTHER) and not (isinstance(data, dict) and part in data):
            continue
        path.append(part)
        data = _inside(data, part)
    tag = {"axes": 4, "measure": 2}.get(str(loc[0]), len(path))  # where pydantic names the kind of a step, the suite of a protocol
    del path[tag : tag + 1]
    return tuple(path)


def _inside(data: Any, part: str | int) -> Any:
    try:
        return data[part]
    except (KeyError, IndexError, TypeError):
        return None


# --- the JSON Schema at a path ---------------------------------------------------------------------------------------------------------------


def _at(path: Path_, data: Any) -> list[Schema]:
    """What may stand at ``path``: one schema a form; where the data there show which form is meant, that one."""
    found = _forms(experiment_json_schema())
    for part in path:
        found = [form for schema in _meant(found, data) if (child := _child(schema, part)) for form in _forms(child)]
        data = _inside(data, part)
    return _meant(found, data)


def _forms(schema: Schema) -> list[Schema]:
    if "$ref" in schema:
        schema = {**experiment_json_schema()["$defs"][str(schema["$ref"]).rsplit("/", 1)[-1]], "description": schema.get("description", "")}
    about = {"description": schema["description"]} if "description" in schema else {}
    branches = schema.get("oneOf") or schema.get("anyOf")
    return [form | about for branch in branches for form in _forms(branch)] if branches else [schema]


def _child(schema: Schema, part: str | int) -> Schema:
    if isinstance(part, int):
        return schema.get("items", {})
    return schema.get("properties", {}).get(part) or next(iter(schema.get("patternProperties", {}).values()), {})


def _meant(schemas: list[Schema], value: Any) -> list[Schema]:
    if not isinstance(value, dict):
        return schemas
    mappings = [schema for schema in schemas if schema.get("type") == "object"]
    tagged = [
        schema
        for schema in mappings
        for tag in TAGS
        if tag in value and value[tag] == schema.get("properties", {}).get(tag, {}).get("const")
    ]
    return tagged or mappings or schemas


def _tags(schemas: list[Schema], tag: str) -> list[str]:
    return [const for schema in schemas if (const := schema.get("properties", {}).get(tag, {}).get("const"))]


def _choices(schema: Schema) -> list[Any]:
    return schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else []


# --- in words --------------------------------------------------------------------------------------------------------------------------------


def _expected(schemas: list[Schema]) -> str:
    about = next((schema["description"] for schema in schemas if schema.get("description")), "")
    tags = [f"a mapping with {tag}: {_either(consts)}" for tag in TAGS if (consts := _tags(schemas, tag))]
    rest = [_one(schema) for schema in schemas if not any(_tags([schema], tag) for tag in TAGS)]
    return _either([*rest, *tags]) + (f" ({about})" if about else "")


def _one(schema: Schema) -> str:
    if choices := _choices(schema):
        return _either(choices)
    match schema.get("type"):
        case "integer":
            return f"a whole number{_bounds(schema)}"
        case "number":
            return f"a number{_bounds(schema)}"
        case "boolean":
            return "true or false"
        case "string" if schema.get("pattern") == NAME_PATTERN:
            return f"a name of {NAME_RULE}"
        case "string":
            longest = f" of at most {schema['maxLength']:,} characters" if "maxLength" in schema else ""
            return f"text{longest}" + (
                f" that matches {schema['pattern']}" if "pattern" in schema and not schema.get("description") else ""
            )
        case "array":
            least, most = schema.get("minItems", 0), schema.get("maxItems")
            return "a list" + (f" of {least} to {most:,}" if most else " that is not empty" if least else "")
        case "object" if keys := schema.get("properties"):
            return f"a mapping with {_either(keys)}"
    return "a mapping" + (f" of {schema['minProperties']} to {schema['maxProperties']}" if "maxProperties" in schema else "")


def _bounds(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum", schema.get("exclusiveMaximum", 0) - 1)
    if low is None:
        return ""
    return f" from {low:,} to {high:,}" if high >= low else f" of at least {low:,}"


def _either(choices: Iterable[Any]) -> str:
    words = [str(choice) for choice in choices]
    return " or ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def _summary(value: Any) -> str:
    return f"{shown(value)} ({len(value):,} of them)" if isinstance(value, list | dict) and len(value) > 10 else shown(value)


def _hint(value: Any, schemas: list[Schema]) -> str:
    """What to write in the place of ``value``, where it is nearly right."""
    types = {schema.get("type") for schema in schemas}
    if isinstance(value, str) and types & {"integer", "number", "boolean"}:
        plain = value.replace(".", "", 1).removeprefix("-").isdigit() or value in ("true", "false")
        return f"write {value} without quotes" if plain else ""
    if isinstance(value, float) and value.is_integer() and types == {"integer"}:
        return f"write {int(value)}"
    if isinstance(value, str) and any(schema.get("pattern") == NAME_PATTERN for schema in schemas):
        return _as_name(value)
    if value is not None and not isinstance(value, list) and types == {"array"}:
        return "put it in [ ]"
    if isinstance(value, int | float) and types == {"string"}:
        return f'quote it: "{value}"'
    return ""


def _as_name(text: str) -> str:
    name = re.sub("[^a-z0-9]+", "_", text.lower())[:48].strip("_")
    return f"for example {name}" if name and name != text else ""
