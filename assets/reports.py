"""What is read from the facts, as assets: a report for each experiment, the warehouse snapshot, the comparison with the last night. Wiring only."""

from collections.abc import Iterator, Sequence

import dagster as dg

from assay.assets import labels
from assay.assets.claims import build_claims
from assay.assets.ledger import Ledger
from assay.assets.measurements import measured
from assay.assets.pictures import inline
from assay.assets.record import Recorder
from assay.assets.steps import RETRY, step
from assay.assets.workspace import Workspace
from assay.schemas.experiment import Resources
from assay.schemas.graph import Graph


def build_reports(workspace: Workspace, graphs: Sequence[Graph]) -> Iterator[dg.AssetsDefinition]:
    """The report of each experiment, and the three assets of the whole warehouse."""
    for graph in graphs:
        yield _report(workspace, graph)
    yield _snapshot(workspace, graphs)
    yield _regression(workspace)
    yield build_claims(workspace)


def _report(workspace: Workspace, graph: Graph) -> dg.AssetsDefinition:
    experiment = graph.experiment
    key = labels.report_key(experiment)

    @dg.asset(
        key=key,
        deps=[
            labels.facts_key(experiment, graph.ends[variant.slug], name)
            for variant in experiment.variants
            for name in measured(graph, variant)
        ],
        group_name=experiment.name,
        kinds={"html", "duckdb"},
        tags={"stage": "report"},
        description=f"The table, the picture and the verdicts of {experiment.name}. {experiment.question}",
        retry_policy=RETRY,
    )
    def report(context: dg.AssetExecutionContext):
        from assay.assets.report import NO_PICTURE, SIZE_AGAINST_KL, markdown_table, write_report

        with step(workspace.home, Resources()):
            Recorder(Ledger(workspace, graph)).declare()
            written = write_report(workspace, experiment)
            pictures = {
                SIZE_AGAINST_KL: dg.MetadataValue.text(NO_PICTURE),
                **{title: inline(png) for title, png in written.pictures.items()},
            }
            return dg.MaterializeResult(
                metadata={
                    "report": dg.MetadataValue.path(str(written.file)),
                    "variants": written.table.height,
                    "table": dg.MetadataValue.md(markdown_table(written.table)),
                    **{title.lower().replace(" ", "_"): picture for title, picture in pictures.items()},
                }
            )

    return report


def _snapshot(workspace: Workspace, graphs: Sequence[Graph]) -> dg.AssetsDefinition:
    @dg.asset(
        key=labels.SNAPSHOT_KEY,
        deps=[labels.report_key(graph.experiment) for graph in graphs],
        group_name="warehouse",
        kinds={"duckdb"},
        tags={"stage": "warehouse"},
        description="warehouse.duckdb: every fact as real tables with the views, swapped in whole, for any DuckDB client.",
        retry_policy=RETRY,
    )
    def warehouse_snapshot():
        from assay.warehouse.database import snapshot

        with step(workspace.home, Resources()):
            workspace.facts.compact()
            snapshot(workspace.facts.root, workspace.warehouse)
            return dg.MaterializeResult(
                metadata={"file": dg.MetadataValue.path(str(workspace.warehouse)), "size_bytes": workspace.warehouse.stat().st_size}
            )

    return warehouse_snapshot


def _regression(workspace: Workspace) -> dg.AssetsDefinition:
    @dg.asset(
        key=labels.REGRESSION_KEY,
        deps=[labels.SNAPSHOT_KEY],
        group_name="warehouse",
        kinds={"duckdb"},
        tags={"stage": "warehouse"},
        description="The newest facts against those of the run before: what moved by more than its noise.",
        retry_policy=RETRY,
    )
    def warehouse_regression():
        from assay.assets.report import markdown_table
        from assay.warehouse.database import connect
        from assay.warehouse.reads import regression

        with step(workspace.home, Resources()):
            moved = regression(connect(workspace.facts.root))
            return dg.MaterializeResult(
                metadata={"moved": moved.height, "table": dg.MetadataValue.md(markdown_table(moved) if moved.height else "Nothing moved.")}
            )

    return warehouse_regression
