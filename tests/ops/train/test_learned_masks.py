"""Gates against their closed form, multipliers that ascend, sizes that reach the target, and masks that are what is cut."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from assay.ops.models import structure
from assay.ops.train.domains import Domains
from assay.ops.train.learned_masks import (
    Gates,
    Kept,
    Multipliers,
    Target,
    differences,
    gate,
    gates_for,
    kept_by,
    learn_masks,
    masked,
    open_probability,
)
from assay.ops.train.loop import Settings

TARGET = Target(layers=3, kv_groups=1, ffn=80, hidden=48)


def windows(count, seed=0):
    """Each token is the one before it plus 5."""
    begin = torch.randint(0, 120, (count, 1), generator=torch.Generator().manual_seed(seed))
    return 3 + (begin + 5 * torch.arange(16)) % 120


# --- gates -----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_alpha", [-3.0, -0.5, 0.0, 1.0, 3.0])
def test_the_share_of_open_gates_is_the_closed_form(log_alpha):
    """Of 100,000 draws; the deviation of a share is at most 0.0016."""
    uniform = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    drawn = gate(torch.full((100_000,), log_alpha), uniform)
    expected = open_probability(torch.tensor(log_alpha)).item()
    assert expected == pytest.approx(1 / (1 + math.exp(-log_alpha + 2 / 3 * math.log(0.1 / 1.1))))
    assert (drawn > 0).double().mean().item() == pytest.approx(expected, abs=6e-3)
    # P(z = 1) by the same symmetry: σ(log α + T log(0.1 / 1.1))
    assert (drawn == 1).double().mean().item() == pytest.approx(1 / (1 + math.exp(-log_alpha - 2 / 3 * math.log(0.1 / 1.1))), abs=6e-3)


@settings(max_examples=50, deadline=None)
@given(log_alpha=st.floats(-20, 20), uniform=st.floats(1e-6, 1 - 1e-6))
def test_a_gate_is_within_0_and_1_and_rises_with_both(log_alpha, uniform):
    at = lambda a, u: gate(torch.tensor([a]), torch.tensor([u])).item()  # noqa: E731
    assert 0 <= at(log_alpha, uniform) <= at(log_alpha + 1, uniform) <= 1 and at(log_alpha, uniform / 2) <= at(log_alpha, uniform)


def test_the_middle_draw_of_an_even_gate_is_a_half():
    assert gate(torch.zeros(1), torch.tensor([0.5])).item() == pytest.approx(0.5)
    assert open_probability(torch.zeros(1)).item() == pytest.approx(0.8318, abs=1e-4)


def test_expected_sizes_and_hard_masks_worked_by_hand():
    gates = Gates({"layers": (3,), "ffn": (3, 4)})
    with torch.no_grad():
        gates.log_alpha["layers"].copy_(torch.tensor([2.0, -1.0, 2.0]))
        gates.log_alpha["ffn"].copy_(torch.tensor([[0.0, 1.0, 2.0, 3.0], [1.0, 1.0, 1.0, 1.0], [5.0, -5.0, 4.0, -4.0]]))
    expected = gates.expected()
    assert expected["ffn"].shape == (3,) and expected["ffn"][1].item() == pytest.approx(4 * open_probability(torch.tensor(1.0)).item())
    target = Target(layers=2, ffn=2)
    masks = gates.hard(target)
    assert masks["layers"].tolist() == [1, 0, 1] and masks["ffn"].tolist() == [[0, 0, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0]]
    numbers = {"layers": 3, "kv_heads": 2, "intermediate_size": 4, "hidden_size": 2}
    assert kept_by(masks, numbers) == Kept([0, 2], [[0, 1], [0, 1]], [[2, 3], [0, 2]], [0, 1])
    found = differences(gates, target, 0.5)  # half of the way from 4 to 2 channels, and from 3 to 2 layers
    assert torch.allclose(found["ffn"], (expected["ffn"] - 3) / 4) and torch.allclose(found["layers"], (expected["layers"] - 2.5) / 3)


# --- multipliers -----------------------------------------------------------------------------------------------------------------------------


def test_gates_descend_on_the_penalty_and_multipliers_ascend():
    gates = Gates({"ffn": (2, 8)})
    multipliers = Multipliers(gates)
    with torch.no_grad():
        multipliers.first["ffn"].copy_(torch.tensor([0.5, -0.25]))
        multipliers.second["ffn"].fill_(2.0)
    found = differences(gates, Target(ffn=4), 1.0)
    penalty = multipliers.penalty(found)
    d = found["ffn"].detach()
    assert penalty.item() == pytest.approx(float((torch.tensor([0.5, -0.25]) * d + 2 * d**2).sum()))
    penalty.backward()
    assert torch.allclose(multipliers.first["ffn"].grad, -d) and torch.allclose(multipliers.second["ffn"].grad, -(d**2)) and (d > 0).all()
    p = open_probability(gates.log_alpha["ffn"].detach())
    expected = (torch.tensor([[0.5], [-0.25]]) + 4 * d.unsqueeze(1)) * p * (1 - p) / 8
    assert torch.allclose(gates.log_alpha["ffn"].grad, expected, atol=1e-6)


# --- masks -----------------------------------------------------------------------------------------------------------------------------------


def some_masks(model, seed=0):
    gates = gates_for(model, TARGET)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in gates.log_alpha.values():
            each.copy_(torch.randn(each.shape, generator=random))
    return gates.hard(TARGET)


def cut(model, kept):
    """A plain smaller Llama of the kept parts, written out here on its own."""
    groups, size, width = len(kept.kv_groups[0]), 16, len(kept.hidden)
    config = LlamaConfig(
        vocab_size=128, hidden_size=width, intermediate_size=len(kept.ffn[0]), num_hidden_layers=len(kept.layers), num_attention_heads=2 * groups,
        num_key_value_heads=groups, head_dim=size, max_position_embeddings=2048, tie_word_embeddings=False,
    )  # fmt: skip
    small, old, new = LlamaForCausalLM(config).eval(), model.state_dict(), {}
    new["model.embed_tokens.weight"] = old["model.embed_tokens.weight"][:, kept.hidden]
    new["lm_head.weight"] = old["lm_head.weight"][:, kept.hidden]
    scale = math.sqrt(model.config.hidden_size / width)
    new["model.norm.weight"] = old["model.norm.weight"][kept.hidden] * scale
    for number, layer in enumerate(kept.layers):
        keys = [group * size + channel for group in kept.kv_groups[number] for channel in range(size)]
        queries = [group * 2 * size + channel for group in kept.kv_groups[number] for channel in range(2 * size)]
        rows = {"q": queries, "k": keys, "v": keys}
        for part, chosen in rows.items():
            new[f"model.layers.{number}.self_attn.{part}_proj.weight"] = old[f"model.layers.{layer}.self_attn.{part}_proj.weight"][chosen][
                :, kept.hidden
            ]
        new[f"model.layers.{number}.self_attn.o_proj.weight"] = old[f"model.layers.{layer}.self_attn.o_proj.weight"][kept.hidden][
            :, queries
        ]
        for part in ("gate", "up"):
            new[f"model.layers.{number}.mlp.{part}_proj.weight"] = old[f"model.layers.{layer}.mlp.{part}_proj.weight"][kept.ffn[number]][
                :, kept.hidden
            ]
        new[f"model.layers.{number}.mlp.down_proj.weight"] = old[f"model.layers.{layer}.mlp.down_proj.weight"][kept.hidden][
            :, kept.ffn[number]
        ]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            new[f"model.layers.{number}.{norm}.weight"] = old[f"model.layers.{layer}.{norm}.weight"][kept.hidden] * scale
    small.load_state_dict(new)
    return small


@pytest.mark.parametrize("seed", [0, 1])
def test_the_masked_model_is_the_cut_model_with_its_norms_scaled(seed, tl8):
    """Without √(old / new) in the norms, removing channels that are all zero would change every logit."""
    masks, ids = some_masks(tl8, seed), windows(3)
    kept = kept_by(masks, structure.shape_numbers(tl8))
    assert (len(kept.layers), len(kept.hidden), {len(each) for each in kept.ffn}, {len(each) for each in kept.kv_groups}) == (
        3,
        48,
        {80},
        {1},
    )
    with torch.no_grad():
        plain = tl8(ids).logits
        with masked(tl8, masks):
            inside = tl8(ids).logits
        assert torch.allclose(inside, cut(tl8, kept)(ids).logits, atol=1e-3) and not torch.allclose(inside, plain, atol=1.0)
        assert torch.equal(tl8(ids).logits, plain)  # and as it was after


def test_open_gates_change_nothing(tl8):
    ones = {kind: torch.ones_like(each) for kind, each in some_masks(tl8).items()}
    with torch.no_grad(), masked(tl8, ones):
        inside = tl8(windows(2)).logits
    assert torch.equal(inside, tl8(windows(2)).logits)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (Target(), "the target leaves all layers, key groups"),
        (Target(ffn=129), "129 ffn are to be left of 128; 1 to 128"),
        (Target(layers=0), "0 layers are to be left of 4"),
    ],
)
def test_a_target_that_is_none_is_refused(target, says, tl8):
    with pytest.raises(ValueError, match=says):
        gates_for(tl8, target)


def test_a_mixture_of_experts_is_refused(make_decoder):
    with pytest.raises(ValueError, match=r"a block of MixtralForCausalLM has no linear mlp\.down_proj; models like Llama"):
        gates_for(make_decoder("mixtral with a window"), Target(layers=2))


# --- learning --------------------------------------------------------------------------------------------------------------------------------


def test_sizes_come_to_the_target_while_the_text_is_learned(tl8):
    ids = windows(400)
    asked = Settings(steps=240, learning_rate=1e-3, record_every=60, evaluate_every=240)
    found = learn_masks(tl8, ids[:384], ids[384:], TARGET, settings=asked, gate_rate=0.5, target_warmup_steps=50)
    first, last = found.points[0].metrics, found.points[-1].metrics
    for kind, size, wanted in (("layers", 4, 3), ("kv_groups", 2, 1), ("ffn", 128, 80), ("hidden", 64, 48)):
        assert abs(last[f"expected_{kind}"] - wanted) / size < 0.08 < abs(first[f"expected_{kind}"] - wanted) / size
    assert last["log_perplexity"] < 0.5 * first["log_perplexity"]  # with the hard masks
    kept = found.kept
    assert (len(kept.layers), len(kept.hidden), [len(each) for each in kept.ffn]) == (3, 48, [80] * 3)
    with torch.no_grad():
        logits = cut(tl8, kept)(ids[384:]).logits[:, :-1].log_softmax(-1)
    assert last["log_perplexity"] == pytest.approx(-logits.gather(-1, ids[384:, 1:, None]).mean().item(), rel=1e-3)


def test_a_part_that_the_text_needs_is_kept_and_the_weights_stay_when_they_are_frozen(tl8):
    """Layers that do nothing, by zero outputs, are the ones to go."""
    with torch.no_grad():
        for layer in (1, 2):
            for linear in (tl8.model.layers[layer].self_attn.o_proj, tl8.model.layers[layer].mlp.down_proj):
                linear.weight.zero_()
    ids = windows(96)
    train_all(tl8, ids)
    before = copy.deepcopy(tl8.state_dict())
    tl8.requires_grad_(False)
    asked = Settings(steps=40, learning_rate=1e-3, record_every=40, evaluate_every=40)
    found = learn_masks(tl8, ids, ids[:8], Target(layers=2), settings=asked, gate_rate=0.3)
    assert found.kept.layers == [0, 3] and found.kept.hidden == list(range(64)) and found.kept.kv_groups == [[0, 1]] * 2
    assert all(torch.equal(before[name], tensor) for name, tensor in tl8.state_dict().items())


def train_all(model, ids):
    from assay.ops.train.scratch import learn

    for layer in (1, 2):
        model.model.layers[layer].requires_grad_(False)
    learn(model, ids, ids[:4], settings=Settings(steps=60, learning_rate=3e-3, record_every=60, evaluate_every=60))


@pytest.mark.parametrize("domains", [None, Domains(torch.arange(64) % 2, torch.tensor([0, 1, 0, 1]), (1.0, 1.0))], ids=["text", "domains"])
def test_a_stopped_run_goes_on_with_its_gates(domains, tl8, make_llama, tmp_path):
    ids = windows(64)
    ids[1::2] = windows(32, seed=1).flip(1)
    asked = Settings(steps=8, learning_rate=1e-3, record_every=2, evaluate_every=2, save_seconds=0.0)
    given = {"settings": asked, "target_warmup_steps": 4, "domains": domains}

    def stop(now):
        if now.step == 5:
            raise KeyboardInterrupt

    whole = learn_masks(tl8, ids, ids[:4], TARGET, **given)
    with pytest.raises(KeyboardInterrupt):
        learn_masks(make_llama(), ids, ids[:4], TARGET, **given, state=tmp_path, progress=stop)
    assert learn_masks(make_llama(seed=5), ids, ids[:4], TARGET, **given, state=tmp_path) == whole
    with pytest.raises(ValueError, match="a warm-up of the target over 8 of 8 steps"):
        learn_masks(tl8, ids, ids[:4], TARGET, settings=asked, target_warmup_steps=8)
