"""How assets are called, grouped, tagged and routed, so that 200 variants can be searched and run on any executor. No work is done here."""

from typing import Any

import dagster as dg

from assay.schemas.experiment import Experiment, Resources
from assay.schemas.graph import Node
from assay.schemas.pruning import PruneDepth
from assay.schemas.rounding import Quantize, Rotate, Smooth
from assay.schemas.spec import canonical_json, digest_of
from assay.schemas.steps import Draft, DraftModel, Kv

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


def op_name(key: dg.AssetKey, prefix: str = "") -> str:
    """The name of the op that makes ``key``; key parts have no double underscore, so this is injective."""
    return "__".join([*([prefix] if prefix else []), *key.path])


def describe(node: Node) -> str:
    """One line a person can read: what the last step does."""
    step = node.step
    if node.base is not None:
        source = node.base.hub or node.base.path or (node.base.package and f"{node.base.package.file} of {node.base.package.name}")
        return f"The base {node.base.name} ({source}), saved once as {node.base.dtype}." + (f" {node.base.note}" if node.base.note else "")
    if isinstance(step, PruneDepth):
        return f"Without {step.layers} layers, chosen by {step.score.replace('_', ' ')}."
    if isinstance(step, Quantize):
        return _describe_rounding(step)
    if isinstance(step, Smooth):
        how = "SmoothQuant" if step.method == "smoothquant" else f"AWQ, for {step.format}, by the size of {step.salience}"
        return f"Channels scaled between layers ({how}); the logits stay."
    if isinstance(step, Rotate):
        names = {"hadamard": "a Hadamard matrix", "random": "random orthogonal matrices", "spinquant": "matrices learned by SpinQuant"}
        online = f", and at run time before {', '.join(step.online)}" if step.online else ""
        return f"Hidden states turned by {names[step.method]}{online}; the logits stay."
    if isinstance(step, Kv):
        return f"Run with keys and values stored as {step.format}."
    if isinstance(step, DraftModel):
        return _describe_model(step, node)
    assert isinstance(step, Draft)
    source = (
        "n-grams of the text so far"
        if step.method == "ngram"
        else f"the {'model' if step.made else 'variant'} {'/'.join(node.draft.path) if node.draft else ''}"
    )
    return f"Run speculatively: {step.tokens} tokens a round proposed by {source}, verified exactly."


def _describe_rounding(step: Quantize) -> str:
    grid = {-1: "one scale a row", "tensor": "one scale a weight", "block": "one scale a block"}.get(
        step.group_size or 0, f"groups of {step.group_size}"
    )
    what = step.format if step.mixed is None else f"{', '.join(step.mixed.formats)} within {step.mixed.millibits / 1000} bits"
    zero = f", {'symmetric' if step.symmetric else 'asymmetric'}" if what.startswith("int") else ""
    inputs = f"; inputs to {step.inputs.format} a {step.inputs.per}" if step.inputs else ""
    known = {"e8": "the E8 lattice, two bits", "additive": "sums of code book entries, two bits"}
    return f"Weights rounded to {known.get(step.method) or f'{what} ({step.method.upper()}, {grid}{zero})'}{inputs}."


def _describe_model(step: DraftModel, node: Node) -> str:
    target = "/".join(node.parent.path) if node.parent else ""
    start = f"The first {step.early_exit} layers of {target}" if node.draft is None else f"A copy of {'/'.join(node.draft.path)}"
    if step.distill is None:
        return f"{start}, under its own norm and head, as a draft."
    how, given = step.distill.loss.replace("_", " "), step.distill
    packed = f", then rounded to {given.quantize.format}" if given.quantize else ""
    return f"{start}, trained toward {target} on {given.tokens:,} tokens by {how} ({given.on_policy_pct} % on its own samples){packed}."


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
    return {"pytorch", "prune"} if isinstance(step, PruneDepth) else {"json", "kv" if isinstance(step, Kv) else "speculative"}


def tags(experiment: Experiment, node: Node, stage: str) -> dict[str, str]:
    """Searchable scalars: the stage, the step, its format, and the option on every axis (``axis/prune: depth4``)."""
    step = node.step
    found = {"stage": stage, "base": experiment.base.name[:63]}
    if step is not None:
        found["step"] = step.kind
        unsaid = ("format", "group_size") if not _on_a_grid(step) else ()  # what stands there is no part of the method
        for field in ("format", "method", "score", "layers", "group_size"):
            value = getattr(step, field, None)
            if value is not None and field not in unsaid:
                found[field] = "row" if value == -1 else str(value)
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
