"""Learning the rotations under which a model loses least when it is rounded: SpinQuant. Not here: folding them in (``rotate.py``)."""

import math
from collections.abc import Collection
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from assay.ops.models import structure
from assay.ops.quantize import grid, hadamard, rotate
from assay.ops.quantize.activations import Activations, quantize_activations

INT4 = Activations("int4")
STEP = 0.5  # the most that the Cayley transform turns at once, relative to where a fixed-point iteration would stop converging


class Learned(NamedTuple):
    """R1, R2 of each block, both float64, and the loss before each step, in nats a token. :func:`rotate.rotate` takes the first two."""

    residual: Float64[Tensor, "hidden hidden"]
    values: Float64[Tensor, "layers head_dim head_dim"]
    losses: tuple[float, ...]


def learn(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows length"],
    *,
    steps: int = 100,
    lr: float = 1.5,
    batch: int = 1,
    seed: int = 0,
    activations: Activations = INT4,
    weights: grid.Format | None = None,
    online: Collection[str] = (),
) -> Learned:
    """Turn R1 and R2 so that the model with rounded inputs of its linear layers predicts ``windows`` best. ``model`` itself stays as it is.

    Each step is plain gradient descent along the rotations: with G the gradient at R, and A = R Gᵀ,

        W = (A - Aᵀ) / 2       α = min(lr ½ (1 + cos(π t / steps)), 1 / ‖W‖₁)       R ← (I - α W / 2)⁻¹ (I + α W / 2) R

    Rounding passes the gradient on as if it were not there, and its error as one that grows with the range of the token.

    R1 begins as a Hadamard matrix with random signs, R2 as a plain one; as random rotations where the size has none.

    Args:
        windows: token ids, all real; ``batch`` of them a step, shuffled by ``seed`` again whenever all have been seen.
        activations: how the inputs are rounded. Weights are not, by default: if GPTQ is to follow, rotations learned so are the better ones.
        weights: round the weights to nearest as well.
        online: transforms that run at inference; see :func:`rotate.rotate`.
    Raises:
        ValueError: no windows, no steps, weights outside linear layers, a part that no rotation passes, or a loss that is not finite.
    Source:
        Liu et al. 2024 (SpinQuant), §3.2, arXiv:2405.16406; Li et al. 2020, algorithm 1, arXiv:2002.01113, without momentum, as the former run it. Their two
        fixed-point iterations are the exact solution here, in float64, so that R stays orthogonal and needs no repair. Theirs takes the error for a
        constant; that it shrinks with the largest number of a token is most of what a rotation can gain, and learning is slower without.
    """
    if windows.shape[0] < batch or windows.shape[1] < 2 or steps < 1:
        raise ValueError(
            f"{list(windows.shape)} windows cannot be learned from in {steps} steps of {batch}; a batch of windows of two tokens, and a step, are needed"
        )
    residual, values = start(model, seed)
    order, generator, losses = torch.empty(0, dtype=torch.long), torch.Generator().manual_seed(seed), []
    with _fake(model, activations, weights, online) as rounded:
        for step in range(steps):
            if len(order) < batch:
                order = torch.randperm(len(windows), generator=generator)
            chosen, order = windows[order[:batch]], order[batch:]
            turns = residual.clone().requires_grad_(), values.clone().requires_grad_()
            loss = rounded(chosen, *turns)
            if not loss.isfinite():
                raise ValueError(
                    f"the loss is {float(loss)} at step {step}; the model has to be finite on these windows before anything is learned"
                )
            losses.append(float(loss.detach()))
            rate = lr * (1 + math.cos(math.pi * step / steps)) / 2
            gradients = torch.autograd.grad(loss, turns)
            residual, values = (cayley_step(turn, slope, rate) for turn, slope in zip((residual, values), gradients, strict=True))
    return Learned(residual, values, tuple(losses))


