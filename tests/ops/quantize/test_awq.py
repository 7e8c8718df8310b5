"""Scales and ranges by the error at the output."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.models import experts
from assay.ops.quantize.activations import watch_inputs
from assay.ops.quantize.awq import awq, output_mse, scales_of
from assay.ops.quantize.grid import Format, dequantize, groups, quantize
from assay.ops.quantize.smooth import pairs, tensors

IDS = torch.arange(3, 123).view(4, 30)
THREE = Format(bits=3, group_size=16, symmetric=False)


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def spiked(model, channels=(5, 40), times=20.0):
    """Some channels of each norm, and of each up, are large and their readers small: what AWQ is for."""
    with torch.no_grad():
        for pair in pairs(model, ["norm_qkv", "norm_mlp"]):
            model.get_submodule(pair.producer).weight[list(channels)] *= times
    return model


@torch.no_grad()
def rounded(model, format, shrink=None):
    """A copy whose layers are rounded."""
    model = copy.deepcopy(model)
    for name, weight in experts.weights(model).items():
        weight.copy_(dequantize(quantize(weight, format, shrink=(shrink or {}).get(name, 1.0))))
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2 with a bias", "gemma3", "mixtral with a window"])
def test_the_folded_model_computes_the_same_and_no_pair_is_worse_than_unscaled(make_decoder, family):
    model = make_decoder(family)
    before = logits(model)
    format = Format(bits=3, group_size=8)
    found = awq(model, IDS, format)
    assert torch.allclose(logits(model), before, atol=2e-4, rtol=2e-4)
    assert set(found.pairs) == {pair.name for pair in pairs(model) if not any(name in found.unseen for name in pair.readers)}
    assert all(0 < each.error <= each.unscaled for each in found.pairs.values())
    assert sum(each.alpha is not None and each.alpha > 0 for each in found.pairs.values()) >= len(found.pairs) / 2
    layers = {name for name in experts.weights(model) if name not in found.unseen and not name.endswith(("q_proj", "k_proj"))}
    assert set(found.shrink) == layers and all(0.5 <= float(share.min()) <= float(share.max()) <= 1 for share in found.shrink.values())


def test_with_outlier_channels_the_rounded_model_is_far_nearer_and_weights_alone_do_not_show_which(tl8):
    model = spiked(tl8)
    before = logits(model)
    plain = (logits(rounded(model, THREE)) - before).square().mean()
    errors = {}
    for salience in ("activation", "weight"):
        scaled = copy.deepcopy(model)
        found = awq(scaled, IDS, THREE, salience=salience)
        errors[salience] = (logits(rounded(scaled, THREE, found.shrink)) - before).square().mean()
    assert errors["activation"] < 0.8 * plain and errors["activation"] < errors["weight"]


@torch.no_grad()
def test_errors_are_those_of_the_parents_output_and_of_the_matrix_alone(tl8):
    """Worked again from the definition: round W s, divide by s, run self_attn; and the product itself for down."""
    model = copy.deepcopy(tl8)
    chosen = {pair.name: pair for pair in pairs(model) if pair.name.startswith("model.layers.0.")}
    found = awq(copy.deepcopy(model), IDS, dict.fromkeys([name for pair in chosen.values() for name in pair.readers], THREE), clip=False)

    def outputs(model, name):
        seen = []
        handle = model.get_submodule(name).register_forward_hook(lambda m, a, out: seen.append(out[0] if isinstance(out, tuple) else out))
        model(IDS)
        handle.remove()
        return seen[0]

    for name, parent in (("norm_qkv", "self_attn"), ("norm_mlp", "mlp"), ("mlp.up_down", "mlp.down_proj"), ("v_o", "self_attn.o_proj")):
        pair, result = chosen[f"model.layers.0.{name}"], found.pairs[f"model.layers.0.{name}"]
        changed = copy.deepcopy(model)
        spread = pair.spread(result.scales)
        for reader in pair.readers:
            weight = tensors(changed)[reader]
            weight.copy_(dequantize(quantize(weight * spread, THREE)) / spread)
        error = (outputs(changed, f"model.layers.0.{parent}") - outputs(model, f"model.layers.0.{parent}")).square().mean()
        if name == "v_o":  # its inputs do not depend on its own scales
            assert result.scales.shape == (32,)
        assert result.error == pytest.approx(float(error), rel=1e-3), name


def test_scales_worked_by_hand_and_finite_where_a_mean_is_zero():
    assert scales_of(torch.tensor([1.0, 4.0]), 0.5).tolist() == pytest.approx([0.5**0.5, 2**0.5])
    zero = scales_of(torch.tensor([0.0, 1, 2]), 0.5)
    assert zero.isfinite().all() and (zero > 0).all() and float(zero.max() * zero.min()) == pytest.approx(1)
    assert scales_of(torch.zeros(3), 0.5).tolist() == [1, 1, 1]
    assert scales_of(torch.tensor([1.0, 3]), 0.0).tolist() == [1, 1]
    assert scales_of(torch.tensor([1.0, 1.0]), 0.5, torch.tensor([4.0, 1.0])).tolist() == pytest.approx([0.5**0.5, 2**0.5])


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), alpha=st.floats(0, 0.95), size=st.sampled_from([1e-20, 1.0, 1e20]))
def test_scales_do_not_depend_on_sign_or_unit(seed, alpha, size):
    salience = torch.randn(16, generator=torch.Generator().manual_seed(seed))
    scales = scales_of(salience, alpha)
    assert torch.allclose(scales, scales_of(-salience.abs() * size, alpha), rtol=1e-3) and scales.isfinite().all()


@torch.no_grad()
def test_pad_tokens_on_either_side_enter_no_mean_and_no_error(make_decoder):
    model = make_decoder("llama")
    model.model.embed_tokens.weight[0] *= 50  # the pad token
    formats = dict.fromkeys([name for name in experts.weights(model) if ".layers.0." in name or ".layers.3." in name], THREE)
    results = []
    for at in (slice(18, 30), slice(0, 12)):
        ids, real = torch.zeros(2, 30, dtype=torch.long), torch.zeros(2, 30, dtype=torch.bool)
        ids[0], real[0], ids[1, at], real[1, at] = IDS[0], True, IDS[1, :12], True
        results.append(awq(copy.deepcopy(model), ids, formats, real=real))
    left, right = results
    seen = []
    for text in (IDS[:1], IDS[1:2, :12]):
        watch_inputs(model, ["model.layers.0.self_attn.q_proj"], text, lambda _, values: seen.append(values))
    mean = torch.cat(seen).abs().mean(dim=0)
    first = left.pairs["model.layers.0.norm_qkv"]
    assert torch.allclose(first.scales, scales_of(mean, first.alpha), rtol=1e-4)
    for name, each in left.pairs.items():
        assert each.unscaled == pytest.approx(right.pairs[name].unscaled, rel=1e-2), name
    assert torch.allclose(first.scales, right.pairs["model.layers.0.norm_qkv"].scales, rtol=1e-4)
    as_text = awq(copy.deepcopy(model), ids, formats).pairs["model.layers.0.norm_qkv"]
    assert as_text.unscaled != pytest.approx(first.unscaled, rel=0.05)


def test_both_ways_of_scaling_are_never_worse_than_either(tl8):
    formats = dict.fromkeys([name for name in experts.weights(tl8) if ".layers.0." in name], THREE)
    errors = {duo: awq(copy.deepcopy(tl8), IDS[:2], formats, duo=duo, clip=False).pairs for duo in ("off", "on", "both")}
    for name in ("model.layers.0.norm_qkv", "model.layers.0.norm_mlp"):  # the same inputs
        least = min(errors["off"][name].error, errors["on"][name].error)
        assert errors["both"][name].error == pytest.approx(least, rel=1e-4)


@pytest.mark.parametrize(
    "format",
    [
        THREE,
        Format(bits=4, group_size=-1),
        Format(bits=3, group_size=0),
        Format(bits=3, group_size=16, block_rows=4),
        Format("nf4", 4, 16, nested=True),
    ],
)
def test_no_group_of_the_output_is_worse_with_its_range_and_the_grid_is_gone_through(format):
    generator = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(8, 32, generator=generator).pow(3), torch.randn(100, 32, generator=generator) * torch.rand(32) * 3
    plain = format._replace(nested=False)

    def error(shrink):  # of each group's part of the output, straight from the inputs
        change = groups(dequantize(quantize(weight, plain, shrink=shrink)) - weight, plain)
        parts = inputs.view(100, change.shape[2], -1)
        return torch.einsum("brgc,tgc->bgrt", change, parts).square().sum(dim=(2, 3))

    found = output_mse(weight, inputs.T @ inputs, format)
    whole = torch.ones_like(found)
    trials = torch.stack([error(whole * (1 - 0.025 * step)) for step in range(21)])
    assert torch.allclose(error(found), trials.amin(dim=0), rtol=1e-3)
    assert error(found).sum() < error(whole).sum() and ((found >= 0.5) & (found <= 1)).all()


def test_a_mixture_is_searched_with_its_router_and_an_expert_without_tokens_is_named(make_decoder):
    model = make_decoder("mixtral with a window")
    before = logits(model)
    found = awq(model, IDS[:1, :1], THREE)
    assert len(found.unseen) == 4 * 2 * 3  # two of four experts in each of four blocks, three matrices each
    assert not set(found.unseen) & set(found.shrink)
    norm = found.pairs["model.layers.0.norm_mlp"]
    assert norm.error <= norm.unscaled and torch.allclose(logits(model), before, atol=2e-4, rtol=2e-4)


def test_formats_by_layer_search_only_the_pairs_and_ranges_of_what_they_name(tl8):
    name = "model.layers.2.mlp.down_proj"
    found = awq(tl8, IDS[:2], {name: THREE})
    assert set(found.shrink) == {name}
    assert set(found.pairs) == {"model.layers.2.mlp.up_down"} and found.pairs["model.layers.2.mlp.up_down"].unscaled > 0


def test_formats_that_do_not_fit_are_refused_and_nothing_changes(tl8):
    before = {name: tensor.clone() for name, tensor in tl8.state_dict().items()}
    with pytest.raises(ValueError, match="group_size=24 does not divide the 64 columns") as caught:
        awq(tl8, IDS, Format(group_size=24))
    assert "in model.layers.0.self_attn.q_proj" in caught.value.__notes__[0]
    with pytest.raises(ValueError, match="lm_head has a format and is not in the blocks"):
        awq(tl8, IDS, {"lm_head": THREE})
    with pytest.raises(ValueError, match="no weight has a format"):
        awq(tl8, IDS, {})
    with pytest.raises(ValueError, match="at least one window"):
        awq(tl8, IDS[:0], THREE)
    with pytest.raises(ValueError, match="is no search"):
        output_mse(torch.ones(2, 16), torch.eye(16), THREE, steps=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tl8.state_dict().items())
