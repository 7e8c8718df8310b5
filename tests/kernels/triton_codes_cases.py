"""Rounded inputs on CUDA, as codes and as numbers, against the ops that define them. ``test_triton_linear.py`` runs this in a process of its own."""

import pytest
import torch
from triton_devices import DEVICE, INTERPRETED, poisoned, randn, untouched

from assay.kernels import triton_linear
from assay.kernels.engine import _on_cuda
from assay.kernels.graphs import GraphRunner
from assay.kernels.triton_inputs import BLOCK, Codes, Inputs, prepare, round_to_codes, turn
from assay.kernels.triton_linear import Lanes, Whole, hold, multiply_codes
from assay.ops.decode.forward import TorchRunner
from assay.ops.decode.session import Session
from assay.ops.decode.weights import Before, Matrix, Ready, weights_of
from assay.ops.quantize.activations import Activations, quantize_activations
from assay.ops.quantize.elements import decode
from assay.ops.quantize.grid import Format, quantize
from assay.ops.quantize.outliers import split
from assay.ops.quantize.rotate import Online

INT8, FP8 = Activations("int8"), Activations("fp8_e4m3")
HOW = {
    "int8": INT8, "int8 clipped": Activations("int8", clip=0.7), "int4": Activations("int4", clip=0.9), "fp8": FP8,
    "int8 by calibration": Activations("int8", per="tensor", scale=torch.tensor([0.031])),
    "fp8 by calibration": Activations("fp8_e4m3", per="tensor", scale=torch.tensor([0.0021])),
}  # fmt: skip


def numbers(codes: Codes, how: Activations) -> torch.Tensor:
    """What codes stand for, in float32."""
    return decode(codes.codes.cpu(), "e4m3" if how.format == "fp8_e4m3" else "int") * codes.scales.cpu().unsqueeze(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HOW)
def test_codes_times_scales_are_rounded_inputs_bit_for_bit(name, dtype):
    how = HOW[name]
    for tokens, cols in ((3, 72), (2, BLOCK + 130), (1, 1)):
        x = (randn(tokens, cols) * torch.tensor([1e-3, 1.0, 3e4])[:tokens, None]).to(dtype)
        x.flatten()[::7] *= 1e-4  # for the smallest codes
        whole, out = poisoned(tokens, cols, dtype=torch.int8)
        found = round_to_codes(x.to(DEVICE), prepare(Ready(activations=how), [], DEVICE).activations, out)
        assert untouched(whole) and found.codes is out and found.dtype == dtype
        assert numbers(found, how).equal(quantize_activations(x.float(), how))


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_ties_go_to_the_even_code_and_ends_are_kept(name):
    how = HOW[name]
    spread = 127.5 if name == "int8" else 448.0
    x = torch.cat((torch.arange(-128, 129) / 2, torch.arange(1, 65) / 1024, torch.tensor([spread, -spread]))).unsqueeze(0)
    found = round_to_codes(x.to(DEVICE), how)
    assert found.scales.item() == 1 and numbers(found, how).equal(quantize_activations(x, how))


@pytest.mark.parametrize("name", ["int8", "fp8", "int8 by calibration"])
def test_zeros_stay_zeros_and_what_is_not_finite_stays_in_its_token(name):
    how = HOW[name]
    x = randn(5, 40)
    x[1], x[2, 3], x[3, 4] = 0, torch.nan, -torch.inf
    found, expected = numbers(round_to_codes(x.to(DEVICE), how), how), quantize_activations(x, how)
    for token in (0, 1, 4, *([3] if how.per == "tensor" else [])):  # calibration keeps infinity as its last code
        assert found[token].equal(expected[token])
    assert found[2].isnan().all() and expected[2].isnan().any()
    assert found[3].isnan().all() or how.per == "tensor"


# Of weights: format, rows, cols, parts.
TAKEN = {
    "int8": (Format("int", 8, -1), 20, 72, 1), "int8 in parts": (Format("int", 8, -1), 33, 520, 2), "int8 at once": (Format("int", 8, 0), 5, 132, 1),
    "int8 in groups": (Format("int", 8, 128), 18, 256, 1), "int6": (Format("int", 6, -1, scale="float32"), 3, 140, 1),
    "fp8": (Format("e4m3", 8, -1), 20, 72, 1), "fp8 in parts": (Format("e4m3", 8, 0, scale="float32"), 17, 520, 2),
    "fp8 in blocks": (Format("e4m3", 8, 128, 128), 256, 256, 1), "fp8 in blocks and parts": (Format("e4m3", 8, 128, 6), 12, 640, 2),
}  # fmt: skip


def held(name, biased=True) -> tuple[Matrix, Lanes]:
    format, rows, cols, parts = TAKEN[name]
    matrix = Matrix(
        quantize(randn(rows, cols) * 2 ** torch.linspace(-3, 3, rows).unsqueeze(1), format), randn(rows, seed=1) if biased else None
    )
    return matrix, hold(matrix, torch.float32, DEVICE)._replace(splits=parts)


