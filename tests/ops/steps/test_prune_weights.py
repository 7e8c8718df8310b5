"""The step ``prune_weights`` as an experiment meets it: exact shares, zeros that what follows keeps or is refused for, and what the config remembers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from assay.ops.apply import apply, maker
from assay.ops.cost.bytes import artifact_bytes
from assay.ops.models.checkpoint import load_model
from assay.ops.models.dense import PRUNED_KEY, read_config
from assay.ops.models.experts import weights
from assay.ops.prune.masks import Sparsity, holds
from assay.ops.quantize import by_layer
from assay.ops.quantize.read import read_weights
from assay.ops.steps.quantize import format_of
from assay.schemas.pruning import Pack, PruneDepth, PruneWeights
from assay.schemas.rounding import Grid, Quantize, Smooth

HALF = {"sparsity_pct": 50}


def zeros(directory):
    return {name: weight == 0 for name, weight in weights(load_model(directory)).items()}


@pytest.mark.parametrize("given", [HALF, {"pattern": "2:4"}, {"pattern": "4:8"}], ids=str)
@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_exactly_so_many_weights_are_zero_and_it_is_said(method, given, done, small):
    made = done(PruneWeights(method=method, **given), small)
    found = zeros(made.out)
    assert made.summary["zeros"] == sum(int(each.sum()) for each in found.values()) == made.summary["weights"] // 2
    assert read_config(made.out)[PRUNED_KEY]["pattern"] == given.get("pattern")
    if "pattern" in given:
        n, m = map(int, given["pattern"].split(":"))
        assert all(holds(weight, Sparsity(n=n, m=m)) for weight in weights(load_model(made.out)).values())


@pytest.mark.parametrize(
    "after",
    [
        *(Quantize(format=name) for name in ("int8", "int4", "int3", "nf4", "mxfp4", "nvfp4", "fp8_e4m3", "ternary")),
        Quantize(format="int4", symmetric=False), Quantize(format="int4", range="mse"), Quantize(format="int4", range="output_mse"),
        Quantize(format="int4", method="gptq"), Quantize(format="int4", method="gptq", symmetric=False), Quantize(format="int4", method="hqq"),
        Quantize(method="llm_int8"), Smooth(method="smoothquant"), Smooth(method="awq"),
    ],
    ids=lambda step: f"{step.kind} {step.method} {step.format} {getattr(step, 'range', '')} {step.symmetric}",
)  # fmt: skip
def test_what_is_pruned_stays_zero_through_what_follows(after, done, small):
    pruned = done(PruneWeights(method="magnitude", pattern="2:4"), small, "pruned").out
    before, now = zeros(pruned), zeros(done(after, pruned).out)
    assert all((now[name] | ~before[name]).all() for name in before)


def test_zeros_that_come_back_are_refused(done, small, tmp_path, windows, monkeypatch):
    from assay.ops.steps import smooth

    pruned = done(PruneWeights(method="magnitude", **HALF), small, "pruned").out

    def careless(step, parent, out, **given):
        model = load_model(parent)
        with torch.no_grad():
            next(iter(weights(model).values())).add_(1)
        model.save_pretrained(out)
        return {}

    monkeypatch.setattr(smooth, "smooth", careless)
    (tmp_path / "back").mkdir()
    with pytest.raises(ValueError, match=r"pruned weights of model\.layers\.0\.self_attn\.q_proj came back"):
        apply(Smooth(method="smoothquant"), pruned, tmp_path / "back", windows=windows)


@pytest.mark.parametrize(
    ("grid", "given"),
    [
        (Grid(format="int4"), HALF),
        (Grid(format="int4", symmetric=False, group_size=32), {"pattern": "2:4"}),
        (Grid(format="nf4", nested=True), {"pattern": "2:4"}),
    ],
    ids=["int4", "asymmetric", "nf4"],
)
def test_what_stays_is_rounded_in_the_same_loop_and_packed_as_rounded_weights_are(grid, given, done, small, ids, engine, close):
    made = done(PruneWeights(method="sparsegpt", quantize=grid, **given), small)
    told, model = made.summary, load_model(made.out)
    stored = read_weights(made.out).packed
    assert {each.format for each in stored.values()} == {format_of(grid)} and stored.keys() == weights(model).keys()
    found = zeros(made.out)
    assert told["zeros"] == sum(int(each.sum()) for each in found.values()) >= told["weights"] // 2 and told["share"] >= 0.5
    assert read_config(made.out)[PRUNED_KEY] == {"pattern": given.get("pattern"), "zeros": told["zeros"], "weights": told["weights"]}
    assert "pattern" not in given or all(holds(each, Sparsity(n=2, m=4)) for each in weights(model).values())
    if grid.symmetric:  # zeros are one code, and it stands for exactly 0
        assert all((each.codes[each.dense() == 0] == each.codes[each.dense() == 0][0]).all() for each in stored.values())
    sizes = artifact_bytes(made.out)
    assert sizes.quantized_bits_per_weight == pytest.approx(told["bits_per_weight"]) and sizes.quantized_weights == told["weights"]
    assert (told["tokens"], told["quantized_layers"], told["coverage"], told["fallbacks"]) == (6 * 32, 14, 1.0, [])
    layers = by_layer.read(made.out)
    assert layers.keys() == stored.keys() and all(0 < each["output_error"] < 1 and each["snr_db"] > 0 for each in layers.values())
    assert close(made.logits.float()[0], load_model(made.out)(ids).logits.float()[0])
    assert close(engine(made.out), load_model(made.out, dtype=torch.float32)(ids).logits[0])
    assert told["opens_plainly"] == (grid.format == "int4" and grid.symmetric)
    if told["opens_plainly"]:
        plain = AutoModelForCausalLM.from_pretrained(made.out, dtype=torch.float32)
        assert close(plain(ids).logits[0], load_model(made.out, dtype=torch.float32)(ids).logits[0])


def test_rounded_to_int8_in_the_same_loop_it_is_stored_as_2_of_4(done, small, engine, close):
    made = done(PruneWeights(method="sparsegpt", pattern="2:4", quantize=Grid(format="int8")), small, "joint")
    packed = done(Pack(), made.out)
    assert (made.summary["bits_per_weight"], packed.summary["bits_per_weight"]) == (8.25, 5.25)
    assert close(engine(packed.out), engine(made.out)) and read_config(packed.out)[PRUNED_KEY] == read_config(made.out)[PRUNED_KEY]
    with pytest.raises(ValueError, match="its parent is already quantized"):
        done(Quantize(format="int8"), made.out, "again")


def test_what_is_not_asked_for_is_not_said_so_that_keys_stay():
    assert "quantize" not in PruneWeights(method="sparsegpt", **HALF).model_dump(mode="json")
    assert maker(PruneWeights(method="sparsegpt", **HALF)).endswith(":sparsegpt")
    joint = PruneWeights(method="sparsegpt", quantize=Grid(format="int4"), **HALF)
    assert joint.model_dump(mode="json")["quantize"]["group_size"] == 64 and maker(joint).endswith(":sparsegpt_rounded")
    assert PruneWeights.model_validate_json(joint.model_dump_json()) == joint


def test_a_group_that_does_not_fit_is_named_before_anything_is_pruned(done, small):
    with pytest.raises(ValueError, match="group_size=48 does not divide the 64 columns") as caught:
        done(PruneWeights(method="sparsegpt", quantize=Grid(format="int4", group_size=48), **HALF), small)
    assert any("q_proj" in note for note in caught.value.__notes__)


def test_blocks_may_go_after_weights(done, small):
    pruned = done(PruneWeights(method="magnitude", **HALF), small, "pruned").out
    left = done(PruneDepth(layers=1, score="random"), pruned).out
    assert PRUNED_KEY in read_config(left)
    assert all(abs(float(each.double().mean()) - 0.5) < 0.01 for each in zeros(left).values())
