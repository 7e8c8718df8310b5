"""The claims where people meet them: the asset and its page, the report of an experiment, the command."""

from collections.abc import Callable

import dagster as dg
import polars as pl
import pytest
from typer.testing import CliRunner, Result

from assay.assets import cli, labels
from assay.assets.claims import build_claims
from assay.assets.run import instance
from assay.assets.statements import BOUNDS, SUBJECTS, VERDICTS, counted, told, write_page
from assay.assets.workspace import Workspace
from assay.warehouse.claims import DIRECTIONS, claims
from assay.warehouse.database import connect
from assay.warehouse.reads import claims as read

ROW = {
    "id": "q06", "statement": "GPTQ is better.", "kind": "measured", "published": "much", "value": 0.5, "low": 0.4, "high": 0.6, "n": 2, "base": "tiny",
    "experiment": "e", "verdict": "supported", "metric": "a ratio", "direction": "below", "threshold": 1.0, "upto": None, "reason": None, "detail": "0.1 against 0.2",
    "note": None, "source": "s",
}  # fmt: skip


def frame(*rows: dict) -> pl.DataFrame:
    return pl.DataFrame([{**ROW, **row} for row in rows], schema_overrides={"upto": pl.Float64, "reason": pl.String, "note": pl.String})


def test_a_row_in_words():
    (row,) = told(frame({}))
    assert (row.value, row.asked, row.where, row.detail) == ("0.5 (0.4 to 0.6)", "a ratio: below 1", "e · tiny · n = 2", "0.1 against 0.2")
    (row,) = told(frame({"direction": "between", "threshold": 0.25, "upto": 2.0, "low": 0.5, "high": 0.5, "reason": "a timing was noisy"}))
    assert (row.value, row.asked, row.detail) == ("0.5", "a ratio: 0.25 to 2", "a timing was noisy; 0.1 against 0.2")
    (row,) = told(frame({"low": None, "high": None}))
    assert row.value == "0.5 (error unknown)"
    (row,) = told(frame({"value": None, "low": None, "high": None, "n": None, "base": None, "verdict": "not measured"}))
    assert (row.value, row.where) == ("", "would be decided by: e")


def test_every_direction_subject_and_verdict_has_its_words():
    assert set(DIRECTIONS) == {*BOUNDS, "between"}
    assert {claim.id[0] for claim in claims()} == set(SUBJECTS)
    assert counted(frame({}, {"verdict": "refuted"}, {})) == {
        verdict: {"supported": 2, "refuted": 1}.get(verdict, 0) for verdict in VERDICTS
    }


def test_a_run_judges_the_claims_after_the_snapshot_and_writes_their_page(finished: Workspace):
    event = instance(finished).get_latest_materialization_event(labels.CLAIMS_KEY)
    assert event is not None and event.asset_materialization is not None
    metadata = event.asset_materialization.metadata
    assert metadata["supported"].value >= 15 and metadata["refuted"].value >= 4
    assert "| d03 | supported |" in str(metadata["table"].value)
    page = (finished.reports / "claims.html").read_text()
    assert all(f">{claim.id} · " in page for claim in claims())
    assert "would be decided by: larger" in page and ">supported</td>" in page


def test_the_page_is_that_of_the_facts_as_they_are(bench: Workspace):
    page = write_page(bench, read(connect(bench.facts.root))).read_text()
    assert page.count(">not measured</td>") == sum(claim.kind != "exact" for claim in claims())


def test_the_report_of_an_experiment_has_the_claims_that_it_decides(finished: Workspace):
    page = (finished.reports / "tiny.html").read_text()
    assert "Published statements that these facts decide" in page and ">d03 · " in page
    rows = read(connect(finished.facts.root), experiment="tiny")
    assert {row.id for row in told(rows.filter(pl.col("verdict") != "not measured"))} == {
        row["id"] for row in rows.to_dicts() if f">{row['id']} · " in page
    }


def test_the_asset_stands_after_the_snapshot(bench: Workspace):
    asset = build_claims(bench)
    assert asset.key == labels.CLAIMS_KEY == dg.AssetKey(["warehouse", "claims"])
    assert asset.asset_deps[asset.key] == {labels.SNAPSHOT_KEY} and asset.group_names_by_key[asset.key] == "warehouse"


@pytest.fixture
def command(bench: Workspace, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`assay claims` of that workspace, in this process."""
    monkeypatch.setitem(cli._context, "workspace", lambda: bench)
    monkeypatch.setattr(cli.console, "_width", 220)
    return lambda *arguments: CliRunner().invoke(cli.app, ["claims", *arguments])


@pytest.mark.parametrize(
    ("arguments", "there", "absent", "last"),
    [((), "q06", "nothing", "supported"), (("--verdict", "refuted"), "k02", "s03", "refuted"), (("--experiment", "larger"), "d14", "k02", "not measured")],
)  # fmt: skip
def test_the_command_prints_them(command, arguments, there, absent, last):
    done = command(*arguments)
    assert done.exit_code == 0, done.output
    ids = [line.split()[0] for line in done.output.splitlines() if line[:1].isalpha()]
    assert there in ids and absent not in ids
    assert last in done.output.splitlines()[-1]  # how many there are of each


def test_the_command_can_write_the_page_and_refuses_other_verdicts(bench: Workspace, command):
    done = command("--page", "--verdict", "not comparable")
    assert done.exit_code == 0 and "no claim is that" in done.output
    assert (bench.reports / "claims.html").is_file() and "claims.html" in done.output
    assert command("--verdict", "true").exit_code == 2
