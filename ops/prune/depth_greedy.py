"""Removing blocks one at a time, each time the one that is missed least, by the loss itself.

Not here: scores of one pass, and taking blocks out (``depth.py``).
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel

from assay.ops.evaluate.divergence import Head, check_head, final_hidden, head_of
from assay.ops.models import structure
from assay.ops.prune.depth import residuals

BATCH = 4  # windows a forward
CHUNK = 256  # positions whose logits exist at a time


class Removal(NamedTuple):
    """A block that was taken, and the mean loss (nats a token) without it and those before it. ``layer`` counts in the whole model."""

    layer: int
    loss_nats: float


def greedy(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows length"],
    count: int,
    *,
    real: Bool[Tensor, "windows length"] | None = None,
) -> list[Removal]:
    """Choose ``count`` blocks, one after the other: of those that are left always the one without which the next tokens are predicted best.

    A missing block hands on what it reads; the model is not changed, and the blocks are for ``drop_layers`` to take out. In each round the
    states before every block are computed once, and without a block only those after it and the head run: with ``n`` blocks left about
    ``n²/2`` blocks and ``n`` heads a round. Memory: the states before each block for ``BATCH`` windows, and ``CHUNK`` rows of logits.

    Args:
        real: False at padding, on either side; all tokens count when None.
    Returns:
        In the order of removal; of equal losses the earlier block. The loss is a mean over all targets, each real token but the first of a window.
    Raises:
        ValueError: no window of two real tokens; ``count`` blocks cannot go; or no candidate has a finite loss.
    Source:
        Kim et al. 2024 (Shortened LLaMA), whose criterion PPL it is, arXiv:2402.02834. Unlike it, scores are taken anew after each removal.
    """
    layers = len(structure.blocks(model))
    if not 1 <= count < layers:
        raise ValueError(f"cannot remove {count} of {layers} blocks; 1 to {layers - 1} can be removed, so that one stays")
    mask = torch.ones_like(windows, dtype=torch.bool) if real is None else real
    if not len(windows) or not (mask.sum(dim=1) >= 2).all():
        raise ValueError(
            f"windows of shape {list(windows.shape)}: each needs two real tokens or more, one to predict from and one to predict"
        )
    if model.training:
        raise ValueError(f"{type(model).__name__} is in training mode, where dropout may change its loss; call model.eval() first")
    head = head_of(model)
    _check(model, head, windows[0][mask[0]].to(model.device))
    removed: list[Removal] = []
    for _ in range(count):
        losses = _losses(model, head, windows, mask, [each.layer for each in removed])
        best = min(losses, key=lambda layer: losses[layer])
        if not math.isfinite(losses[best]):
            raise ValueError(
                "the loss is NaN or infinite whichever block is left out, so nothing can be ranked; look at the model on these windows"
            )
        removed.append(Removal(best, losses[best]))
    return removed


def _check(model: PreTrainedModel, head: Head, ids: Tensor) -> None:
    """Refuse a model whose logits, or whose blocks, are not what :func:`greedy` takes them for."""
    given: list[Any] = []
    handle = structure.blocks(model)[0].register_forward_hook(lambda _module, _args, output: given.append(output))
    check_head(model, head, ids)
    handle.remove()
    if not isinstance(given[-1], Tensor):
        raise ValueError(f"the blocks of {type(model).__name__} give {type(given[-1]).__name__}; models whose blocks give one tensor work")


@torch.inference_mode()
def _losses(model: PreTrainedModel, head: Head, windows: Tensor, mask: Tensor, gone: Collection[int]) -> dict[int, float]:
    """The mean loss without ``gone`` and without each block that is left; infinite where it is not finite."""
    sums = {layer: 0.0 for layer in range(len(structure.blocks(model))) if layer not in gone}
    targets = 0
    for at in range(0, len(windows), BATCH):
        ids, real = windows[at : at + BATCH].to(model.device), mask[at : at + BATCH].to(model.device)
        scored = real[:, :-1] & real[:, 1:]
        targets += int(scored.sum())
        with bypassed(model, dict.fromkeys(gone)), residuals(model) as states:
            final_hidden(model, ids, real.long())
        for layer in sums:
            # Block 0 gives what the block left out would read, and nothing runs up to that block.
            front = dict.fromkeys(range(1, layer + 1)) | {0: states[layer]}
            with bypassed(model, dict.fromkeys(gone) | front):
                hidden = final_hidden(model, ids, real.long())
            sums[layer] += _nll(hidden[:, :-1][scored], head, ids[:, 1:][scored])
    return {layer: total / targets if math.isfinite(total) else math.inf for layer, total in sums.items()}


def _nll(hidden: Tensor, head: Head, targets: Tensor) -> float:
    """The summed loss in nats."""
    parts: Iterator[Tensor] = (
        torch.nn.functional.cross_entropy(head.logits(hidden[at : at + CHUNK]), targets[at : at + CHUNK], reduction="none")
        for at in range(0, len(targets), CHUNK)
    )
    return sum(float(part.double().sum()) for part in parts)


@contextmanager
def bypassed(model: PreTrainedModel, given: Mapping[int, Tensor | None]) -> Iterator[None]:
    """The named blocks do not run inside: each hands on what it reads, or the tensor given for it."""

    def standing_in(output: Tensor | None) -> Callable[..., Tensor]:
        def forward(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
            return hidden_states if output is None else output

        return forward

    blocks = structure.blocks(model)
    for layer, output in given.items():
        blocks[layer].forward = standing_in(output)
    try:
        yield
    finally:
        for layer in given:
            del blocks[layer].forward
