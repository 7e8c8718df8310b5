"""The step ``prune_weights``: single weights to zero, by a function for each score. Not here: any arithmetic."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.schemas.pruning import PruneWeights

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from assay.ops.prune.masks import Pruned, Sparsity


def magnitude(step: PruneWeights, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """The smallest weights."""
    from assay.ops.prune.magnitude import prune_model
    from assay.ops.steps.whole import opened

    model, stored = opened(parent, step.kind)
    return _save(step, model, stored, prune_model(model, _sparsity(step), scope=step.scope or "layer"), parent, out)


def wanda(step: PruneWeights, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """The weights of least size times input."""
    from assay.ops.prune.wanda import prune_model
    from assay.ops.steps.given import require_windows
    from assay.ops.steps.whole import opened

    ids = require_windows(windows, f"{step.method} looks at text")
    model, stored = opened(parent, step.kind)
    return _save(step, model, stored, prune_model(model, ids, _sparsity(step)), parent, out)


def sparsegpt(step: PruneWeights, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """The weights whose removal the others make up for best."""
    from assay.ops.prune.sparsegpt import prune_model
    from assay.ops.steps.given import require_windows
    from assay.ops.steps.whole import opened

    ids = require_windows(windows, f"{step.method} looks at text")
    model, stored = opened(parent, step.kind)
    return _save(step, model, stored, prune_model(model, ids, _sparsity(step), damping=step.damping_pct / 100), parent, out)


def sparsegpt_rounded(step: PruneWeights, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """The same, and what stays is rounded in the same loop, so that the columns that follow make up for both; written packed, as rounded weights are."""
    import torch

    from assay.ops.models.dense import check_finite, load_dense, move, require_dense, stored_dtype
    from assay.ops.models.experts import weights
    from assay.ops.prune.sparsegpt import prune_model
    from assay.ops.quantize import by_layer
    from assay.ops.quantize.rtn import replace
    from assay.ops.quantize.write import save_packed
    from assay.ops.steps.given import require_windows
    from assay.ops.steps.quantize import format_of

    assert step.quantize is not None
    ids = require_windows(windows, f"{step.method} looks at text")
    require_dense(parent, step.kind)
    model = load_dense(parent)
    check_finite(model.state_dict().items())
    original = {name: weight.clone() for name, weight in weights(model).items()}
    pruned = prune_model(move(model, torch.float32), ids, _sparsity(step), format=format_of(step.quantize), damping=step.damping_pct / 100)
    replaced = replace(move(model, stored_dtype(parent)), pruned.layers)
    told = _said(step, model, pruned)
    packed = save_packed(model, parent, out, pruned.layers)
    errors = told.pop("output_error")
    by_layer.write(out, {name: by_layer.harm(original[name], codes, errors.get(name)) for name, codes in pruned.layers.items()})
    return told | {name: replaced[name] for name in ("forms", "quantized_layers", "coverage", "skipped")} | packed


def _sparsity(step: PruneWeights) -> "Sparsity":
    from assay.ops.prune.masks import Sparsity

    return Sparsity(step.sparsity_pct or 0) if step.pattern is None else Sparsity.of_pattern(step.pattern)


def _save(step: PruneWeights, model: "PreTrainedModel", stored: "torch.dtype", pruned: "Pruned", parent: Path, out: Path) -> dict[str, Any]:
    """Write the model in the dtype of its parent; rounding to it makes no zero another number."""
    from assay.ops.models.dense import move
    from assay.ops.steps.whole import written

    told = _said(step, model, pruned)
    written(move(model, stored), parent, out)
    return told


def _said(step: PruneWeights, model: "PreTrainedModel", pruned: "Pruned") -> dict[str, Any]:
    """What the step says of the zeros, which the model's config keeps as well."""
    from assay.ops.models.dense import PRUNED_KEY

    found = pruned.realised
    setattr(model.config, PRUNED_KEY, {"pattern": step.pattern, "zeros": found.zeros, "weights": found.weights})
    return {
        "method": step.method,
        "zeros": found.zeros,
        "weights": found.weights,
        "share": found.share,
        "layers": found.layers,
        **pruned.summary,
    }
