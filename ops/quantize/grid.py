"""The integer grid: codes that share a scale per group, and back. Not here: which layers (``rtn.py``) or how codes are stored (``pack.py``)."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int8
from torch import Tensor


class Quantized(NamedTuple):
    """Integer codes, the scale that each group of them shares, and the code that means zero (none: the code 0)."""

    codes: Int8[Tensor, "rows cols"]
    scales: Float[Tensor, "rows groups"]
    zeros: Int8[Tensor, "rows groups"] | None


def quantize(
    weight: Float[Tensor, "rows cols"], *, bits: int, group_size: int, symmetric: bool, scale_dtype: torch.dtype = torch.bfloat16
) -> Quantized:
    """Round each group of weights to the nearest of 2^bits evenly spaced values, zero being one of them.

    With q_min = -2^(bits-1) and q_max = 2^(bits-1) - 1:

        symmetric     s = max|w| / ((2^bits - 1) / 2)            z = 0
        asymmetric    s = (max(w, 0) - min(w, 0)) / (2^bits - 1)  z = round(q_min - min(w, 0) / s)
        q = clamp(round(w / s) + z, q_min, q_max)                 ŵ = s (q - z)

    The symmetric scale spreads all 2^bits codes, as compressed-tensors does, over the range; the narrower rule, max|w| / q_max, leaves
    the code q_min unused and its step is wider by 2^bits - 1 over 2^bits - 2: 7 % at 4 bits and half as wide again at 2, where it has three values
    instead of four. Scales are rounded *up* to ``scale_dtype``, which keeps each group in range: no weight moves by more than s / 2.

    Args:
        weight: any float dtype; the arithmetic is float32.
        bits: 2 to 8.
        group_size: consecutive weights of a row that share a scale; divides ``cols``. -1 is one group a row.
        scale_dtype: bfloat16 has the exponent of float32, so that a group of weights near 1e-7 keeps a scale that is not 0.
    Returns:
        Codes within [q_min, q_max]; scales in the unit of ``weight``, above 0 even for a group of zeros, whose codes all mean 0.
    Raises:
        ValueError: ``bits`` or ``group_size`` does not fit, or a weight is not finite.
    Source:
        Nagel et al. 2021, §2.2, arXiv:2106.08295; the symmetric scale and the signed codes of compressed-tensors.
    """
    rows, cols = weight.shape
    if not 2 <= bits <= 8:
        raise ValueError(f"bits={bits} is outside 2 to 8")
    size = cols if group_size == -1 else group_size
    if size < 1 or cols % size:
        raise ValueError(
            f"group_size={group_size} does not divide the {cols} columns of the weight; "
            f"the largest that does is {largest_divisor(cols, at_most=max(size, 1))}, and -1 is one group a row"
        )
    if not weight.isfinite().all():
        raise ValueError(
            f"{int((~weight.isfinite()).sum()):,} of {weight.numel():,} weights are NaN or infinite; finite ones can be rounded"
        )
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    groups = weight.float().reshape(rows, -1, size)
    if symmetric:
        scales = _round_up(groups.abs().amax(dim=-1) / ((high - low) / 2), scale_dtype)
        codes = (groups / scales.float().unsqueeze(-1)).round().clamp_(low, high)
        zeros = None
    else:
        least, most = groups.amin(dim=-1).clamp(max=0), groups.amax(dim=-1).clamp(min=0)
        scales = _round_up((most - least) / (high - low), scale_dtype)
        zero = (low - least / scales.float()).round().clamp_(low, high)
        codes = (groups / scales.float().unsqueeze(-1)).round().add_(zero.unsqueeze(-1)).clamp_(low, high)
        zeros = zero.to(torch.int8)
    return Quantized(codes.to(torch.int8).reshape(rows, cols), scales, zeros)


def dequantize(quantized: Quantized) -> Float[Tensor, "rows cols"]:
    """ŵ = s (q - z) in float32, where it is exact for scales of 16 bits."""
    codes, scales, zeros = quantized
    rows, cols = codes.shape
    values = codes.reshape(rows, scales.shape[1], -1).float()
    if zeros is not None:
        values = values - zeros.float().unsqueeze(-1)
    return (values * scales.float().unsqueeze(-1)).reshape(rows, cols)


def largest_divisor(number: int, *, at_most: int) -> int:
    """The largest divisor of ``number`` up to ``at_most``."""
    return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)


def _round_up(scales: Float[Tensor, "rows groups"], dtype: torch.dtype) -> Float[Tensor, "rows groups"]:
    """The least value of ``dtype`` that is not below each scale, and never below the smallest normal one."""
    rounded = scales.to(dtype)
    above = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return torch.where(rounded.float() < scales, above, rounded).clamp(min=torch.finfo(dtype).tiny)
