"""How spread a distribution is, how temperature spreads it, and what filters let in of its tail. Not here: averages over a text, the filters.

Each row of logits is a distribution of its own. Arithmetic is float32 with float64 sums, or all float64 where the logits are.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from assay.ops.decode.filters import Candidates


class Moments(NamedTuple):
    """Mean and variance of the surprise −log p, in nats and nats²."""

    mean: Float[Tensor, "*batch"]
    variance: Float[Tensor, "*batch"]


class KeptSet(NamedTuple):
    """What a filter keeps: how many tokens, their share of the whole before it, and of that the share beyond each rank that was asked for."""

    size: Int64[Tensor, " rows"]
    mass: Float[Tensor, " rows"]
    tail: Float[Tensor, "rows ks"]


def entropy(logits: Float[Tensor, "*batch vocab"], temperature: float = 1.0) -> Float[Tensor, "*batch"]:
    """H = −Σ p log p of p = softmax(z / T), in nats: 0 for one certain token, log(vocab) for equal ones.

    Raises:
        ValueError: ``temperature`` is not above 0.
    """
    return moments(logits, temperature).mean


def varentropy(logits: Float[Tensor, "*batch vocab"], temperature: float = 1.0) -> Float[Tensor, "*batch"]:
    """Σ p (−log p − H)², the variance of the surprise, in nats²: 0 where all tokens that can come are equally likely.

    Raises:
        ValueError: ``temperature`` is not above 0.
    """
    return moments(logits, temperature).variance


def entropy_slope(logits: Float[Tensor, "*batch vocab"], temperature: float = 1.0) -> Float[Tensor, "*batch"]:
    """dH/dT = Var(z) / T³ with the variance under softmax(z / T), in nats per unit of temperature; never negative.

    Since log p = z/T − const, Var(z) = T² · varentropy, so it is varentropy / T.

    Raises:
        ValueError: ``temperature`` is not above 0.
    """
    return moments(logits, temperature).variance / temperature


def slope_residual(logits: Float[Tensor, "*batch vocab"], temperature: float = 1.0, *, step: float = 1e-4) -> Float[Tensor, "*batch"]:
    """|(H(T + h) − H(T − h)) / 2h − Var(z)/T³| in float64, with h = ``step`` · T: what is left of the law when it is checked numerically."""
    z, h = logits.double(), step * temperature
    return ((entropy(z, temperature + h) - entropy(z, temperature - h)) / (2 * h) - entropy_slope(z, temperature)).abs()


def tempered_ratio(ratio: float, temperature: float) -> float:
    """p_T(i) / p_T(j) from ``ratio`` = p₁(i) / p₁(j): its 1/T-th power, so a temperature changes every ratio and makes none 0.

    Raises:
        ValueError: ``temperature`` is not above 0.
    """
    _require(temperature)
    return ratio ** (1 / temperature)


def tail_mass(logits: Float[Tensor, "rows vocab"], ks: Sequence[int], temperature: float = 1.0) -> Float[Tensor, "rows ks"]:
    """How much of softmax(z / T) lies on tokens beyond the ``k`` likeliest, for each k of ``ks``; 0 to 1.

    The tail itself is summed, so that one of 10⁻¹² is not the rounding of the head. float64.

    Raises:
        ValueError: a k is below 1, or ``temperature`` is not above 0.
    """
    if any(k < 1 for k in ks):
        raise ValueError(f"ks={list(ks)} has a k below 1; expected how many of the likeliest tokens are not tail")
    log_p = _log_softmax(logits, temperature)
    vocab = log_p.shape[-1]
    likeliest = log_p.topk(min(max(ks, default=1), vocab), dim=-1)
    p = log_p.exp().double()
    rest = p.scatter(-1, likeliest.indices, 0.0).sum(dim=-1, keepdim=True)
    # From the smallest of the likeliest up, so that each tail is a sum of what belongs to it.
    tails = torch.cat([rest, likeliest.values.exp().double().flip(-1)], dim=-1).cumsum(dim=-1).flip(-1)
    found = [tails[:, min(k, tails.shape[-1] - 1)] for k in ks]
    return torch.stack(found, dim=-1) / tails[:, :1] if ks else tails[:, :0]


def kept_set(left: Candidates, ks: Sequence[int] = ()) -> KeptSet:
    """What ``left`` has of the distribution, and how much of that lies beyond the ``k`` likeliest tokens, for each k of ``ks``; float64."""
    whole = left.p.sum(dim=-1, dtype=torch.float64)
    vocab = left.p.shape[-1]
    if left.kept is None:
        ranked = left.extended().ranks(vocab)
        size = (ranked > 0).sum(dim=-1)
    else:
        ranked = left.ranks(vocab)[:, : int(left.kept.max())]
        size = torch.minimum((ranked > 0).sum(dim=-1), left.kept)
    sums = ranked.cumsum(dim=-1, dtype=torch.float64)
    kept = sums.gather(-1, size.unsqueeze(-1) - 1)
    heads = [sums.gather(-1, size.clamp(max=k).unsqueeze(-1) - 1) for k in ks]
    tail = torch.cat([1 - head / kept for head in heads], dim=-1) if heads else sums[:, :0]
    return KeptSet(size, kept.squeeze(-1) / whole, tail)


def moments(logits: Float[Tensor, "*batch vocab"], temperature: float = 1.0) -> Moments:
    """:func:`entropy` and :func:`varentropy` in one pass.

    Raises:
        ValueError: ``temperature`` is not above 0.
    """
    log_p = _log_softmax(logits, temperature)
    p = log_p.exp()
    surprise = log_p.clamp(min=torch.finfo(log_p.dtype).min / 2).neg()  # finite where p is 0, so that p · surprise is 0 there
    mean = (p * surprise).sum(dim=-1, dtype=torch.float64)
    off = surprise.clamp(max=1e6) - mean.unsqueeze(-1).to(p.dtype)  # a surprise of 10⁶ has p = 0, and its square is finite
    return Moments(mean.to(p.dtype), (p * off.square()).sum(dim=-1, dtype=torch.float64).to(p.dtype))


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    _require(temperature)
    z = logits if logits.dtype == torch.float64 else logits.float()
    return ((z - z.amax(dim=-1, keepdim=True)) / temperature).log_softmax(dim=-1)


def _require(temperature: float) -> None:
    if not temperature > 0:
        raise ValueError(
            f"temperature={temperature} spreads nothing; expected a number above 0, of which 1 leaves the distribution as it is"
        )
