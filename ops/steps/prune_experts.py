"""The step ``prune_experts``: fewer experts in every mixture. Not here: any arithmetic."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.schemas.pruning import PruneExperts

if TYPE_CHECKING:
    from torch import Tensor


def prune_experts(step: PruneExperts, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """Keep the experts of highest score in each layer, and drop the others or merge them into those that stay."""
    from assay.ops.models.dense import move
    from assay.ops.prune.experts import drop_experts, merge_experts, usage
    from assay.ops.prune.width_scores import choose
    from assay.ops.steps.given import require_windows
    from assay.ops.steps.whole import opened, written

    ids = require_windows(windows, "prune_experts watches experts on text")
    model, stored = opened(parent, step.kind)
    merge = step.method == "merge"
    used = usage(model, ids, outputs=merge)
    scores = used.saliency if step.method == "output_norm" else used.tokens
    kept = choose(scores, step.experts)
    if merge:
        merge_experts(model, kept, used)
    else:
        drop_experts(model, kept)
    written(move(model, stored), parent, out)
    unused = int((used.tokens == 0).sum())
    return {"method": step.method, "kept": kept, "tokens": used.tokens.tolist(), "saliency": used.saliency.tolist(), "unused": unused}
