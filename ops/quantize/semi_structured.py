"""2:4 weights stored as what is left of them and where it was: packing, unpacking, the tensors of a file, true bytes, and torch's own form on CUDA.

Weights are kept in their dtype, or as codes of eight bits beside the scales that these share.

Not here: which weights go (``masks.py`` and the methods), or files.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int8, Shaped, UInt8
from torch import Tensor

from assay.ops.quantize.grid import Format, Quantized, Scales, dequantize
from assay.ops.quantize.pack import pack_nibbles, unpack_nibbles

# Of each set of places that are not zero, as a number whose bit i is place i, the two that are kept: where fewer are left, the first of the others too.
KEPT = tuple(tuple(sorted(sorted(range(4), key=lambda place, bits=bits: not bits >> place & 1)[:2])) for bits in range(16))


class SemiStructured(NamedTuple):
    """A weight [rows, cols] of which each four have at most two that are not zero: two ``values`` of each four, and their places.

    A place is two bits, so that the places of a group, the lower first, are half a byte; the first group of a byte is its lower half.
    """

    values: Shaped[Tensor, "rows half"]
    indices: UInt8[Tensor, "rows bytes"]

    @property
    def shape(self) -> tuple[int, int]:
        rows, half = self.values.shape
        return rows, 2 * half

    @property
    def form(self) -> str:
        """How it is stored, in a word."""
        return "2:4"

    def dense(self) -> Float[Tensor, "rows cols"]:
        """The whole weight in float32."""
        return unpack(self).float()


class SemiStructuredCodes(NamedTuple):
    """A weight in int8 of which each four have at most two that are not zero: two ``codes`` of each four and their places, and what is shared.

    ``shared``, ``format`` and ``order`` are those of :class:`Quantized`: a scale is still that of ``format.group_size`` weights of the whole row.
    """

    codes: SemiStructured
    shared: Scales
    format: Format
    order: Int[Tensor, " cols"] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    @property
    def form(self) -> str:
        """How it is stored, in a few words."""
        return f"2:4 {self.format.name}"

    def quantized(self) -> Quantized:
        """All codes, bit for bit those that were packed: what runs it where nothing reads places."""
        whole = Quantized(unpack(self.codes), self.shared, self.format, self.order)
        if self.shared.zeros is None:
            return whole
        kept = unpack(SemiStructured(torch.ones_like(self.codes.values, dtype=torch.bool), self.codes.indices))
        return whole._replace(codes=torch.where(kept, whole.codes, _codes_of_zero(whole)))

    def dense(self) -> Float[Tensor, "rows cols"]:
        """The whole weight in float32."""
        return dequantize(self.quantized())


def pack(weight: Shaped[Tensor, "rows cols"]) -> SemiStructured:
    """Keep two of each four weights along a row; of any dtype that can be compared with 0.

    A group with less than two that are not zero keeps its first zeros too. A negative zero that is not kept comes back as a positive one.

    Raises:
        ValueError: 4 does not divide the columns, or a group has more than two weights that are not zero; names the first.
    """
    return _keep(weight, weight != 0)


def pack_codes(quantized: Quantized) -> SemiStructuredCodes:
    """Keep two codes of each four along a row: those that do not stand for zero. No code changes.

    Raises:
        ValueError: the codes are not int8; 4 does not divide the columns; or a group has more than two weights that are not zero.
    """
    codes, shared, format, order = quantized
    if (format.element, format.bits) != ("int", 8):
        raise ValueError(
            f"the codes are {format.name}, and of rounded weights int8 alone is stored as 2:4 (in 5/8 of its bytes); round to int8, or leave them as they are"
        )
    return SemiStructuredCodes(_keep(codes, codes != _codes_of_zero(quantized)), shared, format, order)


def _codes_of_zero(quantized: Quantized) -> Int8[Tensor, "rows_or_1 cols_or_1"]:
    """The code that stands for zero at each place, or as many as there are different ones."""
    codes, shared, _, order = quantized
    if shared.zeros is None:
        return codes.new_zeros(1, 1)
    (rows, cols), (blocks, groups) = codes.shape, shared.zeros.shape
    zeros = shared.zeros.repeat_interleave(rows // blocks, dim=0)
    return zeros[:, order.long()] if order is not None else zeros.repeat_interleave(cols // groups, dim=1)


def _keep(weight: Shaped[Tensor, "rows cols"], nonzero: Bool[Tensor, "rows cols"]) -> SemiStructured:
    rows, cols = weight.shape
    if cols % 4:
        raise ValueError(f"the weight has {cols} columns, which are no groups of four; a width that 4 divides can be packed")
    groups, left = weight.reshape(rows, cols // 4, 4), nonzero.reshape(rows, cols // 4, 4)
    many = (left.sum(dim=-1) > 2).nonzero()
    if len(many):
        row, group = many[0].tolist()
        raise ValueError(
            f"row {row}, group {group} (columns {4 * group} to {4 * group + 3}) has {int(left[row, group].sum())} weights that are not zero, and so have "
            f"{len(many) - 1:,} other groups of {rows * cols // 4:,} too many; 2:4 has at most two in each. Prune with the pattern 2:4 first"
        )
    bits = (left * torch.tensor([1, 2, 4, 8], device=weight.device)).sum(dim=-1)
    places = torch.tensor(KEPT, device=weight.device)[bits]
    values = groups.gather(-1, places).reshape(rows, cols // 2)
    return SemiStructured(values, pack_nibbles((places[..., 0] | places[..., 1] << 2).to(torch.int8)))


def unpack(packed: SemiStructured) -> Shaped[Tensor, "rows cols"]:
    """The weight that :func:`pack` was given, in its dtype."""
    rows, cols = packed.shape
    both = unpack_nibbles(packed.indices, cols // 4)
    places = torch.stack((both & 3, both >> 2), dim=-1).long()
    groups = packed.values.new_zeros(rows, cols // 4, 4)
    return groups.scatter_(-1, places, packed.values.view(rows, cols // 4, 2)).view(rows, cols)


def share_of_dense(bits: int) -> Fraction:
    """Stored bits per bit of the dense weight, for values of ``bits`` bits: (bits / 2 + 1) / bits.

    Half of the values are left, and each has a place of two bits, which is one bit a weight whatever the values are. Of 16-bit values that is 9/16; of
    8-bit values 5/8 (10/16), which is therefore often said of all; of 4-bit values 3/4. Scales are not halved: int8 in groups of 64 with scales of 16
    bits goes from 8.25 to 5.25 bits a weight, which is 0.636.

    Raises:
        ValueError: less than one bit.
    """
    if bits < 1:
        raise ValueError(f"values of {bits} bits are none; 16, 8 and 4 are usual")
    return Fraction(bits + 2, 2 * bits)


def tensors(packed: SemiStructured) -> dict[str, Tensor]:
    """What a weight is stored as, by the suffix of its names: ``weight_values`` and ``weight_indices``."""
    return {"weight_values": packed.values.contiguous(), "weight_indices": packed.indices.contiguous()}


def from_tensors(stored: Mapping[str, Tensor]) -> SemiStructured:
    """The weight that :func:`tensors` was given.

    Raises:
        ValueError: a tensor is missing, or the two do not belong together.
    """
    missing = [name for name in ("weight_values", "weight_indices") if name not in stored]
    if missing:
        raise ValueError(
            f"a 2:4 weight needs weight_values and weight_indices; {' and '.join(missing)} is not among {', '.join(sorted(stored)) or 'none'}"
        )
    values, indices = stored["weight_values"], stored["weight_indices"]
    rows, half = values.shape
    expected = (rows, -(-half // 4))
    if half % 2 or indices.dtype != torch.uint8 or tuple(indices.shape) != expected:
        raise ValueError(
            f"weight_values {list(values.shape)} have two values a group and {list(expected)} bytes of places; "
            f"weight_indices are {list(indices.shape)} of {str(indices.dtype).removeprefix('torch.')}"
        )
    return SemiStructured(values, indices)


def stored_bytes(packed: SemiStructured) -> int:
    """Bytes of values and places as they are stored."""
    return packed.values.nbytes + packed.indices.nbytes


def to_torch(packed: SemiStructured) -> Tensor:
    """The weight as a tensor that torch multiplies by its semi-structured kernels.

    Raises:
        ValueError: the weight is not on CUDA, where those kernels are; or of a dtype or size that they do not take.
    """
    if not packed.values.is_cuda:
        raise ValueError(
            f"torch multiplies 2:4 weights on CUDA alone, and these are on {packed.values.device}; unpack gives the dense weight"
        )
    try:
        return torch.sparse.to_sparse_semi_structured(unpack(packed))
    except RuntimeError as error:
        raise ValueError(f"torch's 2:4 kernels do not take {list(packed.shape)} of {packed.values.dtype}: {error}") from error
