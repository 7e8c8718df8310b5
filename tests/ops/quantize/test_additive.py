"""Sums of learned vectors: sums worked by hand, each update against an exact solution or all alternatives, and a loss that never rises."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.quantize import additive
from assay.ops.quantize.additive import (
    Additive,
    begin,
    improve,
    k_means,
    loss,
    quantize,
    search,
    update_codebooks,
    update_codes,
    update_scales,
)
from assay.ops.quantize.grid import Format, dequantize
from assay.ops.quantize.grid import quantize as quantize_grid


def normal(*shape, seed=0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated(cols, seed=1) -> torch.Tensor:
    inputs = normal(300, cols, seed=seed) @ (normal(cols, cols, seed=seed + 1) / cols**0.5 + torch.ones(cols, cols) / cols)
    return inputs.T @ inputs / 300


def design(found: Additive) -> torch.Tensor:
    """Of the flattened weight by the flattened codebooks, built entry by entry."""
    rows, groups, books = found.codes.shape
    entries = found.codebooks.shape[1]
    matrix = torch.zeros(rows * groups * 8, books * entries * 8, dtype=torch.float64)
    for row, group, book, place in itertools.product(range(rows), range(groups), range(books), range(8)):
        column = (book * entries + int(found.codes[row, group, book])) * 8 + place
        matrix[(row * groups + group) * 8 + place, column] += float(found.scales[row])
    return matrix


def test_a_weight_is_its_scale_times_a_sum_worked_by_hand():
    codes = torch.tensor([[[0, 1]], [[1, 1]]], dtype=torch.uint8)
    books = torch.stack((torch.stack((torch.ones(8), torch.arange(8.0))), torch.stack((torch.zeros(8), 10 * torch.ones(8)))))
    found = Additive(codes, books, torch.tensor([2.0, -1.0]))
    assert found.dense().tolist() == [[22.0] * 8, [-10.0 - place for place in range(8)]]
    assert loss(torch.zeros(2, 8), found) == 8 * 22**2 + sum((10 + place) ** 2 for place in range(8))
    assert loss(torch.zeros(2, 8), found, 2 * torch.eye(8)) == 2 * loss(torch.zeros(2, 8), found)


def test_bits_count_codes_codebooks_and_scales():
    found = quantize(normal(64, 64), code_bits=4, rounds=1)
    assert found.codebooks.dtype == torch.float16 and found.scales.dtype == torch.bfloat16
    assert found.codes.shape == (64, 8, 2) and found.codes.max() < 16
    assert found.bits == (64 * 8 * 2 * 8 + 2 * 16 * 8 * 16 + 64 * 16) / (64 * 64)


@pytest.mark.parametrize("hessian", [None, correlated(48)], ids=["identity", "hessian"])
@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 10**6), books=st.integers(1, 3), beam=st.integers(1, 4))
def test_the_loss_never_rises(hessian, seed, books, beam):
    weight = normal(24, 48, seed=seed) * torch.linspace(0.01, 3, 24)[:, None]
    found = begin(weight, books=books, code_bits=4, seed=seed)
    losses = [loss(weight, found, hessian)]
    for _ in range(3):
        for step in (
            lambda each: update_codebooks(weight, each, hessian),
            lambda each: update_scales(weight, each, hessian),
            lambda each: update_codes(weight, each, hessian, beam=beam),
            lambda each: improve(weight, each, hessian=hessian, beam=beam),
        ):
            found = step(found)
            losses.append(loss(weight, found, hessian))
    assert all(after <= before * (1 + 1e-4) for before, after in itertools.pairwise(losses))
    assert losses[-1] < 0.97 * losses[0]


@pytest.mark.parametrize("hessian", [None, correlated(16)], ids=["identity", "hessian"])
def test_codebooks_come_to_the_least_squares_solution(hessian):
    weight = normal(12, 16)
    found = begin(weight, books=2, code_bits=2, seed=0)
    matrix, target = design(found), weight.double().flatten()
    assert torch.allclose((matrix @ found.codebooks.double().flatten()).view(12, 16).float(), found.dense(), atol=1e-6)
    if hessian is not None:
        root = torch.kron(torch.eye(12, dtype=torch.float64), torch.linalg.cholesky(hessian.double()).T)
        matrix, target = root @ matrix, root @ target
    least = float((target - matrix @ torch.linalg.lstsq(matrix, target[:, None], driver="gelsd").solution[:, 0]).square().sum())
    solved = update_codebooks(weight, found, hessian, steps=80)
    assert loss(weight, found, hessian) > 1.01 * least
    assert loss(weight, solved, hessian) == pytest.approx(least, rel=1e-3)


@pytest.mark.parametrize("hessian", [None, correlated(16)], ids=["identity", "hessian"])
def test_scales_are_the_least_squares_ones(hessian):
    weight = normal(6, 16)
    found = update_scales(weight, begin(weight, books=1, code_bits=2, seed=0), hessian)
    for factor in (0.99, 1.01):
        for row in range(6):
            scales = found.scales.clone()
            scales[row] *= factor
            assert loss(weight, found._replace(scales=scales), hessian) > loss(weight, found, hessian)


def test_a_wide_beam_finds_the_best_of_all_sums():
    targets, books = normal(20, 8), normal(2, 6, 8, seed=1)
    metric = correlated(8)
    begun = torch.zeros(20, 2, dtype=torch.long)
    found = search(targets, metric, begun, books, beam=36)
    every = (books[0][:, None] + books[1]).view(36, 8)
    scores = ((every @ metric) * every).sum(dim=1) - 2 * targets @ every.T
    assert (found[:, 0] * 6 + found[:, 1]).equal(scores.argmin(dim=1))
    narrow = search(targets, metric, begun, books, beam=1)
    assert (scores.gather(1, (narrow[:, :1] * 6 + narrow[:, 1:])) <= scores[:, :1] + 1e-6).all()  # never worse than what was given
    assert not narrow.equal(found)


def test_codes_of_a_group_are_the_best_given_the_others_under_a_hessian():
    weight, hessian = normal(5, 16), correlated(16)
    found = begin(weight, books=1, code_bits=3, seed=0)
    better = update_codes(weight, found, hessian, beam=1)
    last = better.codes.clone()
    for row, code in itertools.product(range(5), range(8)):  # of the last group, which nothing changed after
        last[row, 1, 0] = code
        assert loss(weight, better._replace(codes=last), hessian) >= loss(weight, better, hessian) * (1 - 1e-6)
        last[row, 1, 0] = better.codes[row, 1, 0]


def test_k_means_worked_by_hand():
    vectors = torch.tensor([[0.0], [1.0], [10.0], [12.0]])
    for seed in range(6):
        centres, nearest = k_means(vectors, 2, torch.Generator().manual_seed(seed))
        assert sorted(centres.flatten().tolist()) == [0.5, 11.0]
        assert nearest[0] == nearest[1] != nearest[2] == nearest[3]


def test_a_weight_of_few_vectors_is_exact():
    vectors = normal(4, 8)
    weight = vectors[torch.randint(4, (30, 6), generator=torch.Generator().manual_seed(1))].reshape(30, 48)
    weight = weight / weight.square().mean(dim=1, keepdim=True).sqrt()
    rough = begin(weight, books=1, code_bits=5, seed=0)
    assert loss(weight, rough) < 0.05 * float(weight.square().sum())
    signs = torch.where(normal(64, 2, 1) > 0, 1.0, -1.0) * normal(8).abs()
    found = quantize(signs.reshape(64, 16), books=1, code_bits=2, rounds=3)
    assert loss(signs.reshape(64, 16), found) < 1e-4 * float(signs.square().sum())


def test_two_bits_lose_less_than_scalar_codes_and_the_hessian_is_heeded():
    weight, hessian = normal(128, 128), correlated(128)
    plain, heeded = quantize(weight, code_bits=8, rounds=2), quantize(weight, code_bits=8, rounds=2, hessian=hessian)
    scalar = dequantize(quantize_grid(weight, Format(bits=2, group_size=64)))
    assert loss(weight, plain) < 0.7 * float((weight - scalar).square().sum())
    assert loss(weight, heeded, hessian) < 0.75 * loss(weight, plain, hessian)
    assert loss(weight, heeded) > loss(weight, plain)
    assert quantize(weight, code_bits=8, rounds=2, hessian=1000 * hessian).codes.equal(heeded.codes)  # up to a factor


def test_a_wider_beam_loses_less():
    weight = normal(64, 128)
    losses = [loss(weight, quantize(weight, books=3, code_bits=5, beam=beam, rounds=2)) for beam in (1, 8)]
    assert losses[1] < 0.98 * losses[0]


def test_rows_of_zeros_stay_zeros_and_a_seed_gives_the_same():
    weight = normal(16, 32)
    weight[3] = 0
    for hessian in (None, correlated(32)):
        found = quantize(weight, code_bits=3, rounds=2, hessian=hessian)
        assert (found.dense()[3] == 0).all() and found.dense().isfinite().all()
        assert all(a.equal(b) for a, b in zip(found, quantize(weight, code_bits=3, rounds=2, hessian=hessian), strict=True))
    assert not found.codebooks.equal(quantize(weight, code_bits=3, rounds=2, hessian=hessian, seed=1).codebooks)


@pytest.mark.parametrize(
    ("weight", "how", "message"),
    [
        (torch.zeros(8, 12), {}, "does not divide the 12 columns"),
        (torch.zeros(8, 16), {}, "the 16 groups of the weight are fewer than the 256 vectors of a codebook; code_bits=4 would work"),
        (torch.zeros(1, 8), {"code_bits": 1}, "a weight of one group has no codebook"),
        (torch.zeros(8, 16), {"code_bits": 9}, "2 codebooks of 9 bits with a beam of 4"),
        (torch.zeros(8, 16), {"books": 0}, "0 codebooks of 8 bits"),
        (torch.full((8, 16), torch.nan), {"code_bits": 4}, "128 of 128 weights are NaN or infinite"),
        (torch.zeros(8, 16), {"code_bits": 4, "hessian": torch.zeros(16, 16)}, "the Hessian is zero or not finite"),
    ],
)
def test_what_does_not_fit_is_refused(weight, how, message):
    with pytest.raises(ValueError, match=message):
        quantize(weight, **how)


def test_groups_are_searched_in_parts_of_any_size(monkeypatch):
    weight = normal(20, 40)
    whole = quantize(weight, code_bits=4, rounds=1)
    monkeypatch.setattr(additive, "CHUNK", 7)
    assert quantize(weight, code_bits=4, rounds=1).codes.equal(whole.codes)
