"""Running a program that a model has written, so that it can do little harm. Not here: which program that is (``ops/tasks/graders/code.py``).

Nothing is run unless ``ASSAY_RUN_GENERATED_CODE=1`` stands in the environment. A program then runs

- in a process of its own, ``python -I -S``, in its own session, in an empty directory that is removed after it, without any variable of our environment;
- within hard limits on CPU time, memory, the size of a file, open files, and wall-clock time, after which its whole process group is killed;
- as ``nobody`` where we are root, so that files of others are not its own (what a solution may want of the standard library was read before); no process and
  no thread more can be made;
- in a network namespace with no device in it, where the kernel lets us make one: as root, or by a user namespace (Linux). Where it does not, sockets are
  refused by the audit hook alone;
- under an audit hook that it cannot take off and that refuses sockets, processes, ctypes, and files opened for writing, made, moved or removed outside
  its directory.

It may still read what anyone may read here. The hook and the limits keep what a language model writes by mistake or by the way from doing harm; they are
not meant to hold somebody who attacks the interpreter itself: for that, run all of it in a container or a virtual machine.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Literal, NamedTuple

ALLOWED = "ASSAY_RUN_GENERATED_CODE"
Outcome = Literal["passed", "failed", "timeout"]


class Limits(NamedTuple):
    """Hard limits: CPU and wall-clock seconds, bytes of address space, bytes of a file."""

    cpu_seconds: int = 5
    wall_seconds: float = 10.0
    memory_bytes: int = 2**29
    file_bytes: int = 2**20


LIMITS = Limits()


class Ran(NamedTuple):
    """How a program ended: ``passed`` if it came to its end; ``told`` is the error, in a line; ``network`` is what keeps it from any."""

    outcome: Outcome
    told: str
    network: str


# What the new process does before and after the program, which comes through standard input after a word that it does not know. That word, and no exit code,
# says that it came to its end: a program that exits early has passed nothing.
LAUNCHER = r"""
import os, resource, sys

# Read while everything may be read: the library may lie where nobody but root reads it.
import ast, base64, bisect, cmath, collections, copy, dataclasses, datetime, decimal, enum, fractions, functools, hashlib, heapq, io, itertools, json, math
import numbers, operator, queue, random, re, statistics, string, textwrap, time, traceback, typing, unicodedata, zlib

cpu, memory, size = map(int, sys.argv[1:4])
word, _, source = sys.stdin.buffer.read().partition(b"\n")
said = os.dup(1)
os.set_inheritable(said, False)
nothing = os.open(os.devnull, os.O_RDWR)
for stream in (0, 1, 2):
    os.dup2(nothing, stream)
network = "audit hook"
try:
    import ctypes
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    if unshare(0x40000000) == 0 or unshare(0x40000000 | 0x10000000) == 0:
        network = "network namespace"
except (ImportError, AttributeError, OSError):
    pass
if os.getuid() == 0:
    try:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    except OSError:
        pass
for name, limit in (("CPU", cpu), ("AS", memory), ("FSIZE", size), ("NPROC", 1), ("NOFILE", 64), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
here = os.path.realpath(os.getcwd()) + os.sep
refused = ("socket.", "subprocess.", "ctypes.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.startfile", "os.kill", "pty.",
           "os.chmod", "os.chown", "os.link", "os.symlink", "os.truncate", "os.chflags", "os.setxattr", "os.removexattr", "syslog.", "resource.setrlimit",
           "resource.prlimit", "signal.pthread_kill", "_thread.start_new_thread", "sys.remote_exec")
moved = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.utime", "shutil.", "os.chdir", "tempfile.")
writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
realpath, fspath, fsdecode = os.path.realpath, os.fspath, os.fsdecode


def outside(path):
    return not (realpath(fsdecode(fspath(path))) + os.sep).startswith(here)


def hook(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        if (flags or 0) & writing and (isinstance(path, int) or outside(path)):
            raise PermissionError("a file opened for writing outside the directory of the program")
    elif event.startswith(moved):
        if any(isinstance(each, (str, bytes, os.PathLike)) and outside(each) for each in arguments):
            raise PermissionError(event + " outside the directory of the program")
    elif event.startswith(refused):
        raise PermissionError(event + " is not for generated programs")


def run():
    told = ""
    try:
        exec(compile(source, "<generated>", "exec"), {"__name__": "generated"})
    except BaseException as error:
        told = type(error).__name__ + ": " + str(error)[:200]
    return told


sys.addaudithook(hook)
told = run()
os.write(said, b"\n".join([b"" if told else word, network.encode(), told.replace("\n", " ").encode("utf-8", "replace")]))
os._exit(0)
"""


def require_allowed(environment: Mapping[str, str] | None = None) -> None:
    """Refuse unless generated code may run.

    Raises:
        PermissionError: ``ASSAY_RUN_GENERATED_CODE`` is not 1.
    """
    if (os.environ if environment is None else environment).get(ALLOWED) != "1":
        raise PermissionError(
            f"this runs programs that a model has written; they run in a process of their own, with limits and without network, but only if "
            f"{ALLOWED}=1 stands in the environment. Set it, or leave the task out"
        )


def run_program(source: str, limits: Limits = LIMITS) -> Ran:
    """Run ``source`` to its end, or until a limit or an error ends it.

    Raises:
        PermissionError: generated code may not run here.
    """
    require_allowed()
    word = secrets.token_hex(16).encode()
    with tempfile.TemporaryDirectory(prefix="generated-", ignore_cleanup_errors=True) as directory:
        os.chmod(directory, 0o777)  # noqa: PTH101
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", LAUNCHER, str(limits.cpu_seconds), str(limits.memory_bytes), str(limits.file_bytes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=directory, env={}, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(word + b"\n" + source.encode("utf-8", "replace"), timeout=limits.wall_seconds)
        except subprocess.TimeoutExpired:
            said = b""
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
    if not said:
        if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return Ran("timeout", f"it ran past {limits.cpu_seconds} s of CPU or {limits.wall_seconds:g} s", "unknown")
        return Ran("failed", f"its process ended by itself, with {process.returncode}", "unknown")
    first, network, told = said.split(b"\n", 2)
    return Ran("passed" if first == word else "failed", told.decode("utf-8", "replace"), network.decode())
