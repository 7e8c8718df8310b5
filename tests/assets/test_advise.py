"""The planner: predictions against what was measured, the ranking, what it leaves out and why, and that the file it writes asks for what is missing."""

import json
from typing import Any

import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

from assay.assets import advice_text, cli
from assay.assets.advise import advise, arithmetic, in_four_bits
from assay.assets.devices import machine
from assay.assets.footprints import Unknown, decoder_of, measured_footprint, predicted_footprint
from assay.assets.planner import plan_of_base, plan_of_shape
from assay.assets.registry import load_registries, shape_from_config
from assay.assets.settle import dump, settle_file
from assay.assets.workspace import Workspace
from assay.definitions import OWN_EXPERIMENTS
from assay.ops.cost import device as measuring
from assay.ops.cost.plan import Footprint, batch_that_fits, memory_bytes, order, predict
from assay.schemas.base import Base
from assay.schemas.load import load_experiment
from assay.schemas.steps import Step

ASKED: dict[str, Any] = {"goal": "latency", "context": 64, "batch": 1, "device": "h200", "memory_gib": None, "at_most_kl": None}
STEPS: TypeAdapter[Any] = TypeAdapter(Step)
SMOL = load_registries().bases["smollm2-135m-instruct"]


def steps(*told: dict[str, Any]) -> tuple[Step, ...]:
    return tuple(STEPS.validate_json(json.dumps(each)) for each in told)


@pytest.fixture
def measured(finished: Workspace) -> Workspace:
    """A workspace whose one experiment has been run."""
    (finished.experiment_places[0] / "small.yaml").unlink()
    return finished


def name_of_base(bench: Workspace) -> str:
    return bench.experiment("tiny").base.name


def test_a_prediction_worked_by_hand():
    """100 B of weights and 2 texts of 10 tokens of 5 B at 100 B/s are 2 s; 2 · (2 · 50 + 3 · 10) FLOPs at 1,000 a second are 0.26 s."""
    footprint = Footprint(120, 100, 50, 3, 5)
    found = predict(footprint, context=10, batch=2, bandwidth=lambda _: 100.0, rate=1000.0)
    assert (found.forward_seconds, found.seconds_per_token, found.tokens_per_second, found.limit) == (2.0, 2.0, 1.0, "weights")
    assert found.memory_bytes == memory_bytes(footprint, context=10, batch=2) == 220
    assert [batch_that_fits(footprint, memory, context=10) for memory in (100, 169, 170, 220)] == [0, 0, 1, 2]
    drafted = footprint._replace(tokens_per_forward=2.5, proposals=3, draft_weight_bytes=10, draft_parameters=5)
    found = predict(drafted, context=10, batch=2, bandwidth=lambda _: 100.0, rate=1000.0)
    assert found.forward_seconds == pytest.approx(2 + 3 * 0.1) and found.seconds_per_token == pytest.approx(2.3 / 2.5)
    open_ = predict(drafted._replace(tokens_per_forward=None), context=10, batch=2, bandwidth=lambda _: 100.0, rate=1000.0)
    assert (
        open_.seconds_per_token is None
        and order(open_, "latency") == order(open_, "throughput") == float("inf")
        and order(open_, "memory") == 220
    )


def test_predicted_bytes_of_a_base_and_of_its_int4_are_those_of_the_article_s_arithmetic():
    assert SMOL.shape is not None
    base, int4 = (predicted_footprint(SMOL, steps(*each)) for each in ((), ({"kind": "quantize", "format": "int4", "group_size": 64},)))
    assert isinstance(base, Footprint) and isinstance(int4, Footprint)
    blocks, head = decoder_of(SMOL.shape).block_parameters, 49_152 * 576
    assert base.size_bytes == 2 * (blocks + head) and int4.size_bytes == blocks * 4.25 / 8 + 2 * head
    assert base.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2


