"""What the Triton kernels compute, against the ops that define them. ``test_triton_linear.py`` runs this in a process of its own."""

import pytest
import torch
from triton_devices import DEVICE, INTERPRETED, poisoned, randn, untouched

from assay.kernels import triton_linear
from assay.kernels.graphs import GraphRunner
from assay.kernels.triton_linear import Lanes, hold, multiply_out, multiply_small
from assay.kernels.triton_norm import rms_norm
from assay.ops.decode import forward
from assay.ops.decode.forward import TorchRunner
from assay.ops.decode.session import Session
from assay.ops.decode.weights import Matrix, weights_of
from assay.ops.quantize.grid import Format, quantize

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def int_(bits, group, **more) -> Format:
    return Format("int", bits, group, **more)


# Rows that fill no program, columns that fill no block, groups inside and across blocks, one group a row, blocks of rows, one for all.
CASES = {
    "int4": (int_(4, 24, symmetric=False), 20, 72, 1), "int4 in one word": (int_(4, 8), 1, 8, 1),
    "int4 in parts": (int_(4, 40, symmetric=False), 33, 520, 3), "int4 in two parts": (int_(4, 128, scale="float32"), 16, 256, 2),
    "int4 by row": (int_(4, -1, scale="float16"), 17, 328, 1), "int8": (int_(8, 12), 37, 264, 1),
    "int8 in parts": (int_(8, 520, symmetric=False), 5, 520, 2), "int3": (int_(3, 32, symmetric=False), 18, 160, 1), "int2": (int_(2, 16), 6, 144, 1),
    "int6": (int_(6, 8, symmetric=False), 4, 136, 1), "int8 at once": (int_(8, 0, symmetric=False), 5, 132, 1),
    "ternary": (Format("ternary", 2, -1), 18, 144, 1), "mxfp4": (Format("e2m1", 4, 32, scale="e8m0"), 19, 160, 1),
    "nvfp4": (Format("e2m1", 4, 16, scale="e4m3"), 17, 144, 1), "nvfp4 in parts": (Format("e2m1", 4, 16, scale="e4m3"), 3, 528, 2),
    "nf4": (Format("nf4", 4, 64, scale="float32"), 18, 192, 1), "nf4 nested": (Format("nf4", 4, 8, scale="float32", nested=True), 5, 152, 1),
    "e4m3 by block": (Format("e4m3", 8, 128, 8), 24, 256, 1), "e4m3 by row": (Format("e4m3", 8, -1), 17, 132, 1),
    "e5m2 at once": (Format("e5m2", 8, 0, scale="float32"), 19, 268, 2), "mxfp8": (Format("e4m3", 8, 32, scale="e8m0"), 18, 96, 1),
}  # fmt: skip
every = pytest.mark.parametrize("name", CASES)


def make(name, *, dtype=torch.float32, biased=True) -> tuple[Matrix, Lanes]:
    """The same weight, 1/8 to 8 times as large from row to row, for the op and as the kernels hold it."""
    format, rows, cols, splits = CASES[name]
    weight = randn(rows, cols) * 2 ** torch.linspace(-3, 3, rows).unsqueeze(1)
    matrix = Matrix(quantize(weight, format), randn(rows, seed=1) if biased else None)
    held = hold(matrix, dtype, DEVICE)
    assert isinstance(held, Lanes) and held.shape == (rows, cols)
    return matrix, held._replace(splits=splits)


def check(found, x, matrix) -> None:
    """Within the rounding of a float32 sum, and of the result to its dtype, of the sum in float64."""
    weight, exact = matrix.dense(found.dtype).double(), x.cpu().double()
    bias = torch.zeros(len(weight)) if matrix.bias is None else matrix.bias.to(found.dtype)
    expected, size = exact @ weight.T + bias.double(), exact.abs() @ weight.abs().T + bias.abs().double()
    last = torch.finfo(found.dtype).eps / 2 if found.dtype != torch.float32 else 0.0
    assert ((found.cpu().double() - expected).abs() <= 2e-6 * size + 1.01 * last * expected.abs()).all()


@every
def test_products_are_those_of_the_op(name):
    for tokens, dtype in ((1, torch.float32), (18, torch.bfloat16), (2, torch.float16)):
        matrix, held = make(name, dtype=dtype, biased=tokens > 1)
        rows, cols = held.shape
        x = randn(tokens, cols, seed=tokens).to(dtype).to(DEVICE)
        whole, out = poisoned(tokens, rows, dtype=dtype)
        check(multiply_small(x, held, out), x, matrix)
        assert untouched(whole)


@every
def test_a_weight_multiplied_out_is_the_op_s_bit_for_bit(name):
    for dtype in DTYPES:
        matrix, held = make(name, dtype=dtype)
        whole, out = poisoned(*held.shape, dtype=dtype)
        assert multiply_out(held, dtype, out).cpu().equal(matrix.dense(dtype))
        assert untouched(whole)


@pytest.mark.parametrize(
    ("format", "codes"),
    [
        (Format("e2m1", 4, 16, scale="e8m0"), 16),
        (Format("nf4", 4, 16, scale="float32"), 16),
        (Format("e4m3", 8, -1), 256),
        (Format("e5m2", 8, -1), 256),
    ],
)
def test_every_code_stands_for_its_number_nan_and_infinities_too(format, codes):
    weight = quantize(torch.ones(1, codes), format)
    weight = weight._replace(codes=torch.arange(codes, dtype=torch.uint8).view(torch.int8).unsqueeze(0))
    weight.shared.scales.fill_(1)
    found = multiply_out(hold(Matrix(weight), torch.float32, DEVICE), torch.float32).cpu()
    assert found.isnan().equal(weight.dense().isnan()) and found.nan_to_num(7).equal(weight.dense().nan_to_num(7))
    assert found.nan_to_num(7).signbit().equal(weight.dense().nan_to_num(7).signbit()), "zero has a sign"


