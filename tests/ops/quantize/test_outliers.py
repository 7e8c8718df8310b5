"""A few columns in 16 bits."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.quantize.activations import Activations, quantize_activations
from assay.ops.quantize.grid import Format, dequantize, quantize
from assay.ops.quantize.outliers import above, multiply, share, split


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_columns_worked_by_hand():
    largest = torch.tensor([6.0, 1, 9, 7, 9])
    assert above(largest).tolist() == [2, 3, 4]
    assert share(largest, 40).tolist() == [2, 4]
    assert share(largest, "20").tolist() == [2]  # a tie: the earlier
    assert share(largest, "0.01").tolist() == [2] and share(largest, 0).tolist() == [] and share(largest, 100).tolist() == [0, 1, 2, 3, 4]


def test_equal_saliences_do_not_change_how_many_are_kept():
    for percent, count in ((10, 100), ("0.1", 1), (Fraction(1, 3), 4), ("29.9", 299)):
        assert len(share(torch.ones(1000), percent)) == count


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999), count=st.integers(0, 32))
@pytest.mark.parametrize("format", [Format(bits=8, group_size=-1), Format(bits=4, group_size=8, symmetric=False), Format("nf4", 4, 16)])
def test_the_parts_together_are_exact_on_kept_columns_and_rounded_elsewhere(format, seed, count):
    weight = normal(6, 32, seed=seed).bfloat16()
    columns = torch.randperm(32, generator=torch.Generator().manual_seed(seed))[:count]
    found = split(weight, columns, format)
    assert torch.equal(found.dense()[:, columns], weight[:, columns].float())
    rest = dequantize(found.rest)
    assert not rest[:, columns].any()
    zeroed = weight.float().index_fill(1, columns, 0.0)
    assert torch.equal(rest, dequantize(quantize(zeroed, format)))
    values = normal(5, 32, seed=seed + 1)
    assert torch.allclose(multiply(values, found), values @ found.dense().T, atol=1e-4)


def test_outlier_channels_no_longer_set_the_step_of_the_inputs_nor_outlier_weights_that_of_a_row():
    """Inputs with two channels of 60: int8 per token loses the others; kept apart it does not."""
    values, weight = normal(64, 128), normal(32, 128, seed=1)
    values[:, [5, 77]] *= 60
    exact = values @ weight.T
    columns = above(values.abs().amax(dim=0))
    assert columns.tolist() == [5, 77]
    apart = multiply(values, split(weight, columns, dtype=torch.float16), Activations())
    together = quantize_activations(values, Activations()) @ dequantize(quantize(weight, Format(bits=8, group_size=-1))).T
    assert (apart - exact).square().mean() < (together - exact).square().mean() / 100
    spiked = weight.clone()
    spiked[:, 5] *= 50
    four = Format(bits=4, group_size=-1)
    left = torch.arange(128) != 5
    kept = (split(spiked, torch.tensor([5]), four).dense() - spiked)[:, left].square().mean()
    assert kept < (dequantize(quantize(spiked, four)) - spiked)[:, left].square().mean() / 20


def test_columns_and_shares_that_do_not_exist_are_refused():
    weight = normal(2, 8)
    for columns in ([8], [-1], [1, 1]):
        with pytest.raises(ValueError, match="each is a number from 0 to 7, given once"):
            split(weight, torch.tensor(columns))
    with pytest.raises(ValueError, match="101 percent"):
        share(torch.ones(4), 101)
    with pytest.raises(ValueError, match="1 of 2 columns have a salience"):
        share(torch.tensor([1.0, torch.nan]), 10)
