"""The nightly run: what the store lacks, and the timings of the variants worth watching. Off unless it is switched on."""

from collections.abc import Sequence

import dagster as dg

from assay.assets import labels
from assay.assets.ledger import Ledger
from assay.assets.measurements import RETIME, measured
from assay.assets.plan import missing, plan
from assay.assets.workspace import Workspace
from assay.schemas.graph import Graph
from assay.schemas.metrics import TIMED_SUITES


def nightly(workspace: Workspace, graphs: Sequence[Graph], job: str, *, on: bool, cron: str = "0 2 * * *") -> dg.ScheduleDefinition:
    """One run a night of :func:`selection`; nothing to do is a skip that says so."""

    @dg.schedule(
        name="nightly",
        cron_schedule=cron,
        job_name=job,
        default_status=dg.DefaultScheduleStatus.RUNNING if on else dg.DefaultScheduleStatus.STOPPED,
        description="Builds what is missing or changed, times the promoted variants again, then the warehouse and the regression report.",
    )
    def tick(context: dg.ScheduleEvaluationContext):
        chosen = selection(workspace, graphs)
        if not chosen:
            return dg.SkipReason("everything is in the store and no variant is promoted yet")
        when = context.scheduled_execution_time
        return dg.RunRequest(run_key=when.isoformat(), asset_selection=chosen, tags={RETIME: "true", "assay/trigger": "schedule"})

    return tick


def selection(workspace: Workspace, graphs: Sequence[Graph]) -> list[dg.AssetKey]:
    """Missing or changed items, the timings of promoted variants (the base, and those on the Pareto front of bytes and KL), and what reads them."""
    from assay.warehouse.database import connect
    from assay.warehouse.reads import pareto

    chosen: dict[dg.AssetKey, None] = {}
    connection = connect(workspace.facts.root)
    for graph in graphs:
        experiment = graph.experiment
        keys = {item.key: None for item in missing(plan(Ledger(workspace, graph)))}
        promoted = {experiment.variants[0].slug, *pareto(connection, experiment=experiment.name)["variant"].to_list()}
        for variant in experiment.variants:
            if variant.slug in promoted:
                names = [name for name in measured(graph, variant) if experiment.protocols[name].suite in TIMED_SUITES]
                keys.update({labels.facts_key(experiment, graph.ends[variant.slug], name): None for name in names})
        if keys:
            chosen.update({**keys, labels.report_key(experiment): None})
    return [*chosen, labels.SNAPSHOT_KEY, labels.REGRESSION_KEY, labels.CLAIMS_KEY] if chosen else []
