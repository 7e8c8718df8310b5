"""Round-to-nearest over a model: which weights are rounded, and what the policy for embedding and head means.

Not here: the rounding itself (``grid.py``) or the file format (``write.py``).
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from assay.ops.models import structure
from assay.ops.models.experts import parameters, weights
from assay.ops.quantize.grid import Format, Quantized, naming, quantize
from assay.ops.quantize.layout import Packed

Policy = Literal["skip", "quantize", "untie"]
Shrink = Callable[[Float[Tensor, "rows cols"], Format], Float[Tensor, "blocks groups"] | float]


class Rounded(NamedTuple):
    """What each rounded layer is stored as, by name, and what to say about the pass."""

    layers: Mapping[str, Packed]
    summary: dict[str, Any]


@torch.no_grad()
def rtn(
    model: PreTrainedModel,
    format: Format | Mapping[str, Format],
    *,
    embeddings: Literal["skip", "quantize"] = "skip",
    head: Policy = "skip",
    shrink: Shrink | Mapping[str, Tensor] | None = None,
) -> Rounded:
    """Round the weights of the blocks to nearest, in place; the model then computes with the rounded weights.

    A tied head shares the embedding's tensor: both are left (``skip``, ``skip``), both are rounded as the one tensor that they are
    (``quantize``, ``quantize``), or the head gets a copy of its own (``untie``), which is rounded.

    Args:
        format: of all, or of each layer by name; a layer that has none is left as it is.
        embeddings: the input embedding, one row a token.
        shrink: how much of its range each group of a weight keeps, or how to find it; see ``ranges.py``.
    Returns:
        The codes, and a summary; see :func:`replace`.
    Raises:
        ValueError: a format that does not fit (a note names the layer), a policy that a tied head cannot follow, or too small a share of the
            model reached.
    Source:
        Nagel et al. 2021, §2.2, arXiv:2106.08295.
    """
    chosen = choose(model, embeddings, head)
    formats = dict.fromkeys(chosen, format) if isinstance(format, Format) else dict(format)
    layers = round_each({name: weight for name, weight in chosen.items() if name in formats}, formats, shrink)
    return Rounded(layers, replace(model, layers, untie=head == "untie"))


def round_each(
    weights: Mapping[str, Tensor], formats: Mapping[str, Format], shrink: Shrink | Mapping[str, Tensor] | None = None
) -> dict[str, Quantized]:
    """Each weight rounded to nearest in its format; nothing is changed.

    Raises:
        ValueError: a format that does not fit, or weights that are not finite; a note names the layer.
    """
    layers = {}
    for name, weight in weights.items():
        with naming(name, weight):
            kept = shrink(weight.float(), formats[name]) if callable(shrink) else (shrink or {}).get(name, 1.0)
            layers[name] = quantize(weight, formats[name], shrink=kept)
    return layers


@torch.no_grad()
def replace(model: PreTrainedModel, layers: Mapping[str, Packed], *, untie: bool = False) -> dict[str, Any]:
    """Let ``model`` compute with the rounded weights.

    Args:
        untie: give a tied head a copy of its own first.
    Returns:
        Rounded layers and their formats, coverage (share of the weights outside embedding and head, 0 to 1), the matrices that were skipped,
        and ‖ŵ - w‖² / ‖w‖² over all that was rounded.
    Raises:
        ValueError: too small a share of the model is reached; it is left as it was then.
    """
    reached = parameters(model, set(layers))
    found = structure.require_coverage(model, reached)
    if untie:
        structure.untie(model)
    ends = (structure.embedding(model), structure.head(model))
    places = weights(model) | {name: module.weight for name, module in ends}
    error_sum = weight_sum = 0.0
    for name, packed in layers.items():
        weight, rounded = places[name], packed.dense()
        error_sum += float((rounded - weight.float()).square().sum(dtype=torch.float64))
        weight_sum += float(weight.float().square().sum(dtype=torch.float64))
        weight.copy_(rounded)
    everything = {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}
    return {
        "forms": sorted({each.form for each in layers.values()}),
        "quantized_layers": len(layers), "coverage": found.share, "skipped": sorted(everything - reached - {f"{name}.weight" for name in layers}),
        "relative_error": error_sum / weight_sum if weight_sum else 0.0,
    }  # fmt: skip


def choose(model: PreTrainedModel, embeddings: str, head: str) -> dict[str, Tensor]:
    """The weights to round, [out, in] by name: those of the blocks, and what the policy adds.

    Raises:
        ValueError: a policy that a tied head cannot follow.
    """
    chosen = weights(model)
    embedding_name, embedding_module = structure.embedding(model)
    head_name, head_module = structure.head(model)
    tied = structure.is_tied(model)
    if tied and head != "untie" and embeddings != head:
        raise ValueError(
            f"{head_name} and {embedding_name} are one tensor, so embeddings: {embeddings} with head: {head} cannot both hold; "
            "quantize both, skip both, or use head: untie, which quantizes a copy"
        )
    if embeddings == "quantize":
        chosen[embedding_name] = embedding_module.weight
    if head == "untie" or (head == "quantize" and not tied):
        chosen[head_name] = head_module.weight
    return chosen
