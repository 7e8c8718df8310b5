"""2:4 weights packed by hand and back bit for bit, bytes as they are stored, and what is not 2:4 refused by place."""

import json
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from assay.ops.prune.masks import Sparsity, select
from assay.ops.quantize import layout
from assay.ops.quantize.grid import Format, Quantized, Scales, quantize
from assay.ops.quantize.semi_structured import (
    SemiStructured,
    SemiStructuredCodes,
    from_tensors,
    pack,
    pack_codes,
    share_of_dense,
    stored_bytes,
    tensors,
    to_torch,
    unpack,
)

TWO_OF_FOUR = Sparsity(n=2, m=4)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.int8]


def pruned(rows: int, cols: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    weight = weight.masked_fill(select(weight.abs(), TWO_OF_FOUR), 0)
    return (weight * 40).clamp(-127, 127).to(dtype) if dtype == torch.int8 else weight.to(dtype)


def test_values_and_places_worked_by_hand():
    weight = torch.tensor([[0.0, 5, 0, 7, 1, 2, 0, 0, 0, 0, 0, 9]])
    packed = pack(weight)
    assert packed.values.tolist() == [[5, 7, 1, 2, 0, 9]]
    # places 1 and 3: 1 + 4 · 3 = 13; 0 and 1: 4; the last group has one weight, at 3, and keeps its first zero: 0 + 4 · 3 = 12
    assert packed.indices.tolist() == [[13 + 16 * 4, 12]]
    assert packed.shape == (1, 12) and unpack(packed).equal(weight)
    assert pack(torch.zeros(1, 4)).indices.tolist() == [[4]]  # places 0 and 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "cols"), [(1, 4), (3, 12), (32, 64), (5, 20)])
def test_every_dtype_and_width_comes_back_bit_for_bit(rows, cols, dtype):
    weight = pruned(rows, cols, dtype)
    packed = pack(weight)
    assert packed.values.dtype == dtype and packed.values.shape == (rows, cols // 2)
    assert unpack(packed).equal(weight) and unpack(packed).dtype == dtype


@settings(deadline=None)
@given(bits=st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 12]), min_size=1, max_size=9), seed=st.integers(0, 99))
def test_every_set_of_at_most_two_places_comes_back(bits, seed):
    """All eleven of them, in any order, however many groups a byte is filled with."""
    numbers = torch.randn(2, 4 * len(bits), generator=torch.Generator().manual_seed(seed)) + 3
    left = torch.tensor([bool(each >> place & 1) for each in bits for place in range(4)])
    weight = numbers * left
    packed = pack(weight)
    assert unpack(packed).equal(weight)
    both = torch.stack((packed.indices & 15, packed.indices >> 4), dim=-1).flatten(1)[:, : len(bits)]
    assert ((both & 3) < (both >> 2)).all()  # ascending, and never one place twice
    assert from_tensors(tensors(packed)).values.equal(packed.values)


def test_what_is_not_2_of_4_is_refused_by_its_row_and_group():
    weight = pruned(6, 16)
    weight[4, 8:12] = 1
    weight[5, 0:3] = 1
    with pytest.raises(ValueError, match=r"row 4, group 2 \(columns 8 to 11\) has 4 weights .* 1 other groups of 24 too many"):
        pack(weight)
    with pytest.raises(ValueError, match="the weight has 6 columns"):
        pack(torch.zeros(2, 6))
    assert unpack(pack(pruned(4, 16).T.contiguous().T)).shape == (4, 16)  # 2:4 along the rows, whatever the strides
    with pytest.raises(ValueError, match="Prune with the pattern 2:4 first"):
        pack(pruned(16, 16).T)  # and not along the columns


def test_bytes_are_nine_sixteenths_of_sixteen_bits_and_five_eighths_of_eight_bits_only():
    for dtype, share in [(torch.bfloat16, Fraction(9, 16)), (torch.int8, Fraction(10, 16)), (torch.float32, Fraction(17, 32))]:
        weight = pruned(32, 64, dtype)
        packed = pack(weight)
        assert Fraction(stored_bytes(packed), weight.nbytes) == share == share_of_dense(8 * weight.itemsize)
        assert stored_bytes(packed) == sum(each.nbytes for each in tensors(packed).values())
    assert share_of_dense(8) == Fraction(5, 8) and share_of_dense(4) == Fraction(3, 4)
    with pytest.raises(ValueError, match="values of 0 bits"):
        share_of_dense(0)


def test_bytes_on_disk_are_those_reported_and_the_file_reads_back(tmp_path):
    weight = pruned(64, 128, torch.bfloat16)
    packed = pack(weight)
    save_file({f"layer.{name}": each for name, each in tensors(packed).items()}, tmp_path / "w.safetensors")
    stored = load_file(tmp_path / "w.safetensors")
    assert set(stored) == {"layer.weight_values", "layer.weight_indices"}
    assert sum(each.nbytes for each in stored.values()) == stored_bytes(packed) == 64 * 128 * 2 * 9 // 16
    assert unpack(from_tensors({name.removeprefix("layer."): each for name, each in stored.items()})).equal(weight)


