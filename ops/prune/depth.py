"""Removing whole blocks: how much each one does, which to take, and taking them out.

Not here: scores that need the model without a block (``depth_greedy.py``), recovering afterwards, or pruning inside a block.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from assay.ops.models import structure
from assay.ops.prune.rebuild import differing

BATCH = 4  # windows a forward


def block_influence(
    model: PreTrainedModel, windows: Int[Tensor, "windows length"], *, real: Bool[Tensor, "windows length"] | None = None
) -> Float64[Tensor, "layers"]:
    """1 - cos between what enters a block and what leaves it, averaged over all real tokens of all windows.

    The hidden states are those of the residual stream at the blocks themselves: the last entry that transformers calls a hidden state has
    passed the final norm, and would make the last block look more important than it is.

    Args:
        windows: token ids.
        real: False at padding; all tokens count when None.
    Returns:
        One score a block, 0 (does nothing) to 2.
    Raises:
        ValueError: no window, or a score that is not finite.
    Source:
        Men et al. 2024 (ShortGPT), eq. 1, arXiv:2403.03853.
    """
    sums = torch.zeros(len(structure.blocks(model)), dtype=torch.float64)
    tokens = 0

    def take(states: list[Tensor], mask: Tensor) -> None:
        nonlocal tokens
        tokens += int(mask.sum())
        for block in range(len(sums)):
            sums[block] += float((1 - _cosine(states[block][mask], states[block + 1][mask])).sum())

    _stream(model, windows, real, take)
    return _finite(sums / tokens, "Block Influence")


def angular_distances(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows length"],
    n: int,
    *,
    real: Bool[Tensor, "windows length"] | None = None,
    tokens: Literal["last", "all"] = "last",
) -> Float64[Tensor, "starts"]:
    """The angle between what enters block l and what enters block l + n, in half turns, for each start l of a run of ``n`` blocks.

    Starts end where the run would take in the last block, which is never removed.

    Args:
        n: blocks in the run.
        tokens: ``last`` compares at the last real token of each window, as the source does; ``all`` averages over every real token.
    Returns:
        ``layers - n`` distances, 0 (same direction) to 1.
    Raises:
        ValueError: ``n`` leaves no start, no window, or a distance that is not finite.
    Source:
        Gromov et al. 2024, §3.1 and eq. 7, arXiv:2403.17887.
    """
    layers = len(structure.blocks(model))
    if not 1 <= n < layers:
        raise ValueError(f"a run of {n} blocks does not fit a model of {layers} whose last block stays; 1 to {layers - 1} do")
    sums = torch.zeros(layers - n, dtype=torch.float64)
    count = 0

    def take(states: list[Tensor], mask: Tensor) -> None:
        nonlocal count
        if tokens == "last":
            places = torch.arange(mask.shape[1], device=mask.device).expand_as(mask).masked_fill(~mask, -1).amax(dim=1)
            mask = nn.functional.one_hot(places, mask.shape[1]).bool()
        count += int(mask.sum())
        for start in range(len(sums)):
            sums[start] += float(_cosine(states[start][mask], states[start + n][mask]).clamp(-1, 1).arccos().sum()) / math.pi

    _stream(model, windows, real, take)
    return _finite(sums / count, "angular distance")


def lowest(scores: Float[Tensor, "layers"], count: int) -> list[int]:
    """The ``count`` blocks of least score, in the model's order; of equal ones the earlier.

    Raises:
        ValueError: ``count`` is not between 1 and the number of blocks less one.
    """
    if not 1 <= count < len(scores):
        raise ValueError(f"cannot remove {count} of {len(scores)} blocks; 1 to {len(scores) - 1} can be removed, so that one stays")
    return sorted(scores.argsort(stable=True)[:count].tolist())


def random_layers(layers: int, count: int, seed: int) -> list[int]:
    """``count`` of ``layers`` blocks drawn without a look at the model, each as likely as any other, first and last included: the control
    for scores.

    Raises:
        ValueError: ``count`` is not between 1 and ``layers`` less one.
    """
    draw = torch.randperm(layers, generator=torch.Generator().manual_seed(seed))
    return lowest(draw.double(), count)


def best_run(distances: Float[Tensor, "starts"]) -> int:
    """The start of the run with the least distance; of equal ones the first."""
    return int(distances.argsort(stable=True)[0])


def drop_layers(model: PreTrainedModel, layers: Sequence[int]) -> None:
    """Take blocks out, in place: the others move up, their cache slots are renumbered, and the config says what is left.

    Args:
        layers: block numbers from 0, in any order.
    Raises:
        ValueError: a number outside the model or given twice, no block left, or an architecture whose config cannot describe what is left.
    """
    path = structure.blocks_path(model)
    old = structure.blocks(model)
    wrong = [layer for layer in layers if not 0 <= layer < len(old)]
    if wrong or len(set(layers)) != len(layers):
        raise ValueError(f"blocks {list(layers)} of {len(old)}: each is a number from 0 to {len(old) - 1}, given once")
    if len(layers) == len(old):
        raise ValueError(f"removing all {len(old)} blocks leaves no model; at most {len(old) - 1} can be removed")
    kept = [index for index in range(len(old)) if index not in set(layers)]
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, nn.ModuleList(old[index] for index in kept))
    for new, index in enumerate(kept):
        for module in old[index].modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.layer_idx = new  # type: ignore[assignment]
    _cut_config(model.config.get_text_config(decoder=True), kept, len(old))
    wrong = differing(model.config, model.state_dict())
    if wrong:
        raise ValueError(
            f"{type(model).__name__} decides by its number what a block is made of, so its config cannot describe the blocks that are left; "
            f"differing when rebuilt: {', '.join(wrong[:4])}. Models whose blocks are alike, or listed in layer_types, work"
        )


def _cut_config(config: Any, kept: list[int], before: int) -> None:
    """Cut what the config lists per block (``layer_types`` and its like), and renumber lists of block numbers."""
    for key, value in list(config.to_dict().items()):
        if key == "mlp_only_layers" and isinstance(value, list):
            setattr(config, key, [kept.index(layer) for layer in value if layer in kept])
        elif "layer" in key and isinstance(value, list) and len(value) == before:
            setattr(config, key, [value[index] for index in kept])
    config.num_hidden_layers = len(kept)


def _cosine(a: Float[Tensor, "tokens hidden"], b: Float[Tensor, "tokens hidden"]) -> Float64[Tensor, "tokens"]:
    return nn.functional.cosine_similarity(a.double(), b.double(), dim=-1)


def _finite(scores: Float64[Tensor, "any"], what: str) -> Float64[Tensor, "any"]:
    if not scores.isfinite().all():
        raise ValueError(
            f"the {what} is {scores.tolist()}: the model gives NaN or infinite hidden states on these windows, so nothing can be ranked"
        )
    return scores


@torch.inference_mode()
def _stream(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows length"],
    real: Bool[Tensor, "windows length"] | None,
    take: Callable[[list[Tensor], Tensor], None],
) -> None:
    """Run the body of the model over the windows, a few at a time, and hand ``take`` the input of each block and the last one's output."""
    if not windows.numel():
        raise ValueError(f"windows has shape {list(windows.shape)}; at least one window of one token is needed to score blocks")
    if real is not None and not real.any(dim=1).all():
        raise ValueError("a window has no real token; leave it out")
    if model.training:
        raise ValueError(f"{type(model).__name__} is in training mode, where dropout may change its hidden states; call model.eval() first")
    device = model.device
    for at in range(0, len(windows), BATCH):
        ids = windows[at : at + BATCH].to(device)
        arguments: dict[str, Any] = {}
        mask = torch.ones_like(ids, dtype=torch.bool)
        if real is not None:
            mask = real[at : at + BATCH].to(device)
            arguments = {"attention_mask": mask.long(), "position_ids": (mask.long().cumsum(dim=1) - 1).clamp(min=0)}
        with residuals(model) as states:
            model.base_model(input_ids=ids, use_cache=False, **arguments)
            take(states, mask)


@contextmanager
def residuals(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Collect the residual stream before each block and after the last, during one forward."""
    states: list[Tensor] = []

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append(args[0] if args else kwargs["hidden_states"])

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        states.append(output if isinstance(output, Tensor) else output[0])

    blocks = structure.blocks(model)
    hooks = [block.register_forward_pre_hook(before, with_kwargs=True) for block in blocks]
    hooks.append(blocks[-1].register_forward_hook(after))
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()
