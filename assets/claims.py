"""The asset ``warehouse / claims``: what our facts make of each published statement, with its page. Wiring only; the words are in ``statements.py``."""

import dagster as dg

from assay.assets import labels
from assay.assets.steps import RETRY, step
from assay.assets.workspace import Workspace
from assay.schemas.experiment import Resources


def build_claims(workspace: Workspace) -> dg.AssetsDefinition:
    """The asset that judges every claim again after the snapshot, and writes ``reports/claims.html``."""

    @dg.asset(
        key=labels.CLAIMS_KEY,
        deps=[labels.SNAPSHOT_KEY],
        group_name="warehouse",
        kinds={"html", "duckdb"},
        tags={"stage": "warehouse"},
        description="Published statements as queries over the facts: supported, refuted, undecided, or not measured yet.",
        retry_policy=RETRY,
    )
    def warehouse_claims():
        from assay.assets.report import markdown_table
        from assay.assets.statements import counted, write_page
        from assay.warehouse.database import connect
        from assay.warehouse.reads import claims

        with step(workspace.home, Resources()):
            rows = claims(connect(workspace.facts.root))
            file = write_page(workspace, rows)
            shown = rows.select(
                "id", "verdict", "value", "low", "high", "threshold", "upto", "direction", "experiment", "base", "statement"
            )
            counts = {verdict.replace(" ", "_"): count for verdict, count in counted(rows).items()}
            return dg.MaterializeResult(
                metadata={"page": dg.MetadataValue.path(str(file)), **counts, "table": dg.MetadataValue.md(markdown_table(shown))}
            )

    return warehouse_claims
