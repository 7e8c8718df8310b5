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
