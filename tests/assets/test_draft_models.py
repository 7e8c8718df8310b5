"""A draft that is trained toward its target, and one cut out of it, from the experiment file to its facts."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from assay.assets import build as building
from assay.assets import ledger
from assay.assets.build import Builder
from assay.assets.ledger import Ledger
from assay.assets.plan import plan
from assay.assets.workspace import Workspace
from assay.schemas.graph import build_graph
from assay.warehouse.database import connect
from assay.warehouse.reads import experiment_table

Run = Callable[..., tuple]

DRAFTS = """
name: drafts
base: {path: base, dtype: float32}
axes:
  prune:
    none: []
    depth1: [{kind: prune_depth, layers: 1, calibration: {text: {path: text.txt}, windows: 2, length: 32}}]
  draft:
    none: []
    sibling: [{kind: draft, method: variant, variant: {prune: depth1}, tokens: 2}]
    taught: [{kind: draft, method: variant, variant: {prune: depth1}, tokens: 2, distill: {tokens: 400, batch: 2, length: 32, learning_rate: 1.0e-3, text: {path: text.txt}, quantize: {format: int8, group_size: 32}}}]
    taught3: [{kind: draft, method: variant, variant: {prune: depth1}, tokens: 3, distill: {tokens: 400, batch: 2, length: 32, learning_rate: 1.0e-3, text: {path: text.txt}, quantize: {format: int8, group_size: 32}}}]
    first: [{kind: draft, method: variant, early_exit: 1, tokens: 2}]
grid: {include: [{prune: none}]}
measure:
  - bytes
  - {suite: divergence, text: {path: text.txt}, tokens: 64, window: 32}
  - {suite: acceptance, text: {path: text.txt}, prompts: 1, prompt_tokens: 8, new_tokens: 8}
