"""What Dagster is given: keys, lineage, tags, checks, pools, versions, retries, schedules; and that loading it stays light."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest

from assay.assets import labels
from assay.assets.executors import executor
from assay.assets.ledger import Ledger
from assay.assets.measurements import RETIME
from assay.assets.run import PROCESS, free_slots, instance
from assay.assets.schedules import selection
from assay.assets.steps import is_passing, step
from assay.assets.workspace import Workspace
from assay.definitions import build
from assay.schemas.experiment import Resources
from assay.schemas.graph import build_graph

Run = Callable[..., tuple]


def specs(bench: Workspace, name: str = "tiny") -> dict[str, dg.AssetSpec]:
    defs = build([bench.experiment(name)], bench)
    dg.Definitions.validate_loadable(defs)
    return {"/".join(spec.key.path): spec for spec in defs.resolve_all_asset_specs()}


def test_lineage_leads_from_the_base_through_each_step_to_the_facts(bench: Workspace):
    found = specs(bench)
    parents = {key: {"/".join(dep.asset_key.path) for dep in spec.deps} for key, spec in found.items()}
    assert parents["tiny/base"] == set()
    assert parents["tiny/depth1/int4"] == {"tiny/depth1"}
    assert parents["tiny/depth1/int4/sibling"] == {"tiny/depth1/int4", "tiny/int4"}  # two parents: the target and the draft
    assert parents["tiny/facts/depth1/int4/divergence"] == {"tiny/depth1/int4", "tiny/reference/divergence"}
    assert "tiny/facts/depth1/int4/speed" in parents["tiny/report"]
    assert {parent for each in parents.values() for parent in each} <= set(found)  # Dagster itself would accept a parent that is none


def test_assets_can_be_found_by_group_tag_and_kind(bench: Workspace):
    found = specs(bench)
    assert {spec.group_name for key, spec in found.items() if key.startswith("tiny/")} == {"tiny"}
    tags = found["tiny/depth1/int4"].tags
    assert tags["stage"] == "weights"
    assert tags["step"] == "quantize"
    assert tags["format"] == "int4"
    assert tags["axis/prune"] == "depth1"
    assert found["tiny/facts/int4/speed"].tags["stage"] == "timing"
    assert "pytorch" in found["tiny/base"].kinds
    assert all(spec.description for spec in found.values())
    assert found["tiny/int4"].metadata["spec"].value["group_size"] == 32


def test_a_changed_spec_and_a_changed_op_change_the_code_version_of_that_step_alone(bench: Workspace, monkeypatch: pytest.MonkeyPatch):
    before = {key: spec.code_version for key, spec in specs(bench).items()}
    file = bench.experiment_files["tiny"]
    text = file.read_text()
    file.write_text(text.replace("format: int4, group_size: 32", "format: int4, group_size: 64"))
    after = {key: spec.code_version for key, spec in specs(bench).items()}
    assert {key for key in before if before[key] != after[key]} == {"tiny/int4", "tiny/depth1/int4"}
    file.write_text(text)
    from assay.assets import ledger

    real = ledger.fingerprint
    monkeypatch.setattr(ledger, "fingerprint", lambda entry: real(entry) + ("changed" if entry.endswith(":prune_depth") else ""))
    ledger.code.cache_clear()
    changed = {key: spec.code_version for key, spec in specs(bench).items()}
    ledger.code.cache_clear()
    assert {key for key in before if before[key] != changed[key]} == {"tiny/depth1"}


def test_data_versions_are_digests_and_hits_are_told_as_such(finished: Workspace, run_experiment: Run):
    here = instance(finished)
    graph = build_graph(finished.experiment("tiny"))
    ledger = Ledger(finished, graph)
    for node in graph.nodes:
        event = here.get_latest_materialization_event(labels.node_key(graph.experiment, node))
        assert event is not None
        assert event.asset_materialization is not None
        assert event.asset_materialization.tags["dagster/data_version"] == ledger.digest(node)
        assert event.asset_materialization.metadata["cached"].value is False
    # materialized by hand in the UI: Dagster runs the step, the store answers
    result = dg.materialize(
        build([graph.experiment], finished).assets, selection=[labels.node_key(graph.experiment, graph.base)], instance=here
    )  # type: ignore[arg-type]
    assert result.success
    told = result.asset_materializations_for_node("tiny__base")[0]
    assert told.metadata["cached"].value is True


def test_a_store_that_came_without_its_dagster_home_is_told_to_dagster(finished: Workspace, run_experiment: Run):
    import shutil

    shutil.rmtree(finished.dagster_home)
    work, success = run_experiment(finished, "tiny")
    assert success
    assert work.todo == []
    event = instance(finished).get_latest_materialization_event(dg.AssetKey(["tiny", "facts", "int4", "bytes"]))
    assert event is not None
    assert event.asset_materialization is not None
    assert event.asset_materialization.metadata["cached"].value is True


def test_a_breached_budget_warns_and_blocks_only_where_the_experiment_says_so(finished: Workspace, run_experiment: Run):
    here = instance(finished)
    key = dg.AssetCheckKey(dg.AssetKey(["tiny", "facts", "int4", "divergence"]), "budget_kl_mean_nats")
    found = here.event_log_storage.get_latest_asset_check_execution_by_key([key])[key]
    evaluation = found.event.dagster_event.asset_check_evaluation_data  # type: ignore[union-attr]
    assert not evaluation.passed
    assert evaluation.severity == dg.AssetCheckSeverity.WARN  # and the run was a success: see the fixture
    from assay.warehouse.database import connect
    from assay.warehouse.reads import verdicts

    table = verdicts(connect(finished.facts.root), experiment="tiny")
    assert table.filter(table["verdict"] == "breached").height == 6

    file = finished.experiment_places[0] / "small.yaml"
    file.write_text(file.read_text() + "budgets: [{metric: kl_mean_nats, at_most: 1.0e-9, for: {quantize: int2}, blocks: true}]\n")
    _, success = run_experiment(Workspace(finished.home, finished.experiment_places), "small")
    assert not success
    assert instance(finished).get_latest_materialization_event(dg.AssetKey(["small", "report"])) is None
    assert instance(finished).get_latest_materialization_event(dg.AssetKey(["small", "facts", "int2", "divergence"])) is not None


def test_greedy_speculation_is_checked_against_plain_greedy(finished: Workspace):
    key = dg.AssetCheckKey(dg.AssetKey(["tiny", "facts", "int4", "ngram", "acceptance"]), "exact")
    found = instance(finished).event_log_storage.get_latest_asset_check_execution_by_key([key])[key]
    assert found.event.dagster_event.asset_check_evaluation_data.passed  # type: ignore[union-attr]


def test_faults_of_the_infrastructure_are_tried_again_and_bad_input_is_not(tmp_path: Path):
    assert is_passing(ConnectionResetError("peer"))
    assert is_passing(OSError(5, "Input/output error"))
    assert not is_passing(FileNotFoundError(2, "no such file"))
    assert not is_passing(ValueError("group_size=7 does not divide 64"))
    with pytest.raises(dg.Failure) as caught, step(tmp_path, Resources()):
        raise ValueError("group_size=7 does not divide 64")
    assert caught.value.allow_retries is False
    with pytest.raises(ConnectionError), step(tmp_path, Resources()):
        raise ConnectionError("the hub did not answer")


def test_a_step_that_needs_a_gpu_says_so_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(dg.Failure, match="needs 1 GPU"), step(tmp_path, Resources(gpu=1)):
        pass


def test_gpus_are_leased_to_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with step(tmp_path, Resources(gpu=1)):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
        program = (
            "import os, sys; from pathlib import Path; from assay.assets.steps import step; from assay.schemas.experiment import Resources\n"
            f"with step(Path({str(tmp_path)!r}), Resources(gpu=1)): print(os.environ['CUDA_VISIBLE_DEVICES'])"
        )
        other = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"}, capture_output=True, text=True
        )
        assert other.stdout.strip() == "1", other.stderr
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_one_need_is_told_in_the_words_of_every_executor():
    tags = labels.routing(Resources(gpu=1, memory="80Gi", priority=3))
    assert tags["dagster-k8s/config"]["container_config"]["resources"]["limits"] == {"nvidia.com/gpu": "1", "memory": "80Gi"}
    assert tags["dagster-ray/config"] == {"num_gpus": 1, "memory": 80 * 2**30}
    assert tags["dagster-celery/queue"] == "gpu"
    assert tags["dagster/priority"] == "3"
    assert labels.pool(Resources(gpu=1), timing=False) == "gpu"
    assert labels.pool(Resources(gpu=1), timing=True) == "timing"
    assert labels.routing(Resources()) == {}


def test_an_executor_is_chosen_by_name_and_imported_only_then():
    assert executor("in_process") is dg.in_process_executor
    assert executor("multiprocess").name == "multiprocess"
    with pytest.raises(ValueError, match="one of in_process, multiprocess"):
        executor("slurm")


def test_the_nightly_run_selects_what_is_missing_and_the_timings_of_promoted_variants(finished: Workspace):
    graph = build_graph(finished.experiment("tiny"))
    keys = {"/".join(key.path) for key in selection(finished, [graph])}
    assert "tiny/facts/base/speed" in keys
    assert {"tiny/report", "warehouse/snapshot", "warehouse/regression"} <= keys
    assert not any("divergence" in key for key in keys)  # quality is cached
    defs = build([graph.experiment], finished)
    schedule = defs.resolve_schedule_def("nightly")
    assert schedule.default_status == dg.DefaultScheduleStatus.STOPPED
    context = dg.build_schedule_context(
        repository_def=defs.get_repository_def(), scheduled_execution_time=__import__("datetime").datetime(2030, 1, 1)
    )
    requests = schedule.evaluate_tick(context).run_requests or []
    assert len(requests) == 1
    assert requests[0].tags[RETIME] == "true"
    assert {"/".join(key.path) for key in requests[0].asset_selection or []} == keys


def test_runs_whose_process_died_are_closed(bench: Workspace):
    here = instance(bench)
    job = build([bench.experiment("small")], bench, executor_name="in_process").resolve_implicit_global_asset_job_def()
    import socket

    run = here.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags={PROCESS: f"{socket.gethostname()}-999999-1"})
    assert free_slots(here) == [run.run_id]
    found = here.get_run_by_id(run.run_id)
    assert found is not None
    assert found.status == dg.DagsterRunStatus.FAILURE


WIDE = """
name: wide
base: {path: base, dtype: float32}
axes:
  quantize: {none: [], %s}
  kv: {none: [], kv_int8: [{kind: kv, format: int8}], kv_fp8: [{kind: kv, format: fp8_e4m3}]}
  draft: {none: [], %s}
