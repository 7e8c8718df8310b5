"""Facts are written once, whole, with their types, by any number of processes."""

import math
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import get_args

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from assay.schemas.facts import TABLES, BudgetRow, Item, Measurement, RunRow
from assay.warehouse.facts import ABANDONED, GRAINS, FactStore, files, polars_schema, read


def age(path: Path, by: timedelta) -> None:
    then = time.time() - by.total_seconds()
    os.utime(path, (then, then))


def test_what_was_written_is_read_back(store, make_fact):
    fact = make_fact(value=0.125, standard_error=0.5, message="ü\n'\"", threads=2)
    path = store.append("measurement", [fact], name="one")
    assert path.parent.name == f"{datetime.now(UTC):%Y-%m}" and path.name == "one.parquet"
    assert Measurement(**store.read("measurement").row(0, named=True)) == fact


@pytest.mark.parametrize("table", TABLES)
def test_every_table_has_a_file_without_rows_that_a_glob_finds(store, table):
    frame = pl.read_parquet(str(store.root / table / "*" / "*.parquet"))
    assert frame.height == 0 and set(frame.columns) == {*TABLES[table].model_fields, "written_at"}
    assert read(store.root, table).schema == pl.Schema(polars_schema(TABLES[table]))


def test_a_column_of_nothing_but_null_keeps_its_type(store, make_fact):
    store.append("measurement", [make_fact(value=None, status="failed")])
    schema = read(store.root, "measurement").schema
    assert schema["value"] == pl.Float64 and schema["threads"] == pl.Int64 and schema["device_digest"] == pl.String
    assert schema["measured_at"] == pl.Datetime("us", "UTC")


def test_a_number_that_is_not_finite_is_stored_as_null_with_a_status(store, make_fact):
    """A NaN perplexity sorts above every number in DuckDB, equals itself and makes every mean NaN."""
    store.append("measurement", [make_fact(value=value, metric=f"m{at}") for at, value in enumerate((10.0, math.nan, math.inf))])
    rows = store.read("measurement").sort("metric").select("value", "status").rows()
    assert rows == [(10.0, "ok"), (None, "not_finite"), (None, "not_finite")]


def test_a_number_that_slipped_past_the_model_is_refused(store):
    row = Item.model_construct(artifact_digest="a", protocol_digest="p", suite="s", item=0, metric="m", value=math.nan, run="r")
    with pytest.raises(ValueError, match=r"item\.value holds a number that is not finite; store NULL"):
        store.append("item", [row])


def test_a_time_without_a_zone_is_refused(store):
    with pytest.raises(ValueError, match=r"run\.started_at has no time zone"):
        store.append("run", [RunRow(run="r", started_at=datetime(2026, 1, 1))])


def test_rows_of_another_table_are_refused(store, make_fact):
    with pytest.raises(TypeError, match="takes rows of VariantRow; got Measurement"):
        store.append("variant", [make_fact()])
    with pytest.raises(KeyError, match="no table 'facts'"):
        store.append("facts", [make_fact()])


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc/x", ".hidden", "a\n", "a\0", "é", "x" * 200, "C:\\x"])
def test_a_name_with_a_path_in_it_is_refused(store, make_fact, name):
    with pytest.raises(ValueError, match="the name of a fact file"):
        store.append("measurement", [make_fact()], name=name)


def test_the_same_name_replaces_and_without_a_name_every_call_adds(store, make_fact):
    store.append("measurement", [make_fact("m1"), make_fact("m2")], name="step")
    store.append("measurement", [make_fact("m1", value=0.25)], name="step")
    assert store.read("measurement").select("metric", "value").rows() == [("m1", 0.25)]
    assert store.append("measurement", [make_fact("m3")]) != store.append("measurement", [make_fact("m3")])


