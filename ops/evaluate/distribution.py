"""What temperature and filters make of a model's next-token distributions on a text. Not here: averages, or one distribution (``ops/decode/entropy.py``).

Logits are made from final hidden states a chunk at a time, so that no [tokens × vocabulary] tensor ever exists.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from assay.ops.decode.entropy import kept_set, moments, slope_residual
from assay.ops.decode.filters import Candidates, largest_first, min_p, top_p
from assay.ops.decode.sampling import tempered
from assay.ops.evaluate.divergence import BLOCK, Head

# Filters of the usual strengths, one that follows the distribution's shape and one that follows its peak.
FILTERS: Mapping[str, tuple[float, ...]] = {"top_p": (0.9, 0.95), "min_p": (0.05, 0.1)}


class Slice(NamedTuple):
    """Which number of which part: ``part`` joins a filter, a temperature and a k, as many as ``kind`` names, by slashes."""

    metric: str
    kind: str
    part: str


@torch.inference_mode()
def spread(
    hidden: Float[Tensor, "tokens hidden"], head: Head, *, temperatures: Sequence[float], ks: Sequence[int], chunk: int = 32
) -> dict[Slice, Float[Tensor, " tokens"]]:
    """For each position and temperature: entropy (nats), varentropy (nats²), the mass beyond each k, and what filters keep.

    Kept are, for each filter of :data:`FILTERS`, the number of tokens and, for each k, the share of what is kept that lies beyond the k likeliest: the
    tail that the filter lets in.

    Args:
        chunk: positions whose logits exist at a time.
    Raises:
        ValueError: a position has no distribution (NaN).
    """
    found: dict[Slice, list[Tensor]] = defaultdict(list)
    rows = max(1, BLOCK // len(head.weight)) if hidden.device.type == "cpu" else chunk
    for begin in range(0, len(hidden), chunk):
        for logits in head.logits(hidden[begin : begin + chunk]).split(rows):
            ranked = largest_first(logits, logits.shape[-1])  # no number here depends on ids, and no temperature changes the ranking
            for temperature in temperatures:
                for key, values in _at(ranked, temperature, ks):
                    found[key].append(values)
    return {key: torch.cat(parts).double().cpu() for key, parts in found.items()}


def _at(ranked: Float[Tensor, "tokens vocab"], temperature: float, ks: Sequence[int]) -> Iterator[tuple[Slice, Float[Tensor, " tokens"]]]:
    """The numbers of one temperature, of logits in descending order."""
    at = f"{temperature:g}"
    p = tempered(ranked, temperature)
    whole = Candidates(p, p)
    mean, variance = moments(ranked, temperature)
    yield Slice("entropy_mean_nats", "temperature", at), mean
    yield Slice("varentropy_mean_nats2", "temperature", at), variance
    for k, mass in zip(ks, kept_set(whole, ks).tail.unbind(dim=-1), strict=True):
        yield Slice("tail_mass", "temperature_k", f"{at}/{k}"), mass
    for name, strengths in FILTERS.items():
        for strength in strengths:
            kept = kept_set(top_p(whole, strength) if name == "top_p" else min_p(whole, strength), ks)
            yield Slice("kept_tokens", "filter_temperature", f"{name} {strength:g}/{at}"), kept.size.double()
            for k, mass in zip(ks, kept.tail.unbind(dim=-1), strict=True):
                yield Slice("kept_tail_mass", "filter_temperature_k", f"{name} {strength:g}/{at}/{k}"), mass


@torch.inference_mode()
def law_residual(hidden: Float[Tensor, "tokens hidden"], head: Head, *, temperature: float, chunk: int = 32) -> Float[Tensor, " tokens"]:
    """|numeric dH/dT − Var(z)/T³| at each position, in nats per unit of temperature; float64."""
    parts = [slope_residual(head.logits(hidden[begin : begin + chunk]), temperature) for begin in range(0, len(hidden), chunk)]
    return torch.cat(parts).cpu() if parts else torch.empty(0, dtype=torch.float64)
