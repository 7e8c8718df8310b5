"""Codes as numbers, in the registers of a program: what :func:`assay.ops.quantize.elements.decode` and ``encode`` compute. Not here: products.

All of it is integer arithmetic and exact, on devices that have small floats and on those that have none.
"""

# pyright: reportOperatorIssue=false
# ruff: noqa: N803
# (constants are in capitals)

import triton
import triton.language as tl


@triton.jit
def weights(
    words, scales, zeros, factor, table, row, start, rows, cols,
    ELEMENT: tl.constexpr, LANE: tl.constexpr, GROUP: tl.constexpr, EACH: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """The float32 weights [row, start : start + INPUTS] of a matrix (rows, cols); 0 beyond it, or 0 times a number.

    words: (rows, cols * LANE / 32); scales, zeros: (rows / EACH, cols / GROUP); scales are e4m3 and divided by the one ``factor``, if there is one.
    """
    A_WORD: tl.constexpr = 32 // LANE
    word = start // A_WORD + tl.arange(0, INPUTS // A_WORD)
    inside = (row < rows)[:, None] & (word * A_WORD < cols)[None, :]
    packed = tl.load(words + row[:, None] * (cols // A_WORD) + word[None, :], mask=inside, other=0)
    group = (row // EACH)[:, None] * (cols // GROUP) + (word // (GROUP // A_WORD))[None, :]
    scale = tl.load(scales + group, mask=inside, other=0)
    if factor is not None:
        scale = tl.math.div_rn(from_e4m3(scale), tl.load(factor))
    shifts = tl.arange(0, A_WORD) * LANE
    codes = (packed[:, :, None] >> shifts[None, None, :]) & ((1 << LANE) - 1)
    if ELEMENT == "int":
        codes -= 1 << (LANE - 1)
        if zeros is not None:
            codes -= tl.load(zeros + group, mask=inside, other=0).to(tl.int32)[:, :, None]
        values = codes.to(tl.float32)
    elif ELEMENT == "e2m1":
        values = from_e2m1(codes)
    elif ELEMENT == "nf4":
        values = tl.load(table + codes)
    elif ELEMENT == "e4m3":
        values = from_e4m3(codes)
    else:
        values = from_e5m2(codes)
    return tl.reshape(values * scale.to(tl.float32)[:, :, None], (row.shape[0], INPUTS))


@triton.jit
def from_e2m1(codes):
    """The float32 of codes 0 … 15 as int32: twice the eight sizes lie in one word, as nibbles."""
    halves = (0xC8643210 >> ((codes & 7) * 4).to(tl.uint32)) & 15
    return halves.to(tl.float32) * tl.where(codes >= 8, -0.5, 0.5)


@triton.jit
def from_e4m3(codes):
    """The float32 of bytes as any integer: as float16, whose exponent is as much wider as its bias is larger, times 2^8."""
    codes = codes.to(tl.int32)
    half = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    values = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), values)


@triton.jit
def from_e5m2(codes):
    """The float32 of bytes as any integer: the upper half of a float16."""
    return (codes.to(tl.int32) << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def to_e4m3(values):
    """The byte, as int32, nearest to each float32 from -448 to 448; ties go to the even one."""
    bits = values.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    small = nearest(tl.abs(values) * 512.0).to(tl.int32)  # below 2^-6 codes are 2^-9 apart
    return tl.where(size < (121 << 23), small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def nearest(values):
    """The integer nearest to each float32 of a size below 2^22, as float32; ties go to the even one. Nothing here reorders a sum."""
    return (values + 12582912.0) - 12582912.0
