"""A rotated model computes what it did: every family, every place, tied or not; what a rotation cannot pass is refused; and the faults that change it, change it."""

import json
import math

import pytest
import torch
from torch import nn

from assay.ops.models import structure
from assay.ops.models.dense import load_dense
from assay.ops.quantize import hadamard
from assay.ops.quantize.rotate import PLACES, Online, attach, norms, online_transforms, rotate

IDS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(0))
TURNED = ["llama", "llama with scaled rope, tied", "llama with yarn, bias and one key head", "mistral with a window", "qwen2 with a bias",
          "qwen2 with windows above", "qwen3", "mixtral with a window"]  # fmt: skip


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def weights(model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", ["hadamard", "random"])
@pytest.mark.parametrize("family", TURNED)
def test_folded_rotations_leave_the_logits_of_each_family(make_decoder, family, kind):
    model = make_decoder(family)
    before, old = logits(model), weights(model)
    assert before.std() > 0.5
    assert rotate(model, kind=kind, seed=1, untie=True) == ()
    assert (logits(model) - before).abs().max() < 1e-4
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight", "q_proj.bias", "k_proj.bias")):
            assert parameter.equal(old[name])
        elif "norm" in name:
            assert (parameter == 1).all()
        else:
            assert (parameter - old.get(name, old["model.embed_tokens.weight"])).norm() > 0.3 * parameter.norm(), name


@pytest.mark.parametrize("places", [(place,) for place in PLACES] + [PLACES])
@pytest.mark.parametrize("family", ["llama", "llama with yarn, bias and one key head", "qwen3"])
def test_with_the_transforms_at_inference_the_logits_stay_and_without_they_do_not(make_decoder, family, places):
    model = make_decoder(family)
    before = logits(model)
    transforms = rotate(model, online=places, untie=True)
    alone = logits(model)
    handles = attach(model, transforms)
    assert (logits(model) - before).abs().max() < 1e-4
    for handle in handles:
        handle.remove()
    assert logits(model).equal(alone)
    if places == ("qk",):  # nothing is folded: both sides of the product are turned
        assert (alone - before).abs().max() < 1e-4
    else:
        assert (alone - before).abs().max() > 0.5


def test_transforms_run_with_a_cache_as_well(tl8):
    before = tl8.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0)
    attach(tl8, rotate(tl8, online=PLACES))
    assert tl8.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0).equal(before)


def test_nine_heads_are_turned_as_one_width_without_a_rotation_of_values(make_llama):
    model = make_llama(hidden=144, heads=9, kv_heads=3)
    before, old = logits(model), weights(model)
    transforms = rotate(model, online=("heads", "down"))
    assert transforms == (Online("mlp.down_proj", "input", 128), Online("self_attn.o_proj", "input", 144))
    attach(model, transforms)
    assert (logits(model) - before).abs().max() < 1e-4
    block = "model.layers.0."
    values = old[f"{block}self_attn.v_proj.weight"] * old[f"{block}input_layernorm.weight"]
    expected = hadamard.transform(values, signs=hadamard.random_signs(144, seed=0))
    assert torch.allclose(model.get_parameter(f"{block}self_attn.v_proj.weight"), expected, atol=1e-5)


def test_transforms_are_plain_and_say_where_and_over_what(tl8):
    found = online_transforms(tl8, PLACES)
    assert found == (
        Online("mlp.down_proj", "input", 128), Online("self_attn.o_proj", "input", 4, 16), Online("self_attn", "after_rope", 16),
    )  # fmt: skip
    assert tuple(Online(**each) for each in json.loads(json.dumps([each._asdict() for each in found]))) == found


def test_a_transform_over_channels_that_lie_apart_worked_by_hand():
    x = torch.tensor([1.0, 10.0, 2.0, 20.0])  # two heads of two channels
    root = math.sqrt(2)
    assert Online("o", "input", 2, 2).turn(x).tolist() == pytest.approx([3 / root, 30 / root, -1 / root, -10 / root])
    assert Online("o", "input", 2, 1).turn(x).tolist() == pytest.approx([11 / root, -9 / root, 22 / root, -18 / root])


