"""Running an experiment: what is built, what is shared, what a change or a fault costs."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from assay.assets.ledger import Ledger
from assay.assets.plan import missing, plan
from assay.assets.workspace import Workspace
from assay.schemas.graph import build_graph
from assay.warehouse.database import connect
from assay.warehouse.reads import experiment_table

Run = Callable[..., tuple]


def states(bench: Workspace, name: str) -> dict[str, bool]:
    return {"/".join(item.key.path[1:]): item.cached for item in plan(Ledger(bench, build_graph(bench.experiment(name))))}


def built(bench: Workspace, *kinds: str) -> int:
    return sum(entry.kind in kinds for entry in bench.store.actions())


def edit(bench: Workspace, name: str, before: str, after: str) -> None:
    file = bench.experiment_files[name]
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def test_every_distinct_prefix_is_built_once(finished: Workspace):
    graph = build_graph(finished.experiment("tiny"))
    steps = {json.dumps([step.model_dump() for step in v.steps[:n]]) for v in graph.experiment.variants for n in range(len(v.steps) + 1)}
    assert built(finished, "base", "prune_depth", "quantize", "draft") == len(steps) == len(graph.nodes) == 12
    assert built(finished, "reference") == 1
    assert built(finished, "divergence") == 4  # one a target: a draft changes no distribution
    assert built(finished, "bytes", "speed") == 24
    assert built(finished, "acceptance") == 8


def test_run_again_everything_is_a_hit_and_nothing_is_doubled(finished: Workspace, run_experiment: Run):
    before = connect(finished.facts.root).sql("SELECT count(*) FROM measurement").fetchall()
    work, success = run_experiment(finished, "tiny")
    assert success
    assert work.todo == []
    assert list(work.reports) == []
    assert connect(finished.facts.root).sql("SELECT count(*) FROM measurement").fetchall() == before


def test_the_result_is_a_table_with_the_axes_as_columns(finished: Workspace):
    table = experiment_table(connect(finished.facts.root), experiment="tiny")
    assert table.height == 12
    assert table.columns[1:4] == ["prune", "quantize", "draft"]
    whole = table.filter((pl.col("prune") == "none") & (pl.col("quantize") == "none"))
    assert whole["kl_mean_nats"].max() < 1e-6  # the base against itself
    assert table.filter(pl.col("quantize") == "int4")["kl_mean_nats"].min() > 0.01
    assert table["size_bytes"].null_count() == 0
    assert table["decode_tok_s"].null_count() == 0
    drafted = table.filter(pl.col("draft") != "none")
    assert drafted["acceptance_rate"].null_count() == 0
    assert drafted["tokens_per_round"].min() >= 1
    itself = table.filter((pl.col("quantize") == "int4") & (pl.col("draft") == "sibling") & (pl.col("prune") == "none"))
    assert itself["acceptance_rate"].item() == 1.0  # the draft is the target


def test_a_changed_option_rebuilds_what_stands_on_it_and_nothing_else(finished: Workspace):
    edit(
        finished, "tiny", "int4: [{kind: quantize, format: int4, group_size: 32}]", "int4: [{kind: quantize, format: int4, group_size: 64}]"
    )
    found = states(finished, "tiny")
    assert found["depth1"]
    assert found["facts/depth1/ngram/speed"]
    assert not found["int4"]
    assert not found["facts/depth1/int4/bytes"]
    assert not found["sibling"]  # its draft is the int4 variant
    edit(finished, "tiny", "group_size: 64}]", "group_size: 32}]")
    assert all(states(finished, "tiny").values())


def test_a_changed_text_measures_again_and_rebuilds_what_was_calibrated_on_it(finished: Workspace):
    text = finished.experiment_places[0] / "text.txt"
    text.write_text("another text, longer than the first one was. " * 80)
    found = states(Workspace(finished.home, finished.experiment_places), "tiny")
    assert found["base"]
    assert found["int4"]
    assert found["facts/int4/bytes"]
    assert not found["depth1"]
    assert not found["facts/int4/divergence"]


def test_a_damaged_artifact_is_set_aside_and_made_again(finished: Workspace, run_experiment: Run):
    graph = build_graph(finished.experiment("tiny"))
    digest = Ledger(finished, graph).digest(next(node for node in graph.nodes if node.path == ("int4",)))
    weights = next(finished.store.path(digest).glob("*.safetensors"))
    weights.chmod(0o644)
    with weights.open("r+b") as file:
        file.truncate(100)
    with pytest.warns(UserWarning, match="set aside|damaged"):
        work, success = run_experiment(finished, "tiny", select=["none__int4__none"])
    assert success
    assert work.todo[0].key.path[-1] == "int4"
    assert Ledger(finished, graph).digest(next(node for node in graph.nodes if node.path == ("int4",))) == digest  # the same bytes again


def test_a_suite_that_fails_leaves_the_other_facts_and_is_tried_again(bench: Workspace, run_experiment: Run):
    edit(bench, "small", "tokens: 128, window: 64}", "tokens: 100000, window: 64}")
    _, success = run_experiment(bench, "small")
    assert not success
    connection = connect(bench.facts.root)
    table = experiment_table(connection, experiment="small")
    assert table["size_bytes"].null_count() == 0
    assert table["kl_mean_nats"].null_count() == table.height
    edit(bench, "small", "tokens: 100000, window: 64}", "tokens: 128, window: 64}")
    _, success = run_experiment(bench, "small")
    assert success
    assert experiment_table(connect(bench.facts.root), experiment="small")["kl_mean_nats"].null_count() == 0


def test_a_variant_can_be_selected_and_brings_what_it_stands_on(bench: Workspace, run_experiment: Run):
    work, success = run_experiment(bench, "tiny", select=["depth1/int4"])
    assert success
    kept = {"/".join(item.key.path[1:]) for item in work.items}
    assert {"base", "depth1", "depth1/int4", "facts/depth1/int4/bytes"} <= kept
    assert not any("ngram" in key or "sibling" in key for key in kept)
    with pytest.raises(ValueError, match="fits no variant"):
        run_experiment(bench, "tiny", select=["depth9"])


def test_timings_are_measured_again_only_when_asked(finished: Workspace, run_experiment: Run):
    def timings() -> int:
        return connect(finished.facts.root).sql("SELECT count(*) FROM measurement WHERE metric = 'decode_tok_s'").fetchall()[0][0]

    before = timings()
    work, success = run_experiment(finished, "tiny", select=["none__none__none"], retime=True)
    assert success
    assert {item.kind for item in work.todo} == {"speed"}
    assert timings() == before + 1  # append-only: the old one stays


def test_facts_that_were_lost_are_written_again_from_the_store(finished: Workspace, run_experiment: Run):
    before = connect(finished.facts.root).sql("SELECT count(*) FROM measurement").fetchall()
    shutil.rmtree(finished.facts.root / "measurement")
    fresh = Workspace(finished.home, finished.experiment_places)
    work, _ = run_experiment(fresh, "tiny")
    assert work.todo == []
    assert connect(fresh.facts.root).sql("SELECT count(*) FROM measurement").fetchall() == before


def test_another_experiment_with_the_same_chain_shares_artifacts_and_facts(finished: Workspace, run_experiment: Run):
    place: Path = finished.experiment_places[0]
    (place / "twin.yaml").write_text((place / "tiny.yaml").read_text().replace("name: tiny", "name: twin"))
    fresh = Workspace(finished.home, finished.experiment_places)
    work, success = run_experiment(fresh, "twin")
    assert success
    assert work.todo == []
    connection = connect(fresh.facts.root)
    mine, other = experiment_table(connection, experiment="twin"), experiment_table(connection, experiment="tiny")
    assert mine["kl_mean_nats"].to_list() == other["kl_mean_nats"].to_list()


def test_a_run_of_hits_imports_no_torch(finished: Workspace):
    program = "import sys; sys.argv = ['assay', 'run', 'tiny']\nfrom assay.definitions import main\ntry: main()\nexcept SystemExit as e: assert not e.code, e.code\n" \
              "print(sorted({'torch', 'transformers'} & set(sys.modules)))"  # fmt: skip
    environment = {**os.environ, "ASSAY_HOME": str(finished.home), "ASSAY_EXPERIMENTS": str(finished.experiment_places[0])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, cwd=finished.home)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_what_is_missing_is_planned_with_a_cost(bench: Workspace):
    items = plan(Ledger(bench, build_graph(bench.experiment("tiny"))))
    assert len(missing(items)) == len(items)
    assert all(item.seconds >= 0 for item in items)
    assert sum(item.seconds for item in items) > 0
