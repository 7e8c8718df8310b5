"""Codes that share a scale per group, and back: every scalar format of the field. Not here: which layers (``rtn.py`` and beside it), or files (``pack.py``)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Int8
from torch import Tensor

from assay.ops.quantize import elements

NESTED_BLOCK = 256  # scales of NF4 that share a scale of their own


class Format(NamedTuple):
    """How a weight is stored: a number type, who shares a scale, and what the scale is.

    ``group_size`` consecutive weights of a row share one (-1: the row; 0: the whole tensor), and so do ``block_rows`` rows. ``scale`` e8m0 is a power of
    two by the rule ``shared_exponent`` (floor, ceil or even); e4m3 is relative to one float32 ``factor`` a tensor. ``nested`` stores the scales in eight bits themselves.
    """

    element: str = "int"
    bits: int = 4
    group_size: int = 64
    block_rows: int = 1
    symmetric: bool = True
    scale: str = "bfloat16"
    shared_exponent: str = "floor"
    nested: bool = False

    @property
    def low(self) -> int:
        """The first code of integers."""
        return -(2 ** (self.bits - 1))

    @property
    def high(self) -> int:
        """The last code of integers."""
        return 2 ** (self.bits - 1) - 1

    @property
    def name(self) -> str:
        """Such as ``int4``, ``mxfp4``, ``fp8_e4m3``."""
        if self.element == "int":
            return f"int{self.bits}"
        if self.scale == "e8m0":
            return f"mxfp{self.bits}"
        if self.element == "e2m1":
            return "nvfp4"
        return f"fp8_{self.element}" if self.element in elements.FLOAT8 else self.element


SCALE_BITS = {"bfloat16": 16, "float16": 16, "float32": 32, "e8m0": 8, "e4m3": 8}
TRIT_BITS = 8 / 5  # five values of three in a byte


def effective_bits(format: Format, rows: int, cols: int) -> float:
    """Bits of a weight [rows, cols] as it is stored, all included: code + (scale + zero point) / weights that share them, and what the tensor has once.

    int4 in groups of 128 with a scale of 16 bits is 4 + 16 / 128 = 4.125, and 4.156 with a zero point of 4 bits; mxfp4 4.25; nvfp4 4.5 and 32 bits a
    tensor; nf4 in groups of 64 is 4 + 32 / 64 = 4.5, and with scales of eight bits 4 + 8 / 64 + 32 / (64 · 256) = 4.127.
    """
    size = {0: rows * cols, -1: cols}.get(format.group_size, format.group_size * format.block_rows)
    count = rows * cols // size
    code = TRIT_BITS if format.element == "ternary" else format.bits
    zero = 0 if format.symmetric else 8 if format.group_size == 0 else format.bits
    shared = count * (SCALE_BITS[format.scale] + zero)
    if format.nested:
        shared = 8 * count + 32 * (-(-count // NESTED_BLOCK) + 1)
    return code + (shared + (32 if format.scale == "e4m3" else 0)) / (rows * cols)


class Scales(NamedTuple):
    """What the codes of a weight share: ``scales`` [row blocks, groups] as stored, the code that means zero (none: 0), and the factor of e4m3 scales.

    A weight is (value of its code - zero) times its scale, and that divided by ``factor`` where there is one. ``nested`` scales are kept beside their codes.
    """

    scales: Float[Tensor, "blocks groups"]
    zeros: Int8[Tensor, "blocks groups"] | None = None
    factor: Float[Tensor, " one"] | None = None
    nested: "Nested | None" = None

    @property
    def effective(self) -> Float[Tensor, "blocks groups"]:
        """Each group's step in the unit of the weight, float32."""
        scales = self.scales.float()
        return scales if self.factor is None else scales / self.factor


class Nested(NamedTuple):
    """Scales in eight bits: ``codes`` of e4m3 over the scales less their ``mean``, each :data:`NESTED_BLOCK` of them (in order) relative to ``largest``."""

    codes: Int8[Tensor, " scales"]
    largest: Float[Tensor, " blocks"]
    mean: Float[Tensor, " one"]


