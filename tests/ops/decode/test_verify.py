"""The verification rule alone: exact by enumeration, and by many draws."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.ops.decode.acceptance import overlap
from assay.ops.decode.sampling import sample
from assay.ops.decode.verify import residual, verify, verify_siblings

DRAWS = 8_000
many_draws = pytest.mark.usefixtures("unchecked_shapes")  # checking each call would take longer than the draws


def distribution(weights):
    row = torch.tensor(weights, dtype=torch.float64)
    return row / row.sum()


distributions = st.lists(st.integers(0, 20), min_size=4, max_size=4).filter(any).map(distribution)


def chi_squared(counts, expected) -> float:
    return sum((counts[key] - mean) ** 2 / mean for key, mean in expected.items() if mean > 0)


@given(p=distributions, q=distributions)
def test_acceptance_and_residual_give_back_the_target_exactly(p, q):
    output = torch.zeros_like(p)
    for token in range(4):
        if q[token] > 0:
            accepted = min(1.0, float(p[token] / q[token]))
            output[token] += q[token] * accepted
            output += q[token] * (1 - accepted) * residual(p, q)
    assert torch.allclose(output, p, atol=1e-12)


@given(p=distributions, token=st.integers(0, 3))
def test_a_determined_proposal_is_accepted_with_p_and_else_replaced_by_the_others(p, token):
    one_hot = torch.zeros_like(p)
    one_hot[token] = 1
    output = p[token] * one_hot + (1 - p[token]) * residual(p, one_hot)
    assert torch.allclose(output, p, atol=1e-12)


def test_the_residual_worked_by_hand():
    assert residual(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])).tolist() == [1, 0, 0]
    assert torch.allclose(residual(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.0, 1.0, 0.0])), torch.tensor([5 / 7, 0, 2 / 7]))


@many_draws
def test_a_greedy_draft_does_not_bend_the_distribution_towards_its_softmax():
    # The draft's softmax is (.9, .1) and it proposes its argmax, 0. Dividing by .9 would accept 0 with .667 instead of .6.
    p = torch.tensor([[0.6, 0.4], [0.5, 0.5]])
    generator = torch.Generator().manual_seed(0)
    first = Counter()
    for _ in range(5000):
        verified = verify(p, None, [0], generator)
        first[0 if verified.accepted else verified.next_token] += 1
    assert first[0] / 5000 == pytest.approx(0.600, abs=4 * (0.6 * 0.4 / 5000) ** 0.5)  # 0.028


@many_draws
def test_the_output_has_the_target_distribution_and_the_acceptance_is_the_overlap():
    # Drawing from p after a rejection would give (.35, .39, .26).
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.5, 0.3])
    generator = torch.Generator().manual_seed(0)
    first, accepted = Counter(), 0
    for _ in range(DRAWS):
        proposal = sample(q, generator)
        verified = verify(torch.stack([p, p]), q.unsqueeze(0), [proposal], generator)
        accepted += verified.accepted
        first[proposal if verified.accepted else verified.next_token] += 1
    assert chi_squared(first, {token: float(p[token]) * DRAWS for token in range(3)}) < 13.8  # 2 degrees of freedom, p = 0.001
    alpha = float(overlap(p, q))
    assert alpha == pytest.approx(0.70)
    assert accepted / DRAWS == pytest.approx(alpha, abs=4 * (alpha * (1 - alpha) / DRAWS) ** 0.5)


@many_draws
def test_two_proposals_from_a_chain_give_the_target_distribution_of_pairs():
    # Rows depend on the token before them, so a rule that used a wrong row, or a bonus token from the residual, would show.
    generator = torch.Generator().manual_seed(3)
    p0, q0 = distribution([4, 3, 1]).float(), distribution([1, 4, 3]).float()
    p1 = torch.stack([distribution(row) for row in ([1, 1, 6], [5, 2, 1], [1, 6, 1])]).float()
    q1 = torch.stack([distribution(row) for row in ([3, 2, 1], [1, 1, 6], [2, 3, 1])]).float()
    pairs = Counter()
    draws = DRAWS // 2
    for _ in range(draws):
        first = sample(q0, generator)
        verified = verify(torch.stack([p0, p1[first]]), q0.unsqueeze(0), [first], generator)
        if verified.accepted:
            pairs[first, verified.next_token] += 1  # a bonus token
        else:
            first = verified.next_token
            second = sample(q1[first], generator)
            checked = verify(torch.stack([p1[first], p0]), q1[first].unsqueeze(0), [second], generator)
            pairs[first, second if checked.accepted else checked.next_token] += 1
    expected = {(a, b): float(p0[a] * p1[a, b]) * draws for a in range(3) for b in range(3)}
    assert chi_squared(pairs, expected) < 26.1  # 8 degrees of freedom, p = 0.001


@given(weights=st.lists(st.integers(0, 9), min_size=5, max_size=5).filter(any), seed=st.integers(0, 2**31))
def test_equal_distributions_never_reject(weights, seed):
    generator = torch.Generator().manual_seed(seed)
    row = distribution(weights).float()
    proposals = [sample(row, generator) for _ in range(3)]
    verified = verify(row.expand(4, -1), row.expand(3, -1), proposals, generator)
    assert verified.accepted == 3
    assert row[verified.next_token] > 0


def test_equal_distributions_leave_the_target_as_residual_and_no_nan():
    row = torch.tensor([0.5, 0.3, 0.2])
    assert torch.equal(residual(row, row), row)


def test_the_first_rejection_ends_the_round():
    sure = torch.eye(4)
    # The target wants 0, 1, 2, 3; the third proposal is wrong, and the fourth, though right, comes too late.
    assert verify(torch.cat([sure, sure[:1]]), None, [0, 1, 3, 3], None) == (2, 2)
    assert verify(torch.cat([sure, sure[:1]]), None, [0, 1, 2, 3], None) == (4, 0)
    assert verify(sure[2:3], None, [], None) == (0, 2)


@pytest.mark.usefixtures("unchecked_shapes")
def test_what_does_not_fit_is_refused():
    p, q = torch.full((3, 4), 0.25), torch.full((2, 4), 0.25)
    with pytest.raises(ValueError, match=r"expected \(2, vocabulary\)"):
        verify(p, q[:1], [0], torch.Generator())
    with pytest.raises(ValueError, match="for 2 proposals"):
        verify(p, q[:, :3], [0, 1], torch.Generator())
    with pytest.raises(ValueError, match="cannot have been drawn"):
        verify(p[:2], torch.tensor([[0.0, 1, 0, 0]]), [0], torch.Generator())
    with pytest.raises(ValueError, match="generator"):
        verify(p[:2], q[:1] * 2, [0], None)


@many_draws
def test_siblings_come_as_the_target_would_and_not_more_often():
    """p = (.5, .3, .2), candidates 0 and 1: without leaving a rejected one out, token 1 would come with .15 instead of .3."""
    p, random, count = torch.tensor([0.5, 0.3, 0.2]), torch.Generator().manual_seed(0), 6000
    for siblings in ([0, 1], [1, 0], [2], []):
        found = torch.bincount(torch.tensor([verify_siblings(p, siblings, random) for _ in range(count)]), minlength=3) / count
        assert (found - p).abs().max() < 4 * (0.25 / count) ** 0.5
    assert {verify_siblings(torch.tensor([0.0, 1.0]), [0, 1], random) for _ in range(20)} == {1}
    with pytest.raises(ValueError, match="has a token twice"):
        verify_siblings(p, [1, 1], random)