def test_a_vector_s_result_has_the_same_bits_whatever_is_beside_it():
    _, held = make("int4")
    held = held._replace(splits=2)
    x = randn(19, 72, seed=3).to(DEVICE)
    beside = multiply_small(x, held)
    x[5] = torch.nan
    for row in (0, 6, 17):
        assert multiply_small(x[row : row + 1], held).equal(beside[row : row + 1])
        assert multiply_small(x, held)[row].equal(beside[row])


@pytest.mark.parametrize("tokens", [triton_linear.SMALL, triton_linear.SMALL + 1])
def test_few_vectors_and_many_go_different_ways_to_one_result(tokens, monkeypatch):
    matrix, held = make("int8")
    monkeypatch.setattr(triton_linear, "multiply_small" if tokens > triton_linear.SMALL else "multiply_out", None)  # not called
    x = randn(tokens, 264, seed=3).to(DEVICE)
    check(held.multiply(x), x, matrix)


def test_batches_of_any_shape_and_layout_are_multiplied():
    matrix, held = make("int4")
    x = randn(72, 2, 3, seed=3).to(DEVICE).permute(1, 2, 0)
    found = forward.linear(x, held)
    assert found.shape == (2, 3, 20)
    check(found.view(6, 20), x.reshape(6, 72), matrix)
    assert held.multiply(x[:, :0]).shape == (2, 0, 20)
    with pytest.raises(ValueError, match="vectors of 64 numbers for a matrix of 72 inputs"):
        held.multiply(torch.zeros(1, 64, device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(3, 72), (2, 4, 24), (1, 1)])
def test_norms_are_those_of_the_op(shape, offset, dtype):
    x, weight = (3 * randn(*shape)).to(dtype), randn(shape[-1], seed=1).to(dtype)
    expected = forward.rms_norm(x, weight, eps=1e-5, offset=offset)
    whole, out = poisoned(*shape, dtype=dtype)
    found = rms_norm(x.to(DEVICE), weight.to(DEVICE), eps=1e-5, offset=offset, out=out).cpu()
    assert untouched(whole)
    # Two roundings to the dtype, each of which may fall on the other side; in float32 those of the sum of squares as well.
    most = 2.1 if dtype != torch.float32 else 8
    assert ((found.double() - expected.double()).abs() <= most * torch.finfo(dtype).eps * expected.double().abs()).all()
    if dtype != torch.float32:
        assert (found == expected).double().mean() > 0.9
    assert rms_norm(torch.zeros(0, 5, device=DEVICE), torch.ones(5, device=DEVICE), eps=1e-5, offset=offset).shape == (0, 5)


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_packed_decoder_has_the_logits_of_the_same_weights_multiplied_out(make_decoder):
    shape, weights = weights_of(make_decoder("gemma3", num_hidden_layers=2))
    head = Matrix(quantize(weights.head.weight, int_(4, 32, symmetric=False)))
    formats = int_(4, 16, symmetric=False), Format("e2m1", 4, 16, scale="e4m3"), Format("nf4", 4, 32, scale="float32")
    first, *rest = weights.blocks
    first = first._replace(
        q=first.q._replace(weight=quantize(first.q.weight, Format("e4m3", 8, -1))),
        mlps=tuple(type(mlp)(*(Matrix(quantize(each.weight, how)) for each, how in zip(mlp, formats, strict=True))) for mlp in first.mlps),
    )
    weights = weights._replace(embedding=head, head=head, blocks=(first, *rest))  # tied and packed
    plain = TorchRunner(shape, weights)
    packed = TorchRunner(shape, weights, device=DEVICE, hold=hold, norm=rms_norm)
    assert packed.path == "torch float32, float32+int4 triton+fp8_e4m3 triton+nf4 triton+nvfp4 triton weights"
    graphs = GraphRunner(packed, **({"capture": lambda work, device: work} if INTERPRETED else {}))
    sessions = [Session(runner, rows=2, capacity=90) for runner in (plain, graphs)]
    text = torch.randint(3, 128, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    for ids in ([text, text[:2]], [[5], [6]], [[7, 8, 9], [4]]):
        keep = [len(new) for new in ids]
        for expected, found in zip(*(session.read(ids, keep=keep) for session in sessions), strict=True):
            assert expected.std() > 0.5
            assert (found.cpu() - expected).abs().max() < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device with 24 GB: a matrix of more than 2^31 words")
def test_offsets_beyond_31_bits_reach_the_right_rows():
    rows, cols = 2**18 + 1, 2**16 + 8
    words = torch.randint(-(2**31), 2**31 - 1, (rows, cols // 8), dtype=torch.int32, device=DEVICE)
    held = Lanes(words, torch.ones(rows, 1, dtype=torch.bfloat16, device=DEVICE), None, None, None, None, 4, int_(4, -1), 1)
    x = torch.zeros(1, cols, device=DEVICE)
    x[0, -1] = 1
    assert multiply_small(x, held)[0, -5:].tolist() == ((words[-5:, -1] >> 28 & 15) - 8).tolist()