class Quantized(NamedTuple):
    """A weight as codes [rows, cols], what they share, and their format. ``order`` names the group of each column where groups are not contiguous."""

    codes: Int8[Tensor, "rows cols"]
    shared: Scales
    format: Format
    order: Int[Tensor, " cols"] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.codes.shape
        return rows, cols

    @property
    def form(self) -> str:
        """How it is stored, in a word: the format's name."""
        return self.format.name

    def dense(self) -> Float[Tensor, "rows cols"]:
        """The whole weight in float32."""
        return dequantize(self)


def quantize(weight: Float[Tensor, "rows cols"], format: Format, *, shrink: Float[Tensor, "blocks groups"] | float = 1.0) -> Quantized:
    """Round a weight to nearest in ``format``.

    Args:
        weight: any float dtype; the arithmetic is float32.
        shrink: of each group's range, 0 to 1: what lies outside is clipped. 1 clips nothing.
    Raises:
        ValueError: bits, group or block do not fit, or a weight is not finite.
    """
    shared = fit(weight, format, shrink=shrink)
    return Quantized(encode(weight, shared, format), shared, format)


def fit(
    weight: Float[Tensor, "rows cols"],
    format: Format,
    *,
    shrink: Float[Tensor, "blocks groups"] | float = 1.0,
    factor: Float[Tensor, " one"] | None = None,
) -> Scales:
    """The scales with which each group's range, times ``shrink``, just fits the codes. See :func:`quantize`.

    With the codes q_min to q_max of integers of b bits, and V the largest value of another number type:

        symmetric integers    s = max|w| / ((2^b - 1) / 2)             z = 0
        asymmetric integers   s = (max(w, 0) - min(w, 0)) / (2^b - 1)  z = round(q_min - min(w, 0) / s)
        ternary               s = mean|w|
        others                s = max|w| / V
        e8m0                  s = 2^e, e = ⌊log2 max|w|⌋ - ⌊log2 V⌋ (floor); the least e with max|w| ≤ 2^e V (ceil); or the first of max|w| rounded
                              to the mantissa of the number type (even)
        e4m3                  the scale itself rounded to e4m3, relative to f = 448 V / max|W| of the whole tensor: s = e4m3(f max|w| / V) / f

    The symmetric scale of integers spreads all 2^b codes over the range, as compressed-tensors does; max|w| / q_max would leave the code q_min unused and
    its step is wider by 2^b - 1 over 2^b - 2: 7 % at 4 bits and half as wide again at 2. Scales of 16 bits are rounded *up*, which keeps each group in
    range: no weight moves by more than s / 2. bfloat16 has the exponent of float32, so that a group of weights near 1e-7 keeps a scale that is not 0.

    Args:
        factor: of e4m3 scales, where ``weight`` is a part of what it belongs to.
    Returns:
        Scales above 0 even for a group of zeros, whose codes all mean 0.
    Source:
        Integers: Nagel et al. 2021, §2.2, arXiv:2106.08295. Ternary: Ma et al. 2024, §2, arXiv:2402.17764. e8m0: Rouhani et al. 2023, §6.3, and the OCP
        Microscaling specification 1.0 (floor); ceil and even are the rules of later kernels. e4m3: NVFP4 of compressed-tensors. Nested: Dettmers et al.
        2023, §3, arXiv:2305.14314, with e4m3 in place of their own eight-bit float.
    """
    require_fit(weight.shape, format)
    grouped = groups(weight.float(), format)
    most, least = grouped.amax(dim=(1, 3)) * shrink, grouped.amin(dim=(1, 3)) * shrink
    if not (most - least).isfinite().all():  # an extreme is NaN where any is
        raise ValueError(
            f"{int((~weight.isfinite()).sum()):,} of {weight.numel():,} weights are NaN or infinite; finite ones can be rounded"
        )
    size = torch.maximum(most.abs(), least.abs())
    if format.element == "int" and not format.symmetric:
        least, most = least.clamp(max=0), most.clamp(min=0)
        scales = _stored((most - least) / (format.high - format.low), format)
        zeros = (format.low - least / scales.float()).round().clamp_(format.low, format.high)
        return Scales(scales, zeros.to(torch.int8))
    if format.element == "int":
        return Scales(_stored(size / ((format.high - format.low) / 2), format))
    if format.element == "ternary":
        return Scales(_stored(grouped.abs().mean(dim=(1, 3)), format))
    largest = elements.LARGEST[format.element]
    if format.scale == "e8m0":
        return Scales(_power_of_two(size, format))
    if format.scale == "e4m3":
        if factor is None:
            factor = (448 * largest / weight.float().abs().max().clamp(min=torch.finfo(torch.float32).tiny)).clamp(max=1e30).reshape(1)
        exact = (size / largest * factor).clamp(min=2.0**-9, max=448)
        return Scales(exact.to(torch.float8_e4m3fn), None, factor)
    scales = _stored(size / largest, format)
    return _nest(scales) if format.nested else Scales(scales)


