"""Entropy and its laws: against values worked by hand, numeric derivatives, and sums written out."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.ops.decode.entropy import entropy, entropy_slope, kept_set, slope_residual, tail_mass, tempered_ratio, varentropy
from assay.ops.decode.filters import Candidates, min_p, top_k, top_p
from assay.ops.decode.sampling import tempered

ROWS = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=30)
TEMPERATURES = st.floats(0.3, 3)


def test_entropy_and_varentropy_worked_by_hand():
    logits = torch.tensor([[math.log(4.0), 0.0], [2.0, 2.0], [0.0, -math.inf]])  # (.8, .2), (.5, .5), (1, 0)
    assert entropy(logits).tolist() == pytest.approx([0.500402, math.log(2), 0], abs=1e-6)
    assert varentropy(logits).tolist() == pytest.approx([0.16 * math.log(4) ** 2, 0, 0], abs=1e-6)
    assert entropy(logits, 2.0)[0].item() == pytest.approx(-(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3), abs=1e-6)  # odds √4


@given(row=ROWS, temperature=TEMPERATURES)
def test_the_slope_of_entropy_is_the_variance_of_the_logits_over_the_temperature_cubed(row, temperature):
    z = torch.tensor(row, dtype=torch.float64)
    p = (z / temperature).softmax(dim=-1)
    variance = float((p * (z - (p * z).sum()).square()).sum())
    slope = float(entropy_slope(z, temperature))
    assert slope == pytest.approx(variance / temperature**3, rel=1e-9, abs=1e-12)
    h = 1e-4
    numeric = float(entropy(z, temperature + h) - entropy(z, temperature - h)) / (2 * h)
    assert slope == pytest.approx(numeric, rel=1e-4, abs=1e-6)
    assert float(slope_residual(z, temperature)) <= 1e-3 * max(slope, 1e-3)
    assert slope >= 0


def test_a_law_that_does_not_hold_leaves_a_residual():
    z = torch.tensor([3.0, 1.0, 0.0])
    wrong = entropy_slope(z.double(), 0.5) * 0.5  # Var/T² in the place of Var/T³
    h = 1e-4
    numeric = (entropy(z.double(), 0.5 + h) - entropy(z.double(), 0.5 - h)) / (2 * h)
    assert float(slope_residual(z, 0.5)) < 1e-4 < float((numeric - wrong).abs())


@given(row=ROWS, temperature=TEMPERATURES)
def test_a_temperature_raises_each_ratio_to_its_inverse_and_makes_no_token_impossible(row, temperature):
    z = torch.tensor(row, dtype=torch.float64)
    before, after = z.softmax(dim=-1), (z / temperature).softmax(dim=-1)
    for i in range(1, len(row)):
        assert float(after[i] / after[0]) == pytest.approx(tempered_ratio(float(before[i] / before[0]), temperature), rel=1e-9)
    assert (tempered(z.float(), temperature) > 0).all()


def test_a_hundred_thousand_tail_tokens_of_a_millionth_hold_a_tenth_and_of_two_a_fifth():
    for each, held in [(1e-6, 0.1), (2e-6, 0.2)]:
        row = torch.full((1, 100_010), each)
        row[0, :10] = (1 - held) / 10
        assert float(tail_mass(row.log(), [10])) == pytest.approx(held, rel=1e-5)


def test_a_lower_temperature_makes_the_tail_small_but_not_zero():
    row = torch.full((1, 100_001), 1e-6)
    row[0, 0] = 0.9
    tail = 1e5 * 1e-6 ** (1 / 0.7)
    assert float(tail_mass(row.log(), [1], 0.7)) == pytest.approx(tail / (0.9 ** (1 / 0.7) + tail), rel=1e-4)  # 3.1e-4 of the 0.1


@given(row=ROWS, ks=st.lists(st.integers(1, 40), max_size=3), temperature=TEMPERATURES)
def test_a_tail_is_what_the_ranking_has_left(row, ks, temperature):
    z = torch.tensor([row], dtype=torch.float64)
    ranked = sorted((z / temperature).softmax(dim=-1)[0].tolist(), reverse=True)
    assert tail_mass(z, ks, temperature)[0].tolist() == pytest.approx([math.fsum(ranked[k:]) for k in ks], rel=1e-9, abs=1e-300)


def test_a_tail_far_below_the_rounding_of_the_head_keeps_its_digits():
    row = torch.tensor([[0.0, -math.log(1e12), -math.log(1e12)]])
    assert float(tail_mass(row, [1])) == pytest.approx(2e-12, rel=1e-5)


def test_kept_sets_worked_by_hand():
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.25, 0.25, 0.25, 0.25]])
    found = kept_set(top_p(Candidates(p), 0.9), [1, 2, 9])
    assert found.size.tolist() == [3, 4]
    assert found.mass.tolist() == pytest.approx([0.95, 1.0])
    assert found.tail[0].tolist() == pytest.approx([0.45 / 0.95, 0.15 / 0.95, 0], abs=1e-7)
    assert found.tail[1].tolist() == pytest.approx([0.75, 0.5, 0])
    assert kept_set(min_p(Candidates(p), 0.5)).size.tolist() == [2, 4]
    everything = kept_set(Candidates(torch.tensor([[0.5, 0.0, 0.5]])), [1])
    assert (everything.size.item(), everything.mass.item(), everything.tail.item()) == (2, 1.0, 0.5)


def test_top_p_lets_the_tail_in_at_a_high_temperature_and_min_p_does_not():
    ranks = torch.arange(1, 20_001).float()
    logits = (-2 * ranks.log())[None]  # p ∝ rank⁻²
    tails = {}
    for temperature in (0.7, 1.0, 1.8):
        p = tempered(logits, temperature)
        for name, left in (
            ("top_p", top_p(Candidates(p), 0.95)),
            ("min_p", min_p(Candidates(p), 0.05)),
            ("top_k", top_k(Candidates(p), 50)),
        ):
            tails[name, temperature] = float(kept_set(left, [50]).tail)
    assert tails["top_p", 0.7] == 0 and tails["top_p", 1.8] > 0.25
    assert tails["min_p", 1.8] == tails["min_p", 0.7] == tails["top_k", 1.8] == 0


def test_rows_do_not_touch_each_other_and_batches_keep_their_shape():
    logits = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(0))
    assert entropy(logits).shape == varentropy(logits).shape == entropy_slope(logits).shape == (2, 3)
    assert torch.equal(entropy(logits)[1, 2], entropy(logits[1, 2]))


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_above_zero_is_refused(wrong):
    for function in (
        lambda: entropy(torch.zeros(2), wrong),
        lambda: tempered_ratio(0.5, wrong),
        lambda: tail_mass(torch.zeros(1, 2), [1], wrong),
    ):
        with pytest.raises(ValueError, match="temperature="):
            function()
    with pytest.raises(ValueError, match="k below 1"):
        tail_mass(torch.zeros(1, 2), [0])
