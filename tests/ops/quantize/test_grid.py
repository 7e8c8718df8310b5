"""The integer grid."""

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.quantize.grid import Format, dequantize, encode, largest_divisor, quantize


def weights(seed: int, scale: float, shift: float, rows: int = 3, cols: int = 32) -> torch.Tensor:
    return (torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) + shift) * scale


def test_symmetric_codes_worked_by_hand():
    # s = 7.5 / 7.5 = 1: 7.5 would round to 8, past the last code 7; -7.5 rounds to the even -8
    found = quantize(torch.tensor([[7.5, -7.5, 0.4, 2.6]]), Format("int", 4, 4, symmetric=True))
    assert found.codes.tolist() == [[7, -8, 0, 3]] and found.shared.scales.tolist() == [[1.0]] and found.shared.zeros is None
    assert dequantize(found).tolist() == [[7, -8, 0, 3]]


def test_asymmetric_codes_worked_by_hand():
    # range -1 … 2 in 3 steps of 1: code -2 is -1, so zero is code -1
    found = quantize(torch.tensor([[-1.0, 0.0, 0.9, 2.0]]), Format("int", 2, 4, symmetric=False))
    assert found.codes.tolist() == [[-2, -1, 0, 1]] and found.shared.scales.tolist() == [[1.0]]
    assert found.shared.zeros is not None and found.shared.zeros.tolist() == [[-1]]
    assert dequantize(found).tolist() == [[-1, 0, 1, 2]]


def test_each_group_of_a_row_has_its_own_scale():
    row = torch.tensor([[1.0, -1.0, 100.0, -100.0]])
    found = quantize(row, Format("int", 8, 2, symmetric=True))
    assert found.shared.scales.shape == (1, 2) and found.shared.scales[0, 1] > 90 * found.shared.scales[0, 0]
    assert quantize(row, Format("int", 8, -1, symmetric=True)).shared.scales.shape == (1, 1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000), bits=st.sampled_from([2, 3, 4, 8]), group=st.sampled_from([8, 16, -1]), symmetric=st.booleans(),
    scale=st.sampled_from([1e-30, 1e-7, 1e-2, 1.0, 1e4]), shift=st.sampled_from([0.0, 0.5, -3.0, 20.0]),
)  # fmt: skip
def test_no_weight_moves_by_more_than_half_a_scale(seed, bits, group, symmetric, scale, shift):
    weight = weights(seed, scale, shift)
    found = quantize(weight, Format("int", bits, group, symmetric=symmetric))
    half = found.shared.scales.float().repeat_interleave(32 // found.shared.scales.shape[1], dim=1) / 2
    assert ((weight - dequantize(found)).abs() <= half * (1 + 1e-5)).all()
    assert found.codes.min() >= -(2 ** (bits - 1)) and found.codes.max() <= 2 ** (bits - 1) - 1


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), bits=st.sampled_from([2, 3, 4, 8]), symmetric=st.booleans())
def test_rounding_what_was_rounded_changes_nothing_on_its_own_grid(seed, bits, symmetric):
    found = quantize(weights(seed, 0.02, 0.0), Format("int", bits, 8, symmetric=symmetric))
    values = dequantize(found)
    zeros = torch.zeros_like(found.shared.scales) if found.shared.zeros is None else found.shared.zeros
    codes = (values.reshape(3, 4, 8) / found.shared.scales.float().unsqueeze(-1)).round() + zeros.float().unsqueeze(-1)
    assert torch.equal(codes.reshape(3, 32).to(torch.int8), found.codes)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), bits=st.sampled_from([2, 3, 4, 8]), symmetric=st.booleans(), shift=st.sampled_from([0.0, 1.0]))