def encode(weight: Float[Tensor, "rows cols"], shared: Scales, format: Format) -> Int8[Tensor, "rows cols"]:
    """The code nearest to each weight, given the scales. With one group and one block, ``weight`` may be any columns of that group."""
    rows, cols = weight.shape
    numbers = _by_group(weight.float(), shared.scales.shape) / shared.effective[:, None, :, None]
    if format.element == "int":  # in place: what ``elements.encode`` does, at half the cost
        numbers.round_()
        if shared.zeros is not None:
            numbers.add_(shared.zeros.float()[:, None, :, None])
        return numbers.clamp_(format.low, format.high).to(torch.int8).reshape(rows, cols)
    return elements.encode(numbers, format.element).reshape(rows, cols)


def decode(codes: Int8[Tensor, "rows cols"], shared: Scales, format: Format) -> Float[Tensor, "rows cols"]:
    """The weight that each code stands for, in float32: one multiplication each."""
    values = _by_group(elements.decode(codes, format.element), shared.scales.shape)
    if shared.zeros is not None:
        values.sub_(shared.zeros.float()[:, None, :, None])
    return values.mul_(shared.effective[:, None, :, None]).reshape(codes.shape)


def dequantize(quantized: Quantized) -> Float[Tensor, "rows cols"]:
    """The whole weight in float32."""
    codes, shared, format, order = quantized
    if order is None:
        return decode(codes, shared, format)
    values = elements.decode(codes, format.element)
    if shared.zeros is not None:
        values = values - shared.zeros.float()[:, order.long()]
    return values * shared.effective[:, order.long()]


