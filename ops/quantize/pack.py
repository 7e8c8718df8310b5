"""Codes side by side in words and bytes, and back. Not here: which tensors a weight is stored as (``layout.py``), or files (``write.py``, ``read.py``)."""

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from jaxtyping import Int8, Int32, UInt8
from torch import Tensor

TRITS = 5  # three values of five weights are 243, which a byte holds: 1.6 bits each


def pack(codes: Int8[Tensor, "rows cols"], *, bits: int, along_rows: bool = False) -> Int32[Tensor, "packed_rows packed_cols"]:
    """Signed codes of ``bits`` bits side by side in 32-bit words, ⌈cols·bits/32⌉ a row, nothing between them.

    Args:
        along_rows: pack down the columns instead, as compressed-tensors does for zero points.
    """
    return pack_to_int32(codes, bits, packed_dim=0 if along_rows else 1)


def unpack(
    packed: Int32[Tensor, "packed_rows packed_cols"], *, bits: int, shape: tuple[int, int], along_rows: bool = False
) -> Int8[Tensor, "rows cols"]:
    """The codes that :func:`pack` was given, of ``shape``."""
    if along_rows:  # turned here: of a single row of words, the library's own turn has strides that its view of bytes refuses
        turned = packed.T.clone(memory_format=torch.contiguous_format)
        return unpack_from_int32(turned, bits, torch.Size(shape[::-1])).T
    return unpack_from_int32(packed, bits, torch.Size(shape))


def pack_nibbles(codes: Int8[Tensor, "rows cols"]) -> UInt8[Tensor, "rows bytes"]:
    """Codes of 0 to 15 two a byte, the first in the lower half; a last odd one has a 0 beside it."""
    even = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2)).view(torch.uint8)
    return even[:, 0::2] | (even[:, 1::2] << 4)


def unpack_nibbles(packed: UInt8[Tensor, "rows bytes"], cols: int) -> Int8[Tensor, "rows cols"]:
    """The codes that :func:`pack_nibbles` was given."""
    both = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    return both[:, :cols].contiguous().view(torch.int8)


def pack_trits(codes: Int8[Tensor, "rows cols"]) -> UInt8[Tensor, "rows bytes"]:
    """Codes of -1, 0 and 1, five a byte in base three, the first as the lowest digit."""
    digits = torch.nn.functional.pad(codes + 1, (0, -codes.shape[1] % TRITS)).view(len(codes), -1, TRITS).to(torch.int16)
    return (digits * torch.tensor([3**place for place in range(TRITS)], dtype=torch.int16)).sum(dim=-1).to(torch.uint8)


def unpack_trits(packed: UInt8[Tensor, "rows bytes"], cols: int) -> Int8[Tensor, "rows cols"]:
    """The codes that :func:`pack_trits` was given."""
    places = torch.tensor([3**place for place in range(TRITS)], dtype=torch.int16)
    digits = packed.to(torch.int16).unsqueeze(-1) // places % 3
    return (digits.flatten(1)[:, :cols] - 1).to(torch.int8).contiguous()
