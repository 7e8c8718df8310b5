"""The tables are what the rows say, the published file is whole at every moment, and SQL reaches nothing but the facts."""

import json
import multiprocessing
import shutil
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path
from types import NoneType
from typing import get_args

import duckdb
import polars as pl
import pytest

from assay.schemas.facts import TABLES, Item, Measurement, VariantAxisRow
from assay.warehouse.database import HERE, VIEWS, WarehouseError, connect, fill, insert, snapshot
from assay.warehouse.facts import GRAINS, FactStore, column_type

SQL_TYPES = {str: "VARCHAR", int: "BIGINT", float: "DOUBLE", bool: "BOOLEAN", datetime: "TIMESTAMP WITH TIME ZONE", list[str]: "VARCHAR[]"}


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    with connect(tmp_path_factory.mktemp("none")) as connection:
        yield connection


@pytest.mark.parametrize("table", TABLES)
def test_the_declared_table_is_the_row_model(empty, table):
    declared = empty.sql(
        "SELECT column_name, data_type, is_nullable FROM duckdb_columns() WHERE table_name = $t", params={"t": table}
    ).fetchall()
    model = TABLES[table]
    assert declared == [
        (name, SQL_TYPES[column_type(model, name)], NoneType in get_args(field.annotation)) for name, field in model.model_fields.items()
    ]


@pytest.mark.parametrize("table", TABLES)
def test_the_key_of_a_table_is_the_grain_of_its_facts(empty, table):
    key = empty.sql(
        "SELECT constraint_column_names FROM duckdb_constraints() WHERE table_name = $t AND constraint_type = 'PRIMARY KEY'",
        params={"t": table},
    ).fetchall()
    if key:
        assert set(key[0][0]) == set(GRAINS[table].key)
    elif table == "item":  # millions: who reads the files keeps the grain, see tests/warehouse/test_facts.py
        return
    else:  # a key with columns that may be NULL is a unique index
        ((expressions,),) = empty.sql(
            "SELECT expressions FROM duckdb_indexes() WHERE table_name = $t AND is_unique", params={"t": table}
        ).fetchall()
        assert all(column in expressions for column in GRAINS[table].key)


def test_every_table_column_and_view_says_what_it_is(empty):
    undocumented = empty.sql(
        """
        SELECT table_name, column_name FROM duckdb_columns() WHERE comment IS NULL AND list_contains($tables, table_name)
        UNION ALL SELECT table_name, NULL FROM duckdb_tables() WHERE comment IS NULL
        UNION ALL SELECT name, NULL FROM (
            SELECT table_name AS name, comment FROM duckdb_tables() WHERE NOT list_contains($tables, table_name)
            UNION ALL SELECT view_name, comment FROM duckdb_views() WHERE NOT internal
        ) WHERE comment IS NULL OR comment NOT LIKE '%?%Grain:%'""",
        params={"tables": list(TABLES)},
    ).fetchall()
    assert undocumented == []
    assert {path.stem for path in (HERE / "tables").glob("*.sql")} == set(TABLES)
    assert {path.stem for path in (HERE / "views").glob("*.sql")} == set(VIEWS)


def test_columns_meet_by_name_whatever_their_order(empty):
    """INSERT … SELECT * matches by position: with numbers in every column KL and perplexity change places without an error."""
    with duckdb.connect() as connection:
        connection.execute("CREATE TABLE t (variant VARCHAR, kl DOUBLE, ppl DOUBLE)")
        insert(connection, "t", pl.DataFrame({"variant": ["a"], "kl": [0.125], "ppl": [9.5]}))
        insert(connection, "t", pl.DataFrame({"ppl": [9.5], "variant": ["b"], "kl": [0.125]}))
        assert connection.sql("SELECT kl, ppl FROM t").fetchall() == [(0.125, 9.5)] * 2


def test_an_unknown_column_is_an_error_and_loses_nothing(empty):
    with duckdb.connect() as connection:
        connection.execute("CREATE TABLE t (a DOUBLE)")
        insert(connection, "t", pl.DataFrame({"a": [1.0]}))
        with pytest.raises(WarehouseError, match="the facts of table t do not fit it"):
            insert(connection, "t", pl.DataFrame({"a": [2.0], "extra": [3.0]}))
        assert connection.sql("FROM t").fetchall() == [(1.0,)]


