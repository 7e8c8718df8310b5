"""KL, total variation and agreement by hand, by law, against float64, and through real models with padding."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel, GraniteConfig, GraniteForCausalLM

from assay.ops.evaluate import divergence as module
from assay.ops.evaluate.divergence import Head, check_head, final_hidden, head_of, per_token, reference
from assay.ops.evaluate.windows import batches, windows


def of_probabilities(p: list[list[float]], q: list[list[float]], targets=None, **options):
    """Compare given distributions: hidden states are the logarithms, the heads identities."""
    p, q = (tensor(rows).clamp(min=1e-30).log() for rows in (p, q))
    targets = torch.zeros(len(p), dtype=torch.int64) if targets is None else tensor(targets)
    return per_token(p, Head(torch.eye(p.shape[1])), q, Head(torch.eye(q.shape[1])), targets, **options)


def test_kl_is_base_against_variant_and_not_the_reverse():
    """P = (.5, .5), Q = (.9, .1): KL(P‖Q) = .510826, KL(Q‖P) = .368064; swapped arguments are the commonest fault."""
    p, q = [[0.5, 0.5]], [[0.9, 0.1]]
    assert of_probabilities(p, q).kl.item() == pytest.approx(0.510826, abs=1e-6)
    assert of_probabilities(q, p).kl.item() == pytest.approx(0.368064, abs=1e-6)


def test_the_other_values_worked_by_hand():
    found = of_probabilities([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]], [[0.2, 0.5, 0.3], [0.6, 0.2, 0.2]], targets=[2, 0])
    assert found.tv.tolist() == pytest.approx([0.3, 0.1], abs=1e-6)
    assert found.agrees.tolist() == [False, True]
    assert found.nll.tolist() == pytest.approx([-math.log(0.3), -math.log(0.6)], abs=1e-6)
    assert found.base_nll.tolist() == pytest.approx([-math.log(0.2), -math.log(0.5)], abs=1e-6)
    entropy = -sum(x * math.log(x) for x in (0.5, 0.3, 0.2))
    assert found.base_entropy.tolist() == pytest.approx([entropy] * 2, abs=1e-6)


def test_kl_is_a_sum_over_the_vocabulary_for_each_token():
    """A mean over the vocabulary or over the batch scales it by their sizes; doubling either must change nothing."""
    small = of_probabilities([[0.5, 0.5, 0, 0]], [[0.9, 0.1, 0, 0]])
    large = of_probabilities([[0.5, 0.5] + [0.0] * 30] * 6, [[0.9, 0.1] + [0.0] * 30] * 6)
    assert large.kl.tolist() == pytest.approx([small.kl.item()] * 6, rel=1e-6)


logits = st.lists(st.floats(-60, 60, width=32), min_size=2, max_size=9)


@settings(max_examples=200, deadline=None)
@given(
    pair=logits.flatmap(
        lambda first: st.tuples(st.just(first), st.lists(st.floats(-60, 60, width=32), min_size=len(first), max_size=len(first)))
    )
)
def test_kl_is_not_negative_and_bounds_total_variation(pair):
    """Gibbs: KL ≥ 0. Pinsker: TV ≤ √(KL/2). Both to float32 rounding, for any two distributions."""
    p, q = (tensor([side]) for side in pair)
    found = per_token(p, Head(torch.eye(p.shape[1])), q, Head(torch.eye(q.shape[1])), torch.zeros(1, dtype=torch.int64))
    exact_p, exact_q = (side.double().log_softmax(dim=-1) for side in (p, q))
    exact = float((exact_p.exp() * (exact_p - exact_q)).sum())
    assert found.kl.item() == pytest.approx(exact, rel=1e-5, abs=1e-6)
    assert found.kl.item() > -1e-6
    assert found.tv.item() <= math.sqrt((max(found.kl.item(), 0) + 1e-6) / 2)
    assert found.tv.item() == pytest.approx(float((exact_p.exp() - exact_q.exp()).abs().sum()) / 2, abs=1e-6)


def test_a_distribution_that_gives_up_all_that_the_base_wants_has_a_finite_kl():
    """exp underflows at both ends here; a form that divides by it would give NaN."""
    found = per_token(tensor([[300.0, 0.0, -300.0]]), Head(torch.eye(3)), tensor([[-300.0, 0.0, 300.0]]), Head(torch.eye(3)), tensor([0]))
    assert found.kl.item() == pytest.approx(600) and found.tv.item() == 1 and found.nll.item() == pytest.approx(600)


def test_values_that_are_not_finite_are_not_hidden():
    found = per_token(tensor([[1.0, 2.0]]), Head(torch.eye(2)), tensor([[math.nan, 2.0]]), Head(torch.eye(2)), tensor([0]))
    assert found.kl.isnan().all() and not found.agrees.any()


def hidden_of(model, lengths, side="right", seed=0, **options):
    """Final states at the scored positions of random windows of these lengths, and their targets."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, model.config.vocab_size, (max(lengths) * len(lengths),), generator=generator)
    cover, begin = [], 0
    for length in lengths:
        cover.append(type(windows(2, 2, 1)[0])(begin, begin + length, begin + 1))
        begin += length
    states, targets = [], []
    for batch in batches(ids, cover, side=side, **{"batch": len(lengths), **options}):
        states.append(final_hidden(model, batch.ids, batch.mask)[batch.rows, batch.columns])
        targets.append(batch.targets)
    return torch.cat(states), torch.cat(targets)


