"""Which machine this is, told without importing torch. Not here: timing anything on it (``ops/evaluate/timing.py``)."""

import platform
import shutil
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

import psutil

from assay.schemas.facts import DeviceRow
from assay.schemas.spec import digest_of


@cache
def device_row() -> DeviceRow:
    """This machine: its first visible GPU where torch is built for one, else its processor."""
    torch_version = version("torch")
    common = {"cores": psutil.cpu_count() or 1, "memory_bytes": psutil.virtual_memory().total, "torch_version": torch_version}
    gpu = None if torch_version.endswith("+cpu") else _gpu()
    fields = (
        {"kind": "cuda", "name": gpu[0], "driver": gpu[1], **common}
        if gpu
        else {"kind": "cpu", "name": _processor(), "driver": None, **common}
    )
    # Memory is told in the row but not in the identity: it differs by a page from one start of a machine to the next.
    return DeviceRow(device_digest=digest_of({key: value for key, value in fields.items() if key != "memory_bytes"}), **fields)


def device_digest() -> str:
    return device_row().device_digest


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _gpu() -> tuple[str, str] | None:
    """Name and driver of the first GPU, from nvidia-smi; None without one."""
    if not shutil.which("nvidia-smi"):
        return None
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    name, _, driver = answer.stdout.partition("\n")[0].partition(",")
    return (name.strip(), driver.strip()) if answer.returncode == 0 and name.strip() else None
