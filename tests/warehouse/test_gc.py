"""Collection removes what nothing reaches, after showing it, and never what a kept entry or a running build needs."""

import os
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.schemas.manifest import Action
from assay.warehouse.errors import DamagedArtifact
from assay.warehouse.gc import collect, plan_gc
from assay.warehouse.locks import hold
from assay.warehouse.store import Store


def action(name: str, **parents: str) -> Action:
    return Action(step={"kind": "quantize", "name": name}, code="c" * 64, parents=parents)


def make(store: Store, name: str, text: str | None = None, **parents: str) -> tuple[str, str]:
    """Build one; its key and digest."""

    def build(directory: Path) -> dict:
        (directory / "a.json").write_text(text or name)
        return {}

    asked = action(name, **parents)
    return asked.key, store.get_or_build(asked, build, kind="checkpoint").digest


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_a_plan_shows_what_and_how_much_and_removes_nothing(store):
    kept, _ = make(store, "kept")
    gone, digest = make(store, "gone")
    plan = plan_gc(store, {kept})
    assert [(row.what, row.name, row.kind) for row in plan.rows] == [("artifact", digest, "checkpoint"), ("action", gone, "quantize")]
    files = (store.artifact_path(digest) / name for name in ("a.json", "manifest.json"))
    assert plan.size_bytes == sum(path.stat().st_size for path in files)
    assert len(store.artifacts()) == 2 and store.lookup(gone) is not None


def test_collecting_removes_the_planned_and_keeps_the_rest(store):
    kept, _ = make(store, "kept")
    gone, _ = make(store, "gone")
    size = store.size()
    plan = plan_gc(store, {kept})
    seen = []
    assert set(collect(plan, seen.append)) == set(plan.rows) == set(seen)
    assert store.size() == size - plan.size_bytes
    assert store.lookup(gone) is None and make(store, "kept")[0] == kept
    assert plan_gc(store, {kept}).rows == () and list(store.verify()) == []
    assert not any((store.root / "tmp").iterdir()) and len(store.seconds_of("quantize")) == 1


def test_an_artifact_stays_while_a_kept_entry_names_it_or_has_it_as_a_parent(store):
    parent_key, parent = make(store, "parent")
    child_key, child = make(store, "child", parent=parent)
    twin_key, twin = make(store, "twin", text="child")  # the same bytes under another key
    assert twin == child
    removed = collect(plan_gc(store, {child_key}))
    assert {row.name for row in removed} == {parent_key, twin_key}
    assert set(store.artifacts()) == {parent, child}


def test_calibration_artifacts_of_a_kept_entry_stay(store):
    _, hidden = make(store, "hidden")
    asked = Action(step={"kind": "measure"}, code="c" * 64, data={"hidden_states": hidden})
    store.get_or_build(asked, lambda directory: {"n": (directory / "a.json").write_text("x")}, kind="facts")
    collect(plan_gc(store, {asked.key}))
    assert hidden in store.artifacts()


def age(store: Store, key: str, days: float) -> None:
    """Make an entry and its artifact look ``days`` old."""
    entry = store.lookup(key)
    assert entry is not None
    old = datetime.now(UTC) - timedelta(days=days)
    store.write_entry(entry.model_copy(update={"built_at": old}))
    path = store.artifact_path(entry.digest) / "manifest.json"
    path.chmod(0o644)
    path.write_text(store.manifest(entry.digest).model_copy(update={"built_at": old}).model_dump_json())


def test_what_is_younger_than_the_days_to_keep_stays(store):
    young, _ = make(store, "young")
    old, _ = make(store, "old")
    age(store, young, 6.9)
    age(store, old, 7.1)
    assert {row.name for row in plan_gc(store, set(), keep_days=7).rows if row.what == "action"} == {old}
    assert len(collect(plan_gc(store, set(), keep_days=7))) == 2
    assert store.lookup(young) is not None and len(store.artifacts()) == 1


def test_quarantine_and_the_leftovers_of_dead_processes_go(store):
    key, digest = make(store, "one")
    (store.artifact_path(digest) / "a.json").unlink()
    with pytest.warns(DamagedArtifact):
        make(store, "one")
    (store.root / "tmp" / "orphan").mkdir()
    (aside,) = (store.root / "quarantine").iterdir()
    assert plan_gc(store, {key}, keep_days=1).rows == ()
    assert not (store.root / "tmp" / "orphan").exists()
    os.utime(aside, (time.time() - 2 * 86400,) * 2)
    assert [row.what for row in collect(plan_gc(store, {key}, keep_days=1))] == ["quarantine"]
    assert not any((store.root / "quarantine").iterdir())


