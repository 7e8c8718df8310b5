"""SQL at a terminal: one query printed as a table, CSV, JSON or Markdown, or a prompt that answers one after the other.

Not here: what is asked (``views/``), how a command line is parsed (``assets/cli.py``).
"""

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

import duckdb
from duckdb import DuckDBPyConnection
from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.lexers import PygmentsLexer
from prompt_toolkit.output import Output
from pygments.lexers.sql import SqlLexer
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from assay.warehouse.database import WarehouseError, one_line

Format = Literal["table", "csv", "json", "markdown"]
FORMATS: tuple[Format, ...] = ("table", "csv", "json", "markdown")
MOST_ROWS, WIDEST_CELL = 200, 48  # of a table on a terminal
GAP = 3  # columns between two cells
_READING = {"SELECT", "EXPLAIN"}
_NUMBERS = re.compile(r"U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|FLOAT|DOUBLE|DECIMAL.*")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_KEYWORDS = (
    "SELECT FROM WHERE GROUP BY ORDER BY HAVING QUALIFY LIMIT JOIN LEFT JOIN USING ON AS AND OR NOT IN IS NULL LIKE BETWEEN CASE WHEN THEN "
    "ELSE END DISTINCT UNION ALL WITH DESC ASC NULLS LAST FILTER OVER PARTITION BY PIVOT EXCLUDE DESCRIBE SUMMARIZE EXPLAIN "
    "count sum avg min max median round abs ln exp coalesce arg_min arg_max"
)
KEYWORDS = tuple(dict.fromkeys(_KEYWORDS.split()))
HELP = """\
A statement ends with ; and may take several lines. Tab completes, ↑ recalls, Ctrl-C drops the line, Ctrl-D leaves.
  .tables          tables and views, and what each answers
  .schema NAME     columns of one, with types and units
  .format NAME     table, csv, json or markdown
  .help  .quit
Every statement reads the facts as they are then; nothing can be written from here."""


class QueryError(WarehouseError):
    """A statement that was refused or failed, in one line."""