@torch.no_grad()
def rounded_loss(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows length"],
    residual: Float[Tensor, "hidden hidden"],
    values: Float[Tensor, "layers head_dim head_dim"],
    *,
    activations: Activations = INT4,
    weights: grid.Format | None = None,
    online: Collection[str] = (),
) -> float:
    """What :func:`learn` lowers: mean cross-entropy of the rotated and rounded model, in nats a token."""
    with _fake(model, activations, weights, online) as rounded:
        return float(sum(rounded(window[None], residual, values) for window in windows) / len(windows))


def start(model: PreTrainedModel, seed: int) -> tuple[Float64[Tensor, "hidden hidden"], Float64[Tensor, "layers head_dim head_dim"]]:
    """The rotations that learning begins with."""
    sizes = structure.shape_numbers(model)
    hidden, head_dim, layers = int(sizes["hidden_size"]), int(sizes["head_dim"]), int(sizes["layers"])
    if hadamard.has_matrix(hidden):
        residual = hadamard.random_signs(hidden, seed)[:, None] * hadamard.hadamard(hidden)
    else:
        residual = hadamard.random_orthogonal(hidden, seed)
    values = hadamard.hadamard(head_dim) if hadamard.has_matrix(head_dim) else hadamard.random_orthogonal(head_dim, seed + 1)
    return residual, values.expand(layers, -1, -1).clone()


def cayley_step(
    rotation: Float64[Tensor, "*batch n n"], gradient: Float64[Tensor, "*batch n n"], rate: float
) -> Float64[Tensor, "*batch n n"]:
    """One step of :func:`learn` down the gradient; each matrix of a batch by itself."""
    slope = rotation @ gradient.mT
    skew = (slope - slope.mT) / 2
    size = skew.abs().sum(dim=-2).amax(dim=-1)[..., None, None]
    half = (rate / 2 * torch.ones_like(size)).minimum(STEP / size.clamp(min=1e-12)) * skew
    one = torch.eye(rotation.shape[-1], dtype=rotation.dtype)
    return torch.linalg.solve(one - half, (one + half) @ rotation)


@contextmanager
def _fake(model: PreTrainedModel, activations: Activations, weights: grid.Format | None, online: Collection[str]) -> Any:
    """A function of windows, R1 and R2 that gives the loss, while inputs of linear layers are rounded by hooks."""
    linears = structure.block_linears(model)
    names = {f"{name}.weight" for name in linears}
    structure.require_coverage(model, names)
    transforms = rotate.online_transforms(model, online)
    hooks = rotate.attach(model, transforms)  # before those that round

    def loss(chosen: Tensor, residual: Tensor, values: Tensor) -> Tensor:
        chosen = chosen.to(model.device)
        changes = rotate.plan(model, lambda x: x @ residual.to(x), [partial(_turn, each) for each in values], transforms)
        turned = {name: rotate.apply(steps, model.get_parameter(name).detach()) for name, steps in changes.items()}
        if weights is not None:
            turned |= {name: _straight(turned[name], grid.dequantize(grid.quantize(turned[name].detach(), weights))) for name in names}
        logits = functional_call(model, turned, kwargs={"input_ids": chosen, "use_cache": False}, tie_weights=False).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), chosen[:, 1:].flatten())

    def enter(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_straight(args[0], quantize_activations(args[0].detach(), activations), _range(args[0], activations)), *args[1:])

    try:
        hooks += [module.register_forward_pre_hook(enter) for module in linears.values()]
        yield loss
    finally:
        for hook in hooks:
            hook.remove()


def _turn(matrix: Tensor, x: Tensor) -> Tensor:
    return x @ matrix.to(x)


def _straight(x: Tensor, rounded: Tensor, size: Tensor | None = None) -> Tensor:
    """``rounded``, with the gradient of ``x`` and of an error that grows with ``size``."""
    error = (rounded.to(x) - x).detach()
    return x + (error if size is None else error * (size / size.detach()))


def _range(x: Tensor, how: Activations) -> Tensor | None:
    """What the step of each token is a share of; None where it is fixed."""
    if how.per == "tensor":
        return None
    most = x.abs().amax(dim=-1, keepdim=True) if how.symmetric else x.clamp(min=0).amax(-1, True) - x.clamp(max=0).amin(-1, True)
    return most.clamp(min=torch.finfo(x.dtype).tiny)
