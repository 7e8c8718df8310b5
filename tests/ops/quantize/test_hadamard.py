"""Hadamard transforms: matrices worked by hand and by their definition, orthogonality of each size a model has, and the sizes that have none."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.quantize import hadamard
from assay.ops.quantize.hadamard import inverse, random_orthogonal, random_signs, transform

# Widths of models: SmolLM2 (64, 576, 1536, 960), Gemma (1152, 2304, 6912), Qwen (896, 4864), Llama (11008), Phi (5120).
SIZES = [1, 2, 4, 12, 20, 28, 36, 44, 52, 60, 64, 76, 100, 108, 344, 576, 896, 960, 1152, 1536]
LARGE = [2304, 4096, 4864, 5120, 6912, 11008, 14336, 18944]
NONE = [3, 6, 9, 14, 18, 92, 172, 0, -4]


def exact(size: int) -> torch.Tensor:
    """±1, from the normalised matrix."""
    return (hadamard.hadamard(size) * size**0.5).round()


def test_sylvester_worked_by_hand():
    assert exact(4).tolist() == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    assert transform(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == pytest.approx([5.0, -1.0, -2.0, 0.0], abs=1e-6)
    assert transform(torch.tensor([1.0, 2.0, 3.0, 4.0]), signs=torch.tensor([1, -1, 1, 1])).tolist() == pytest.approx(
        [3, 1, -4, 2], abs=1e-6
    )


def test_paley_of_three_worked_by_hand():
    # Squares of the field of 3: 1. χ(0, 1, 2) = 0, 1, -1; the inner part is -χ(i + j), and -1 where i + j = 0.
    assert hadamard.paley(4).tolist() == [[1, 1, 1, 1], [1, -1, -1, 1], [1, -1, 1, -1], [1, 1, -1, -1]]


@pytest.mark.parametrize(("order", "prime"), [(12, 11), (20, 19), (44, 43), (36, 17), (76, 37)])
def test_paley_s_entries_are_quadratic_residues(order, prime):
    squares = {value * value % prime for value in range(1, prime)}
    found = hadamard.paley(order)
    for i in range(prime):
        for j in range(prime):
            if order == prime + 1:
                residue = (i + j) % prime
                assert found[i + 1, j + 1] == (1 if residue and residue not in squares else -1)
            elif i != j:
                corner = 1 if (i - j) % prime in squares else -1
                assert found[2 * i + 2 : 2 * i + 4, 2 * j + 2 : 2 * j + 4].tolist() == [[corner, corner], [corner, -corner]]


@pytest.mark.parametrize("size", SIZES)
def test_matrices_are_of_plus_and_minus_one_symmetric_and_exactly_orthogonal(size):
    found = exact(size)
    assert (found.abs() == 1).all() and found.equal(found.T)
    assert (found @ found.T).equal(size * torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("size", SIZES)
def test_the_transform_is_the_product_with_the_matrix(size):
    x = torch.randn(3, 2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    signs = random_signs(size, seed=1)
    assert torch.allclose(transform(x, signs=signs), (x * signs) @ hadamard.hadamard(size), atol=1e-12)


@pytest.mark.parametrize("size", SIZES + LARGE)
def test_in_float32_it_keeps_lengths_and_undoes_itself(size):
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(0))
    turned = transform(x)
    assert ((turned.double().norm(dim=1) / x.double().norm(dim=1)) - 1).abs().max() < 1e-5
    assert (transform(turned) - x).abs().max() < 1e-5
    signs = random_signs(size, seed=2)
    assert (inverse(transform(x, signs=signs), signs=signs) - x).abs().max() < 1e-5


@settings(deadline=None, max_examples=40)
@given(a=st.integers(0, 5), m=st.sampled_from([1, 12, 20, 36]), rows=st.integers(0, 5), seed=st.integers(0, 99))
def test_inner_products_stay_when_both_sides_are_turned_alike(a, m, rows, seed):
    random = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(rows, m * 2**a, generator=random, dtype=torch.float64) for _ in range(2))
    signs = random_signs(m * 2**a, seed)
    assert torch.allclose(transform(x, signs=signs) @ transform(weight, signs=signs).T, x @ weight.T, atol=1e-10)


def test_one_outlier_is_spread_over_all_channels():
    x = torch.zeros(1, 576)
    x[0, 77] = 24
    assert torch.allclose(transform(x).abs(), torch.ones(1, 576), atol=1e-5)


@pytest.mark.parametrize("size", NONE)
def test_sizes_without_a_matrix_are_refused_with_what_would_work(size):
    assert not hadamard.has_matrix(size)
    with pytest.raises(ValueError, match=f"no Hadamard matrix of size {size} is known here.* random rotation has any size"):
        hadamard.core(size)
    if size > 0:
        with pytest.raises(ValueError, match="is known here"):
            transform(torch.zeros(2, size))


def test_twelve_is_not_cut_from_sixteen():
    cut = hadamard.sylvester(16)[:12, :12].double() / 4
    assert (cut @ cut.T - torch.eye(12)).abs().max() == 0.25
    assert hadamard.core(12) == 12
    with pytest.raises(ValueError, match="16 and 20 have one"):
        hadamard.core(18)


def test_blocks_are_turned_by_themselves_and_only_when_asked_for():
    x = torch.randn(2, 18, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="block=2 turns parts of 2 by themselves"):
        transform(x)
    assert transform(x, block=2).equal(transform(x.view(2, 9, 2)).view(2, 18))
    assert torch.allclose(inverse(transform(x, block=2), block=2), x, atol=1e-6)
    for block in (4, 0, -2, 36):
        with pytest.raises(ValueError, match=f"block={block} does not divide the 18 channels"):
            transform(x, block=block)
    with pytest.raises(ValueError, match="no Hadamard matrix of size 9"):
        transform(x, block=9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_are_rounded_once(dtype):
    x = torch.randn(4, 576, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert transform(x).equal(transform(x.float()).to(dtype))


def test_gradients_pass_also_after_a_first_use_without_them():
    with torch.inference_mode():
        transform(torch.zeros(1, 48))
    x = torch.randn(2, 48, requires_grad=True)
    (transform(x) * torch.arange(48)).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, transform(torch.arange(48).float()).expand(2, -1), atol=1e-4)


def test_random_signs_and_rotations_are_those_of_their_seed():
    assert random_signs(999, seed=1).equal(random_signs(999, seed=1)) and not random_signs(999, seed=1).equal(random_signs(999, seed=2))
    assert set(random_signs(999, seed=1).tolist()) == {-1, 1} and abs(int(random_signs(9999, seed=3).sum())) < 500
    first, second = random_orthogonal(45, seed=1), random_orthogonal(45, seed=2)
    assert first.equal(random_orthogonal(45, seed=1)) and not torch.allclose(first, second)
    assert torch.allclose(first @ first.T, torch.eye(45, dtype=torch.float64), atol=1e-12)


def test_random_rotations_are_uniform():
    traces = torch.tensor([float(random_orthogonal(3, seed).trace()) for seed in range(600)])
    assert abs(traces.mean()) < 0.15  # of Haar: mean 0, mean square 1; unsigned QR gives a mean near -1
    assert abs(traces.square().mean() - 1) < 0.2
