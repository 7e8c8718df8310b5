"""Several processes, and processes that are killed: one computation, nothing half, no lock to clean by hand."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from assay.schemas.manifest import Action
from assay.warehouse.locks import hold, try_hold
from assay.warehouse.store import Store

ACTION = Action(step={"kind": "quantize"}, code="c" * 64)

BUILD = """
import sys, time
from pathlib import Path
from assay.schemas.manifest import Action
from assay.warehouse.store import Store
root, log, seconds = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
def build(directory):
    with log.open("a") as file: file.write("started\\n")
    (directory / "a.json").write_text("half")
    time.sleep(seconds)
    (directory / "a.json").write_text("whole")
    return {}
built = Store(root).get_or_build(Action(step={"kind": "quantize"}, code="c" * 64), build, kind="checkpoint")
print(built.cached, built.digest)
"""


def start(code: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def wait_for(log: Path, text: str, count: int = 1) -> None:
    deadline = time.monotonic() + 30
    while not log.exists() or log.read_text().count(text) < count:
        assert time.monotonic() < deadline, f"{text!r} did not appear in {log}"
        time.sleep(0.01)


def work_in_progress(store: Store) -> list[Path]:
    return list((store.root / "tmp").iterdir())


def test_processes_that_ask_for_one_key_compute_it_once(tmp_path):
    children = [start(BUILD, tmp_path / "store", tmp_path / "log", 0.6) for _ in range(4)]
    answers = [child.communicate(timeout=60)[0].split() for child in children]
    assert sorted(cached for cached, _ in answers) == ["False", "True", "True", "True"]
    assert len({digest for _, digest in answers}) == 1
    assert (tmp_path / "log").read_text() == "started\n"


def test_after_a_killed_build_the_next_one_starts_at_once_and_finds_nothing_of_it(tmp_path):
    store = Store(tmp_path / "store")
    child = start(BUILD, store.root, tmp_path / "log", 600)
    wait_for(tmp_path / "log", "started")
    assert len(work_in_progress(store)) == 2  # the directory and its lock
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert store.artifacts() == [] and list(store.actions()) == []
    started = time.monotonic()
    built = store.get_or_build(ACTION, lambda directory: {"n": (directory / "a.json").write_text("whole")}, kind="checkpoint")
    assert time.monotonic() - started < 1 and not built.cached
    assert work_in_progress(store) == [] and (built.path / "a.json").read_text() == "whole"


def test_opening_a_store_removes_the_work_of_dead_processes_and_not_of_live_ones(tmp_path):
    store = Store(tmp_path / "store")
    live = start(BUILD, store.root, tmp_path / "live", 600)
    wait_for(tmp_path / "live", "started")
    lives = set(work_in_progress(store))
    dead = start(BUILD.replace('"c" * 64', '"d" * 64'), store.root, tmp_path / "dead", 600)
    wait_for(tmp_path / "dead", "started")
    dead.kill()
    dead.wait()
    (store.root / "tmp" / "orphan").mkdir()
    assert len(work_in_progress(store)) == 5
    try:
        assert set(work_in_progress(Store(store.root))) == lives
        assert Store(store.root).sweep() == 0
    finally:
        live.kill()
        live.wait()
    assert Store(store.root).sweep() == 0 and work_in_progress(store) == []


def test_a_waiting_process_takes_over_when_the_builder_is_killed(tmp_path):
    store = Store(tmp_path / "store")
    first = start(BUILD, store.root, tmp_path / "log", 600)
    wait_for(tmp_path / "log", "started")
    second = start(BUILD, store.root, tmp_path / "log", 0)
    time.sleep(0.7)
    assert second.poll() is None  # it waits
    first.kill()
    first.wait()
    assert second.communicate(timeout=30)[0].startswith("False")


KILLED_ANYWHERE = """
import os, signal, sys
from pathlib import Path
from assay.schemas.manifest import Action
from assay.warehouse.store import Store

