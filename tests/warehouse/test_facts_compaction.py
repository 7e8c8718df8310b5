"""Merging files loses no row and doubles none, at no moment, for readers and writers that go on."""

import multiprocessing
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import polars as pl
import pytest

from assay.warehouse import facts as module
from assay.warehouse.facts import COMPACTED, FactStore, files, read
from assay.warehouse.locks import hold, try_hold

NOW = timedelta(0)
BENCH = Path(__file__).parents[1] / "bench" / "facts.py"


def loose(store: FactStore, table: str = "measurement") -> list[Path]:
    return [path for path in files(store.root, table) if path.parent.name != COMPACTED]


def test_merged_facts_are_the_same_facts_in_one_file(store, quickstart):
    before = {table: read(store.root, table) for table in module.TABLES}
    counts = {table: len(loose(store, table)) for table in module.TABLES}
    assert store.compact(NOW, threshold=1) == {table: count for table, count in counts.items() if count > 1}
    for table, frame in before.items():
        assert read(store.root, table).equals(frame), table
    assert loose(store) == [] and len(files(store.root, "measurement")) == 1
    assert pl.read_parquet(str(store.root / "measurement" / "*" / "*.parquet")).height == before["measurement"].height  # any client's glob


def test_few_files_and_young_files_are_left_alone(store, make_fact):
    for at in range(3):
        store.append("measurement", [make_fact(f"m{at}")])
    assert store.compact(NOW, threshold=3) == {}
    assert store.compact(timedelta(hours=1), threshold=1) == {}
    assert len(loose(store)) == 3
    assert store.compact(NOW, threshold=2) == {"measurement": 3}


def test_a_step_that_runs_again_after_a_compaction_replaces_its_facts(store, make_fact, noon):
    store.append("measurement", [make_fact(value=0.5)], name="step")
    store.append("measurement", [make_fact("other")], name="other")
    store.compact(NOW, threshold=1)
    store.append("measurement", [make_fact(value=0.25)], name="step")
    assert store.read("measurement").select("metric", "value").rows() == [("kl_mean_nats", 0.25), ("other", 0.5)]
    store.append("measurement", [make_fact("third")])
    store.compact(NOW, threshold=1)
    assert store.read("measurement").filter(metric="kl_mean_nats")["value"].to_list() == [0.25]


def test_a_kill_between_publishing_and_removing_doubles_nothing_and_the_next_call_ends_it(store, make_fact, monkeypatch):
    for at in range(4):
        store.append("measurement", [make_fact(f"m{at}")])

    def killed(self, missing_ok=False):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        publish = module._publish

        def publish_then_die(frame, path):
            publish(frame, path)
            patch.setattr(Path, "unlink", killed)

        patch.setattr(module, "_publish", publish_then_die)
        with pytest.raises(KeyboardInterrupt):
            store.compact(NOW, threshold=1)
    assert len(loose(store)) == 4 and len(files(store.root, "measurement")) == 5
    assert store.read("measurement").height == 4
    store.compact(NOW, threshold=1)
    assert len(files(store.root, "measurement")) == 1 and store.read("measurement").height == 4


def test_a_fact_replaced_while_it_was_being_merged_is_not_removed(store, make_fact, monkeypatch):
    """The compaction has read the old file; what has taken its place since is not what it merged."""
    for at in range(3):
        store.append("measurement", [make_fact(f"m{at}", value=0.5)], name=f"f{at}")
    publish = module._publish

    def replaced_meanwhile(frame, path):
        monkeypatch.setattr(module, "_publish", publish)
        FactStore(store.root).append("measurement", [make_fact("m1", value=0.25)], name="f1")
        return publish(frame, path)

    monkeypatch.setattr(module, "_publish", replaced_meanwhile)
    store.compact(NOW, threshold=1)
    assert store.read("measurement").select("metric", "value").rows() == [("m0", 0.5), ("m1", 0.25), ("m2", 0.5)]


def test_replacing_waits_while_sources_are_being_removed_and_adding_does_not(store, make_fact):
    path = store.append("measurement", [make_fact()], name="old")
    stamp = path.stat().st_mtime_ns
    with hold(store.root / "measurement" / ".replace.lock"):
        late = threading.Thread(target=lambda: store.append("measurement", [make_fact(value=0.25)], name="old"))
        late.start()
        store.append("measurement", [make_fact("new")], name="new")
        late.join(0.3)
        assert late.is_alive() and path.stat().st_mtime_ns == stamp
    late.join(10)
    assert store.read("measurement").filter(metric="kl_mean_nats")["value"].to_list() == [0.25]


def test_of_two_compactions_at_once_one_does_nothing(store, make_fact):
    for at in range(3):
        store.append("measurement", [make_fact(f"m{at}")])
    with try_hold(store.root / "measurement" / ".compact.lock") as mine:
        assert mine
        other = f"from assay.warehouse.facts import *; print(FactStore(Path({str(store.root)!r})).compact(timedelta(0), 1))"
        assert subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=True).stdout == "{}\n"
    assert store.compact(NOW, threshold=1) == {"measurement": 3}


def test_a_listed_file_that_has_gone_is_listed_again(store, make_fact, monkeypatch):
    for at in range(3):
        store.append("measurement", [make_fact(f"m{at}")])
    listed, calls = module.files, []

    def compacted_after_listing(root, table):
        paths = listed(root, table)
        if not calls:
            calls.append(FactStore(root).compact(NOW, threshold=1))
        return paths

    monkeypatch.setattr(module, "files", compacted_after_listing)
    assert store.read("measurement").height == 3
    assert calls == [{"measurement": 3}]


def _append_and_compact(root: str, writer: int, facts: int) -> None:
    from assay.schemas.facts import VariantAxisRow

    store = FactStore(Path(root))
    for number in range(facts):
        store.append("variant_axis", [VariantAxisRow(experiment=f"e{writer}", variant=f"v{number}", axis="a", option="o")])
        if number % 7 == writer:
            store.compact(timedelta(seconds=0.2), threshold=5)


def test_readers_see_every_fact_once_while_others_append_and_compact(store):
    facts = 60
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_append_and_compact, args=(str(store.root), writer, facts)) for writer in (1, 2)]
    for writer in writers:
        writer.start()
    seen: set[tuple] = set()
    while any(writer.is_alive() for writer in writers):
        rows = store.read("variant_axis").rows()
        assert len(set(rows)) == len(rows)
        assert seen <= set(rows), "a fact that was there is gone"
        seen = set(rows)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert store.read("variant_axis").height == 2 * facts
    assert any(path.parent.name == COMPACTED for path in files(store.root, "variant_axis"))


def test_four_processes_append_while_a_reader_polls():
    """The short form of tests/bench/facts.py: no fact lost or doubled, no error, and no poll waits for a writer."""
    done = subprocess.run([sys.executable, BENCH, "--facts", "50"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "200 facts, none lost or doubled" in done.stdout
    longest = float(done.stdout.split("longest ")[1].split(" s")[0])
    assert longest < 10  # reading 200 files takes a fraction of a second; the rest is for a busy machine