def test_scales_and_zero_points_are_those_of_compressed_tensors_up_to_the_rounding_of_the_scale(seed, bits, symmetric, shift):
    weight = weights(seed, 0.02, shift)
    found = quantize(weight, Format("int", bits, 8, symmetric=symmetric, scale="float32"))
    groups = weight.reshape(3, 4, 8)
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy="group", group_size=8)
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    torch.testing.assert_close(found.shared.scales, scales, rtol=1e-6, atol=0)
    if found.shared.zeros is not None:
        assert torch.equal(found.shared.zeros, zeros)
    short = quantize(weight, Format("int", bits, 8, symmetric=symmetric)).shared.scales
    assert (
        short.dtype == torch.bfloat16
        and (short.float() >= found.shared.scales).all()
        and (short.float() <= found.shared.scales * (1 + 2**-7)).all()
    )


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scale", ["bfloat16", "float16", "float32"])
def test_groups_of_zeros_and_of_tiny_weights_stay_finite(symmetric, scale):
    """A zero scale divides 0 by 0, and in float16 a group near 1e-7 has a scale of 0 and infinite codes."""
    weight = torch.zeros(2, 16)
    weight[1, :8] = 1e-7
    weight[1, 8:] = torch.linspace(-1, 1, 8)
    found = quantize(weight, Format("int", 4, 8, symmetric=symmetric, scale=scale))
    back = dequantize(found)
    assert (found.shared.scales > 0).all() and back.isfinite().all()
    assert back[0].tolist() == [0.0] * 16
    assert (back[1, :8] - 1e-7).abs().max() < 1e-6


def test_bits_buy_a_quarter_of_the_error_each():
    weight = torch.rand(64, 512, generator=torch.Generator().manual_seed(0)) * 2 - 1
    errors = [float((dequantize(quantize(weight, Format("int", bits, -1, symmetric=True))) - weight).square().mean()) for bits in (4, 5, 6)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.2) and errors[1] / errors[2] == pytest.approx(4, rel=0.2)


def test_the_full_range_rule_errs_less_than_leaving_a_code_unused():
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    for bits in (2, 3, 4):
        ours = float((dequantize(quantize(weight, Format("int", bits, 64, symmetric=True))) - weight).square().mean())
        groups = weight.reshape(64, -1, 64)
        most = 2 ** (bits - 1) - 1
        scales = groups.abs().amax(-1, keepdim=True) / most
        narrow = float(((groups / scales).round().clamp(-most, most) * scales - groups).square().mean())
        assert ours < narrow


@pytest.mark.parametrize(
    ("cols", "group", "message"),
    [
        (72, 32, "group_size=32 does not divide the 72 columns of the weight; the largest that does is 24"),
        (576, 128, "group_size=128 does not divide the 576 columns of the weight; the largest that does is 96"),
        (64, 128, "the largest that does is 64"),
        (64, -2, "group_size=-2 does not divide"),
    ],
)
def test_a_group_size_that_does_not_divide_is_refused_with_one_that_does(cols, group, message):
    with pytest.raises(ValueError, match=message):
        quantize(torch.ones(2, cols), Format("int", 4, group, symmetric=True))


@pytest.mark.parametrize("bits", [1, 9])
def test_bits_outside_the_format_are_refused(bits):
    with pytest.raises(ValueError, match=f"bits={bits} is outside 2 to 8"):
        quantize(torch.ones(2, 8), Format("int", bits, 8, symmetric=True))


def test_weights_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="1 of 16 weights are NaN or infinite"):
        quantize(torch.ones(2, 8).index_put((torch.tensor(0), torch.tensor(3)), torch.tensor(torch.inf)), Format("int", 4, 8))


MX = Format("e2m1", 4, 32, scale="e8m0")
EVERY = [
    Format("e2m1", 4, 16, scale="e4m3"), MX, MX._replace(shared_exponent="ceil"), MX._replace(shared_exponent="even"), Format("nf4", 4, 64, scale="float32"),
    Format("nf4", 4, 64, scale="float32", nested=True), Format("e4m3", 8, -1), Format("e5m2", 8, 0), Format("e4m3", 8, 16, 8),
    Format("e4m3", 8, 32, scale="e8m0"), Format("ternary", 2, 0), Format("int", 4, 0), Format("int", 3, 16, symmetric=False),
]  # fmt: skip


@pytest.mark.parametrize("format", EVERY, ids=lambda format: f"{format.name} {format.group_size} {format.shared_exponent}")
@pytest.mark.parametrize("size", [1e-30, 1e-7, 1.0, 1e4])
def test_every_format_keeps_its_codes_and_stays_finite(format, size):
    weight = weights(0, size, 0.0, rows=8, cols=128)
    weight[0] = 0
    found = quantize(weight, format)
    back = dequantize(found)
    assert back.isfinite().all() and (found.shared.effective > 0).all()
    assert torch.equal(encode(back, found.shared, format), found.codes)  # rounding what is rounded changes nothing
    if format.element != "nf4" and size > 1e-30:  # nf4 too has a zero, whose code a group of zeros takes
        assert back[0].abs().max() == 0
    bound = {"ternary": 0.6, "int": 0.3, "e2m1": 0.25, "nf4": 0.15}.get(format.element, 0.1)
    if size > 1e-30:
        assert (back - weight).norm() < bound * weight.norm()