def test_predicted_bytes_of_2_of_4_leave_scales_whole():
    assert SMOL.shape is not None
    blocks, head = decoder_of(SMOL.shape).block_parameters, 2 * 49_152 * 576
    fours, pack = {"kind": "prune_weights", "method": "sparsegpt", "pattern": "2:4"}, {"kind": "pack"}
    joint = {**fours, "quantize": {"format": "int8", "group_size": 64}}
    for told, bits in [
        ((fours, pack), 9), ((fours, {"kind": "quantize", "format": "int8"}, pack), 5.25), ((joint,), 8.25), ((joint, pack), 5.25),
    ]:  # fmt: skip
        found = predicted_footprint(SMOL, steps(*told))
        assert isinstance(found, Footprint) and found.size_bytes == blocks * bits / 8 + head


@pytest.mark.parametrize(("told", "why"), [
    ([{"kind": "draft", "method": "variant", "early_exit": 2}], "its draft is a model"),
    ([{"kind": "rotate"}], "what rotate leaves is known once it is built"),
    ([{"kind": "quantize", "method": "e8"}], "what quantize leaves"),
])  # fmt: skip
def test_what_cannot_be_told_beforehand_is_said_to_be_unknown(told, why):
    found = predicted_footprint(SMOL, steps(*told))
    assert isinstance(found, Unknown) and why in found.why
    assert isinstance(predicted_footprint(Base(name="x", path="."), ()), Unknown)


def test_predicted_footprints_are_those_that_are_measured_once_it_is_built(measured: Workspace):
    """Norms, and the shapes that a packed tensor stores, are all that a prediction leaves out."""
    base = measured.experiment("tiny").base
    base = base.model_copy(
        update={"shape": shape_from_config(json.loads((measured.experiment_places[0] / "base" / "config.json").read_text()))}
    )
    advice = advise(measured, base=name_of_base(measured), **ASKED)
    compared = 0
    for each in advice.ranked:
        predicted, counted = predicted_footprint(base, each.variant.steps), measured_footprint(each.facts, each.variant.steps)
        if isinstance(predicted, Footprint) and counted is not None:
            compared += 1
            assert predicted.size_bytes == pytest.approx(counted.size_bytes, rel=0.03)
            assert predicted.step_weight_bytes == pytest.approx(counted.step_weight_bytes, rel=0.03)
            assert predicted[2:5] == counted[2:5]
    assert compared >= 6


def test_finished_variants_are_ranked_by_measured_bytes_and_acceptance(measured: Workspace):
    advice = advise(measured, base=name_of_base(measured), **ASKED)
    assert not advice.unknown and not advice.too_large and {each.how for each in advice.ranked} == {"measured"}
    assert all(not each.missing for each in advice.ranked)
    times = {each.variant.slug: each.prediction for each in advice.ranked}
    assert [order(each.prediction, "latency") for each in advice.ranked] == sorted(
        order(each.prediction, "latency") for each in advice.ranked
    )
    plain, drafted = times["none__none__none"], times["none__none__ngram"]
    rounds = next(each.facts["tokens_per_round"] for each in advice.ranked if each.variant.slug == "none__none__ngram")
    assert drafted.seconds_per_token == pytest.approx(plain.forward_seconds / rounds, rel=1e-6)  # bound by memory: verification is free
    assert times["none__int4__none"].forward_seconds < plain.forward_seconds
    told = advice_text.told(advice)[0]
    assert "Everything ranked has been measured." in told.sentences and len(told.rows) == len(advice.ranked)


def test_a_bound_on_the_divergence_takes_out_what_is_measured_to_be_beyond_it(measured: Workspace):
    advice = advise(measured, base=name_of_base(measured), **{**ASKED, "at_most_kl": 1e-9})
    assert {each.variant.slug.split("__")[:2] == ["none", "none"] for each in advice.ranked} == {True}
    assert advice.too_far and all((each.kl or 0) > 1e-9 for each in advice.too_far)


