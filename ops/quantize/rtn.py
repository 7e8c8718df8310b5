"""Round-to-nearest over a model: which weights are rounded, and what the policy for embedding and head means.

Not here: the rounding itself (``grid.py``) or the file format (``pack.py``).
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from assay.ops.models import structure
from assay.ops.quantize.grid import Quantized, dequantize, quantize


class Rounded(NamedTuple):
    """The codes of each rounded layer by module name, and what to say about the pass."""

    layers: dict[str, Quantized]
    summary: dict[str, Any]


@torch.no_grad()
def rtn(
    model: PreTrainedModel,
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
    embeddings: Literal["skip", "quantize"] = "skip",
    head: Literal["skip", "quantize", "untie"] = "skip",
) -> Rounded:
    """Round every linear layer of the blocks to nearest, in place; the model then computes with the rounded weights.

    A tied head shares the embedding's tensor: both are left (``skip``, ``skip``), both are rounded as the one tensor that they are
    (``quantize``, ``quantize``), or the head gets a copy of its own (``untie``), which is rounded.

    Args:
        group_size: -1 is one group a row.
        embeddings: the input embedding, one row a token.
    Returns:
        The codes, and a summary: rounded layers, coverage (share of the weights outside embedding and head, 0 to 1), the matrices that
        were skipped, and ‖ŵ - w‖² / ‖w‖² over all that was rounded.
    Raises:
        ValueError: a group size that does not divide (a note names the layer), a policy that a tied head cannot follow, or too small a
            share of the model reached.
    Source:
        Nagel et al. 2021, §2.2, arXiv:2106.08295.
    """
    chosen = _choose(model, embeddings, head)
    found = structure.require_coverage(model, {f"{name}.weight" for name in chosen})
    layers: dict[str, Quantized] = {}
    for name, module in chosen.items():  # all of them before the first is changed: a refusal leaves the model as it was
        try:
            layers[name] = quantize(module.weight, bits=bits, group_size=group_size, symmetric=symmetric)
        except ValueError as error:
            error.add_note(f"in {name} ({list(module.weight.shape)})")
            raise
    if head == "untie":
        structure.untie(model)
    error_sum = weight_sum = 0.0
    for name, quantized in layers.items():
        weight = model.get_submodule(name).weight
        assert isinstance(weight, nn.Parameter)
        rounded = dequantize(quantized)
        error_sum += float((rounded - weight.float()).square().sum(dtype=torch.float64))
        weight_sum += float(weight.float().square().sum(dtype=torch.float64))
        weight.copy_(rounded)
    everything = {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}
    summary = {
        "bits": bits,
        "group_size": group_size,
        "symmetric": symmetric,
        "quantized_layers": len(layers),
        "coverage": found.share,
        "skipped": sorted(everything - {f"{name}.weight" for name in layers}),
        "relative_error": error_sum / weight_sum if weight_sum else 0.0,
    }
    return Rounded(layers, summary)


def _choose(model: PreTrainedModel, embeddings: str, head: str) -> dict[str, nn.Linear | nn.Embedding]:
    chosen: dict[str, nn.Linear | nn.Embedding] = dict(structure.block_linears(model))
    embedding_name, embedding_module = structure.embedding(model)
    head_name, head_module = structure.head(model)
    tied = structure.is_tied(model)
    if tied and head != "untie" and embeddings != head:
        raise ValueError(
            f"{head_name} and {embedding_name} are one tensor, so embeddings: {embeddings} with head: {head} cannot both hold; "
            "quantize both, skip both, or use head: untie, which quantizes a copy"
        )
    if embeddings == "quantize":
        chosen[embedding_name] = embedding_module
    if head == "untie" or (head == "quantize" and not tied):
        chosen[head_name] = head_module
    return chosen
