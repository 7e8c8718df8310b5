"""The protocol ``constrained``: what a prompt may be, and that it parses from a file."""

import pytest
from pydantic import ValidationError

from assay.schemas.protocols import Constrained, ConstrainedPrompt
from assay.schemas.spec import digest_of


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "this one has none"),
        ({"regex": "a", "json_schema": "{}"}, "this one has both"),
        ({"json_schema": "{"}, "no JSON text"),
        ({"json_schema": "[]"}, "no object"),
    ],
)
def test_a_prompt_has_one_language(given, says):
    with pytest.raises(ValidationError, match=says):
        ConstrainedPrompt(prompt="x", **given)


@pytest.mark.parametrize(
    "wrong", [{"temperature": 0.0}, {"temperature": -1.0}, {"samples": 0}, {"max_new_tokens": 0}, {"exact_prefixes": -1}]
)
def test_parameters_out_of_range_are_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Constrained(**wrong)


def test_the_order_of_keys_of_a_schema_makes_another_protocol():
    """The keys of an answer come in it."""
    one, two = (
        Constrained(prompts=(ConstrainedPrompt(prompt="x", json_schema=schema),))
        for schema in ('{"properties": {"a": {}, "b": {}}}', '{"properties": {"b": {}, "a": {}}}')
    )
    assert digest_of(one) != digest_of(two)


def test_it_is_read_from_a_file_with_a_name_of_its_own(parse, good):
    text = good.replace(
        "divergence, bytes,", "bytes, {suite: constrained, name: short, prompts: [{prompt: 'Well?', regex: 'Yes|No', expected: 'Yes'}]},"
    )
    protocol = parse(text.replace("metric: kl_mean_nats", "metric: constrained_tv")).protocols["short"]
    assert isinstance(protocol, Constrained) and protocol.prompts[0].regex == "Yes|No" and hash(protocol)


def test_a_prompt_without_a_language_is_told_with_its_place(parse, good):
    with pytest.raises(ValueError, match=r"measure\[1\]\.prompts\[0\]"):
        parse(good.replace("divergence, bytes,", "bytes, {suite: constrained, prompts: [{prompt: 'Well?'}]},"))
