"""What the Triton kernels compute, against the ops that define them. ``test_triton_linear.py`` runs this in a process of its own: in Triton's interpreter,
which has to be chosen before Triton is imported; and compiled, where there is CUDA."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

from assay.kernels import triton_linear  # noqa: E402
from assay.kernels.graphs import GraphRunner  # noqa: E402
from assay.kernels.triton_linear import Lanes, hold, multiply_out, multiply_small  # noqa: E402
from assay.kernels.triton_norm import rms_norm  # noqa: E402
from assay.ops.decode import forward  # noqa: E402
from assay.ops.decode.forward import TorchRunner  # noqa: E402
from assay.ops.decode.session import Session  # noqa: E402
from assay.ops.decode.weights import Matrix, weights_of  # noqa: E402
from assay.ops.quantize.grid import Format, quantize  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# bits, rows, cols, group, symmetric, splits: rows that fill no program, columns that fill no block, groups inside and across blocks, one group a row.
SHAPES = [
    (4, 20, 72, 24, False, 1), (4, 1, 8, 8, True, 1), (4, 33, 520, 40, False, 3), (4, 16, 256, 128, True, 2), (4, 17, 328, 328, True, 1),
    (8, 37, 264, 12, True, 1), (8, 5, 520, 520, False, 2), (3, 18, 160, 32, False, 1), (2, 6, 144, 16, True, 1), (6, 4, 136, 8, False, 1),
]  # fmt: skip


def mend_the_interpreter() -> None:
    """Triton 3.7 interprets bfloat16 as integers in a product, and cuts where a device rounds to it; here it computes what a device does."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, dot = builder.cast_impl, builder.create_dot

    def rounded(self, source, to):
        if source.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            values = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
            return handle(values.view(torch.uint16).numpy(), tl.bfloat16)
        return cast(self, source, to)

    def multiplied(self, one, other, *rest):
        one, other = (
            handle((each.data.astype(np.uint32) << 16).view(np.float32), tl.float32) if each.dtype.scalar == tl.bfloat16 else each
            for each in (one, other)
        )
        return dot(self, one, other, *rest)

    builder.cast_impl, builder.create_dot = rounded, multiplied


if INTERPRETED:
    mend_the_interpreter()


def make(bits, rows, cols, group, symmetric, splits=1, *, dtype=torch.float32, biased=True, seed=0) -> tuple[Matrix, Lanes]:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, cols, generator=random)
    bias = torch.randn(rows, generator=random) if biased else None
    matrix = Matrix(quantize(weight, Format("int", bits, group, symmetric=symmetric)), bias)
    held = hold(matrix, dtype, DEVICE)
    assert isinstance(held, Lanes) and held.shape == (rows, cols)
    return matrix, held._replace(splits=splits)


def poisoned(*shape, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory full of NaN, and a tensor in the middle of it."""
    size = torch.Size(shape).numel()
    whole = torch.full((size + 256,), torch.nan, dtype=dtype, device=DEVICE)
    return whole, whole[128:-128].view(shape)


def untouched(whole: torch.Tensor) -> bool:
    return bool(whole[:128].isnan().all() and whole[-128:].isnan().all())


def check(found, x, matrix) -> None:
    """Within the rounding of a float32 sum, and of the result to its dtype, of the sum in float64."""
    weight, exact = matrix.dense(found.dtype).double(), x.cpu().double()
    bias = torch.zeros(len(weight)) if matrix.bias is None else matrix.bias.to(found.dtype)
    expected, size = exact @ weight.T + bias.double(), exact.abs() @ weight.abs().T + bias.abs().double()
    last = torch.finfo(found.dtype).eps / 2 if found.dtype != torch.float32 else 0.0
    assert ((found.cpu().double() - expected).abs() <= 2e-6 * size + 1.01 * last * expected.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "rows", "cols", "group", "symmetric", "splits"), SHAPES)
def test_products_are_those_of_the_op(bits, rows, cols, group, symmetric, splits, dtype):
    matrix, held = make(bits, rows, cols, group, symmetric, splits, dtype=dtype, biased=rows % 2 == 1)
    for tokens in (1, 18):
        x = torch.randn(tokens, cols, generator=torch.Generator().manual_seed(tokens)).to(dtype).to(DEVICE)
        whole, out = poisoned(tokens, rows, dtype=dtype)
        check(multiply_small(x, held, out), x, matrix)
        assert untouched(whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "rows", "cols", "group", "symmetric", "splits"), SHAPES)
def test_a_weight_multiplied_out_is_the_op_s_bit_for_bit(bits, rows, cols, group, symmetric, splits, dtype):
    matrix, held = make(bits, rows, cols, group, symmetric, dtype=dtype)
    whole, out = poisoned(rows, cols, dtype=dtype)
    assert multiply_out(held, dtype, out).cpu().equal(matrix.dense(dtype))
    assert untouched(whole)


def test_a_vector_s_result_has_the_same_bits_whatever_is_beside_it():
    _, held = make(4, 20, 72, 24, False, 2)
    x = torch.randn(19, 72, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    beside = multiply_small(x, held)
    x[5] = torch.nan
    for row in (0, 6, 17):
        assert multiply_small(x[row : row + 1], held).equal(beside[row : row + 1])
        assert multiply_small(x, held)[row].equal(beside[row])


@pytest.mark.parametrize("tokens", [triton_linear.SMALL, triton_linear.SMALL + 1])
def test_few_vectors_and_many_go_different_ways_to_one_result(tokens, monkeypatch):
    matrix, held = make(8, 20, 72, 24, False)
    monkeypatch.setattr(triton_linear, "multiply_small" if tokens > triton_linear.SMALL else "multiply_out", None)  # not called
    x = torch.randn(tokens, 72, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    check(held.multiply(x), x, matrix)


def test_batches_of_any_shape_and_layout_are_multiplied():
    matrix, held = make(4, 20, 72, 24, True)
    x = torch.randn(72, 2, 3, generator=torch.Generator().manual_seed(3)).to(DEVICE).permute(1, 2, 0)
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
    random = torch.Generator().manual_seed(0)
    x, weight = (3 * torch.randn(*shape, generator=random)).to(dtype), torch.randn(shape[-1], generator=random).to(dtype)
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
    bits = 4
    shape, weights = weights_of(make_decoder("gemma3", num_hidden_layers=2))
    head = Matrix(quantize(weights.head.weight, Format("int", bits, 32, symmetric=False)))
    first, *rest = weights.blocks
    first = first._replace(
        q=first.q._replace(weight=quantize(first.q.weight, Format("int", bits, 32, symmetric=True))),
        mlps=tuple(
            type(mlp)(*(Matrix(quantize(each.weight, Format("int", bits, 16, symmetric=False))) for each in mlp)) for mlp in first.mlps
        ),
    )
    weights = weights._replace(embedding=head, head=head, blocks=(first, *rest))  # tied and packed
    plain = TorchRunner(shape, weights)
    packed = TorchRunner(shape, weights, device=DEVICE, hold=hold, norm=rms_norm)
    assert packed.path == "torch float32, float32+int4 triton weights"
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
    held = Lanes(words, torch.ones(rows, 1, dtype=torch.bfloat16, device=DEVICE), None, None, 4, 4, 1)
    x = torch.zeros(1, cols, device=DEVICE)
    x[0, -1] = 1
    assert multiply_small(x, held)[0, -5:].tolist() == ((words[-5:, -1] >> 28 & 15) - 8).tolist()
