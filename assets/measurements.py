"""The facts of each variant as assets: what shares a loaded model is one step, timings are another, in a pool of their own. Wiring only."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg

from assay.assets import labels
from assay.assets.build import Builder
from assay.assets.checkpoints import built_metadata
from assay.assets.ledger import Ledger, measuring_code
from assay.assets.pictures import inline
from assay.assets.record import Recorder
from assay.assets.steps import RETRY, step
from assay.assets.workspace import Workspace
from assay.schemas.experiment import Budget, Variant
from assay.schemas.facts import Measurement
from assay.schemas.graph import Graph, Node
from assay.schemas.metrics import DRAFT_SUITES, PACKED_SUITES, PRUNED_SUITES, TIMED_SUITES, TRAINED_SUITES, UNDRAFTED_SUITES, suite_of
from assay.schemas.protocols import Acceptance, Divergence, Protocol
from assay.schemas.pruning import PruneWeights
from assay.schemas.steps import TrainedStep, rounding_of

SHOWN_SLICES = ("kl_mean_nats", "acceptance_rate", "perplexity", "entropy_mean_nats", "pass_at_1", "pass_at_k", "majority_at_k")
RETIME = "assay/retime"  # a run with this tag measures its timings again although there are some of this device


def build_measurements(workspace: Workspace, graph: Graph) -> Iterator[dg.AssetsDefinition]:
    """For every variant a step for its divergences, which share a loaded model, one for its other quality facts, and one for its timings."""
    for variant in graph.experiment.variants:
        for stage in ("divergence", "facts", "timing"):
            names = [name for name in measured(graph, variant) if _stage(graph.experiment.protocols[name]) == stage]
            if names:
                yield _facts(workspace, graph, variant, names, stage)


def _stage(protocol: Protocol) -> str:
    return "timing" if protocol.suite in TIMED_SUITES else "divergence" if isinstance(protocol, Divergence) else "facts"


def measured(graph: Graph, variant: Variant) -> list[str]:
    """The protocols that apply to ``variant``.

    Those about a draft only where there is one, those that a draft does not change only where there is none, those about packed weights only where there
    is a step that packs, of zeros where weights were pruned, and of a training run where one ends the chain.
    """
    without = UNDRAFTED_SUITES if variant.draft else DRAFT_SUITES
    if not any(rounding_of(step) for step in variant.steps):
        without |= PACKED_SUITES
    if not any(isinstance(step, PruneWeights) for step in variant.steps):
        without |= PRUNED_SUITES
    if not isinstance(graph.ends[variant.slug].checkpoint.step, TrainedStep):
        without |= TRAINED_SUITES
    return [name for name, protocol in graph.experiment.protocols.items() if protocol.suite not in without]


def _facts(workspace: Workspace, graph: Graph, variant: Variant, names: list[str], stage: str) -> dg.AssetsDefinition:
    experiment, node, timing = graph.experiment, graph.ends[variant.slug], stage == "timing"
    keys = {name: labels.facts_key(experiment, node, name) for name in names}
    checks = {name: _checks(graph, variant, name, keys[name]) for name in names}

    @dg.multi_asset(
        name=labels.op_name(labels.node_key(experiment, node), stage),
        specs=[_spec(graph, node, variant, name, keys[name], timing) for name in names],
        check_specs=[spec for name in names for spec, _ in checks[name].values()],
        can_subset=True,
        op_tags=labels.routing(experiment.resources),
        pool=labels.pool(experiment.resources, timing=timing),
        retry_policy=RETRY,
    )
    def facts(context: dg.AssetExecutionContext):
        with step(workspace.home, experiment.resources, timing=timing):
            ledger = Ledger(workspace, graph)
            recorder, builder = Recorder(ledger), Builder(ledger)
            builder.node(node)
            recorder.run(context.run.run_id, context.run.tags.get("assay/trigger", "ui"))
            recorder.declare()
            recorder.variants([variant])
            failures: list[tuple[str, Exception]] = []
            wanted_checks = context.selected_asset_check_keys
            for name in names:
                if keys[name] not in context.selected_asset_keys:
                    continue
                try:
                    key, built = builder.measurement(node, name, run=context.run.run_id, anew=timing and RETIME in context.run.tags)
                except Exception as error:  # the other suites of this variant still have their facts
                    recorder.failure(node, name, context.run.run_id, error)
                    failures.append((name, error))
                    continue
                rows = recorder.measurement(node, name, key, built.digest)
                found = [_verdict(check, budget, rows) for check, budget in checks[name].values() if check.key in wanted_checks]
                yield dg.MaterializeResult(
                    asset_key=keys[name], metadata={**_shown(built.path, rows), **built_metadata(workspace, built)},
                    data_version=dg.DataVersion(built.digest), check_results=found,
                )  # fmt: skip
            if failures:
                name, error = failures[0]
                error.add_note(f"in {', '.join(name for name, _ in failures)} of {variant.slug}")
                raise error

    return facts


def _spec(graph: Graph, node: Node, variant: Variant, name: str, key: dg.AssetKey, timing: bool) -> dg.AssetSpec:
    experiment, protocol = graph.experiment, graph.experiment.protocols[name]
    deps = [labels.node_key(experiment, node)]
    if isinstance(protocol, Divergence):
        deps.append(labels.reference_key(experiment, name))
    return dg.AssetSpec(
        key,
        deps=deps,
        description=f"`{name}` of {variant.slug}. {(type(protocol).__doc__ or '').strip().splitlines()[0]}",
        group_name=experiment.name,
        kinds={"duckdb", "parquet"},
        tags={**labels.tags(experiment, node, "timing" if timing else "facts"), "suite": protocol.suite, "protocol": name},
        code_version=labels.code_version(measuring_code(protocol.suite), protocol),
        metadata={"protocol": dg.MetadataValue.json(protocol.model_dump(mode="json", exclude_none=True)), "variant": variant.slug},
    )


Checks = dict[str, tuple[dg.AssetCheckSpec, Budget | None]]


def _checks(graph: Graph, variant: Variant, name: str, key: dg.AssetKey) -> Checks:
    """The budgets that this protocol can judge, and for a draft that greedy speculation is plain greedy decoding."""
    protocol = graph.experiment.protocols[name]
    found: Checks = {}
    for budget in graph.experiment.budgets_of(variant):
        if suite_of(budget.metric) == protocol.suite:
            check = f"budget_{budget.metric}"
            while check in found:
                check += "_again"
            bound = f"at most {budget.at_most:g}" if budget.at_most is not None else f"at least {budget.at_least:g}"
            found[check] = (dg.AssetCheckSpec(check, asset=key, blocking=budget.blocks, description=f"{budget.metric} {bound}"), budget)
    if isinstance(protocol, Acceptance) and protocol.sampling.greedy:
        description = "Greedy speculation gives the tokens of plain greedy decoding."
        found["exact"] = (dg.AssetCheckSpec("exact", asset=key, blocking=True, description=description), None)
    return found


def _verdict(check: dg.AssetCheckSpec, budget: Budget | None, rows: list[Measurement]) -> dg.AssetCheckResult:
    metric = budget.metric if budget else "greedy_mismatches"
    value = next((row.value for row in rows if row.metric == metric and row.slice_kind == "all"), None)
    low = budget.at_least if budget and budget.at_least is not None else float("-inf")
    high = 0.0 if budget is None else budget.at_most if budget.at_most is not None else float("inf")
    severity = dg.AssetCheckSeverity.ERROR if check.blocking else dg.AssetCheckSeverity.WARN
    shown: dict[str, Any] = {"metric": metric, "value": "not measured" if value is None else value}
    return dg.AssetCheckResult(check_name=check.name, asset_key=check.asset_key, passed=value is not None and low <= value <= high, severity=severity,
                               metadata=shown)  # fmt: skip


def _shown(artifact: Path, rows: list[Measurement]) -> dict[str, Any]:
    """The metrics over everything as numbers (the UI plots them over time), the slices as a table, the pictures."""
    told: dict[str, Any] = {row.metric: row.value for row in rows if row.slice_kind == "all" and row.value is not None}
    sliced = [row for row in rows if row.slice_kind != "all" and row.metric in SHOWN_SLICES]
    if sliced:
        told["by_slice"] = dg.MetadataValue.md(
            "| metric | slice | value | n |\n|---|---|---:|---:|\n"
            + "\n".join(
                f"| {row.metric} | {row.slice_kind} {row.slice} | {'' if row.value is None else f'{row.value:.4g}'} | {row.n} |"
                for row in sliced
            )
        )
    if any(row.status == "noisy" for row in rows):
        told["noisy"] = "others took more of the CPU than a timing bears; shown, not ranked"
    for picture in sorted(artifact.glob("*.png")):
        told[picture.stem] = inline(picture.read_bytes())
    return told