def test_weights_and_norms_worked_by_hand(make_llama):
    model = make_llama(layers=1)
    old = weights(model)
    r1, r2 = hadamard.random_orthogonal(64, seed=5), hadamard.random_orthogonal(16, seed=6)
    rotate(model, residual=r1, values=[r2])
    new = {name.removeprefix("model.layers.0."): value.double() for name, value in weights(model).items()}
    old = {name.removeprefix("model.layers.0."): value.double() for name, value in old.items()}
    first, second = old["input_layernorm.weight"], old["post_attention_layernorm.weight"]
    expected = {
        "model.embed_tokens.weight": old["model.embed_tokens.weight"] @ r1,
        "lm_head.weight": old["lm_head.weight"] @ torch.diag(old["model.norm.weight"]) @ r1,
        "self_attn.q_proj.weight": old["self_attn.q_proj.weight"] @ torch.diag(first) @ r1,
        "self_attn.v_proj.weight": torch.block_diag(r2, r2).T @ old["self_attn.v_proj.weight"] @ torch.diag(first) @ r1,
        "self_attn.o_proj.weight": r1.T @ old["self_attn.o_proj.weight"] @ torch.block_diag(r2, r2, r2, r2),
        "mlp.up_proj.weight": old["mlp.up_proj.weight"] @ torch.diag(second) @ r1,
        "mlp.down_proj.weight": r1.T @ old["mlp.down_proj.weight"],
    }
    for name, value in expected.items():
        assert torch.allclose(new[name], value, atol=1e-5), name


def test_a_gain_left_in_one_norm_changes_the_logits(tl8):
    before, gain = logits(tl8), structure.blocks(tl8)[2].input_layernorm.weight.detach().clone()
    rotate(tl8)
    assert (logits(tl8) - before).abs().max() < 1e-4
    structure.blocks(tl8)[2].input_layernorm.weight.data.copy_(gain)
    assert (logits(tl8) - before).abs().max() > 1


def test_an_embedding_turned_the_other_way_changes_the_logits(tl8):
    before, embedding = logits(tl8), structure.embedding(tl8)[1].weight.detach().clone()
    turn = hadamard.random_orthogonal(64, seed=0)
    rotate(tl8, residual=turn)
    structure.embedding(tl8)[1].weight.data.copy_(embedding.double() @ turn.T)
    assert (logits(tl8) - before).abs().max() > 1


def test_a_tied_head_is_refused_unless_it_may_be_untied(make_llama):
    model = make_llama(tied=True)
    before, old = logits(model), weights(model)
    with pytest.raises(ValueError, match="with untie=True the head gets 8,192 weights of its own"):
        rotate(model)
    assert all(parameter.equal(old[name]) for name, parameter in model.named_parameters())
    rotate(model, untie=True)
    assert not structure.is_tied(model) and model.config.tie_word_embeddings is False
    assert (logits(model) - before).abs().max() < 1e-4 * before.abs().max()


def test_a_rotated_checkpoint_opens_as_any_other(make_llama, tmp_path):
    model = make_llama(tied=True)
    rotate(model, untie=True)
    model.save_pretrained(tmp_path)
    assert logits(load_dense(tmp_path)).equal(logits(model))


