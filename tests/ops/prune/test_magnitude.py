"""The smallest go, and exactly as many as asked: by layer, by row, over all, by pattern."""

import pytest
import torch

from assay.ops.models import experts
from assay.ops.prune.magnitude import prune_model
from assay.ops.prune.masks import Sparsity, zeros_of

HALF, TWO_OF_FOUR = Sparsity(50), Sparsity(n=2, m=4)
IDS = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(0))


def copies(model):
    return {name: weight.clone() for name, weight in experts.weights(model).items()}


@pytest.mark.parametrize("scope", ["layer", "row", "global"])
def test_what_went_is_nowhere_larger_than_what_stayed_in_its_comparison_group_and_what_stayed_is_as_it_was(tl8, scope):
    before = copies(tl8)
    found = prune_model(tl8, Sparsity(30), scope=scope)
    zeros = zeros_of(tl8)
    for name, weight in experts.weights(tl8).items():
        assert weight[~zeros[name]].equal(before[name][~zeros[name]])
    sizes = {name: weight.abs() for name, weight in before.items()}
    if scope == "global":
        gone = torch.cat([sizes[name][zeros[name]] for name in sizes])
        kept = torch.cat([sizes[name][~zeros[name]] for name in sizes])
        assert gone.max() <= kept.min() and len(gone) == (len(gone) + len(kept)) * 30 // 100
        assert len(set(found.realised.layers.values())) > 1
    for name, size in sizes.items() if scope != "global" else ():
        groups = size.view(1, -1) if scope == "layer" else size
        for group, zero in zip(groups, zeros[name].view(groups.shape), strict=True):
            assert int(zero.sum()) == len(group) * 30 // 100 and group[zero].max() <= group[~zero].min()
    assert found.realised.zeros == sum(int(zero.sum()) for zero in zeros.values()) and found.summary["scope"] == scope


def test_half_of_each_matrix_and_two_of_each_four_are_what_is_realised(make_llama):
    found = prune_model(make_llama(), HALF).realised
    assert found.share == 0.5 and set(found.layers.values()) == {0.5}
    patterned = prune_model(make_llama(), TWO_OF_FOUR)
    assert patterned.realised.share == 0.5 and patterned.realised.broken == () and patterned.summary["scope"] == "2:4"
    assert len(patterned.realised.layers) == 4 * 7 and patterned.layers == {}


def test_experts_of_a_mixture_are_pruned_and_its_router_is_not(make_decoder):
    model = make_decoder("mixtral with a window")
    router = model.model.layers[0].mlp.gate.weight.clone()
    assert set(prune_model(model, TWO_OF_FOUR).realised.layers.values()) == {0.5}
    assert (model.model.layers[0].mlp.experts.gate_up_proj == 0).float().mean() == 0.5
    assert model.model.layers[0].mlp.gate.weight.equal(router)


@torch.no_grad()
@pytest.mark.parametrize("scope", ["layer", "row", "global"])
def test_pruning_weights_that_are_zero_already_changes_no_logit(tl8, scope):
    for weight in experts.weights(tl8).values():
        weight[:, ::2] = 0
    before = tl8(IDS).logits
    assert prune_model(tl8, HALF, scope=scope).realised.share == 0.5
    assert tl8(IDS).logits.equal(before)
    prune_model(tl8, TWO_OF_FOUR)
    assert tl8(IDS).logits.equal(before)


@torch.no_grad()
def test_what_cannot_be_is_refused_before_anything_changes(tl8):
    before = copies(tl8)
    with pytest.raises(ValueError, match=r"scope: global compares all weights .* the pattern 2:4"):
        prune_model(tl8, TWO_OF_FOUR, scope="global")
    with pytest.raises(ValueError, match="groups of 3 along the 64 columns"):
        prune_model(tl8, Sparsity(n=1, m=3))
    experts.weights(tl8)["model.layers.3.mlp.up_proj"][0, 0] = float("nan")
    with pytest.raises(ValueError, match="scores are NaN") as refused:
        prune_model(tl8, HALF)
    assert refused.value.__notes__ == ["in model.layers.3.mlp.up_proj ([128, 64])"]
    assert all(weight.equal(before[name]) for name, weight in experts.weights(tl8).items() if name != "model.layers.3.mlp.up_proj")
