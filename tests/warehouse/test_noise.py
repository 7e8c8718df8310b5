"""How much a number moves by chance alone, as a fact: which protocols count as the same, and what becomes of a difference below the floor."""

import json

import pytest

from assay.schemas.facts import ProtocolRow
from assay.warehouse.database import connect

SPEC = {"suite": "choice", "tasks": ["piqa"], "seed": 0, "batch": 8, "dtype": "float32"}


@pytest.fixture
def two(store, make_variant):
    store.append("variant", [make_variant("base", steps=0, experiment="e", artifact_digest="base"), make_variant("int4", experiment="e")])
    return store


@pytest.fixture
def measure(two, make_fact):
    """Write one fact of one artifact under a protocol with this spec, whose name is its digest."""

    def write(artifact, value, protocol="p", *, metric="accuracy", **changes):
        fact = {key: changes.pop(key) for key in ("device_digest", "standard_error", "base_digest", "threads", "status") if key in changes}
        spec = {**SPEC, **changes}
        two.append("protocol", [ProtocolRow(protocol_digest=protocol, name=protocol, suite=spec["suite"], spec_json=json.dumps(spec))])
        two.append("measurement", [make_fact(metric, value, artifact_digest=artifact, protocol_digest=protocol, suite=spec["suite"], unit="1", **fact)])  # fmt: skip

    return write


def ask(store, query):
    with connect(store.root) as connection:
        return connection.sql(query).fetchall()


@pytest.mark.parametrize(("change", "differs"), [
    ({"seed": 1}, "seed"), ({"batch": 16}, "batch"), ({"dtype": "bfloat16"}, "dtype"), ({"seed": 1, "dtype": "bfloat16"}, "seed+dtype"),
    ({"tasks": ["mmlu"]}, None), ({"shots": 2}, None), ({"suite": "needle"}, None), ({}, None),
])  # fmt: skip
def test_two_ways_that_differ_only_in_seed_batch_or_dtype_measure_the_noise(measure, two, change, differs):
    measure("base", 0.5)
    measure("base", 0.625, "q", **change)
    measure("int4", 0.25)  # once only: no floor of its own
    floors = ask(two, "SELECT artifact_digest, protocol_digest, differs, floor FROM noise_floor ORDER BY ALL")
    assert floors == ([] if differs is None else [("base", name, differs, 0.125) for name in ("p", "q")])


def test_the_largest_of_several_is_the_floor(measure, two):
    for at, value in enumerate((0.5, 0.53125, 0.4375)):
        measure("base", value, f"p{at}", seed=at)
    assert ask(two, "SELECT protocol_digest, floor, twins FROM noise_floor ORDER BY ALL") == [
        ("p0", 0.0625, 2),
        ("p1", 0.09375, 2),
        ("p2", 0.09375, 2),
    ]


def test_what_failed_or_is_noisy_is_no_floor(measure, two):
    measure("base", 0.5)
    measure("base", None, "q", seed=1, status="failed")
    measure("base", 0.9, "r", seed=2, status="noisy")
    assert ask(two, "FROM noise_floor") == []


def test_the_batch_of_a_timing_is_what_it_measures_and_its_repeats_are_its_noise(measure, two):
    """Two standard errors of the difference of two such timings: 2 · √2 · 0.5."""
    timed = {"metric": "decode_tok_s", "suite": "speed", "device_digest": "d", "threads": 2, "standard_error": 0.5}
    measure("base", 20.0, **timed)
    measure("base", 90.0, "q", batch=16, **timed)
    assert ask(two, "SELECT DISTINCT differs, floor FROM noise_floor") == [("repeats", pytest.approx(2**0.5))]


def test_timings_of_two_machines_are_not_the_same_thing_twice(measure, two):
    timed = {"metric": "decode_tok_s", "suite": "speed"}
    measure("base", 20.0, device_digest="d1", **timed)
    measure("base", 50.0, "q", dtype="bfloat16", device_digest="d2", **timed)
    assert ask(two, "FROM noise_floor") == []


def test_the_base_beside_itself_is_the_floor_of_divergences(measure, two):
    """What should be 0, or 1 for an agreement, is off by the engine alone. A perplexity has no such value, and the divergence of a variant is none."""
    for metric, value in (("kl_mean_nats", 1e-7), ("top1_agreement", 0.9375), ("perplexity", 20.0)):
        measure("base", value, metric=metric, suite="divergence", base_digest="base")
        measure("int4", value, metric=metric, suite="divergence", base_digest="base")
    assert ask(two, "SELECT artifact_digest, metric, differs, floor FROM noise_floor ORDER BY metric") == [
        ("base", "kl_mean_nats", "itself", 1e-7),
        ("base", "top1_agreement", "itself", 0.0625),
    ]


@pytest.mark.parametrize(("value", "above", "shown"), [(0.5625, False, 0), (0.375, False, 0), (0.75, True, 0.25), (0.25, True, -0.25)])
def test_a_difference_from_the_base_below_its_floor_is_shown_as_none(measure, two, value, above, shown):
    """The base moves by 0.125 with another seed; the floor itself is not above it."""
    measure("base", 0.5)
    measure("int4", value)
    query = "SELECT difference, noise_floor, above_noise, difference_shown FROM versus_base WHERE metric = 'accuracy' AND protocol = 'p'"
    assert ask(two, query) == [(value - 0.5, None, None, value - 0.5)]  # nothing is known of noise
    measure("base", 0.625, "q", seed=1)
    assert ask(two, query) == [(value - 0.5, 0.125, above, shown)]


def test_the_floor_of_another_artifact_stands_in_where_neither_was_measured_twice(measure, two, make_variant):
    two.append("variant", [make_variant("int3", experiment="e")])
    measure("base", 0.5)
    measure("int4", 0.625)
    measure("int3", 0.25)
    measure("int3", 0.5, "q", batch=1)
    floors = ask(two, "SELECT variant, noise_floor, above_noise FROM versus_base WHERE protocol = 'p' ORDER BY variant")
    assert floors == [("int3", 0.25, False), ("int4", 0.25, False)]


def test_a_spec_that_is_no_json_object_has_no_twin(two, make_fact):
    for name, spec in (("p", "not json"), ("q", "[]"), ("r", "{}"), ("s", "{}")):
        two.append("protocol", [ProtocolRow(protocol_digest=name, name=name, suite="choice", spec_json=spec)])
        two.append("measurement", [make_fact("accuracy", 0.5, artifact_digest="base", suite="choice", protocol_digest=name)])
    assert ask(two, "FROM noise_floor") == []