@pytest.mark.parametrize(("column", "value"), [("value", "'nan'"), ("value", "'inf'"), ("value", "NULL"), ("status", "'failed'")])
def test_the_table_itself_refuses_a_number_that_is_none(tmp_path, make_fact, column, value):
    store = FactStore(tmp_path)
    store.append("measurement", [make_fact()])
    with duckdb.connect() as connection:
        fill(connection, tmp_path)
        with pytest.raises(duckdb.ConstraintException):
            connection.execute(f"UPDATE measurement SET {column} = {value}")
        connection.execute("UPDATE measurement SET value = 0.25")


def test_items_of_one_artifact_against_two_bases_in_one_run_are_both_kept(store, make_fact, make_variant, noon):
    """Each experiment shows the items of its own base; items of before the base was kept belong to any."""
    divergence = [make_fact(base_digest=base, value=value) for base, value in (("base", 0.5), ("other", 0.7))]
    store.append("measurement", divergence)
    for experiment, base in (("quickstart", "base"), ("second", "other")):
        store.append(
            "variant",
            [
                make_variant(experiment=experiment, artifact_digest="a"),
                make_variant(base, steps=0, experiment=experiment, artifact_digest=base),
            ],
        )
        row = {"artifact_digest": "a", "protocol_digest": "div", "suite": "divergence", "item": 0, "metric": "kl_mean_nats", "run": "r1"}
        store.append("item", [Item(**row, base_digest=base, value={"base": 0.5, "other": 0.7}[base])])
    store.append("item", [Item(**{**row, "item": 1}, value=0.25)])
    with connect(store.root) as connection:
        found = connection.sql("SELECT experiment, item, value FROM variant_item ORDER BY ALL").fetchall()
    assert found == [("quickstart", 0, 0.5), ("quickstart", 1, 0.25), ("second", 0, 0.7), ("second", 1, 0.25)]


def test_facts_are_seen_by_the_next_connection_and_lock_nobody(store, make_fact):
    with connect(store.root) as first:
        store.append("measurement", [make_fact()])
        with connect(store.root) as second:
            assert first.sql("FROM measurement").fetchall() == []
            assert len(second.sql("FROM measurement").fetchall()) == 1


def test_times_are_utc(quickstart):
    with connect(quickstart.root) as connection:
        ((at, hour),) = connection.sql("SELECT max(recorded_at), any_value(hour(recorded_at)) FROM variant").fetchall()
    assert (at.isoformat(), hour) == ("2026-11-01T12:00:00+00:00", 12)


def test_a_damaged_file_is_named(store, make_fact):
    path = store.append("measurement", [make_fact()], name="hurt")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(WarehouseError, match=r"the facts of table measurement .* cannot be read: .*; move the damaged file away"):
        connect(store.root)


@pytest.mark.parametrize("statement", [
    "COPY variant TO '{}/x.csv'", "EXPORT DATABASE '{}/x'", "ATTACH '{}/x.duckdb'", "SELECT * FROM read_csv('/etc/passwd')", "SELECT * FROM '/etc/passwd'",
    "SELECT * FROM read_text('/etc/passwd')", "SELECT * FROM glob('/etc/*')", "SELECT * FROM read_parquet('{}/facts/run/*/*.parquet')",
    "INSTALL httpfs", "LOAD httpfs", "SET enable_external_access = true", "RESET lock_configuration", "SET allowed_directories = ['/']",
    "CREATE SECRET (TYPE s3)", "IMPORT DATABASE '{}'",
])  # fmt: skip
def test_sql_reaches_no_file_no_network_and_no_setting(quickstart_warehouse, quickstart_facts, tmp_path, statement):
    (tmp_path / "facts").symlink_to(quickstart_facts)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(duckdb.Error):
        quickstart_warehouse.sql(statement.format(tmp_path)).fetchall()
    assert sorted(tmp_path.rglob("*")) == before
    assert quickstart_warehouse.sql("SELECT count(*) FROM scorecard").fetchall() == [(8,)]


NASTY = [
    'x"; DROP TABLE variant; --',
    "x'; DROP TABLE variant; --",
    "select",
    "variant",
    "Variant",
    "scorecard",
    "experiment_variant",
    "duckdb_tables",
    "ünï",
    "",
]


