"""SQL at a terminal: what is printed, what is refused, and that a mistake never ends the prompt."""

import csv
import io
import json
import math

import duckdb
import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console

from assay.warehouse import prompt as module
from assay.warehouse.database import connect
from assay.warehouse.prompt import QueryError, prompt, run_sql, shown

TABLE = "SELECT prune, quantize, draft, kl_mean_nats, decode_tok_s, acceptance_rate, size_bytes FROM quickstart WHERE draft = 'none'"


@pytest.fixture
def warehouse(quickstart_warehouse):
    return quickstart_warehouse


@pytest.fixture
def printed(warehouse):
    def run(sql: str, *, width: int | None = None, **options) -> str:
        """What is printed to a file, or with ``width`` to a terminal."""
        console = Console(file=io.StringIO(), force_terminal=width is not None, width=width, color_system=None)
        run_sql(warehouse, sql, console=console, **options)
        return console.file.getvalue()

    return run


def test_a_table_has_its_numbers_on_the_right_and_null_as_a_dash(printed):
    assert [line.rstrip() for line in printed(TABLE).rstrip().split("\n")] == [
        "prune    quantize   draft   kl_mean_nats   decode_tok_s   acceptance_rate   size_bytes",
        "──────────────────────────────────────────────────────────────────────────────────────",
        "none     none       none          0.0000          20.00                 —        1,000",
        "none     int4       none          0.0625          12.50                 —          300",
        "depth4   none       none          0.2500          24.00                 —          900",
        "depth4   int4       none          0.5000          27.00                 —          270",
    ]


@pytest.mark.parametrize(("value", "text"), [
    (None, "—"), (True, "true"), (0, "0"), (1234567, "1,234,567"), (0.0, "0"), (0.123456, "0.1235"), (12.3456, "12.35"), (1234.56, "1,235"),
    (0.00012345, "0.0001234"), (0.000012345, "1.234e-05"), (-0.5, "-0.5000"), (1e20, "1.000e+20"), (math.nan, "nan"), (math.inf, "inf"),
    ("a" * 64, "a" * 12 + "…"), ("g" * 64, "g" * 64), (["a", 1], "a, 1"), ("two\nlines", "two lines"), ("\x1b[31mred", "\ufffd[31mred"),
])  # fmt: skip
def test_a_value_as_a_person_reads_it(value, text):
    assert shown(value) == text


@pytest.mark.parametrize(("values", "cells"), [
    ("1.0, 2.0, NULL", ["1", "2", "—"]), ("0.5, 12.345", ["0.50", "12.35"]), ("0.004, 12.345", ["0.0040", "12.3450"]),
    ("1e-9, 12.345", ["1.000e-09", "12.35"]), ("0.0, 0.25", ["0.0000", "0.2500"]), ("NULL", ["—"]),
])  # fmt: skip
def test_the_fractions_of_a_column_line_up(printed, values, cells):
    lines = printed(f"SELECT unnest([{values}]::DOUBLE[]) AS x", format="markdown").splitlines()[2:]
    assert [line.strip("| ") for line in lines] == cells


def test_a_wide_table_is_cut_on_a_terminal_with_a_word_about_it_and_nowhere_else(printed):
    narrow = printed("FROM quickstart", width=60)
    assert all(len(line) <= 60 for line in narrow.splitlines())
    assert "more columns:" in narrow and "recorded_at" in narrow.replace("\n", " ") and "--format csv" in narrow.replace("\n", " ")
    wide = printed("FROM quickstart")
    assert "recorded_at" in wide.splitlines()[0] and "more columns" not in wide
    assert len(wide.splitlines()) == 10


def test_a_long_table_is_cut_on_a_terminal_with_the_number_of_rows_left_out(printed):
    assert "1,800 more rows" in printed("SELECT range AS x FROM range(2000)", width=60)
    assert len(printed("SELECT range AS x FROM range(2000)").splitlines()) == 2002


