"""Linear maps over packed integers on CUDA: :func:`assay.ops.decode.forward.linear` again, without the weight ever being whole. Not here: CUDA graphs.

A token's decode step reads every weight once, so its speed is that of the bytes read. At most :data:`SMALL` vectors are multiplied by codes that stay as
they are stored and become numbers in registers; more of them share a matrix that is multiplied out for the call, which is what a large product wants.
Both use the weight rounded to the dtype of the activations, so that a prompt and what follows it are read by one model.

Importing this imports Triton. It runs on CUDA, or on a CPU if ``TRITON_INTERPRET=1`` was set before anything imported Triton.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false
# ruff: noqa: N803
# (a kernel's constants are plain numbers at a launch, constexpr inside, and in capitals)

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float, Int8, Int32
from torch import Tensor

from assay.ops.decode.weights import Matrix
from assay.ops.quantize.grid import Quantized
from assay.ops.quantize.pack import pack

SMALL = 64  # vectors; above, the matrix is multiplied out
OUTPUTS = 16  # a program
VECTORS = 16  # a program: each is computed as if alone, so that its neighbours change no bit of it
INPUTS = 128  # at a time
PROGRAMS = 4  # a multiprocessor: too few cannot keep the memory busy, so that small matrices are split along the inputs


class Lanes(NamedTuple):
    """A packed matrix as the kernels read it, where :class:`Matrix` stands elsewhere.

    ``words`` hold 32 / ``lane`` codes each along the inputs, the first in the lowest bits, every code 2^(lane-1) above its value: the layout of
    :func:`assay.ops.quantize.pack.pack`. ``bits`` are those of the codes, at most ``lane``. ``splits`` programs share the inputs of an output.
    """

    words: Int32[Tensor, "rows words"]
    scales: Float[Tensor, "rows groups"]
    zeros: Int8[Tensor, "rows groups"] | None
    bias: Float[Tensor, " rows"] | None
    lane: int
    bits: int
    splits: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.words), self.words.shape[1] * (32 // self.lane)

    @property
    def form(self) -> str:
        """How it is run, such as ``int4 triton``."""
        return f"int{self.lane} triton" + ("" if self.bits == self.lane else f" from int{self.bits}")

    def multiply(self, values: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        """W x + b, in the dtype of ``values``; sums are float32."""
        flat = values.reshape(-1, values.shape[-1])
        small = len(flat) <= SMALL
        found = multiply_small(flat, self) if small else F.linear(flat, multiply_out(self, values.dtype), self.bias)
        return found.view(*values.shape[:-1], len(self.words))


def hold(matrix: Matrix, dtype: torch.dtype, device: torch.device) -> Matrix | Lanes:
    """``matrix`` on ``device`` as it is to be run there: packed if it is packed in groups of whole words, in ``dtype`` otherwise.

    Codes of 3 bits lie in lanes of 4, of 5 to 7 in lanes of 8.
    """
    bias = None if matrix.bias is None else matrix.bias.to(device=device, dtype=dtype)
    weight = matrix.weight
    if (
        isinstance(weight, Quantized)
        and weight.format.element == "int"
        and weight.order is None
        and len(weight.shared.scales) == len(weight.codes)
    ):
        scales, zeros, bits = weight.shared.scales, weight.shared.zeros, weight.format.bits
        lane = next(lane for lane in (2, 4, 8) if lane >= bits)
        rows, cols = matrix.shape
        if not (cols // scales.shape[1]) % (32 // lane):
            words = pack(weight.codes, bits=lane).to(device).contiguous()
            scales = scales.to(device).contiguous()
            zeros = None if zeros is None else zeros.to(device).contiguous()
            return Lanes(words, scales, zeros, bias, lane, bits, split(rows, cols, _processors(device)))
    return Matrix(matrix.dense(dtype).to(device), bias)


def split(rows: int, cols: int, processors: int) -> int:
    """Into how many parts the inputs are cut for about ``PROGRAMS`` programs a multiprocessor, each with a part of at least ``2 * INPUTS``."""
    wanted = -(-PROGRAMS * processors * OUTPUTS // rows)
    return max(1, min(wanted, cols // (2 * INPUTS)))


def multiply_small(
    values: Float[Tensor, "tokens inputs"], matrix: Lanes, out: Float[Tensor, "tokens outputs"] | None = None
) -> Float[Tensor, "tokens outputs"]:
    """W x + b of a few vectors, into ``out`` if it is given.

    Equal to :func:`assay.ops.decode.forward.linear` with ``matrix.dense(values.dtype)`` within the rounding of a float32 sum and of the result. The bits of
    a vector's result do not depend on the other vectors.
    """
    values = values.contiguous()
    (tokens, cols), rows = values.shape, len(matrix.words)
    if cols != matrix.shape[1]:
        raise ValueError(f"vectors of {cols} numbers for a matrix of {matrix.shape[1]} inputs; expected as many")
    out = torch.empty(tokens, rows, dtype=values.dtype, device=values.device) if out is None else out
    if not tokens:
        return out
    sums = torch.empty(matrix.splits, tokens, rows, dtype=torch.float32, device=values.device) if matrix.splits > 1 else out
    grid = (triton.cdiv(rows, OUTPUTS), triton.cdiv(tokens, VECTORS), matrix.splits)
    part = triton.cdiv(triton.cdiv(cols, INPUTS), matrix.splits) * INPUTS
    _multiply[grid](
        values, matrix.words, matrix.scales, matrix.zeros, matrix.bias if matrix.splits == 1 else None, sums, tokens, rows, cols, part,
        GROUP=cols // matrix.scales.shape[1], LANE=matrix.lane, OUTPUTS=OUTPUTS, VECTORS=VECTORS, INPUTS=INPUTS,
    )  # fmt: skip
    if matrix.splits > 1:
        _add_parts[(triton.cdiv(rows, 256), tokens)](sums, matrix.bias, out, tokens, rows, SPLITS=matrix.splits, BLOCK=256)
    return out


def multiply_out(matrix: Lanes, dtype: torch.dtype, out: Float[Tensor, "outputs inputs"] | None = None) -> Float[Tensor, "outputs inputs"]:
    """The whole weight. Equal, bit for bit, to :meth:`assay.ops.decode.weights.Matrix.dense`: one multiplication decides each."""
    rows, cols = matrix.shape
    out = torch.empty(rows, cols, dtype=dtype, device=matrix.words.device) if out is None else out
    grid = (triton.cdiv(rows, OUTPUTS), triton.cdiv(cols, INPUTS))
    _multiply_out[grid](
        matrix.words, matrix.scales, matrix.zeros, out, rows, cols,
        GROUP=cols // matrix.scales.shape[1], LANE=matrix.lane, OUTPUTS=OUTPUTS, INPUTS=INPUTS,
    )  # fmt: skip
    return out


@triton.jit
def _numbers(words, scales, zeros, row, start, rows, cols, GROUP: tl.constexpr, LANE: tl.constexpr, INPUTS: tl.constexpr):
    # The float32 weights [row, start : start + INPUTS]; 0 beyond the matrix. words: (rows, cols / A_WORD); scales, zeros: (rows, cols / GROUP).
    A_WORD: tl.constexpr = 32 // LANE
    word = start // A_WORD + tl.arange(0, INPUTS // A_WORD)
    inside = (row < rows)[:, None] & (word * A_WORD < cols)[None, :]
    packed = tl.load(words + row[:, None] * (cols // A_WORD) + word[None, :], mask=inside, other=0)
    group = row[:, None] * (cols // GROUP) + (word // (GROUP // A_WORD))[None, :]
    scale = tl.load(scales + group, mask=inside, other=0).to(tl.float32)
    shifts = tl.arange(0, A_WORD) * LANE
    codes = ((packed[:, :, None] >> shifts[None, None, :]) & ((1 << LANE) - 1)) - (1 << (LANE - 1))
    if zeros is not None:
        codes -= tl.load(zeros + group, mask=inside, other=0).to(tl.int32)[:, :, None]
    return tl.reshape(codes.to(tl.float32) * scale[:, :, None], (row.shape[0], INPUTS))


@triton.jit(do_not_specialize=["tokens"])  # one program for any number of vectors
def _multiply(
    x, words, scales, zeros, bias, out, tokens, rows, cols, part,
    GROUP: tl.constexpr, LANE: tl.constexpr, OUTPUTS: tl.constexpr, VECTORS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    # One program per OUTPUTS rows of the matrix, VECTORS of x, and `part` inputs. x: (tokens, cols); out: (parts, tokens, rows).
    row = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(1).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    first = tl.program_id(2) * part
    total = tl.zeros((OUTPUTS, VECTORS), dtype=tl.float32)
    for start in range(first, tl.minimum(first + part, cols), INPUTS):
        column = start + tl.arange(0, INPUTS)
        inside = (column < cols)[:, None] & (token < tokens)[None, :]
        value = tl.load(x + token[None, :] * cols + column[:, None], mask=inside, other=0)
        weight = _numbers(words, scales, zeros, row, start, rows, cols, GROUP, LANE, INPUTS).to(value.dtype)
        total = tl.dot(weight, value, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + row, mask=row < rows, other=0).to(tl.float32)[:, None]
    at = (tl.program_id(2).to(tl.int64) * tokens + token[None, :]) * rows + row[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (token < tokens)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _add_parts(parts, bias, out, tokens, rows, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    # One program per token and BLOCK outputs; the parts are added in order. parts: (SPLITS, tokens, rows); out: (tokens, rows).
    row, token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    inside = row < rows
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for index in range(SPLITS):
        total += tl.load(parts + (index * tokens + token) * rows + row, mask=inside, other=0)
    if bias is not None:
        total += tl.load(bias + row, mask=inside, other=0).to(tl.float32)
    tl.store(out + token * rows + row, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _multiply_out(
    words, scales, zeros, out, rows, cols, GROUP: tl.constexpr, LANE: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr
):
    # One program per OUTPUTS rows and INPUTS columns. out: (rows, cols).
    row = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    start = tl.program_id(1) * INPUTS
    column = start + tl.arange(0, INPUTS)
    weight = _numbers(words, scales, zeros, row, start, rows, cols, GROUP, LANE, INPUTS)
    tl.store(
        out + row[:, None] * cols + column[None, :], weight.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < cols)[None, :]
    )


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