@pytest.mark.parametrize("tokens", [1, 18, triton_linear.SMALL + 3])
@pytest.mark.parametrize("name", TAKEN)
def test_products_of_codes_are_those_of_the_numbers_they_stand_for(name, tokens):
    how = INT8 if name.startswith("int") else FP8
    matrix, lanes = held(name, biased=tokens != 18)
    assert lanes.takes(how) and not lanes.takes(FP8 if how is INT8 else INT8)
    codes = round_to_codes(randn(tokens, lanes.shape[1], seed=2).to(DEVICE), how)
    whole, out = poisoned(tokens, lanes.shape[0], dtype=torch.float32)
    found = multiply_codes(codes, lanes, out).cpu().double()
    assert untouched(whole)
    x, weight = numbers(codes, how).double(), matrix.weight.dense().double()
    if name.startswith("int") and "groups" not in name:  # scales once, and an exact sum of codes
        x, weight = decode(codes.codes.cpu(), "int").double(), matrix.weight.codes.double()
        product = x @ weight.T * codes.scales.cpu().double().unsqueeze(1) * matrix.weight.shared.effective.double().T
        bias = 0 if matrix.bias is None else matrix.bias.double()
        assert ((found - product - bias).abs() <= 2.0**-24 * (3.01 * product.abs() + (product + bias).abs() * 1.01)).all()
    else:
        bias = torch.zeros(len(weight), dtype=torch.float64) if matrix.bias is None else matrix.bias.double()
        rounding = 2e-6 if INTERPRETED or how is INT8 else 2.0**-12
        assert ((found - x @ weight.T - bias).abs() <= rounding * (x.abs() @ weight.abs().T + bias.abs())).all()


def test_many_and_few_vectors_of_integers_have_the_same_bits_and_no_neighbour_changes_them():
    _, lanes = held("int8 in parts")
    codes = round_to_codes(randn(triton_linear.SMALL + 1, 520).to(DEVICE), INT8)
    many = multiply_codes(codes, lanes)
    for rows in (slice(0, 3), slice(40, 41)):
        assert lanes.multiply(Codes(codes.codes[rows], codes.scales[rows], codes.dtype)).equal(many[rows])
        half = Codes(codes.codes[rows], codes.scales[rows], torch.bfloat16)
        assert multiply_codes(half, lanes).equal(many[rows].bfloat16())
    none = multiply_codes(Codes(codes.codes[:0], codes.scales[:0], torch.bfloat16), lanes)
    assert none.shape == (0, 33) and none.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="vectors of 5 numbers for a matrix of 520 inputs"):
        lanes.multiply(round_to_codes(randn(1, 5).to(DEVICE), INT8))


