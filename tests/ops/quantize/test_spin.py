"""Learned rotations: they stay rotations, lose less than those they began with on text they have not seen, and fold in like any other."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.models import structure
from assay.ops.quantize import hadamard
from assay.ops.quantize.activations import Activations, attach
from assay.ops.quantize.grid import Format
from assay.ops.quantize.rotate import rotate
from assay.ops.quantize.spin import cayley_step, learn, rounded_loss, start


def off(rotations: torch.Tensor) -> float:
    """How far from orthogonal."""
    return float((rotations @ rotations.mT - torch.eye(rotations.shape[-1], dtype=rotations.dtype)).abs().max())


@pytest.fixture(scope="module")
def model(teacher_of):
    """Two channels of the stream stand out, as in trained models, and blocks matter."""
    found = teacher_of(vocab=64, layers=2)
    with torch.no_grad():
        entering, leaving = structure.embedding(found)[1].weight, structure.head(found)[1].weight
        entering.mul_(0.3)[:, [3, 17]] *= 20
        leaving.mul_(1.5)[:, [3, 17]] /= 20
        for block in structure.blocks(found):
            block.self_attn.o_proj.weight.mul_(3)
            block.mlp.down_proj.weight.mul_(3)
    return found


@pytest.fixture(scope="module")
def texts(model):
    """Windows that the model wrote itself, so that it predicts them as well as can be."""
    torch.manual_seed(0)
    begin = torch.randint(3, 64, (320, 1))
    return model.generate(begin, max_new_tokens=47, do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0)


def test_a_turn_of_the_plane_worked_by_hand():
    # At R = I with G = [[0, 1], [-1, 0]]: A = Gᵀ, W = -G; rate 1 gives (I - W/2)⁻¹(I + W/2), a turn by 2 atan(1/2). 1 / |W| = 1 does not bind.
    found = cayley_step(torch.eye(2).double(), torch.tensor([[0.0, 1.0], [-1.0, 0.0]]).double(), 1.0)
    angle = 2 * math.atan(0.5)
    expected = [math.cos(angle), -math.sin(angle), math.sin(angle), math.cos(angle)]
    assert found.flatten().tolist() == pytest.approx(expected)
    assert cayley_step(torch.eye(2).double(), torch.eye(2).double(), 1.0).equal(torch.eye(2).double())  # a symmetric gradient turns nothing


@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 24), seed=st.integers(0, 999), rate=st.floats(0, 100), scale=st.sampled_from([0.0, 1e-6, 1.0, 1e6]))
def test_steps_keep_a_rotation_and_go_down(size, seed, rate, scale):
    rotations = torch.stack([hadamard.random_orthogonal(size, seed), hadamard.random_orthogonal(size, seed + 1)])
    gradient = scale * torch.randn(2, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    for _ in range(3):
        rotations = cayley_step(rotations, gradient, rate)
        assert off(rotations) < 1e-10
    small = cayley_step(rotations, gradient, 1e-4 / max(scale, 1e-6))  # a large step may climb again
    assert ((gradient * (small - rotations)).sum(dim=(1, 2)) <= 1e-12 * scale).all()


def test_learned_rotations_lose_less_on_text_not_seen_and_stay_orthogonal(model, texts):
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    seen, held_out = texts[:192], texts[192:]
    exact, begin = loss_of(model, held_out), rounded_loss(model, held_out, *start(model, seed=0))
    learned = learn(model, seen, steps=100, batch=24)
    assert off(learned.residual) < 1e-4 and off(learned.values) < 1e-4
    assert len(learned.losses) == 100
    found = rounded_loss(model, held_out, learned.residual, learned.values)
    assert begin - exact > 0.05  # nats a token that rounding costs
    assert found - exact < 0.9 * (begin - exact)
    assert (learned.values - start(model, 0)[1]).abs().amax(dim=(1, 2)).min() > 0.01  # R2 of each block is learned too
    assert all(parameter.equal(before[name]) for name, parameter in model.named_parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


@torch.no_grad()
def loss_of(model, windows) -> float:
    logits = model(input_ids=windows, use_cache=False).logits
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), windows[:, 1:].flatten()))


def test_the_loss_is_that_of_the_rotated_model_with_rounded_inputs(teacher_of, texts):
    model, how = teacher_of(vocab=64, layers=2, tied=True).double(), Activations("int4")
    residual, values = hadamard.random_orthogonal(32, 1), torch.stack([hadamard.random_orthogonal(8, seed) for seed in (2, 3)])
    expected = rounded_loss(model, texts[:4], residual, values, activations=how)
    rotate(model, residual=residual, values=list(values), untie=True)
    exact = loss_of(model, texts[:4])
    attach(model, dict.fromkeys(structure.block_linears(model), how))
    # In float64, where no number lies so near the edge of two codes that it falls on either side.
    assert loss_of(model, texts[:4]) == pytest.approx(expected, abs=1e-5)
    assert abs(expected - exact) > 0.005


def test_weights_can_be_rounded_too_and_transforms_run_at_inference(model, texts):
    begin = start(model, seed=0)
    exact = Activations("int8")
    plain = rounded_loss(model, texts[:4], *begin, activations=exact)
    assert plain == pytest.approx(loss_of(model, texts[:4]), abs=0.02)
    assert rounded_loss(model, texts[:4], *begin, activations=exact, online=("down", "heads", "qk")) == pytest.approx(plain, abs=0.02)
    assert rounded_loss(model, texts[:4], *begin, activations=exact, weights=Format(bits=2, group_size=16)) > plain + 0.2
    learned = learn(model, texts[:8], steps=3, weights=Format(bits=4, group_size=16), online=("down", "qk"))
    assert off(learned.residual) < 1e-4 and not torch.allclose(learned.residual, begin[0])


def test_a_seed_gives_the_same_rotations(model, texts):
    first, again, other = (learn(model, texts[:8], steps=3, seed=seed) for seed in (1, 1, 2))
    assert first.residual.equal(again.residual) and first.values.equal(again.values) and first.losses == again.losses
    assert not torch.allclose(first.residual, other.residual)


def test_sizes_without_a_matrix_begin_at_random_rotations(make_llama):
    model = make_llama(hidden=72, heads=4, kv_heads=2, layers=1)
    residual, values = start(model, seed=0)
    assert off(residual) < 1e-10 and off(values) < 1e-10 and values.shape == (1, 18, 18)
    assert torch.allclose(values[0], hadamard.random_orthogonal(18, 1))


def test_what_cannot_be_learned_is_refused(model, texts, make_decoder):
    with pytest.raises(ValueError, match=r"\[320, 1\] windows cannot be learned from"):
        learn(model, texts[:, :1])
    with pytest.raises(ValueError, match="in 0 steps of 1"):
        learn(model, texts, steps=0)
    with pytest.raises(ValueError, match=r"\[0, 48\] windows"):
        learn(model, texts[:0])
    with pytest.raises(ValueError, match="the pass reaches"):
        learn(make_decoder("mixtral with a window"), texts)
    with pytest.raises(ValueError, match="cannot be turned exactly"):
        learn(make_decoder("gemma3", num_hidden_layers=2), texts)
