"""Adapters: nothing at first, alone in what is trained, and merged once into the weights they were trained beside."""

import copy

import pytest
import torch

from assay.ops.models import structure
from assay.ops.train.loop import Settings
from assay.ops.train.lora import adapt, merge
from assay.ops.train.recover import recover

FEW = Settings(steps=20, learning_rate=2e-2, warmup_steps=2, record_every=10, evaluate_every=10)


@pytest.fixture(scope="module")
def teacher(teacher_of):
    return teacher_of()


def rounded(model, levels=7):
    """The matrices of the blocks on a symmetric grid of four bits with one scale a row, as a dense model."""
    with torch.no_grad():
        for linear in structure.block_linears(model).values():
            scale = linear.weight.abs().amax(dim=1, keepdim=True) / levels
            linear.weight.copy_((linear.weight / scale).round() * scale)
    return model


def logits(model, windows):
    with torch.no_grad():
        return model(windows).logits


def test_adapters_change_nothing_at_first_and_are_all_that_is_trained(teacher, text):
    model, windows = copy.deepcopy(teacher), text(3)
    model.lm_head.weight.requires_grad_(False)
    names = set(model.state_dict())
    adapted = adapt(model, rank=3)
    assert torch.equal(logits(model, windows), logits(teacher, windows))
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == 2 * 7 * 3 and all("lora_" in name for name in trained)
    sizes = [linear.in_features + linear.out_features for linear in structure.block_linears(teacher).values()]
    assert sum(parameter.numel() for parameter in trained.values()) == 3 * sum(sizes)
    merge(adapted)
    assert set(model.state_dict()) == names and torch.equal(logits(model, windows), logits(teacher, windows))
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == ["lm_head.weight"]


def test_merged_on_the_rounded_weights_it_was_trained_on_it_is_the_adapter_model(teacher, text):
    """Merged into the weights before rounding it would not be: the adapter knows the rounding's error."""
    model, windows = rounded(copy.deepcopy(teacher)), text(3, seed=5)
    before = copy.deepcopy(model.state_dict())
    adapted = adapt(model, rank=4, alpha=8)
    points = recover(model, teacher, text(160), text(8, seed=1), settings=FEW)
    assert points[-1].metrics["kl_nats"] < 0.8 * points[0].metrics["kl_nats"]
    with_adapters = logits(model, windows)
    changes = {
        name: 8 / 4 * model.get_submodule(name).lora_B["default"].weight @ model.get_submodule(name).lora_A["default"].weight
        for name in structure_names(model)
    }
    merge(adapted)
    assert torch.allclose(logits(model, windows), with_adapters, atol=1e-5 * float(with_adapters.abs().max()))
    for name, tensor in model.state_dict().items():
        expected = before[name] + changes[name.removesuffix(".weight")] if name.removesuffix(".weight") in changes else before[name]
        assert torch.allclose(tensor, expected, atol=1e-6)
    elsewhere = copy.deepcopy(teacher)
    with torch.no_grad():
        for name, change in changes.items():
            elsewhere.get_submodule(name).weight.add_(change)
    assert not torch.allclose(logits(elsewhere, windows), with_adapters, atol=1e-2)


def structure_names(model):
    return [name for name, module in model.named_modules() if hasattr(module, "lora_A")]


def test_merged_twice_is_refused_and_so_are_adapters_on_adapters(teacher):
    model = copy.deepcopy(teacher)
    adapted = adapt(model, rank=2)
    with pytest.raises(ValueError, match="has adapters already; merge them first"):
        adapt(model, rank=2)
    merge(adapted)
    with pytest.raises(ValueError, match="were merged before, and merged twice they would count twice"):
        merge(adapted)
    merge(adapt(model, rank=2))  # anew is fine


def test_the_seed_decides_the_adapters_and_the_global_random_state_is_left_alone(teacher):
    torch.manual_seed(3)
    expected = torch.rand(2)
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(3)
        model = copy.deepcopy(teacher)
        adapt(model, rank=2, seed=seed)
        assert torch.equal(torch.rand(2), expected)
        found.append(next(parameter for name, parameter in model.named_parameters() if "lora_A" in name))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_zeros_under_adapters_and_adapters_of_no_rank_are_refused(teacher, text):
    model, name = copy.deepcopy(teacher), "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(ValueError, match="adapters of rank 0 and alpha 16; whole numbers from 1"):
        adapt(model, rank=0)
    with torch.no_grad():
        model.get_parameter(name)[0] = 0
    zeros = {name: model.get_parameter(name).detach() == 0}
    adapt(model, rank=2)
    with pytest.raises(
        ValueError, match=r"zeros are to stay in student\.model\.layers\.0\.mlp\.up_proj\.weight, which is not trained here"
    ):
        recover(model, teacher, text(8), text(2), settings=FEW, zeros=zeros)
