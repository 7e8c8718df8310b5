"""Closed forms of sampling, and the statements that our own ops keep as identities."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from assay.ops.cost.kv import kv_bytes_at
from assay.ops.cost.sampling import frequency_penalty, largest_tv, tail_mass, tempered_ratio
from assay.ops.decode.entropy import entropy, entropy_slope
from assay.ops.decode.penalties import penalise_frequency
from assay.ops.evaluate.pass_at_k import pass_at_k


def test_s01_the_slope_of_entropy_is_the_variance_over_t_cubed():
    logits = torch.randn(5, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for temperature in (0.5, 1.0, 1.7):
        p = (logits / temperature).softmax(-1)
        variance = (p * logits**2).sum(-1) - (p * logits).sum(-1) ** 2
        slope = (entropy(logits, temperature + 1e-5) - entropy(logits, temperature - 1e-5)) / 2e-5
        assert torch.allclose(slope, variance / temperature**3, rtol=1e-5)
        assert torch.allclose(entropy_slope(logits, temperature), variance / temperature**3, rtol=1e-9)


@given(ratio=st.floats(1e-12, 1), temperature=st.floats(0.2, 5))
def test_s02_temperature_raises_a_ratio_to_its_inverse_and_never_to_zero(ratio, temperature):
    p = torch.tensor([ratio, 1.0], dtype=torch.float64).log() / temperature
    assert (
        tempered_ratio(ratio, temperature) == pytest.approx(float((p[0] - p[1]).exp()), rel=1e-9) and tempered_ratio(ratio, temperature) > 0
    )


def test_s03_what_100_000_rare_tokens_hold():
    assert tail_mass(100_000, 1e-6) == pytest.approx(0.1) and tail_mass(100_000, 2e-6) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="hold 2"):
        tail_mass(100_000, 2e-5)


def test_s07_pass_at_5_of_2_right_in_10_is_0_78():
    assert pass_at_k(10, 2, 5) == pytest.approx(0.778, abs=5e-4)


def test_s09_a_frequency_penalty_of_a_tenth_takes_5_logits_after_50_occurrences():
    assert frequency_penalty(0.1, 50) == pytest.approx(5)
    logits = penalise_frequency(torch.zeros(1, 4), torch.full((50,), 2), 0.1)
    assert logits[0].tolist() == pytest.approx([0, 0, -5, 0])


@given(st.lists(st.floats(-8, 8), min_size=2, max_size=12), st.lists(st.floats(-8, 8), min_size=12, max_size=12))
def test_e07_pinsker_holds_for_every_pair_of_distributions(left, right):
    p, q = (torch.tensor(each[: len(left)], dtype=torch.float64).log_softmax(-1) for each in (left, right))
    kl, tv = float((p.exp() * (p - q)).sum()), float((p.exp() - q.exp()).abs().sum() / 2)
    assert tv <= largest_tv(max(kl, 0.0)) + 1e-7
    assert largest_tv(0.02) == pytest.approx(0.1) and largest_tv(math.inf) == 1


def test_q17_a_70b_is_141_then_70_6_then_39_8_gb():
    """In 10⁹ bytes: all weights in 16 and in 8 bits, then blocks in int4 with scale and zero point in groups of 128, embedding and head in 16."""
    from assay.ops.cost.shape import Decoder
    from assay.ops.quantize.grid import Format, effective_bits

    shape = Decoder(80, 8192, 28_672, 64, 8, 128, 128_256, tied=False)
    bits = effective_bits(Format("int", 4, 128, symmetric=False), 8192, 8192)
    packed = shape.block_parameters * bits / 8 + 2 * shape.head_parameters * 2
    assert [round(size / 1e9, 1) for size in (shape.parameters * 2, shape.parameters, packed)] == [141.1, 70.6, 39.8]
    assert kv_bytes_at(80, 8, 128) == 327_680
