"""The step ``prune_depth``: whole blocks out of a model. Not here: any arithmetic."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.schemas.pruning import PruneDepth

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

LAYERS_FROM = "assay_layers_from"  # where config.json says which of the base's blocks are left; the name lets ``drop_layers`` cut it along


def prune_depth(step: PruneDepth, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """Blocks of least Block Influence, or the run whose ends are the closest in angle."""
    from assay.ops.prune import depth
    from assay.ops.steps.given import require_windows
    from assay.ops.steps.whole import opened

    ids = require_windows(windows, f"prune_depth scores blocks by {step.score} on text")
    model, stored = opened(parent, step.kind)
    if step.score == "block_influence":
        scores = depth.block_influence(model, ids)
        removed = depth.lowest(scores, step.layers)
    else:
        scores = depth.angular_distances(model, ids, step.layers, tokens=step.tokens or "last")
        start = depth.best_run(scores)
        removed = list(range(start, start + step.layers))
    return {"score": step.score, "scores": scores.tolist(), "tokens": ids.numel(), **_cut(model, stored, removed, parent, out)}


def perplexity(step: PruneDepth, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """One block after the other, each time the one whose absence costs least."""
    from assay.ops.prune.depth_greedy import greedy
    from assay.ops.steps.given import require_windows
    from assay.ops.steps.whole import opened

    ids = require_windows(windows, "prune_depth finds what the loss misses least on text")
    model, stored = opened(parent, step.kind)
    taken = greedy(model, ids, step.layers)
    told = _cut(model, stored, sorted(each.layer for each in taken), parent, out)
    return {"score": step.score, "order": [each._asdict() for each in taken], "tokens": ids.numel(), **told}


def random(step: PruneDepth, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """Any blocks, drawn by the experiment's seed: the control."""
    from assay.ops.models import structure
    from assay.ops.prune.depth import random_layers
    from assay.ops.steps.whole import opened

    model, stored = opened(parent, step.kind)
    return {"score": step.score, **_cut(model, stored, random_layers(len(structure.blocks(model)), step.layers, seed), parent, out)}


def listed(step: PruneDepth, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """The blocks that the step names."""
    from assay.ops.steps.whole import opened

    assert step.listed is not None
    model, stored = opened(parent, step.kind)
    return {"score": step.score, **_cut(model, stored, list(step.listed), parent, out)}


def _cut(model: "PreTrainedModel", stored: "torch.dtype", removed: list[int], parent: Path, out: Path) -> dict[str, Any]:
    """Take ``removed`` out and write what is left in the dtype of the parent: to float32 and back changes no bit."""
    from assay.ops.models.dense import move
    from assay.ops.prune.depth import drop_layers
    from assay.ops.steps.whole import written

    config = model.config.get_text_config(decoder=True)
    before = config.num_hidden_layers
    if getattr(config, LAYERS_FROM, None) is None:
        setattr(config, LAYERS_FROM, list(range(before)))
    drop_layers(model, removed)
    written(move(model, stored), parent, out)
    return {"removed": removed, "layers_before": before}
