"""The warehouse as DuckDB sees it: declared tables filled from the facts, the views over them, and the file that is published.

Not here: writing facts (``facts.py``), questions (``views/``, ``reads.py``), the prompt (``prompt.py``).

:func:`connect` and :func:`snapshot` run the same statements; one fills a database in memory, the other a file. So both answer alike,
nobody ever opens a shared file for writing, and a writer of facts waits for no reader.
"""

import re
import uuid
from collections.abc import Set
from functools import cache
from pathlib import Path

import duckdb
import polars as pl
from duckdb import DuckDBPyConnection

from assay.schemas.facts import TABLES
from assay.schemas.metrics import METRICS
from assay.warehouse.claims import claims_view
from assay.warehouse.facts import read
from assay.warehouse.locks import hold
from assay.warehouse.prepared import prepared

HERE = Path(__file__).parent
# Each view after those that it reads. `metric` comes from schemas/protocols.py, and one view per experiment from its axes.
VIEWS = (
    "current_variant", "base_variant", "measured_variant", "attempt", "latest", "item_run", "noise_floor", "by_slice", "fact", "accuracy", "scorecard_protocol",
    "headline", "scorecard", "pareto", "versus_base", "interaction", "variant_item", "paired", "work", "regression", "verdict", "roofline", "made_of", "compared", "claims",
)  # fmt: skip
# Views whose rows are kept, since others read them often: the same SQL, run once when the database is filled, which nobody writes after.
STORED = frozenset(
    {"current_variant", "base_variant", "latest", "item_run", "noise_floor", "by_slice", "fact", "headline", "made_of", "compared"}
)
# The claims take half a second whatever there is: kept in the file, which is made seldom, and not by each `assay sql`.
PUBLISHED = STORED | {"claims"}
STORAGE_VERSION = "v1.4.0"  # what clients older than the one that writes can still open
_NAME = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*")


class WarehouseError(Exception):
    """The facts cannot be read as tables; the message says which and why."""


def connect(facts_root: Path) -> DuckDBPyConnection:
    """A database in memory with all tables and views, of the facts as they are now.

    Its SQL reaches nothing else: no file can be read, written or attached, no extension loaded, no setting changed. It locks nothing;
    connect again to see newer facts.

    Raises:
        WarehouseError: a fact file is damaged, or breaks a rule of its table.
    """
    connection = duckdb.connect(
        config={"autoinstall_known_extensions": "false", "autoload_known_extensions": "false", "temp_directory": ""}
    )
    try:
        fill(connection, facts_root)
        connection.execute("SET enable_external_access = false")
        connection.execute("SET lock_configuration = true")
    except BaseException:
        connection.close()
        raise
    return connection


def snapshot(facts_root: Path, target: Path) -> Path:
    """Publish the facts as the DuckDB file ``target``: readers that have it open keep what they opened, later ones see the new.

    Built beside it, checkpointed and closed, then moved into its place; a kill leaves the old file as it was. Of two at once, the
    second waits and publishes what there is by then.

    Raises:
        WarehouseError: as :func:`connect`.
    """
    target = Path(target).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with hold(target.with_name(f".{target.name}.lock"), waiting_for=f"another snapshot to {target.name}"):
        for abandoned in target.parent.glob(f".{target.name}.*.building*"):
            abandoned.unlink()
        building = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.building")
        connection = duckdb.connect()
        try:
            connection.execute(f"ATTACH {literal(str(building))} AS building (STORAGE_VERSION '{STORAGE_VERSION}')")
            connection.execute("USE building")
            fill(connection, facts_root, kept=PUBLISHED)
            connection.execute("CHECKPOINT building")
            connection.execute("USE memory")
            connection.execute("DETACH building")
        except BaseException:
            connection.close()
            building.unlink(missing_ok=True)
            building.with_name(building.name + ".wal").unlink(missing_ok=True)
            raise
        connection.close()
        target.with_name(target.name + ".wal").unlink(
            missing_ok=True
        )  # of someone who wrote into the old file: it does not fit the new one
        building.replace(target)
    return target


def fill(connection: DuckDBPyConnection, facts_root: Path, *, kept: Set[str] = STORED) -> None:
    """Create every table and view in the current database of ``connection`` and insert the facts, in one transaction.

    Args:
        kept: the views whose rows are kept.
    Raises:
        WarehouseError: as :func:`connect`; nothing is left of what was begun.
    """
    connection.execute("SET TimeZone = 'UTC'")
    with prepared(connection, statements()) as prepare:
        connection.execute("BEGIN")
        try:
            prepare()
            for table in TABLES:
                frame = _facts(facts_root, table)
                if not frame.is_empty():
                    insert(connection, table, frame)
            finish_views(connection, kept=kept)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")


def insert(connection: DuckDBPyConnection, table: str, frame: pl.DataFrame) -> None:
    """Insert ``frame`` by the names of its columns, whatever their order: all columns are numbers, so a swap would raise no error.

    Raises:
        WarehouseError: a column that the table lacks, or a row that breaks one of its rules.
    """
    connection.register("_incoming", frame)
    try:
        connection.execute(f"INSERT INTO {identifier(table)} BY NAME SELECT * FROM _incoming")
    except duckdb.Error as error:
        raise WarehouseError(f"the facts of table {table} do not fit it: {one_line(error)}") from error
    finally:
        connection.unregister("_incoming")


