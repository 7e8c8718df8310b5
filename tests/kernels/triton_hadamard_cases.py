"""The Hadamard transform in Triton against the op that defines it. ``test_triton_hadamard.py`` runs this in a process of its own: in Triton's interpreter,
which has to be chosen before Triton is imported; and compiled, where there is CUDA."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

from assay.kernels import triton_hadamard  # noqa: E402
from assay.kernels.triton_hadamard import transform  # noqa: E402
from assay.ops.quantize import hadamard  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# One factor that fills its tile or not, two factors (powers of two, 36 x 16, 48 x 32, 28 x 32), and rows that fill no program.
SHAPES = [(1, 1), (3, 2), (17, 12), (5, 64), (33, 128), (3, 36), (1, 256), (3, 576), (5, 1536), (2, 896), (1, 4096), (1, 14336)]


def poisoned(*shape, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory full of NaN, and a tensor in the middle of it."""
    size = torch.Size(shape).numel()
    whole = torch.full((size + 256,), torch.nan, dtype=dtype, device=DEVICE)
    return whole, whole[128:-128].view(shape)


def untouched(whole: torch.Tensor) -> bool:
    return bool(whole[:128].isnan().all() and whole[-128:].isnan().all())


def check(found, x, **how) -> None:
    """Within the rounding of float32 sums, which grows with a row's length, and of the result to its dtype (the interpreter cuts where a device rounds)."""
    exact = hadamard.transform(x.double(), **how)
    last = 0.0 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps * (1 if INTERPRETED else 0.5)
    bound = 2e-6 * x.double().norm(dim=-1, keepdim=True) / 2 + 1.01 * last * exact.abs() + 1e-7
    assert ((found.cpu().double() - exact).abs() <= bound).all()


def make(*shape, dtype=torch.float32, seed=0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), SHAPES)
def test_transforms_are_those_of_the_op(rows, size, dtype):
    x = make(rows, size, dtype=dtype)
    for signs in (None, hadamard.random_signs(size, seed=1)):
        whole, out = poisoned(rows, size, dtype=dtype)
        check(transform(x.to(DEVICE), signs=signs, out=out), x, signs=signs)
        assert untouched(whole)


@pytest.mark.parametrize(("width", "block"), [(18, 2), (72, 12), (1728, 576), (260, 4)])
def test_blocks_have_signs_of_their_own(width, block):
    x, signs = make(2, 3, width), hadamard.random_signs(width, seed=2)
    whole, out = poisoned(2, 3, width, dtype=torch.float32)
    check(transform(x.to(DEVICE), signs=signs, block=block, out=out), x, signs=signs, block=block)
    assert untouched(whole)


def test_batches_of_any_shape_and_layout_are_turned():
    x = make(576, 2, 3).permute(1, 2, 0)
    check(transform(x.to(DEVICE)), x)
    assert transform(torch.zeros(0, 576, device=DEVICE)).shape == (0, 576)


def test_a_row_depends_on_itself_alone():
    x = make(20, 64).to(DEVICE)
    before = transform(x)
    x[5] = torch.nan
    after = transform(x)
    assert after[5].isnan().all() and after[:5].equal(before[:5]) and after[6:].equal(before[6:])


def test_a_factor_that_no_program_holds_and_float64_go_to_the_op(monkeypatch):
    monkeypatch.setattr(triton_hadamard, "_turn", None)  # not called
    for x in (make(2, 11008).to(DEVICE), make(2, 64).double().to(DEVICE)):
        out = torch.full_like(x, torch.nan)
        assert transform(x, out=out) is out and out.equal(hadamard.transform(x))


def test_what_the_op_refuses_is_refused_in_its_words():
    with pytest.raises(ValueError, match="no Hadamard matrix of size 18 is known"):
        transform(torch.zeros(1, 18, device=DEVICE))
    with pytest.raises(ValueError, match="block=4 does not divide the 18 channels"):
        transform(torch.zeros(1, 18, device=DEVICE), block=4)
    with pytest.raises(ValueError, match="no Hadamard matrix of size 9 is known"):
        transform(torch.zeros(1, 18, device=DEVICE), block=9)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device with 20 GB: more than 2^31 numbers")
def test_offsets_beyond_31_bits_reach_the_right_rows():
    x = torch.zeros(2**31 // 64 + 1, 64, dtype=torch.bfloat16, device=DEVICE)
    x[-1, 0] = 8
    assert transform(x)[-2:].tolist() == [[0.0] * 64, [1.0] * 64]
