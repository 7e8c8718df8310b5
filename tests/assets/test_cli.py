"""The command line: what each command prints, which files it writes, and the exit codes that scripts rely on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from assay.assets.workspace import Workspace

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def cli() -> Cli:
    def call(bench: Workspace, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "ASSAY_HOME": str(bench.home), "ASSAY_EXPERIMENTS": str(bench.experiment_places[0]), "COLUMNS": "200"}
        program = [sys.executable, "-c", "import sys; sys.argv[0] = 'assay'\nfrom assay.definitions import main; main()", *arguments]
        return subprocess.run(
            program, env=environment, capture_output=True, text=True, timeout=300, input=stdin or "", cwd=bench.experiment_places[0]
        )

    return call


def test_a_finished_experiment_is_a_table_at_once_with_the_places_of_everything(finished: Workspace, cli: Cli):
    done = cli(finished, "run", "tiny")
    assert done.returncode == 0, done.stderr
    assert "70 of 70 items are in the store" in done.stdout or "items are in the store" in done.stdout
    assert "kl_mean_nats" in done.stdout
    assert "sibling" in done.stdout
    assert "tiny.html" in done.stdout
    assert "warehouse.duckdb" in done.stdout
    assert (finished.reports / "tiny.html").read_text().count("<tr>") > 12


def test_an_experiment_is_named_or_given_as_a_file(bench: Workspace, cli: Cli):
    by_name = cli(bench, "plan", "small", "--json")
    by_file = cli(bench, "plan", str(bench.experiment_places[0] / "small.yaml"), "--json")
    assert by_name.returncode == by_file.returncode == 0, by_name.stderr
    assert by_name.stdout == by_file.stdout
    rows = [json.loads(line) for line in by_name.stdout.splitlines()]
    assert {"small/base", "small/int8", "small/reference/divergence", "small/facts/int2/bytes"} <= {row["key"] for row in rows}
    assert not any(row["cached"] for row in rows)
    told = cli(bench, "plan", "small")
    assert "0 of" in told.stdout
    assert "to build" in told.stdout
    assert not (bench.home / "dagster").exists()  # a plan changes nothing


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "nosuch"), "no experiment is named 'nosuch'; there are"),
        (("plan", "nosuch.yaml"), "there is no file nosuch.yaml"),
        (("run", "broken"), "did you mean quantize?"),
        (("run", "small", "--select", "int9"), "fits no variant"),
        (("sql", "SELECT nope FROM scorecard"), "nope"),
        (("sql", "DROP TABLE measurement"), ""),
        (("new", "Bad-Name"), "name"),
    ],
)
def test_a_mistake_is_one_line_without_a_traceback_and_exit_code_2(bench: Workspace, cli: Cli, arguments: tuple[str, ...], said: str):
    text = (bench.experiment_places[0] / "small.yaml").read_text()
    (bench.experiment_places[0] / "broken.yaml").write_text(
        text.replace("name: small", "name: broken").replace("kind: quantize", "kind: quantise")
    )
    done = cli(bench, *arguments)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_help_is_everywhere(bench: Workspace, cli: Cli):
    commands = ["run", "plan", "report", "sql", "verify", "gc", "schema", "new", "shapes", "ui", "list", "free-slots"]
    whole = cli(bench, "--help").stdout
    for command in commands:
        assert command in whole
    for command in ("run", "gc"):
        assert "Usage" in cli(bench, command, "--help").stdout


def test_sql_prints_for_people_and_exactly_for_programs(finished: Workspace, cli: Cli):
    query = "SELECT prune, quantize, draft, kl_mean_nats FROM tiny WHERE draft = 'none'"
    assert "quantize" in cli(finished, "sql", query).stdout
    rows = json.loads(cli(finished, "sql", query, "--format", "json").stdout)
    assert len(rows) == 4
    assert cli(finished, "sql", "--format", "csv", stdin=query).stdout.splitlines()[0] == "prune,quantize,draft,kl_mean_nats"


def test_verify_finds_a_flipped_byte(finished: Workspace, cli: Cli):
    assert cli(finished, "verify").returncode == 0
    weights = sorted((finished.store.root / "artifacts").glob("*/model.safetensors"))[0]
    weights.chmod(0o644)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    done = cli(finished, "verify")
    assert done.returncode == 1
    assert weights.parent.name[:12] in done.stderr
    assert cli(finished, "verify", "--set-aside").returncode == 1
    assert cli(finished, "verify").returncode == 0
    assert not weights.exists()


def test_gc_shows_what_no_experiment_reaches_and_removes_it_when_told(finished: Workspace, cli: Cli):
    done = cli(finished, "gc")
    assert "0 things" in done.stdout, done.stdout
    file = finished.experiment_places[0] / "tiny.yaml"
    file.write_text(file.read_text().replace("  prune:\n    none: []\n    depth1:", "  prune:\n    none: []\n    # depth1:"))
    count = len(finished.store.artifacts())
    shown = cli(finished, "gc")
    assert shown.returncode == 0, shown.stderr
    assert "prune_depth" in shown.stdout
    assert "nothing was removed" in shown.stdout
    assert len(finished.store.artifacts()) == count
    assert cli(finished, "gc", "--yes").returncode == 0
    assert len(finished.store.artifacts()) < count
    assert cli(finished, "run", "tiny").returncode == 0
    file.write_text("name: [")
    refused = cli(finished, "gc", "--yes")
    assert refused.returncode == 2
    assert "mend or remove it first" in refused.stderr


def test_shapes_writes_an_experiment_of_candidates_within_the_budget(bench: Workspace, cli: Cli):
    base = "{path: base, dtype: float32}"
    done = cli(bench, "shapes", "smaller", "--base", base, "--parameters", "60000", "--best", "2", "--tokens", "512")
    assert done.returncode == 0, done.stderr
    file = bench.experiment_places[0] / "smaller.yaml"
    assert "prune_width" in file.read_text()
    rows = [json.loads(line) for line in cli(bench, "plan", str(file), "--json").stdout.splitlines()]
    assert {"smaller/shape1", "smaller/shape2", "smaller/shape1/kl", "smaller/shape2/kl"} <= {row["key"] for row in rows}
    assert "is there already" in cli(bench, "shapes", "smaller", "--base", base, "--parameters", "60000").stderr
    refused = cli(bench, "shapes", "none", "--base", base, "--parameters", "10")
    assert refused.returncode == 2 and "no shape has at most 10 parameters" in refused.stderr


def test_new_writes_an_experiment_that_can_be_planned(bench: Workspace, cli: Cli):
    done = cli(bench, "new", "mine")
    assert done.returncode == 0, done.stderr
    file = bench.experiment_places[0] / "mine.yaml"
    assert cli(bench, "plan", str(file)).returncode == 0
    again = cli(bench, "new", "mine")
    assert again.returncode == 2
    assert "is there already" in again.stderr


def test_schema_is_the_one_in_the_repository(bench: Workspace, cli: Cli):
    import assay.schemas.json_schema as module

    written = Path(str(module.__file__)).with_name("experiment.schema.json")
    assert json.loads(cli(bench, "schema").stdout) == json.loads(written.read_text())


def test_the_experiments_of_the_repository_are_listed(bench: Workspace, cli: Cli):
    done = cli(bench, "list")
    assert done.returncode == 0, done.stderr
    for name in ("quickstart", "combinations", "depth_pruning", "tiny"):
        assert name in done.stdout


def test_a_report_is_written_from_the_facts_there_are(finished: Workspace, cli: Cli):
    (finished.reports / "tiny.html").unlink()
    assert cli(finished, "report", "tiny").returncode == 0
    page = (finished.reports / "tiny.html").read_text()
    assert "data:image/png;base64," in page
    assert "breached" in page


def test_ctrl_c_ends_a_run_at_once_and_the_next_one_goes_on(bench: Workspace, cli: Cli, tmp_path: Path):
    environment = {**os.environ, "ASSAY_HOME": str(bench.home), "ASSAY_EXPERIMENTS": str(bench.experiment_places[0])}
    program = [sys.executable, "-c", "from assay.definitions import main; main()", "run", "tiny"]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(
            program, env=environment, stdout=out, stderr=out, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
        )  # fmt: skip
        deadline = time.monotonic() + 300
        while "done" not in (tmp_path / "out").read_text():
            assert process.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=200)
    text = (tmp_path / "out").read_text()
    assert code == 130, text
    assert "what was finished is kept" in text
    assert "Traceback" not in text
    assert not any((bench.store.root / "tmp").iterdir())
    assert cli(bench, "run", "small").returncode == 0
