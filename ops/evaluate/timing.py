"""Taking times that can be trusted: warm-up, medians, interleaving, and how much of the CPU others took meanwhile. Not here: what is timed."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

NOISY_SHARE = 0.08  # of the CPU taken by others: above it a timing is not to be ranked


class Times(NamedTuple):
    """Seconds of the repeats in the order they ran; ``other_cpu_share`` is 0 to 1 over all of them, None where the system does not tell."""

    seconds: tuple[float, ...]
    other_cpu_share: float | None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float | None:
        """Standard error of the median by the normal approximation: 1.2533 · sd / √n; None for one repeat."""
        return 1.2533 * statistics.stdev(self.seconds) / len(self.seconds) ** 0.5 if len(self.seconds) > 1 else None

    @property
    def status(self) -> str:
        """``noisy`` where others took more than ``NOISY_SHARE`` of the CPU."""
        return "noisy" if self.other_cpu_share is not None and self.other_cpu_share > NOISY_SHARE else "ok"


def measure_times(
    fn: Callable[[], float | None], *, repeats: int, warmup: int = 1, clock: Callable[[], float] = time.perf_counter
) -> Times:
    """Times of ``fn``, after ``warmup`` calls that do not count. See :func:`interleave_times`."""
    return interleave_times({"": fn}, repeats=repeats, warmup=warmup, clock=clock)[""]


def interleave_times(
    fns: Mapping[str, Callable[[], float | None]], *, repeats: int, warmup: int = 1, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Times]:
    """Times of several functions that take turns, so that a disturbance meets all of them; only such times may be divided by each other.

    Args:
        fns: each returns None and is timed as a whole, or returns the seconds of the part that counts.
        repeats: calls of each that count, after ``warmup`` that do not.
    Raises:
        ValueError: ``repeats`` is below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} measures nothing; expected 1 or more")
    for _ in range(warmup):
        for fn in fns.values():
            fn()
    taken: dict[str, list[float]] = {name: [] for name in fns}
    usage: dict[str, list[tuple[float, float]]] = {name: [] for name in fns}
    for _ in range(repeats):
        for name, fn in fns.items():
            synchronise()
            before, begin = cpu_usage(), clock()
            stated = fn()
            synchronise()
            wall, after = clock() - begin, cpu_usage()
            taken[name].append(wall if stated is None else stated)
            if before is not None and after is not None:
                usage[name].append((after[0] - before[0], after[1] - before[1]))
    return {name: Times(tuple(taken[name]), other_share(usage[name])) for name in fns}


def cpu_usage() -> tuple[float, float] | None:
    """(seconds that all processes but this one have used, seconds that all CPUs have had), or None where the system does not tell.

    Time stolen by the host of a virtual machine counts as used by others.
    """
    try:
        times = psutil.cpu_times()
    except (OSError, RuntimeError, AttributeError):
        return None
    total = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"))
    busy = total - times.idle - getattr(times, "iowait", 0.0)
    return busy - time.process_time(), total


def other_share(usage: list[tuple[float, float]]) -> float | None:
    """Share of the CPU time that others used, over differences of :func:`cpu_usage`; between 0 and 1.

    The system counts in ticks of 10 ms, so that little can be said of a span below a tenth of a second.
    """
    total = sum(span for _, span in usage)
    return min(max(sum(used for used, _ in usage) / total, 0.0), 1.0) if total > 0 else None


def synchronise() -> None:
    """Wait until the GPU has done what it was given, if there is one in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def device_row_fields() -> dict[str, Any]:
    """What identifies the device that computes: kind, name, cores, memory_bytes, torch_version, driver."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return {
            "kind": "cuda", "name": properties.name, "cores": properties.multi_processor_count, "memory_bytes": properties.total_memory,
            "torch_version": torch.__version__, "driver": torch.version.cuda,
        }  # fmt: skip
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "kind": "cpu", "name": _cpu_name(), "cores": cores, "memory_bytes": psutil.virtual_memory().total,
        "torch_version": torch.__version__, "driver": None,
    }  # fmt: skip


def reset_peak_rss() -> bool:
    """Forget the highest resident size of this process so far; False where the system cannot (the peak is then that of its whole life)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_rss_bytes() -> int:
    """The highest resident size of this process, in bytes, since :func:`reset_peak_rss`."""
    try:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if platform.system() == "Darwin" else 1024)


def _cpu_name() -> str:
    try:
        line = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
        return line.partition(":")[2].strip()
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
