"""The step ``prune_width``: every block narrower, by the same count. Not here: any arithmetic."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.schemas.pruning import PruneWidth

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def prune_width(step: PruneWidth, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """Rank heads, channels and hidden channels on text, keep so many of each, and write a plain, smaller checkpoint."""
    from assay.ops.models import structure
    from assay.ops.models.dense import move
    from assay.ops.prune.width import Kept, cut, require_possible
    from assay.ops.prune.width_scores import choose, choose_in_groups, group_scores, groups_of, importance
    from assay.ops.steps.given import require_windows
    from assay.ops.steps.whole import opened, written

    ids = require_windows(windows, "prune_width ranks channels on text")
    model, stored = opened(parent, step.kind)
    require_possible(model, kv_groups=step.kv_groups, query_heads=step.heads_per_group, ffn=step.ffn, hidden=step.hidden)
    before = structure.shape_numbers(model)
    found = importance(model, ids, tokens=step.over_tokens, samples=step.over_windows)
    heads, protect = _heads(step, model, parent, ids, found.heads, seed)
    groups, each = int(before["kv_heads"]), int(before["heads"]) // int(before["kv_heads"])
    kept_groups = kept_heads = None
    if step.kv_groups is not None:
        kept_groups = choose(group_scores(heads, groups), step.kv_groups, protect=groups_of(protect, each))
    if step.heads_per_group is not None:
        kept_heads = choose_in_groups(heads, groups, step.heads_per_group, protect=protect)
        if kept_groups is not None:
            kept_heads = [[head for head in row if head // each in of] for row, of in zip(kept_heads, kept_groups, strict=True)]
    if step.ffn is not None and found.ffn is None:
        raise ValueError(
            f"ffn {step.ffn} of {type(model).__name__}, whose blocks are mixtures of experts; prune_experts makes these smaller"
        )
    ffn = None if step.ffn is None or found.ffn is None else choose(found.ffn, step.ffn)
    hidden = None if step.hidden is None else choose(found.hidden.unsqueeze(0), step.hidden)[0]
    cut(model, Kept(kept_groups, kept_heads, ffn, hidden), correct_norms=step.correct_norms)
    after = structure.shape_numbers(model)
    written(move(model, stored), parent, out)
    return {
        "before": before, "after": after, "kv_groups": kept_groups, "query_heads": kept_heads, "heads": heads.tolist(),
        "protected": sorted(protect), "tokens": ids.numel(),
    }  # fmt: skip


def _heads(
    step: PruneWidth, model: "PreTrainedModel", parent: Path, ids: "Tensor", activity: "Tensor", seed: int
) -> "tuple[Tensor, set[tuple[int, int]]]":
    """What heads are ranked by, the higher the longer they stay, and which stay whatever their rank."""
    import torch

    if step.heads_by == "random":
        scores = torch.rand(activity.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    elif step.heads_by == "activation" and not step.protect:
        scores = activity
    else:
        from assay.ops.evaluate.head_screen import screen
        from assay.ops.models.checkpoint import load_tokenizer

        screened = screen(model, load_tokenizer(parent), ids, seed=seed)
        if step.protect:
            best = [each.flatten().topk(min(step.protect, each.numel())).indices.tolist() for each in screened.values()]
            return activity, {divmod(number, activity.shape[1]) for numbers in best for number in numbers}
        scores = screened[step.heads_by]
    return (-scores if step.cut == "most" else scores), set()
