"""Exactly k by index, whole-number rules, patterns along the inputs; masks that are kept, and the shares that came out."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from assay.ops.models import experts
from assay.ops.prune import masks
from assay.ops.prune.masks import Sparsity, prunable, realised, require_fit, require_kept, select, smallest, zeros_of
from assay.ops.quantize import additive, awq, lattice, ranges
from assay.ops.quantize.grid import Format, dequantize, quantize
from assay.ops.quantize.hqq import hqq
from assay.ops.quantize.outliers import split

HALF, TWO_OF_FOUR = Sparsity(50), Sparsity(n=2, m=4)


def test_of_equal_weights_exactly_as_many_go_as_were_asked_for_and_the_earliest():
    ties = tensor([[1.0, 1, 1, 1, 2, 3, 4, 5]])  # a threshold at the second smallest takes 4, or none
    assert select(ties, Sparsity(25)).tolist() == [[True, True, False, False, False, False, False, False]]
    assert select(ties.flip(1), Sparsity(25)).tolist() == [[False, False, False, False, True, True, False, False]]
    assert select(torch.zeros(3, 4), Sparsity(50)).flatten().tolist() == [True] * 6 + [False] * 6
    assert select(torch.zeros(3, 4), Sparsity(50), "row").tolist() == [[True, True, False, False]] * 3


def test_thirty_percent_is_thirty_percent_rounded_down_in_each_comparison_group():
    scores = torch.rand(10, 10, generator=torch.Generator().manual_seed(0))
    for pct in (1, 29, 30, 57, 58, 99):  # int(100 * 0.29) is 28
        assert int(select(scores, Sparsity(pct)).sum()) == pct
    assert select(torch.rand(3, 7), Sparsity(30), "row").sum(dim=1).tolist() == [2, 2, 2]  # 7 · 30 // 100
    assert int(select(torch.rand(3, 7), Sparsity(30)).sum()) == 6  # 21 · 30 // 100
    assert (Sparsity(30).name, TWO_OF_FOUR.name) == ("30%", "2:4")


def test_groups_of_a_pattern_lie_along_the_inputs_and_2_of_4_go_in_each():
    scores = torch.rand(8, 8, generator=torch.Generator().manual_seed(0))
    zeros = select(scores, TWO_OF_FOUR)
    assert zeros.view(8, 2, 4).sum(dim=2).tolist() == [[2, 2]] * 8
    assert not (zeros.T.reshape(8, 2, 4).sum(dim=2) == 2).all()  # not so along the outputs
    assert select(tensor([[3.0, 1, 2, 4, 0, 0, 0, 5]]), TWO_OF_FOUR).tolist() == [[False, True, True, False, True, True, False, False]]
    assert select(scores, Sparsity(n=1, m=4)).sum() == 48 and select(scores, Sparsity(n=4, m=8)).view(8, 8).sum(dim=1).tolist() == [4] * 8
    assert select(scores, TWO_OF_FOUR, "row").equal(zeros)


@settings(deadline=None)
@given(seed=st.integers(0, 10**6), groups=st.integers(1, 5), weights=st.integers(1, 40), data=st.data())
def test_smallest_are_the_first_of_a_stable_sort(seed, groups, weights, data):
    count = data.draw(st.integers(0, weights))
    scores = torch.randint(0, 4, (groups, weights), generator=torch.Generator().manual_seed(seed)).float()  # full of ties
    expected = torch.zeros(groups, weights, dtype=torch.bool)
    for group in range(groups):
        for at in sorted(range(weights), key=lambda at, group=group: scores[group, at].item())[:count]:  # Python's sort is stable
            expected[group, at] = True
    assert smallest(scores, count).equal(expected)


@pytest.mark.parametrize(
    ("sparsity", "message"),
    [
        (Sparsity(), "sparsity_pct=0 is outside 1 to 99"),
        (Sparsity(100), "sparsity_pct=100 is outside 1 to 99"),
        (Sparsity(-5), "sparsity_pct=-5 is outside"),
        (Sparsity(50, 2, 4), r"sparsity_pct=50 and the pattern 2:4 say two things"),
        (Sparsity(n=4, m=4), r"the pattern 4:4 does not keep some"),
        (Sparsity(n=0, m=4), r"the pattern 0:4 does not keep some"),
        (Sparsity(n=5, m=4), r"the pattern 5:4 does not keep some"),
    ],
)
def test_a_sparsity_that_removes_nothing_or_all_or_says_two_things_is_refused(sparsity, message):
    with pytest.raises(ValueError, match=message):
        masks.require_valid(sparsity)


def test_a_width_that_the_groups_do_not_divide_is_refused_with_what_works():
    with pytest.raises(ValueError, match=r"2:4 needs groups of 4 along the 6 columns .* groups of 3 do, and so does a percentage"):
        require_fit((8, 6), TWO_OF_FOUR)
    with pytest.raises(ValueError, match=r"along the 7 columns .* does not divide; a percentage does"):
        select(torch.rand(4, 7), TWO_OF_FOUR)
    require_fit((6, 8), TWO_OF_FOUR)
    require_fit((8, 6), HALF)


def test_scores_that_are_nan_are_refused():
    with pytest.raises(ValueError, match="1 of 4 scores are NaN"):
        smallest(tensor([[1.0, float("nan"), 2, 3]]), 2)
    with pytest.raises(ValueError, match="cannot choose 5 of 4"):
        smallest(torch.rand(1, 4), 5)


def test_all_matrices_are_pruned_those_of_experts_too_and_a_model_that_hides_them_is_refused(make_decoder):
    model = make_decoder("mixtral with a window")
    names = set(prunable(model, HALF))
    assert names == set(experts.weights(model)) and sum(".experts." in name for name in names) == 4 * 4 * 3
    from transformers import GPT2Config, GPT2LMHeadModel

    hidden = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=64, n_embd=32, n_layer=1, n_head=2)).eval()
    with pytest.raises(ValueError, match="the pass reaches 0 of"):
        prunable(hidden, HALF)


def test_a_pattern_that_one_matrix_cannot_have_names_it(make_llama):
    with pytest.raises(ValueError, match="along the 98 columns") as refused:
        prunable(make_llama(ffn=98), TWO_OF_FOUR)
    assert refused.value.__notes__ == ["in model.layers.0.mlp.down_proj ([64, 98])"]


@torch.no_grad()
def test_masks_that_were_kept_pass_and_what_came_back_is_counted_by_layer(tl8):
    weights = experts.weights(tl8)
    name = "model.layers.2.mlp.down_proj"
    weights[name][:, ::2] = 0
    weights["model.layers.0.self_attn.q_proj"][3, 5] = 0
    before = zeros_of(tl8)
    assert int(before[name].sum()) == 64 * 64 and sum(int(mask.sum()) for mask in before.values()) == 64 * 64 + 1
    weights[name][:, 1] = 0  # more zeros are no fault
    require_kept(before, zeros_of(tl8))
    require_kept(before, weights)
    weights[name][0, :6] = 1e-30
    with pytest.raises(ValueError, match=r"3 of the 4,096 pruned weights of model\.layers\.2\.mlp\.down_proj came back"):
        require_kept(before, zeros_of(tl8))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj was \[64, 64\] .* is missing now"):
        require_kept(before, {})
    with pytest.raises(ValueError, match=r"was \[64, 64\] .* is \[2, 2\] now"):
        require_kept(before, {each: torch.zeros(2, 2) for each in before})


def test_shares_are_counted_by_layer_and_in_all_and_say_where_a_pattern_is_broken():
    weights = {"a": tensor([[0.0, 1, 0, 2, 0, 0, 0, 3]]), "b": tensor([[0.0, 1, 2, 3], [1, 0, 0, 1]])}
    found = realised(weights, TWO_OF_FOUR)
    assert (found.zeros, found.weights, found.share) == (8, 16, 0.5)
    assert found.layers == {"a": 5 / 8, "b": 3 / 8} and found.broken == ("b",)
    assert realised(weights, HALF).broken == realised(weights).broken == ()
    assert masks.holds(weights["a"], TWO_OF_FOUR) and not masks.holds(weights["a"], Sparsity(n=1, m=4))
    assert not masks.holds(torch.zeros(2, 6), TWO_OF_FOUR)


FORMATS = {
    "int4": Format(group_size=16),
    "int2": Format(bits=2, group_size=16),
    "int3 asymmetric": Format(bits=3, group_size=16, symmetric=False),
    "int8 the tensor, asymmetric": Format(bits=8, group_size=0, symmetric=False),
    "fp8": Format("e4m3", 8, -1),
    "fp8 e5m2 in blocks": Format("e5m2", 8, 16, block_rows=8),
    "mxfp8": Format("e4m3", 8, 32, scale="e8m0"),
    "mxfp4": Format("e2m1", 4, 32, scale="e8m0", shared_exponent="ceil"),
    "nvfp4": Format("e2m1", 4, 16, scale="e4m3"),
    "nf4": Format("nf4", 4, 32),
    "nf4 nested": Format("nf4", 4, 32, nested=True),
    "ternary": Format("ternary", 2, 16),
}


@settings(deadline=None, max_examples=6)
@given(seed=st.integers(0, 10**6), shift=st.sampled_from([0.0, 3.0, -3.0]))
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_a_pruned_weight_is_exactly_zero_after_rounding_to_nearest_in_every_format_and_range(format, seed, shift):
    """Of one sign too, where the zero point is the last code there is."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(16, 64, generator=generator) + shift
    weight = weight.masked_fill(select(torch.rand(16, 64, generator=generator), TWO_OF_FOUR), 0)
    gram = (inputs := torch.randn(100, 64, generator=generator)).T @ inputs
    for shrink in (1.0, 0.5, ranges.mse(weight, format), ranges.percentile(weight, format, keep=0.9), awq.output_mse(weight, gram, format)):
        assert (dequantize(quantize(weight, format, shrink=shrink))[weight == 0] == 0).all()
    if format.scale in ("e8m0", "e4m3") or format.nested:
        return
    assert (dequantize(hqq(weight, format))[weight == 0] == 0).all()
    assert (split(weight, tensor([3, 5]), format).dense()[weight == 0] == 0).all()


def test_code_books_have_no_zero_to_keep_so_that_a_mask_does_not_survive_them():
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    weight = weight.masked_fill(select(weight.abs(), TWO_OF_FOUR), 0)
    for packed in (lattice.quantize(weight), additive.quantize(weight, code_bits=6, rounds=1)):
        with pytest.raises(ValueError, match="of the 512 pruned weights of layer came back"):
            require_kept({"layer": weight}, {"layer": packed.dense()})
