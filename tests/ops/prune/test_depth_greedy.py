"""Removing the block that is missed least, one at a time."""

import copy

import pytest
import torch
from transformers import FalconConfig, FalconForCausalLM

from assay.ops.prune.depth import drop_layers
from assay.ops.prune.depth_greedy import bypassed, greedy

IDS = torch.arange(3, 43).unsqueeze(0)


@pytest.fixture
def windows():
    return torch.randint(3, 128, (5, 16), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def loss(model, windows):
    logits = model(windows, use_cache=False).logits[:, :-1].double()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))


def without(model, layers):
    cut = copy.deepcopy(model)
    drop_layers(cut, layers)
    return cut


@pytest.mark.parametrize("name", ["llama", "qwen2 with windows above", "gemma3", "mixtral with a window"])
def test_each_round_takes_the_block_whose_real_removal_gives_the_least_loss(make_decoder, windows, name):
    model = make_decoder(name)
    before = model(IDS).logits
    gone: list[int] = []
    for found in greedy(model, windows, 3):
        losses = {layer: loss(without(model, [*gone, layer]), windows) for layer in range(4) if layer not in gone}
        assert found.layer == min(losses, key=losses.get)
        assert found.loss_nats == pytest.approx(losses[found.layer], abs=1e-4)
        gone.append(found.layer)
    assert model(IDS).logits.equal(before)  # nothing was changed, and no bypass is left


@torch.no_grad()
def test_a_bypassed_block_a_removed_one_and_one_with_zero_outputs_are_the_same(tl8):
    with bypassed(tl8, {1: None}):
        skipped = tl8(IDS, use_cache=False).logits
    removed = without(tl8, [1])(IDS).logits
    tl8.model.layers[1].self_attn.o_proj.weight.zero_()
    tl8.model.layers[1].mlp.down_proj.weight.zero_()
    torch.testing.assert_close(skipped, removed, atol=1e-5, rtol=0)
    torch.testing.assert_close(tl8(IDS).logits, removed, atol=1e-5, rtol=0)


@torch.no_grad()
def test_a_block_with_zero_outputs_goes_first_and_costs_nothing(tl8, windows):
    tl8.model.layers[2].self_attn.o_proj.weight.zero_()
    tl8.model.layers[2].mlp.down_proj.weight.zero_()
    text = windows[:, :4]
    for _ in range(12):  # text of the model itself, so that it predicts it worse without any block that does something
        text = torch.cat([text, tl8(text, use_cache=False).logits[:, -1:].argmax(dim=-1)], dim=1)
    first, second = greedy(tl8, text, 2)
    assert first.layer == 2 and first.loss_nats == pytest.approx(loss(tl8, text), abs=1e-5)
    assert second.loss_nats > first.loss_nats + 0.1


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_the_number_of_windows_at_once_change_no_loss(tl8, monkeypatch, side):
    texts = [torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(length)) for length in (12, 5)]
    padded, real = torch.zeros(2, 12, dtype=torch.long), torch.zeros(2, 12, dtype=torch.bool)
    for row, text in enumerate(texts):
        place = slice(12 - text.shape[1], None) if side == "left" else slice(0, text.shape[1])
        padded[row, place], real[row, place] = text[0], True
    (found,) = greedy(tl8, padded, 1, real=real)
    alone = [loss(without(tl8, [found.layer]), text) for text in texts]
    assert found.loss_nats == pytest.approx((11 * alone[0] + 4 * alone[1]) / 15, abs=1e-4)
    monkeypatch.setattr("assay.ops.prune.depth_greedy.BATCH", 1)
    monkeypatch.setattr("assay.ops.prune.depth_greedy.CHUNK", 3)
    (again,) = greedy(tl8, padded, 1, real=real)
    assert again.layer == found.layer and again.loss_nats == pytest.approx(found.loss_nats, abs=1e-5)


def test_what_cannot_be_removed_or_scored_is_refused(tl8, windows):
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"cannot remove {count} of 4 blocks; 1 to 3"):
            greedy(tl8, windows, count)
    with pytest.raises(ValueError, match=r"shape \[5, 1\]: each needs two real tokens"):
        greedy(tl8, windows[:, :1], 1)
    with pytest.raises(ValueError, match=r"training mode.*model\.eval"):
        greedy(tl8.train(), windows, 1)
    tl8.eval()
    falcon = FalconConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    with pytest.raises(ValueError, match="blocks of FalconForCausalLM give tuple; models whose blocks give one tensor work"):
        greedy(FalconForCausalLM(falcon).eval(), windows, 1)
    with torch.no_grad():
        tl8.model.norm.weight[5] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        greedy(tl8, windows, 1)