def gemma2():
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        final_logit_softcapping=3.0,
    )  # fmt: skip
    return Gemma2ForCausalLM(config).eval()


def granite():
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        logits_scaling=4.0,
    )
    return GraniteForCausalLM(config).eval()


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=128, bos_token_id=1, eos_token_id=2)
    model = GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(6 if parameter.ndim >= 2 else 1)
    return model


@pytest.mark.parametrize("make", [None, gemma2, granite, gpt2])
def test_the_head_of_the_final_states_is_the_logits(make, tl8):
    """Fed with states before the final norm, or without a cap or scale that the architecture puts behind the head, all divergences are wrong."""
    model = tl8 if make is None else make()
    ids = torch.randint(0, 64, (2, 11), generator=torch.Generator().manual_seed(1))
    states = final_hidden(model, ids, torch.ones_like(ids))
    with torch.inference_mode():
        expected = model(input_ids=ids).logits
    ours = head_of(model).logits(states.flatten(0, 1)).reshape(expected.shape)
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()
    if make is None:
        assert ours.equal(expected)
    check_head(model, head_of(model), ids[0])


def test_a_head_that_does_not_make_the_logits_is_refused(tl8):
    with pytest.raises(ValueError, match="differ by"):
        check_head(tl8, head_of(tl8)._replace(scale=0.5), torch.arange(8))
    with pytest.raises(ValueError, match="no linear output head"):
        head_of(tl8.model)


def test_the_head_does_not_run_in_the_body(tl8):
    calls = []
    tl8.lm_head.register_forward_hook(lambda *_: calls.append(1))
    final_hidden(tl8, torch.ones(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.int64))
    assert not calls


@pytest.mark.parametrize("make", [None, gpt2])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_gives_the_kl_of_the_windows_one_by_one(make, side, tl8):
    """Lengths 12 and 5. Without a mask a left-padded Llama is off by 8 logits, without positions a GPT-2 by 0.5, and pads scored shift the mean."""
    base = tl8 if make is None else make()
    variant = type(base)(base.config).eval()
    variant.load_state_dict(base.state_dict())
    name = "model.layers.1.mlp.down_proj.weight" if make is None else "transformer.h.1.mlp.c_proj.weight"
    variant.get_parameter(name).data.mul_(0.7)
    together, alone = (per_token(*states_and_heads(base, variant, [12, 5, 12], side=side, batch=batch)) for batch in (3, 1))
    assert len(together.kl) == 11 + 4 + 11
    assert (together.kl - alone.kl).abs().max() < 1e-5 and abs(together.kl.mean() - alone.kl.mean()) < 1e-6
    assert (together.nll - alone.nll).abs().max() < 1e-4
    assert alone.kl.mean() > 1e-3


def states_and_heads(base, variant, lengths, **options):
    base_states, targets = hidden_of(base, lengths, **options)
    states, _ = hidden_of(variant, lengths, **options)
    return base_states, head_of(base), states, head_of(variant), targets


def test_pads_averaged_in_would_change_the_kl_of_a_model_without_a_layer(tl8, make_llama):
    """What scoring the five padded positions as well would report, beside what we report."""
    variant = make_llama()
    del variant.model.layers[1]
    for index, layer in enumerate(variant.model.layers):
        layer.self_attn.layer_idx = index
    variant.config.num_hidden_layers = 3
    ids = torch.randint(3, 128, (1, 12), generator=torch.Generator().manual_seed(0))
    padded, mask = (
        torch.cat([torch.zeros(1, 5, dtype=torch.int64), ids], dim=1),
        torch.cat([torch.zeros(1, 5), torch.ones(1, 12)], dim=1).long(),
    )
    targets = torch.zeros(17, dtype=torch.int64)
    heads = head_of(tl8), head_of(variant)
    states = [final_hidden(model, padded, mask)[0] for model in (tl8, variant)]
    everything = per_token(states[0], heads[0], states[1], heads[1], targets).kl
    plain = [final_hidden(model, ids, torch.ones_like(ids))[0] for model in (tl8, variant)]
    real = per_token(plain[0], heads[0], plain[1], heads[1], targets[:12]).kl
    assert (everything[5:] - real).abs().max() < 1e-4
    assert real.mean() > 0.5 and abs(everything.mean() - real.mean()) > 0.01


