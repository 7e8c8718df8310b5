"""The Hadamard transform in one launch on CUDA: :func:`assay.ops.quantize.hadamard.transform` again, which takes two products. Not here: anything else.

Importing this imports Triton. It runs on CUDA, or on a CPU if ``TRITON_INTERPRET=1`` was set before anything imported Triton.
"""

# pyright: reportArgumentType=false
# ruff: noqa: N803
# (a kernel's constants are plain numbers at a launch, constexpr inside, and in capitals)

from functools import cache
from math import sqrt

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int8, Shaped
from torch import Tensor

from assay.ops.quantize import hadamard

LARGEST = 128  # order of a factor whose matrix, and a row of the input, one program holds
ROWS = 16  # a program, where one factor is all


def transform(
    x: Float[Tensor, "*batch size"],
    *,
    signs: Shaped[Tensor, " size"] | None = None,
    block: int | None = None,
    out: Tensor | None = None,
) -> Float[Tensor, "*batch size"]:
    """As the op, but for the order in which numbers are added; also on blocks. Sizes with a factor above :data:`LARGEST`, and float64, go to the op itself.

    Args:
        out: contiguous, of the shape and dtype of ``x``; it is made when None.
    """
    width = x.shape[-1]
    size = hadamard.span(width, block)
    left, right = hadamard.factors(size)
    if size <= LARGEST:
        left, right = 1, size
    if not fits(size) or x.dtype == torch.float64:
        turned = hadamard.transform(x, signs=signs, block=block)
        return turned if out is None else out.copy_(turned)
    x = x.contiguous()
    out = torch.empty_like(x) if out is None else out
    rows = x.numel() // size
    if rows:
        tall = ROWS if left == 1 else max(16, triton.next_power_of_2(left))
        matrices = _matrix(left, x.device), _matrix(right, x.device)
        settings = {"TWO": left > 1, "SIGNED": signs is not None, "LEFT": tall, "RIGHT": max(16, triton.next_power_of_2(right))}
        grid = (rows if left > 1 else triton.cdiv(rows, tall),)
        settings["num_warps"] = 4 if settings["LEFT"] * settings["RIGHT"] < 4096 else 8
        signs = matrices[0] if signs is None else signs.to(x.device, torch.int8)
        _turn[grid](x, signs, *matrices, out, rows, left, right, width // size, 1 / sqrt(size), **settings)
    return out


def fits(size: int) -> bool:
    """Whether a program holds the factors of ``size``; the op turns others."""
    return size <= LARGEST or hadamard.factors(size)[0] <= LARGEST


@cache
def _matrix(order: int, device: torch.device) -> Int8[Tensor, "order order"]:
    return (hadamard.hadamard(order) * sqrt(order)).round().to(device, torch.int8)


@triton.jit
def _turn(
    x, signs, first, second, out, rows, left, right, blocks, scale,
    TWO: tl.constexpr, SIGNED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    # x, out: (rows, left * right). first: (left, left), second: (right, right), symmetric, of 1 and -1. signs: (blocks * left * right,), blocks rows long.
    # tf32x3: numbers in two parts of 11 bits each; 1 and -1 need one.
    # TWO: a program turns one row, as a matrix (left, right), from both sides; zeros pad it. Otherwise left is 1, and a program turns LEFT rows.
    tall, wide = tl.arange(0, LEFT), tl.arange(0, RIGHT)
    begin = tl.program_id(0).to(tl.int64)
    if TWO:
        begin = begin * left
        last = begin + left
    else:
        begin = begin * LEFT
        last = rows.to(tl.int64)
    inside = (begin + tall < last)[:, None] & (wide < right)[None, :]
    at = tall[:, None] * right + wide[None, :]
    value = tl.load(x + begin * right + at, mask=inside, other=0).to(tl.float32)
    if SIGNED:
        period = blocks * left  # of lines of ``right`` numbers
        line = ((begin + tall) % period).to(tl.int32)
        value *= tl.load(signs + line[:, None] * right + wide[None, :], mask=inside, other=1).to(tl.float32)
    square = (wide < right)[:, None] & (wide < right)[None, :]
    matrix = tl.load(second + wide[:, None] * right + wide[None, :], mask=square, other=0).to(tl.float32)
    value = tl.dot(value, matrix, input_precision="tf32x3")
    if TWO:
        square = (tall < left)[:, None] & (tall < left)[None, :]
        matrix = tl.load(first + tall[:, None] * left + tall[None, :], mask=square, other=0).to(tl.float32)
        value = tl.dot(matrix, value, input_precision="tf32x3")
    tl.store(out + begin * right + at, (value * scale).to(out.dtype.element_ty), mask=inside)