@pytest.mark.parametrize(
    ("most", "floor", "ceil", "even"),
    # the largest value is 6, of exponent 2: 6 and 4 fit 2^0; 7 is clipped by floor; 7.5 and more round up to 8 in one mantissa bit
    [(6.0, 1, 1, 1), (4.0, 1, 1, 1), (7.0, 1, 2, 2), (3.0, 0.5, 0.5, 0.5), (3.5, 0.5, 1, 1), (6.9, 1, 2, 1), (12.0, 2, 2, 2), (13.0, 2, 4, 2), (1e-3, 2.0**-12, 2.0**-12, 2.0**-12)],
)  # fmt: skip
def test_shared_exponents_worked_by_hand(most, floor, ceil, even):
    weight = torch.zeros(1, 32)
    weight[0, 3] = -most
    for rule, expected in (("floor", floor), ("ceil", ceil), ("even", even)):
        assert quantize(weight, MX._replace(shared_exponent=rule)).shared.scales.item() == expected
    assert dequantize(quantize(weight, MX._replace(shared_exponent="ceil")))[0, 3] >= -most * 1.34


def test_two_levels_of_scales_worked_by_hand():
    # largest of all 12: factor 448 · 6 / 12 = 224; the group of 12 has the scale 448 (12 / 6 · 224), that of 3 has 112
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 1], weight[0, 20] = 12.0, -1.0, 3.0
    found = quantize(weight, Format("e2m1", 4, 16, scale="e4m3"))
    assert found.shared.factor.tolist() == [224.0] and found.shared.scales.float().tolist() == [[448.0, 112.0]]
    assert dequantize(found)[0, [0, 1, 20]].tolist() == [12.0, -1.0, 3.0]


def test_three_values_are_shared_by_the_mean_size():
    weight = torch.tensor([[0.5, -1.5, 0.1, 0.9]])  # mean size 0.75, which bfloat16 holds
    found = quantize(weight, Format("ternary", 2, 0))
    assert found.shared.scales.tolist() == [[0.75]] and found.codes.tolist() == [[1, -1, 0, 1]]


def test_normal_floats_err_little_more_in_larger_blocks_and_neither_they_nor_integers_always_win():
    weight = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    errors = {
        (element, size): float((dequantize(quantize(weight, Format(element, 4, size, symmetric=element != "int", scale="float32"))) - weight).square().mean())
        for element in ("nf4", "int") for size in (32, 64, 128, 512, 1024)
    }  # fmt: skip
    assert errors["nf4", 1024] < 1.3 * errors["nf4", 512]
    assert all(0.001 < error < 0.03 for error in errors.values())
    assert [errors["nf4", size] for size in (32, 64, 128, 512, 1024)] == sorted(errors["nf4", size] for size in (32, 64, 128, 512, 1024))


def test_what_is_cut_off_is_clipped_and_the_rest_has_finer_steps():
    weight = torch.tensor([[1.0, 0.1, -0.1, 0.2, 0.05, -0.2, 0.15, 0.0]])
    whole, half = (quantize(weight, Format("int", 4, 8, scale="float32"), shrink=shrink) for shrink in (1.0, 0.5))
    assert half.shared.scales.item() == pytest.approx(whole.shared.scales.item() / 2)
    assert (
        dequantize(half)[0, 0] == pytest.approx(7 / 7.5 * 0.5) and (dequantize(half) - weight)[0, 1:].abs().max() <= 0.5 / 7.5 / 2 * 1.001
    )


def test_blocks_of_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="blocks of 128 rows do not divide the 192 rows of the weight; the largest that do have 96"):
        quantize(torch.ones(192, 256), Format("e4m3", 8, 128, 128))


@given(number=st.integers(1, 5000), at_most=st.integers(1, 5000))
def test_the_largest_divisor_divides_and_none_larger_does(number, at_most):
    found = largest_divisor(number, at_most=at_most)
    assert number % found == 0 and found <= at_most
    assert not any(number % other == 0 for other in range(found + 1, min(number, at_most) + 1))
