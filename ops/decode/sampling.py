"""From logits to a distribution, and from a distribution to a token. Not here: loops over tokens (``generate``, ``speculate``).

The order is declared: temperature, then top-k, then top-p over what top-k left, then min-p; each filter is followed by renormalising.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

# A sum of float32 probabilities that comes this close to top_p has reached it, so that 0.5 + 0.35 reaches 0.85 on every machine.
TIE = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How one request turns logits into a distribution; a draft and its target use the same one.

    Raises:
        ValueError: ``temperature`` is negative, ``top_k`` is negative, ``top_p`` is not positive or ``min_p`` lies outside 0 … 1.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} is no temperature; 0 is greedy, 1 leaves the model's distribution as it is")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} keeps no token; 0 switches the filter off, 1 is greedy")
        if not self.top_p > 0:
            raise ValueError(f"top_p={self.top_p} keeps no token; it is above 0, and 1 switches the filter off")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} is a share of the largest probability, between 0 (off) and 1")

    @property
    def greedy(self) -> bool:
        """Whether the distribution is always one-hot, so that a request draws nothing."""
        return self.temperature == 0 or self.top_k == 1

    def probabilities(self, logits: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
        """:func:`probabilities` with these parameters."""
        return probabilities(logits, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


def probabilities(
    logits: Float[Tensor, "*batch vocab"], *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Float[Tensor, "*batch vocab"]:
    """The distribution that the next token is drawn from.

    Tokens are ranked by probability, equal ones by id, the lower first. Of this ranking

    - ``top_k`` keeps the first ``top_k``, so ties never make it keep more;
    - ``top_p`` keeps a token while the sum of those *before* it is below ``top_p``, so the token that crosses stays and one that comes
      after an exact hit (within 1e-6) goes;
    - ``min_p`` keeps the tokens with at least ``min_p`` times the largest probability.

    Args:
        logits: any float dtype; ``-inf`` marks a token that cannot come.
        temperature: divides the logits; 0 is greedy: everything on the largest logit, the lowest id among equals.
        top_k: 0 switches it off.
        top_p: 1 or more switches it off.
        min_p: 0 switches it off.
    Returns:
        float32, each row summing to 1.
    Raises:
        ValueError: a parameter is out of its range; a row holds NaN or +inf, or nothing but -inf.
    Source:
        Holtzman et al. 2020, arXiv:1904.09751 (top-p); Fan et al. 2018, arXiv:1805.04833 (top-k); Nguyen et al. 2024, arXiv:2407.01082 (min-p).
    """
    Sampling(temperature, top_k, top_p, min_p)
    top = logits.amax(dim=-1, keepdim=True)
    if not bool(torch.isfinite(top).all()):
        raise ValueError(
            "a row of logits has NaN, +inf or only -inf, so it has no distribution; expected at least one finite logit and no NaN"
        )
    if temperature == 0 or top_k == 1:
        chosen = logits.argmax(dim=-1, keepdim=True)
        return torch.zeros(logits.shape, dtype=torch.float32, device=logits.device).scatter_(-1, chosen, 1.0)
    # The largest logit is taken off first: no temperature, however small, overflows.
    result = ((logits.float() - top.float()) / max(temperature, 1e-30)).softmax(dim=-1)
    vocab = logits.shape[-1]
    if 0 < top_k < vocab or top_p < 1:
        ranked, order = result.sort(dim=-1, descending=True, stable=True)
        kept = torch.ones_like(ranked, dtype=torch.bool)
        if 0 < top_k < vocab:
            kept[..., top_k:] = False
            ranked = ranked * kept
        if top_p < 1:
            ranked = ranked.double()
            ranked = ranked / ranked.sum(dim=-1, keepdim=True)
            kept[..., 1:] &= ranked.cumsum(dim=-1)[..., :-1] < top_p - TIE
        result = result * torch.zeros_like(kept).scatter_(-1, order, kept)
    if min_p > 0:
        result = result * (result >= min_p * result.amax(dim=-1, keepdim=True))
    return result / result.sum(dim=-1, keepdim=True)


def uniforms(count: int, generator: torch.Generator | None) -> list[float]:
    """``count`` numbers in [0, 1), the next of the request's ``generator``.

    Raises:
        ValueError: there is no generator: one that all requests shared would make a draw depend on its neighbours.
    """
    require_generator(generator)
    assert generator is not None
    return torch.rand(count, generator=generator, dtype=torch.float64, device=generator.device).tolist()


def sample(probs: Float[Tensor, " vocab"], generator: torch.Generator | None) -> int:
    """One token of ``probs``; a request has one ``generator``, which advances by one number with each draw.

    The number u in [0, 1) falls into one token's stretch of the cumulative sum (float64), so a draw costs one number whatever the vocabulary, and the
    same seed gives the same tokens whatever device the model is on. Where all mass is on one token, that one is returned and nothing is drawn.

    Args:
        probs: not negative; need not sum to 1.
    Raises:
        ValueError: there is something to draw and no generator, or no mass at all.
    """
    largest, token = probs.max(dim=-1)
    cumulative = probs.double().cumsum(dim=-1)
    total = float(cumulative[-1])
    if not total > 0:
        raise ValueError("the distribution has no mass, so no token can be drawn; expected at least one positive probability")
    if float(largest) == total:
        return int(token)
    (u,) = uniforms(1, generator)
    drawn = int(torch.searchsorted(cumulative, u * total, right=True))
    return drawn if drawn < probs.shape[-1] else int(probs.nonzero()[-1])  # u * total can round up to the total


def require_generator(generator: torch.Generator | None) -> None:
    """Raise ValueError where a draw is due and the request has no generator of its own."""
    if generator is None:
        raise ValueError(
            "sampling needs a generator of the request's own; got None. Pass torch.Generator().manual_seed(seed), or temperature=0"
        )
