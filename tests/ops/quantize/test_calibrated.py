"""Rounding along the walk: each weight sees what the rounded weights before it give, and an expert that saw no token is rounded without."""

import pytest
import torch

from assay.ops.models import experts, structure
from assay.ops.quantize.calibrated import round_along
from assay.ops.quantize.grid import Format, quantize

COARSE = Format("int", 2, 16)
WINDOWS = torch.randint(3, 128, (4, 16), generator=torch.Generator().manual_seed(3))


def watching(seen):
    """Round to nearest, and keep the Hessians, in the order of the weights."""

    def way(weight, hessian):
        seen.append(None if hessian is None else hessian.clone())
        return quantize(weight, COARSE)

    return way


@torch.no_grad()
def inputs_of(model, name):
    """What a layer of the model as it is now reads, as a mean 2 XᵀX / tokens."""
    seen = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    model(WINDOWS)
    handle.remove()
    values = torch.cat(seen).flatten(0, 1)
    return 2 * values.T @ values / len(values)


def test_each_weight_sees_the_inputs_that_the_rounded_ones_before_it_give(make_llama):
    seen = []
    model = make_llama(layers=2)
    found = round_along(model, WINDOWS, watching(seen))
    names = list(found.layers)
    assert names == list(structure.block_linears(model)) and len(seen) == 14
    order = [part for layer in (0, 1) for part in (
        f"model.layers.{layer}.self_attn.q_proj", f"model.layers.{layer}.self_attn.k_proj", f"model.layers.{layer}.self_attn.v_proj",
        f"model.layers.{layer}.self_attn.o_proj", f"model.layers.{layer}.mlp.gate_proj", f"model.layers.{layer}.mlp.up_proj",
        f"model.layers.{layer}.mlp.down_proj",
    )]  # fmt: skip
    before = make_llama(layers=2)
    for index, name in enumerate(order):  # of the rounded model every layer reads what it read when it was rounded
        rounded, original = inputs_of(model, name), inputs_of(before, name)
        assert torch.allclose(seen[index], rounded, rtol=1e-3, atol=1e-3 * float(rounded.abs().max())), name
        if index > 2:
            assert not torch.allclose(seen[index], original, rtol=1e-2, atol=1e-2 * float(original.abs().max())), name
    assert all(torch.equal(module.weight, found.layers[name].dense()) for name, module in structure.block_linears(model).items())


def test_the_error_of_the_output_is_that_of_the_products_with_the_inputs(make_llama):
    """tr(E H Eᵀ) / tr(W H Wᵀ) is ‖X Eᵀ‖² / ‖X Wᵀ‖² of the first layers, whose inputs no rounding has changed."""
    model, before = make_llama(layers=1), make_llama(layers=1)
    found = round_along(model, WINDOWS, watching([])).summary
    inputs = []
    before.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda _module, args: inputs.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        before(WINDOWS)
        for part in ("q_proj", "v_proj"):
            old, new = (each.model.layers[0].self_attn.get_submodule(part).weight for each in (before, model))
            exact = (inputs[0] @ (old - new).T).square().sum() / (inputs[0] @ old.T).square().sum()
            assert found["output_error"][f"model.layers.0.self_attn.{part}"] == pytest.approx(float(exact), rel=1e-4)
    assert found["tokens"] == WINDOWS.numel() and found["coverage"] == 1.0 and found["forms"] == ["int2"] and found["unrouted"] == []


def test_an_expert_that_no_token_reached_has_no_hessian_is_rounded_all_the_same_and_is_listed(make_decoder):
    model = make_decoder("mixtral with a window", num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.zero_()
        model.model.layers[0].mlp.gate.weight[3].fill_(-1e3)
        model.model.layers[0].mlp.gate.weight[2].fill_(1e3)
    given = {}

    def way(weight, hessian):
        given[len(given)] = hessian is None
        return quantize(weight, COARSE)

    before = {name: weight.clone() for name, weight in experts.weights(model).items()}
    found = round_along(model, WINDOWS[:1, :1], way)
    lost = found.summary["unrouted"]
    assert len(lost) == 6 and all(".experts." in name for name in lost) and sum(given.values()) == len(lost)
    assert set(found.summary["output_error"]) == set(before) - set(lost)
    for name in lost:
        assert torch.equal(experts.weights(model)[name], quantize(before[name], COARSE).dense())


def test_a_way_that_refuses_a_weight_is_told_with_its_name(make_llama):
    def way(weight, hessian):
        raise ValueError("not so")

    with pytest.raises(ValueError, match="not so") as caught:
        round_along(make_llama(layers=1), WINDOWS, way)
    assert caught.value.__notes__ == ["in model.layers.0.self_attn.q_proj ([64, 64])"]


def test_a_model_whose_weights_are_not_reached_is_refused_before_the_walk():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=64, n_embd=32, n_layer=1, n_head=2)).eval()
    with pytest.raises(ValueError, match="the pass reaches 0 of"):
        round_along(model, WINDOWS, lambda weight, hessian: pytest.fail("rounded"))
