"""Every matrix of the blocks by name, experts of a mixture among them: transformers keeps those as slices of 3-D parameters.

Not here: where blocks, embedding and head are (``structure.py``), or what changes a matrix.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from assay.ops.models import structure


class View(NamedTuple):
    """A weight [out, in] that shares memory with ``parameter``, the name of the parameter that it is, or is a part of."""

    weight: Float[Tensor, "out in"]
    parameter: str


def weight_views(model: PreTrainedModel) -> dict[str, View]:
    """The weights of the linear layers of the blocks and of every expert, in the model's order; writing into one changes the model.

    A linear layer goes by the name of its module; expert 3 of a fused mixture ``m`` has ``m.3.gate_proj``, ``m.3.up_proj`` and ``m.3.down_proj``.
    Embedding, head and routers are left out. What is in none of these, ``structure.require_coverage`` finds by the names of the parameters.
    """
    linears, mixtures = structure.block_linears(model), fused(model)
    found: dict[str, View] = {}
    for name, _ in model.named_modules():
        if name in linears:
            found[name] = View(linears[name].weight.detach(), f"{name}.weight")
        elif name in mixtures:
            for expert in range(count(mixtures[name])):
                for part, weight in parts(mixtures[name], expert).items():
                    parameter = f"{name}.down_proj" if part == "down_proj" else f"{name}.gate_up_proj"
                    found[f"{name}.{expert}.{part}"] = View(weight, parameter)
    return found


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of :func:`weight_views` alone: name → view [out, in]."""
    return {name: view.weight for name, view in weight_views(model).items()}


def parameters(model: PreTrainedModel, names: set[str]) -> set[str]:
    """The parameters that are reached by changing the named matrices: one that many experts share counts when all of them are named."""
    every = weight_views(model)
    missed = {view.parameter for name, view in every.items() if name not in names}
    return {view.parameter for view in every.values()} - missed


def fused(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Modules inside the blocks that hold all their experts in ``gate_up_proj`` [experts, 2 × inner, hidden] and ``down_proj`` [experts, hidden, inner].

    Other layouts (transposed, interleaved, with biases, without a gate) are left out.
    """
    prefix = structure.blocks_path(model)
    return {name: module for name, module in model.named_modules() if name.startswith(f"{prefix}.") and _is_fused(module)}


def count(mixture: nn.Module) -> int:
    """The number of experts of a fused mixture."""
    return len(_parameter(mixture, "down_proj"))


def parts(mixture: nn.Module, expert: int) -> dict[str, Tensor]:
    """``gate_proj``, ``up_proj`` and ``down_proj`` of one expert: views [out, in]."""
    gate, up = _parameter(mixture, "gate_up_proj")[expert].chunk(2)
    return {"gate_proj": gate, "up_proj": up, "down_proj": _parameter(mixture, "down_proj")[expert]}


def fuse(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of fused mixtures that hold these matrices of all their experts, named as by :func:`weight_views`; other names are left out."""
    found: dict[str, Tensor] = {}
    for mixture in {name.rpartition(".experts.")[0] for name in weights if ".experts." in name}:
        prefix = f"{mixture}.experts"
        total = len({name.removeprefix(f"{prefix}.").split(".")[0] for name in weights if name.startswith(f"{prefix}.")})
        both = [torch.cat([weights[f"{prefix}.{each}.{part}"] for part in ("gate_proj", "up_proj")]) for each in range(total)]
        found[f"{prefix}.gate_up_proj"] = torch.stack(both)
        found[f"{prefix}.down_proj"] = torch.stack([weights[f"{prefix}.{each}.down_proj"] for each in range(total)])
    return found


def inner(mixture: nn.Module, expert: int, inputs: Float[Tensor, "tokens hidden"]) -> Float[Tensor, "tokens inner"]:
    """What the ``down_proj`` of an expert reads when the expert is given ``inputs``."""
    return mixture._apply_gate(nn.functional.linear(inputs, _parameter(mixture, "gate_up_proj")[expert]))  # type: ignore[operator]


def routed(chosen: Tensor, expert: int) -> Tensor:
    """Which tokens go to ``expert``: [tokens] bool, of the router's choices [tokens, experts a token]."""
    return (chosen == expert).any(dim=-1)


def _parameter(mixture: nn.Module, name: str) -> Tensor:
    found = getattr(mixture, name)
    assert isinstance(found, torch.Tensor)
    return found.detach()


def _is_fused(module: nn.Module) -> bool:
    up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if not (
        isinstance(up, nn.Parameter) and isinstance(down, nn.Parameter) and up.ndim == down.ndim == 3 and hasattr(module, "_apply_gate")
    ):
        return False
    plain = (
        not getattr(module, "is_transposed", False) and getattr(module, "is_concatenated", True) and not getattr(module, "has_bias", False)
    )
    return plain and up.shape == (down.shape[0], 2 * down.shape[2], down.shape[1])
