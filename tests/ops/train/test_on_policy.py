"""Samples of the student: drawn from its own distributions, read back by it, and worth nothing after their end."""

import pytest
import torch

from assay.ops.train.batches import batch_of
from assay.ops.train.on_policy import OnPolicy, default_sampler, prefix_of, sample_with_cache, until_end, with_samples


@pytest.fixture(scope="module")
def teacher(teacher_of):
    return teacher_of()


def test_after_a_sampled_end_nothing_counts_and_an_end_in_the_text_ends_nothing():
    ids = torch.tensor([[5, 2, 6, 7, 2, 8], [5, 6, 7, 8, 9, 10], [5, 6, 2, 2, 9, 10]])
    assert until_end(ids, 2, {2, 99}).tolist() == [
        [True, True, True, True, False, False],
        [True, True, True, True, True, True],
        [True, True, False, False, False, False],
    ]
    assert until_end(ids, 2, frozenset()).all()


def test_samples_follow_the_models_own_distribution(teacher):
    """The first sampled token of 4,000 rows against its probabilities: χ² with as many degrees of freedom as there are likely ids."""
    prompts = torch.tensor([[5, 9, 17]]).expand(4000, -1)
    found = sample_with_cache(teacher, prompts, 1, torch.Generator().manual_seed(0))
    assert found.shape == (4000, 4) and torch.equal(found[:, :3], prompts)
    with torch.no_grad():
        p = teacher(prompts[:1]).logits[0, -1].softmax(-1)
    counts = torch.bincount(found[:, 3], minlength=64).double()
    likely = p * 4000 > 5
    chi = float(((counts - 4000 * p)[likely].square() / (4000 * p)[likely]).sum())
    assert chi < 2 * int(likely.sum()), chi


def test_samples_read_what_was_sampled_before_them(teacher, monkeypatch):
    """With the most likely token in the place of a draw, the cache gives the greedy continuation of full forwards."""
    monkeypatch.setattr(torch, "multinomial", lambda p, count, generator: p.argmax(dim=-1, keepdim=True))
    prompts = torch.tensor([[5, 9, 17], [33, 3, 60]])
    found = default_sampler(64)(teacher, prompts, 6, torch.Generator())
    expected = prompts
    for _ in range(6):
        with torch.no_grad():
            expected = torch.cat([expected, teacher(expected).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(found, expected)


def test_ids_beyond_the_tokenizer_are_never_sampled(teacher):
    found = default_sampler(10)(teacher, torch.full((64, 1), 5), 8, torch.Generator().manual_seed(0))
    assert found.max() < 10


def test_marked_rows_keep_their_beginning_and_are_no_text_any_more(teacher, text):
    windows = text(6, 8)
    batch = batch_of(windows, torch.tensor([4, 1, 5, 0]))
    assert torch.equal(batch.ids, windows[[4, 1, 5, 0]]) and batch.real.all() and batch.text.all()
    sample = lambda model, prompts, new, random: torch.cat([prompts, torch.tensor([[9, 2, 9, 9]]).expand(len(prompts), -1)], dim=1)  # noqa: E731
    found = with_samples(batch, 0, teacher, OnPolicy(50, 4, {2}, sample), seed=0)
    assert found.text.tolist() == [True, False, True, False] and found.numbers.tolist() == [4, 1, 5, 0]
    assert torch.equal(found.ids[[0, 2]], batch.ids[[0, 2]]) and torch.equal(found.ids[[1, 3], :4], batch.ids[[1, 3], :4])
    assert found.ids[1, 4:].tolist() == [9, 2, 9, 9] and found.real[1].tolist() == [True] * 5 + [False] * 3 and found.real[0].all()
    assert torch.equal(batch.ids, windows[[4, 1, 5, 0]])  # the batch given is left alone
    assert with_samples(batch, 0, teacher, OnPolicy(0), seed=0) is batch


def test_a_quarter_of_the_window_is_kept_when_nothing_is_said():
    assert [prefix_of(OnPolicy(10), length) for length in (2, 8, 100)] == [1, 2, 25] and prefix_of(OnPolicy(0, 99), 8) == 99
