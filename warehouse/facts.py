"""The writer and the raw reader of facts: append-only Parquet files that any process may add to without a lock.

Not here: SQL, views and the DuckDB file (``database.py``), artifacts (``store.py``).

Layout: ``<root>/<table>/<yyyy-mm>/<name>.parquet``, one file a call of :meth:`FactStore.append`, and beside the months

- ``schema/``: a file without rows, so that ``<table>/*/*.parquet`` is never an empty glob and always has every column;
- ``compacted/``: merged files, see :meth:`FactStore.compact`.

A row may lie in two files for a while (a step that ran again next month, a compaction that is under way). That never doubles a fact,
because :func:`latest` keeps one row per grain, and every reader here goes through it. Each file has one column more than its model:
``written_at``, which decides between rows that nothing else sets apart.
"""

import logging
import os
import re
import types
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Literal, Union, get_args, get_origin

import polars as pl

from assay.schemas.facts import TABLES
from assay.schemas.spec import Spec
from assay.warehouse.locks import hold, try_hold

log = logging.getLogger(__name__)

WRITTEN_AT = "written_at"
COMPACTED, SCHEMA = "compacted", "schema"  # folders beside the months
ABANDONED = timedelta(hours=1)  # a temporary file this old has no writer any more
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,179}")
_TYPES: dict[Any, Any] = {
    str: pl.String, int: pl.Int64, float: pl.Float64, bool: pl.Boolean, datetime: pl.Datetime("us", "UTC"), list[str]: pl.List(pl.String),
}  # fmt: skip


@dataclass(frozen=True)
class Grain:
    """What makes two rows the same fact, and which of them counts: the one whose ``newest`` is later, then the one written later."""

    key: tuple[str, ...]
    newest: str | None = None
    also: tuple[pl.Expr, ...] = ()


GRAINS: dict[str, Grain] = {
    "experiment": Grain(("experiment",), "declared_at"),
    # Every digest that a variant has had is kept: `regression` compares with the previous one; the view `current_variant` has the last.
    "variant": Grain(("experiment", "variant", "artifact_digest"), "recorded_at"),
    "variant_axis": Grain(("experiment", "variant", "axis")),
    "step": Grain(("artifact_digest",), "built_at"),
    "lineage": Grain(("artifact_digest", "parent_digest", "role")),
    "protocol": Grain(("protocol_digest",)),
    "device": Grain(("device_digest",)),
    "run": Grain(("run",), "started_at"),
    # A divergence is a fact about two models; a timing (it has a device) is another fact in every run.
    "measurement": Grain(
        ("artifact_digest", "protocol_digest", "metric", "slice_kind", "slice", "seed", "device_digest"),
        "measured_at",
        (
            pl.when(pl.col("suite") == "divergence").then("base_digest").alias("_compared_with"),
            pl.when(pl.col("device_digest").is_not_null()).then("run").alias("_timed_in"),
        ),
    ),
    "item": Grain(("artifact_digest", "protocol_digest", "item", "metric", "run", "base_digest")),
    # The bounds of an experiment are replaced together, by the call that writes any of them last.
    "budget": Grain(("experiment", "variant", "metric", "at_most", "at_least", "blocks"), "recorded_at"),
    "device_constant": Grain(("device_digest", "constant", "dtype", "size", "threads", "source"), "measured_at"),
}


def polars_schema(model: type[Spec]) -> dict[str, Any]:
    """The column types of a row model, so that a column of nothing but NULL keeps its type.

    Raises:
        TypeError: a field is no str, int, float, bool, datetime, list[str] or Literal of str, nor one of these or None.
    """
    return {name: _TYPES[column_type(model, name)] for name in model.model_fields}


def column_type(model: type[Spec], name: str) -> Any:
    """The Python type of a field, without None; a Literal of words is str."""
    annotation: Any = model.model_fields[name].annotation
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not types.NoneType)
    if get_origin(annotation) is Literal and all(isinstance(word, str) for word in get_args(annotation)):
        annotation = str
    if annotation not in _TYPES:
        raise TypeError(f"{model.__name__}.{name} is {annotation}; a column is one of str, int, float, bool, datetime, list[str]")
    return annotation


def file_schema(table: str) -> dict[str, Any]:
    """The columns of the files of ``table``: those of its model and ``written_at``."""
    return {**polars_schema(TABLES[table]), WRITTEN_AT: _TYPES[datetime]}


