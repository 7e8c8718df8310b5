"""What to keep of a group's range."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.quantize.grid import Format, dequantize, groups, quantize
from assay.ops.quantize.ranges import gaussian_clip, minmax, mse, percentile

EVERY = [
    Format(bits=4, group_size=32), Format(bits=3, group_size=-1, symmetric=False), Format(bits=8, group_size=0), Format("e4m3", 8, -1),
    Format("nf4", 4, 64, nested=True), Format("e2m1", 4, 32, scale="e8m0"), Format("e2m1", 4, 16, scale="e4m3"),
    Format("ternary", 2, 0), Format("e4m3", 8, 32, block_rows=4),
]  # fmt: skip


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def errors(weight, format, shrink):
    return groups((dequantize(quantize(weight, format, shrink=shrink)) - weight).square(), format).sum(dim=(1, 3))


@pytest.mark.parametrize("format", EVERY, ids=lambda format: f"{format.name} g{format.group_size}")
def test_no_group_of_any_format_is_worse_than_with_its_whole_range(format):
    weight = normal(8, 128).pow(3)
    found = mse(weight, format, steps=16)
    plain = format._replace(nested=False)
    assert found.shape == minmax(weight, format).shape and ((found >= 0.2) & (found <= 1)).all()
    assert (errors(weight, plain, found) <= errors(weight, plain, 1.0)).all()
    if format.element == "int" and format.bits < 8:
        assert errors(weight, plain, found).sum() < errors(weight, plain, 1.0).sum()


@pytest.mark.parametrize(("bits", "least", "most"), [(3, 2.0, 2.45), (4, 2.5, 3.0), (8, 3.5, 4.5)])
def test_a_gaussian_is_clipped_at_two_and_a_half_to_three_sigma_at_four_bits_and_wider_with_more(bits, least, most):
    weight = normal(1, 400_000)
    format = Format(bits=bits, group_size=-1, scale="float32")
    searched = float(mse(weight, format, steps=160) * weight.abs().max())
    assert least < searched < most and least < gaussian_clip(bits) < most
    assert searched == pytest.approx(gaussian_clip(bits), rel=0.09)


def test_the_closed_clip_is_the_minimum_of_the_error_integrated_numerically():
    for bits in (2, 4, 6):
        x = torch.linspace(0, 12, 200_001, dtype=torch.float64)
        density = torch.exp(-x * x / 2) / (2 * torch.pi) ** 0.5

        def error(clip, bits=bits, x=x, density=density):
            return clip**2 / (3 * 4**bits) + 2 * float(torch.trapezoid((x - clip).clamp(min=0) ** 2 * density, x))

        best = gaussian_clip(bits)
        assert error(best) < min(error(best - 0.01), error(best + 0.01))


def test_percentile_worked_by_hand():
    weight = torch.tensor([[1.0, -2, 3, -10], [0, 0, 0, 0]])
    format = Format(group_size=4)
    assert percentile(weight, format, keep=0.75).tolist() == [[pytest.approx(0.3)], [1.0]]
    assert percentile(weight, format, keep=0.76).tolist() == [[1.0], [1.0]]
    tensor = percentile(weight, format._replace(group_size=0), keep=0.5)
    assert tensor.tolist() == [[torch.finfo(torch.float32).tiny]]  # four of eight are 0: all of the range is clipped


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 999), keep=st.floats(0.1, 1))
def test_percentile_leaves_no_more_outside_than_asked(seed, keep):
    weight = normal(4, 64, seed=seed)
    format = Format(group_size=32)
    inside = groups(weight.abs(), format) <= (percentile(weight, format, keep=keep) * groups(weight, format).abs().amax(dim=(1, 3)))[
        :, None, :, None
    ] * (1 + 1e-6)
    assert (inside.float().mean(dim=(1, 3)) >= keep - 1e-6).all()


def test_a_search_without_steps_and_a_share_out_of_range_are_refused():
    weight = normal(2, 8)
    for arguments in ({"steps": 0}, {"least": 0.0}, {"least": 1.0}):
        with pytest.raises(ValueError, match="is no search"):
            mse(weight, Format(group_size=8), **arguments)
    with pytest.raises(ValueError, match=r"keep=1\.5 is no share"):
        percentile(weight, Format(group_size=8), keep=1.5)
    with pytest.raises(ValueError, match="does not divide the 8 columns"):
        minmax(weight, Format(group_size=3))
    with pytest.raises(ValueError, match="bits=0 leave no step"):
        gaussian_clip(0)
