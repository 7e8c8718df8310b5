"""How assets are called, grouped, tagged and routed, so that 200 variants can be searched and run on any executor. No work is done here."""

from typing import Any

import dagster as dg

from assay.schemas.experiment import Experiment, Resources
from assay.schemas.graph import Node
from assay.schemas.pruning import Pack
from assay.schemas.rounding import Quantize, Rotate, Smooth
from assay.schemas.spec import canonical_json, digest_of
from assay.schemas.steps import DraftModel, Kv, TrainedStep, rounding_of
from assay.schemas.training import Distill

POOL_TIMING = "timing"
POOL_GPU = "gpu"


def node_key(experiment: Experiment, node: Node) -> dg.AssetKey:
    return dg.AssetKey([experiment.name, *node.path])


def facts_key(experiment: Experiment, node: Node, protocol: str) -> dg.AssetKey:
    return dg.AssetKey([experiment.name, "facts", *node.path, protocol])


def reference_key(experiment: Experiment, protocol: str) -> dg.AssetKey:
    return dg.AssetKey([experiment.name, "reference", protocol])


def report_key(experiment: Experiment) -> dg.AssetKey:
    return dg.AssetKey([experiment.name, "report"])


SNAPSHOT_KEY = dg.AssetKey(["warehouse", "snapshot"])
REGRESSION_KEY = dg.AssetKey(["warehouse", "regression"])
CLAIMS_KEY = dg.AssetKey(["warehouse", "claims"])


def op_name(key: dg.AssetKey, prefix: str = "") -> str:
    """The name of the op that makes ``key``; key parts have no double underscore, so this is injective."""
    return "__".join([*([prefix] if prefix else []), *key.path])


def _on_a_grid(step: object) -> bool:
    """Whether ``format`` and ``group_size`` of a step say what it does."""
    if isinstance(step, Quantize):
        return step.mixed is None and step.method not in ("e8", "additive")
    return not isinstance(step, Smooth) or step.method == "awq"


def kinds(node: Node) -> set[str]:
    step = node.step
    if node.base is not None:
        return {"huggingface", "pytorch"}
    if isinstance(step, Quantize):
        return {"pytorch", step.format if _on_a_grid(step) else "mixed" if step.mixed else step.method}
    if isinstance(step, Smooth | Rotate):
        return {"pytorch", step.kind}
    if isinstance(step, DraftModel):
        return {"pytorch", "distill" if step.distill else "speculative"}
    if isinstance(step, TrainedStep):
        return {"pytorch", "distill" if isinstance(step, Distill) else "train"}
    if isinstance(step, Pack):
        return {"pytorch", "sparse"}
    return (
        {"pytorch", "prune", *([grid.format] if (grid := rounding_of(step)) else [])}
        if step is not None and step.kind.startswith("prune")
        else {"json", "kv" if isinstance(step, Kv) else "speculative"}
    )


def tags(experiment: Experiment, node: Node, stage: str) -> dict[str, str]:
    """Searchable scalars: the stage, the step, its format, and the option on every axis (``axis/prune: depth4``)."""
    step = node.step
    found = {"stage": stage, "base": experiment.base.name[:63]}
    if step is not None:
        found["step"] = step.kind
        unsaid = ("format", "group_size") if not _on_a_grid(step) else ()  # what stands there is no part of the method
        for field in ("format", "method", "score", "layers", "group_size", "sparsity_pct", "pattern", "loss", "tokens"):
            value = getattr(step, field, None) or getattr(rounding_of(step), field, None)
            if value is not None and field not in unsaid:
                found[field] = "row" if value == -1 else str(value).replace(":", "of")  # a tag has no colon
    for axis, options in experiment.axes.items():
        option = next((part for part in node.path if part in options), None)
        if option:
            found[f"axis/{axis}"] = option
    return found


def code_version(code: str, what: Any) -> str:
    """Dagster's code version: how it is done and what is asked, so that either shows as a change."""
    return digest_of([code, canonical_json(what)])[:16]


def routing(resources: Resources) -> dict[str, Any]:
    """The needs of a step in the words of every executor: priority, Kubernetes, Ray, Celery.

    Returns:
        ``op_tags`` for the asset. The pool is told apart (:func:`pool`), since Dagster takes it as an argument.
    """
    tags: dict[str, Any] = {"dagster/priority": str(resources.priority)} if resources.priority else {}
    limits = {
        **({"nvidia.com/gpu": str(resources.gpu)} if resources.gpu else {}),
        **({"memory": resources.memory} if resources.memory else {}),
    }
    if limits:
        tags["dagster-k8s/config"] = {"container_config": {"resources": {"limits": limits}}}
        ray = {
            **({"num_gpus": resources.gpu} if resources.gpu else {}),
            **({"memory": _bytes(resources.memory)} if resources.memory else {}),
        }
        tags["dagster-ray/config"] = ray
    if resources.gpu:
        tags["dagster-celery/queue"] = POOL_GPU
    return tags


def pool(resources: Resources, *, timing: bool) -> str | None:
    return POOL_TIMING if timing else POOL_GPU if resources.gpu else None


def _bytes(memory: str) -> int:
    return int(memory[:-2]) * 2 ** {"Mi": 20, "Gi": 30, "Ti": 40}[memory[-2:]]
