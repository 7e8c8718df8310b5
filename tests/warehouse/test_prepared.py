"""The file that keeps the views: what is copied from it is what the statements make, and without it nothing is missing."""

import re
import threading

import duckdb
import pytest

from assay.warehouse.database import connect, statements
from assay.warehouse.prepared import prepared

CATALOG = (
    "SELECT table_name, comment, sql FROM duckdb_tables() ORDER BY ALL",
    "SELECT view_name, comment, sql FROM duckdb_views() WHERE NOT internal ORDER BY ALL",
    "SELECT table_name, column_name, data_type, is_nullable, column_default, comment FROM duckdb_columns() WHERE NOT internal ORDER BY ALL",
    "SELECT table_name, constraint_type, constraint_text FROM duckdb_constraints() ORDER BY ALL",
    "SELECT table_name, is_unique, expressions FROM duckdb_indexes() ORDER BY ALL",
    "SELECT function_name, parameters, macro_definition FROM duckdb_functions() WHERE NOT internal ORDER BY ALL",
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".cache" / "assay" / "views"


def copied(made: list[str]) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    with prepared(connection, made) as prepare:
        prepare()
    return connection


def words(rows: list[tuple]) -> list[list[str]]:
    """What rows say, in any order: DuckDB tells the parts of a REPLACE as they come."""
    return [sorted(re.findall(r"\w+", str(row))) for row in rows]


def test_a_copy_is_what_the_statements_make(home):
    with duckdb.connect() as direct, copied(statements()) as copy:
        for statement in statements():
            direct.execute(statement)
        for query in CATALOG:
            rows = direct.sql(query).fetchall()
            assert rows and words(copy.sql(query).fetchall()) == words(rows)
        assert copy.sql("SELECT count(*) FROM duckdb_databases() WHERE NOT internal").fetchall() == [(1,)]
    assert len(list(home.iterdir())) == 1


def test_other_statements_have_another_file(home):
    with copied(["CREATE VIEW one AS SELECT 1 AS x"]) as one, copied(["CREATE VIEW one AS SELECT 2 AS x"]) as two:
        assert one.sql("FROM one").fetchall() + two.sql("FROM one").fetchall() == [(1,), (2,)]
    assert len(list(home.glob("*.duckdb"))) == 2


def test_a_file_that_is_damaged_or_cannot_be_made_changes_nothing(home, tmp_path):
    made = ["CREATE VIEW one AS SELECT 1 AS x"]
    copied(made).close()
    (path,) = home.iterdir()
    path.write_bytes(b"no database" * 1000)
    with copied(made) as connection:
        assert connection.sql("FROM one").fetchall() == [(1,)]
    with copied(made) as connection:  # the damaged one was removed, and this one is made anew
        assert connection.sql("FROM one").fetchall() == [(1,)] and path.read_bytes()[:2] != b"no"
    path.unlink()
    home.rmdir()
    home.write_text("in the way of the folder")
    with copied(made) as connection:
        assert connection.sql("FROM one").fetchall() == [(1,)]


def test_a_statement_that_is_wrong_is_told(home):
    with pytest.raises(duckdb.Error, match="nothing_like_it"):
        copied(["CREATE VIEW one AS FROM nothing_like_it"])
    assert not home.exists() or not list(home.iterdir())


def test_many_may_begin_at_once(home, tmp_path):
    found: list[int] = []

    def read() -> None:
        with connect(tmp_path / "facts") as connection:
            found.append(len(connection.sql("FROM scorecard").fetchall()))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == [0, 0, 0] and len(list(home.iterdir())) == 1