def test_what_does_not_fit_is_left_out_and_the_ways_to_keep_kv_are_told(measured: Workspace):
    advice = advise(measured, base=name_of_base(measured), **{**ASKED, "context": 10**6, "memory_gib": 0.1})
    assert not advice.ranked and advice.too_large
    titles = [part.title for part in advice_text.told(advice)]
    assert "Keys and values" in titles


def test_for_throughput_each_variant_is_given_as_many_texts_as_fit(measured: Workspace):
    asked = {**ASKED, "goal": "throughput", "context": 1000, "batch": 10_000, "memory_gib": 0.1}
    found = {each.variant.slug: each for each in advise(measured, base=name_of_base(measured), **asked).ranked}
    base = found["none__none__none"]
    assert base.prediction is not None and isinstance(base.footprint, Footprint)
    left = 0.1 * 2**30 - base.footprint.size_bytes
    assert base.prediction.batch == int(left // (1000 * base.footprint.kv_bytes_per_token)) and base.prediction.memory_bytes <= 0.1 * 2**30


def test_unbuilt_variants_are_predicted_and_the_file_that_settles_them_asks_for_the_same_steps(bench: Workspace):
    advice = advise(bench, base=name_of_base(bench), **{**ASKED, "at_most_kl": 0.1, "batch": 4})
    assert {each.how for each in advice.ranked} == {"predicted"} and {each.variant.slug for each in advice.unknown} >= {
        "none__none__sibling"
    }
    file = bench.experiment_places[0] / "settle.yaml"
    parts, written = plan_of_base(bench, base=name_of_base(bench), write=file, top=5, **{**ASKED, "at_most_kl": 0.1, "batch": 4})
    assert written == file and "Not measured yet: bytes of" in " ".join(parts[0].sentences)
    study = load_experiment(file, bench.registries)
    wanted = [each.variant.steps for each in [*advice.ranked, *advice.unknown] if each.missing and each.variant.steps]
    assert sum(variant.steps in wanted for variant in study.variants) >= 5
    assert study.budgets and {protocol.suite for protocol in study.protocols.values()} >= {"divergence", "bytes", "speed"}
    own = next(iter(bench.experiment("tiny").protocols.values()))
    assert next(each for each in study.protocols.values() if each.suite == "divergence").tokens == own.tokens  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="is there already"):
        plan_of_base(bench, base=name_of_base(bench), write=file, top=5, **ASKED)


def test_nothing_to_settle_is_said(measured: Workspace):
    with pytest.raises(ValueError, match="nothing is missing"):
        settle_file(measured, advise(measured, base=name_of_base(measured), **ASKED), measured.experiment_places[0] / "settle.yaml")


@pytest.mark.parametrize("file", sorted(OWN_EXPERIMENTS.glob("*.yaml")), ids=lambda file: file.stem)
def test_steps_are_written_as_they_are_read(file):
    experiment = load_experiment(file, load_registries())
    for options in experiment.axes.values():
        for chain in options.values():
            for step in chain:
                assert STEPS.validate_json(json.dumps(dump(step, file.parent))) == step


def test_products_run_in_the_dtype_of_rounded_inputs_alone():
    w4, w8a8 = ({"kind": "quantize", "format": "int4"}, {"kind": "quantize", "format": "int8", "inputs": {"format": "int8"}})
    assert [arithmetic(steps(each)) for each in (w4, w8a8)] == ["bfloat16", "int8"] and arithmetic(()) == "bfloat16"


