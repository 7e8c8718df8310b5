"""How much of each group's range to keep: what is cut off at the ends is clipped, and the rest has finer steps.

Each function gives the ``shrink`` of ``grid.fit``. Not here: ranges by the error of a layer's *output* (``awq.py``).
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from assay.ops.quantize.grid import Format, dequantize, groups, quantize, require_fit


def minmax(weight: Float[Tensor, "rows cols"], format: Format) -> Float[Tensor, "blocks groups"]:
    """The whole range of each group: 1."""
    require_fit(weight.shape, format)
    return torch.ones_like(_sizes(weight, format))


def mse(weight: Float[Tensor, "rows cols"], format: Format, *, least: float = 0.2, steps: int = 40) -> Float[Tensor, "blocks groups"]:
    """The share of each group's range whose rounding has the least squared error, out of ``steps`` + 1 from 1 down to ``least``; of equal
    ones the largest.

    Groups are independent but for nested scales, which are left plain in the search. Ternary scales do not depend on the range, so their
    share is 1.

    Raises:
        ValueError: no step, or ``least`` outside 0 to 1; or the format does not fit.
    Source:
        Nagel et al. 2021, §3.1, arXiv:2106.08295.
    """
    if steps < 1 or not 0 < least < 1:
        raise ValueError(f"steps={steps} from 1 to least={least} is no search; at least one step, to a share above 0 and below 1, is")
    plain = format._replace(nested=False)
    best = minmax(weight, plain)
    lowest = torch.full_like(best, torch.inf)
    for step in range(steps + 1):
        shrink = torch.full_like(best, 1 - (1 - least) * step / steps)
        error = (dequantize(quantize(weight, plain, shrink=shrink)) - weight.float()).square_()
        error = groups(error, plain).sum(dim=(1, 3))
        better = error < lowest
        best, lowest = torch.where(better, shrink, best), torch.where(better, error, lowest)
    return best


def percentile(weight: Float[Tensor, "rows cols"], format: Format, *, keep: float = 0.999) -> Float[Tensor, "blocks groups"]:
    """The share of the range up to the ``keep`` quantile of |w| in its group: the k-th smallest of n over the largest, k = ⌈keep n⌉.

    A group of zeros keeps its range. A group of n weights loses nothing while ``keep`` is above 1 - 1 / n.

    Raises:
        ValueError: ``keep`` is not above 0 and at most 1.
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep} is no share of the weights; above 0 and at most 1 is")
    require_fit(weight.shape, format)
    size = groups(weight.float().abs(), format).transpose(1, 2).flatten(2)
    count = size.shape[-1]
    largest = size.amax(dim=-1)
    inside = size.kthvalue(min(count, max(1, math.ceil(keep * count - 1e-9))), dim=-1).values
    return torch.where(largest > 0, inside / largest, 1.0).clamp(min=torch.finfo(torch.float32).tiny)


def gaussian_clip(bits: int) -> float:
    """Where to clip a normal distribution that is rounded to 2^bits even steps, in standard deviations: 2.55 at 4 bits.

    The minimum over c of c² / (3 · 4^bits) + 2 ∫_c^∞ (x - c)² φ(x) dx, rounding and clipping error, is where
    c / (3 · 4^bits) = 2 (φ(c) - c Q(c)).

    Raises:
        ValueError: less than one bit.
    Source:
        Banner et al. 2019 (ACIQ), §3, arXiv:1810.05723.
    """
    if bits < 1:
        raise ValueError(f"bits={bits} leave no step; 1 or more do")
    low, high = 0.0, 40.0
    for _ in range(100):  # the right side falls, the left one rises
        middle = (low + high) / 2
        density = math.exp(-middle * middle / 2) / math.sqrt(2 * math.pi)
        tail = math.erfc(middle / math.sqrt(2)) / 2
        if middle / (3 * 4**bits) < 2 * (density - middle * tail):
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _sizes(weight: Float[Tensor, "rows cols"], format: Format) -> Float[Tensor, "blocks groups"]:
    return groups(weight.float(), format).abs().amax(dim=(1, 3))
