"""Losses by hand, by law, against autograd and finite differences; and that chunking changes nothing but memory."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import tensor

from assay.ops.evaluate.divergence import Head
from assay.ops.train import losses
from assay.ops.train.losses import (
    chunked_sum,
    cross_entropy,
    cross_entropy_sum,
    distillation_sum,
    divergence,
    forward_kl,
    jensen_shannon,
    reverse_kl,
    total_variation,
    trainable_head,
)

EVERY = ["forward_kl", "reverse_kl", "total_variation", "jensen_shannon"]
P, Q = tensor([[0.5, 0.5]]).log(), tensor([[0.9, 0.1]]).log()


def logits(tokens: int, vocab: int, seed: int = 0, *, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(tokens, vocab, generator=torch.Generator().manual_seed(seed))


# --- one token -------------------------------------------------------------------------------------------------------------------------------


def test_the_name_says_the_direction_teacher_first():
    """Swapped arguments of kl_div are the commonest fault: KL(P‖Q) and KL(Q‖P) of these two differ by 0.14."""
    assert forward_kl(P, Q).item() == pytest.approx(0.510826, abs=1e-6)
    assert reverse_kl(P, Q).item() == pytest.approx(0.368064, abs=1e-6)
    assert torch.nn.functional.kl_div(Q, P.exp(), reduction="sum").item() == pytest.approx(0.510826, abs=1e-6)
    assert total_variation(P, Q).item() == pytest.approx(0.4, abs=1e-6)
    # m = (.7, .3), and with beta = 1/4 m = (.8, .2)
    assert jensen_shannon(P, Q).item() == pytest.approx(0.1017492, abs=1e-6)
    assert jensen_shannon(P, Q, beta=0.25).item() == pytest.approx(0.0833034, abs=1e-6)
    assert cross_entropy(tensor([1]), Q).item() == pytest.approx(-math.log(0.1), abs=1e-6)


def test_a_loss_is_the_sum_over_the_vocabulary_whatever_the_shape_of_the_batch():
    """kl_div on [2, 3, 5] divides by 2 with batchmean, which is 3 times the value a token, and by 30 with mean, which is a fifth."""
    teacher, student = logits(6, 5), logits(6, 5, seed=1)
    ours = forward_kl(teacher, student).mean()
    shaped = student.log_softmax(-1).reshape(2, 3, 5), teacher.softmax(-1).reshape(2, 3, 5)
    kl = torch.nn.functional.kl_div
    assert kl(*shaped, reduction="batchmean") / ours == pytest.approx(3.0)
    with pytest.warns(UserWarning, match="batch size and the support size"):
        assert kl(*shaped, reduction="mean") / ours == pytest.approx(1 / 5)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_equal_distributions_are_at_no_distance_in_any_dtype(name, dtype):
    """The softmax is float32: in half precision a KL of a model with itself over 32,000 tokens of vocabulary would be −1.1e-4."""
    both = logits(4, 32_000).to(dtype)
    assert divergence(name)(both, both.clone()).abs().max() <= 1e-7


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), vocab=st.integers(2, 40), scale=st.floats(0.1, 8), temperature=st.floats(0.5, 4))
def test_divergences_are_at_least_zero_and_bounded_where_they_should_be(seed, vocab, scale, temperature):
    teacher, student = logits(3, vocab, seed, scale=scale), logits(3, vocab, seed + 1, scale=scale)
    values = {name: divergence(name, temperature=temperature)(teacher, student) for name in EVERY}
    assert all((value >= -1e-5).all() for value in values.values())
    assert (values["total_variation"] <= temperature * (1 + 1e-5)).all()
    assert (values["jensen_shannon"] <= temperature**2 * math.log(2) * (1 + 1e-5)).all()
    # Pinsker: TV ≤ √(KL / 2)
    assert (values["total_variation"] / temperature <= (values["forward_kl"].clamp(min=0) / temperature**2 / 2).sqrt() + 1e-4).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), vocab=st.integers(2, 30))
def test_the_complement_of_total_variation_is_the_overlap(seed, vocab):
    teacher, student = logits(4, vocab, seed), logits(4, vocab, seed + 1)
    overlap = torch.minimum(teacher.softmax(-1), student.softmax(-1)).sum(-1)
    assert torch.allclose(1 - total_variation(teacher, student), overlap, atol=1e-6)


def test_swapping_the_two_swaps_the_kls_and_turns_beta_round():
    teacher, student = logits(5, 11), logits(5, 11, seed=1)
    assert torch.allclose(forward_kl(teacher, student), reverse_kl(student, teacher))
    assert torch.allclose(jensen_shannon(teacher, student, beta=0.3), jensen_shannon(student, teacher, beta=0.7), atol=1e-6)


def test_the_ends_of_beta_are_the_two_kls_and_their_neighbourhood_is_refused():
    """Near an end the mixture is one of the two, and the value beta times a KL: a loss of nearly 0 that looks converged."""
    teacher, student = logits(5, 11, scale=0.5), logits(5, 11, seed=1, scale=0.5)
    assert torch.equal(jensen_shannon(teacher, student, beta=0), forward_kl(teacher, student))
    assert torch.equal(jensen_shannon(teacher, student, beta=1), reverse_kl(teacher, student))
    assert torch.allclose(jensen_shannon(teacher, student, beta=0.01) / 0.01, forward_kl(teacher, student), rtol=0.1)
    assert torch.allclose(jensen_shannon(teacher, student, beta=0.99) / 0.01, reverse_kl(teacher, student), rtol=0.1)
    for beta in (1e-6, 0.999, -0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"expected 0\.01 to 0\.99, or exactly 0 \(forward KL\) or 1"):
            jensen_shannon(teacher, student, beta=beta)


@pytest.mark.parametrize("name", EVERY)
def test_the_factor_of_the_temperature_keeps_the_size_of_the_gradient(name):
    teacher, student = logits(4, 16), logits(4, 16, seed=1)
    sizes = []
    for temperature in (100.0, 200.0):
        leaf = student.clone().requires_grad_()
        divergence(name, temperature=temperature)(teacher.double(), leaf.double()).sum().backward()
        sizes.append(leaf.grad.norm())
    assert sizes[1] / sizes[0] == pytest.approx(1, rel=0.02)


def test_the_gradient_of_the_forward_kl_is_q_minus_p_times_the_temperature():
    teacher, student = logits(4, 16), logits(4, 16, seed=1).requires_grad_()
    forward_kl(teacher, student, temperature=2.0).sum().backward()
    assert torch.allclose(student.grad, 2 * ((student / 2).softmax(-1) - (teacher / 2).softmax(-1)), atol=1e-6)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_gradients_are_finite_differences(name, temperature):
    teacher, student = logits(3, 7).double(), logits(3, 7, seed=1).double().requires_grad_()
    assert torch.autograd.gradcheck(partial(divergence(name, temperature=temperature, beta=0.3), teacher), (student,))


def test_padded_vocabularies_are_cut_to_the_ids_that_both_have_and_renormalised():
    """A teacher padded to 136 ids, with mass on id 130, beside a student of 128: finite, and the KL of the logits that are left."""
    teacher, student = logits(4, 136), logits(4, 128, seed=1)
    teacher[:, 130] = 9.0
    for name in EVERY:
        found = divergence(name)(teacher, student)
        assert found.isfinite().all()
        assert torch.equal(found, divergence(name)(teacher[:, :128], student))
        assert torch.equal(divergence(name)(student, teacher), divergence(name)(student, teacher[:, :128]))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_a_temperature_that_is_none_is_refused(temperature):
    with pytest.raises(ValueError, match="a finite number above 0 was expected"):
        divergence("forward_kl", temperature=temperature)


def test_an_unknown_loss_names_those_that_there_are():
    with pytest.raises(ValueError, match=r"no loss is named 'kl'; there are forward_kl, reverse_kl, total_variation, jensen_shannon"):
        divergence("kl")  # type: ignore[arg-type]


# --- many tokens -----------------------------------------------------------------------------------------------------------------------------


def head_and_states(*, vocab: int = 23, width: int = 6, tokens: int = 11, seed: int = 0, **more):
    random = torch.Generator().manual_seed(seed)
    weight, states = torch.randn(vocab, width, generator=random), torch.randn(tokens, width, generator=random)
    return Head(weight.requires_grad_(), **more), states.requires_grad_()


def plain_logits(states, head):
    """The head written out again."""
    found = head.scale * (states @ head.weight.T + (0 if head.bias is None else head.bias))
    return found if head.cap is None else head.cap * (found / head.cap).tanh()


@pytest.mark.parametrize("chunk", [1, 3, 11, 100])
@pytest.mark.parametrize("name", EVERY)
def test_chunks_give_the_value_and_the_gradients_of_the_whole(name, chunk, monkeypatch):
    monkeypatch.setattr(losses, "BLOCK", 50)  # two rows of 23 at a time
    teacher_head, teacher = head_and_states(width=9, seed=5)
    head, student = head_and_states()
    compare = divergence(name, temperature=1.5)
    ours = distillation_sum(teacher.detach(), teacher_head, student, head, compare, chunk=chunk)
    ours.backward()
    found = [student.grad.clone(), head.weight.grad.clone()]
    student.grad = head.weight.grad = None
    whole = compare(plain_logits(teacher, teacher_head).detach(), plain_logits(student, head)).sum()
    whole.backward()
    assert ours.item() == pytest.approx(whole.item(), rel=1e-5)
    for mine, theirs in zip(found, [student.grad, head.weight.grad], strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("more", [{"scale": 0.5}, {"cap": 3.0}, {"scale": 2.0, "cap": 4.0}])
def test_heads_with_bias_scale_and_cap_keep_their_gradients(more):
    head, student = head_and_states(bias=torch.randn(23, generator=torch.Generator().manual_seed(3)).requires_grad_(), **more)
    targets = torch.randint(0, 23, (11,), generator=torch.Generator().manual_seed(4))
    leaves = (student, head.weight, head.bias)
    ours = cross_entropy_sum(targets, student, head, chunk=4)
    found = torch.autograd.grad(ours, leaves)
    whole = torch.nn.functional.cross_entropy(plain_logits(student, head), targets, reduction="sum")
    assert ours.item() == pytest.approx(whole.item(), rel=1e-5)
    for mine, theirs in zip(found, torch.autograd.grad(whole, leaves), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_gradients_through_chunks_are_finite_differences():
    head, student = head_and_states(vocab=7, width=3, tokens=5)
    teacher = logits(5, 7, seed=9).double()

    def total(hidden, weight):
        return chunked_sum(hidden, Head(weight), lambda part: teacher[part], total_variation, chunk=2)

    assert torch.autograd.gradcheck(total, (student.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()))


def test_no_more_logits_exist_than_a_chunk_of_them_and_each_is_made_once():
    head, student = head_and_states(tokens=10)
    asked, compared = [], []

    def reference(part):
        asked.append((part.start, min(part.stop, 10)))
        return torch.zeros(min(part.stop, 10) - part.start, 23)

    def value(against, mine):
        compared.append(tuple(mine.shape))
        return forward_kl(against, mine)

    chunked_sum(student, head, reference, value, chunk=4).backward()
    assert asked == [(0, 4), (4, 8), (8, 10)]
    assert sum(rows for rows, _ in compared) == 10 and max(rows for rows, _ in compared) <= 4


def test_ids_beyond_the_tokenizer_count_for_nothing_and_get_no_gradient():
    teacher_head, teacher = head_and_states(seed=5)
    head, student = head_and_states(vocab=25)
    ours = distillation_sum(teacher.detach(), teacher_head, student, head, forward_kl, vocabulary=20)
    ours.backward()
    whole = forward_kl(plain_logits(teacher, teacher_head)[:, :20], plain_logits(student, head)[:, :20]).sum()
    assert ours.item() == pytest.approx(whole.item(), rel=1e-5)
    assert head.weight.grad[20:].abs().max() == 0 and head.weight.grad[:20].abs().min(dim=1).values.max() > 0


def test_without_gradients_nothing_is_kept_and_the_value_is_the_same():
    teacher_head, teacher = head_and_states(seed=5)
    head, student = head_and_states()
    with torch.no_grad():
        quiet = distillation_sum(teacher, teacher_head, student, head, forward_kl, chunk=4)
    loud = distillation_sum(teacher.detach(), teacher_head, student, head, forward_kl, chunk=4)
    assert not quiet.requires_grad and loud.requires_grad and quiet == loud


def test_nothing_is_the_sum_over_no_tokens():
    head, student = head_and_states()
    total = chunked_sum(student[:0], head, lambda part: torch.zeros(0, 23), forward_kl)
    total.backward()
    assert total == 0 and head.weight.grad.abs().max() == 0


def test_the_trained_head_is_the_models_own_parameter_and_has_to_be_float32(tl8):
    assert trainable_head(tl8).weight is tl8.lm_head.weight
    with pytest.raises(ValueError, match=r"is torch\.bfloat16; float32 weights are trained"):
        trainable_head(tl8.bfloat16())
