"""The native library of ``kernels/cpu``: compiled once a source, kept, and opened. Not here: what it is handed (``native``).

``torch.utils.cpp_extension`` compiles it, with whatever compiler the machine has. It uses no header of torch, so that takes seconds. The library lies
under a name that its sources give, so that a changed source is another library, and moves there whole, so that a killed build leaves nothing behind.
"""

import ctypes
import hashlib
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from filelock import FileLock

FINGERPRINT_FILES = (
    "cpu/avx2.cpp", "cpu/avx512.cpp", "cpu/team.cpp", "cpu/decoder.h", "cpu/decoder.inl", "cpu/multiply.inl", "cpu/vector_avx2.h",
    "cpu/vector_avx512.h",
)  # fmt: skip
FLAGS = ["-O3", "-std=c++20", "-Wno-unknown-pragmas"]


@cache
def library() -> ctypes.CDLL | None:
    """The native library, or None with a warning where it cannot be built: decoding then runs in torch, and its timings say so."""
    try:
        return ctypes.CDLL(str(_built(cache_directory())))
    except Exception as error:
        warnings.warn(
            f"no native decoder: {type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}. Decoding runs in torch, several times slower; "
            "a C++20 compiler (g++ 11 or newer) makes it faster",
            stacklevel=2,
        )
        return None


def cache_directory() -> Path:
    """Where built libraries lie: of the user, or of this boot where there is no home that can be written."""
    home = Path.home() / ".cache" / "assay" / "kernels"
    try:
        home.mkdir(parents=True, exist_ok=True)
        if os.access(home, os.W_OK):
            return home
    except OSError:
        pass
    return Path(tempfile.gettempdir()) / f"assay-kernels-{os.getuid()}"


def digest() -> str:
    """Of all that the library is made from."""
    here = Path(__file__).parent
    found = hashlib.sha256(repr((FLAGS, torch.__version__)).encode())
    for name in FINGERPRINT_FILES:
        found.update((here / name).read_bytes())
    return found.hexdigest()[:16]


@contextmanager
def _beside_python_on_the_path() -> Iterator[None]:
    """ninja comes as a package, so it lies beside the Python that runs this, which need not be on the path."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{before}"
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _built(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to another user, whose libraries are not loaded")
    name = f"decoder_{digest()}"
    target = directory / f"{name}.so"
    with FileLock(directory / f"{name}.lock"):  # released by the system when its owner dies
        if not target.is_file():
            from torch.utils.cpp_extension import load

            with tempfile.TemporaryDirectory(dir=directory) as build, _beside_python_on_the_path():
                sources = [str(Path(__file__).parent / source) for source in FINGERPRINT_FILES if source.endswith(".cpp")]
                load(name, sources, extra_cflags=FLAGS, build_directory=build, is_python_module=False, verbose=False)
                next(Path(build).glob("*.so")).replace(target)  # a second build in one process gets a suffix to its name
    return target
