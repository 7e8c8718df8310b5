"""What a weight is stored as, and what comes back: every format, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.ops.quantize import additive, lattice, outliers
from assay.ops.quantize.grid import Format, Quantized, dequantize, effective_bits, quantize
from assay.ops.quantize.layout import from_tensors, kind_of, read_grid, stored_bytes, tensors
from assay.ops.quantize.pack import pack_nibbles, pack_trits, unpack_nibbles, unpack_trits

FORMATS = {
    "int8": Format("int", 8, 16), "int4": Format("int", 4, 16, symmetric=False), "int3": Format("int", 3, -1), "int2": Format("int", 2, 0),
    "fp8_e4m3": Format("e4m3", 8, -1), "fp8_e4m3 of blocks": Format("e4m3", 8, 16, 8), "fp8_e5m2": Format("e5m2", 8, 0),
    "mxfp8": Format("e4m3", 8, 32, scale="e8m0"), "mxfp4": Format("e2m1", 4, 32, scale="e8m0"), "nvfp4": Format("e2m1", 4, 16, scale="e4m3"),
    "nf4": Format("nf4", 4, 64, scale="float32"), "nf4 nested": Format("nf4", 4, 64, scale="float32", nested=True),
    "ternary": Format("ternary", 2, 0), "int4 in float16": Format("int", 4, 16, scale="float16"),
}  # fmt: skip


def random(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) * 0.02


def same(one: Quantized, other: Quantized) -> bool:
    both = [(one.codes, other.codes), *zip(one.shared[:3], other.shared[:3], strict=True), (one.order, other.order)]
    return one.format == other.format and all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a.float(), b.float())) for a, b in both
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("cols", [64, 192])
def test_unpacking_gives_back_the_weight_bit_for_bit(name, cols):
    found = quantize(random(24, cols), FORMATS[name])
    back = from_tensors(tensors(found), kind_of(found))
    assert isinstance(back, Quantized) and same(found, back) and torch.equal(dequantize(found), back.dense())


def test_whole_bytes_and_groups_that_are_not_contiguous_come_back_too():
    found = quantize(random(8, 64), Format("int", 8, 16, symmetric=False))._replace(order=(torch.arange(64) % 4).int())
    for whole in (True, False):
        stored = tensors(found, whole_bytes=whole)
        assert ("weight" in stored) == whole and "weight_g_idx" in stored
        assert same(found, read_grid(stored, found.format))


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 6), cols=st.integers(1, 33), seed=st.integers(0, 999))
def test_nibbles_and_trits_of_any_length_come_back(rows, cols, seed):
    generator = torch.Generator().manual_seed(seed)
    nibbles = torch.randint(0, 16, (rows, cols), generator=generator).to(torch.int8)
    trits = torch.randint(-1, 2, (rows, cols), generator=generator).to(torch.int8)
    assert torch.equal(unpack_nibbles(pack_nibbles(nibbles), cols), nibbles) and pack_nibbles(nibbles).shape[1] == -(-cols // 2)
    assert torch.equal(unpack_trits(pack_trits(trits), cols), trits) and pack_trits(trits).shape[1] == -(-cols // 5)


def test_all_256_pairs_of_nibbles_survive_packing():
    pairs = torch.cartesian_prod(torch.arange(16), torch.arange(16)).to(torch.int8)
    assert torch.equal(unpack_nibbles(pack_nibbles(pairs), 2), pairs)
    assert pack_nibbles(torch.tensor([[3, 12]], dtype=torch.int8)).tolist() == [[0xC3]]


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        (Format("int", 4, 128, symmetric=False, scale="float16"), 4.15625), (Format("int", 4, 32, symmetric=False), 4.625),
        (Format("int", 4, 128), 4.125), (Format("e2m1", 4, 32, scale="e8m0"), 4.25), (Format("e2m1", 4, 16, scale="e4m3"), 4.5),
        (Format("nf4", 4, 64, scale="float32"), 4.5), (Format("nf4", 4, 64, scale="float32", nested=True), 4.127),
        (Format("ternary", 2, 0), 1.6), (Format("int", 4, 256), 4.0625), (Format("e4m3", 8, 128, 128), 8.001),
    ],
)  # fmt: skip
def test_bits_a_weight_are_those_of_the_format_and_of_what_is_stored(format, expected):
    assert effective_bits(format, 4096, 4096) == pytest.approx(expected, abs=5e-4)
    rows, cols = 256, 1280
    found = quantize(random(rows, cols), format)
    assert 8 * stored_bytes(found) / (rows * cols) == pytest.approx(effective_bits(format, rows, cols), rel=1e-12)


def test_known_bytes_of_a_matrix_of_64_by_64():
    weight = random(64, 64)
    assert stored_bytes(quantize(weight, Format("nf4", 4, 64, scale="float32"))) == 2304  # 4.5 bits
    assert stored_bytes(quantize(weight, Format("e2m1", 4, 32, scale="e8m0"))) == 2176  # 4.25


def test_split_lattice_and_additive_weights_come_back():
    weight = random(16, 64)
    split = outliers.split(weight, torch.tensor([3, 17]), Format("int", 8, -1))
    points, sums = lattice.quantize(weight, seed=1), additive.quantize(weight, code_bits=4, rounds=1)
    for found in (split, points, sums):
        back = from_tensors(tensors(found), kind_of(found))
        assert type(back) is type(found) and torch.equal(back.dense(), found.dense())
        assert back.shape == (16, 64) and back.form == found.form
    assert stored_bytes(points) == 16 * 64 // 4 + 4 + 2 + 8  # two bits each, a scale, and signs of both sides


def test_what_cannot_be_read_is_refused():
    found = quantize(random(8, 64), FORMATS["int4"])
    stored = tensors(found)
    with pytest.raises(ValueError, match="needs weight_scale; it has weight_packed"):
        read_grid({name: tensor for name, tensor in stored.items() if name != "weight_scale"}, found.format)
    with pytest.raises(ValueError, match="needs weight or weight_packed"):
        read_grid({"weight_scale": stored["weight_scale"]}, found.format)
    with pytest.raises(ValueError, match="of kind 'hologram' is stored; grid, split, lattice, additive, 2:4 and 2:4 grid are known"):
        from_tensors(stored, {"kind": "hologram"})
