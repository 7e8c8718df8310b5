"""What surrounds every step that Dagster runs: which faults are tried again, the GPU lease, quiet for timings. Not here: what a step does."""

import errno
import fcntl
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import dagster as dg
from filelock import FileLock, Timeout

from assay.schemas.experiment import Resources

interrupted = threading.Event()  # a person wants this process to stop: no further step begins
NOT_BEGUN = "not begun: the run was interrupted"


class _Retry(dg.RetryPolicy):
    """Of a Ctrl-C that meets the code around :func:`step` Dagster asks the policy too, and tries again: that try is told to begin nothing."""

    def calculate_delay(self, attempt_num: int) -> float:
        error = sys.exception()
        if error is not None and not isinstance(error, Exception):
            interrupted.set()
            return 0
        return super().calculate_delay(attempt_num)


RETRY = _Retry(max_retries=2, delay=5, backoff=dg.Backoff.EXPONENTIAL)
_PASSING = {errno.EIO, errno.EAGAIN, errno.ESTALE, errno.ENETDOWN, errno.ENETUNREACH, errno.ECONNRESET, errno.ETIMEDOUT, errno.EBUSY}


def is_passing(error: BaseException) -> bool:
    """Whether ``error`` is a fault of the infrastructure that another try may not meet: network, storage, a full GPU. Bad input is not."""
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    if isinstance(error, OSError):
        return error.errno in _PASSING
    return type(error).__name__ == "OutOfMemoryError" or "CUDA error" in str(error)


@contextmanager
def step(home: Path, resources: Resources, *, timing: bool = False) -> Iterator[None]:
    """Run a step: hold what it needs, and say of an error whether it is worth another try."""
    if interrupted.is_set():
        raise dg.Failure(description=NOT_BEGUN, allow_retries=False)
    os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' own bars: a log is no terminal, and a terminal has ours
    try:
        with ExitStack() as held:
            held.enter_context(_quiet(home / "locks" / "timing.lock", alone=timing))
            if resources.gpu:
                held.enter_context(_lease(home / "locks", resources.gpu))
            yield
    except (dg.Failure, GeneratorExit):
        raise
    except Exception as error:
        if is_passing(error):
            raise
        told = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
        raise dg.Failure(description=told, allow_retries=False) from error
    except BaseException as error:  # Ctrl-C: Dagster would try the step again, and go on with the next one
        interrupted.set()
        raise dg.Failure(description="interrupted", allow_retries=False) from error


@contextmanager
def _quiet(lock: Path, *, alone: bool) -> Iterator[None]:
    """Timings run alone: they hold exclusively what every other step holds together with its like. Dies with the process."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@contextmanager
def _lease(locks: Path, count: int) -> Iterator[None]:
    """``count`` GPUs that no other process of ours uses; a killed holder frees them.

    Raises:
        RuntimeError: the machine has fewer.
        TimeoutError: all are in use; Dagster tries the step again.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = (
        [d for d in visible.split(",") if d]
        if visible is not None
        else [f.name.removeprefix("nvidia") for f in Path("/dev").glob("nvidia[0-9]*")]
    )
    if len(devices) < count:
        raise RuntimeError(
            f"this step needs {count} GPU(s) and the machine shows {len(devices)}; run it where there are, or set resources: {{gpu: 0}}"
        )
    with ExitStack() as held:
        leased: list[str] = []
        for device in sorted(devices):
            try:
                held.enter_context(FileLock(locks / f"gpu{device}.lock", timeout=0))
            except Timeout:
                continue
            leased.append(device)
            if len(leased) == count:
                break
        if len(leased) < count:
            raise TimeoutError(f"{count} GPU(s) are needed and {len(leased)} of {len(devices)} are free")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(leased)
        try:
            yield
        finally:
            os.environ.pop("CUDA_VISIBLE_DEVICES") if visible is None else os.environ.__setitem__("CUDA_VISIBLE_DEVICES", visible)
