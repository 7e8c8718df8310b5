"""What a norm multiplies by. Not here: where norms are (``structure.py``), or changing them."""

from copy import deepcopy

import torch
from torch import nn


@torch.no_grad()
def norm_offset(norm: nn.Module, name: str = "the norm", *, centred: bool = False) -> float:
    """0 if a norm multiplies by its weight w, 1 if by 1 + w (Gemma), found by computing it.

    Args:
        centred: take a norm that subtracts the mean (LayerNorm) as well as one that divides by the root of the mean square.
    Raises:
        ValueError: it does neither.
    """
    copy = deepcopy(norm).float().cpu()
    random = torch.Generator().manual_seed(0)
    parameters = dict(copy.named_parameters(recurse=False))
    weight = parameters["weight"]
    weight.copy_(torch.rand(weight.shape, generator=random) + 0.5)
    if "bias" in parameters:
        parameters["bias"].zero_()
    x = 100 * torch.randn(3, len(weight), generator=random) + 50
    forms = [x, x - x.mean(dim=-1, keepdim=True)] if centred else [x]
    for form in forms:
        plain = form * form.square().mean(dim=-1, keepdim=True).rsqrt()
        for offset in (0.0, 1.0):
            if torch.allclose(copy(x), plain * (offset + weight), rtol=1e-3, atol=1e-4):
                return offset
    kind = "norm" if centred else "RMS norm"
    raise ValueError(f"{name} ({type(norm).__name__}) is no {kind} with a gain of w or 1 + w, and no other can be folded or turned")
