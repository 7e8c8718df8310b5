"""The Hadamard kernel on a machine without a GPU: interpreted (``triton_hadamard_cases.py``), and compiled to machine code that nothing here can run."""

import re

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is for Linux on x86-64, or comes with torch for CUDA")

from assay.kernels import triton_hadamard  # noqa: E402


def test_interpreted_the_kernel_computes_what_the_op_does(run_cases):
    assert re.search(r"\d\d passed, 1 skipped", run_cases(["triton_hadamard_cases.py"], TRITON_INTERPRET="1"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the same cases run in Triton's interpreter above")
def test_compiled_the_kernel_computes_what_the_op_does(run_cases):
    assert re.search(r"\d\d passed in", run_cases(["triton_hadamard_cases.py"], TRITON_INTERPRET="0"))


NUMBERS = {"rows": "i32", "left": "i32", "right": "i32", "blocks": "i32", "scale": "fp32", "signs": "*i8", "first": "*i8", "second": "*i8"}
TILES = {
    "one factor": ("*bf16", {"TWO": False, "SIGNED": True, "LEFT": 16, "RIGHT": 64}),
    "36 x 16": ("*bf16", {"TWO": True, "SIGNED": False, "LEFT": 64, "RIGHT": 16}),
    "112 x 128": ("*fp16", {"TWO": True, "SIGNED": True, "LEFT": 128, "RIGHT": 128}),
    "64 x 64": ("*bf16", {"TWO": True, "SIGNED": True, "LEFT": 64, "RIGHT": 64}),
    "48 x 32 in float32": ("*fp32", {"TWO": True, "SIGNED": True, "LEFT": 64, "RIGHT": 32}),
}


@pytest.mark.parametrize(
    ("name", "target"), [(name, target) for name in TILES for target in (80, 90) if (name, target) != ("112 x 128", 80)]
)
def test_the_kernel_compiles_to_machine_code_for_devices_that_are_not_here(name, target, compiled):
    kind, constants = TILES[name]
    found = compiled(triton_hadamard._turn, target, constants, NUMBERS | {"x": kind, "out": kind})
    assert re.search(r"(wgmma|mma)\.[\w.]*tf32", found.asm["ptx"]), "no tensor core multiplies"
    # Where a row begins is found in 64 bits.
    moved = re.findall(r"tt\.addptr %(\w+), .* : !tt\.ptr<\w+>, (i\d\d)", found.asm["ttir"])
    assert {bits for pointer, bits in moved if pointer in ("x", "out")} == {"i64"}