"""  # fmt: skip


@pytest.fixture
def bench(place: Path, tmp_path: Path) -> Workspace:
    (place / "drafts.yaml").write_text(DRAFTS)
    (place / "text.txt").write_text((place / "text.txt").read_text() * 3)
    return Workspace(tmp_path / "home", (place,))


def made_by(bench: Workspace) -> Ledger:
    return Ledger(bench, build_graph(bench.experiment("drafts")))


def node_of(found: Ledger, *path: str):
    return next(node for node in found.graph.nodes if node.path == path)


def test_trained_and_cut_drafts_are_built_once_and_measured(bench: Workspace, run_experiment: Run):
    some = ["none__taught", "none__first"]
    _, success = run_experiment(bench, "drafts", select=some)
    failed = connect(bench.facts.root).sql("SELECT suite, message FROM measurement WHERE status = 'failed'").pl()
    assert success, failed.rows()
    found = made_by(bench)
    store, ends = bench.store, found.graph.ends
    assert sum(entry.kind == "draft_model" for entry in store.actions()) == 2
    table = experiment_table(connect(bench.facts.root), experiment="drafts")
    rows = {row["draft"]: row for row in table.iter_rows(named=True)}
    assert all(rows[name]["acceptance_rate"] is not None for name in ("taught", "first"))
    mismatches = connect(bench.facts.root).sql("SELECT value FROM measurement WHERE metric = 'greedy_mismatches'").pl()
    assert mismatches["value"].sum() == 0
    taught = node_of(found, "taught")
    model = store.path(found.digest(taught.draft))
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in model.iterdir()}
    assert json.loads((model / "config.json").read_text())["quantization_config"]["format"] == "pack-quantized"
    runtime = json.loads((store.path(found.digest(taught)) / "runtime.json").read_text())
    assert runtime["draft"] == {"method": "variant", "tokens": 2, "ngram": None, "digest": found.digest(taught.draft), "made": True}
    told = store.manifest(found.digest(taught.draft)).summary
    assert told["steps"] == 7 and told["curve"][-1]["tokens"] == told["tokens"] == 448
    first = store.manifest(found.digest(ends["none__first"].draft)).summary
    assert (first["layers"], first["layers_before"]) == (1, 2)

    action = found.node(taught.draft)
    assert action.parents == {"parent": found.digest(found.graph.base), "draft": found.digest(node_of(found, "depth1"))}
    assert set(action.data) == {"text"} and {"torch", "transformers", "compressed-tensors"} <= set(action.versions)
    lineage = (
        connect(bench.facts.root)
        .sql("SELECT parent_digest, role FROM lineage WHERE artifact_digest = $d", params={"d": found.digest(taught.draft)})
        .pl()
    )
    assert set(lineage.rows()) == {(action.parents["parent"], "parent"), (action.parents["draft"], "draft")}

    again, success = run_experiment(bench, "drafts", select=some)
    assert success and again.todo == []
    assert found.digest(node_of(found, "taught3").draft) == found.digest(taught.draft)  # another number of proposals, no other model
    assert not list((bench.home / "training").glob("*"))


def test_what_changes_a_model_is_in_its_key_and_the_number_of_proposals_is_not(bench: Workspace, monkeypatch: pytest.MonkeyPatch):
    file = bench.experiment_files["drafts"]

    def keys() -> dict[str, str]:
        found = Ledger(bench, build_graph(bench.experiment("drafts")))
        monkeypatch.setattr(found, "digest", lambda node: "d" + "/".join(node.path))
        return {"/".join(node.path): found.node(node).key for node in found.graph.nodes if node.step}

    before = keys()
    for old, new, changed in [
        ("tokens: 3, distill", "tokens: 7, distill", {"taught3"}),
        ("early_exit: 1, tokens: 2", "early_exit: 1, tokens: 5", {"first"}),
        ("name: drafts", "name: drafts\nseed: 5", {"taught_draft_model", "depth1"}),
    ]:
        text = file.read_text()
        file.write_text(text.replace(old, new))
        after = keys()
        assert {name for name in before if before[name] != after[name]} == changed
        file.write_text(text)
    monkeypatch.setattr(Ledger, "text", lambda self, text: "another")
    after = keys()
    assert {name for name in before if before[name] != after[name]} == {"taught_draft_model", "depth1"}
    monkeypatch.undo()
    real = ledger.fingerprint
    for entry, changed in [("train_draft", {"taught_draft_model"}), ("early_exit_draft", {"first_draft_model"})]:
        monkeypatch.setattr(ledger, "fingerprint", lambda each, entry=entry: real(each) + ("changed" if each.endswith(f":{entry}") else ""))
        ledger.code.cache_clear()
        after = keys()
        assert {name for name in before if before[name] != after[name]} == changed
        monkeypatch.undo()
    ledger.code.cache_clear()


def test_a_draft_that_is_no_model_of_its_own_is_asked_for_in_the_words_it_always_was(bench: Workspace, monkeypatch: pytest.MonkeyPatch):
    found = made_by(bench)
    monkeypatch.setattr(found, "digest", lambda node: "d" + "/".join(node.path))
    assert found.node(node_of(found, "sibling")).step == {"kind": "draft", "method": "variant", "tokens": 2, "ngram": None}
    assert found.node(node_of(found, "taught")).step == {"kind": "draft", "method": "variant", "tokens": 2, "ngram": None, "made": True}


def test_the_models_of_drafts_are_assets_with_their_parents_and_a_cost(bench: Workspace):
    from assay.definitions import build

    study = bench.experiment("drafts")
    specs = {"/".join(spec.key.path): spec for spec in build([study], bench).resolve_all_asset_specs()}
    taught = specs["drafts/taught_draft_model"]
    assert {"/".join(dep.asset_key.path) for dep in taught.deps} == {"drafts/base", "drafts/depth1"}
    assert {"/".join(dep.asset_key.path) for dep in specs["drafts/taught3"].deps} == {"drafts/base", "drafts/taught_draft_model"}
    assert "A copy of depth1, trained toward base on 400 tokens by forward kl" in taught.description and "int8" in taught.description
    assert "proposed by the model taught_draft_model" in specs["drafts/taught3"].description
    assert specs["drafts/first_draft_model"].description.startswith("The first 1 layers of base")
    assert taught.kinds == {"pytorch", "distill"} and taught.tags["step"] == "draft_model"
    items = {"/".join(item.key.path[1:]): item for item in plan(made_by(bench))}
    assert items["taught_draft_model"].kind == "draft_model"
    assert items["taught_draft_model"].seconds > items["first_draft_model"].seconds > 0


def test_a_trained_draft_runs_with_the_kv_format_of_its_target(bench: Workspace):
    text = DRAFTS.replace("  draft:\n", "  kv: {none: [], int8: [{kind: kv, format: int8}]}\n  draft:\n")
    bench.experiment_files["drafts"].write_text(text)
    found = made_by(bench)
    builder = Builder(found)
    for path in (("first",), ("int8", "first")):
        builder.node(node_of(found, *path))
    protocol = found.experiment.protocols["bytes"]
    plain, packed = (builder._subject(node_of(found, *path), protocol) for path in (("first",), ("int8", "first")))
    assert (plain.draft[4], packed.draft[4], packed.kv_format) == (None, "int8", "int8")
    assert plain.draft[3] == packed.draft[3] == bench.store.path(found.digest(node_of(found, "first_draft_model")))
    assert plain.draft[:3] == ("variant", 2, None)


def test_a_training_that_was_stopped_is_gone_on_with_and_tells_how_it_goes(bench: Workspace, monkeypatch: pytest.MonkeyPatch):
    from functools import partial

    from assay.ops.train import loop

    monkeypatch.setattr(loop, "Settings", partial(loop.Settings, save_seconds=0.0))
    monkeypatch.setattr(building, "TOLD_EVERY", -1)
    found = made_by(bench)
    node, lines = node_of(found, "taught_draft_model"), []

    def stop(line: str) -> None:
        lines.append(line)
        if "step 4 of 7" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Builder(found, stop).node(node)
    (state,) = (bench.home / "training").iterdir()
    assert state.name == found.node(node).key and (state / "step-000000004").is_dir()
    assert "taught_draft_model: step 4 of 7, loss " in lines[-1] and "tokens/s" in lines[-1] and "min left" in lines[-1]
    later: list[str] = []
    built = Builder(made_by(bench), later.append).node(node)
    assert "step 5 of 7" in later[0] and built.summary["tokens"] == 448
    assert not state.exists()


def test_states_that_nobody_went_on_with_are_forgotten(tmp_path: Path):
    import os

    for name, days in (("old", 15), ("new", 13)):
        (tmp_path / name / "step-000000001").mkdir(parents=True)
        for path in (tmp_path / name / "step-000000001", tmp_path / name):
            when = path.stat().st_mtime - days * 86_400
            os.utime(path, (when, when))
    building._forget_old(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    building._forget_old(tmp_path / "none")
