"""The ground of every spec: one JSON text, closed and frozen; facts without NaN; manifests; and that schemas stay light to import."""

import json
import math
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from assay.schemas.facts import TABLES, Measurement
from assay.schemas.json_schema import experiment_json_schema
from assay.schemas.manifest import Action, FileEntry, artifact_digest
from assay.schemas.metrics import METRICS, suite_of
from assay.schemas.protocols import Divergence, Speed
from assay.schemas.pruning import PruneDepth
from assay.schemas.rounding import Quantize
from assay.schemas.spec import BaseName, HubId, Name, canonical_json, digest_of
from assay.schemas.steps import RUNTIME_STEPS, STEP_KINDS, WEIGHT_STEPS, Draft, Kv
from assay.schemas.texts import Text

SCHEMAS = Path(__file__).parents[2] / "schemas"
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def reordered(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: reordered(tree[key]) for key in reversed(tree)}
    return [reordered(each) for each in tree] if isinstance(tree, list) else tree


# --- canonical JSON --------------------------------------------------------------------------------------------------------------------------


def test_canonical_json_worked_by_hand():
    assert canonical_json({"b": [1, 2.5, None], "a": "ü"}) == '{"a":"ü","b":[1,2.5,null]}'
    assert digest_of({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"  # sha256 of "{}"


@given(tree=TREES)
def test_canonical_json_is_read_back_as_what_it_was(tree):
    assert json.loads(canonical_json(tree)) == tree


@given(tree=TREES)
def test_the_order_of_keys_does_not_count(tree):
    assert canonical_json(reordered(tree)) == canonical_json(tree)


@given(one=TREES, other=TREES)
def test_trees_that_differ_have_texts_that_differ(one, other):
    assert (canonical_json(one) == canonical_json(other)) <= (one == other)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, [1.0, {"x": math.nan}]])
def test_canonical_json_refuses_what_is_no_json(value):
    with pytest.raises(ValueError, match="Out of range float"):
        canonical_json(value)


def test_a_default_that_is_written_out_changes_no_digest():
    """And a default that is changed in the code changes every digest that rests on it, since defaults are dumped."""
    assert digest_of(Quantize(format="int4")) == digest_of(Quantize(format="int4", group_size=64, symmetric=True, head="skip"))
    assert '"group_size":64' in canonical_json(Quantize(format="int4"))
    assert digest_of(Divergence(window=64)) == digest_of(Divergence(window=64, stride=63))


