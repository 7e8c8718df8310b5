"""What an asset says of its step, and what a step of quantization is thought to take."""

import pytest

from assay.assets import labels
from assay.assets.describe import describe
from assay.assets.plan import node_guess
from assay.schemas.base import Base, Shape
from assay.schemas.graph import build_graph
from assay.schemas.load import Registries, parse_experiment
from assay.schemas.protocols import Bytes

SHAPE = Shape(layers=30, hidden_size=576, intermediate_size=1536, heads=9, kv_heads=3, head_dim=64, vocab_size=49_152, tied=True)
STEPS = {
    "int4": "{kind: quantize, format: int4}",
    "zero": "{kind: quantize, format: int3, group_size: -1, symmetric: false}",
    "gptq": "{kind: quantize, method: gptq, format: nvfp4, group_size: 16}",
    "w8a8": "{kind: quantize, format: int8, group_size: tensor, inputs: {format: int8, per: tensor}}",
    "mixed": "{kind: quantize, mixed: {millibits: 4500, formats: [int8, int3]}}",
    "e8": "{kind: quantize, method: e8}",
    "smooth": "{kind: smooth, method: smoothquant}",
    "awq": "{kind: smooth, method: awq, format: int3, salience: weights}",
    "turned": "{kind: rotate, online: [down, qk]}",
    "spin": "{kind: rotate, method: spinquant}",
    "joint": "{kind: prune_weights, method: sparsegpt, sparsity_pct: 50, quantize: {format: int4}}",
}


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    options = "".join(f"    {name}: [{step}]\n" for name, step in STEPS.items())
    text = f"name: many\nbase: small\naxes:\n  how:\n    none: []\n{options}measure: [bytes]\n"
    base = Base(name="small", path="small", shape=SHAPE)
    registries = Registries({"small": base}, {"bytes": Bytes()}, frozenset({"wikipedia_train"}))
    return build_graph(parse_experiment(text, tmp_path_factory.mktemp("labels") / "experiment.yaml", registries))


def node(graph, name):
    return next(each for each in graph.nodes if each.path[-1] == name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("int4", "Weights rounded to int4 (RTN, groups of 64, symmetric)."),
        ("zero", "Weights rounded to int3 (RTN, one scale a row, asymmetric)."),
        ("gptq", "Weights rounded to nvfp4 (GPTQ, groups of 16)."),
        ("w8a8", "Weights rounded to int8 (RTN, one scale a weight, symmetric); inputs to int8 a tensor."),
        ("e8", "Weights rounded to the E8 lattice, two bits."),
        ("smooth", "Channels scaled between layers (SmoothQuant); the logits stay."),
        ("awq", "Channels scaled between layers (AWQ, for int3, by the size of weights); the logits stay."),
        ("turned", "Hidden states turned by a Hadamard matrix, and at run time before down, qk; the logits stay."),
        ("spin", "Hidden states turned by matrices learned by SpinQuant; the logits stay."),
        (
            "joint",
            "50 % of the weights of the blocks set to zero, by sparsegpt, and the others rounded to int4 (groups of 64) in the same loop.",
        ),
    ],
)
def test_an_asset_says_in_a_line_what_its_step_does(graph, name, said):
    assert describe(node(graph, name)) == said


def test_formats_within_a_budget_are_told_with_it(graph):
    assert "int8, int3 within 4.5 bits" in describe(node(graph, "mixed"))


def test_tags_and_kinds_name_no_format_that_a_method_does_not_have(graph):
    """A format stands in the step where the method has its own, so that a search for int2 would find a lattice."""

    def tags(name):
        found = labels.tags(graph.experiment, node(graph, name), "checkpoint")
        return {key: found[key] for key in ("step", "method", "format", "group_size") if key in found}

    assert tags("zero") == {"step": "quantize", "method": "rtn", "format": "int3", "group_size": "row"}
    assert tags("e8") == {"step": "quantize", "method": "e8"} and labels.kinds(node(graph, "e8")) == {"pytorch", "e8"}
    assert tags("mixed") == {"step": "quantize", "method": "rtn"} and labels.kinds(node(graph, "mixed")) == {"pytorch", "mixed"}
    assert tags("smooth") == {"step": "smooth", "method": "smoothquant"}
    assert tags("awq") == {"step": "smooth", "method": "awq", "format": "int3", "group_size": "64"}
    assert tags("joint") == {"step": "prune_weights", "method": "sparsegpt", "format": "int4", "group_size": "64"}
    assert labels.kinds(node(graph, "joint")) == {"pytorch", "prune", "int4"}
    assert labels.kinds(node(graph, "gptq")) == {"pytorch", "nvfp4"} and labels.kinds(node(graph, "spin")) == {"pytorch", "rotate"}


def test_a_step_that_looks_at_text_is_thought_to_take_longer_than_one_that_does_not(graph):
    guesses = {name: node_guess(node(graph, name), SHAPE) for name in STEPS}
    assert guesses["int4"] < 15 and guesses["int4"] == guesses["turned"]
    assert all(guesses["int4"] < guesses[name] < 7200 for name in ("gptq", "w8a8", "mixed", "e8", "smooth", "awq", "spin"))
    assert guesses["smooth"] < guesses["awq"]  # which tries twenty scales of each
    assert node_guess(node(graph, "gptq"), None) == pytest.approx(guesses["gptq"], rel=0.5)  # a shape that is not known
