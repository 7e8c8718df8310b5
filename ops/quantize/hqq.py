"""Half-quadratic quantization: scales (and zero points) without data, under an error that forgives a few large ones.

Not here: searching the range for the least squared error (``ranges.py``).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from assay.ops.quantize.grid import Format, Quantized, Scales, decode, encode, fit, groups


@torch.no_grad()
def hqq(
    weight: Float[Tensor, "rows cols"], format: Format, *, p: float = 0.7, iterations: int = 20, beta: float = 10.0, kappa: float = 1.01
) -> Quantized:
    """Round a weight with the scales and zero points that alternating steps find for the least Σ|w - ŵ|^p of each group.

    The error is split into an outlier part e, which may be large for few weights, and a quadratic rest. From the min-max grid, with
    everything in steps of its group, and β growing by κ:

        e  ← sign(r) max(|r| - |r|^(p-1) / β, 0),  r = w - ŵ
        s  ← ⟨v, w - e⟩ / ⟨v, v⟩,                        v = code - z, the value of each code
        z  ← round(mean(code - (w - e) / s))             asymmetric integers only
        codes ← nearest

    Args:
        format: with a plain scale of 16 or 32 bits per group; any number type, though that of fp8 moves by less than bfloat16 resolves.
        p: above 0 and at most 1.
        iterations: 0 rounds to nearest.
    Returns:
        Of each group the best that was met, scales and zeros as they are stored: no group has a larger Σ|w - ŵ|^p than by rounding to
        nearest.
    Raises:
        ValueError: p, β, κ or iterations out of range; scales that are powers of two, e4m3, or in eight bits themselves; or ``fit``
            refuses.
    Source:
        Badri & Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models". Theirs keeps the scale and solves for a zero
        point that is a real number. Zero points are integers here, as packed files store them, and rounding theirs at the end undoes its
        gain: Σ|w - ŵ|^0.7 of Gaussian, Laplace and Student weights at 2 to 4 bits comes back to 1.000 to 1.001 of rounding to nearest,
        against 0.78 to 0.97 when the scale is solved for as well. Theirs takes β in the unit of the weight, here it is in steps, so that a
        rescaled weight has the same codes.
    """
    if not 0 < p <= 1 or beta <= 0 or kappa < 1 or iterations < 0:
        raise ValueError(
            f"p={p}, beta={beta}, kappa={kappa}, iterations={iterations}: p in (0, 1], beta > 0, kappa ≥ 1 and iterations ≥ 0 work"
        )
    if format.scale in ("e8m0", "e4m3") or format.nested:
        what = "in eight bits" if format.nested else format.scale
        raise ValueError(f"scales {what} cannot be moved freely; bfloat16, float16 or float32 scales without nesting can")
    weight = weight.float()
    grouped = groups(weight, format)
    now = best = fit(weight, format)
    lowest = torch.full_like(now.effective, torch.inf)
    for step in range(iterations + 1):
        codes = encode(weight, now, format)
        scales = now.effective[:, None, :, None]
        values = groups(decode(codes, now, format), format) / scales
        error = grouped / scales - values
        total = (error * scales).abs().pow(p).sum(dim=(1, 3))
        better = total < lowest
        best, lowest = _where(better, now, best), torch.where(better, total, lowest)
        if step < iterations:
            outliers = error.sign() * (error.abs() - error.abs().clamp(min=1e-8).pow(p - 1) / (beta * kappa**step)).relu()
            now = _solve(grouped - outliers * scales, values, groups(codes.float(), format), now, format)
    return Quantized(encode(weight, best, format), best, format)


def _solve(target: Tensor, values: Tensor, codes: Tensor, now: Scales, format: Format) -> Scales:
    """The scale of least squares for these codes, as stored, and then the zero point."""
    above, below = (target * values).sum(dim=(1, 3)), values.square().sum(dim=(1, 3))
    scales = torch.where((above > 0) & (below > 0), above / below, now.effective)
    stored = scales.to(now.scales.dtype).clamp(min=torch.finfo(now.scales.dtype).tiny)
    if now.zeros is None:
        return Scales(stored)
    zeros = (codes - target / stored.float()[:, None, :, None]).mean(dim=(1, 3))
    return Scales(stored, zeros.round().clamp(format.low, format.high).to(torch.int8))


def _where(better: Tensor, new: Scales, old: Scales) -> Scales:
    zeros = None if new.zeros is None or old.zeros is None else torch.where(better, new.zeros, old.zeros)
    return Scales(torch.where(better, new.scales, old.scales), zeros)