# --- specs -----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [Quantize(format="int4"), PruneDepth(layers=1), Kv(format="int8"), Draft(method="ngram"), Speed()],
    ids=lambda spec: type(spec).__name__,
)
def test_a_spec_is_frozen_and_closed(spec):
    field = next(iter(type(spec).model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(spec, field, getattr(spec, field))
    with pytest.raises(ValidationError, match="Extra inputs"):
        type(spec).model_validate({**spec.model_dump(), "misspelt": 1})
    assert type(spec).model_validate_json(canonical_json(spec)) == spec


@pytest.mark.parametrize("value", ["4", 4.0, True, None])
def test_a_count_is_a_whole_number_and_nothing_that_looks_like_one(value):
    with pytest.raises(ValidationError, match="valid integer"):
        PruneDepth(layers=value)


@pytest.mark.parametrize("name", ["a", "0", "a_b", "d4_kd", "x" * 48])
def test_a_name_that_is_one(name):
    assert TypeAdapter(Name).validate_python(name) == name


@pytest.mark.parametrize("name", ["", "A", "_a", "a_", "a__b", "a-b", "a.b", "a/b", "..", "a\n", "ａ", "é", "x" * 49])
def test_a_name_that_is_none(name):
    with pytest.raises(ValidationError):
        TypeAdapter(Name).validate_python(name)


@pytest.mark.parametrize("name", ["../x", "x/..", "./x", "x", "a/b/c", "a/b\n", "/x", "-/x"])
def test_a_hub_id_that_is_none(name):
    with pytest.raises(ValidationError):
        TypeAdapter(HubId).validate_python(name)


def test_names_of_bases_and_hub_ids_as_their_makers_spell_them():
    assert TypeAdapter(BaseName).validate_python("smollm2-1.7b-instruct")
    assert TypeAdapter(HubId).validate_python("HuggingFaceTB/SmolLM2-1.7B-Instruct")


@pytest.mark.parametrize(
    ("given", "says"),
    [({}, "none of them"), ({"name": "a", "path": "b.txt"}, "name and path"), ({"hub": "a/b", "file": "x"}, "needs revision")],
)
def test_a_text_has_one_source(given, says):
    with pytest.raises(ValidationError, match=says):
        Text(**given)


def test_every_step_is_either_of_weights_or_of_running():
    assert len(STEP_KINDS) == len(set(STEP_KINDS)) == len(WEIGHT_STEPS) + len(RUNTIME_STEPS)
    assert not set(WEIGHT_STEPS) & set(RUNTIME_STEPS)


def test_a_metric_belongs_to_one_suite():
    metrics = [metric for suite in METRICS.values() for metric in suite]
    assert len(metrics) == len(set(metrics))
    assert (suite_of("kl_mean_nats"), suite_of("decode_tok_s"), suite_of("kl")) == ("divergence", "speed", None)


# --- facts and manifests ---------------------------------------------------------------------------------------------------------------------


def measurement(**given: Any) -> Measurement:
    row = {"artifact_digest": "a", "base_digest": "b", "protocol_digest": "p", "suite": "divergence", "metric": "kl_mean_nats", "value": 0.5,
           "unit": "nats", "n": 10, "run": "r", "measured_at": NOW}  # fmt: skip
    return Measurement(**{**row, **given})


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_becomes_null_and_says_so(number):
    fact = measurement(value=number)
    assert (fact.value, fact.status) == (None, "not_finite")


def test_a_standard_error_that_is_not_finite_becomes_null_and_leaves_the_value():
    fact = measurement(standard_error=math.inf)
    assert (fact.value, fact.standard_error, fact.status) == (0.5, None, "ok")


@pytest.mark.parametrize("given", [{"value": None}, {"value": 0.5, "status": "failed"}, {"value": 0.5, "status": "not_finite"}])
def test_a_value_goes_with_its_status(given):
    with pytest.raises(ValidationError, match="does not go with status"):
        measurement(**given)


def test_a_failed_value_is_null_with_a_message():
    assert measurement(value=None, status="failed", message="out of memory").value is None


def test_a_table_has_a_row_type_of_its_own_whose_fields_are_columns():
    assert len(set(TABLES.values())) == len(TABLES)
    assert all(field == field.lower() for row in TABLES.values() for field in row.model_fields)


ENTRIES = st.lists(
    st.builds(FileEntry, path=st.text("ab/", min_size=1), size_bytes=st.integers(0, 9), sha256=st.text("0af", min_size=64, max_size=64)),
    min_size=1, max_size=5, unique_by=lambda entry: entry.path,
)  # fmt: skip


@given(files=ENTRIES, data=st.data())
def test_the_order_of_files_does_not_change_an_artifacts_digest(files, data):
    assert artifact_digest(tuple(data.draw(st.permutations(files)))) == artifact_digest(tuple(files))


@given(files=ENTRIES)
def test_another_content_or_name_is_another_digest(files):
    first, *rest = files
    digest = artifact_digest(tuple(files))
    assert artifact_digest((first.model_copy(update={"sha256": "1" * 64}), *rest)) != digest
    assert artifact_digest((first.model_copy(update={"path": first.path + "c"}), *rest)) != digest
    assert artifact_digest(tuple(rest)) != digest


@pytest.mark.parametrize(
    "part",
    [
        {"step": {"kind": "kv"}},
        {"code": "c2"},
        {"parents": {"base": "e"}},
        {"data": {"text": "t"}},
        {"seed": 1},
        {"versions": {"torch": "3"}},
    ],
)
def test_every_part_of_an_action_is_in_its_key(part):
    action = Action(step={}, code="c")
    assert action.model_copy(update=part).key != action.key


# --- the JSON Schema, and imports ------------------------------------------------------------------------------------------------------------


def test_the_json_schema_beside_the_schemas_is_current():
    """`assay schema > schemas/experiment.schema.json` makes it so."""
    assert (SCHEMAS / "experiment.schema.json").read_text(encoding="utf-8") == json.dumps(experiment_json_schema(), indent=2) + "\n"


def test_the_json_schema_offers_an_editor_every_key_and_choice():
    schema = experiment_json_schema()
    assert set(schema["properties"]) >= {"name", "base", "axes", "grid", "measure", "budgets"}
    assert "for" in schema["$defs"]["Budget"]["properties"]
    assert "where" not in schema["$defs"]["Budget"]["properties"]
    assert {kind["properties"]["kind"]["const"] for kind in schema["$defs"].values() if "kind" in kind["properties"]} == set(STEP_KINDS)
    for name, each in schema["$defs"].items():
        assert each["additionalProperties"] is False
        assert each["description"], name
        for tag in {"kind", "suite"} & each["properties"].keys():
            assert tag in each["required"], f"an editor takes a {name} without its {tag} for one of another"


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """As much of JSON Schema as ours uses, written down again."""
    root = experiment_json_schema()
    if "$ref" in schema:
        return conforms(value, root["$defs"][schema["$ref"].rsplit("/", 1)[-1]])
    if "anyOf" in schema:
        return any(conforms(value, each) for each in schema["anyOf"])
    if "oneOf" in schema:
        return sum(conforms(value, each) for each in schema["oneOf"]) == 1
    if "const" in schema or "enum" in schema:
        return value in schema.get("enum", [schema.get("const")])
    match schema["type"]:
        case "object":
            if not isinstance(value, dict) or set(schema.get("required", [])) - value.keys():
                return False
            known, pattern = schema.get("properties", {}), next(iter(schema.get("patternProperties", {}).values()), None)
            return all((inner := known.get(key, pattern)) is not None and conforms(each, inner) for key, each in value.items())
        case "array":
            return isinstance(value, list) and all(conforms(each, schema["items"]) for each in value)
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer" | "number":
            number = isinstance(value, int | float) and not isinstance(value, bool)
            return number and schema.get("minimum", value) <= value <= schema.get("maximum", value)
        case _:
            return isinstance(value, str)


def test_the_good_experiment_and_each_of_ours_conforms_to_the_json_schema(good):
    files = sorted((SCHEMAS.parent / "assets" / "experiments").glob("*.yaml"))
    for text in [good, *(file.read_text(encoding="utf-8") for file in files)]:
        assert conforms(yaml.safe_load(text), experiment_json_schema())
    wrong = yaml.safe_load(good)
    wrong["axes"]["prune"]["d1"][0]["layers"] = "one"
    assert not conforms(wrong, experiment_json_schema())


def test_every_module_of_schemas_is_light():
    """A step starts in 2 s instead of 8 because declaring an experiment imports no framework."""
    modules = [f"assay.schemas.{file.stem}" for file in sorted(SCHEMAS.glob("*.py"))]
    heavy = ["torch", "transformers", "dagster", "duckdb", "polars", "pyarrow", "numpy", "huggingface_hub"]
    code = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\nprint([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
    assert len(modules) >= 10