@cache
def statements() -> tuple[str, ...]:
    """What makes an empty database one of the tables, the macros, the view ``metric`` and those of ``views/*.sql``; no experiment is known yet."""
    made = [(HERE / "tables" / f"{table}.sql").read_text(encoding="utf-8") for table in TABLES]
    made.append((HERE / "macros.sql").read_text(encoding="utf-8"))
    kinds = [(metric, suite, better) for suite, metrics in METRICS.items() for metric, better in metrics.items()]
    rows = ", ".join(f"({', '.join('NULL' if each is None else literal(each) for each in kind)})" for kind in kinds)
    made.append(f"CREATE OR REPLACE VIEW metric AS SELECT * FROM (VALUES {rows}) AS metrics (metric, suite, better)")
    told = "Which suite measures a metric, and is lower or higher better (NULL: neither)? Grain: one row per metric."
    made.append(_comment("VIEW", "metric", told))
    for view in VIEWS:
        sql = _view(view)
        made += [claims_view(sql) if view == "claims" else sql, _comment("VIEW", view, _question(sql))]
    return tuple(made)


def finish_views(connection: DuckDBPyConnection, *, kept: Set[str] = STORED) -> None:
    """Turn the views of ``kept`` into tables that hold the rows of the same SQL, and create a view for every experiment whose name is one.

    (``schemas.spec.Name`` says what a name is.)
    """
    for view in VIEWS:
        if view in kept:
            # Who asks for one metric then reads only the parts of the table that have it.
            order = " ORDER BY metric" if view == "by_slice" else ""
            connection.execute(f"CREATE TABLE _kept AS FROM {view}{order}; DROP VIEW {view}; ALTER TABLE _kept RENAME TO {view}")
            connection.execute(_comment("TABLE", view, _question(_view(view))))
    experiments = connection.sql("SELECT experiment FROM experiment UNION SELECT experiment FROM variant ORDER BY experiment").fetchall()
    columns = {name for (name,) in connection.sql("SELECT column_name FROM (DESCRIBE scorecard)").fetchall()}
    for (experiment,) in experiments:
        if _NAME.fullmatch(experiment):
            create_experiment_view(connection, experiment, columns)


def experiment_view(connection: DuckDBPyConnection, experiment: str) -> str:
    """The name of the view of ``experiment``: its own, or with ``experiment_`` before it where a table or another view has that name."""
    builtin = connection.sql("SELECT table_name FROM duckdb_tables() UNION SELECT view_name FROM duckdb_views() WHERE internal").fetchall()
    return prefixed("experiment", experiment, {*VIEWS, "metric", *(name for (name,) in builtin)})


def create_experiment_view(connection: DuckDBPyConnection, experiment: str, columns: Set[str]) -> None:
    """Create the view of one experiment: its variants in declared order, a column per axis, then ``columns``, which are those of ``scorecard``.

    A column is called as its axis, or with ``axis_`` before it where ``scorecard`` has a column of that name.
    """
    declared = connection.sql("SELECT axes FROM experiment WHERE experiment = $name", params={"name": experiment}).fetchall()
    known = "SELECT list(DISTINCT axis ORDER BY axis) FROM variant_axis WHERE experiment = $name"  # written by who declares no experiment
    axes = declared[0][0] if declared else connection.sql(known, params={"name": experiment}).fetchall()[0][0] or []
    axes = [axis for axis in axes if _NAME.fullmatch(axis)]
    names = [identifier(prefixed("axis", axis, columns)) for axis in axes]
    pivot = "".join(f", max(option) FILTER (axis = {literal(axis)}) AS {name}" for axis, name in zip(axes, names, strict=True))
    view = experiment_view(connection, experiment)
    connection.execute(
        f"CREATE OR REPLACE VIEW {identifier(view)} AS "
        f"SELECT s.variant{''.join(f', a.{name}' for name in names)}, s.* EXCLUDE (experiment, variant) FROM scorecard AS s "
        f"LEFT JOIN (SELECT variant{pivot} FROM variant_axis WHERE experiment = {literal(experiment)} GROUP BY variant) AS a "
        f"ON a.variant = s.variant WHERE s.experiment = {literal(experiment)} "
        f"ORDER BY list_position((SELECT variants FROM experiment WHERE experiment = {literal(experiment)}), s.variant), s.variant"
    )
    told = f"The experiment {experiment}: its axes as columns, then those of scorecard. Grain: one row per variant."
    connection.execute(_comment("VIEW", view, told))


def prefixed(prefix: str, name: str, taken: Set[str]) -> str:
    """``name``, or with ``prefix`` where it is taken or has the prefix already: two names never come to the same."""
    return f"{prefix}_{name}" if name in taken or name.startswith(f"{prefix}_") else name


def identifier(text: str) -> str:
    """``text`` as the name of a table or column, whatever is in it."""
    return '"' + text.replace('"', '""') + '"'


def literal(text: str) -> str:
    """``text`` as an SQL string, whatever is in it."""
    return "'" + text.replace("'", "''") + "'"


def one_line(error: Exception) -> str:
    """What ``error`` says, without the query that it repeats."""
    said = re.split(r"\n+LINE \d+:", str(error), maxsplit=1)[0]
    return " ".join(said.split())


def _facts(facts_root: Path, table: str) -> pl.DataFrame:
    try:
        return read(facts_root, table)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise WarehouseError(
            f"the facts of table {table} under {facts_root} cannot be read: {one_line(error)}; move the damaged file away and run its step again"
        ) from error


@cache
def _view(view: str) -> str:
    return (HERE / "views" / f"{view}.sql").read_text(encoding="utf-8")


def _question(sql: str) -> str:
    """What the lines before the first statement of a view say."""
    return " ".join(line.removeprefix("-- ") for line in sql.split("\nCREATE ")[0].splitlines())


def _comment(kind: str, name: str, text: str) -> str:
    return f"COMMENT ON {kind} {identifier(name)} IS {literal(text)}"
