"""Weights times inputs, ranked within a row, on inputs that the pruned blocks give."""

import pytest
import torch
from torch import tensor

from assay.ops.models import experts, structure
from assay.ops.prune import magnitude
from assay.ops.prune.masks import Sparsity, select, zeros_of
from assay.ops.prune.wanda import prune_model, scores

HALF, TWO_OF_FOUR = Sparsity(50), Sparsity(n=2, m=4)
WINDOWS = torch.randint(3, 128, (4, 16), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def norms_of(model, name, windows=WINDOWS):
    """√Σx² of what a layer of the model as it is now reads."""
    seen = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _module, args: seen.append(args[0].flatten(0, -2)))
    model(windows)
    handle.remove()
    return torch.cat(seen).double().square().sum(dim=0).sqrt().float()


def test_rows_are_ranked_for_themselves_worked_by_hand():
    """The second row is small as a whole: compared over the matrix, the first would keep all four and the second none."""
    weight, norms = tensor([[3.0, 1, 2, 4], [0.3, 0.1, 0.2, 0.4]]), torch.ones(4)
    assert select(scores(weight, norms), HALF, "row").tolist() == [[False, True, True, False]] * 2
    assert select(scores(weight, norms), HALF, "layer").sum(dim=1).tolist() == [0, 4]
    busy = tensor([1.0, 10, 1, 0.1])  # 3, 10, 2, 0.4
    assert scores(weight, busy)[0].tolist() == pytest.approx([3, 10, 2, 0.4])
    assert select(scores(-weight, busy), HALF, "row").tolist() == [[False, False, True, True]] * 2


@torch.no_grad()
@pytest.mark.parametrize("sequential", [False, True])
def test_each_block_is_scored_on_the_inputs_that_the_pruned_blocks_before_it_give(make_llama, sequential):
    model, before = make_llama(layers=3), make_llama(layers=3)
    prune_model(model, WINDOWS, HALF, true_sequential=sequential)
    differing = 0
    for name, module in structure.block_linears(model).items():
        weight = before.get_submodule(name).weight
        mixed = make_llama(layers=3)  # blocks before are pruned, and inside the block those before it if asked
        layer = int(name.split(".")[2])
        for done in range(layer):
            mixed.model.layers[done] = model.model.layers[done]
        if sequential:
            mixed = model  # a layer reads what those before it give, and they are final
        zeros = select(weight.abs() * norms_of(mixed, name), HALF, "row")
        assert (zeros != (module.weight == 0)).float().mean() < 2e-3, name  # rounding may turn a tie
        assert module.weight[~zeros & (module.weight != 0)].equal(weight[~zeros & (module.weight != 0)])
        if layer:
            differing += int((select(weight.abs() * norms_of(before, name), HALF, "row") != zeros).sum())
    assert differing > 100  # the inputs of the model as it was choose others


def test_every_row_has_the_same_share_of_zeros_and_patterns_hold(make_llama):
    found = prune_model(make_llama(), WINDOWS, Sparsity(30))
    assert {found.realised.layers[f"model.layers.1.mlp.{part}"] for part in ("up_proj", "down_proj")} == {19 / 64, 38 / 128}
    assert (found.summary["tokens"], found.summary["unrouted"], found.summary["scope"]) == (64, [], "row")
    model = make_llama()
    patterned = prune_model(model, WINDOWS, TWO_OF_FOUR)
    assert patterned.realised.share == 0.5 and patterned.realised.broken == ()
    assert (zeros_of(model)["model.layers.0.mlp.down_proj"].sum(dim=1) == 64).all()
    assert prune_model(make_llama(), WINDOWS, HALF, scope="layer").summary["scope"] == "layer"


@torch.no_grad()
def test_pruning_weights_that_are_zero_already_changes_no_logit(tl8):
    for weight in experts.weights(tl8).values():
        weight[:, 1::2] = 0
    before = tl8(WINDOWS).logits
    prune_model(tl8, WINDOWS, HALF)
    prune_model(tl8, WINDOWS, TWO_OF_FOUR)
    assert tl8(WINDOWS).logits.equal(before)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_enters_no_norm(make_llama, side):
    lengths = (12, 5)
    texts = [torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(length)) for length in lengths]
    padded, real = torch.zeros(2, 12, dtype=torch.long), torch.zeros(2, 12, dtype=torch.bool)
    for row, text in enumerate(texts):
        place = slice(12 - text.shape[1], None) if side == "left" else slice(0, text.shape[1])
        padded[row, place], real[row, place] = text[0], True
    model, plain = make_llama(layers=1), make_llama(layers=1)
    found = prune_model(model, padded, HALF, real=real)
    assert found.summary["tokens"] == 17
    for name in structure.block_linears(model):
        alone = sum(norms_of(plain, name, text).square() for text in texts).sqrt()
        zeros = select(plain.get_submodule(name).weight.abs() * alone, HALF, "row")
        assert int(((model.get_submodule(name).weight == 0) != zeros).sum()) <= 2, name  # rounding may turn a tie


@torch.no_grad()
def test_an_expert_that_saw_no_token_is_pruned_by_size_and_named(make_decoder):
    model, plain = (make_decoder("mixtral with a window", num_hidden_layers=1) for _ in range(2))
    for each in (model, plain):
        gate = each.model.layers[0].mlp.gate
        gate.weight.zero_()
        gate.weight[3].fill_(-1e3)
        gate.weight[2].fill_(1e3)
    found = prune_model(model, WINDOWS[:1, :1], HALF)
    assert len(found.summary["unrouted"]) == 6 and all(".experts." in name for name in found.summary["unrouted"])
    magnitude.prune_model(plain, HALF, scope="row")
    for name in found.summary["unrouted"]:
        assert experts.weights(model)[name].equal(experts.weights(plain)[name])
    assert found.realised.share == 0.5


@torch.no_grad()
def test_on_inputs_of_uneven_size_the_output_keeps_more_than_by_size_alone(teacher_of, text):
    held_out, before = text(8, seed=9), teacher_of()
    scale = torch.logspace(-1, 1, 32)[torch.randperm(32, generator=torch.Generator().manual_seed(0))]

    def lost(prune):
        model = teacher_of()
        for layer in model.model.layers:  # channels that differ in size: the norm's weight times the scale, its readers over it
            layer.input_layernorm.weight.mul_(scale)
            layer.post_attention_layernorm.weight.mul_(scale)
            for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
                layer.get_submodule(part).weight.div_(scale)
        prune(model)
        p, q = (each(held_out).logits.log_softmax(-1) for each in (before, model))
        return float((p.exp() * (p - q)).sum(-1).mean())

    assert lost(lambda model: None) < 1e-5
    assert lost(lambda model: prune_model(model, text(32), HALF)) < 0.7 * lost(lambda model: magnitude.prune_model(model, HALF))