def test_a_sum_of_the_largest_codes_does_not_overflow_and_a_longer_one_is_not_taken(monkeypatch):
    if INTERPRETED:  # a thousand turns of its loop take seconds
        monkeypatch.setattr(triton_linear, "INPUTS", 4096)
    cols = triton_linear.EXACT - 4
    weight = quantize(-torch.ones(1, cols), Format("int", 8, -1))
    weight = weight._replace(codes=torch.full_like(weight.codes, -128))
    lanes = hold(Matrix(weight), torch.float32, DEVICE)
    assert lanes.takes(INT8)
    codes = Codes(torch.full((1, cols), -128, dtype=torch.int8, device=DEVICE), torch.ones(1, device=DEVICE), torch.float32)
    expected = float(torch.tensor(2.0**14 * cols) * weight.shared.effective)
    assert multiply_codes(codes, lanes).item() == expected
    assert not lanes._replace(words=torch.zeros(1, triton_linear.EXACT // 4, dtype=torch.int32)).takes(INT8)


@pytest.mark.parametrize(
    ("format", "how", "because"),
    [
        (Format("int", 8, -1, symmetric=False), INT8, "weights with a zero point"), (Format("int", 8, -1), INT8._replace(symmetric=False), "inputs with one"),
        (Format("int", 8, 32), INT8, "groups below a block"), (Format("int", 4, -1), INT8, "not bytes"), (Format("e5m2", 8, -1), FP8, "another float"),
        (Format("e4m3", 8, 32, scale="e8m0"), FP8, "groups below a block"),
    ],
)  # fmt: skip
def test_what_is_no_product_of_codes_gets_rounded_numbers(format, how, because):
    lanes = hold(Matrix(quantize(randn(4, 128), format)), torch.float32, DEVICE)
    ready = prepare(Ready(activations=how), [lanes, held("int8")[1]], DEVICE)
    assert not ready.codes, because
    x = randn(2, 128)
    assert ready(x.to(DEVICE)).cpu().equal(quantize_activations(x, how))


def test_inputs_are_codes_only_where_all_that_read_them_multiply_codes():
    taking, dense = held("int8")[1], Matrix(randn(3, 72))
    assert prepare(Ready(activations=INT8), [taking, taking], DEVICE).codes
    for others in ([dense], [Whole(dense.weight, None, "int8")], [held("fp8")[1]]):
        assert not prepare(Ready(activations=INT8), [taking, *others], DEVICE).codes
    assert not prepare(Ready(activations=INT8), [], DEVICE).codes
    nothing = prepare(Ready(), [taking], DEVICE)
    assert nothing == Inputs(None, None, False) and nothing(dense.weight) is dense.weight


@pytest.mark.parametrize(("size", "stride", "shape"), [(24, 1, (2, 3, 48)), (12, 4, (3, 96)), (64, 1, (2, 64)), (4, 8, (5, 32))])
def test_online_rotations_are_those_of_the_op(size, stride, shape):
    online, x = Online("mlp.down_proj", "input", size, stride), randn(*shape)
    found = turn(x.to(DEVICE), online).cpu()
    assert found.shape == x.shape and (found - online.turn(x)).abs().max() < 1e-5
    assert prepare(Ready(online), [], DEVICE)(x.to(DEVICE)).cpu().equal(found)


def test_a_rotation_that_no_program_holds_is_not_called_triton_s():
    ready = [prepare(Ready(Online("mlp.down_proj", "input", size)), [], DEVICE) for size in (64, 1536, 11008)]
    assert [each.rotation for each in ready] == ["online rotations triton", "online rotations triton", "online rotations"]


def test_what_no_kernel_reads_says_so_and_is_the_op_s():
    grid = quantize(randn(6, 64), Format("int", 4, 16))
    for weight, form in (
        (grid._replace(order=torch.arange(64) // 16), "bfloat16 from int4"), (quantize(randn(6, 18), Format("int", 8, 6)), "bfloat16 from int8"),
        (split(randn(6, 64), torch.tensor([3]), Format("int", 8, -1)), "bfloat16 from int8 with columns in bfloat16"),
    ):  # fmt: skip
        whole = hold(Matrix(weight, torch.ones(6)), torch.bfloat16, DEVICE)
        assert isinstance(whole, Whole) and (whole.form, whole.shape) == (form, weight.shape)
        assert whole.weight.cpu().equal(weight.dense().bfloat16())
        x = randn(2, weight.shape[1]).bfloat16()
        assert whole.multiply(x.to(DEVICE)).cpu().equal(torch.nn.functional.linear(x, weight.dense().bfloat16(), torch.ones(6).bfloat16()))


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_tied_head_that_no_kernel_reads_is_the_embedding_too(make_llama):
    shape, weights = weights_of(make_llama(layers=1, tied=True))
    head = Matrix(split(weights.head.weight, torch.tensor([3]), Format("int", 8, -1)))
    weights = weights._replace(embedding=head, head=head)
    runner = TorchRunner(shape, weights, device=DEVICE, hold=hold, prepare=prepare)
    assert runner.path == "torch float32, float32+float32 from int8 with columns in bfloat16 weights"
    assert runner.weights.embedding.weight is runner.weights.head.weight
    expected, found = (Session(each, rows=1, capacity=4).read([[5, 6]])[0] for each in (TorchRunner(shape, weights), runner))
    assert (found.cpu() - expected).abs().max() < 1e-4


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("kind", ["int8", "fp8_e4m3"])
def test_a_decoder_with_rounded_inputs_has_the_logits_of_the_runner_that_rounds_numbers(make_llama, kind):
    """The first block multiplies codes, but for its last matrix, which is dense and reads rounded numbers; the second reads what it is given."""
    shape, weights = weights_of(make_llama(layers=2))
    format = Format("int", 8, -1) if kind == "int8" else Format("e4m3", 8, -1)

    def rounded(matrix):
        return matrix._replace(weight=quantize(matrix.weight, format))

    first, second = weights.blocks
    how = Activations(kind)
    before = Before(
        Ready(None, how),
        Ready(Online("self_attn.o_proj", "input", 4, 16), how),
        Ready(None, how),
        Ready(Online("mlp.down_proj", "input", 128), how),
    )
    mlp = first.mlps[0]._replace(gate=rounded(first.mlps[0].gate), up=rounded(first.mlps[0].up))
    first = first._replace(**{name: rounded(getattr(first, name)) for name in "qkvo"}, mlps=(mlp,), before=before)
    weights = weights._replace(blocks=(first, second))
    plain = TorchRunner(shape, weights)
    assert plain.path.endswith(f"inputs rounded to {kind}, online rotations")
    runner = _on_cuda(shape, weights, torch.float32, DEVICE)
    assert runner.path.endswith(f" triton weights, inputs rounded to {kind}+{kind} codes triton, online rotations triton")
    if INTERPRETED:
        runner = GraphRunner(runner.runner, capture=lambda work, device: work)
    assert [ready.codes for ready in runner.runner.weights.blocks[0].before] == [True, True, True, False, False]
    sessions = [Session(each, rows=2, capacity=24) for each in (plain, runner)]
    for ids in ([[5, 6, 7, 8, 9], [11]], [[5], [6]]):
        for expected, found in zip(*(session.read(ids) for session in sessions), strict=True):
            assert expected.std() > 0.5
            # A number near the middle between two codes may fall on the other side: by far less than what rounding does at all.
            assert (found.cpu() - expected).abs().max() < 0.02 * expected.std()
