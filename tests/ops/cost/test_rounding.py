"""What rounding costs in closed form: the published steps, and each formula against real rounding."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.ops.cost.rounding import flattened, gaussian_codebook_mse, rounding_deviation, rounding_variance, step_of, variance_factor
from assay.ops.quantize import grid
from assay.ops.quantize.elements import nf4_values
from assay.ops.quantize.hadamard import random_signs, transform
from assay.ops.quantize.ranges import gaussian_clip
from assay.ops.quantize.semi_structured import share_of_dense

INT4 = [code / 7.5 for code in range(-8, 8)]  # as ours and compressed-tensors' symmetric int4 has them
WITHOUT_LOWEST = [code / 7 for code in range(-7, 8)]


def test_q02_outliers_of_10_and_15_sigma():
    assert step_of(10, 4) == pytest.approx(1.33, abs=0.005) and rounding_deviation(step_of(10, 4)) == pytest.approx(0.38, abs=0.006)
    assert step_of(15, 4) == 2 and rounding_deviation(2) == pytest.approx(0.58, abs=0.005)
    assert step_of(10, 8) == pytest.approx(0.08, abs=0.002)


def test_q01_each_bit_less_quadruples_the_variance_and_8_to_4_is_256():
    assert [variance_factor(8, bits) for bits in (8, 7, 4)] == [1, 4, 256]
    assert rounding_variance(step_of(1, 4)) / rounding_variance(step_of(1, 8)) == pytest.approx(289)
    with pytest.raises(ValueError, match="from 4 to 8"):
        variance_factor(4, 8)


def test_q01_the_variance_is_that_of_really_rounded_numbers():
    numbers = np.random.default_rng(0).uniform(-1, 1, 200_000)
    step = step_of(1.0, 6)
    errors = numbers - np.round(numbers / step) * step
    assert errors.var() == pytest.approx(rounding_variance(step), rel=0.01) and errors.std() == pytest.approx(
        rounding_deviation(step), rel=0.01
    )


@given(largest=st.floats(0, 1e6), bits=st.integers(1, 16))
def test_levels_a_step_apart_reach_from_end_to_end(largest, bits):
    assert step_of(largest, bits) * (2**bits - 1) == pytest.approx(2 * largest)


@pytest.mark.parametrize(("group", "expected", "ratio"), [(128, 4.156, 3.85), (32, 4.625, 3.46), (256, 4.078, 3.92)])
def test_q03_effective_bits_of_int4_with_scale_and_zero_point(group, expected, ratio):
    format = grid.Format("int", 4, group, symmetric=False)
    assert grid.effective_bits(format, 4096, 4096) == pytest.approx(expected, abs=5e-4)
    assert 16 / grid.effective_bits(format, 4096, 4096) == pytest.approx(ratio, abs=0.005)


def test_q04_the_best_clip_of_a_gaussian_at_4_bits_lies_in_2_5_to_3_sigma():
    """And the error of even levels, integrated over the real codebook, is least near it."""
    assert 2.5 <= gaussian_clip(4) <= 3
    clips = np.linspace(1.5, 4, 51)
    errors = [gaussian_codebook_mse((np.arange(16) - 7.5) / 8 * clip) for clip in clips]
    assert clips[int(np.argmin(errors))] == pytest.approx(gaussian_clip(4), abs=0.15)


def test_p09_two_of_four_store_9_sixteenths_of_bfloat16_and_the_published_5_eighths_are_of_int8():
    assert share_of_dense(16) == 9 / 16 and share_of_dense(8) == 5 / 8
    assert 141.1 * float(share_of_dense(16)) == pytest.approx(79.4, abs=0.05)  # not 88 GB, and still more than 70.6 in FP8


@pytest.mark.parametrize(("outlier", "width"), [(500, 1024), (1000, 4096)])
def test_q11_flattening_leaves_15_6_and_the_published_17_is_share_plus_noise_not_the_largest(outlier, width):
    """Each channel is ±15.6 and noise of deviation 1, so 16.6 is a typical large channel; the largest of all is near 19."""
    found = flattened(outlier, width)
    assert found.share == pytest.approx(15.625) and found.noise == pytest.approx(1, abs=1e-3)
    assert found.typical == pytest.approx(16.6, abs=0.05) and round(found.typical) == 17
    vectors = torch.tensor(np.random.default_rng(0).choice([-1.0, 1.0], (64, width)), dtype=torch.float32)
    vectors[:, 7] = outlier
    turned = transform(vectors, signs=random_signs(width, 0))
    assert float(turned.abs().median()) == pytest.approx(found.share, abs=0.1)
    assert float(turned.abs().amax(dim=1).mean()) == pytest.approx(found.largest, abs=0.3)
    assert 18.5 < found.largest < 19.5


def test_a_codebook_of_one_level_leaves_the_variance_and_many_levels_leave_their_step():
    assert gaussian_codebook_mse([0.0]) == pytest.approx(1)
    fine = np.arange(-800, 801) / 100
    assert gaussian_codebook_mse(fine) == pytest.approx(rounding_variance(0.01), rel=1e-3)


@pytest.mark.parametrize(("levels", "element"), [(nf4_values(), "nf4"), (INT4, "int")])
@pytest.mark.parametrize("block", [32, 128])
def test_the_integrated_error_is_that_of_really_rounded_gaussians(levels, element, block):
    weight = torch.randn(256, 4096, generator=torch.Generator().manual_seed(0))
    format = grid.Format(element, 4, block, scale="float32")
    error = float(((weight - grid.dequantize(grid.quantize(weight, format))) ** 2).mean())
    assert gaussian_codebook_mse(levels, block=block) == pytest.approx(error, rel=0.02)


def test_q18_nf4_errs_27_percent_less_than_15_even_levels_in_blocks_of_64_and_20_percent_less_than_16():
    """About the published 30 % against levels that leave the lowest code unused; over long rows, where even levels serve the tail, 44 %."""
    assert _nf4_over(WITHOUT_LOWEST, 64) == pytest.approx(0.73, abs=0.005)
    assert _nf4_over(INT4, 64) == pytest.approx(0.80, abs=0.005) and _nf4_over(INT4, 4096) == pytest.approx(0.56, abs=0.005)


def _nf4_over(levels, block):
    return gaussian_codebook_mse(nf4_values(), block=block) / gaussian_codebook_mse(levels, block=block)
