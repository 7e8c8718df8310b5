"""Closed forms of sampling that need no model. Not here: temperature, filters and penalties themselves (``ops/decode``), pass@k (``ops/evaluate``)."""

import math


def tail_mass(tokens: int, probability: float) -> float:
    """The chance that one of ``tokens`` tokens of this probability each comes: 100,000 of 2e-6 are 0.2.

    Raises:
        ValueError: they hold more than everything.
    """
    mass = tokens * probability
    if not 0 <= mass <= 1:
        raise ValueError(f"{tokens} tokens of {probability} hold {mass}; expected between 0 and 1")
    return mass


def tempered_ratio(ratio: float, temperature: float) -> float:
    """What a temperature makes of the ratio of two probabilities: ratio^(1/T), which is above 0 at every T, so that no token is ever ruled out."""
    if ratio < 0 or not temperature > 0:
        raise ValueError(f"ratio={ratio}, temperature={temperature}; expected 0 or more, and a number above 0")
    return ratio ** (1 / temperature)


def frequency_penalty(penalty: float, occurrences: int) -> float:
    """Logits that a token has lost after so many occurrences."""
    return penalty * occurrences


def largest_tv(kl_nats: float) -> float:
    """What the total variation is at most for a divergence in nats, by Pinsker: √(KL / 2), and never above 1."""
    if kl_nats < 0:
        raise ValueError(f"kl_nats={kl_nats}; a divergence is 0 or more")
    return min(1.0, math.sqrt(kl_nats / 2))