def run_sql(connection: DuckDBPyConnection, sql: str, *, format: Format = "table", console: Console | None = None) -> None:
    """Print what each statement of ``sql`` returns.

    Args:
        format: ``table`` and ``markdown`` round numbers to four digits and show NULL as —; ``csv`` and ``json`` are exact (NULL is an
            empty field, and null). A table on a terminal is cut to its width, with a line that says what was left out.
    Raises:
        QueryError: the statement does not only read, or DuckDB cannot run it.
        ValueError: no such format.
    """
    if format not in FORMATS:
        raise ValueError(f"no format {format!r}; there are {', '.join(FORMATS)}")
    console = console or Console()
    for query in _reading_statements(connection, sql):
        try:
            relation = connection.sql(query)
            columns, types = list(relation.columns), [str(kind) for kind in relation.types]
            rows = relation.fetchall()
        except duckdb.Error as error:
            raise QueryError(one_line(error)) from error
        if format == "csv":
            writer = csv.writer(console.file, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(["" if cell is None else _exact(cell) for cell in row] for row in rows)
        elif format == "json":
            objects = ",\n ".join(json.dumps(dict(zip(columns, map(_json, row), strict=True)), ensure_ascii=False) for row in rows)
            console.file.write(f"[{objects}]\n")
        elif format == "markdown":
            _markdown(console, columns, types, rows)
        elif columns == ["explain_key", "explain_value"]:
            console.file.write("".join(f"{value}\n" for _, value in rows))
        else:
            _table(console, columns, types, rows)


def prompt(
    connect: Callable[[], DuckDBPyConnection],
    *,
    history: Path | None = None,
    format: Format = "table",
    console: Console | None = None,
    input: Input | None = None,
    output: Output | None = None,
) -> None:
    """Ask for statements and answer them until ``.quit`` or the end of the input; an error is one line and the prompt goes on.

    Args:
        connect: called for every statement, so that each sees the newest facts.
        history: a file that keeps what was asked.
        input, output: a terminal other than the process's own.
    """
    console = console or Console()
    if history:
        history.parent.mkdir(parents=True, exist_ok=True)
    names = _Names()
    session: PromptSession[str] = PromptSession(
        "assay> ", history=FileHistory(str(history)) if history else InMemoryHistory(), completer=names, complete_while_typing=False,
        lexer=PygmentsLexer(SqlLexer), multiline=True, key_bindings=_enter_ends_a_statement(), prompt_continuation="     > ", input=input,
        output=output,
    )  # fmt: skip
    try:
        with connect() as connection:
            names.learn(connection)
    except (WarehouseError, duckdb.Error) as error:
        console.print(Text(one_line(error), style="red"))
    console.print(Text("SQL over the facts; .tables lists them, .help says more.", style="dim"))
    while True:
        try:
            said = session.prompt().strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        command, _, argument = said.partition(" ")
        if command in (".quit", ".exit"):
            return
        try:
            if command == ".format":
                if argument not in FORMATS:
                    raise QueryError(f"no format {argument!r}; there are {', '.join(FORMATS)}")
                format = argument
            elif said.strip("; "):
                with connect() as connection:
                    names.learn(connection)
                    _answer(connection, said, command, argument.strip(), format, console)
        except (QueryError, WarehouseError, duckdb.Error) as error:
            console.print(Text(one_line(error), style="red"))
        except KeyboardInterrupt:
            console.print(Text("interrupted", style="red"))


def shown(value: Any) -> str:
    """``value`` as a person reads it: four significant digits, thousands apart, NULL as —, a digest by its first twelve digits."""
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float | Decimal):
        return _number(float(value))
    if isinstance(value, datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S")
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    text = str(value)
    if _DIGEST.fullmatch(text):
        return f"{text[:12]}…"
    return "".join(each if each.isprintable() else " " if each.isspace() else "\N{REPLACEMENT CHARACTER}" for each in text)


def _number(value: float) -> str:
    size = abs(value)
    if size == 0 or not math.isfinite(value):
        return f"{value:g}"
    if not 1e-4 <= size < 1e15:
        return f"{value:.3e}"
    return f"{value:,.{max(0, 3 - math.floor(math.log10(size)))}f}"


def _reading_statements(connection: DuckDBPyConnection, sql: str) -> Iterator[str]:
    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise QueryError(one_line(error)) from error
    if not statements:
        raise QueryError("there is no statement; for example: SELECT * FROM scorecard")
    for statement in statements:
        kind = statement.type.name
        pivots = kind == "MULTI" and re.search(r"\bpivot\b", statement.query, re.IGNORECASE)  # a pivot is run as several statements
        if kind not in _READING and not pivots:
            raise QueryError(f"{kind} is refused: here the warehouse is only read; keep a result with --format csv, write facts by running")
    for statement in statements:
        yield statement.query


def _cells(types: Sequence[str], rows: Sequence[Sequence[Any]]) -> tuple[list[list[str]], list[bool]]:
    """The cells as text, and which columns are numbers; the fractions of a column line up."""
    numeric = [bool(_NUMBERS.fullmatch(kind)) for kind in types]
    columns = [
        _fractions([None if cell is None else float(cell) for cell in column]) if number and "INT" not in kind else list(map(shown, column))
        for column, kind, number in zip(zip(*rows, strict=True), types, numeric, strict=False)
    ]
    return [list(row) for row in zip(*columns, strict=True)], numeric


def _fractions(column: list[float | None]) -> list[str]:
    """With as many decimals as give the largest number four digits and the smallest two; each by itself where they lie too far apart."""
    sizes = [abs(each) for each in column if each is not None and each != 0]
    if all(math.isfinite(size) and size < 1e15 and size == int(size) for size in sizes):
        decimals = 0
    elif not all(1e-4 <= size < 1e15 for size in sizes):
        return list(map(shown, column))
    else:
        decimals = max(0, 3 - math.floor(math.log10(max(sizes))), 1 - math.floor(math.log10(min(sizes))))
    return [shown(None) if each is None else f"{each:,.{decimals}f}" for each in column]


def _table(console: Console, columns: list[str], types: list[str], rows: Sequence[Sequence[Any]]) -> None:
    cut = console.is_terminal
    cells, numeric = _cells(types, rows[:MOST_ROWS] if cut else rows)
    if cut:
        cells = [[cell if cell_len(cell) <= WIDEST_CELL else cell[: WIDEST_CELL - 1] + "…" for cell in row] for row in cells]
    widths = [max(cell_len(text) for text in (column, *(row[at] for row in cells))) + GAP for at, column in enumerate(columns)]
    fit = len(columns)
    while cut and fit > 1 and sum(widths[:fit]) - GAP > console.width:
        fit -= 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for at, column in enumerate(columns[:fit]):
        table.add_column(Text(column), justify="right" if numeric[at] else "left", no_wrap=True)
    for row in cells:
        table.add_row(*(Text(cell) for cell in row[:fit]))
    (console if cut else Console(file=console.file, width=sum(widths))).print(table)
    left_out = [f"{len(rows) - len(cells):,} more rows"] if len(rows) > len(cells) else []
    left_out += [f"{len(columns) - fit} more columns: {', '.join(columns[fit:])}"] if fit < len(columns) else []
    if left_out:
        console.print(Text(f"… {' and '.join(left_out)}. Name the columns, add a LIMIT, or use --format csv.", style="dim"))


def _markdown(console: Console, columns: list[str], types: list[str], rows: Sequence[Sequence[Any]]) -> None:
    cells, numeric = _cells(types, rows)
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in (columns, *cells)]
    lines = [escaped[0], ["---:" if number else "---" for number in numeric], *escaped[1:]]
    console.file.write("".join(f"| {' | '.join(line)} |\n" for line in lines))


