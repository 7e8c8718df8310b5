"""One asset per node of an experiment's graph: bases, checkpoints, runtime variants, and the base's hidden states. Wiring only."""

from collections.abc import Iterator
from typing import Any

import dagster as dg

from assay.assets import labels
from assay.assets.build import Builder
from assay.assets.describe import describe
from assay.assets.ledger import Ledger, code_of, measuring_code
from assay.assets.pictures import inline
from assay.assets.record import Recorder
from assay.assets.steps import RETRY, step
from assay.assets.workspace import Workspace
from assay.schemas.graph import Graph, Node
from assay.schemas.protocols import Divergence
from assay.warehouse.store import Built


def build_checkpoints(workspace: Workspace, graph: Graph) -> Iterator[dg.AssetsDefinition]:
    """The assets of every node, and of the reference of every divergence protocol.

    Raises:
        RuntimeError: a node names a parent that is no node (Dagster itself would take it for an external asset).
    """
    known = {node.path for node in graph.nodes}
    for node in graph.nodes:
        for parent in node.parents:
            if parent.path not in known:
                raise RuntimeError(
                    f"{'/'.join(node.path)} has the parent {'/'.join(parent.path)}, which is no node of {graph.experiment.name}"
                )
        yield _checkpoint(workspace, graph, node)
    for name, protocol in graph.experiment.protocols.items():
        if isinstance(protocol, Divergence):
            yield _reference(workspace, graph, name, protocol)


def _checkpoint(workspace: Workspace, graph: Graph, node: Node) -> dg.AssetsDefinition:
    experiment = graph.experiment
    key = labels.node_key(experiment, node)
    asked = node.base if node.step is None else node.step
    assert asked is not None
    stage = "base" if node.base else "runtime" if node.is_runtime else "weights"
    variants = [variant for variant in experiment.variants if graph.ends[variant.slug] is node]
    intact = dg.AssetCheckSpec(
        "intact", asset=key, blocking=True, description="Every file of the artifact is there, with the size that its manifest states."
    )

    @dg.multi_asset(
        name=labels.op_name(key),
        specs=[
            dg.AssetSpec(
                key,
                deps=[labels.node_key(experiment, parent) for parent in node.parents],
                description=describe(node),
                group_name=experiment.name,
                kinds=labels.kinds(node),
                tags=labels.tags(experiment, node, stage),
                code_version=labels.code_version(code_of(node), asked),
                metadata={
                    "spec": dg.MetadataValue.json(asked.model_dump(mode="json", exclude_none=True)),
                    "variants": ", ".join(v.slug for v in variants) or "none",
                },
            )
        ],
        check_specs=[intact],
        op_tags=labels.routing(experiment.resources),
        pool=labels.pool(experiment.resources, timing=False),
        retry_policy=RETRY,
    )
    def checkpoint(context: dg.AssetExecutionContext):
        with step(workspace.home, experiment.resources):
            ledger = Ledger(workspace, graph)
            recorder = Recorder(ledger)
            built = Builder(ledger, context.log.info).node(node)
            recorder.run(context.run.run_id, context.run.tags.get("assay/trigger", "ui"))
            recorder.declare()
            recorder.node(node)
            recorder.variants(variants)
        whole = ledger.digest(node) == built.digest  # the ledger looks at the files again
        yield dg.MaterializeResult(
            asset_key=key,
            metadata=built_metadata(workspace, built),
            data_version=dg.DataVersion(built.digest),
            check_results=[dg.AssetCheckResult(passed=whole, check_name="intact", metadata={"path": str(built.path)})],
        )

    return checkpoint


def _reference(workspace: Workspace, graph: Graph, name: str, protocol: Divergence) -> dg.AssetsDefinition:
    experiment = graph.experiment
    key = labels.reference_key(experiment, name)

    @dg.multi_asset(
        name=labels.op_name(key),
        specs=[
            dg.AssetSpec(
                key,
                deps=[labels.node_key(experiment, graph.base)],
                description=f"The base's final hidden states on the text of `{name}`: with them no variant pays for the base's forward.",
                group_name=experiment.name,
                kinds={"pytorch"},
                tags={"stage": "reference", "protocol": name},
                code_version=labels.code_version(measuring_code("reference"), protocol),
                metadata={"spec": dg.MetadataValue.json(protocol.model_dump(mode="json", exclude_none=True))},
            )
        ],
        op_tags=labels.routing(experiment.resources),
        pool=labels.pool(experiment.resources, timing=False),
        retry_policy=RETRY,
    )
    def reference(context: dg.AssetExecutionContext):
        with step(workspace.home, experiment.resources):
            built = Builder(Ledger(workspace, graph)).reference(protocol)
        return dg.MaterializeResult(asset_key=key, metadata=built_metadata(workspace, built), data_version=dg.DataVersion(built.digest))

    return reference


def built_metadata(workspace: Workspace, built: Built) -> dict[str, Any]:
    """What the UI shows of an artifact: cached or computed and why, its size, its path, what the op said."""
    summary = built.summary  # the action's own: another that came to the same bytes had other scores
    told: dict[str, Any] = {
        "cached": dg.MetadataValue.bool(built.cached),
        "seconds": round(built.seconds, 3),
        "size_bytes": workspace.store.manifest(built.digest).size_bytes,
        "digest": built.digest,
        "path": dg.MetadataValue.path(str(built.path)),
    }
    if "headline" not in summary:  # a measurement's are shown one by one
        told["summary"] = dg.MetadataValue.json(summary)
    if built.reason:
        told["why_built"] = built.reason
    if "curve" in summary:
        from assay.ops.evaluate.plots import recovery_curve_png

        told["recovery"] = inline(recovery_curve_png(summary["curve"]))
    if "scores" in summary and "removed" in summary:
        from assay.ops.evaluate.plots import layer_curve_png

        label = (
            "Block Influence (1 − cos)"
            if summary["score"] == "block_influence"
            else "angular distance from this layer to the end of its run (of π)"
        )
        told["layers"] = inline(layer_curve_png(summary["scores"], summary["removed"], label=label))
    return told
