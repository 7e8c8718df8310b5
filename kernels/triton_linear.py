"""Linear maps over packed weights on CUDA: :func:`assay.ops.decode.forward.linear` again, without the weight ever being whole. Not here: CUDA graphs.

A token's decode step reads every weight once, so its speed is that of the bytes read. At most :data:`SMALL` vectors are multiplied by codes that stay as
they are stored and become numbers in registers; more of them share a matrix that is multiplied out for the call, which is what a large product wants.
Both use the weight rounded to the dtype of the activations, so that a prompt and what follows it are read by one model. Inputs that come as codes
(``triton_inputs.py``) are multiplied by the codes of the weight, however many there are.

Importing this imports Triton. It runs on CUDA, or on a CPU if ``TRITON_INTERPRET=1`` was set before anything imported Triton.
"""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAssignmentType=false
# ruff: noqa: N803
# (a kernel's constants are plain numbers at a launch, constexpr inside, and in capitals)

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float, Int8, Int32, Shaped
from torch import Tensor

from assay.kernels.triton_inputs import Codes
from assay.kernels.triton_values import from_e4m3, weights
from assay.ops.decode.weights import Matrix
from assay.ops.quantize import elements
from assay.ops.quantize.activations import Activations
from assay.ops.quantize.grid import Format, Quantized
from assay.ops.quantize.pack import pack

SMALL = 64  # vectors; above, the matrix is multiplied out
OUTPUTS = 16  # a program
VECTORS = 16  # a program: each is computed as if alone, so that its neighbours change no bit of it
INPUTS = 128  # at a time
MANY = 64  # outputs and vectors of a program, where many vectors of codes are multiplied
PROGRAMS = 4  # a multiprocessor: too few cannot keep the memory busy, so that small matrices are split along the inputs
EXACT = 2**17  # inputs; the products of fewer bytes add up to less than 2^31