def test_a_model_against_itself_has_no_kl(tl8, make_llama):
    states, targets = hidden_of(tl8, [64] * 8)
    head = head_of(tl8)
    again = per_token(states, head, states.clone(), head, targets, base=reference(states, head, targets))
    assert again.kl.abs().max() < 1e-6 and abs(again.kl.mean()) < 1e-8 and again.agrees.all()
    other_batch, _ = hidden_of(tl8, [64] * 8, batch=3)
    assert abs(per_token(states, head, other_batch, head, targets).kl.mean()) < 1e-8


def test_an_empty_change_is_told_from_rounding(tl8):
    """A weight moved by 1e-4 gives a KL of 1e-9 or so: float32 logarithms and sums would drown it in noise of 1e-6."""
    states, targets = hidden_of(tl8, [64] * 4)
    head = head_of(tl8)
    moved = Head(head.weight + 1e-5 * torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(0)))
    exact_p, exact_q = ((states.double() @ each.weight.double().T).log_softmax(dim=-1) for each in (head, moved))
    exact = float((exact_p.exp() * (exact_p - exact_q)).sum(dim=-1).mean())
    assert per_token(states, head, states, moved, targets).kl.mean().item() == pytest.approx(exact, abs=5e-9)


@pytest.mark.parametrize("base_rows", [128, 136])
def test_a_head_padded_further_is_cut_to_the_shared_ids_and_renormalised(base_rows):
    """136 rows against 128, with mass on row 130: mass on ids that no token has must neither crash nor count."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(6, 16, generator=generator)
    wide, narrow = Head(torch.randn(136, 16, generator=generator)), Head(torch.randn(128, 16, generator=generator))
    wide.weight[130] = 3 * states[0]
    base, head = (narrow, wide) if base_rows == 128 else (wide, narrow)
    targets = torch.arange(6)
    found = per_token(states, base, states, head, targets, base=reference(states, base, targets))
    log_p, log_q = (each.cut(128).logits(states).double().log_softmax(dim=-1) for each in (base, head))
    assert found.kl.tolist() == pytest.approx((log_p.exp() * (log_p - log_q)).sum(dim=-1).tolist(), rel=1e-4)
    assert found.base_nll.tolist() == pytest.approx((-log_p[torch.arange(6), targets]).tolist(), rel=1e-4)
    with pytest.raises(ValueError, match="outside the 128 ids"):
        per_token(states, base, states, head, targets + 125)


@pytest.mark.parametrize(("chunk", "block"), [(1, 1), (3, 300), (128, 1 << 19), (64, 128 * 7)])
def test_chunks_and_blocks_change_nothing(monkeypatch, chunk, block, tl8):
    states, targets = hidden_of(tl8, [20, 9])
    head, other = head_of(tl8), Head(head_of(tl8).weight * 0.9)
    expected = per_token(states, head, states, other, targets, base=reference(states, head, targets))
    monkeypatch.setattr(module, "BLOCK", block)
    found = per_token(states, head, states, other, targets, base=reference(states, head, targets, chunk=chunk), chunk=chunk)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.float() - theirs.float()).abs().max() < 1e-5


def test_what_is_kept_of_the_base_is_what_would_be_found_again(tl8):
    states, targets = hidden_of(tl8, [20, 9])
    head, other = head_of(tl8), Head(head_of(tl8).weight * 0.9)
    kept, found = (per_token(states, head, states, other, targets, base=base) for base in (reference(states, head, targets), None))
    for ours, theirs in zip(kept, found, strict=True):
        assert (ours.float() - theirs.float()).abs().max() < 1e-5


def test_half_precision_states_are_compared_in_float32(tl8):
    """A log-softmax in bfloat16 gives a self-KL of 5e-5."""
    states, targets = hidden_of(tl8, [64, 64])
    head = head_of(tl8)
    half = states.bfloat16()
    assert per_token(half.float(), head, half, head, targets).kl.abs().max() < 1e-6


def test_a_quantized_cache_reaches_the_states(tl8):
    from assay.ops.kv.cache import make_cache

    ids = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    plain, full, rounded = (final_hidden(tl8, ids, mask, cache) for cache in (None, make_cache(tl8), make_cache(tl8, "int8")))
    assert (full - plain).abs().max() < 1e-5
    assert (rounded - plain).abs().max() > 1e-3
