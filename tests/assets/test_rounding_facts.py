"""What rounding did, as facts of an experiment that has packed variants and dense ones."""

from collections.abc import Callable
from pathlib import Path

import pytest

from assay.assets.measurements import measured
from assay.assets.workspace import Workspace
from assay.schemas.graph import build_graph
from assay.warehouse.database import connect

EXPERIMENT = """
name: rounding
base: {path: base, dtype: float32}
axes:
  rotate:
    none: []
    hadamard: [{kind: rotate, method: hadamard}]
  quantize:
    none: []
    int4: [{kind: quantize, format: int4, group_size: 32}]
  draft:
    none: []
    ngram: [{kind: draft, method: ngram, tokens: 3}]
grid: {exclude: [{rotate: hadamard, draft: ngram}]}
measure:
  - layers
  - {suite: outliers, text: {path: text.txt}, windows: 2, length: 32}
budgets:
  - {metric: snr_lowest_db, at_least: 30, for: {quantize: int4}}
"""


PRUNED = """
name: joint
base: {path: base, dtype: float32}
axes:
  prune:
    none: []
    joint: [{kind: prune_weights, method: sparsegpt, pattern: "2:4", quantize: {format: int8, group_size: 32}, calibration: {windows: 4, length: 32, text: {path: text.txt}}}]
  store:
    plain: []
    pack: [{kind: pack}]
grid: {exclude: [{prune: none, store: pack}]}
measure: [bytes, layers, zeros, {suite: divergence, text: {path: text.txt}, tokens: 64, window: 32}]
"""


@pytest.fixture
def bench(place: Path, tmp_path: Path) -> Workspace:
    (place / "rounding.yaml").write_text(EXPERIMENT)
    return Workspace(tmp_path / "home", (place,))


def test_layers_are_asked_of_packed_variants_and_neither_suite_of_drafted_ones(bench: Workspace):
    graph = build_graph(bench.experiment("rounding"))
    found = {variant.slug: measured(graph, variant) for variant in graph.experiment.variants}
    assert found == {
        "none__none__none": ["outliers"], "none__int4__none": ["layers", "outliers"], "none__none__ngram": ["acceptance"], "none__int4__ngram": ["acceptance"],
        "hadamard__none__none": ["outliers"], "hadamard__int4__none": ["layers", "outliers"],
    }  # fmt: skip


def test_an_experiment_of_packed_and_dense_variants_has_the_facts_of_both(bench: Workspace, run_experiment: Callable[..., tuple]):
    _, success = run_experiment(bench, "rounding")
    tables = connect(bench.facts.root)
    assert success and not tables.sql("FROM measurement WHERE status = 'failed'").fetchall()
    by_layer = tables.sql(
        "SELECT variant, metric, count(DISTINCT slice) AS layers, min(value) AS least FROM by_slice "
        "WHERE slice_kind = 'layer' AND metric IN ('snr_db', 'largest_activation') GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    assert [row[:3] for row in by_layer] == [
        ("hadamard__int4__none", "largest_activation", 2), ("hadamard__int4__none", "snr_db", 14),
        ("hadamard__none__none", "largest_activation", 2),
        ("none__int4__none", "largest_activation", 2), ("none__int4__none", "snr_db", 14), ("none__none__none", "largest_activation", 2),
    ]  # fmt: skip
    lowest = tables.sql("SELECT variant, value, message FROM fact WHERE metric = 'snr_lowest_db' ORDER BY variant").fetchall()
    assert [(row[0], row[1]) for row in lowest] == [(row[0], row[3]) for row in by_layer if row[1] == "snr_db"]
    assert all(row[2].startswith("model.layers.") for row in lowest)
    verdicts = tables.sql("SELECT variant, verdict FROM verdict ORDER BY variant").fetchall()
    assert ("none__int4__none", "breached") in verdicts


def test_what_was_rounded_while_it_was_pruned_has_the_facts_of_both_and_is_told_from_what_was_pruned_alone(
    place: Path, tmp_path: Path, run_experiment: Callable[..., tuple]
):
    (place / "joint.yaml").write_text(PRUNED)
    bench = Workspace(tmp_path / "home", (place,))
    _, success = run_experiment(bench, "joint")
    tables = connect(bench.facts.root)
    assert success, tables.sql("SELECT suite, message FROM measurement WHERE status = 'failed'").fetchall()
    names = "('quantized_bits_per_weight', 'zero_share', 'broken_pattern_layers', 'kl_mean_nats', 'quantized_bits')"
    rows = tables.sql(
        f"SELECT variant, metric, value FROM fact WHERE metric IN {names} AND variant <> 'none__plain' ORDER BY ALL"
    ).fetchall()
    found = {(variant, metric): value for variant, metric, value in rows}
    whole, packed = (
        {metric: value for (name, metric), value in found.items() if name == variant} for variant in ("joint__plain", "joint__pack")
    )
    assert whole["quantized_bits_per_weight"] == whole["quantized_bits"] == 8.5 and packed["quantized_bits_per_weight"] == 5.5
    assert packed["quantized_bits"] == 5.5 and whole["zero_share"] == packed["zero_share"] >= 0.5
    assert whole["broken_pattern_layers"] == packed["broken_pattern_layers"] == 0
    assert 0 < whole["kl_mean_nats"] == pytest.approx(packed["kl_mean_nats"], rel=1e-4)
    made = tables.sql(
        "SELECT kinds, format, bits, group_size, quantize_method, sparsity_method, pattern FROM made_of ORDER BY variant"
    ).fetchall()
    told = ("int8", 8, 32, None, "sparsegpt", "2:4")
    assert made == [("prune_weights+quantize pack", *told), ("prune_weights+quantize", *told), ("", *(None,) * 6)]