def rows_of(quantized: Quantized, rows: Int[Tensor, " some"]) -> Quantized:
    """Some rows of a weight whose groups lie within rows."""
    codes, shared, format, order = quantized
    scales, zeros, factor, _ = shared
    if len(scales) == len(codes):  # else they are shared by all rows
        scales, zeros = scales[rows], None if zeros is None else zeros[rows]
    elif len(scales) > 1:
        scales = scales[rows // (len(codes) // len(scales))]
    return Quantized(codes[rows], Scales(scales, zeros, factor), format, order)


def moved(quantized: Quantized, device: torch.device | str) -> Quantized:
    """The same on another device."""
    codes, shared, format, order = quantized
    there = [None if part is None else part.to(device) for part in shared[:3]]
    return Quantized(codes.to(device), Scales(*there), format, None if order is None else order.to(device))  # type: ignore[arg-type]


def require_fit(shape: tuple[int, ...], format: Format) -> None:
    """Refuse a format that does not fit a weight of ``shape`` [rows, cols].

    Raises:
        ValueError: bits out of range, a group that does not divide the columns, or a block that does not divide the rows.
    """
    rows, cols = shape
    if format.element == "int" and not 2 <= format.bits <= 8:
        raise ValueError(f"bits={format.bits} is outside 2 to 8")
    size = format.group_size
    if size < -1 or (size > 0 and cols % size):
        raise ValueError(
            f"group_size={size} does not divide the {cols} columns of the weight; "
            f"the largest that does is {largest_divisor(cols, at_most=max(size, 1))}, and -1 is one group a row"
        )
    if rows % format.block_rows:
        raise ValueError(
            f"blocks of {format.block_rows} rows do not divide the {rows} rows of the weight; "
            f"the largest that do have {largest_divisor(rows, at_most=format.block_rows)}"
        )


@contextmanager
def naming(name: str, weight: Tensor) -> Iterator[None]:
    """Of an error inside, a note says which weight it is about."""
    try:
        yield
    except ValueError as error:
        error.add_note(f"in {name} ({list(weight.shape)})")
        raise


def groups(weight: Float[Tensor, "rows cols"], format: Format) -> Float[Tensor, "blocks rows_each groups cols_each"]:
    """A view in which those that share a scale lie in dimensions 1 and 3."""
    rows, cols = weight.shape
    if format.group_size == 0:
        return weight.reshape(1, rows, 1, cols)
    size = cols if format.group_size == -1 else format.group_size
    return weight.reshape(rows // format.block_rows, format.block_rows, cols // size, size)


def largest_divisor(number: int, *, at_most: int) -> int:
    """The largest divisor of ``number`` up to ``at_most``."""
    return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)


def _by_group(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    rows, cols = weight.shape
    return weight.reshape(shape[0], rows // shape[0], shape[1], cols // shape[1])


def _stored(scales: Float[Tensor, "blocks groups"], format: Format) -> Float[Tensor, "blocks groups"]:
    """The least value of the scale's dtype that is not below each, and never below the smallest normal one."""
    dtype = getattr(torch, format.scale)
    rounded = scales.to(dtype)
    above = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return torch.where(rounded.float() < scales, above, rounded).clamp(min=torch.finfo(dtype).tiny)


def _power_of_two(size: Float[Tensor, "blocks groups"], format: Format) -> Float[Tensor, "blocks groups"]:
    mantissa, exponent = torch.frexp(size)  # size = mantissa · 2^exponent, mantissa in [0.5, 1)
    if format.shared_exponent == "even":
        bits = elements.MANTISSA_BITS[format.element] + 1
        exponent = exponent + ((mantissa * 2**bits).round() >= 2**bits)
    if format.shared_exponent == "ceil":
        mantissa, exponent = torch.frexp(size / elements.LARGEST[format.element])
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    else:
        exponent = exponent - 1 - elements.LARGEST_EXPONENT[format.element]
    return torch.ldexp(torch.ones_like(size), torch.where(size == 0, -126, exponent).clamp(-126, 127))


def _nest(scales: Float[Tensor, "blocks groups"]) -> Scales:
    flat = scales.float().flatten()
    mean = flat.mean().reshape(1)
    parts = torch.nn.functional.pad(flat - mean, (0, -len(flat) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    largest = parts.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny)
    codes = elements.encode(parts / largest[:, None] * 448, "e4m3").flatten()[: len(flat)]
    nested = Nested(codes, largest, mean)
    return Scales(unnest(nested, tuple(scales.shape)), nested=nested)


def unnest(nested: Nested, shape: tuple[int, ...]) -> Float[Tensor, "blocks groups"]:
    """The scales that ``nested`` stands for, never below the smallest normal number."""
    values = elements.decode(nested.codes, "e4m3")
    largest = nested.largest.repeat_interleave(NESTED_BLOCK)[: len(values)]
    return (values * (largest / 448) + nested.mean).clamp(min=torch.finfo(torch.float32).tiny).view(shape)
