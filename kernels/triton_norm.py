"""The norm of every block in one launch on CUDA: :func:`assay.ops.decode.forward.rms_norm` again, which takes half a dozen. Not here: anything else.

Importing this imports Triton. It runs on CUDA, or on a CPU if ``TRITON_INTERPRET=1`` was set before anything imported Triton.
"""

# pyright: reportArgumentType=false
# ruff: noqa: N803
# (a kernel's constants are plain numbers at a launch, constexpr inside, and in capitals)

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor


def rms_norm(
    values: Float[Tensor, "*batch width"], weight: Float[Tensor, " width"], *, eps: float, offset: float, out: Tensor | None = None
) -> Float[Tensor, "*batch width"]:
    """As the op, rounded where it rounds; only the order in which the squares are added differs.

    Args:
        out: contiguous, of the shape and dtype of ``values``; it is made when None.
    """
    values = values.contiguous()
    width = values.shape[-1]
    rows = values.numel() // width
    out = torch.empty_like(values) if out is None else out
    if rows:
        settings = {"SHIFTED": bool(offset), "BLOCK": triton.next_power_of_2(width)}
        _rms_norm[(rows,)](values, weight, out, width, eps, float(offset), **settings)
    return out


@triton.jit
def _rms_norm(values, weight, out, width, eps, offset, SHIFTED: tl.constexpr, BLOCK: tl.constexpr):
    # One program a row. values, out: (rows, width); weight: (width,).
    start, lane = tl.program_id(0).to(tl.int64) * width, tl.arange(0, BLOCK)
    inside = lane < width
    value = tl.load(values + start + lane, mask=inside, other=0).to(tl.float32)
    by = tl.load(weight + lane, mask=inside, other=0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / width + eps)
    if SHIFTED:
        value *= offset + by
    else:
        value = value.to(out.dtype.element_ty).to(tl.float32) * by
    tl.store(out + start + lane, value.to(out.dtype.element_ty), mask=inside)