def test_a_named_file_of_an_earlier_month_is_replaced_where_it_is(store, make_fact):
    path = store.append("measurement", [make_fact(value=0.5)], name="step")
    old = path.parent.with_name("2020-01") / path.name
    old.parent.mkdir()
    path.rename(old)
    assert store.append("measurement", [make_fact(value=0.25)], name="step") == old
    assert store.read("measurement")["value"].to_list() == [0.25]


def test_a_doubled_file_doubles_no_fact(store, make_fact, quickstart):
    before = {table: read(store.root, table) for table in TABLES}
    for table in TABLES:
        for path in files(store.root, table):
            (path.parent / f"copy-of-{path.name}").write_bytes(path.read_bytes())
    for table, frame in before.items():
        assert read(store.root, table).equals(frame), table


def test_the_latest_measurement_of_a_fact_counts_whatever_was_written_last(store, make_fact, noon):
    store.append("measurement", [make_fact(value=0.5, measured_at=noon + timedelta(hours=1))])
    store.append("measurement", [make_fact(value=0.25, measured_at=noon)])
    assert store.read("measurement")["value"].to_list() == [0.5]


def test_a_fact_per_artifact_protocol_metric_slice_and_seed(store, make_fact):
    changes = [
        {},
        {"artifact_digest": "b"},
        {"protocol_digest": "q"},
        {"metric": "m"},
        {"slice_kind": "language", "slice": "zh"},
        {"seed": 1},
    ]
    store.append("measurement", [make_fact(**change) for change in changes])
    store.append("measurement", [make_fact(run="r2", **change) for change in changes])
    assert store.read("measurement").height == len(changes)


def test_a_timing_is_a_fact_of_its_run_and_device_and_a_divergence_of_its_base(store, make_fact):
    speed = {"suite": "speed", "metric": "decode_tok_s"}
    timings = [make_fact(**speed, device_digest=device, run=run) for device in ("d1", "d2") for run in ("r1", "r2")]
    divergences = [make_fact(base_digest=base) for base in ("b1", "b2")]
    sizes = [make_fact("size_bytes", suite="bytes", base_digest=base) for base in ("b1", "b2")]  # the same fact, whoever asks
    store.append("measurement", [*timings, *divergences, *sizes])
    assert store.read("measurement").height == 4 + 2 + 1


def test_the_bounds_of_an_experiment_are_replaced_together(store, noon):
    def bound(**changes):
        return BudgetRow(**{"experiment": "e", "variant": "v", "metric": "kl_mean_nats", "recorded_at": noon, **changes})

    store.append("budget", [bound(at_most=0.1), bound(at_most=0.2), bound(at_least=0.0), bound(variant="w", at_most=0.1)])
    store.append("budget", [bound(experiment="other", at_most=0.1)])
    assert store.read("budget").height == 5
    store.append("budget", [bound(at_most=0.3)])
    assert store.read("budget").select("experiment", "at_most").rows() == [("e", 0.3), ("other", 0.1)]


def test_a_written_name_exists_also_after_it_was_merged(store, make_fact):
    store.append("measurement", [make_fact()], name="one")
    assert store.exists("measurement", "one") and not store.exists("measurement", "two") and not store.exists("item", "one")
    store.append("measurement", [make_fact()], name="two")
    store.compact(timedelta(0), threshold=1)
    assert store.exists("measurement", "one") and store.exists("measurement", "two") and not store.exists("measurement", "three")


def test_no_rows_are_a_file_without_facts_that_replaces_the_one_before(store, make_fact):
    store.append("measurement", [make_fact()], name="step")
    store.append("measurement", [], name="step")
    assert store.read("measurement").height == 0 and store.exists("measurement", "step")


def test_a_column_that_older_files_lack_reads_as_the_default(store, make_fact):
    path = store.append("measurement", [make_fact(message="kept")])
    pl.read_parquet(path).drop("seed", "slice", "path").with_columns(gone=pl.lit(1)).write_parquet(path)
    assert store.read("measurement").select("seed", "slice", "path", "message").rows() == [(0, "all", None, "kept")]