def test_no_name_breaks_out_of_its_quotes(store, make_variant):
    for name in NASTY:
        store.append("variant", [make_variant(name or "v", experiment=name)])
        store.append("variant_axis", [VariantAxisRow(experiment=name, variant=name or "v", axis=axis, option=axis) for axis in NASTY])
    with connect(store.root) as connection:
        assert connection.sql("SELECT count(*), count(DISTINCT experiment) FROM scorecard").fetchall() == [(len(NASTY), len(NASTY))]
        views = {name for (name,) in connection.sql("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall()} - {
            *VIEWS,
            "metric",
        }
        assert views == {
            "select",
            "experiment_variant",
            "experiment_scorecard",
            "experiment_experiment_variant",
            "experiment_duckdb_tables",
        }
        assert connection.sql('SELECT variant, axis_variant FROM "select"').fetchall() == [("select", "variant")]
        assert connection.sql("SELECT variant FROM experiment_variant").fetchall() == [("variant",)]
        assert connection.sql("SELECT variant FROM experiment_experiment_variant").fetchall() == [("experiment_variant",)]


def test_a_snapshot_answers_as_the_facts_do(quickstart, tmp_path, near):
    target = snapshot(quickstart.root, tmp_path / "it's.duckdb")
    with connect(quickstart.root) as live, duckdb.connect(str(target), read_only=True) as published:
        for name in [*TABLES, *VIEWS, "quickstart"]:
            query = f"SELECT * FROM {name} ORDER BY ALL"
            assert published.sql(query).fetchall() == near(live.sql(query).fetchall()), name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["facts", "it's.duckdb"]


def test_a_snapshot_is_in_the_format_that_older_clients_open(quickstart, tmp_path):
    target = snapshot(quickstart.root, tmp_path / "warehouse.duckdb")
    with duckdb.connect(str(target), read_only=True) as connection:
        ((tags,),) = connection.sql("SELECT tags FROM duckdb_databases() WHERE database_name = 'warehouse'").fetchall()
    assert tags["storage_version"].startswith("v1.4")


def test_a_failed_snapshot_leaves_the_old_one(quickstart, make_fact, tmp_path):
    """A stock manager that deletes first and inserts then loses the old rows when the insert fails."""
    target = snapshot(quickstart.root, tmp_path / "warehouse.duckdb")
    before = target.read_bytes()
    quickstart.append("measurement", [make_fact()], name="hurt").write_bytes(b"not parquet")
    with pytest.raises(WarehouseError):
        snapshot(quickstart.root, target)
    assert target.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["facts", "warehouse.duckdb"]


def test_what_a_killed_snapshot_left_goes_with_the_next(quickstart, tmp_path):
    left = [tmp_path / f".warehouse.duckdb.{name}" for name in ("dead.building", "dead.building.wal")]
    for path in (*left, tmp_path / "warehouse.duckdb.wal"):
        path.write_bytes(b"left")
    snapshot(quickstart.root, tmp_path / "warehouse.duckdb")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["facts", "warehouse.duckdb"]


READER = """
import subprocess, sys
from pathlib import Path
import duckdb
target, stop = sys.argv[1:]
ask = f"import duckdb; print(duckdb.connect({target!r}, read_only=True).sql('SELECT count(*) FROM run').fetchall()[0][0])"
kept = duckdb.connect(target, read_only=True)
first = kept.sql("SELECT count(*) FROM run").fetchall()[0][0]
counts = []
while not Path(stop).exists():
    # A new process each time: while this one has the file open, a second connection in it would be to what it opened.
    counts.append(int(subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout))
assert kept.sql("SELECT count(*) FROM run").fetchall()[0][0] == first, "an open reader keeps what it opened"
assert counts == sorted(counts), counts
print(len(counts), first)
"""


def _snapshots(root: str, target: str, times: int) -> None:
    for _ in range(times):
        snapshot(Path(root), Path(target))


def test_clients_read_while_two_processes_publish(quickstart, tmp_path, noon):
    from assay.schemas.facts import RunRow

    target, stop = tmp_path / "warehouse.duckdb", tmp_path / "stop"
    snapshot(quickstart.root, target)
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(target), str(stop)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_snapshots, args=(str(quickstart.root), str(target), 2)) for _ in range(2)]
    for writer in writers:
        writer.start()
    for at in range(10):
        quickstart.append("run", [RunRow(run=f"new{at}", started_at=noon, trigger="test")])
        time.sleep(0.1)
    for writer in writers:
        writer.join(120)
    snapshot(quickstart.root, target)
    stop.touch()
    out, err = reader.communicate(timeout=60)
    assert reader.returncode == 0, err
    assert [writer.exitcode for writer in writers] == [0, 0]
    polls, first = out.split()
    assert int(polls) >= 1 and first == "2"
    with duckdb.connect(str(target), read_only=True) as connection:
        assert connection.sql("SELECT count(*) FROM run").fetchall() == [(12,)]


