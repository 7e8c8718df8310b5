"""What a device does when it does one thing: reads, copies, multiplies, starts. Not here: what a model should take on it (``roofline.py``).

The medians of a few repeats within a budget of seconds; each row says how far they spread and how much of the CPU others took.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from assay.ops.evaluate.timing import Times, cpu_usage, other_share, synchronise

MIB = 2**20
SIZES = (1 * MIB, 8 * MIB, 64 * MIB, 256 * MIB, 512 * MIB)  # bytes that one call reads
SQUARES = (512, 1536)
SQUARES_ON_GPU = (4096, 8192)
SKINNY = (1, 4096, 4096)  # a decode step: one row against a matrix
DTYPES = ("float32", "bfloat16", "int8")
SECONDS_EACH = 0.4  # that the repeats of one constant may take
REPEATS = (3, 50)  # at least and at most


class Constant(NamedTuple):
    """One measured number; the columns of the table ``device_constant``."""

    constant: str
    dtype: str
    size: str
    amount: float
    value: float
    unit: str
    spread: float | None
    other_cpu_share: float | None
    status: str


def measure_device(
    *, device: str = "cpu", sizes: Sequence[int] = SIZES, squares: Sequence[int] | None = None, seconds_each: float = SECONDS_EACH
) -> list[Constant]:
    """All constants of ``device`` with torch's present number of threads: about 16 measurements of ``seconds_each``.

    Reading is a sum over the bytes, whose arithmetic is too little to wait for; copying counts what is read and what is written. A product of 8-bit
    integers is measured where torch has it.
    """
    squares = squares or (SQUARES_ON_GPU if device.startswith("cuda") else SQUARES)
    return list(_measured(device, sizes, squares, seconds_each))


def _measured(device: str, sizes: Sequence[int], squares: Sequence[int], seconds: float) -> Iterator[Constant]:
    one = torch.zeros(1, device=device)
    yield _row("launch_overhead", "float32", "1", 1.0, "s", lambda: one.add_(1), seconds)
    for size in sizes:
        numbers = torch.ones(size // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(numbers)
        label = f"{size / MIB:g} MiB"
        yield _row("read_bandwidth", "float32", label, float(size), "B/s", numbers.sum, seconds)
        yield _row("copy_bandwidth", "float32", label, 2.0 * size, "B/s", lambda a=target, b=numbers: a.copy_(b), seconds)
        del numbers, target
    shapes = [(square, square, square) for square in squares] + [SKINNY]
    for dtype in DTYPES:
        for rows, columns, depth in shapes:
            multiply = _product(dtype, rows, columns, depth, device)
            if multiply is not None:
                yield _row("matmul_rate", dtype, f"{rows}x{columns}x{depth}", 2.0 * rows * columns * depth, "FLOP/s", multiply, seconds)


def _product(dtype: str, rows: int, columns: int, depth: int, device: str) -> Callable[[], Any] | None:
    """A product of these sizes in ``dtype``; None where torch has none on this device."""
    kind = getattr(torch, dtype)
    if kind.is_floating_point:
        left, right = torch.randn(rows, depth, device=device).to(kind), torch.randn(columns, depth, device=device).to(kind).T
        return lambda: left @ right
    multiply: Any = getattr(torch, "_int_mm", None)
    left = torch.randint(-8, 8, (rows, depth), dtype=kind, device=device)
    right = torch.randint(-8, 8, (columns, depth), dtype=kind, device=device).T
    try:
        multiply(left, right)
    except (RuntimeError, TypeError):  # no such product of these sizes here, or none at all
        return None
    return lambda: multiply(left, right)


def _row(constant: str, dtype: str, size: str, amount: float, unit: str, fn: Callable[[], Any], seconds: float) -> Constant:
    times = repeat(fn, seconds=seconds)
    value = times.median if unit == "s" else amount / times.median
    spread = None if times.spread is None else times.spread * value / times.median
    return Constant(constant, dtype, size, amount, value, unit, spread, times.other_cpu_share, times.status)


def repeat(
    fn: Callable[[], Any], *, seconds: float, repeats: tuple[int, int] = REPEATS, clock: Callable[[], float] = time.perf_counter
) -> Times:
    """The times of calls of ``fn`` after one that does not count, as many as go into ``seconds`` within ``repeats``.

    A call too short for the clock is timed by the hundred.
    """
    fn()
    synchronise()
    begun = clock()
    fn()
    synchronise()
    bundle = 100 if clock() - begun < 1e-4 else 1
    taken: list[float] = []
    before, end = cpu_usage(), clock() + seconds
    while len(taken) < repeats[0] or (clock() < end and len(taken) < repeats[1]):
        begun = clock()
        for _ in range(bundle):
            fn()
        synchronise()
        taken.append((clock() - begun) / bundle)
    after = cpu_usage()
    share = None if before is None or after is None else other_share([(after[0] - before[0], after[1] - before[1])])
    return Times(tuple(taken), share)