def test_a_directory_with_special_characters_is_read(tmp_path, make_fact):
    store = FactStore(tmp_path / "a'b [x] *?")
    store.append("measurement", [make_fact()])
    assert store.read("measurement").height == 1


def test_facts_of_no_directory_are_none(tmp_path):
    assert read(tmp_path / "nowhere", "measurement").height == 0
    assert not (tmp_path / "nowhere").exists()


def test_what_a_killed_writer_left_is_not_read_and_goes_when_it_is_old(store, make_fact):
    path = store.append("measurement", [make_fact()])
    old, young = path.with_name(".x.aaaa.tmp"), path.with_name(".y.bbbb.tmp")
    for temporary in (old, young):
        temporary.write_bytes(b"half a parq")
    age(old, ABANDONED + timedelta(minutes=1))
    assert store.read("measurement").height == 1
    store.compact()
    assert not old.exists() and young.exists() and path.exists()


def test_a_failed_write_leaves_nothing(store, make_fact, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    before = sorted(store.root.rglob("*"))
    with pytest.raises(OSError, match="No space left"):
        store.append("measurement", [make_fact()])
    assert [path for path in sorted(store.root.rglob("*")) if path.is_file()] == [path for path in before if path.is_file()]


def test_a_writer_that_is_killed_leaves_whole_files_only(tmp_path):
    script = (
        "from pathlib import Path; from assay.schemas.facts import RunRow; from assay.warehouse.facts import FactStore\n"
        "from datetime import datetime, UTC\n"
        f"store = FactStore(Path({str(tmp_path)!r}))\nprint('go', flush=True)\n"
        "for i in range(100_000): store.append('run', [RunRow(run=f'{i}-{j}', started_at=datetime.now(UTC)) for j in range(50)], name=f'f{i}')"
    )
    for pause in (0.05, 0.2):
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as writer:
            assert writer.stdout and writer.stdout.readline() == b"go\n"
            time.sleep(pause)
            writer.send_signal(signal.SIGKILL)
        rows = read(tmp_path, "run")
        assert rows.height % 50 == 0 and rows.height >= 50


def test_the_grain_of_every_table_is_of_its_columns():
    assert set(GRAINS) == set(TABLES)
    for table, grain in GRAINS.items():
        assert {*grain.key, *([grain.newest] if grain.newest else [])} <= set(TABLES[table].model_fields), table


_TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
_STATUS = get_args(Measurement.model_fields["status"].annotation)


@settings(max_examples=20, deadline=None)
@given(rows=st.lists(st.builds(
    Measurement, artifact_digest=_TEXT, base_digest=_TEXT, protocol_digest=_TEXT, suite=st.sampled_from(["divergence", "speed"]), metric=_TEXT,
    value=st.floats(allow_nan=False, allow_infinity=False), unit=_TEXT, n=st.integers(0, 2**62), standard_error=st.none() | st.floats(0, 1e300),
    status=st.sampled_from(["ok", "noisy"]), message=st.none() | _TEXT, seed=st.integers(0, 2**31), run=_TEXT, device_digest=st.none() | _TEXT,
    threads=st.none() | st.integers(1, 512), measured_at=st.datetimes(timezones=st.just(UTC)),
), min_size=1, max_size=6))  # fmt: skip
def test_any_fact_survives_the_way_through_a_file(rows, tmp_path_factory):
    store = FactStore(tmp_path_factory.mktemp("facts"))
    store.append("measurement", rows, name="a")
    store.append("measurement", rows, name="b")
    kept = [Measurement(**row) for row in store.read("measurement").iter_rows(named=True)]
    assert all(row in rows for row in kept)
    key = ("artifact_digest", "protocol_digest", "metric", "seed", "device_digest")
    assert {tuple(getattr(row, name) for name in key) for row in kept} == {tuple(getattr(row, name) for name in key) for row in rows}
