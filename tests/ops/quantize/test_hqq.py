"""Half-quadratic quantization."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.quantize.grid import Format, dequantize, groups, quantize
from assay.ops.quantize.hqq import hqq


def heavy(*shape, seed=0, freedom=3):
    """Student's t: a normal over the root of a mean of squares."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) / torch.randn(freedom, *shape, generator=generator).square().mean(0).sqrt() * 0.03


def lp(weight, quantized, p=0.7):
    return groups((dequantize(quantized) - weight).abs().pow(p), quantized.format).sum(dim=(1, 3))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "most"), [(2, 0.85), (3, 0.95), (4, 0.98)])
def test_heavy_tailed_weights_have_less_error_than_rounded_to_nearest(bits, most, symmetric):
    weight = heavy(64, 256)
    format = Format(bits=bits, group_size=64, symmetric=symmetric)
    found, nearest = hqq(weight, format), quantize(weight, format)
    assert lp(weight, found).sum() < most * lp(weight, nearest).sum()
    assert (dequantize(found) - weight).square().sum() < (dequantize(nearest) - weight).square().sum()


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 999),
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    size=st.sampled_from([1e-6, 1.0, 1e4]),
    p=st.sampled_from([0.3, 0.7, 1.0]),
)
def test_no_group_is_worse_than_rounded_to_nearest_and_what_is_stored_is_in_range(seed, bits, symmetric, size, p):
    weight = heavy(4, 64, seed=seed) * size
    format = Format(bits=bits, group_size=16, symmetric=symmetric)
    found, nearest = hqq(weight, format, p=p, iterations=8), quantize(weight, format)
    assert (lp(weight, found, p) <= lp(weight, nearest, p)).all()
    assert found.shared.scales.dtype == torch.bfloat16 and (found.shared.scales > 0).all()
    assert (found.shared.zeros is None) == symmetric and found.codes.min() >= format.low and found.codes.max() <= format.high


@pytest.mark.parametrize("format", [Format("nf4", 4, 64), Format("e2m1", 4, 32), Format("ternary", 2, 0, scale="float32")])
def test_other_number_types_gain_by_the_scale_alone(format):
    weight = heavy(16, 128)
    found = hqq(weight, format)
    assert lp(weight, found).sum() < lp(weight, quantize(weight, format)).sum() and found.shared.zeros is None


def test_a_weight_in_another_unit_has_the_same_codes():
    weight = heavy(8, 64)
    format = Format(bits=3, group_size=32, symmetric=False, scale="float32")
    assert torch.equal(hqq(weight, format).codes, hqq(weight * 2**10, format).codes)


def test_weights_on_the_grid_stay_and_zero_iterations_round_to_nearest():
    codes = torch.randint(-8, 8, (4, 32), generator=torch.Generator().manual_seed(0)).float()
    codes[:, 0], codes[:, 1] = -8, 7
    format = Format(bits=4, group_size=32, symmetric=False, scale="float32")
    assert torch.allclose(dequantize(hqq(codes * 0.5, format)), codes * 0.5)
    weight = heavy(4, 32)
    found, nearest = hqq(weight, format, iterations=0), quantize(weight, format)
    assert torch.equal(found.codes, nearest.codes) and torch.equal(found.shared.scales, nearest.shared.scales)


def test_a_group_of_zeros_is_zeros():
    weight = heavy(2, 32)
    weight[0] = 0
    for symmetric in (True, False):
        assert not dequantize(hqq(weight, Format(bits=3, group_size=16, symmetric=symmetric)))[0].any()


def test_scales_that_cannot_move_and_numbers_out_of_range_are_refused():
    weight = heavy(2, 32)
    with pytest.raises(ValueError, match="scales e8m0 cannot be moved freely"):
        hqq(weight, Format("e2m1", 4, 32, scale="e8m0"))
    with pytest.raises(ValueError, match="scales in eight bits"):
        hqq(weight, Format("nf4", 4, 32, nested=True))
    for wrong in ({"p": 0.0}, {"p": 1.5}, {"beta": 0.0}, {"kappa": 0.9}, {"iterations": -1}):
        with pytest.raises(ValueError, match=r"p in \(0, 1\]"):
            hqq(weight, Format(), **wrong)
