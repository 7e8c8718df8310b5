"""Locks that die with their owner. Not here: what they guard (``store.py``).

The kernel drops an advisory lock (flock) when the last descriptor of it closes, so a killed process leaves nothing that a person has
to clean: at most an empty file, which the next holder takes over. filelock retries when the file that it locked has been unlinked
meanwhile, so a holder may remove its own file; it also closes inherited descriptors in forked children, so a lock dies with the
process that took it and not with the last worker that it forked.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)


@contextmanager
def hold(path: Path, *, timeout: float | None = None, waiting_for: str = "") -> Iterator[None]:
    """Hold the lock file ``path``; wait for another holder, for at most ``timeout`` seconds (``None``: as long as it takes).

    Args:
        waiting_for: what the other holder is doing, for the log line of a wait.
    Raises:
        TimeoutError: still held by another after ``timeout`` seconds.
        RuntimeError: this thread holds it already.
    """
    lock = _lock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("waiting for %s", waiting_for or path)
        try:
            lock.acquire(timeout=-1 if timeout is None else timeout)
        except Timeout:
            raise TimeoutError(f"{waiting_for or path} was still held by another process after {timeout} s") from None
    try:
        yield
    finally:
        _release(lock, path)


@contextmanager
def try_hold(path: Path) -> Iterator[bool]:
    """Yield True while holding the lock file ``path``, or False at once when another holds it."""
    lock = _lock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        _release(lock, path)


def _lock(path: Path) -> FileLock:
    # A "soft" lock, filelock's fallback where flock is missing, would outlive its owner: better an error that names the file system.
    return FileLock(path, fallback_to_soft=False)


def _release(lock: FileLock, path: Path) -> None:
    path.unlink(missing_ok=True)  # while it is ours: whoever opened this file before finds it unlinked and opens a new one
    lock.release()