def test_csv_is_exact(printed):
    value = 0.1 + 0.2
    rows = list(csv.reader(io.StringIO(printed(f"SELECT {value!r}::DOUBLE AS a, NULL AS b, 'x,\"y' AS c, 2::BIGINT AS d, DATE '2026-01-02' AS e", format="csv"))))  # fmt: skip
    assert rows == [["a", "b", "c", "d", "e"], [repr(value), "", 'x,"y', "2", "2026-01-02"]]


def test_json_is_exact_and_valid_also_without_rows_or_with_nan(printed):
    value = 0.1 + 0.2
    said = printed(
        f"SELECT {value!r}::DOUBLE AS a, NULL AS b, 'nan'::DOUBLE AS c, [1, 2] AS d, TIMESTAMP '2026-01-02' AS e, 1.5 AS f", format="json"
    )
    assert json.loads(said) == [{"a": value, "b": None, "c": None, "d": [1, 2], "e": "2026-01-02T00:00:00", "f": 1.5}]
    assert json.loads(printed("SELECT 1 AS a WHERE false", format="json")) == []


def test_markdown_is_a_table_of_it(printed):
    assert (
        printed("SELECT 'a|b' AS x, 1.5::DOUBLE AS y, NULL::BIGINT AS z", format="markdown")
        == "| x | y | z |\n| --- | ---: | ---: |\n| a\\|b | 1.500 | — |\n"
    )


@pytest.mark.parametrize("sql", ["SELECT 1; SELECT 2", "WITH x AS (SELECT 1) FROM x", "VALUES (1)", "DESCRIBE scorecard", "SUMMARIZE variant", "SHOW TABLES",
                                 "EXPLAIN SELECT 1", "PIVOT quickstart ON quantize USING first(kl_mean_nats) GROUP BY prune", "TABLE run"])  # fmt: skip
def test_what_only_reads_is_answered(printed, sql):
    assert printed(sql).strip()


@pytest.mark.parametrize(("sql", "kind"), [
    ("COPY variant TO 'x.csv'", "COPY"), ("INSERT INTO run VALUES (1)", "INSERT"), ("UPDATE run SET run = 1", "UPDATE"), ("DELETE FROM run", "DELETE"),
    ("DROP TABLE run", "DROP"), ("CREATE TABLE x (a INT)", "CREATE"), ("ATTACH 'x.duckdb'", "ATTACH"), ("INSTALL httpfs", "LOAD"), ("LOAD httpfs", "LOAD"),
    ("SET threads = 1", "SET"), ("PRAGMA enable_profiling", "PRAGMA"), ("EXPORT DATABASE 'x'", "EXPORT"), ("CALL pragma_version()", "CALL"),
    ("BEGIN", "TRANSACTION"), ("SELECT 1; DROP TABLE run", "DROP"), ("WITH x AS (SELECT 1) DELETE FROM run", "DELETE"), ("ALTER TABLE run ADD COLUMN x INT", "ALTER"),
])  # fmt: skip
def test_what_would_write_is_refused_before_anything_runs(printed, warehouse, tmp_path, monkeypatch, sql, kind):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(QueryError, match=f"^{kind} is refused: here the warehouse is only read"):
        printed(sql)
    assert sorted(tmp_path.rglob("*")) == before and warehouse.sql("SELECT count(*) FROM run").fetchall() == [(2,)]


@pytest.mark.parametrize(("sql", "message"), [
    ("SELECT * FROM scorecrd", 'Catalog Error: Table with name scorecrd does not exist! Did you mean "scorecard"?'),
    ("SELEC 1", 'Parser Error: syntax error at or near "SELEC"'), ("", "there is no statement; for example: SELECT * FROM scorecard"),
    ("-- nothing", "there is no statement; for example: SELECT * FROM scorecard"),
])  # fmt: skip
def test_a_mistake_is_told_in_one_line(printed, sql, message):
    with pytest.raises(QueryError) as caught:
        printed(sql)
    assert str(caught.value) == message


def test_an_unknown_format_is_refused(printed):
    with pytest.raises(ValueError, match="no format 'xml'; there are table, csv, json, markdown"):
        printed("SELECT 1", format="xml")