def test_norms_of_one_plus_w_get_the_weight_nought():
    from transformers import GemmaConfig, GemmaForCausalLM

    torch.manual_seed(0)
    model = GemmaForCausalLM(
        GemmaConfig(
            vocab_size=128, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, head_dim=12,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.3 if "norm" in name else 0.15)
    before = logits(model)
    assert set(norms(model).values()) == {1.0}
    rotate(model, untie=True)
    assert all((model.get_parameter(name) == 0).all() for name in norms(model))
    assert before.std() > 0.5 and (logits(model) - before).abs().max() < 1e-4


def test_a_gain_behind_attention_is_refused(make_decoder):
    model = make_decoder("gemma3", num_hidden_layers=2)
    old = weights(model)
    with pytest.raises(
        ValueError, match=r"post_feedforward_layernorm.weight, pre_feedforward_layernorm.weight not expected; the gain of a norm"
    ):
        rotate(model, untie=True)
    assert structure.is_tied(model) and all(parameter.equal(old[name]) for name, parameter in model.named_parameters())


def test_other_blocks_are_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=2, n_layer=2, vocab_size=64, n_positions=32))
    with pytest.raises(ValueError, match="block 0 of GPT2LMHeadModel cannot be turned exactly"):
        rotate(model, untie=True)


def test_experts_that_lie_the_other_way_are_refused_before_anything_changes(make_decoder):
    model = make_decoder("mixtral with a window")
    experts = structure.blocks(model)[1].mlp.experts
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.mT.contiguous())
    old = weights(model)
    with pytest.raises(ValueError, match=r"mlp.experts.gate_up_proj of block 1 has the shape \[4, 64, 192\]"):
        rotate(model, untie=True)
    assert all(parameter.equal(old[name]) for name, parameter in model.named_parameters())


def test_sizes_without_a_matrix_are_refused_before_anything_changes(make_llama):
    model = make_llama(hidden=72, ffn=120, heads=4, kv_heads=2)  # heads of 18 channels
    old = weights(model)
    with pytest.raises(ValueError, match="no Hadamard matrix of size 18"):
        rotate(model)
    with pytest.raises(ValueError, match="no Hadamard matrix of size 18"):
        rotate(model, kind="random", online=("qk",))
    assert all(parameter.equal(old[name]) for name, parameter in model.named_parameters())
    before = logits(model)
    attach(model, rotate(model, kind="random", online=("down", "heads")))
    assert (logits(model) - before).abs().max() < 1e-4


def test_the_inputs_of_experts_cannot_be_turned(make_decoder):
    with pytest.raises(ValueError, match=r"experts are computed together.*leave out down"):
        rotate(make_decoder("mixtral with a window"), online=("down",))


def test_names_that_are_not_there_are_refused(tl8):
    with pytest.raises(ValueError, match="no transform runs at up; down, heads, qk are known"):
        rotate(tl8, online=("up",))
    with pytest.raises(ValueError, match=r"no module of LlamaForCausalLM is named mlp\.fc2"):
        attach(tl8, [Online("mlp.fc2", "input", 128)])
    with pytest.raises(ValueError, match="1 rotations of values for 4 blocks"):
        rotate(tl8, values=[torch.eye(16)])
    tl8.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="cannot be turned under attn_implementation='eager'"):
        attach(tl8, [Online("self_attn", "after_rope", 16)])


def test_a_seed_gives_the_same_rotation_and_another_one_another(make_llama):
    found = []
    for seed in (0, 0, 1):
        model = make_llama()
        rotate(model, seed=seed)
        found.append(model.lm_head.weight.detach())
    assert found[0].equal(found[1]) and not torch.allclose(found[0], found[2])


def test_an_outlier_channel_of_the_stream_is_spread(tl8):
    with torch.no_grad():
        structure.embedding(tl8)[1].weight[:, 7] *= 100

    def peak(model):
        entering = structure.embedding(model)[1].weight.detach()
        return float((entering.abs().amax(dim=1) / entering.square().mean(dim=1).sqrt()).mean())

    before = peak(tl8)
    rotate(tl8)
    assert before > 6 and peak(tl8) < 3.5


def test_weights_are_rounded_once_to_sixteen_bits(make_llama):
    exact, model = make_llama(), make_llama().bfloat16()
    for each in exact.parameters():
        each.data.copy_(each.data.bfloat16())
    rotate(exact, online=("down", "heads"))
    rotate(model, online=("down", "heads"))
    for (name, parameter), reference in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert (parameter == reference.bfloat16()).double().mean() > 0.999, name