class Lanes(NamedTuple):
    """A packed matrix as the kernels read it, where :class:`Matrix` stands elsewhere.

    ``words`` hold 32 / ``lane`` codes each along the inputs, the first in the lowest bits: integers 2^(lane-1) above their value, as
    :func:`assay.ops.quantize.pack.pack` has them, others as they are. ``scales`` are those of the format, or of NVFP4 bytes to be divided by ``factor``.
    ``table`` are the sixteen numbers that codes of nf4 stand for. ``splits`` programs share the inputs of an output.
    """

    words: Int32[Tensor, "rows words"]
    scales: Shaped[Tensor, "blocks groups"]
    zeros: Int8[Tensor, "blocks groups"] | None
    factor: Float[Tensor, " one"] | None
    table: Float[Tensor, " sixteen"] | None
    bias: Float[Tensor, " rows"] | None
    lane: int
    format: Format
    splits: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.words), self.words.shape[1] * (32 // self.lane)

    @property
    def form(self) -> str:
        """How it is run, such as ``int4 triton``."""
        name = self.format.name
        held = f"int{self.lane}" if self.element == "int" else name
        return f"{held} triton" + ("" if held == name else f" from {name}")

    @property
    def element(self) -> str:
        """The number type as the kernels know it; three values are integers of two bits."""
        return "int" if self.format.element == "ternary" else self.format.element

    @property
    def sharing(self) -> dict[str, int]:
        """How many columns and rows share a scale."""
        rows, cols = self.shape
        blocks, groups = self.scales.shape
        return {"GROUP": cols // groups, "EACH": rows // blocks}

    def takes(self, how: Activations) -> bool:
        """Whether inputs that are rounded so are multiplied as codes: bytes of the same kind, symmetric on both sides, with one scale for each row, or for
        whole blocks of :data:`INPUTS` columns."""
        group, (_, cols) = self.sharing["GROUP"], self.shape
        if self.lane != 8 or not how.symmetric or self.zeros is not None or (group != cols and group % INPUTS):
            return False
        return self.element == "e4m3" if how.format == "fp8_e4m3" else self.element == "int" and cols < EXACT

    def multiply(self, values: Float[Tensor, "*batch inputs"] | Codes) -> Float[Tensor, "*batch outputs"]:
        """W x + b, in the dtype of ``values``; sums are float32, or int32 of integers."""
        if isinstance(values, Codes):
            return multiply_codes(values, self)
        flat = values.reshape(-1, values.shape[-1])
        small = len(flat) <= SMALL
        found = multiply_small(flat, self) if small else F.linear(flat, multiply_out(self, values.dtype), self.bias)
        return found.view(*values.shape[:-1], len(self.words))


class Whole(NamedTuple):
    """A packed matrix that no kernel reads as it is: multiplied out once. ``source`` is how it was stored."""

    weight: Float[Tensor, "rows cols"]
    bias: Float[Tensor, " rows"] | None
    source: str

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.weight.shape
        return rows, cols

    @property
    def form(self) -> str:
        return f"{str(self.weight.dtype).removeprefix('torch.')} from {self.source}"

    def multiply(self, values: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        """W x + b."""
        return F.linear(values, self.weight, self.bias)


def hold(matrix: Matrix, dtype: torch.dtype, device: torch.device) -> Matrix | Lanes | Whole:
    """``matrix`` on ``device`` as it is to be run there: codes as codes if their groups are contiguous and of whole words, in ``dtype`` otherwise.

    Integers of 3 bits lie in lanes of 4, of 5 to 7 in lanes of 8.
    """
    bias = None if matrix.bias is None else matrix.bias.to(device=device, dtype=dtype)
    weight = matrix.weight
    if isinstance(weight, Tensor):
        return Matrix(matrix.dense(dtype).to(device), bias)
    rows, cols = matrix.shape
    if isinstance(weight, Quantized) and weight.order is None:
        shared, format = weight.shared, weight.format
        lane = next(lane for lane in (2, 4, 8) if lane >= format.bits)
        if not (cols // shared.scales.shape[1]) % (32 // lane):
            integers = format.element in ("int", "ternary")
            codes = weight.codes if integers or lane == 8 else weight.codes - 8
            words = pack(codes, bits=lane) if integers or lane == 4 else codes.contiguous().view(torch.int32)
            scales, factor = shared.scales, shared.factor
            if factor is not None:  # one float32 for bytes
                scales, factor = scales.view(torch.int8), factor.float().to(device)
            elif (short := scales.to(torch.bfloat16)).float().equal(scales.float()):
                scales = short
            zeros = None if shared.zeros is None else shared.zeros.to(device).contiguous()
            table = torch.tensor(elements.table("nf4")).to(device) if format.element == "nf4" else None
            splits = split(rows, cols, _processors(device))
            return Lanes(words.to(device).contiguous(), scales.to(device).contiguous(), zeros, factor, table, bias, lane, format, splits)
    return Whole(matrix.dense(dtype).to(device), bias, matrix.form)


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
    _require_inputs(cols, matrix)
    out = torch.empty(tokens, rows, dtype=values.dtype, device=values.device) if out is None else out
    if not tokens:
        return out
    sums = torch.empty(matrix.splits, tokens, rows, dtype=torch.float32, device=values.device) if matrix.splits > 1 else out
    grid = (triton.cdiv(rows, OUTPUTS), triton.cdiv(tokens, VECTORS), matrix.splits)
    part = triton.cdiv(triton.cdiv(cols, INPUTS), matrix.splits) * INPUTS
    _multiply[grid](
        values, matrix.words, matrix.scales, matrix.zeros, matrix.factor, matrix.table, matrix.bias if matrix.splits == 1 else None, sums,
        tokens, rows, cols, part,
        ELEMENT=matrix.element, LANE=matrix.lane, **matrix.sharing, OUTPUTS=OUTPUTS, VECTORS=VECTORS, INPUTS=INPUTS,
    )  # fmt: skip
    if matrix.splits > 1:
        _add_parts[(triton.cdiv(rows, 256), tokens)](
            sums, None, None, matrix.bias, out, tokens, rows, EACH=1, SPLITS=matrix.splits, BLOCK=256
        )
    return out


def multiply_out(matrix: Lanes, dtype: torch.dtype, out: Float[Tensor, "outputs inputs"] | None = None) -> Float[Tensor, "outputs inputs"]:
    """The whole weight. Equal, bit for bit, to :meth:`assay.ops.decode.weights.Matrix.dense`: one multiplication decides each."""
    rows, cols = matrix.shape
    out = torch.empty(rows, cols, dtype=dtype, device=matrix.words.device) if out is None else out
    grid = (triton.cdiv(rows, OUTPUTS), triton.cdiv(cols, INPUTS))
    _multiply_out[grid](
        matrix.words, matrix.scales, matrix.zeros, matrix.factor, matrix.table, out, rows, cols,
        ELEMENT=matrix.element, LANE=matrix.lane, **matrix.sharing, OUTPUTS=OUTPUTS, INPUTS=INPUTS,
    )  # fmt: skip
    return out


def multiply_codes(codes: Codes, matrix: Lanes, out: Float[Tensor, "tokens outputs"] | None = None) -> Float[Tensor, "tokens outputs"]:
    """W x + b of inputs that are codes, for a matrix that takes them, into ``out`` if it is given.

    Integers with one scale a row: the sum of their products is exact, and two scales and a bias make of it a result within four roundings to float32, and
    one to the dtype. Otherwise sums are float32; of e4m3 on devices that multiply it, those of 128 products each may be shorter: Hopper's tensor cores keep
    about 14 bits. The bits of a vector's result do not depend on the other vectors, but for their number being above :data:`SMALL` or not.
    """
    (tokens, cols), rows = codes.codes.shape, len(matrix.words)
    _require_inputs(cols, matrix)
    device = codes.codes.device
    out = torch.empty(tokens, rows, dtype=codes.dtype, device=device) if out is None else out
    if not tokens:
        return out
    many, whole = tokens > SMALL, matrix.sharing["GROUP"] == cols
    outputs, vectors, splits = (MANY, MANY, 1) if many else (OUTPUTS, VECTORS, matrix.splits)
    kind = torch.int32 if matrix.element == "int" and whole else torch.float32
    sums = torch.empty(splits, tokens, rows, dtype=kind, device=device) if splits > 1 else out
    grid = (triton.cdiv(rows, outputs), triton.cdiv(tokens, vectors), splits)
    scales, bias = (codes.scales, matrix.bias) if splits == 1 else (None, None)
    _multiply_codes[grid](
        codes.codes, scales, matrix.words.view(torch.int8), matrix.scales, bias, sums,
        tokens, rows, cols, triton.cdiv(triton.cdiv(cols, INPUTS), splits) * INPUTS,
        ELEMENT=matrix.element, NATIVE=_multiplies_e4m3(device), WHOLE=whole, **matrix.sharing, OUTPUTS=outputs, VECTORS=vectors, INPUTS=INPUTS,
    )  # fmt: skip
    if splits > 1:
        _add_parts[(triton.cdiv(rows, 256), tokens)](
            sums, codes.scales, matrix.scales if whole else None, matrix.bias, out, tokens, rows,
            EACH=matrix.sharing["EACH"], SPLITS=splits, BLOCK=256,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])  # one program for any number of vectors
def _multiply(
    x, words, scales, zeros, factor, table, bias, out, tokens, rows, cols, part,
    ELEMENT: tl.constexpr, LANE: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr,
    OUTPUTS: tl.constexpr, VECTORS: tl.constexpr, INPUTS: tl.constexpr,
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
        weight = weights(words, scales, zeros, factor, table, row, start, rows, cols, ELEMENT, LANE, GROUP, EACH, INPUTS)
        total = tl.dot(weight.to(value.dtype), value, total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + row, mask=row < rows, other=0).to(tl.float32)[:, None]
    at = (tl.program_id(2).to(tl.int64) * tokens + token[None, :]) * rows + row[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (token < tokens)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _multiply_codes(
    x, x_scales, codes, scales, bias, out, tokens, rows, cols, part,
    ELEMENT: tl.constexpr, NATIVE: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr,
    OUTPUTS: tl.constexpr, VECTORS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    # As _multiply. x: (tokens, cols), codes: (rows, cols), both bytes; without x_scales, out: (parts, tokens, rows) are sums. WHOLE: one scale a row.
    row = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    token = tl.program_id(1).to(tl.int64) * VECTORS + tl.arange(0, VECTORS)
    first = tl.program_id(2) * part
    KIND: tl.constexpr = tl.int32 if ELEMENT == "int" else tl.float32
    total = tl.zeros((OUTPUTS, VECTORS), dtype=KIND if WHOLE else tl.float32)
    block = row // EACH
    for start in range(first, tl.minimum(first + part, cols), INPUTS):
        column = start + tl.arange(0, INPUTS)
        here = (column < cols)[:, None] & (token < tokens)[None, :]
        value = tl.load(x + token[None, :] * cols + column[:, None], mask=here, other=0)
        there = (row < rows)[:, None] & (column < cols)[None, :]
        weight = tl.load(codes + row[:, None] * cols + column[None, :], mask=there, other=0)
        if ELEMENT == "int":
            weight = weight ^ -128  # stored as 128 more
        elif NATIVE:
            value, weight = value.to(tl.float8e4nv, bitcast=True), weight.to(tl.float8e4nv, bitcast=True)
        else:
            value, weight = from_e4m3(value).to(tl.float16), from_e4m3(weight).to(tl.float16)
        product = tl.dot(weight, value, out_dtype=KIND, max_num_imprecise_acc=INPUTS if NATIVE else None)
        if WHOLE:
            total += product
        else:
            scale = tl.load(scales + block * (cols // GROUP) + start // GROUP, mask=row < rows, other=0).to(tl.float32)
            total += product.to(tl.float32) * scale[:, None]
    if x_scales is not None:
        total = total.to(tl.float32)
        if WHOLE:
            total *= tl.load(scales + block, mask=row < rows, other=0).to(tl.float32)[:, None]
        total *= tl.load(x_scales + token, mask=token < tokens, other=0)[None, :]
    if bias is not None:
        total += tl.load(bias + row, mask=row < rows, other=0).to(tl.float32)[:, None]
    at = (tl.program_id(2).to(tl.int64) * tokens + token[None, :]) * rows + row[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (token < tokens)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _add_parts(parts, x_scales, scales, bias, out, tokens, rows, EACH: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    # One program per token and BLOCK outputs; the parts are added in order. parts: (SPLITS, tokens, rows); out: (tokens, rows).
    row, token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    inside = row < rows
    total = tl.zeros((BLOCK,), dtype=parts.dtype.element_ty)
    for index in range(SPLITS):
        total += tl.load(parts + (index * tokens + token) * rows + row, mask=inside, other=0)
    total = total.to(tl.float32)
    if scales is not None:
        total *= tl.load(scales + row // EACH, mask=inside, other=0).to(tl.float32)
    if x_scales is not None:
        total *= tl.load(x_scales + token)
    if bias is not None:
        total += tl.load(bias + row, mask=inside, other=0).to(tl.float32)
    tl.store(out + token * rows + row, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _multiply_out(
    words, scales, zeros, factor, table, out, rows, cols,
    ELEMENT: tl.constexpr, LANE: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    # One program per OUTPUTS rows and INPUTS columns. out: (rows, cols).
    row = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    start = tl.program_id(1) * INPUTS
    column = start + tl.arange(0, INPUTS)
    weight = weights(words, scales, zeros, factor, table, row, start, rows, cols, ELEMENT, LANE, GROUP, EACH, INPUTS)
    at = row[:, None] * cols + column[None, :]
    tl.store(out + at, weight.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < cols)[None, :])


def _require_inputs(cols: int, matrix: Lanes) -> None:
    if cols != matrix.shape[1]:
        raise ValueError(f"vectors of {cols} numbers for a matrix of {matrix.shape[1]} inputs; expected as many")


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _multiplies_e4m3(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
