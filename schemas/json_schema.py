"""What an experiment file may say, as a JSON Schema: for completion in an editor, and for errors that say what would work.

Not here: the models themselves (``schemas/experiment.py``), or judging a file (``schemas/load.py``).
"""

from functools import cache
from typing import Any

from assay.schemas.experiment import ExperimentFile

DIALECT = "https://json-schema.org/draft/2020-12/schema"


@cache
def experiment_json_schema() -> dict[str, Any]:
    """The JSON Schema of an experiment file; it says outright what pydantic leaves to its validators (see :func:`_outright`)."""
    schema = _outright(ExperimentFile.model_json_schema(by_alias=True))
    return {"$schema": DIALECT, **schema, "title": "Assay experiment"}


def _outright(schema: Any) -> Any:
    """No keys but names, ``kind`` and ``suite`` are written, what has no value is left out and not null; and no titles, which repeat the keys."""
    if isinstance(schema, list):
        return [_outright(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _outright(value) for key, value in schema.items()}
    branches = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if len(branches) == 1:
        del schema["anyOf"]
        schema |= branches[0]
    if "patternProperties" in schema:
        schema["additionalProperties"] = False
    if schema.get("type") == "object" and "properties" in schema:
        fields = schema["properties"]
        tags = [key for key in ("kind", "suite") if "const" in fields.get(key, {})]
        schema["required"] = [*tags, *schema.get("required", ())]
        for field in fields.values():
            field.pop("title", None)
            if field.get("default") is None or isinstance(field["default"], dict):
                field.pop("default", None)
    return schema
