"""Pruning by size alone: the smallest weights become zero. Not here: scores that look at inputs (``wanda.py``, ``sparsegpt.py``)."""

from typing import Literal

import torch
from transformers import PreTrainedModel

from assay.ops.prune.masks import Pruned, Sparsity, prunable, realised, select, smallest
from assay.ops.quantize.grid import naming


@torch.no_grad()
def prune_model(model: PreTrainedModel, sparsity: Sparsity, *, scope: Literal["layer", "row", "global"] = "layer") -> Pruned:
    """Set the weights of least |w| to zero, in place; of equal ones the earliest in its comparison group.

    Args:
        scope: whom a percentage compares: each matrix as a whole, each of its output rows, or all matrices of the blocks together, which takes 17 bytes a
            weight. A pattern compares its groups.
    Returns:
        What became zero.
    Raises:
        ValueError: the sparsity does not fit a weight (a note names it), ``global`` with a pattern, a weight is NaN, or too small a share of the model is
            reached. Nothing is changed then.
    Source:
        Han et al. 2015, arXiv:1506.02626, in one step and without the training that goes on between theirs. ``row`` is the comparison group of Wanda,
        arXiv:2306.11695, without its inputs.
    """
    weights = prunable(model, sparsity)
    if scope == "global":
        if sparsity.m:
            raise ValueError(
                f"scope: global compares all weights with each other, and the pattern {sparsity.name} only those of a group; leave it out"
            )
        everything = torch.cat([weight.abs().flatten() for weight in weights.values()])
        flat = smallest(everything[None], sparsity.zeros(len(everything)))[0].split([weight.numel() for weight in weights.values()])
        zeros = [part.view(weight.shape) for part, weight in zip(flat, weights.values(), strict=True)]
    else:
        zeros = []
        for name, weight in weights.items():
            with naming(name, weight):
                zeros.append(select(weight.abs(), sparsity, scope))
    for weight, zero in zip(weights.values(), zeros, strict=True):
        weight.masked_fill_(zero, 0)
    return Pruned(realised(weights, sparsity), {"scope": sparsity.name if sparsity.m else scope}, {})
