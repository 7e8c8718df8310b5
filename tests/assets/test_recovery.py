"""Pruning, recovery and training from nothing, from the experiment file to lineage, facts and the curve."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from assay.assets.ledger import Ledger
from assay.assets.measurements import measured
from assay.assets.plan import plan
from assay.assets.workspace import Workspace
from assay.schemas.graph import build_graph
from assay.warehouse.database import connect

Run = Callable[..., tuple]

TEXT = "text: {path: text.txt}"
LESSON = f"tokens: 700, batch: 4, length: 32, learning_rate: 1.0e-3, {TEXT}"
EXPERIMENT = f"""
name: recovery
base: {{path: base, dtype: float32}}
axes:
  prune:
    none: []
    depth1: [{{kind: prune_depth, layers: 1, score: random}}]
    sparse: [{{kind: prune_weights, method: magnitude, pattern: "2:4"}}]
    learned: [{{kind: prune_learned, ffn: 64, target_warmup_pct: 20, {LESSON}}}]
    scratch: [{{kind: pretrain, layers: 1, hidden: 32, heads: 2, kv_heads: 1, ffn: 48, {LESSON}}}]
  after:
    none: []
    kl: [{{kind: distill, {LESSON}}}]
    reverse: [{{kind: distill, loss: reverse_kl, {LESSON}}}]
    mixed: [{{kind: distill, tokens: 700, batch: 4, length: 32, learning_rate: 1.0e-3, domains: [{{{TEXT}, share_pct: 50}}, {{text: {{path: other.txt}}, share_pct: 50}}]}}]
    packed: [{{kind: pack}}]
grid:
  include:
    - {{after: none}}
    - {{prune: depth1, after: [kl, reverse, mixed]}}
    - {{prune: sparse, after: [kl, packed]}}
measure:
  - {{suite: divergence, {TEXT}, tokens: 64, window: 32}}
  - bytes
  - zeros
  - recovery
"""


@pytest.fixture
def bench(place: Path, tmp_path: Path) -> Workspace:
    (place / "recovery.yaml").write_text(EXPERIMENT)
    (place / "text.txt").write_text((place / "text.txt").read_text() * 3)
    (place / "other.txt").write_text((place / "text.txt").read_text().upper())
    return Workspace(tmp_path / "home", (place,))


def test_suites_are_asked_of_the_variants_that_they_are_about(bench: Workspace):
    graph = build_graph(bench.experiment("recovery"))
    asked = {variant.slug: set(measured(graph, variant)) - {"divergence", "bytes"} for variant in graph.experiment.variants}
    assert asked == {
        "none__none": set(), "depth1__none": set(), "sparse__none": {"zeros"}, "learned__none": {"recovery"}, "scratch__none": {"recovery"},
        "depth1__kl": {"recovery"}, "depth1__reverse": {"recovery"}, "depth1__mixed": {"recovery"}, "sparse__kl": {"zeros", "recovery"}, "sparse__packed": {"zeros"},
    }  # fmt: skip


def test_students_of_one_text_share_what_the_base_says_and_their_curves_are_facts(bench: Workspace, run_experiment: Run):
    _, success = run_experiment(bench, "recovery")
    facts = connect(bench.facts.root)
    assert success, facts.sql("SELECT suite, message FROM measurement WHERE status = 'failed'").pl().rows()
    found = Ledger(bench, build_graph(bench.experiment("recovery")))
    store, ends = bench.store, found.graph.ends
    assert sum(entry.kind == "teacher" for entry in store.actions()) == 2  # one of them for the two domains
    node = ends["depth1__kl"]
    roles = facts.sql("SELECT role, parent_digest FROM lineage WHERE artifact_digest = $d", params={"d": found.digest(node)}).pl()
    assert set(roles.rows()) == {("parent", found.digest(ends["depth1__none"])), ("teacher", found.digest(found.graph.base))}
    told = json.loads((store.path(found.digest(node)) / "curve.json").read_text())
    curve = facts.sql(
        "SELECT CAST(slice AS BIGINT) AS tokens, value FROM measurement WHERE metric = 'student_kl_nats' AND slice_kind = 'tokens' AND artifact_digest = $d "
        "ORDER BY tokens", params={"d": found.digest(node)},
    ).pl()  # fmt: skip
    expected = [(point["tokens"], point["metrics"]["kl_nats"]) for point in told["curve"] if point["metrics"]]
    assert curve.rows() == expected and len(expected) > 1
    mixed = found.node(ends["depth1__mixed"])
    assert mixed and list(mixed.data) == ["domain_0", "domain_1"] and len(set(mixed.data.values())) == 2
    told = facts.sql(
        "SELECT slice, metric, value FROM measurement WHERE slice_kind = 'domain' AND artifact_digest = $d",
        params={"d": found.digest(ends["depth1__mixed"])},
    ).pl()
    assert {row[:2] for row in told.rows()} == {
        (f"{name}.txt", metric)
        for name in ("text", "other")
        for metric in ("student_log_perplexity", "teacher_log_perplexity", "domain_weight")
    }
    zeros = dict(facts.sql("SELECT artifact_digest, value FROM measurement WHERE metric = 'zero_share' AND slice_kind = 'all'").pl().rows())
    assert zeros == {found.digest(ends[slug]): pytest.approx(0.5, abs=1e-9) for slug in ("sparse__none", "sparse__packed", "sparse__kl")}
    sizes = dict(facts.sql("SELECT artifact_digest, value FROM measurement WHERE metric = 'weight_bytes'").pl().rows())
    assert sizes[found.digest(ends["sparse__packed"])] < sizes[found.digest(ends["sparse__none"])]
    divergences = dict(
        facts.sql("SELECT artifact_digest, value FROM measurement WHERE metric = 'kl_mean_nats' AND slice_kind = 'all'").pl().rows()
    )
    assert divergences[found.digest(ends["sparse__packed"])] == pytest.approx(divergences[found.digest(ends["sparse__none"])], abs=1e-6)
    assert all(item.cached for item in plan(found) if item.kind not in ("speed",))


def test_what_the_base_says_is_reached_and_not_collected(bench: Workspace, run_experiment: Run):
    run_experiment(bench, "recovery", select=["depth1__kl"])
    items = plan(Ledger(bench, build_graph(bench.experiment("recovery"))))
    keys = {action.key for item in items for action in item.actions}
    assert {entry.key for entry in bench.store.actions() if entry.kind == "teacher"} <= keys


def test_training_needs_no_teachers_words_that_are_gone(bench: Workspace, run_experiment: Run):
    """The cache of the base's words may be collected: what was trained with it stays valid."""
    run_experiment(bench, "recovery", select=["depth1__kl"])
    found = Ledger(bench, build_graph(bench.experiment("recovery")))
    node = found.graph.ends["depth1__kl"]
    asked = found.teacher(node, node.step)
    shutil.rmtree(bench.store.path(found.has(asked)))
    assert Ledger(bench, build_graph(bench.experiment("recovery"))).digest(node) is not None
