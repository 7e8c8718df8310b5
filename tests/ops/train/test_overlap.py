"""The overlap of a student with its teacher, against its definition; and passes over documents that do not see one another."""

import copy

import pytest
import torch

from assay.ops.models.early_exit import early_exit
from assay.ops.train.overlap import overlap_with, states_of


@pytest.fixture(scope="module")
def teacher(teacher_of):
    return teacher_of()


@pytest.fixture
def student(teacher):
    return early_exit(copy.deepcopy(teacher), 1)


def test_the_overlap_is_the_sum_of_the_smaller_probability(teacher, student, text):
    held_out = text(5, seed=2)
    with torch.no_grad():
        p, q = (model(held_out).logits[:, :-1].double().softmax(-1) for model in (teacher, student))
    found = overlap_with(teacher, held_out)(student)
    assert found.overlap == pytest.approx(torch.minimum(p, q).sum(-1).mean().item(), abs=1e-6)
    assert found.kl_nats == pytest.approx((p * (p / q).log()).sum(-1).mean().item(), rel=1e-4)
    assert found.top1_agreement == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    nll = [-each.log().gather(-1, held_out[:, 1:, None]).mean().item() for each in (q, p)]
    assert [found.log_perplexity, found.base_log_perplexity] == pytest.approx(nll, rel=1e-5)
    itself = overlap_with(teacher, held_out)(teacher)
    assert itself == pytest.approx((1, 0, 1, nll[1], nll[1]), abs=1e-5)


def test_states_of_many_windows_are_those_of_each(teacher, text, monkeypatch):
    from assay.ops.train import passes

    windows = text(7)
    whole = states_of(teacher, windows)
    monkeypatch.setattr(passes, "FORWARD_TOKENS", 50)
    assert torch.allclose(states_of(teacher, windows), whole, atol=1e-5)
    assert states_of(teacher, windows, dtype=torch.bfloat16).dtype == torch.bfloat16