def build(directory):
    (directory / "a.json").write_text("whole"); (directory / "b.json").write_text("{}"); return {}

def once(root, at):
    # Opens, makes and reads; kills itself before its file operation number `at`.
    calls = 0
    def audit(event, arguments):
        nonlocal calls
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.scandir") and str(root) in str(arguments[0]):
            calls += 1
            if calls == at: os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(audit)
    built = Store(root).get_or_build(Action(step={"kind": "quantize"}, code="c" * 64), build, kind="checkpoint")
    assert (built.path / "a.json").read_text() == "whole"

kills, at, ended = 0, 0, False
while not ended:
    at += 1
    for round in ("fresh", "after a kill"):  # the second meets what the first left
        root = Path(sys.argv[1]) / str(at)
        pid = os.fork()
        if pid == 0:
            try: once(root, at)
            except BaseException as error: print(at, round, repr(error), flush=True); os._exit(1)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        assert status in (0, signal.SIGKILL), status
        kills += status == signal.SIGKILL
        ended = round == "fresh" and status == 0
        if (root / "locks").exists():
            store = Store(root)
            assert not list(store.verify()) and not list((root / "tmp").iterdir()), (at, round)
            for entry in store.actions():
                assert (store.path(entry.digest) / "a.json").read_text() == "whole"
        if ended: break
    pid = os.fork()
    if pid == 0: once(root, 0); os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0, at
print("kills", kills)
"""


def test_a_process_killed_before_any_of_its_file_operations_leaves_nothing_half(tmp_path):
    child = start(KILLED_ANYWHERE, tmp_path)
    out = child.communicate(timeout=120)[0]
    assert child.returncode == 0, out
    assert int(out.split()[1]) > 60


COUNT = """
import sys
from pathlib import Path
from assay.warehouse.locks import hold
lock, counter = Path(sys.argv[1]), Path(sys.argv[2])
for _ in range(60):
    with hold(lock):
        n = int(counter.read_text()); counter.write_text(str(n + 1))
"""


def test_a_lock_excludes_although_its_file_is_removed_on_release(tmp_path):
    (tmp_path / "counter").write_text("0")
    children = [start(COUNT, tmp_path / "x.lock", tmp_path / "counter") for _ in range(4)]
    assert [child.wait(timeout=60) for child in children] == [0] * 4
    assert (tmp_path / "counter").read_text() == "240"
    assert not (tmp_path / "x.lock").exists()


FORKS = """
import os, sys, time
from pathlib import Path
from assay.warehouse.locks import hold
with hold(Path(sys.argv[1])):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_lock_dies_with_its_owner_even_when_a_forked_child_lives_on(tmp_path):
    """An inherited descriptor keeps an advisory lock alive: a data-loading worker would block a store for ever."""
    owner = subprocess.Popen(
        [sys.executable, "-c", FORKS, str(tmp_path / "x.lock")], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert owner.stdout is not None and owner.stdout.readline() == "held\n"
        with try_hold(tmp_path / "x.lock") as ours:
            assert not ours
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        with hold(tmp_path / "x.lock", timeout=2):
            os.killpg(owner.pid, 0)  # the child is alive all the same
    finally:
        os.killpg(owner.pid, signal.SIGKILL)


def test_a_lock_that_stays_held_is_given_up_after_the_timeout(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", FORKS, str(tmp_path / "x.lock")], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        with (
            pytest.raises(TimeoutError, match=r"the device was still held by another process after 0.2 s"),
            hold(tmp_path / "x.lock", timeout=0.2, waiting_for="the device"),
        ):
            pass
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def test_the_work_of_a_live_process_names_what_it_reads(tmp_path):
    store = Store(tmp_path / "store")
    with store.workspace(["a" * 64]) as work:
        assert json.loads((work / "uses.json").read_text()) == ["a" * 64] and store.in_use() == {"a" * 64}
        assert store.sweep() == 0 and work.is_dir()
    assert store.in_use() == set()
