"""Any way of rounding a weight that looks at its inputs, over a model: block by block along the walk. Not here: a way itself, or the walk."""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from assay.ops.models import experts, structure
from assay.ops.quantize.grid import naming
from assay.ops.quantize.hessian import gather
from assay.ops.quantize.layout import Packed
from assay.ops.quantize.rtn import Rounded
from assay.ops.quantize.sequential import walk

Way = Callable[[Float[Tensor, "rows cols"], Float[Tensor, "cols cols"] | None], Packed]


@torch.no_grad()
def round_along(model: PreTrainedModel, windows: Int[Tensor, "windows length"], way: Way) -> Rounded:
    """Round every weight of the blocks by ``way``, in place; each sees the inputs that the rounded weights before it give.

    Args:
        windows: token ids to calibrate on.
        way: of a weight in float32 and its Hessian, what it is stored as. Of an expert that no token reached there is no Hessian: None.
    Returns:
        What each weight is stored as, and a summary: tokens, coverage, the experts that no token reached, and by name the error of the output,
        tr(E H Eᵀ) / tr(W H Wᵀ).
    Raises:
        ValueError: ``way`` refuses a weight (a note names it), or too small a share of the model is in matrices.
    """
    views = experts.weight_views(model)
    found = structure.require_coverage(model, experts.parameters(model, set(views)))
    layers: dict[str, Packed] = {}
    errors: dict[str, float] = {}
    unrouted = []
    for stage in walk(model, windows):
        hessians = gather(stage)
        for group in stage.groups:
            hessian = hessians[group].matrix() if group in hessians else None
            for name in group:
                weight = stage.weights[name].float()
                with naming(name, weight):
                    layers[name] = way(weight, hessian)
                rounded = layers[name].dense()
                lost = weight - rounded
                if hessian is None:
                    unrouted.append(name)
                else:
                    errors[name] = float(((lost @ hessian) * lost).sum()) / max(float(((weight @ hessian) * weight).sum()), 1e-30)
                stage.weights[name].copy_(rounded)
    summary = {
        "tokens": windows.numel(), "quantized_layers": len(layers), "coverage": found.share, "forms": sorted({each.form for each in layers.values()}),
        "unrouted": unrouted, "output_error": errors,
    }  # fmt: skip
    return Rounded({name: layers[name] for name in views}, summary)
