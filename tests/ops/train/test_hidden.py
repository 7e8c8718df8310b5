"""The distance of hidden states by hand and by law; which block is compared with which."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, tensor

from assay.ops.train.hidden import hidden_sum, maps_between, paired_blocks


def states(seed, rows=2, length=3, width=8):
    return torch.randn(rows, length, width, generator=torch.Generator().manual_seed(seed))


def test_the_distance_worked_by_hand():
    """The root mean square of (3, 4) is 5 / √2, so it becomes (0.6, 0.8) · √2; that of (1, −1) is 1."""
    own, other = {0: tensor([[[3.0, 4.0]]])}, {5: tensor([[[1.0, -1.0]]])}
    expected = ((0.6 * 2**0.5 - 1) ** 2 + (0.8 * 2**0.5 + 1) ** 2) / 2
    found = hidden_sum(own, other, [(0, 5)], nn.ModuleList(), torch.ones(1, 1, dtype=torch.bool))
    assert found.item() == pytest.approx(expected, rel=1e-5)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.floats(0.1, 100))
def test_the_distance_is_twice_one_less_the_cosine_and_knows_no_scale(seed, scale):
    own, other = states(seed), states(seed + 1)
    counted = torch.rand(2, 3, generator=torch.Generator().manual_seed(seed)) < 0.7
    found = hidden_sum({0: own * scale}, {0: other}, [(0, 0)], nn.ModuleList(), counted)
    expected = (2 - 2 * nn.functional.cosine_similarity(own, other, dim=-1))[counted].sum()
    assert torch.allclose(found, expected, atol=1e-3) and 0 <= found <= 4 * int(counted.sum()) + 1e-3


def test_several_pairs_are_averaged_and_what_does_not_count_changes_nothing():
    own, other = {0: states(0), 1: states(1)}, {2: states(2), 3: states(3)}
    counted = tensor([[True, False, True], [False, False, True]])
    each = [hidden_sum(own, other, [pair], nn.ModuleList(), counted) for pair in ((0, 2), (1, 3))]
    both = hidden_sum(own, other, [(0, 2), (1, 3)], nn.ModuleList(), counted)
    assert both.item() == pytest.approx(sum(each).item() / 2)
    own[0][~counted] = 1e3
    assert torch.equal(hidden_sum(own, other, [(0, 2), (1, 3)], nn.ModuleList(), counted), both)


def test_a_map_stands_between_different_widths_and_only_there():
    assert not len(maps_between(8, 8, [(0, 1)]))
    maps = maps_between(6, 8, [(0, 1), (1, 3)], seed=2)
    assert [tuple(each.weight.shape) for each in maps] == [(8, 6), (8, 6)]
    assert torch.allclose(maps[0].weight.T @ maps[0].weight, torch.eye(6), atol=1e-5) and not torch.equal(maps[0].weight, maps[1].weight)
    assert torch.equal(maps[1].weight, maps_between(6, 8, [(0, 1), (1, 3)], seed=2)[1].weight)
    own = states(0, width=6)
    other = maps[0](own).detach() * 3
    counted = torch.ones(2, 3, dtype=torch.bool)
    assert hidden_sum({0: own}, {1: other}, [(0, 1)], maps, counted).item() == pytest.approx(0, abs=1e-6)
    hidden_sum({0: own}, {1: states(4)}, [(0, 1)], maps, counted).backward()
    assert maps[0].weight.grad.abs().sum() > 0


def test_each_kept_block_is_compared_with_the_one_it_was():
    assert paired_blocks([0, 1, 4, 5]) == ((0, 0), (1, 1), (2, 4), (3, 5))
    with pytest.raises(ValueError, match=r"kept blocks \[0, 4, 2\]; .* each once and rising"):
        paired_blocks([0, 4, 2])
