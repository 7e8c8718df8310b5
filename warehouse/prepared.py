"""The tables, macros and views of the warehouse, prepared once on a machine and copied into each database that is filled.

Not here: facts (``facts.py``), filling a database with them (``database.py``).

DuckDB parses and binds a view when it is created. That of all views takes most of a second, and copying them from a file that has them some
hundredths. So the first database of this DuckDB and these statements leaves such a file, without a row, under ``~/.cache/assay/views``.
"""

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import duckdb
from duckdb import DuckDBPyConnection

log = logging.getLogger(__name__)
UNUSED_DAYS = 30  # a file that was left by other statements so long ago is removed


@contextmanager
def prepared(connection: DuckDBPyConnection, statements: Sequence[str]) -> Iterator[Callable[[], None]]:
    """What brings the current database of ``connection``, which is empty, to where ``statements`` would: to be called once, in a transaction or not.

    It copies from the file that has them, if there is one or it can be made, and runs them otherwise.

    Raises:
        duckdb.Error: a statement is wrong.
    """
    attached = _attach(connection, statements)
    ((current,),) = connection.sql("SELECT current_database()").fetchall()
    made = [f'COPY FROM DATABASE {attached} TO "{current}" (SCHEMA)'] if attached else statements

    def prepare() -> None:
        for statement in made:
            connection.execute(statement)

    try:
        yield prepare
    finally:
        if attached:
            connection.execute(f"DETACH {attached}")


def _attach(connection: DuckDBPyConnection, statements: Sequence[str]) -> str | None:
    """The name under which the file of ``statements`` is attached; None where it cannot be."""
    name, path = "_prepared", None
    try:
        path = _file(statements)
        quoted = str(path).replace("'", "''")
        connection.execute(f"ATTACH '{quoted}' AS {name} (READ_ONLY)")
    except (OSError, RuntimeError, duckdb.Error) as error:
        log.info("the views are made anew, since the file that keeps them cannot be used: %s", error)
        if path is not None:
            path.unlink(missing_ok=True)
        return None
    return name


def _file(statements: Sequence[str]) -> Path:
    """The file of ``statements``, made if it is not there."""
    directory = Path.home() / ".cache" / "assay" / "views"
    name = sha256("\0".join((duckdb.__version__, *statements)).encode()).hexdigest()[:32]
    path = directory / f"{name}.duckdb"
    if path.is_file():
        return path
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    building = directory / f".{name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        with duckdb.connect(str(building)) as connection:
            for statement in statements:
                connection.execute(statement)
        building.replace(path)
    finally:
        building.unlink(missing_ok=True)
    oldest = time.time() - UNUSED_DAYS * 86400
    for other in (*directory.glob("*.duckdb"), *directory.glob(".*.tmp")):
        if other.stat().st_mtime < oldest:
            other.unlink(missing_ok=True)
    return path
