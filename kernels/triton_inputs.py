"""What is done to an input before matrices read it, on CUDA: :class:`assay.ops.decode.weights.Ready` again. Not here: the matrices.

A rotation is one launch. Rounding leaves codes and scales, and not numbers, where every matrix that reads them multiplies codes (``triton_linear.py``).

Importing this imports Triton. It runs on CUDA, or on a CPU if ``TRITON_INTERPRET=1`` was set before anything imported Triton.
"""

# pyright: reportArgumentType=false
# ruff: noqa: N803
# (a kernel's constants are plain numbers at a launch, constexpr inside, and in capitals)

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int8
from torch import Tensor

from assay.kernels.triton_hadamard import fits, transform
from assay.kernels.triton_values import nearest, to_e4m3
from assay.ops.decode.weights import Ready
from assay.ops.quantize.activations import BITS, Activations, quantize_activations, require_valid
from assay.ops.quantize.rotate import Online

BLOCK = 1024  # numbers of a token at a time


class Codes(NamedTuple):
    """Rounded inputs: number = value of its code times the scale of its token. ``dtype`` is that of what was rounded, and of products."""

    codes: Int8[Tensor, "tokens inputs"]
    scales: Float[Tensor, " tokens"]
    dtype: torch.dtype


class Inputs(NamedTuple):
    """A rotation, then rounding: to :class:`Codes` if ``codes``, to numbers in their own dtype otherwise."""

    online: Online | None
    activations: Activations | None
    codes: bool

    def __call__(self, values: Float[Tensor, "*batch width"]) -> Any:
        values = values if self.online is None else turn(values, self.online)
        if self.activations is None:
            return values
        return round_to_codes(values, self.activations) if self.codes else quantize_activations(values, self.activations)

    @property
    def rounding(self) -> str:
        """What inputs are rounded to, for the path."""
        return "" if self.activations is None else self.activations.format + (" codes triton" if self.codes else "")

    @property
    def rotation(self) -> str:
        """How they are rotated, for the path."""
        return "" if self.online is None else "online rotations" + " triton" * fits(self.online.size)


def prepare(ready: Ready, readers: Sequence[Any], device: torch.device) -> Inputs:
    """``ready`` on ``device``, for the matrices as they are held that read what it makes."""
    how = ready.activations
    if how is None:
        return Inputs(ready.online, None, False)
    require_valid(how)
    scale, zero = (None if each is None else each.to(device, torch.float32) for each in (how.scale, how.zero))
    takes = [getattr(matrix, "takes", lambda _how: False)(how) for matrix in readers]
    return Inputs(ready.online, how._replace(scale=scale, zero=zero), bool(takes) and all(takes))


def turn(values: Float[Tensor, "*batch width"], online: Online) -> Float[Tensor, "*batch width"]:
    """:meth:`assay.ops.quantize.rotate.Online.turn`, but for the order in which numbers are added."""
    channels = values.reshape(*values.shape[:-1], -1, online.size, online.stride).mT
    return transform(channels).mT.reshape(values.shape)


def round_to_codes(values: Float[Tensor, "tokens inputs"], how: Activations, out: Int8[Tensor, "tokens inputs"] | None = None) -> Codes:
    """The codes and scales of :func:`assay.ops.quantize.activations.quantize_activations`, bit for bit; symmetric ones.

    A token whose numbers are not all what rounding can keep (NaN, or an infinite range) has the scale NaN.

    Args:
        out: contiguous; it is made when None.
    """
    values = values.contiguous()
    tokens, cols = values.shape
    out = torch.empty(tokens, cols, dtype=torch.int8, device=values.device) if out is None else out
    scales = torch.empty(tokens, dtype=torch.float32, device=values.device)
    bits = BITS.get(how.format)
    if tokens:
        _round[(tokens,)](
            values, out, scales, None if how.per == "token" else how.scale, cols, how.clip,
            SPREAD=448.0 if bits is None else (2**bits - 1) / 2, HALF=0 if bits is None else 2 ** (bits - 1), BLOCK=BLOCK,
        )  # fmt: skip
    return Codes(out, scales, values.dtype)


@triton.jit
def _round(x, codes, scales, fixed, cols, clip, SPREAD: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    # One program a token. x, codes: (tokens, cols); scales: (tokens,); fixed: one scale, or none. HALF: of the codes of integers; 0 is e4m3.
    token, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    begin = token * cols + lane
    most, broken = tl.zeros((BLOCK,), dtype=tl.float32), tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, cols, BLOCK):
        value = tl.load(x + (begin + start), mask=start + lane < cols, other=0).to(tl.float32)
        broken |= (value != value).to(tl.int32)
        most = tl.maximum(most, tl.where(value == value, tl.abs(value), 0.0))
    if fixed is None:  # noqa: SIM108 (one of the two is compiled)
        scale = tl.maximum(tl.math.div_rn(tl.max(most, axis=0) * clip, SPREAD), 1.1754943508222875e-38)
    else:
        scale = tl.load(fixed)
    lost = (tl.max(broken, axis=0) != 0) | (scale == float("inf"))
    tl.store(scales + token, tl.where(lost, float("nan"), scale))
    for start in range(0, cols, BLOCK):
        value = tl.load(x + (begin + start), mask=start + lane < cols, other=0).to(tl.float32)
        value = tl.math.div_rn(tl.where(lost, 0.0, value), scale)
        if HALF == 0:
            code = to_e4m3(tl.minimum(tl.maximum(value, -448.0), 448.0))
        else:  # cut off first: rounding past the ends is cut off all the same
            code = nearest(tl.minimum(tl.maximum(value, -1.0 * HALF), HALF - 1.0)).to(tl.int32)
        tl.store(codes + (begin + start), code.to(tl.int8), mask=start + lane < cols)
