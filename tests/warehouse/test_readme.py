"""warehouse/README.md says what the SQL files say, and its questions have answers. Run this file to write those parts anew."""

import math
import re
import tempfile
from pathlib import Path

import pytest

from assay.schemas.facts import TABLES
from assay.warehouse.database import HERE, VIEWS, connect

README = HERE / "README.md"
QUERIES = sorted((HERE / "queries").glob("*.sql"))
DOUBLED = math.hypot(0.1 / 37.5, 0.1 / 12.5, 0.1 / 30, 0.1 / 20)  # the error of ln(37.5 / 12.5) - ln(30 / 20)
ANSWERS = {
    "01": ("none", "none", "none", 1000, 0.0, 1.0, 20.0, "ok"),
    "02": ("depth4__int4__ngram", 270, 0.5, 0.01),
    "03": ("none__int4__ngram", 300, 0.0625),
    "04": ("depth4", "ngram", 0.25, 0.3, 1.125),
    "05": ("depth4__int4__ngram", "draft=ngram + prune=depth4 + quantize=int4", 0.5, 0.3125, 0.1875, 0.02),
    "06": ("depth4__int4__ngram", 0.5, 3.0, 27.0, 40.5, 1.5),
    "07": ("depth4__int4__ngram", "digit", 1.0, 2.0, 50),
    "08": ("quickstart", "none__int4__none", "decode_tok_s", 25.0, 12.5, -12.5, 1.25, "token/s", "Some CPU", "r1", "r2"),
    "09": ("quickstart", "depth4__int4__ngram", "kl_mean_nats", "breached", 0.5, 0.25, None),
    "10": ("base", 10.0, 1000, 8, "t_none_none"),
    "11": ("quickstart", "depth4__int4__ngram", "acceptance", 0.75, None, 2.0, 3.0, 100),
    "12": ("quickstart", "none__none__ngram", "speculation", 1.5, None, 2.0, 0.125, None, None, None, "ok"),
    "13": (
        "none__int4__none",
        "none__none__none",
        4,
        0.0625,
        0.0625 - 3.1824463053 * 0.0625 / 24**0.5,
        0.0625 + 3.1824463053 * 0.0625 / 24**0.5,
    ),
    "14": (
        "d12",
        "refuted",
        math.log(2),
        math.log(2) - 1.96 * DOUBLED,
        math.log(2) + 1.96 * DOUBLED,
        "below",
        0.0,
        "The speed-ups of quantization and of speculation do not multiply.",
    ),
}
ROWS = {"01": 8, "02": 6, "03": 1, "04": 4, "05": 2, "06": 4, "07": 16, "08": 1, "09": 2, "10": 4, "11": 4, "12": 1, "13": 2, "14": 2}


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def tables(connection) -> str:
    parts = []
    declared = "SELECT table_name, comment FROM duckdb_tables() WHERE list_contains($tables, table_name) ORDER BY list_position($tables, table_name)"
    for name, comment in connection.sql(declared, params={"tables": list(TABLES)}).fetchall():
        columns = connection.sql(
            "SELECT column_name, data_type, is_nullable, comment FROM duckdb_columns() WHERE table_name = $t ORDER BY column_index",
            params={"t": name},
        ).fetchall()
        rows = [f"| `{column}` | {kind.replace('TIMESTAMP WITH TIME ZONE', 'TIMESTAMPTZ')}{'' if null else ' NOT NULL'} | {cell(about)} |" for column, kind, null, about in columns]  # fmt: skip
        parts.append("\n".join([f"### {name}", "", comment, "", "| column | type | what, and its unit |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def views(connection) -> str:
    parts = []
    for name in ("metric", *VIEWS):
        about = (
            "SELECT comment FROM duckdb_views() WHERE view_name = $v UNION ALL SELECT comment FROM duckdb_tables() WHERE table_name = $v"
        )
        ((comment,),) = connection.sql(about, params={"v": name}).fetchall()
        columns = ", ".join(f"`{column}`" for column, *_ in connection.sql(f"DESCRIBE {name}").fetchall())
        parts.append(f"### {name}\n\n{comment}\n\nColumns: {columns}.")
    parts.append(
        "### one per experiment\n\nThe rows of `scorecard` for that experiment, in declared order, with a column per axis: "
        "`SELECT prune, quantize, draft, kl_mean_nats, decode_tok_s FROM quickstart`."
    )
    return "\n\n".join(parts)


def queries(_) -> str:
    return "\n\n".join(f"```sql\n{path.read_text(encoding='utf-8').strip()}\n```" for path in QUERIES)


SECTIONS = {"tables": tables, "views": views, "queries": queries}


def written(text: str, connection) -> str:
    for name, section in SECTIONS.items():
        body = section(connection)
        text = re.sub(rf"(<!-- {name}: [^\n]*-->\n).*?(<!-- end -->)", lambda found, body=body: f"{found[1]}\n{body}\n\n{found[2]}", text, flags=re.DOTALL)  # fmt: skip
    return text


def test_the_readme_says_what_the_sql_files_say(tmp_path):
    text = README.read_text(encoding="utf-8")
    with connect(tmp_path) as connection:
        assert written(text, connection) == text, "run: python tests/warehouse/test_readme.py"
    assert all(f"<!-- {name}: " in text for name in SECTIONS)


def test_each_question_has_an_answer_here():
    assert [path.name[:2] for path in QUERIES] == sorted(ANSWERS)


@pytest.mark.parametrize("path", QUERIES, ids=lambda path: path.stem)
def test_a_question_has_its_answer(quickstart_warehouse, path):
    sql = path.read_text(encoding="utf-8")
    assert re.match(r"-- [A-Z].*\?\n", sql)
    rows = quickstart_warehouse.sql(sql).fetchall()
    number = path.name[:2]
    assert len(rows) == ROWS[number] and rows[0] == pytest.approx(ANSWERS[number])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as nothing, connect(Path(nothing)) as warehouse:
        README.write_text(written(README.read_text(encoding="utf-8"), warehouse), encoding="utf-8")
