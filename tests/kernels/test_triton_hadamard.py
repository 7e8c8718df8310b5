"""The Hadamard kernel on a machine without a GPU: interpreted (``triton_hadamard_cases.py``), and compiled to machine code that nothing here can run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is for Linux on x86-64, or comes with torch for CUDA")

from assay.kernels import triton_hadamard  # noqa: E402

ROOT = Path(__file__).parents[2]


def run_cases(**environment: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/triton_hadamard_cases.py"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_interpreted_the_kernel_computes_what_the_op_does():
    assert re.search(r"\d\d passed, 1 skipped", run_cases(TRITON_INTERPRET="1"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the same cases run in Triton's interpreter above")
def test_compiled_the_kernel_computes_what_the_op_does():
    assert re.search(r"\d\d passed in", run_cases(TRITON_INTERPRET="0"))


NUMBERS = {"rows": "i32", "left": "i32", "right": "i32", "blocks": "i32", "scale": "fp32", "signs": "*i8", "first": "*i8", "second": "*i8"}
TILES = {
    "one factor": ("*bf16", {"TWO": False, "SIGNED": True, "LEFT": 16, "RIGHT": 64}),
    "36 x 16": ("*bf16", {"TWO": True, "SIGNED": False, "LEFT": 64, "RIGHT": 16}),
    "112 x 128": ("*fp16", {"TWO": True, "SIGNED": True, "LEFT": 128, "RIGHT": 128}),
    "64 x 64": ("*bf16", {"TWO": True, "SIGNED": True, "LEFT": 64, "RIGHT": 64}),
    "48 x 32 in float32": ("*fp32", {"TWO": True, "SIGNED": True, "LEFT": 64, "RIGHT": 32}),
}


@pytest.mark.parametrize("target", [80, 90])
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name == "112 x 128" else name for name in TILES])
def test_the_kernel_compiles_to_machine_code_for_devices_that_are_not_here(name, target, tmp_path, monkeypatch):
    compiler = pytest.importorskip("triton.backends.compiler", reason="this Triton has no compiler for other devices")
    from triton.backends import backends
    from triton.compiler import ASTSource

    if "nvidia" not in backends or not list(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas*")):
        pytest.skip("this Triton has no NVIDIA backend or no ptxas")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1: kernels are interpreted and cannot be compiled")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kind, constants = TILES[name]
    kernel = triton_hadamard._turn
    types = NUMBERS | {"x": kind, "out": kind}
    signature = {each: "constexpr" if each in constants else types[each] for each in kernel.arg_names}
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants), target=compiler.GPUTarget("cuda", target, 32)
    )
    assert compiled.asm["cubin"].startswith(b"\x7fELF")
    assert compiled.metadata.shared <= 160 * 1024  # bytes that a program of either device may hold
    assert re.search(r"(wgmma|mma)\.[\w.]*tf32", compiled.asm["ptx"]), "no tensor core multiplies"
    # Where a row begins is found in 64 bits.
    moved = re.findall(r"tt\.addptr %(\w+), .* : !tt\.ptr<\w+>, (i\d\d)", compiled.asm["ttir"])
    assert {bits for pointer, bits in moved if pointer in ("x", "out")} == {"i64"}
