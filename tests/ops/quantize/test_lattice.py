"""Two bits a weight in E8: the codebook by its definition, the nearest point by brute force, what is stored, and the loss against scalar codes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.quantize import lattice
from assay.ops.quantize.grid import Format, dequantize
from assay.ops.quantize.grid import quantize as quantize_grid
from assay.ops.quantize.lattice import codebook, decode, encode, feedback, pack_signs, patterns, quantize, unpack_signs


def normal(*shape, seed=0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(cols, tokens=512, seed=1) -> torch.Tensor:
    inputs = normal(tokens, cols, seed=seed) @ (normal(cols, cols, seed=seed + 1) / cols**0.5 + torch.ones(cols, cols) / cols)
    return inputs.T @ inputs


def loss(weight, found, hessian) -> float:
    error = (weight - found).double()
    return float(((error @ hessian.double()) * error).sum())


def test_the_patterns_are_227_of_norm_up_to_ten_and_29_of_twelve():
    norms = patterns().square().sum(dim=1)
    assert {float(norm): int((norms == norm).sum()) for norm in norms.unique()} == {2: 1, 4: 8, 6: 28, 8: 64, 10: 126, 12: 29}
    assert len(patterns().unique(dim=0)) == 256 and set(patterns().flatten().tolist()) == {0.5, 1.5, 2.5}
    halves = torch.cartesian_prod(*[torch.tensor([0.5, 1.5, 2.5, 3.5])] * 8)
    assert int((halves.square().sum(dim=1) <= 10).sum()) == 227  # all there are
    assert (patterns()[227:] == 1.5).sum(dim=0).float().std() < 2  # of the 29, no coordinate is favoured


def test_the_points_lie_in_e8_moved_by_a_quarter():
    points = codebook()
    assert len(points.unique(dim=0)) == 2**16
    moved = torch.where((torch.arange(2**16) & 1).bool()[:, None], points - 0.25, points + 0.25)
    assert ((moved - 0.5) % 1 == 0).all() and (moved.sum(dim=1) % 2 == 0).all()
    # Those of one shift are ½ from those of the other in every coordinate; with E8 moved by ¼, (moved - ½) has integers of even sum or is in D8 + ½.
    distances = torch.cdist(points[:: 2**10], points)
    assert distances[distances > 0].min() == pytest.approx(2**0.5)  # the least distance of E8


def test_a_code_worked_by_hand():
    # Pattern 0 is all ½, of sum 4; bit 1 makes the first minus, and the eighth follows; the shift adds ¼.
    code = torch.tensor([[0b0000_0000_0000_0011]], dtype=torch.int16)
    assert decode(code).tolist() == [[-0.25, 0.75, 0.75, 0.75, 0.75, 0.75, 0.75, -0.25]]
    assert encode(decode(code)).tolist() == [[3]]
    assert decode(torch.tensor([[0]], dtype=torch.int16)).tolist() == [[0.25] * 8]


def test_each_code_is_that_of_its_own_point():
    codes = torch.arange(2**16).to(torch.int32).to(torch.int16)[:, None]
    assert encode(decode(codes)).equal(codes)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6), size=st.sampled_from([0.1, 0.5, 1.0, 2.0, 10.0]))
def test_the_nearest_point_is_found_as_by_trying_all(seed, size):
    vectors = size * normal(12, 8, seed=seed)
    found = (vectors - decode(encode(vectors))).double().norm(dim=1)
    least = torch.cdist(vectors.double(), codebook().double(), compute_mode="donot_use_mm_for_euclid_dist").amin(dim=1)
    assert torch.allclose(found, least, atol=1e-5)


def test_a_gaussian_loses_what_was_published_and_less_than_any_scalar_code():
    values = normal(4000, 64)
    error = float((lattice.SPREAD * values - decode(encode(lattice.SPREAD * values))).square().mean()) / lattice.SPREAD**2
    assert error == pytest.approx(0.0916, abs=0.001)  # the best scalar code of two bits loses 0.1175 (Lloyd and Max)
    for spread in (0.93, 1.13):
        assert float((spread * values - decode(encode(spread * values))).square().mean()) / spread**2 > error


@pytest.mark.parametrize(("rows", "cols"), [(64, 96), (12, 8), (1, 8), (36, 576)])
def test_what_is_stored_gives_the_weight(rows, cols):
    weight = normal(rows, cols) * torch.linspace(0.1, 4, cols)
    found = quantize(weight, seed=3)
    assert found.codes.dtype == torch.int16 and found.codes.shape == (rows, cols // 8)
    assert found.dense().shape == weight.shape
    assert found.bits == 2 + (32 + 8 * -(-rows // 8) + cols) / (rows * cols)
    if rows >= 36:
        assert float((found.dense() - weight).square().mean() / weight.square().mean()) == pytest.approx(0.0916, abs=0.006)


def test_transforms_make_heavy_tails_cheap():
    weight = normal(64, 128)
    weight[normal(64, 128, seed=1) > 2.3] *= 20  # one in a hundred
    relative = float((quantize(weight).dense() - weight).square().mean() / weight.square().mean())
    scalar = dequantize(quantize_grid(weight, Format(bits=2, group_size=-1)))
    lost = float((scalar - weight).square().mean() / weight.square().mean())
    assert relative < 0.1 and lost > 1.5 * relative


def test_feedback_lowers_the_loss_under_the_hessian_and_a_hessian_without_direction_changes_nothing():
    weight, hessian = normal(48, 96), correlated(96)
    plain, fed = quantize(weight), quantize(weight, hessian=hessian)
    assert loss(weight, fed.dense(), hessian) < 0.7 * loss(weight, plain.dense(), hessian)
    same = quantize(weight, hessian=5 * torch.eye(96))
    assert (same.codes == plain.codes).double().mean() > 0.999
    assert same.scale.item() == pytest.approx(plain.scale.item(), rel=1e-4)


def test_the_feedback_is_the_block_factor_of_the_hessian():
    hessian = correlated(24).double()
    upper = feedback(hessian.float(), damping=0.0).double()
    for at in range(0, 24, 8):
        assert (upper[at:, at : at + 8] == 0).all() or upper[at:, at : at + 8].abs().max() < 1e-6
    unit = torch.linalg.inv(torch.eye(24, dtype=torch.float64) + upper)
    diagonal = unit @ hessian @ unit.T
    for at in range(0, 24, 8):
        diagonal[at : at + 8, at : at + 8] = 0
    assert diagonal.abs().max() < 1e-4 * hessian.abs().max()


def test_few_tokens_are_damped_and_none_are_refused():
    weight, inputs = normal(16, 64), normal(5, 64, seed=4)
    assert quantize(weight, hessian=inputs.T @ inputs).dense().isfinite().all()
    with pytest.raises(ValueError, match="the Hessian is zero or not finite"):
        quantize(weight, hessian=torch.zeros(64, 64))
    with pytest.raises(ValueError, match="is not positive definite"):
        quantize(weight, hessian=torch.diag(torch.linspace(-0.5, 2, 64)))


@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 70), seed=st.integers(0, 99))
def test_signs_are_packed_and_unpacked_bit_for_bit(size, seed):
    signs = lattice.hadamard.random_signs(size, seed)
    assert pack_signs(signs).nbytes == -(-size // 8) and unpack_signs(pack_signs(signs), size).equal(signs)


def test_signs_packed_by_hand():
    signs = torch.tensor([-1, 1, 1, 1, 1, 1, 1, -1, -1], dtype=torch.int8)
    assert pack_signs(signs).tolist() == [0b10000001, 1]


def test_a_seed_gives_the_same_codes_and_zeros_stay_zeros():
    weight = normal(12, 24)
    assert all(a.equal(b) for a, b in zip(quantize(weight, seed=1), quantize(weight, seed=1), strict=True))
    assert not quantize(weight, seed=1).codes.equal(quantize(weight, seed=2).codes)
    assert (quantize(torch.zeros(8, 16)).dense() == 0).all()


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="which does not divide the 12 columns"):
        quantize(normal(8, 12))
    with pytest.raises(ValueError, match="no Hadamard matrix of size 9"):
        quantize(normal(9, 16))
    with pytest.raises(ValueError, match="1 of 128 weights are NaN or infinite"):
        quantize(torch.cat((torch.full((1, 1), torch.nan), torch.zeros(1, 127)), dim=1).view(8, 16))