measure: [{suite: divergence, text: {path: text.txt}, tokens: 128, window: 64}, bytes, {suite: speed, text: {path: text.txt}}]
"""


def test_two_hundred_variants_load_without_torch(place: Path, tmp_path: Path):
    quantize = ", ".join(
        f"{f}_{g}_{s}: [{{kind: quantize, format: {f}, group_size: {g}, symmetric: {str(s == 's').lower()}}}]" for f in ("int8", "int4", "int2") for g in (32, 64) for s in ("s", "a")
    )  # fmt: skip
    draft = ", ".join(f"ngram{n}: [{{kind: draft, method: ngram, tokens: {n}}}]" for n in range(2, 7))
    (place / "wide.yaml").write_text(WIDE % (quantize, draft))
    program = (
        "import sys, time, dagster as dg\nfrom assay.definitions import build, workspace\nb = workspace(); e = b.experiment('wide')\n"
        "began = time.process_time()\nd = build([e], b); r = d.get_repository_def()\n"
        "print(len(e.variants), len(list(d.resolve_all_asset_specs())), time.process_time() - began, sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    environment = {**os.environ, "ASSAY_HOME": str(tmp_path / "home"), "ASSAY_EXPERIMENTS": str(place)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    variants, assets, _, heavy = done.stdout.strip().split(" ", 3)
    assert int(variants) == 234
    assert int(assets) > 900
    assert heavy == "[]"


@pytest.mark.slow
def test_the_multiprocess_executor_builds_and_records_every_variant(bench: Workspace):
    from assay.assets.run import set_up
    from assay.warehouse.database import connect
    from assay.warehouse.reads import experiment_table

    set_up(bench)
    file = bench.experiment_places[0] / "small.yaml"
    file.write_text("".join(line for line in file.read_text().splitlines(keepends=True) if "int2:" not in line))  # each step is a process
    environment = {
        **os.environ,
        "ASSAY_EXPERIMENTS": str(bench.experiment_places[0]),
        "ASSAY_EXECUTOR": "multiprocess",
        "PYTHONWARNINGS": "ignore",
    }
    program = [sys.executable, "-m", "dagster", "asset", "materialize", "-m", "assay.definitions", "--select", 'group:"small"']
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=500, cwd=bench.home)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    table = experiment_table(connect(bench.facts.root), experiment="small")
    assert table.height == 2
    assert table["kl_mean_nats"].null_count() == 0
    doubled = connect(bench.facts.root).sql(
        "SELECT count(*) - count(DISTINCT (artifact_digest, protocol_digest, metric, slice_kind, slice)) FROM measurement"
    )
    assert doubled.fetchall() == [(0,)]