def test_the_second_of_two_snapshots_publishes_what_came_meanwhile(quickstart, tmp_path, monkeypatch, noon):
    """Otherwise the one that began first could end last, and put older facts in the place of newer ones."""
    from assay.schemas.facts import RunRow
    from assay.warehouse import database

    target, slow, began = tmp_path / "warehouse.duckdb", threading.Event(), threading.Event()
    whole = database.finish_views

    def wait(connection, **more):
        began.set()
        slow.wait(30)
        whole(connection, **more)

    monkeypatch.setattr(database, "finish_views", wait)
    first = threading.Thread(target=snapshot, args=(quickstart.root, target))
    first.start()
    assert began.wait(30)
    quickstart.append("run", [RunRow(run="late", started_at=noon)])
    second = threading.Thread(target=snapshot, args=(quickstart.root, target))
    second.start()
    second.join(0.3)
    assert second.is_alive() and not target.exists()
    slow.set()
    first.join(30)
    second.join(30)
    with duckdb.connect(str(target), read_only=True) as connection:
        assert connection.sql("SELECT count(*) FROM run WHERE run = 'late'").fetchall() == [(1,)]


def _measure(root: str, variant: int) -> None:
    Path(root).mkdir(exist_ok=True)
    store = FactStore(Path(root))
    row = {
        "artifact_digest": f"a{variant}",
        "base_digest": "b",
        "protocol_digest": "p",
        "suite": "bytes",
        "metric": "size_bytes",
        "value": 1.0,
    }
    from datetime import UTC

    store.append("measurement", [Measurement(**row, unit="B", n=1, run="r", measured_at=datetime.now(UTC))])
    with connect(Path(root)) as connection:
        assert connection.sql("SELECT count(*) FROM measurement").fetchall()[0][0] >= 1


def test_four_processes_that_write_and_read_at_once_meet_no_lock(tmp_path):
    """DuckDB lets one process write to a file, and a mere reader's shell blocks it: no step may open the shared file."""
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_measure, args=(str(tmp_path / "facts"), at)) for at in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [worker.exitcode for worker in workers] == [0] * 4
    with connect(tmp_path / "facts") as connection:
        assert connection.sql("SELECT count(*) FROM measurement").fetchall() == [(4,)]


def test_two_hundred_variants_with_sixty_facts_each_are_read_within_a_second(store, make_variant, make_fact):
    names = [f"p{at // 20}__q{at % 20}" for at in range(200)]
    store.append("variant", [make_variant(name, steps=min(at, 1), artifact_digest=f"{at:064d}") for at, name in enumerate(names)])
    store.append("variant_axis", [
        VariantAxisRow(experiment="quickstart", variant=name, axis=axis, option=option) for name in names for axis, option in zip("pq", name.split("__"), strict=True)
    ])  # fmt: skip
    for at in range(200):
        rows = [make_fact("kl_mean_nats" if number == 0 else f"m{number}", at / 7, artifact_digest=f"{at:064d}", base_digest="0" * 64) for number in range(60)]  # fmt: skip
        store.append("measurement", rows)

    def ask() -> float:
        began = time.process_time()
        with connect(store.root) as connection:
            assert connection.sql("SELECT count(kl_mean_nats) FROM (SELECT * FROM scorecard ORDER BY kl_mean_nats)").fetchall() == [(200,)]
        return time.process_time() - began

    assert min(ask() for _ in range(3)) < 1  # CPU seconds, of all threads: other processes do not count


def test_neither_torch_nor_dagster_is_imported():
    modules = ["assay.warehouse.facts", "assay.warehouse.database", "assay.warehouse.reads", "assay.warehouse.prompt"]
    code = (
        f"import sys, json, {', '.join(modules)}; print(json.dumps([m for m in ('torch', 'transformers', 'dagster') if m in sys.modules]))"
    )
    assert json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) == []


def test_facts_that_were_copied_elsewhere_answer_the_same(quickstart, tmp_path):
    moved = Path(shutil.copytree(quickstart.root, tmp_path / "elsewhere"))
    with connect(moved) as there, connect(quickstart.root) as here:
        assert there.sql("FROM regression ORDER BY ALL").fetchall() == here.sql("FROM regression ORDER BY ALL").fetchall()


def test_old_temporary_files_and_foreign_files_are_no_facts(store, make_fact):
    path = store.append("measurement", [make_fact()])
    path.with_name("notes.txt").write_text("mine")
    path.with_name(".half.parquet").write_bytes(b"")
    assert store.compact(timedelta(0), threshold=5) == {}
    with connect(store.root) as connection:
        assert connection.sql("SELECT count(*) FROM measurement").fetchall() == [(1,)]
