"""Which heads, FFN channels and channels of the residual stream matter, by the activations they carry, and choosing among them.

Not here: taking them out (``width.py``), or how many to keep (``shapes.py``).
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int, Real
from torch import Tensor, nn
from transformers import PreTrainedModel

from assay.ops.evaluate.divergence import final_hidden
from assay.ops.models import structure

BATCH = 4  # windows a forward
How = Literal["mean", "l2", "max"]


class Importance(NamedTuple):
    """How much each part carries, in the unit of the activations; ``ffn`` is None for a mixture of experts."""

    heads: Float64[Tensor, "layers heads"]
    ffn: Float64[Tensor, "layers channels"] | None
    hidden: Float64[Tensor, " hidden"]


def importance(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows length"],
    *,
    real: Bool[Tensor, "windows length"] | None = None,
    tokens: How = "mean",
    samples: How = "l2",
) -> Importance:
    """The size of what each part carries, aggregated over the real tokens of a window, then over windows.

    A head: the L2 norm of its part of the input of o_proj. An FFN channel: |x| at the input of down_proj. A channel of the residual stream: |x|
    at the output of a norm, aggregated norm by norm and summed over all norms of the hidden size, the last one included.

    Args:
        real: False at padding, on either side; all tokens count when None.
        tokens, samples: ``mean``; ``l2``, the root of the sum of squares; or ``max``. The default is that of the source's code.
    Raises:
        ValueError: no window, a window without a real token, a model in training, or scores that are not finite.
    Source:
        Muralidharan et al. 2024 (Minitron), §2.2, arXiv:2407.14679. Unlike it, padding is left out.
    """
    mask = torch.ones_like(windows, dtype=torch.bool) if real is None else real
    if not windows.numel() or not mask.any(dim=1).all():
        raise ValueError(
            f"windows of shape {list(windows.shape)}: at least one window, and one real token in each, is needed to score widths"
        )
    if model.training:
        raise ValueError(f"{type(model).__name__} is in training mode, where dropout changes activations; call model.eval() first")
    found: dict[str, list[Tensor]] = {}

    def take(name: str, sizes: Tensor, real: Tensor) -> None:
        found.setdefault(name, []).extend(_over(window[here].double(), tokens) for window, here in zip(sizes, real, strict=True))

    for at in range(0, len(windows), BATCH):
        ids, here = windows[at : at + BATCH].to(model.device), mask[at : at + BATCH].to(model.device)
        with _watching(model, partial(take, real=here)):
            final_hidden(model, ids, here.long())
    scores = {name: _over(torch.stack(each), samples).cpu() for name, each in found.items()}
    broken = [name for name, each in scores.items() if not each.isfinite().all()]
    if broken:
        raise ValueError(f"activations at {', '.join(broken[:3])} are NaN or infinite on these windows, so nothing can be ranked")
    heads, ffn, norms = ([each for name, each in scores.items() if name.endswith(end)] for end in ("o_proj", "down_proj", "norm"))
    return Importance(torch.stack(heads), torch.stack(ffn) if len(ffn) == len(heads) else None, torch.stack(norms).sum(dim=0))


def group_scores(heads: Float[Tensor, "layers heads"], kv_groups: int) -> Float[Tensor, "layers groups"]:
    """The score of a key-value group: the sum of its query heads' scores."""
    return heads.unflatten(1, (kv_groups, -1)).sum(dim=2)


def choose(
    scores: Real[Tensor, "layers parts"], keep: int, *, divisor: int = 1, protect: Collection[tuple[int, int]] = ()
) -> list[list[int]]:
    """Of each row the ``keep`` parts of the highest score, in order; of equal ones the earlier, so that there are exactly as many as asked.

    Args:
        divisor: what ``keep`` must be a multiple of.
        protect: (layer, part) that stay whatever their score.
    Raises:
        ValueError: ``keep`` is not between 1 and the number of parts, or no multiple; or more are protected in a layer than are kept, or
            one is not there.
    """
    layers, parts = scores.shape
    if not 1 <= keep <= parts or keep % divisor:
        raise ValueError(
            f"cannot keep {keep} of {parts} in multiples of {divisor}; multiples up to {parts // divisor * divisor} were expected"
        )
    stay = torch.zeros(layers, parts, dtype=torch.bool)
    for layer, part in protect:
        if not (0 <= layer < layers and 0 <= part < parts):
            raise ValueError(f"({layer}, {part}) is protected, but there are {layers} layers of {parts}")
        stay[layer, part] = True
    for layer, count in enumerate(stay.sum(dim=1).tolist()):
        if count > keep:
            raise ValueError(f"{count} are protected in layer {layer}, and {keep} are kept; keep more, or protect fewer")
    ranked = scores.cpu().double().masked_fill(stay, torch.inf).argsort(dim=1, descending=True, stable=True)
    return [sorted(row) for row in ranked[:, :keep].tolist()]


def choose_in_groups(
    heads: Float[Tensor, "layers heads"], kv_groups: int, keep: int, *, protect: Collection[tuple[int, int]] = ()
) -> list[list[int]]:
    """Of each key-value group in each layer the ``keep`` query heads of the highest score, numbered as in the layer.

    Raises:
        ValueError: as :func:`choose`, of the heads of a group.
    """
    layers, each = len(heads), heads.shape[1] // kv_groups
    outside = sorted((layer, head) for layer, head in protect if head >= heads.shape[1])
    if outside:
        raise ValueError(f"{outside[0]} is protected, but there are {layers} layers of {heads.shape[1]} heads")
    chosen = [
        choose(part, keep, protect={(layer, head % each) for layer, head in protect if head // each == group})
        for group, part in enumerate(heads.unflatten(1, (kv_groups, each)).unbind(dim=1))
    ]
    return [[group * each + head for group in range(kv_groups) for head in chosen[group][layer]] for layer in range(layers)]


def groups_of(heads: Collection[tuple[int, int]], heads_per_group: int) -> set[tuple[int, int]]:
    """The (layer, key-value group) of each (layer, query head): what to protect where whole groups are removed."""
    return {(layer, head // heads_per_group) for layer, head in heads}


def _over(values: Tensor, how: How) -> Tensor:
    """Aggregated over the first dimension."""
    if how == "mean":
        return values.mean(dim=0)
    return values.square().sum(dim=0).sqrt() if how == "l2" else values.amax(dim=0)


@contextmanager
def _watching(model: PreTrainedModel, take: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Hand ``take`` the name of a module and the sizes that count there [windows, length, parts], during a forward."""
    sizes = structure.shape_numbers(model)

    def heads(name: str, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        take(name, args[0].float().unflatten(-1, (-1, int(sizes["head_dim"]))).norm(dim=-1))

    def channels(name: str, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        take(name, args[0].float().abs())

    def norm(name: str, _module: nn.Module, _args: Any, output: Tensor) -> None:
        take(name, output.float().abs())

    handles = []
    for name, module in model.named_modules():
        if name.endswith("self_attn.o_proj"):
            handles.append(module.register_forward_pre_hook(partial(heads, name)))
        elif name.endswith("mlp.down_proj"):
            handles.append(module.register_forward_pre_hook(partial(channels, name)))
        elif name.endswith("norm") and module.get_parameter("weight").shape == (sizes["hidden_size"],) and "self_attn" not in name:
            handles.append(module.register_forward_hook(partial(norm, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
