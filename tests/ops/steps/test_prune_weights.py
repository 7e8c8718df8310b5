"""The step ``prune_weights`` as an experiment meets it: exact shares, zeros that what follows keeps or is refused for, and what the config remembers."""

import pytest
import torch

from assay.ops.apply import apply
from assay.ops.models.checkpoint import load_model
from assay.ops.models.dense import PRUNED_KEY, read_config
from assay.ops.models.experts import weights
from assay.ops.prune.masks import Sparsity, holds
from assay.schemas.pruning import PruneDepth, PruneWeights
from assay.schemas.rounding import Quantize, Smooth

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


def test_blocks_may_go_after_weights(done, small):
    pruned = done(PruneWeights(method="magnitude", **HALF), small, "pruned").out
    left = done(PruneDepth(layers=1, score="random"), pruned).out
    assert PRUNED_KEY in read_config(left)
    assert all(abs(float(each.double().mean()) - 0.5) < 0.01 for each in zeros(left).values())
