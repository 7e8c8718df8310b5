"""Bits in words: the codes come back bit for bit, at any width."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.quantize.pack import pack, unpack


@settings(max_examples=80, deadline=None)
@given(
    bits=st.integers(2, 8), rows=st.integers(1, 9), cols=st.integers(1, 70), seed=st.integers(0, 10_000), along_rows=st.booleans()
)  # fmt: skip
def test_unpacking_gives_back_the_codes_at_any_width_and_odd_lengths(bits, rows, cols, seed, along_rows):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (rows, cols), generator=generator).to(torch.int8)
    packed = pack(codes, bits=bits, along_rows=along_rows)
    assert packed.dtype == torch.int32
    assert packed.shape == ((-(-rows * bits // 32), cols) if along_rows else (rows, -(-cols * bits // 32)))
    assert torch.equal(unpack(packed, bits=bits, shape=(rows, cols), along_rows=along_rows), codes)


def test_all_256_pairs_of_nibbles_survive_packing():
    """An accumulator that is not cleared, or a sign lost in a nibble, shows in some pair."""
    pairs = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).to(torch.int8)
    assert torch.equal(unpack(pack(pairs, bits=4), bits=4, shape=(256, 2)), pairs)
    flat = pairs.reshape(1, 512)
    assert torch.equal(unpack(pack(flat, bits=4), bits=4, shape=(1, 512)), flat)
    assert pack(torch.tensor([[-8, 7, 0, -1, 1, 0, 0, 0]], dtype=torch.int8), bits=4).view(torch.uint8).tolist() == [
        [0xF0, 0x78, 0x89, 0x88]
    ]