def test_kv_does_not_fit_an_8b_with_128k_on_24_gib(tmp_path):
    """Published: 16 GB of weights and 16 of keys and values; FP8 for them is what makes the context fit."""
    parts = {
        part.title: part
        for part in plan_of_shape(Workspace(tmp_path, ()), shape="8b", to=None, context=131_072, batch=1, device="rtx4090", memory_gib=24.0)
    }
    rows = {row[0]: row for row in parts["Keys and values"].rows}
    assert rows["bfloat16"][1:4] == ("128.0", "16.00", "74,080 / 0") and rows["fp8_e4m3"][2:4] == ("8.00", "148,160 / 1")
    assert rows["int4, groups of 32"][2] == "5.00"
    assert "With bfloat16 (14.96 GiB): 6.96 GiB too many" in " ".join(parts["Keys and values"].sentences)


def test_70b_to_8b_costs_what_is_published(tmp_path):
    *_, shrink = plan_of_shape(Workspace(tmp_path, ()), shape="70b", to="8b", context=1024, batch=1, device="h100", memory_gib=None)
    told = " ".join(shrink.sentences)
    assert "2.93 times the student's training" in told and "85 times fewer tokens" in told
    with pytest.raises(ValueError, match="name a smaller one"):
        plan_of_shape(Workspace(tmp_path, ()), shape="8b", to="70b", context=1, batch=1, device="h100", memory_gib=None)
    with pytest.raises(ValueError, match="there are 70b, 8b, 15b"):
        plan_of_shape(Workspace(tmp_path, ()), shape="9b", to=None, context=1, batch=1, device="h100", memory_gib=None)


def test_weights_of_a_70b_and_the_batches_inside_the_ridge(tmp_path):
    weights, *_ = plan_of_shape(Workspace(tmp_path, ()), shape="70b", to=None, context=1024, batch=1, device="h100", memory_gib=None)
    assert [(row[1], row[5], row[6]) for row in weights.rows] == [("141.1", "295", "4"), ("70.6", "295", "4"), ("39.8", "76", "1")]


@pytest.mark.parametrize(
    ("kl", "said"), [(None, "that comes first"), (0.3, "not ready"), (0.07, "above the usual"), (0.02, "in the usual range")]
)
def test_before_a_4_bit_model_is_put_to_work(measured: Workspace, kl, said):
    advice = advise(measured, base=name_of_base(measured), **ASKED)
    candidate = next(each for each in advice.ranked if in_four_bits(each))
    facts = {key: value for key, value in candidate.facts.items() if key != "kl_mean_nats"} | ({} if kl is None else {"kl_mean_nats": kl})
    told = advice_text.launch_checks(candidate._replace(facts=facts), {"perplexity_delta": -1e9})
    assert said in " ".join(told.sentences) and any("generation" in each for each in told.sentences)
    verdicts = {row[0]: row[4] for row in told.rows}
    assert verdicts["needle_accuracy"] == "not measured" and verdicts["perplexity_delta"].startswith("worse by")


def test_the_commands(measured: Workspace, monkeypatch):
    real = measuring.measure_device
    monkeypatch.setattr(measuring, "measure_device", lambda **asked: real(**asked, sizes=(4096, 2**20), squares=(16,), seconds_each=0.002))
    monkeypatch.setitem(cli._context, "workspace", lambda: measured)
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setattr(cli.console, "_width", 250)

    def call(*arguments: str) -> Any:
        return CliRunner().invoke(cli.app, arguments)

    base = name_of_base(measured)
    assert "has not been measured" in str(call("advise", "--base", base).exception)
    first = call("device")
    assert first.exit_code == 0 and "read_bandwidth" in first.output and "ridge" in first.output
    assert call("device").output == first.output  # kept, not measured again
    done = call("advise", "--base", base, "--context", "32", "--goal", "memory")
    assert done.exit_code == 0 and "times as long as predicted" in done.output and "Before a 4-bit model" in done.output
    assert "one of --base and --shape" in str(call("advise").exception)
    assert "experiments on" in str(call("advise", "--base", "nosuch", "--device", "h200").exception)
    assert "2.93 times" in call("advise", "--shape", "70b", "--to", "8b", "--device", "h200").output
    assert machine(measured, "here").bandwidths
