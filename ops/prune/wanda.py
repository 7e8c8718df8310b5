"""Pruning by weights and activations: |w| times the size of the input that it meets. Not here: making up for what is removed (``sparsegpt.py``)."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from assay.ops.prune.masks import Pruned, Scope, Sparsity, prunable, realised, select
from assay.ops.quantize.grid import naming
from assay.ops.quantize.sequential import Group, Stage, walk


def scores(weight: Float[Tensor, "rows cols"], norms: Float[Tensor, " cols"]) -> Float[Tensor, "rows cols"]:
    """|w_ij| ‖x_j‖₂ for each weight.

    Args:
        norms: √Σx² of each input channel over all tokens, not negative.
    Source:
        Sun et al. 2023, eq. 1, arXiv:2306.11695.
    """
    return weight.abs() * norms.to(weight.dtype)


@torch.no_grad()
def prune_model(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows length"],
    sparsity: Sparsity,
    *,
    scope: Scope = "row",
    real: Bool[Tensor, "windows length"] | None = None,
    true_sequential: bool = False,
    batch: int = 8,
) -> Pruned:
    """Set the weights of least :func:`scores` to zero, in place, block by block on the inputs that the pruned blocks before give.

    Args:
        windows: token ids to calibrate on.
        scope: whom a percentage compares: each output row (the paper's finding), or the whole matrix as a control. A pattern compares its groups.
        real: False at padding, which enters no norm.
        true_sequential: inside a block too, later layers see what the pruned earlier ones give; ``sequential.walk`` says more.
    Returns:
        What became zero, and a summary: ``tokens`` (real ones) and ``unrouted``, experts that saw no token and were pruned by |w| alone.
    Raises:
        ValueError: before anything is changed: the sparsity does not fit a weight (a note names it), no window, or too small a share of the model is
            reached. On the way: a weight or an input is NaN.
    Source:
        Sun et al. 2023, arXiv:2306.11695. Like theirs, all layers of a block are scored on the block as it was; ``true_sequential`` is the variant.
    """
    weights, unrouted = prunable(model, sparsity), []
    for stage in walk(model, windows, real=real, true_sequential=true_sequential, batch=batch):
        norms = _norms(stage)
        for group in stage.groups:
            for name in group:
                weight = stage.weights[name]
                if group not in norms:
                    unrouted.append(name)
                with naming(name, weight):
                    score = scores(weight, norms[group]) if group in norms else weight.abs()
                    weight.masked_fill_(select(score, sparsity, scope), 0)
    tokens = int(windows.numel() if real is None else real.sum())
    summary = {"scope": sparsity.name if sparsity.m else scope, "tokens": tokens, "unrouted": unrouted}
    return Pruned(realised(weights, sparsity), summary, {})


def _norms(stage: Stage) -> dict[Group, Float[Tensor, " cols"]]:
    """√Σx² of each channel that a group reads; an expert to which no token was routed has none."""
    sums: dict[Group, Tensor] = {}
    for group, inputs in stage.inputs():
        squares = inputs.float().square().sum(dim=0, dtype=torch.float64)
        sums[group] = sums[group] + squares if group in sums else squares
    return {group: each.sqrt().float() for group, each in sums.items()}
