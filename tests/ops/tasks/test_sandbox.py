"""What a generated program can do, and what it cannot: each harm is tried."""

import contextlib
import os
import socket
import threading
import time

import pytest

from assay.ops.tasks.sandbox import Limits, require_allowed, run_program


@pytest.fixture(autouse=True)
def allowed(monkeypatch):
    monkeypatch.setenv("ASSAY_RUN_GENERATED_CODE", "1")
    monkeypatch.setenv("A_SECRET", "swordfish")


def test_nothing_runs_unless_it_is_allowed(monkeypatch, tmp_path):
    for value in (None, "", "0", "yes"):
        monkeypatch.delenv("ASSAY_RUN_GENERATED_CODE", raising=False)
        if value is not None:
            monkeypatch.setenv("ASSAY_RUN_GENERATED_CODE", value)
        with pytest.raises(PermissionError, match="only if ASSAY_RUN_GENERATED_CODE=1 stands"):
            run_program("pass")
    require_allowed({"ASSAY_RUN_GENERATED_CODE": "1"})


def test_a_right_program_passes_with_the_library_that_solutions_use():
    ran = run_program(
        "import math, re, typing, hashlib, random, collections, itertools, fractions, datetime, json, string, copy\n"
        "assert __name__ == 'generated'\nopen('note', 'w').write('mine')\nassert open('note').read() == 'mine'\nprint('hello')\n"
    )
    assert ran.outcome == "passed" and not ran.told
    assert ran.network in ("network namespace", "audit hook")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("assert 1 + 1 == 3", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("import os\nos._exit(0)", "ended by itself, with 0"),
        ("import os\nos.abort()", "ended by itself"),
        ("def f(): f()\nf()", "RecursionError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("print('passed')\nraise ValueError('no')", "ValueError: no"),
    ],
)
def test_a_program_that_does_not_come_to_its_end_has_not_passed(source, told):
    ran = run_program(source)
    assert ran.outcome == "failed" and told in ran.told


@pytest.mark.parametrize(
    ("source", "limits"),
    [
        ("while True: pass", Limits(cpu_seconds=1, wall_seconds=30)),
        ("import time\ntime.sleep(60)", Limits(wall_seconds=1.5)),
        ("import time\ntry:\n    time.sleep(60)\nexcept BaseException:\n    time.sleep(60)", Limits(wall_seconds=1.5)),
    ],
)
def test_an_endless_program_is_ended(source, limits):
    begun = time.monotonic()
    assert run_program(source, limits).outcome == "timeout"
    assert time.monotonic() - begun < 25


def test_memory_is_limited():
    ran = run_program("held = bytearray(3 * 2**30)\nheld[-1] = 1")
    assert ran.outcome == "failed" and "MemoryError" in ran.told
    assert run_program("held = bytearray(2**26)").outcome == "passed"


def test_nothing_is_written_outside_its_directory(tmp_path):
    tmp_path.chmod(0o777)
    victim = tmp_path / "victim"
    victim.write_text("whole")
    victim.chmod(0o666)
    new = tmp_path / "new"
    for source in (
        f"open({str(new)!r}, 'w').write('x')",
        f"open({str(victim)!r}, 'a').write('x')",
        f"import os\nos.open({str(new)!r}, os.O_CREAT | os.O_WRONLY)",
        f"import os\nos.remove({str(victim)!r})",
        f"import os\nos.rename({str(victim)!r}, 'mine')",
        f"import os\nos.mkdir({str(new)!r})",
        f"import os\nos.symlink({str(victim)!r}, 'link')\nopen('link', 'w')",
        f"import os\nos.truncate({str(victim)!r}, 0)",
        f"import os\nos.chmod({str(victim)!r}, 0)",
        f"import pathlib\npathlib.Path({str(new)!r}).touch()",
    ):
        ran = run_program(source)
        assert ran.outcome == "failed", source
        assert not new.exists() and victim.read_text() == "whole", source


def test_a_large_file_is_not_written():
    ran = run_program("f = open('big', 'wb')\nf.write(bytes(8 * 2**20))\nf.flush()")
    assert ran.outcome == "failed"


def test_no_connection_reaches_a_listening_socket():
    reached = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(3)

        def listen():
            with contextlib.suppress(OSError):
                reached.append(server.accept())

        thread = threading.Thread(target=listen)
        thread.start()
        port = server.getsockname()[1]
        for source in (
            f"import socket\nsocket.create_connection(('127.0.0.1', {port}))",
            f"import _socket\n_socket.socket(2, 1).connect(('127.0.0.1', {port}))",
        ):
            assert run_program(source).outcome == "failed"
        thread.join()
    assert not reached


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.fork()",
        "import posix\nposix.fork()",
        "import subprocess\nsubprocess.run(['true'], check=True)",
        "import os\nassert os.system('true') == 0",
        "import os\nos.execv('/bin/true', ['true'])",
        "import ctypes\nctypes.CDLL(None).fork()",
        "import multiprocessing\nmultiprocessing.Process(target=print).start()",
        "import os\nos.kill(os.getppid(), 0)",
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (100, 100))",
        "import threading\nthreading.Thread(target=print).start()",
    ],
)
def test_no_process_is_started_and_no_limit_lifted(source):
    assert run_program(source).outcome == "failed"


def test_our_environment_is_not_seen():
    assert run_program("import os\nassert 'A_SECRET' not in os.environ and 'HOME' not in os.environ").outcome == "passed"
    assert os.environ["A_SECRET"] == "swordfish"