def test_tensors_that_are_missing_or_do_not_belong_together_are_refused():
    packed = pack(pruned(4, 16))
    with pytest.raises(ValueError, match="weight_indices is not among weight_values"):
        from_tensors({"weight_values": packed.values})
    with pytest.raises(ValueError, match=r"weight_values \[4, 8\] .* \[4, 2\] bytes .* weight_indices are \[4, 1\] of uint8"):
        from_tensors({"weight_values": packed.values, "weight_indices": packed.indices[:, :1]})
    with pytest.raises(ValueError, match="of int8"):
        from_tensors({"weight_values": packed.values, "weight_indices": packed.indices.view(torch.int8)})


INT8 = {
    "symmetric": Format(bits=8, group_size=16), "asymmetric": Format(bits=8, group_size=16, symmetric=False), "a row": Format(bits=8, group_size=-1, symmetric=False),
    "the tensor": Format(bits=8, group_size=0, symmetric=False), "float16 scales": Format(bits=8, group_size=8, scale="float16"),
}  # fmt: skip


def test_codes_are_told_from_zero_by_their_zero_point():
    """Codes 3 and 3 of the second group mean 0 there, and 0 means -3."""
    shared = Scales(torch.ones(1, 2), torch.tensor([[0, 3]], dtype=torch.int8))
    quantized = Quantized(
        torch.tensor([[0, 5, 0, -7, 3, 0, 3, 9]], dtype=torch.int8), shared, Format(bits=8, group_size=4, symmetric=False)
    )
    packed = pack_codes(quantized)
    assert packed.codes.values.tolist() == [[5, -7, 0, 9]] and packed.codes.indices.tolist() == [[13 + 16 * 13]]
    assert packed.quantized().codes.equal(quantized.codes)
    assert packed.dense().tolist() == [[0, 5, 0, -7, 0, -3, 0, 6]]


@pytest.mark.parametrize("name", INT8)
@pytest.mark.parametrize(("rows", "cols"), [(1, 16), (6, 48), (5, 80)])
def test_int8_codes_come_back_bit_for_bit_from_what_is_stored_in_five_eighths_of_their_bytes(name, rows, cols):
    quantized = quantize(pruned(rows, cols, seed=rows), INT8[name])
    packed = pack_codes(quantized)
    stored, kind = layout.tensors(packed), json.loads(json.dumps(layout.kind_of(packed)))
    back = layout.from_tensors(stored, kind)
    assert isinstance(back, SemiStructuredCodes) and back.quantized().codes.equal(quantized.codes) and back.format == quantized.format
    assert back.dense().equal(quantized.dense()) and (back.shape, back.form) == ((rows, cols), "2:4 int8")
    if cols % 8 == 0:  # else the last byte of a row's places is half empty
        parts = layout.tensors(quantized, whole_bytes=True)
        shared = layout.nbytes(parts) - parts["weight"].nbytes
        assert layout.stored_bytes(packed) - shared == Fraction(rows * cols) * share_of_dense(8)


def test_groups_that_are_not_contiguous_keep_their_order():
    order = (torch.arange(32) % 4).int()
    quantized = quantize(pruned(4, 32), Format(bits=8, group_size=8, symmetric=False))
    quantized = quantized._replace(
        codes=torch.where(pruned(4, 32) != 0, quantized.codes, quantized.shared.zeros[:, order.long()]), order=order
    )
    back = layout.from_tensors(layout.tensors(pack_codes(quantized)), layout.kind_of(pack_codes(quantized)))
    assert isinstance(back, SemiStructuredCodes)
    assert back.quantized().codes.equal(quantized.codes) and back.order.equal(order) and back.dense().equal(quantized.dense())


def test_codes_that_are_not_int8_or_not_2_of_4_are_refused():
    with pytest.raises(ValueError, match=r"the codes are int4, and of rounded weights int8 alone is stored as 2:4 \(in 5/8 of its bytes\)"):
        pack_codes(quantize(pruned(4, 16), Format(group_size=16)))
    with pytest.raises(ValueError, match="Prune with the pattern 2:4 first"):
        pack_codes(quantize(torch.randn(4, 16), Format(bits=8, group_size=16)))
    with pytest.raises(ValueError, match="the weight has 6 columns, which are no groups of four"):
        pack_codes(quantize(torch.zeros(2, 6), Format(bits=8, group_size=-1)))


def test_the_form_of_torch_needs_cuda():
    with pytest.raises(ValueError, match="on CUDA alone, and these are on cpu; unpack gives the dense weight"):
        to_torch(pack(pruned(32, 64)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch's 2:4 kernels are for CUDA, and there is none here")
def test_on_cuda_the_form_of_torch_multiplies_as_the_dense_weight():
    weight = pruned(128, 256, torch.bfloat16).cuda()
    packed = pack(weight)
    assert unpack(packed).equal(weight)
    inputs = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    found = torch.nn.functional.linear(inputs, to_torch(packed))
    torch.testing.assert_close(found, torch.nn.functional.linear(inputs, weight), atol=5e-2, rtol=2e-2)
    with pytest.raises(ValueError, match="do not take"):
        to_torch(SemiStructured(packed.values[:3], packed.indices[:3]))
