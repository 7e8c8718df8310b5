"""What is kept of a teacher: states that are its own, the likeliest ids and the mass of the rest."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.evaluate.divergence import Head, head_of
from assay.ops.train import passes
from assay.ops.train.losses import distillation_sum, divergence
from assay.ops.train.overlap import states_of
from assay.ops.train.teachers import rows_of, teacher_states, top_k_logits, top_k_of, top_k_sum


@pytest.fixture(scope="module")
def teacher(teacher_of):
    return teacher_of()


def flat(top):
    return rows_of(top, torch.ones_like(top.log_tail, dtype=torch.bool), torch.device("cpu"))


def identity(vocab):
    """A head whose logits are its states."""
    return Head(torch.eye(vocab))


def random_logits(seed, vocab, scale=2.0):
    return scale * torch.randn(1, 5, vocab, generator=torch.Generator().manual_seed(seed))


def test_states_are_those_of_the_model_a_few_windows_at_a_time(teacher, text, monkeypatch):
    windows = text(5)
    monkeypatch.setattr(passes, "FORWARD_TOKENS", 50)
    found = teacher_states(teacher, windows)
    assert found.dtype == torch.bfloat16 and found.shape == (5, 24, 32)
    assert torch.allclose(found.float(), states_of(teacher, windows), rtol=1e-2)


def test_the_likeliest_ids_and_the_rest_worked_by_hand():
    p = torch.tensor([[[0.5, 0.1, 0.3, 0.1]]])
    top = top_k_of(p.log(), identity(4), 2)
    assert top.ids.tolist() == [[[0, 2]]] and top.vocabulary == 4
    assert top.log_probabilities.exp().flatten().tolist() == pytest.approx([0.5, 0.3]) and top.log_tail.exp().item() == pytest.approx(0.2)
    q = torch.tensor([[0.2, 0.2, 0.2, 0.4]])
    kl = divergence("forward_kl")
    bucket = top_k_sum(flat(top), q.log(), identity(4), kl, tail="bucket")
    assert bucket.item() == pytest.approx(0.5 * math.log(0.5 / 0.2) + 0.3 * math.log(0.3 / 0.2) + 0.2 * math.log(0.2 / 0.6), rel=1e-5)
    renormalised = top_k_sum(flat(top), q.log(), identity(4), kl, tail="renormalised")
    assert renormalised.item() == pytest.approx(0.625 * math.log(0.625 / 0.5) + 0.375 * math.log(0.375 / 0.5), rel=1e-5)


def test_of_a_model_they_are_the_sorted_probabilities(teacher, text, monkeypatch):
    windows = text(5)
    whole = top_k_logits(teacher, windows, 6)
    monkeypatch.setattr(passes, "FORWARD_TOKENS", 50)
    parts = top_k_logits(teacher, windows, 6)
    with torch.no_grad():
        p = teacher(windows).logits.softmax(-1).sort(descending=True, stable=True)
    assert torch.equal(whole.ids, p.indices[..., :6].int()) and torch.equal(whole.ids, parts.ids)
    assert torch.allclose(whole.log_probabilities.exp(), p.values[..., :6], atol=1e-5)
    assert torch.allclose(whole.log_tail.exp(), p.values[..., 6:].sum(-1), atol=1e-5)
    cut = top_k_logits(teacher, windows, 6, vocabulary=10)
    assert cut.ids.max() < 10 and cut.vocabulary == 10
    assert torch.allclose(cut.log_probabilities.exp().sum(-1) + cut.log_tail.exp(), torch.ones(5, 24), atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6), vocab=st.integers(3, 40), k=st.integers(1, 39),
    name=st.sampled_from(["forward_kl", "reverse_kl", "total_variation", "jensen_shannon"]),
)  # fmt: skip
def test_a_bucket_merges_events_and_so_never_exceeds_the_full_divergence(seed, vocab, k, name):
    k = min(k, vocab - 1)
    teacher, student, compare = random_logits(seed, vocab), random_logits(seed + 1, vocab)[0], divergence(name)
    top = flat(top_k_of(teacher, identity(vocab), k))
    full = distillation_sum(teacher[0], identity(vocab), student, identity(vocab), compare)
    found = top_k_sum(top, student, identity(vocab), compare, tail="bucket")
    assert -1e-5 <= found <= full + 1e-4
    if k == vocab - 1:
        assert found.item() == pytest.approx(full.item(), abs=1e-4)
    for tail in ("bucket", "renormalised"):
        assert abs(top_k_sum(top, teacher[0], identity(vocab), compare, tail=tail)) < 1e-5  # of a model with itself


@pytest.mark.parametrize("tail", ["bucket", "renormalised"])
def test_the_gradient_is_that_of_autograd_and_renormalised_leaves_the_tail_alone(tail):
    teacher, student = random_logits(0, 12), random_logits(1, 12)[0].requires_grad_()
    top = flat(top_k_of(teacher, identity(12), 4))
    top_k_sum(top, student, identity(12), divergence("forward_kl"), tail=tail, chunk=2).backward()
    other = student.detach().clone().requires_grad_()
    logits = other.gather(-1, top.ids.long())
    known = top.log_probabilities.log_softmax(-1)
    if tail == "renormalised":
        expected = (known.exp() * (known - logits.log_softmax(-1))).sum()
    else:
        q = logits - other.logsumexp(-1, keepdim=True)
        inside = (top.log_probabilities.exp() * (top.log_probabilities - q)).sum()
        expected = inside + (top.log_tail.exp() * (top.log_tail - (1 - q.exp().sum(-1)).log())).sum()
    expected.backward()
    assert torch.allclose(student.grad, other.grad, atol=1e-5)
    beyond = torch.ones_like(other, dtype=torch.bool).scatter_(1, top.ids.long(), False)
    assert (student.grad[beyond].abs().max() > 1e-4) == (tail == "bucket")


@pytest.mark.parametrize("k", [0, 64])
def test_no_ids_and_all_ids_are_refused(k, teacher, text):
    with pytest.raises(ValueError, match=rf"the {k} most likely of 64 ids; 1 to 63 leave a tail"):
        top_k_logits(teacher, text(2), k)
    with pytest.raises(ValueError, match=rf"the {k} most likely"):
        top_k_of(states_of(teacher, text(2)), head_of(teacher), k)