def test_an_artifact_that_lost_its_entry_and_one_that_lost_its_manifest_go(store):
    key, first = make(store, "one")
    store.action_path(key).unlink()
    second = "e" * 64
    store.artifact_path(second).mkdir()
    assert {row.name for row in collect(plan_gc(store, set()))} == {first, second}
    assert store.artifacts() == []


def test_what_a_running_build_reads_stays(store):
    _, parent = make(store, "parent")
    reading, collected = threading.Event(), threading.Event()

    def build(directory: Path) -> dict:
        reading.set()
        assert collected.wait(20)
        (directory / "a.json").write_text((store.path(parent) / "a.json").read_text())
        return {}

    child = threading.Thread(target=lambda: store.get_or_build(action("child", parent=parent), build, kind="checkpoint"))
    child.start()
    assert reading.wait(20)
    removed = collect(plan_gc(store, set()))
    collected.set()
    child.join()
    assert parent in store.artifacts() and {row.what for row in removed} == {"action"}
    assert store.lookup(action("child", parent=parent)) is not None


def test_what_was_made_or_named_between_the_plan_and_the_collection_stays(store):
    key, digest = make(store, "one")
    plan = plan_gc(store, set())
    twin, _ = make(store, "twin", text="one")  # early cut-off: a new entry that names the doomed artifact
    removed = collect(plan)
    assert {row.what for row in removed} == {"action"} and store.artifacts() == [digest]
    assert store.lookup(twin) is not None and store.lookup(key) is None
    make(store, "one")
    plan = plan_gc(store, {twin})
    entry = store.lookup(key)
    store.write_entry(entry.model_copy(update={"built_at": datetime.now(UTC)}))  # made again meanwhile
    assert collect(plan) == () and store.lookup(key) is not None


def test_a_collection_waits_for_a_publication_and_then_respects_it(store):
    key, digest = make(store, "one")
    plan = plan_gc(store, set())
    removed = []
    collector = threading.Thread(target=lambda: removed.extend(collect(plan)))
    with hold(store.lock_path("publish")):  # as a builder does whose artifact turned out to be there already
        collector.start()
        collector.join(0.4)
        assert collector.is_alive() and store.artifacts() == [digest]
        twin = action("twin")
        store.write_entry(store.lookup(key).model_copy(update={"key": twin.key, "action": twin}))
    collector.join()
    assert [row.what for row in removed] == ["action"] and store.artifacts() == [digest]


BUILDS = """
import sys
from assay.schemas.manifest import Action
from assay.warehouse.store import Store
store = Store(sys.argv[1])
def build(n):
    def inner(directory):
        (directory / "a.json").write_text(str(n % 3))
        return {}
    return inner
for n in range(25):
    built = store.get_or_build(Action(step={"kind": "quantize", "n": n}, code="c" * 64), build(n), kind="checkpoint")
    child = Action(step={"kind": "quantize", "of": n}, code="c" * 64, parents={"parent": built.digest})
    def reads(directory):
        (directory / "b.json").write_text("child of " + (store.artifact_path(built.digest) / "a.json").read_text())
        return {}
    try: store.get_or_build(child, reads, kind="checkpoint")
    except FileNotFoundError: pass  # collected between the two, which is why the caller names what it reaches
print("done")
"""


def test_collecting_all_the_time_beside_builders_never_leaves_an_entry_without_its_artifact(store):
    children = [subprocess.Popen([sys.executable, "-c", BUILDS, str(store.root)], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    rounds = 0
    while any(child.poll() is None for child in children):
        collect(plan_gc(store, set()))
        rounds += 1
    assert [child.communicate()[0] for child in children] == ["done\n"] * 2 and rounds > 3
    assert all(store.artifact_path(entry.digest).is_dir() for entry in store.actions())
    assert list(store.verify()) == [] and not any((store.root / "tmp").iterdir())


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3), st.booleans()), max_size=8, unique_by=lambda row: row[0]))
@settings(max_examples=12, deadline=None)
def test_after_a_collection_exactly_the_reachable_entries_and_what_they_name_are_there(tmp_path_factory, rows):
    store = Store(tmp_path_factory.mktemp("store"))
    made = {}
    for name, text, keep in rows:
        parents = {"parent": made[next(iter(made))][1]} if made and text == 0 else {}
        made[name] = (*make(store, str(name), text=str(text) + str(parents), **parents), keep, parents)
    reachable = {key for key, _, keep, _ in made.values() if keep}
    collect(plan_gc(store, reachable))
    assert {entry.key for entry in store.actions()} == reachable
    named = {digest for _, digest, keep, _ in made.values() if keep} | {
        each for _, _, keep, parents in made.values() if keep for each in parents.values()
    }
    assert set(store.artifacts()) == named
