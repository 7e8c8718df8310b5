"""What a step may say: formats with the groups that they are known for, options of the method that was named, and no other."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from assay.schemas.base import Shape
from assay.schemas.load import ExperimentError, parse_experiment
from assay.schemas.rounding import Gptq, Inputs, Mixed, Quantize, Rotate, Smooth
from assay.schemas.spec import canonical_json
from assay.schemas.texts import Calibration
from assay.schemas.training import DraftDistill
from assay.schemas.yaml import spell

INT8 = {"format": "int8"}
SHAPE = Shape(layers=4, hidden_size=64, intermediate_size=128, heads=4, kv_heads=2, head_dim=16, vocab_size=128, tied=False)


@pytest.mark.parametrize(
    ("format", "size"),
    [("int8", 64), ("int4", 64), ("fp8_e4m3", -1), ("fp8_e5m2", -1), ("mxfp8", 32), ("mxfp4", 32), ("nvfp4", 16), ("nf4", 64), ("ternary", "tensor")],
)  # fmt: skip
def test_a_format_has_the_group_that_it_is_known_for(format, size):
    step = Quantize(format=format)
    assert step.group_size == size and step.calibration is None and not step.calibrated
    assert step == Quantize(format=format, group_size=size)  # said or not, it is one step, with one artifact


def test_what_is_left_out_is_filled_in_where_the_method_needs_it():
    assert Quantize(method="gptq", format="int4").gptq == Gptq(act_order="static", damping_pct=1, true_sequential=True, propagate=True)
    for given_ in (
        {"method": "gptq", "format": "int4"}, {"method": "llm_int8"}, {"method": "e8"}, {"method": "additive"}, {"mixed": {"millibits": 4000}},
        {"format": "int4", "range": "output_mse"}, {"format": "int8", "inputs": {**INT8, "per": "tensor"}},
    ):  # fmt: skip
        assert Quantize.model_validate(given_).calibration == Calibration(windows=16, length=512)
    assert Quantize(format="int8", inputs=Inputs(format="int8")).calibration is None
    assert Rotate(method="spinquant").inputs == Inputs(format="int4") and Rotate(method="spinquant").calibration == Calibration(length=256)
    assert Rotate().calibration is None and Smooth(method="awq").group_size == 64


REFUSED = {
    "no format": ({}, "needs format, one of int8, .* or mixed"),
    "a group of seven": ({"format": "int4", "group_size": 7}, r"got 7; expected a whole number from 8 to 65,536, -1, .* or tensor or block"),
    "a group of mxfp4": ({"format": "mxfp4", "group_size": 64}, "mxfp4 is defined by groups of 32; leave it out"),
    "blocks of integers": ({"format": "int4", "group_size": "block"}, "group_size block, which is for fp8_e4m3 and fp8_e5m2"),
    "a zero point of a float": ({"format": "nf4", "symmetric": False}, "symmetric: false with nf4, which has no zero point; int8, int4, int3 and int2"),
    "nested scales of integers": ({"format": "int4", "nested": True}, "nested scales with int4; only nf4 has them"),
    "an exponent that is not shared": ({"format": "nvfp4", "shared_exponent": "even"}, "shared_exponent with nvfp4; only mxfp4 and mxfp8"),
    "gptq of another method": ({"format": "int4", "gptq": {"damping_pct": 2}}, "gptq: … with method: rtn; leave it out, or say method: gptq"),
    "an index of rows": ({"method": "gptq", "format": "int4", "group_size": -1, "gptq": {"act_order": "index"}}, "index with one scale a row, which has no"),
    "an index of a weight": ({"method": "gptq", "format": "ternary", "gptq": {"act_order": "index"}}, "index with one scale a weight, which has no"),
    "an index of blocks": (
        {"method": "gptq", "format": "fp8_e4m3", "group_size": "block", "gptq": {"act_order": "index"}}, "index with .*blocks.* static or none",
    ),
    "a range of hqq": ({"method": "hqq", "format": "int4", "range": "mse"}, "range: mse with method: hqq, which finds its own; only rtn and gptq"),
    "a share of another range": ({"format": "int4", "keep_permille": 990}, "keep_permille with range: minmax; only range: percentile"),
    "hqq of fixed scales": ({"method": "hqq", "format": "mxfp4"}, "hqq moves scales freely, and those of mxfp4 cannot be; integers, fp8 and plain nf4"),
    "hqq of nested scales": ({"method": "hqq", "format": "nf4", "nested": True}, "those of nf4 cannot be"),
    "a mixed hqq": ({"method": "hqq", "mixed": {"millibits": 4000}}, "mixed with method: hqq; rtn and gptq round"),
    "mixed gptq on all of its text": (
        {"method": "gptq", "mixed": {"millibits": 4000, "windows": 4}, "calibration": {"windows": 4}}, "on all 4 windows .* gptq needs others",
    ),
    "a format and mixed": ({"format": "nf4", "mixed": {"millibits": 4000}}, "format: nf4 and mixed, .* say formats in mixed alone"),
    "mixed of one twice": ({"mixed": {"millibits": 4000, "formats": ("int4", "int4")}}, "int4 twice; each format is named once"),
    "mixed on more text than there is": (
        {"mixed": {"millibits": 4000, "windows": 9}, "calibration": {"windows": 8}}, "mixed on 9 windows of a calibration text of 8; at most as many",
    ),
    "embeddings of mixed": ({"mixed": {"millibits": 4000}, "embeddings": "quantize"}, "embeddings or head with mixed, which rounds the blocks alone"),
    "a head of e8": ({"method": "e8", "head": "quantize"}, "embeddings or head with method: e8, which rounds the blocks alone"),
    "a format of e8": ({"method": "e8", "format": "int4"}, "format with method: e8, which has codes of its own, two bits a weight; leave it out"),
    "groups of e8": ({"method": "e8", "group_size": 128}, "group_size with method: e8"),
    "a zero point of additive": ({"method": "additive", "symmetric": False}, "symmetric with method: additive"),
    "inputs of llm_int8": ({"method": "llm_int8", "inputs": INT8}, "inputs with method: llm_int8, whose kept columns .* leave inputs out, or say rtn"),
    "text that is not looked at": ({"format": "int4", "calibration": {"windows": 8}}, "calibration with method: rtn and range: minmax, which look at no text"),
    "a zero point of fp8 inputs": ({"format": "int8", "inputs": {"format": "fp8_e4m3", "symmetric": False}}, "fp8_e4m3, which has no zero point; int8 and int4"),
    "no window": ({"method": "e8", "calibration": {"windows": 0}}, "greater than or equal to 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_quantize_step_that_cannot_be_is_refused_with_what_would(name):
    given_, said = REFUSED[name]
    with pytest.raises(ValidationError, match=said):
        Quantize.model_validate(given_)


@pytest.mark.parametrize(
    ("kind", "given_", "said"),
    [
        (Smooth, {"method": "awq", "alpha_pct": 60}, "alpha_pct with method: awq, which searches for it; only smoothquant takes it"),
        (Smooth, {"method": "smoothquant", "duo_scaling": False}, "duo_scaling with method: smoothquant, which rounds nothing .* only awq takes it"),
        (Smooth, {"method": "smoothquant", "format": "int3"}, "format with method: smoothquant"),
        (Smooth, {"method": "smoothquant", "salience": "weights"}, "salience with method: smoothquant"),
        (Smooth, {"method": "awq", "format": "nvfp4", "group_size": 32}, "nvfp4 is defined by groups of 16"),
        (Rotate, {"calibration": {"windows": 4}}, "calibration or inputs with method: hadamard, which learns nothing; only spinquant does"),
        (Rotate, {"method": "random", "inputs": INT8}, "calibration or inputs with method: random"),
        (Rotate, {"steps": 41}, "steps with method: hadamard, which learns nothing"),
        (Rotate, {"method": "spinquant", "inputs": {**INT8, "per": "tensor"}}, "inputs per tensor, whose range changes with every turn"),
        (Rotate, {"online": ("up",)}, "'down', 'o' or 'qk'"),
        (DraftDistill, {"tokens": 10, "quantize": {"method": "gptq", "format": "int4"}}, "quantize by gptq, which looks at text; .* rtn or hqq"),
    ],
)  # fmt: skip
def test_other_steps_that_cannot_be_are_refused_with_what_would(kind, given_, said):
    with pytest.raises(ValidationError, match=said):
        kind.model_validate(given_)


@settings(max_examples=150, deadline=None)
@given(
    given_=st.fixed_dictionaries(
        {"method": st.sampled_from(["rtn", "gptq", "hqq", "llm_int8", "e8", "additive"])},
        optional={
            "format": st.sampled_from(["int8", "int4", "fp8_e4m3", "mxfp4", "nvfp4", "nf4", "ternary"]), "group_size": st.sampled_from([-1, 32, 128, "tensor"]),
            "symmetric": st.booleans(), "range": st.sampled_from(["minmax", "mse", "output_mse"]), "embeddings": st.sampled_from(["skip", "quantize"]),
            "head": st.sampled_from(["skip", "quantize", "untie"]), "inputs": st.just(INT8), "mixed": st.just({"millibits": 4500}),
            "gptq": st.sampled_from([{"act_order": "index"}, {"propagate": False}]), "calibration": st.just({"windows": 4}),
        },
    )
)  # fmt: skip
def test_a_step_that_can_be_is_the_same_from_what_it_says_of_itself(given_):
    """It is kept in manifests with all that was filled in, and its identity is that text."""
    try:
        step = Quantize.model_validate(given_)
    except ValidationError:
        return
    assert Quantize.model_validate_json(canonical_json(step.model_dump(mode="json"))) == step
    assert step.calibrated == (step.calibration is not None)


SHAPES = {
    "key heads of blocks": ({"hidden_size": 128, "head_dim": 32}, "{format: fp8_e4m3, group_size: block}", "group_size", "the 64 rows of k_proj and v_proj"),
    "an embedding of blocks": (
        {"hidden_size": 128, "head_dim": 64, "vocab_size": 100}, "{format: fp8_e4m3, group_size: block, embeddings: quantize, head: quantize}", "group_size",
        "the 100 rows of embedding and head",
    ),
    "one format among several": ({"hidden_size": 48}, "{group_size: 16, mixed: {millibits: 4500, formats: [int4, mxfp4]}}", "mixed.formats", "mxfp4 has groups of 32"),
    "integers among several": ({"hidden_size": 48}, "{mixed: {millibits: 4500, formats: [mxfp4, int4]}}", "mixed.formats", "mxfp4 has groups of 32"),
    "vectors of eight": ({"hidden_size": 60}, "{method: e8}", "method", "e8 rounds 8 weights at once, which do not divide the 60 columns of q_proj"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_what_the_shape_of_the_base_does_not_take_is_refused_with_the_file_alone(name, good, registries, tmp_path):
    sizes, step, place, said = SHAPES[name]
    bases = {**registries.bases, "tiny": registries.bases["tiny"].model_copy(update={"shape": SHAPE.model_copy(update=sizes)})}
    text = good.replace("{kind: quantize, format: int4, group_size: 32}", step.replace("{", "{kind: quantize, ", 1))
    with pytest.raises(ExperimentError) as caught:
        parse_experiment(text, tmp_path / "experiment.yaml", replace(registries, bases=bases))
    (problem,) = caught.value.problems
    assert spell(problem.path) == f"axes.quantize.int4[0].{place}" and said in problem.message and problem.remedy


@pytest.mark.parametrize(
    "step", ["{kind: smooth, method: smoothquant}", "{kind: quantize, method: e8}", "{kind: quantize, method: additive}"]
)
def test_a_group_that_a_method_does_not_have_refuses_no_width(step, good, registries, tmp_path):
    """Of groups of 64, which stand in for what was not said, 72 columns would be refused."""
    shape = SHAPE.model_copy(update={"hidden_size": 72, "intermediate_size": 72, "head_dim": 18})
    bases = {**registries.bases, "tiny": registries.bases["tiny"].model_copy(update={"shape": shape})}
    text = good.replace("{kind: quantize, format: int4, group_size: 32}", step)
    assert parse_experiment(text, tmp_path / "experiment.yaml", replace(registries, bases=bases)).variants


def test_lists_of_a_file_are_read(good, parse):
    text = good.replace(
        "int4: [{kind: quantize, format: int4, group_size: 32}]",
        "int4: [{kind: rotate, online: [down, o]}, {kind: quantize, group_size: 32, mixed: {millibits: 4500, formats: [int8, int3]}}]",
    )
    rotate, quantize = parse(text).axes["quantize"]["int4"]
    assert rotate == Rotate(online=("down", "o"))
    assert quantize.mixed == Mixed(millibits=4500, formats=("int8", "int3"))
