"""The Triton kernels on a machine without a GPU: interpreted (``triton_cases.py``, ``triton_codes_cases.py``), and compiled to machine code that nothing here
can run."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

triton = pytest.importorskip("triton", reason="Triton is for Linux on x86-64, or comes with torch for CUDA")

from assay.kernels import triton_inputs, triton_linear, triton_norm  # noqa: E402
from assay.kernels.triton_linear import INPUTS, MANY, OUTPUTS, PROGRAMS, Lanes, hold, split  # noqa: E402
from assay.ops.decode.weights import Matrix  # noqa: E402
from assay.ops.quantize.grid import Format, quantize  # noqa: E402
from assay.ops.quantize.pack import pack  # noqa: E402

CASES = ("triton_cases.py", "triton_codes_cases.py")
CPU = torch.device("cpu")


def test_interpreted_the_kernels_compute_what_the_ops_do(run_cases):
    assert re.search(r"\d\d\d passed, 1 skipped", run_cases(CASES, TRITON_INTERPRET="1"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the same cases run in Triton's interpreter above")
def test_compiled_the_kernels_compute_what_the_ops_do(run_cases):
    assert re.search(r"\d\d\d passed in", run_cases(CASES, TRITON_INTERPRET="0"))


TENSORS = {
    "x": "*bf16", "words": "*i32", "scales": "*bf16", "zeros": "*i8", "factor": "*fp32", "table": "*fp32", "bias": "*bf16", "out": "*bf16",
    "parts": "*fp32", "values": "*bf16", "weight": "*bf16", "codes": "*i8", "x_scales": "*fp32", "fixed": "*fp32", "tokens": "i32", "rows": "i32",
    "cols": "i32", "part": "i32", "width": "i32", "eps": "fp32", "offset": "fp32", "clip": "fp32",
}  # fmt: skip
CONSTANTS = {
    "OUTPUTS": OUTPUTS, "VECTORS": 16, "INPUTS": INPUTS, "SPLITS": 4, "BLOCK": 256, "SHIFTED": True, "EACH": 1, "ELEMENT": "int", "NATIVE": False,
    "WHOLE": True,
}  # fmt: skip
PLAIN = {"zeros": None, "factor": None, "table": None}
NVFP4 = {"ELEMENT": "e2m1", "LANE": 4, "GROUP": 16, "zeros": None, "table": None}
BLOCKS = {"ELEMENT": "e4m3", "WHOLE": False, "GROUP": 128, "EACH": 128}
MANY_CODES = {"OUTPUTS": MANY, "VECTORS": MANY}
FLOAT, BYTES = r"(wgmma|mma|tcgen05)\.[\w.:]*f32\.(bf16|f16)|tcgen05\.mma[\w.:]*kind::f16", r"(wgmma|mma)\.[\w.]*s32\.s8|kind::i8"
SMALL_FLOAT = r"(wgmma|mma)\.[\w.]*f32\.e4m3|kind::f8f6f4"


def product(constants, types=None, *, targets=(80, 90), multiplies: str | None = FLOAT):
    return triton_linear._multiply, PLAIN | constants, types or {}, targets, multiplies


def codes(constants, *, targets=(80, 90), multiplies=BYTES):
    return triton_linear._multiply_codes, {"GROUP": 4096} | constants, {"x": "*i8"}, targets, multiplies


# A kernel, its constants, the types that differ, devices by compute capability, and the instruction that multiplies.
KERNELS = {
    "int4": product({"LANE": 4, "GROUP": 64, "zeros": "*i8"}, targets=(80, 90, 100)),
    "int4 in parts, symmetric": product({"LANE": 4, "GROUP": 32, "bias": None}, {"out": "*fp32"}, targets=(80,)),
    "int8 float16": product({"LANE": 8, "GROUP": 576}, {"x": "*fp16", "out": "*fp16", "bias": "*fp16"}, targets=(90,)),
    "int2 float32": product({"LANE": 2, "GROUP": 16}, {"x": "*fp32", "out": "*fp32", "bias": "*fp32"}, multiplies=None),
    "nvfp4": product(NVFP4 | {"factor": "*fp32"}, {"scales": "*i8"}, targets=(80, 90, 100)),
    "nf4": product({"ELEMENT": "nf4", "LANE": 4, "GROUP": 64, "table": "*fp32"}, {"scales": "*fp32"}),
    "fp8 by block": product({"ELEMENT": "e4m3", "LANE": 8, "GROUP": 128, "EACH": 128}),
    "e5m2": product({"ELEMENT": "e5m2", "LANE": 8, "GROUP": 4096, "EACH": 4096}, targets=(100,)),
    "parts": (triton_linear._add_parts, {"x_scales": None, "scales": None}, {}, (80,), None),
    "parts of codes": (triton_linear._add_parts, {"EACH": 4096}, {"parts": "*i32"}, (90,), None),
    "whole": (triton_linear._multiply_out, PLAIN | {"LANE": 4, "GROUP": 64, "zeros": "*i8"}, {}, (80, 90), None),
    "whole nvfp4": (triton_linear._multiply_out, NVFP4 | {"factor": "*fp32"}, {"scales": "*i8"}, (100,), None),
    "int8 codes": codes({}, targets=(80, 90, 100)),
    "int8 codes in parts": codes({"x_scales": None, "bias": None}, targets=(80,)),
    "many int8 codes": codes(MANY_CODES),
    "fp8 codes on a device without": codes(BLOCKS, targets=(80,), multiplies=FLOAT),
    "fp8 codes": codes(BLOCKS | {"NATIVE": True}, targets=(89,), multiplies=SMALL_FLOAT),
    "fp8 codes, few of which later devices make float16": codes(BLOCKS | {"NATIVE": True}, targets=(90, 100), multiplies=FLOAT),
    "many fp8 codes": codes(MANY_CODES | BLOCKS | {"NATIVE": True}, targets=(90, 100), multiplies=SMALL_FLOAT),
    "rounding to int8": (triton_inputs._round, {"fixed": None, "SPREAD": 127.5, "HALF": 128}, {}, (80, 90), None),
    "rounding to fp8": (triton_inputs._round, {"SPREAD": 448.0, "HALF": 0}, {}, (80,), None),
    "norm": (triton_norm._rms_norm, {}, {}, (80, 90), None),
}


@pytest.mark.parametrize(("name", "target"), [(name, target) for name, kernel in KERNELS.items() for target in kernel[3]])
def test_kernels_compile_to_machine_code_for_devices_that_are_not_here(name, target, compiled):
    kernel, constants, types, _, multiplies = KERNELS[name]
    given = {each for each, value in constants.items() if isinstance(value, str) and value.startswith("*")}  # tensors that others lack
    constants = {each: CONSTANTS[each] for each in kernel.arg_names if each in CONSTANTS} | constants
    constants = {each: value for each, value in constants.items() if each in kernel.arg_names and each not in given}
    found = compiled(kernel, target, constants, TENSORS | types)
    if multiplies:
        assert re.search(multiplies, found.asm["ptx"]), "no tensor core multiplies"
    # Where a row begins is found in 64 bits: a pointer to one element, or to a row or column of them, is moved by no 32-bit number.
    moved = re.findall(r"tt\.addptr .* : (?:tensor<)?([\dx]*)!tt\.ptr<\w+>>?, (?:tensor<[\dx]*)?(i\d\d)", found.asm["ttir"])
    begins = [bits for shape, bits in moved if shape == "" or "1" in shape.split("x")]
    assert begins and set(begins) == {"i64"}


def quantized(rows, cols, format) -> Matrix:
    return Matrix(quantize(torch.randn(rows, cols, generator=torch.Generator().manual_seed(0)), format), torch.ones(rows))


@pytest.mark.parametrize(
    ("format", "lane", "form"),
    [
        (Format("int", 2, 16, symmetric=False), 2, "int2 triton"), (Format("int", 3, 16), 4, "int4 triton from int3"), (Format("int", 4, 16), 4, "int4 triton"),
        (Format("int", 5, 16), 8, "int8 triton from int5"), (Format("int", 8, 16, symmetric=False), 8, "int8 triton"),
        (Format("ternary", 2, -1), 2, "int2 triton from ternary"),
    ],
)  # fmt: skip
def test_integers_lie_in_the_narrowest_lanes_that_hold_them(format, lane, form):
    matrix = quantized(6, 64, format)
    held = hold(matrix, torch.bfloat16, CPU)
    assert isinstance(held, Lanes) and (held.form, held.lane, held.shape) == (form, lane, (6, 64))
    assert held.words.nbytes == 6 * 64 * lane // 8
    assert held.words.equal(pack(matrix.weight.codes, bits=lane)) and held.scales.equal(matrix.weight.shared.scales)
    assert held.bias is not None and held.bias.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("format", "form", "bits"),
    [
        (Format("e2m1", 4, 32, scale="e8m0"), "mxfp4 triton", 4 + 16 / 32), (Format("e2m1", 4, 16, scale="e4m3"), "nvfp4 triton", 4 + 8 / 16),
        (Format("nf4", 4, 64, scale="float32"), "nf4 triton", 4 + 32 / 64), (Format("nf4", 4, 64, scale="float32", nested=True), "nf4 triton", 4 + 32 / 64),
        (Format("e4m3", 8, 128, 64), "fp8_e4m3 triton", 8 + 16 / 128 / 64), (Format("e5m2", 8, 0), "fp8_e5m2 triton", 8 + 16 / 128 / 64),
        (Format("e4m3", 8, 32, scale="e8m0"), "mxfp8 triton", 8 + 16 / 32),
    ],
)  # fmt: skip
def test_small_floats_and_tables_are_read_in_no_more_bytes_than_these(format, form, bits):
    held = hold(quantized(64, 128, format), torch.bfloat16, CPU)
    assert isinstance(held, Lanes) and held.form == form
    assert held.words.nbytes + held.scales.nbytes == 64 * 128 * bits / 8


def test_words_worked_by_hand():
    codes = torch.tensor([[-8, -7, -6, -1, 0, 1, 6, 7]], dtype=torch.int8)
    matrix = Matrix(quantize(torch.ones(1, 8), Format("int", 4, 8))._replace(codes=codes))
    assert [word & 0xFFFFFFFF for word in hold(matrix, torch.float32, CPU).words[0].tolist()] == [0xFE987210]
    matrix = Matrix(quantize(torch.ones(1, 8), Format("nf4", 4, 8))._replace(codes=torch.arange(8, 16, dtype=torch.int8).view(1, 8)))
    assert [word & 0xFFFFFFFF for word in hold(matrix, torch.float32, CPU).words[0].tolist()] == [0xFEDCBA98]
    matrix = Matrix(quantize(torch.ones(1, 4), Format("e4m3", 8, -1))._replace(codes=torch.tensor([[1, -2, 3, -128]], dtype=torch.int8)))
    assert [word & 0xFFFFFFFF for word in hold(matrix, torch.float32, CPU).words[0].tolist()] == [0x8003FE01]


def test_a_dense_matrix_stays_one():
    matrix = Matrix(torch.randn(3, 5))
    held = hold(matrix, torch.bfloat16, CPU)
    assert isinstance(held, Matrix) and held.form == "bfloat16" and held.weight.equal(matrix.dense(torch.bfloat16))


@given(rows=st.integers(1, 10**6), cols=st.integers(1, 10**6), processors=st.integers(1, 200))
def test_parts_are_no_more_than_keep_the_device_busy_and_none_is_small(rows, cols, processors):
    parts = split(rows, cols, processors)
    assert parts >= 1
    assert parts == 1 or cols / parts >= 2 * INPUTS
    assert parts == 1 or (parts - 1) * rows / OUTPUTS < PROGRAMS * processors  # one part less would be too few programs