def test_a_query_that_fails_leaves_the_connection_usable(printed):
    """A SELECT that is left unread makes the next call raise."""
    with pytest.raises(QueryError):
        printed("SELECT CAST('x' AS INTEGER)")
    assert "1" in printed("SELECT 1 AS a")


def converse(quickstart, text: str, **options) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    with create_pipe_input() as keys:
        keys.send_text(text)
        prompt(lambda: connect(quickstart.root), console=console, input=keys, output=DummyOutput(), **options)
    return console.file.getvalue()


def test_the_prompt_answers_until_it_is_left(quickstart, tmp_path):
    history = tmp_path / "deep" / "history"
    said = converse(quickstart, "SELECT variant\rFROM pareto\rORDER BY 1 LIMIT 1;\r.quit\r", history=history)
    assert "depth4__int4__ngram" in said
    assert "+SELECT variant\n+FROM pareto\n" in history.read_text()


def test_the_prompt_goes_on_after_mistakes_and_refusals(quickstart):
    said = converse(
        quickstart, "SELEC 1;\rDROP TABLE run;\r.nonsense\r.schema nowhere\r.format xml\r\r;\rSELECT count(*) AS n FROM variant;\r.quit\r"
    )
    for part in ("syntax error", "DROP is refused", "no command '.nonsense'", "no table or view 'nowhere'", "no format 'xml'"):
        assert part in said
    assert "Traceback" not in said and "8" in said.splitlines()[-1]


def test_the_prompt_sees_facts_written_since(quickstart, make_variant, monkeypatch):
    answer, asked = module.run_sql, []

    def write_between(*args, **options):
        answer(*args, **options)
        if not asked:
            quickstart.append("variant", [make_variant("late", experiment="other")])
        asked.append(1)

    monkeypatch.setattr(module, "run_sql", write_between)
    said = converse(quickstart, "SELECT count(*) AS n FROM variant;\rSELECT count(*) AS n FROM variant;\r.quit\r")
    assert [line for line in said.splitlines() if line.strip() in ("8", "9")] == ["8", "9"]


def test_commands_list_the_tables_and_describe_one(quickstart):
    said = converse(quickstart, ".tables\r.schema measurement\r.schema pareto\r.help\r.format json\rSELECT 1 AS a;\r.quit\r")
    assert "scorecard" in said and "What did each variant come to?" in said
    assert "standard_error" in said and "of value, in unit; NULL where none is stated" in said
    assert '[{"a": 1}]' in said and "Ctrl-D leaves" in said


def test_ctrl_c_drops_the_line_and_ctrl_d_leaves(quickstart):
    said = converse(quickstart, "SELECT nonsense\x03SELECT 41 + 1 AS a;\r\x04")
    assert "42" in said and "nonsense" not in said


def test_facts_that_cannot_be_read_are_a_line_and_the_prompt_stays(quickstart, make_fact):
    quickstart.append("measurement", [make_fact()], name="hurt").write_bytes(b"no")
    said = converse(quickstart, "SELECT 1;\r.quit\r")
    assert said.count("the facts of table measurement") == 2


@pytest.fixture
def complete(warehouse):
    names = module._Names()
    names.learn(warehouse)

    def words(text: str, cursor: int | None = None) -> list[str]:
        return [found.text for found in names.get_completions(Document(text, cursor), CompleteEvent())]

    return words


def test_completion_knows_tables_columns_keywords_and_commands(complete):
    assert complete("SELECT * FROM quick") == ["quickstart"] and complete(".schema par") == ["pareto"] and complete(".t") == [".tables"]
    assert complete("SELECT kl_mean_n", None)[0] == "kl_mean_nats"
    assert complete("sel") == ["SELECT"]
    assert complete("SELECT pru FROM quickstart", 10)[0] == "prune"
    assert "quantize" not in complete("SELECT q FROM pareto", 8)  # only the columns of what is named


def test_only_read_statements_run_whatever_the_connection_allows(tmp_path):
    with duckdb.connect(str(tmp_path / "file.duckdb")) as connection:
        connection.execute("CREATE TABLE t (a INT)")
        with pytest.raises(QueryError):
            run_sql(connection, "DROP TABLE t")
        assert connection.sql("FROM t").fetchall() == []
