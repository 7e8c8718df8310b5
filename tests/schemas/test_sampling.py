"""Sampling as a protocol says it: ranges, messages, and that it says no more and no less than the op takes."""

import dataclasses
import json
from typing import get_args

import pytest
from pydantic import ValidationError

from assay.schemas.sampling import SamplingSpec
from assay.schemas.spec import digest_of


def read(**given):
    """As a YAML file is read: through JSON."""
    return SamplingSpec.model_validate_json(json.dumps(given))


def test_the_default_is_greedy_and_the_shortest_spec_reads_as_it_is_written():
    assert SamplingSpec().greedy and SamplingSpec().temperature == 0
    found = read(temperature=0.8, top_p=0.95, order="vllm")
    assert (found.temperature, found.top_p, found.order, found.greedy) == (0.8, 0.95, "vllm", False)
    assert read(temperature=1, logit_bias=[[5, -2], [7, 1.5]]).logit_bias == ((5, -2.0), (7, 1.5))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"top_p": 0}, "greater than 0"),
        ({"top_p": 1.2}, "less than or equal to 1"),
        ({"temperature": -0.1}, "greater than or equal to 0"),
        ({"temperature": "0.8"}, "valid number"),
        ({"min_p": 1.01}, "less than or equal to 1"),
        ({"typical_p": 0}, "greater than 0"),
        ({"top_k": -1}, "greater than or equal to 0"),
        ({"top_k": 2.5}, "valid integer"),
        ({"repetition_penalty": 0}, "greater than 0"),
        ({"logit_bias": [[1, 2], [1, 3]]}, "the id 1 has more than one bias"),
        ({"logit_bias": [[-1, 2]]}, "greater than or equal to 0"),
        ({"order": "llama.cpp"}, "'transformers' or 'vllm'"),
        ({"topp": 0.9}, "Extra inputs"),
    ],
)
def test_what_is_out_of_range_or_unknown_is_refused_where_it_stands(wrong, told):
    with pytest.raises(ValidationError) as error:
        read(**wrong)
    (problem,) = error.value.errors()
    assert problem["loc"][0] == next(iter(wrong)) and told in problem["msg"]


def test_the_spec_has_the_fields_orders_and_defaults_of_the_op():
    from assay.ops.decode.sampling import ORDERS, Sampling

    defaults = {field.name: field.default for field in dataclasses.fields(Sampling)}
    assert SamplingSpec().model_dump() == defaults
    assert get_args(SamplingSpec.model_fields["order"].annotation) == tuple(ORDERS)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"temperature": 10, "top_k": 10_000_000, "min_p": 1, "order": "vllm"},
        {"repetition_penalty": 0.001, "presence_penalty": -100, "frequency_penalty": 100, "typical_p": 0.001, "top_p": 1e-9},
        {"logit_bias": [[0, -1000], [10_000_000, 1000]], "count_prompt": False},
    ],
)
def test_whatever_the_spec_allows_the_op_takes(given):
    from assay.ops.decode.sampling import Sampling

    spec = read(**given)
    assert Sampling(**spec.model_dump()).greedy == spec.greedy


def test_a_default_that_is_written_out_changes_no_digest_and_a_value_does():
    assert digest_of(read(temperature=0.0, top_k=0)) == digest_of(SamplingSpec())
    assert digest_of(read(temperature=0.5)) != digest_of(read(temperature=0.51))