def _exact(cell: Any) -> Any:
    return (
        cell.isoformat()
        if isinstance(cell, date)
        else json.dumps(cell, default=str, ensure_ascii=False)
        if isinstance(cell, list | dict)
        else cell
    )


def _json(cell: Any) -> Any:
    """``cell`` as JSON can say it; a number that is not finite has no JSON and is null."""
    if isinstance(cell, float | Decimal):
        return float(cell) if math.isfinite(cell) else None
    if isinstance(cell, dict):
        return {str(key): _json(value) for key, value in cell.items()}
    if isinstance(cell, list | tuple):
        return [_json(value) for value in cell]
    if isinstance(cell, date):
        return cell.isoformat()
    return cell if cell is None or isinstance(cell, bool | int | str) else str(cell)


def _answer(connection: DuckDBPyConnection, said: str, command: str, argument: str, format: Format, console: Console) -> None:
    if command == ".help":
        console.print(Text(HELP))
    elif command == ".tables":
        query = """
            SELECT table_name AS name, 'table' AS kind, comment FROM duckdb_tables()
            UNION ALL SELECT view_name, 'view', comment FROM duckdb_views() WHERE NOT internal ORDER BY kind, name"""
        for name, kind, comment in connection.sql(query).fetchall():
            console.print(Text.assemble((f"{name:<20}", "bold"), f" {kind:<6} {(comment or '').split(' Grain: ')[0]}"), soft_wrap=True)
    elif command == ".schema":
        query = """
            SELECT column_name AS column, data_type AS type, c.comment FROM duckdb_columns() AS c
            WHERE table_name = $name AND NOT internal ORDER BY column_index"""
        rows = connection.sql(query, params={"name": argument}).fetchall()
        if not rows:
            raise QueryError(f"no table or view {argument!r}; .tables lists them")
        about = "SELECT comment FROM duckdb_tables() WHERE table_name = $name UNION ALL SELECT comment FROM duckdb_views() WHERE view_name = $name"
        for (comment,) in connection.sql(about, params={"name": argument}).fetchall():
            console.print(Text(comment or ""), soft_wrap=True)
        for column, kind, comment in rows:
            console.print(Text.assemble((f"  {column:<28}", "bold"), f" {kind:<25} {comment or ''}".rstrip()), soft_wrap=True)
    elif command.startswith("."):
        raise QueryError(f"no command {command!r}; .help lists them")
    else:
        run_sql(connection, said, format=format, console=console)


class _Names(Completer):
    """Completes tables and views after FROM, JOIN and .schema; elsewhere the columns of those that are named, then keywords."""

    def __init__(self) -> None:
        self.columns: dict[str, list[str]] = {}

    def learn(self, connection: DuckDBPyConnection) -> None:
        found = "SELECT table_name, list(column_name ORDER BY column_index) FROM duckdb_columns() WHERE NOT internal GROUP BY table_name"
        self.columns = dict(connection.sql(found).fetchall())

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        before, word = re.fullmatch(r"(.*?)((?:(?<!\w)\.)?\w*)", document.text_before_cursor, re.DOTALL).groups()  # type: ignore[union-attr]
        if word.startswith(".") and not before.strip():
            found = [".tables", ".schema", ".format", ".help", ".quit"]
        elif re.search(r"(\b(from|join|describe|summarize)|\.schema)\s+$", before, re.IGNORECASE):
            found = sorted(self.columns)
        else:
            named = [table for table in self.columns if re.search(rf"\b{re.escape(table)}\b", document.text)] or list(self.columns)
            columns = sorted({column for table in named for column in self.columns[table]})
            found = [*columns, *sorted(self.columns), *KEYWORDS]
        for each in dict.fromkeys(found):
            if each.lower().startswith(word.lower()):
                yield Completion(each, start_position=-len(word))


def _enter_ends_a_statement() -> KeyBindings:
    """Enter runs a statement that ends with ``;`` or a command, and is a new line otherwise."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        text = buffer.text.strip()
        if buffer.complete_state and buffer.complete_state.current_completion:
            buffer.complete_state = None
        elif not text or text.endswith(";") or text.startswith("."):
            buffer.validate_and_handle()
        else:
            buffer.insert_text("\n")

    return bindings
