"""Entropy, tails and kept sets of positions whose logits are made in chunks, against the same written out token by token."""

import math

import pytest
import torch

from assay.ops.evaluate.distribution import FILTERS, Slice, law_residual, spread
from assay.ops.evaluate.divergence import Head

TEMPERATURES, KS = (0.7, 1.0, 2.0), (1, 5)


@pytest.fixture
def positions():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(7, 8, generator=generator), Head(
        torch.randn(40, 8, generator=generator), torch.randn(40, generator=generator), 0.9, 5.0
    )


def plainly(logits: list[float], temperature: float) -> dict[Slice, float]:
    weights = [math.exp(z / temperature) for z in logits]
    p = sorted((weight / sum(weights) for weight in weights), reverse=True)
    at = f"{temperature:g}"
    h = -sum(each * math.log(each) for each in p)
    found = {
        Slice("entropy_mean_nats", "temperature", at): h,
        Slice("varentropy_mean_nats2", "temperature", at): sum(each * (-math.log(each) - h) ** 2 for each in p),
    }
    for k in KS:
        found[Slice("tail_mass", "temperature_k", f"{at}/{k}")] = sum(p[k:])
    for name, strengths in FILTERS.items():
        for strength in strengths:
            if name == "top_p":
                size = next(size for size in range(1, 41) if sum(p[:size]) >= strength)
            else:
                size = sum(each >= strength * p[0] for each in p)
            found[Slice("kept_tokens", "filter_temperature", f"{name} {strength:g}/{at}")] = size
            for k in KS:
                found[Slice("kept_tail_mass", "filter_temperature_k", f"{name} {strength:g}/{at}/{k}")] = sum(p[k:size]) / sum(p[:size])
    return found


def test_every_number_is_what_it_is_written_out(positions):
    hidden, head = positions
    found = spread(hidden, head, temperatures=TEMPERATURES, ks=KS)
    for row, logits in enumerate(head.logits(hidden).tolist()):
        expected = {key: value for temperature in TEMPERATURES for key, value in plainly(logits, temperature).items()}
        assert {key: float(values[row]) for key, values in found.items()} == pytest.approx(expected, abs=2e-6)


def test_the_chunks_do_not_matter(positions):
    hidden, head = positions
    whole = spread(hidden, head, temperatures=TEMPERATURES, ks=KS)
    for chunk in (1, 3, 7):
        parts = spread(hidden, head, temperatures=TEMPERATURES, ks=KS, chunk=chunk)
        assert parts.keys() == whole.keys()
        assert all(torch.allclose(parts[key], whole[key], atol=1e-6) for key in whole)


def test_the_law_of_the_slope_holds_at_every_position(positions):
    hidden, head = positions
    for temperature in TEMPERATURES:
        found = law_residual(hidden, head, temperature=temperature, chunk=2)
        assert found.shape == (7,) and found.dtype == torch.float64 and float(found.max()) < 1e-7


def test_a_position_without_a_distribution_is_refused(positions):
    hidden, head = positions
    hidden[3, 2] = math.nan
    with pytest.raises(ValueError, match="row of logits"):
        spread(hidden, head, temperatures=(1.0,), ks=(1,))