class FactStore:
    """The facts under one directory. Any number of processes, on any machine that shares it, may write and read at once."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root).absolute()
        for table in TABLES:
            _write_seed(self.root, table)

    def append(self, table: str, rows: Sequence[Spec], *, name: str | None = None) -> Path:
        """Write ``rows`` as one file; after a kill at any moment either all of them are there or none.

        Args:
            name: of the file; a second call with the same name replaces the first, so that a step that runs again doubles nothing.
                Without it every call adds a file.
        Returns:
            The file.
        Raises:
            KeyError: no table of this name.
            TypeError: a row is not of the table's model.
            ValueError: ``name`` is no plain file name; a time has no zone; a number is not finite.
        """
        model = _model(table)
        if name is not None and not _NAME.fullmatch(name):
            raise ValueError(f"the name of a fact file is letters, digits, '_', '-' and '.', at most 180; got {name!r}")
        for row in rows:
            if type(row) is not model:
                raise TypeError(f"table {table!r} takes rows of {model.__name__}; got {type(row).__name__}")
        frame = _frame(table, rows)
        folder = self.root / table / f"{datetime.now(UTC):%Y-%m}"
        if name is None:
            return _publish(frame, folder / f"{uuid.uuid4().hex}.parquet")
        existing = next((path for month in _months(self.root / table) if (path := month / f"{name}.parquet").exists()), None)
        if existing is None:
            return _publish(frame, folder / f"{name}.parquet")
        with hold(_replace_lock(self.root, table)):  # or a compaction could take the new file for the old one that it has merged
            return _publish(frame, existing)

    def exists(self, table: str, name: str) -> bool:
        """Whether :meth:`append` has written ``name``, also if it has been merged since."""
        folder = self.root / table
        if any((month / f"{name}.parquet").exists() for month in _months(folder)):
            return True
        return any(name in _merged_names(path) for path in (folder / COMPACTED).glob("*.names"))

    def read(self, table: str) -> pl.DataFrame:
        """See :func:`read`."""
        return read(self.root, table)

    def compact(self, older_than: timedelta = timedelta(days=1), threshold: int = 2000) -> dict[str, int]:
        """Merge the files of each table that has more than ``threshold`` of them; returns how many were merged, by table.

        A reader never misses a row and never sees one twice: the merged file is published first, while its sources still lie beside it
        (rows are then in two files, of which :func:`latest` takes one), and only then are the sources removed. :func:`files` lists the
        months before ``compacted/``, so it cannot see the state before the first of these and after the second; a source that goes
        between listing and opening makes :func:`read` list again. A kill leaves a merged file beside its sources; the next call gives
        it the same name. Merged files are not merged again.

        Args:
            older_than: only files last written before this long ago, so that what is being written now is left alone.
        """
        done: dict[str, int] = {}
        for table in TABLES:
            folder = self.root / table
            with try_hold(folder / ".compact.lock") as mine:
                if not mine:
                    log.info("%s is being compacted by another process", folder)
                    continue
                _sweep(folder)
                until = datetime.now(UTC) - older_than
                sources = {path: _identity(path) for month in reversed(list(_months(folder))) for path in _parquet(month)}
                sources = {path: identity for path, identity in sources.items() if identity[1] <= until.timestamp() * 1e9}
                if len(sources) <= threshold:
                    continue
                merged = _scan(table, list(sources)).unique(maintain_order=True).collect()
                digest = sha256("\n".join(f"{path.relative_to(folder)} {identity}" for path, identity in sources.items()).encode())
                target = folder / COMPACTED / f"{digest.hexdigest()[:32]}.parquet"
                _publish_text("\n".join(path.stem for path in sources), target.with_suffix(".names"))
                _publish(merged, target)
                with hold(_replace_lock(self.root, table)):
                    for path, identity in sources.items():
                        if _identity(path) == identity:
                            path.unlink()
                done[table] = len(sources)
        return done


def files(root: Path, table: str) -> list[Path]:
    """The fact files of ``table``, merged ones last; see :meth:`FactStore.compact` for why the order matters."""
    folder = Path(root).absolute() / table
    return [path for part in (*_months(folder), folder / COMPACTED) for path in _parquet(part)]


def read(root: Path, table: str) -> pl.DataFrame:
    """Every fact of ``table`` once, with the columns of its model; nothing is locked and no writer waits.

    A column that older files lack has the model's default, and one that the model lacks is left out.
    """
    model = _model(table)
    for _ in range(100):
        paths = files(root, table)
        if not paths:
            return pl.DataFrame(schema=polars_schema(model))
        try:
            frame = _scan(table, paths).collect()
        except FileNotFoundError:  # merged by a compaction since it was listed
            continue
        return latest(table, frame).with_columns(_defaults(model)).drop(WRITTEN_AT)
    raise RuntimeError(f"the files under {Path(root) / table} kept vanishing while they were read; is something deleting them?")


def latest(table: str, frame: pl.DataFrame) -> pl.DataFrame:
    """One row per grain of ``table`` (see ``GRAINS``), the newest."""
    grain = GRAINS[table]
    order = [column for column in (grain.newest, WRITTEN_AT) if column]
    if table == "budget":
        frame = frame.filter(pl.col(WRITTEN_AT) == pl.col(WRITTEN_AT).max().over("experiment"))
    kept, key = frame.with_columns(grain.also), [*grain.key, *(expr.meta.output_name() for expr in grain.also)]
    # Where all hashes differ no two keys can be equal, which takes a fifth of the time to see.
    if kept.select(pl.struct(key).hash().n_unique()).item() < kept.height:
        kept = kept.sort(order).unique(key, keep="last")
    return kept.select(frame.columns).sort([*grain.key, *order], nulls_last=True)


def _model(table: str) -> type[Spec]:
    if table not in TABLES:
        raise KeyError(f"no table {table!r}; there are {', '.join(TABLES)}")
    return TABLES[table]


def _frame(table: str, rows: Sequence[Spec]) -> pl.DataFrame:
    values: list[Mapping[str, Any]] = [row.model_dump() for row in rows]
    for value in values:
        for column, each in value.items():
            if isinstance(each, datetime) and each.tzinfo is None:
                raise ValueError(f"{table}.{column} has no time zone: {each.isoformat()}; take datetime.now(UTC)")
    now = datetime.now(UTC)
    frame = pl.DataFrame([{**value, WRITTEN_AT: now} for value in values], schema=file_schema(table), orient="row")
    for column, kind in frame.schema.items():
        if kind == pl.Float64 and not frame[column].is_finite().fill_null(True).all():
            raise ValueError(f"{table}.{column} holds a number that is not finite; store NULL, with a status that says so")
    return frame


def _publish(frame: pl.DataFrame, path: Path) -> Path:
    """Write beside ``path`` under a name that no reader lists, flush to the disk, then take its place at once."""
    with _replacing(path) as file:
        frame.write_parquet(file)
    return path


def _publish_text(text: str, path: Path) -> None:
    with _replacing(path) as file:
        file.write(text.encode())


@contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@lru_cache(maxsize=256)
def _merged_names(path: Path) -> frozenset[str]:
    """The names of the files that were merged; such a list never changes."""
    return frozenset(path.read_text(encoding="utf-8").split("\n"))


def _scan(table: str, paths: list[Path]) -> pl.LazyFrame:
    # glob=False: a directory may be called [a]*. The casts read a file that an older schema wrote with narrower numbers.
    casts = pl.ScanCastOptions(integer_cast=["upcast", "allow-float"], float_cast="upcast", datetime_cast="nanosecond-downcast")
    return pl.scan_parquet(
        paths, schema=file_schema(table), missing_columns="insert", extra_columns="ignore", glob=False, cast_options=casts,
        hive_partitioning=False,
    )  # fmt: skip


def _defaults(model: type[Spec]) -> list[pl.Expr]:
    """For every column that has a default other than None: NULL reads as it."""
    defaults = {name: field.default for name, field in model.model_fields.items() if not field.is_required()}
    return [pl.col(name).fill_null(pl.lit(default)) for name, default in defaults.items() if default is not None]


def _months(folder: Path) -> Iterator[Path]:
    """The month folders, newest first."""
    if folder.is_dir():
        yield from sorted((each for each in folder.iterdir() if each.is_dir() and each.name not in (COMPACTED, SCHEMA)), reverse=True)


def _parquet(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(each.name for each in entries if each.name.endswith(".parquet") and not each.name.startswith("."))
    except FileNotFoundError:
        return []
    return [folder / name for name in names]


def _write_seed(root: Path, table: str) -> None:
    schema = file_schema(table)
    digest = sha256(str({name: str(kind) for name, kind in schema.items()}).encode()).hexdigest()[:16]
    path = root / table / SCHEMA / f"{digest}.parquet"
    if not path.exists():
        _publish(pl.DataFrame(schema=schema), path)


def _identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _replace_lock(root: Path, table: str) -> Path:
    return root / table / ".replace.lock"


def _sweep(folder: Path) -> None:
    """Remove what writers that were killed have left: temporary files that no reader lists."""
    oldest = (datetime.now(UTC) - ABANDONED).timestamp()
    for path in folder.glob("*/.*.tmp"):
        try:
            if path.stat().st_mtime < oldest:
                path.unlink()
        except FileNotFoundError:
            continue
