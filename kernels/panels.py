"""Matrices in the panels that the native decoder reads (``cpu/decoder.h``). Not here: reading checkpoints (``ops/decode/weights``), or multiplying."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from assay.ops.decode.weights import Matrix
from assay.ops.quantize.grid import Quantized

PANEL = 32  # outputs side by side
FORMS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}


class Panels(NamedTuple):
    """One matrix in panels. ``form`` is how it is run: narrower integers lie in int4 lanes, and what fits no form in float32."""

    form: str
    rows: int
    cols: int
    group: int
    data: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    bias: Float[Tensor, " padded"] | None


def panels(matrix: Matrix) -> Panels:
    """Lay ``matrix`` out; exact in every form.

    Integers of at most four bits run as int4 if the group is a whole number of words of eight columns, and the scales are bfloat16 numbers; other integers
    of at most eight bits as int8. What fits neither (or a float16 weight) is multiplied out to float32.
    """
    rows, cols = matrix.shape
    bias = None if matrix.bias is None else _outputs(matrix.bias.float().unsqueeze(1)).flatten().contiguous()
    weight = matrix.weight
    if isinstance(weight, Quantized):
        group = cols // weight.scales.shape[1]
        if weight.scales.to(torch.bfloat16).float().equal(weight.scales.float()):
            scales = _beside(weight.scales.to(torch.bfloat16))
            zeros = None if weight.zeros is None else _beside(weight.zeros)
            if matrix.bits is not None and matrix.bits <= 4 and group % 8 == 0:
                return Panels("int4", rows, cols, group, _nibbles(weight.codes), scales, zeros, bias)
            return Panels("int8", rows, cols, group, _beside(weight.codes), scales, zeros, bias)
    elif weight.dtype == torch.bfloat16 and cols % 2 == 0:
        pairs = _outputs(weight).view(-1, PANEL, cols // 2, 2).permute(0, 2, 1, 3).contiguous()
        return Panels("bfloat16", rows, cols, cols, pairs, None, None, bias)
    return Panels("float32", rows, cols, cols, _beside(matrix.dense(torch.float32)), None, None, bias)


def _outputs(weight: Tensor) -> Tensor:
    """[out, in] with as many zero outputs more as fill the last panel."""
    return pad(weight, (0, 0, 0, -len(weight) % PANEL))


def _beside(weight: Tensor) -> Tensor:
    """[out, in] as [panels, in, PANEL]."""
    whole = _outputs(weight)
    return whole.view(-1, PANEL, whole.shape[1]).transpose(1, 2).contiguous()


def _nibbles(codes: Tensor) -> Tensor:
    """Codes of -8 … 7 as 32-bit words [panels, in / 8, PANEL], the first column in the lowest bits."""
    whole = (_outputs(codes).view(-1, PANEL, codes.shape[1] // 8, 8) + 8).to(torch.int32)
    words = whole[..., 0].clone()
    for column in range(1, 8):
        words |= whole[..., column] << (4 * column)
    return words.transpose(1, 2).contiguous()
