"""Cases of Triton kernels run in a process of their own, since the interpreter has to be chosen before Triton is imported; kernels compiled without a GPU."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def run_cases():
    """``run(files, TRITON_INTERPRET=…)`` runs files of cases and gives what pytest prints; all of them pass."""

    def run(files: Sequence[str], **environment: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/kernels/{file}" for file in files)]
        helpers = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": helpers} | environment
        done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        return done.stdout

    return run


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """``compile(kernel, target, constants, types)`` compiles for a device that is not here, of compute capability ``target`` / 10."""
    triton = pytest.importorskip("triton", reason="Triton is for Linux on x86-64, or comes with torch for CUDA")
    compiler = pytest.importorskip("triton.backends.compiler", reason="this Triton has no compiler for other devices")
    from triton.backends import backends
    from triton.compiler import ASTSource

    if "nvidia" not in backends or not list(Path(triton.__file__).parent.glob("backends/nvidia/bin/ptxas*")):
        pytest.skip("this Triton has no NVIDIA backend or no ptxas")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1: kernels are interpreted and cannot be compiled")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compile(kernel: Any, target: int, constants: dict[str, Any], types: dict[str, str]) -> Any:
        signature = {each: "constexpr" if each in constants else types[each] for each in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        found = triton.compile(source, target=compiler.GPUTarget("cuda", target, 32))
        assert found.asm["cubin"].startswith(b"\x7fELF")
        assert found.metadata.shared <= 160 * 1024  # bytes that a program of any of these devices may hold
        return found

    return compile
