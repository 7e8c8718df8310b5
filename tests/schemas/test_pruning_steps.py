"""Steps of pruning and training that cannot be, by themselves, in an order, or for a shape; each error says what would."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from assay.schemas.base import Shape
from assay.schemas.load import ExperimentError, parse_experiment
from assay.schemas.pruning import Pack, PruneDepth, PruneWeights, PruneWidth
from assay.schemas.rounding import Rotate
from assay.schemas.training import Distill, Pretrain, PruneLearned
from assay.schemas.widths import ffn_within, left
from assay.schemas.yaml import spell

SHAPE = Shape(layers=4, hidden_size=64, intermediate_size=128, heads=4, kv_heads=2, head_dim=16, vocab_size=128, tied=True)
WIKI, CODE = {"text": {"name": "wikipedia"}, "share_pct": 60}, {"text": {"name": "python_code"}, "share_pct": 40}
SCRATCH = {"layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "tokens": 10}


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (PruneDepth, {"layers": 1, "tokens": "all"}, "tokens with score: block_influence, which reads every token; only angular"),
        (PruneDepth, {"layers": 1, "score": "listed"}, "listed and score: listed go together"),
        (PruneDepth, {"layers": 1, "listed": (0,)}, "listed and score: listed go together; got score: block_influence"),
        (PruneDepth, {"layers": 1, "score": "listed", "listed": (0, 1)}, "expected each block once, the first before, and as many as layers"),
        (PruneDepth, {"layers": 2, "score": "listed", "listed": (1, 0)}, "expected each block once"),
        (PruneWeights, {"method": "wanda"}, "one of sparsity_pct and pattern is needed; got none"),
        (PruneWeights, {"method": "wanda", "sparsity_pct": 50, "pattern": "2:4"}, "is needed; got both"),
        (PruneWeights, {"method": "wanda", "sparsity_pct": 50, "scope": "row"}, "scope is for method: magnitude"),
        (PruneWeights, {"method": "magnitude", "pattern": "2:4", "scope": "row"}, "scope is for method: magnitude with sparsity_pct"),
        (PruneWeights, {"method": "wanda", "sparsity_pct": 50, "damping_pct": 2}, "damping_pct with method: wanda"),
        (PruneWeights, {"method": "magnitude", "sparsity_pct": 50, "calibration": {"windows": 2}}, "calibration with method: magnitude"),
        (PruneWeights, {"method": "magnitude", "sparsity_pct": 100}, "less than or equal to 99"),
        (PruneWeights, {"method": "wanda", "sparsity_pct": 50, "quantize": {"format": "int4"}}, "quantize with method: wanda, which changes no weight that stays"),
        (PruneWeights, {"method": "sparsegpt", "pattern": "4:8", "quantize": {"format": "int4", "group_size": 12}}, "group_size 12 of quantize is no whole number of groups of 8"),
        (PruneWidth, {}, "nothing to cut: give at least one of kv_groups, heads_per_group, ffn, hidden"),
        (PruneWidth, {"ffn": 64, "cut": "most"}, "cut where no heads are cut; give kv_groups or heads_per_group"),
        (PruneWidth, {"ffn": 64, "correct_norms": False}, "correct_norms without hidden"),
        (PruneWidth, {"heads_per_group": 1, "protect": 2, "cut": "most"}, "protect is for cutting the least active heads"),
        (Distill, {"tokens": 10, "beta_pct": 20}, "beta_pct with loss: forward_kl; only jensen_shannon mixes"),
        (Distill, {"tokens": 10, "top_k": 20}, "top_k without teacher: top_k"),
        (Distill, {"tokens": 10, "teacher": "top_k"}, "top_k is needed with teacher: top_k"),
        (Distill, {"tokens": 10, "on_policy_pct": 20}, "on_policy_pct needs the teacher itself beside the student; say teacher: model"),
        (Distill, {"tokens": 10, "hidden_pct": 20}, "hidden_pct needs the teacher itself"),
        (Distill, {"tokens": 10, "loss": "cross_entropy", "temperature": 2.0}, "temperature with loss: cross_entropy, which knows no teacher"),
        (Distill, {"tokens": 10, "loss": "cross_entropy", "teacher": "model"}, "teacher with loss: cross_entropy"),
        (Distill, {"tokens": 10, "loss": "reverse_kl", "teacher": "top_k", "top_k": 5}, "teacher: top_k with loss: reverse_kl"),
        (Distill, {"tokens": 10, "domains": ()}, "domains has no text; two or more"),
        (Distill, {"tokens": 10, "domains": (WIKI | {"share_pct": 99},)}, "domains has 1 text; two or more"),
        (Distill, {"tokens": 10, "domains": (WIKI, WIKI)}, "domains has wikipedia twice"),
        (Distill, {"tokens": 10, "domains": (WIKI, CODE | {"share_pct": 41})}, "the share_pct of domains add up to 101; 100 was expected"),
        (Distill, {"tokens": 10, "domains": (WIKI, CODE | {"share_pct": 0})}, "greater than or equal to 1"),
        (Distill, {"tokens": 10, "domains": (WIKI, CODE), "text": {"name": "essays"}}, "text beside domains"),
        (PruneLearned, {"tokens": 10, "ffn": 8, "domains": (WIKI, WIKI)}, "domains has wikipedia twice"),
        (PruneLearned, {"tokens": 10}, "nothing to learn: give at least one of layers, kv_groups, ffn, hidden"),
        (Pretrain, SCRATCH, "one of ffn and parameters is needed; got none"),
        (Pretrain, {**SCRATCH, "ffn": 8, "parameters": 9}, "is needed; got both"),
        (Pretrain, {**SCRATCH, "ffn": 8, "heads": 3}, "hidden 32 in 3 heads; an even number of channels a head"),
        (Pretrain, {**SCRATCH, "ffn": 8, "heads": 4, "kv_heads": 3}, "4 heads on kv_heads 3; a divisor of 4"),
    ],
)  # fmt: skip
def test_a_step_that_cannot_be_is_refused_with_what_would(kind, given, said):
    with pytest.raises(ValidationError, match=said):
        kind.model_validate(given)


def test_without_domains_a_step_is_written_as_before_there_were_any():
    """What a step is written as is part of its key."""
    for step in (Distill(tokens=10), PruneLearned(tokens=10, ffn=8)):
        assert "domains" not in step.model_dump(mode="json")
    mixed = Distill.model_validate({"tokens": 10, "domains": (WIKI, CODE)})
    assert Distill.model_validate_json(mixed.model_dump_json()) == mixed and [each.called for each in mixed.domains] == [
        "wikipedia",
        "python_code",
    ]


SPARSE, WIDTH = "{kind: prune_weights, method: magnitude, sparsity_pct: 50}", "{kind: prune_width, ffn: 96}"
FOURS = '{kind: prune_weights, method: magnitude, pattern: "2:4"}'
INT8 = "{kind: quantize, format: int8, group_size: 32}"


def joint(format: str = "int8", size: int = 32, pattern: str = '"2:4"') -> str:
    return f"{{kind: prune_weights, method: sparsegpt, pattern: {pattern}, quantize: {{format: {format}, group_size: {size}}}}}"


ORDERS = {
    "widths after zeros": (f"[{SPARSE}, {WIDTH}]", "[1]", "prune_width after prune_weights, whose zeros it would move or fill"),
    "a rotation after zeros": (f"[{SPARSE}, {{kind: rotate}}]", "[1]", "rotate after prune_weights"),
    "a lattice after zeros": (f"[{SPARSE}, {{kind: quantize, method: e8}}]", "[1]", "e8 after prune_weights, whose zeros it would fill"),
    "adapters after zeros": (f"[{SPARSE}, {{kind: distill, tokens: 9, lora: {{rank: 2}}}}]", "[1].lora", "adapters after prune_weights"),
    "recovery after a rotation": ("[{kind: rotate}, {kind: distill, tokens: 9}]", "[1]", "distill after rotate"),
    "recovery after rounding": ("[{kind: quantize, format: int8, group_size: 32}, {kind: distill, tokens: 9}]", "[1]", "distill after quantize"),
    "packing what was not pruned": ("[{kind: pack}]", "[0]", "pack, but nothing before it makes 2:4 weights"),
    "packing what has zeros anywhere": (f"[{SPARSE}, {{kind: pack}}]", "[1]", "pack, but nothing before it makes 2:4 weights"),
    "rounding what was packed": (f"[{FOURS}, {{kind: pack}}, {INT8}]", "[2]", "quantize after pack"),
    "packing what was rounded to less than a byte": (f"[{FOURS}, {{kind: quantize, format: int4, group_size: 32}}, {{kind: pack}}]", "[2]", "pack after rounding, of which int8 codes alone"),
    "packing columns that were kept": (f"[{FOURS}, {{kind: quantize, method: llm_int8}}, {{kind: pack}}]", "[2]", "pack after rounding, of which int8 codes alone"),
    "packing what was rounded on the way to less than a byte": (f"[{joint('int4')}, {{kind: pack}}]", "[1]", "pack after rounding, of which int8 codes alone"),
    "rounding what was rounded on the way": (f"[{joint()}, {INT8}]", "[1]", "quantize after prune_weights with quantize, but integer codes are not changed again"),
    "pruning what was rounded on the way": (f"[{joint()}, {SPARSE}]", "[1]", "prune_weights after prune_weights with quantize"),
    "rounding on the way what is rounded": (f"[{INT8}, {joint()}]", "[1]", "prune_weights after quantize"),
    "recovery of what was rounded on the way": (f"[{joint()}, {{kind: distill, tokens: 9}}]", "[1]", "distill after prune_weights with quantize"),
    "groups that do not divide on the way": (f"[{joint(size=48)}]", "[0].quantize.group_size", "48 does not divide the 64 columns of q_proj"),
    "from nothing, but after something": (f"[{SPARSE}, {{kind: pretrain, layers: 1, hidden: 32, heads: 2, kv_heads: 1, ffn: 8, tokens: 9}}]", "[1]", "pretrain after prune_weights"),
    "more channels than there are": ("[{kind: prune_width, ffn: 129}]", "[0].ffn", "keeps 129 where there are 128"),
    "more channels than are left": (f"[{WIDTH}, {{kind: prune_width, ffn: 97}}]", "[1].ffn", "keeps 97 where there are 96, after the steps before it"),
    "all channels": ("[{kind: prune_width, ffn: 128, kv_groups: 2}]", "[0]", "keeps all that there is, so it cuts nothing"),
    "groups that no longer divide": ("[{kind: prune_width, ffn: 100}, {kind: quantize, format: int4, group_size: 32}]", "[1].group_size", "32 does not divide the 100 columns of down_proj"),
    "a budget too small": ("[{kind: pretrain, layers: 1, hidden: 32, heads: 2, kv_heads: 1, parameters: 5000, tokens: 9}]", "[0].parameters", "5,000 weights are too few"),
}  # fmt: skip


@pytest.mark.parametrize("name", ORDERS)
def test_what_the_order_or_the_shape_does_not_take_is_refused_with_the_file_alone(name, good, registries, tmp_path):
    steps, place, said = ORDERS[name]
    bases = {**registries.bases, "tiny": registries.bases["tiny"].model_copy(update={"shape": SHAPE})}
    text = good.replace("[{kind: prune_depth, layers: 1}]", steps)
    with pytest.raises(ExperimentError) as caught:
        parse_experiment(text, tmp_path / "experiment.yaml", replace(registries, bases=bases))
    (problem,) = [each for each in caught.value.problems if spell(each.path).startswith("axes.prune.d1")]
    assert spell(problem.path) == f"axes.prune.d1{place}" and said in problem.message and problem.remedy


@pytest.mark.parametrize("steps", [f"[{FOURS}, {INT8}, {{kind: pack}}]", f"[{joint()}, {{kind: pack}}]", f"[{SPARSE}, {joint()}]"])
def test_int8_codes_of_2_of_4_may_be_packed_and_zeros_be_rounded_around(steps, good, registries, tmp_path):
    bases = {**registries.bases, "tiny": registries.bases["tiny"].model_copy(update={"shape": SHAPE})}
    text = good.replace("[{kind: prune_depth, layers: 1}]", steps)
    with pytest.raises(ExperimentError) as caught:  # the file's other axes round again
        parse_experiment(text, tmp_path / "experiment.yaml", replace(registries, bases=bases))
    assert not [each for each in caught.value.problems if spell(each.path).startswith("axes.prune.d1")]


def test_the_shape_that_each_step_leaves():
    assert left(PruneWidth(kv_groups=1, ffn=40), SHAPE) == SHAPE.model_copy(update={"heads": 2, "kv_heads": 1, "intermediate_size": 40})
    assert left(PruneWidth(heads_per_group=1, hidden=32), SHAPE) == SHAPE.model_copy(update={"heads": 2, "hidden_size": 32})
    assert left(PruneLearned(layers=3, ffn=40, tokens=1), SHAPE) == SHAPE.model_copy(update={"layers": 3, "intermediate_size": 40})
    assert left(PruneDepth(layers=2), SHAPE).layers == 2 and not left(Rotate(), SHAPE).tied and left(Pack(), SHAPE) == SHAPE
    scratch = left(Pretrain(layers=1, hidden=32, heads=4, kv_heads=2, ffn=24, tokens=1), SHAPE)
    assert scratch == SHAPE.model_copy(update={"layers": 1, "hidden_size": 32, "head_dim": 8, "intermediate_size": 24})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("budget", [40_000, 123_457])
def test_the_width_within_a_budget_is_that_of_the_model_that_is_made(tied, budget):
    from assay.ops.train.scratch import Shape as Made
    from assay.ops.train.scratch import ffn_for

    step = Pretrain(layers=3, hidden=32, heads=4, kv_heads=2, parameters=budget, tied=tied, tokens=1)
    assert ffn_within(step, 200) == ffn_for(Made(3, 32, 8, 4, 2, 200, tied), budget, divisor=8).ffn
