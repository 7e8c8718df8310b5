"""What rounding costs, before anything is rounded: steps, noise, what one outlier does to its group. Not here: rounding (``ops/quantize``).

Sizes are in standard deviations of the weights where nothing else is said.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple


def step_of(largest: float, bits: int) -> float:
    """The step Δ of 2^bits even levels from −largest to largest: 2 · largest / (2^bits − 1). A weight of 15 σ makes a 4-bit step 2 σ.

    Raises:
        ValueError: less than one bit, or a negative size.
    """
    if bits < 1 or largest < 0:
        raise ValueError(f"largest={largest} in {bits} bits; expected 0 or more, and 1 bit or more")
    return 2 * largest / (2**bits - 1)


def rounding_variance(step: float) -> float:
    """Δ² / 12: the variance of an error that is even over a step."""
    return step * step / 12


def rounding_deviation(step: float) -> float:
    """Δ / √12: its standard deviation."""
    return step / math.sqrt(12)


def variance_factor(bits: int, fewer: int) -> int:
    """How many times the error variance grows from ``bits`` to ``fewer`` bits over the same range: 4 for each bit, 256 from 8 to 4.

    With 2^bits − 1 steps, as :func:`step_of` has them, the ratio is a little above: 289 from 8 to 4.
    """
    if not 1 <= fewer <= bits:
        raise ValueError(f"from {bits} to {fewer} bits; expected fewer bits, at least 1")
    return 4 ** (bits - fewer)


class Flattened(NamedTuple):
    """A vector of one outlier among channels of equal size, after a Hadamard rotation with random signs."""

    share: float  # of the outlier in every channel: outlier / √width
    noise: float  # standard deviation of what the other channels add
    typical: float  # share + noise: a channel where both have the same sign
    largest: float  # the expected largest of all channels


def flattened(outlier: float, width: int, *, others: float = 1.0) -> Flattened:
    """What is left of ``outlier`` in a vector of ``width`` channels, of which the others are ±``others``: it is shared out evenly.

    500 among ones in 1024 channels: 15.6 each, and 1 of noise. The largest is share + noise · √(2 ln width) less a little; by Blom's formula here.

    Raises:
        ValueError: fewer than 2 channels.
    Source:
        Ashkboos et al. 2024, QuaRot, §3, arXiv:2404.00456, for the rotation; Blom 1958 for the expected largest of n normal numbers.
    """
    from scipy.stats import norm

    if width < 2:
        raise ValueError(f"width={width}; an outlier is one among others, so 2 channels or more")
    share, noise = outlier / math.sqrt(width), others * math.sqrt((width - 1) / width)
    return Flattened(share, noise, share + noise, share + noise * float(norm.ppf((width - 0.375) / (width + 0.25))))


def gaussian_codebook_mse(levels: Sequence[float], *, block: int | None = None) -> float:
    """The mean squared error of rounding standard normal numbers to the nearest of ``levels``, by integration.

    Args:
        levels: ascending. Without ``block`` in standard deviations, and numbers beyond the last are clipped to it; with it about −1 to 1, and every
            ``block`` numbers are scaled by their own largest.
    Raises:
        ValueError: no level, or a block of fewer than 2.
    """
    import numpy as np
    from scipy.stats import norm

    grid = np.asarray(levels, dtype=float)
    if grid.size == 0 or (block is not None and block < 2):
        raise ValueError(f"{grid.size} levels and blocks of {block}; expected 1 level or more, and 2 numbers or more in a block")
    if block is None:
        return float(_error_within(grid[None], np.array([[np.inf]]))[0])
    # The largest |x| of n has the density 2 n φ(m) (2 Φ(m) − 1)^(n−1); given it, the others are normal numbers within ±m.
    sizes = np.linspace(0.01, 8.0, 800)
    within = 2 * norm.cdf(sizes) - 1
    density = 2 * block * norm.pdf(sizes) * within ** (block - 1)
    others = _error_within(grid * sizes[:, None], sizes[:, None]) / within
    own = np.mean([np.min((grid - end) ** 2) for end in (-1.0, 1.0)]) * sizes**2
    return float(np.trapezoid(density * (others * (block - 1) + own) / block, sizes))


def _error_within(levels: Any, largest: Any) -> Any:
    """∫ (x − nearest level)² φ(x) dx over |x| ≤ largest, in closed form between the midpoints of levels; one integral a row."""
    import numpy as np
    from scipy.stats import norm

    middles = np.clip((levels[:, 1:] + levels[:, :-1]) / 2, -largest, largest)
    edges = np.concatenate([-largest, middles, largest], axis=1)
    density, below = norm.pdf(edges), norm.cdf(edges)
    first = density[:, :-1] - density[:, 1:]  # ∫ x φ
    reach = np.where(np.isfinite(edges), edges, 0.0) * density
    mass = below[:, 1:] - below[:, :-1]
    second = mass + reach[:, :-1] - reach[:, 1:]  # ∫ x² φ
    return np.sum(second - 2 * levels * first + levels**2 * mass, axis=1)
