"""Matrices in the panels that the native decoder reads (``cpu/decoder.h``). Not here: reading checkpoints (``ops/decode/weights``), or multiplying."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from assay.ops.decode.weights import Matrix
from assay.ops.quantize.elements import FLOAT8, TABLES, table
from assay.ops.quantize.grid import Quantized
from assay.ops.quantize.semi_structured import SemiStructuredCodes

PANEL = 32  # outputs side by side
FORMS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3, "table4": 4, "e4m3": 5, "e5m2": 6}


class Panels(NamedTuple):
    """One matrix in panels. ``form`` is how it is run: what fits no form, in float32. ``scales`` are bfloat16 where that holds them, else float32."""

    form: str
    rows: int
    cols: int
    group: int
    data: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    bias: Float[Tensor, " padded"] | None
    table: Float[Tensor, " sixteen"] | None = None


def panels(matrix: Matrix) -> Panels:
    """Lay ``matrix`` out; exact in every form.

    Codes of at most four bits run as int4, or as places in a table of sixteen (``table4``), if the group is a whole number of words of eight columns; codes
    of a byte as int8 or as small floats; 2:4 codes with their zeros, since nothing here reads places. What fits none of these (groups that are not
    contiguous, columns kept apart, a float16 weight) is multiplied out to float32.
    """
    rows, cols = matrix.shape
    bias = None if matrix.bias is None else _outputs(matrix.bias.float().unsqueeze(1)).flatten().contiguous()
    weight = matrix.weight.quantized() if isinstance(matrix.weight, SemiStructuredCodes) else matrix.weight
    coded = _codes(weight) if isinstance(weight, Quantized) else None
    if isinstance(weight, Quantized) and coded is not None:
        form, data = coded
        steps, zeros = weight.shared.effective, weight.shared.zeros
        group, each = cols // steps.shape[1], rows // len(steps)
        short = steps.to(torch.bfloat16)
        scales = _beside((short if short.float().equal(steps) else steps).repeat_interleave(each, dim=0))
        zeros = None if zeros is None else _beside(zeros.repeat_interleave(each, dim=0))
        values = torch.tensor(table(weight.format.element)) if form == "table4" else None
        return Panels(form, rows, cols, group, data, scales, zeros, bias, values)
    if isinstance(weight, Tensor) and weight.dtype == torch.bfloat16 and cols % 2 == 0:
        pairs = _outputs(weight).view(-1, PANEL, cols // 2, 2).permute(0, 2, 1, 3).contiguous()
        return Panels("bfloat16", rows, cols, cols, pairs, None, None, bias)
    return Panels("float32", rows, cols, cols, _beside(matrix.dense(torch.float32)), None, None, bias)


def _codes(weight: Quantized) -> tuple[str, Tensor] | None:
    """The form that holds the codes, and them in it; None where none does."""
    codes, shared, format, order = weight
    whole = codes.shape[1] // shared.scales.shape[1] % 8 == 0  # words of eight columns
    if order is not None or (format.element in TABLES and not whole):
        return None
    if format.element in TABLES:
        return "table4", _nibbles(codes, 0)
    if format.element in FLOAT8:
        return format.element, _beside(codes)
    return ("int4", _nibbles(codes, 8)) if format.bits <= 4 and whole else ("int8", _beside(codes))


def _outputs(weight: Tensor) -> Tensor:
    """[out, in] with as many zero outputs more as fill the last panel."""
    return pad(weight, (0, 0, 0, -len(weight) % PANEL))


def _beside(weight: Tensor) -> Tensor:
    """[out, in] as [panels, in, PANEL]."""
    whole = _outputs(weight)
    return whole.view(-1, PANEL, whole.shape[1]).transpose(1, 2).contiguous()


def _nibbles(codes: Tensor, add: int) -> Tensor:
    """Codes plus ``add``, 0 … 15, as 32-bit words [panels, in / 8, PANEL], the first column in the lowest bits."""
    whole = (_outputs(codes).view(-1, PANEL, codes.shape[1] // 8, 8) + add).to(torch.int32)
    words = whole[..., 0].clone()
    for column in range(1, 8):
        words |= whole[..., column] << (4 * column)
    return words.transpose(1, 2).contiguous()
