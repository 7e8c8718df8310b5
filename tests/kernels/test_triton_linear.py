"""The Triton kernels on a machine without a GPU: interpreted (``triton_cases.py``), and compiled to machine code that nothing here can run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

triton = pytest.importorskip("triton", reason="Triton is for Linux on x86-64, or comes with torch for CUDA")

from assay.kernels import triton_linear, triton_norm  # noqa: E402
from assay.kernels.triton_linear import INPUTS, OUTPUTS, PROGRAMS, Lanes, hold, split  # noqa: E402
from assay.ops.decode.weights import Matrix  # noqa: E402
from assay.ops.quantize.grid import Format, quantize  # noqa: E402
from assay.ops.quantize.pack import pack  # noqa: E402

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def run_cases(**environment: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/triton_cases.py"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_interpreted_the_kernels_compute_what_the_ops_do():
    assert re.search(r"\d\d passed, 1 skipped", run_cases(TRITON_INTERPRET="1"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the same cases run in Triton's interpreter above")
def test_compiled_the_kernels_compute_what_the_ops_do():
    assert re.search(r"\d\d passed in", run_cases(TRITON_INTERPRET="0"))


TENSORS = {
    "x": "*bf16", "words": "*i32", "scales": "*bf16", "zeros": "*i8", "bias": "*bf16", "out": "*bf16", "parts": "*fp32", "values": "*bf16",
    "weight": "*bf16", "tokens": "i32", "rows": "i32", "cols": "i32", "part": "i32", "width": "i32", "eps": "fp32", "offset": "fp32",
}  # fmt: skip
CONSTANTS = {"OUTPUTS": OUTPUTS, "VECTORS": 16, "INPUTS": INPUTS, "SPLITS": 4, "BLOCK": 256, "SHIFTED": True}
KERNELS = {
    "int4": (triton_linear._multiply, {"LANE": 4, "GROUP": 64}, {}),
    "int4 in parts, symmetric": (triton_linear._multiply, {"LANE": 4, "GROUP": 32, "zeros": None, "bias": None}, {"out": "*fp32"}),
    "int8 float16": (triton_linear._multiply, {"LANE": 8, "GROUP": 576}, {"x": "*fp16", "out": "*fp16", "bias": "*fp16"}),
    "int2 float32": (triton_linear._multiply, {"LANE": 2, "GROUP": 16}, {"x": "*fp32", "out": "*fp32", "bias": "*fp32"}),
    "parts": (triton_linear._add_parts, {}, {}),
    "whole": (triton_linear._multiply_out, {"LANE": 4, "GROUP": 64}, {}),
    "norm": (triton_norm._rms_norm, {}, {}),
}


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_to_machine_code_for_devices_that_are_not_here(name, target, tmp_path, monkeypatch):
    compiler = pytest.importorskip("triton.backends.compiler", reason="this Triton has no compiler for other devices")
    from triton.backends import backends
    from triton.compiler import ASTSource

    if "nvidia" not in backends or not list(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas*")):
        pytest.skip("this Triton has no NVIDIA backend or no ptxas")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1: kernels are interpreted and cannot be compiled")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, constants, types = KERNELS[name]
    constants = {each: CONSTANTS[each] for each in kernel.arg_names if each in CONSTANTS} | constants
    signature = {each: "constexpr" if each in constants else (TENSORS | types)[each] for each in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=compiler.GPUTarget("cuda", target, 32))
    assert compiled.asm["cubin"].startswith(b"\x7fELF")
    if kernel is triton_linear._multiply and "float32" not in name:
        assert re.search(r"(wgmma|mma)\.[\w.]*f32\.(bf16|f16)", compiled.asm["ptx"]), "no tensor core multiplies"
    # Where a row begins is found in 64 bits: a pointer to one element, or to a row or column of them, is moved by no 32-bit number.
    moved = re.findall(r"tt\.addptr .* : (?:tensor<)?([\dx]*)!tt\.ptr<\w+>>?, (?:tensor<[\dx]*)?(i\d\d)", compiled.asm["ttir"])
    begins = [bits for shape, bits in moved if shape == "" or "1" in shape.split("x")]
    assert begins and set(begins) == {"i64"}


def quantized(rows, cols, group, bits, symmetric=True) -> Matrix:
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(0))
    return Matrix(quantize(weight, Format("int", bits, group, symmetric=symmetric)), torch.ones(rows))


@pytest.mark.parametrize(
    ("bits", "lane", "form"),
    [(2, 2, "int2 triton"), (3, 4, "int4 triton from int3"), (4, 4, "int4 triton"), (5, 8, "int8 triton from int5"), (8, 8, "int8 triton")],
)
def test_codes_lie_in_the_narrowest_lanes_that_hold_them(bits, lane, form):
    matrix = quantized(6, 64, 16, bits, symmetric=False)
    held = hold(matrix, torch.bfloat16, CPU)
    assert isinstance(held, Lanes) and (held.form, held.lane, held.shape) == (form, lane, (6, 64))
    assert held.words.nbytes == 6 * 64 * lane // 8
    assert held.words.equal(pack(matrix.weight.codes, bits=lane)) and held.scales.equal(matrix.weight.shared.scales)
    assert held.bias is not None and held.bias.dtype == torch.bfloat16


def test_words_worked_by_hand():
    codes = torch.tensor([[-8, -7, -6, -1, 0, 1, 6, 7]], dtype=torch.int8)
    matrix = Matrix(quantize(torch.ones(1, 8), Format("int", 4, 8, symmetric=True))._replace(codes=codes))
    assert [word & 0xFFFFFFFF for word in hold(matrix, torch.float32, CPU).words[0].tolist()] == [0xFE987210]


@pytest.mark.parametrize("matrix", [quantized(6, 60, 12, 4), quantized(6, 18, 6, 8), Matrix(torch.randn(3, 5))])
def test_what_fits_no_words_is_multiplied_out(matrix):
    held = hold(matrix, torch.bfloat16, CPU)
    assert isinstance(held, Matrix) and held.form == "bfloat16" and held.weight.equal(matrix.dense(torch.bfloat16))


@given(rows=st.integers(1, 10**6), cols=st.integers(1, 10**6), processors=st.integers(1, 200))
def test_parts_are_no_more_than_keep_the_device_busy_and_none_is_small(rows, cols, processors):
    parts = split(rows, cols, processors)
    assert parts >= 1
    assert parts == 1 or cols / parts >= 2 * INPUTS
    assert parts == 1 or (parts - 1) * rows / OUTPUTS < PROGRAMS * processors  # one part less would be too few programs
