"""Fewer experts in a mixture: how much each one does, leaving out those that do least, and averaging them into others.

Not here: where experts are in a model (``ops/models/experts.py``), or choosing as many as asked (``width_scores.choose``).
"""

from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float64, Int, Int64
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from transformers import PreTrainedModel

from assay.ops.evaluate.divergence import final_hidden
from assay.ops.models import experts, structure
from assay.ops.prune.rebuild import become

BATCH = 4  # windows a forward
COUNTS = ("num_local_experts", "num_experts")  # how configs call the number of experts


class Usage(NamedTuple):
    """What the experts did on some text; one row a mixture, in the model's order.

    Attributes:
        tokens: how many real tokens were sent to each expert: the score of pruning by frequency.
        saliency: the mean over those tokens of router weight × L2 norm of the expert's output, REAP's score; 0 for an expert that got none.
        outputs: the mean output of each expert over all real tokens, sent to it or not; None where it was not asked for.
    """

    tokens: Int64[Tensor, "mixtures experts"]
    saliency: Float64[Tensor, "mixtures experts"]
    outputs: Float64[Tensor, "mixtures experts hidden"] | None


@torch.inference_mode()
def usage(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows length"],
    *,
    real: Bool[Tensor, "windows length"] | None = None,
    outputs: bool = False,
) -> Usage:
    """Run the windows and watch every expert.

    Args:
        real: False at padding, on either side; all tokens count when None.
        outputs: find mean outputs too, which merging needs: every expert is then run on every token.
    Raises:
        ValueError: no mixture of a known kind, no window, a window without a real token, a model in training, or values that are not finite.
    Source:
        Lasby et al. 2025 (REAP), arXiv:2510.13999.
    """
    mixtures = _mixtures(model)
    mask = torch.ones_like(windows, dtype=torch.bool) if real is None else real
    if not windows.numel() or not mask.any(dim=1).all():
        raise ValueError(
            f"windows of shape {list(windows.shape)}: at least one window, and one real token in each, is needed to watch experts"
        )
    if model.training:
        raise ValueError(f"{type(model).__name__} is in training mode, where its router may draw; call model.eval() first")
    count = _count(model)
    tokens = torch.zeros(len(mixtures), count, dtype=torch.int64)
    sums = torch.zeros(len(mixtures), count, dtype=torch.float64)
    means = torch.zeros(len(mixtures), count, structure.embedding(model)[1].weight.shape[1], dtype=torch.float64)

    def watch(row: int, here: Tensor, mixture: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        states, chosen, weights = (each[here] for each in [*args, *kwargs.values()][:3])
        for expert in range(count):
            sent = experts.routed(chosen, expert)
            tokens[row, expert] += int(sent.sum())
            given = _output(mixture, expert, states if outputs else states[sent])
            weight = (weights * (chosen == expert)).sum(dim=-1)[sent]
            sums[row, expert] += float((weight.double() * (given[sent] if outputs else given).double().norm(dim=-1)).sum())
            if outputs:
                means[row, expert] += given.double().sum(dim=0).cpu()

    for at in range(0, len(windows), BATCH):
        ids, here = windows[at : at + BATCH].to(model.device), mask[at : at + BATCH].to(model.device)
        hooks = [
            each.register_forward_pre_hook(partial(watch, row, here.flatten()), with_kwargs=True)
            for row, each in enumerate(mixtures.values())
        ]
        try:
            final_hidden(model, ids, here.long())
        finally:
            for hook in hooks:
                hook.remove()
    found = Usage(tokens, sums / tokens.clamp(min=1), means / mask.sum() if outputs else None)
    if not found.saliency.isfinite().all():
        raise ValueError("outputs of experts are NaN or infinite on these windows, so nothing can be ranked")
    return found


def drop_experts(model: PreTrainedModel, kept: Sequence[Sequence[int]]) -> None:
    """Keep the experts ``kept[mixture]``, in place, in the model's order; the router loses the rows of the others, and the config names
    what is left.

    An expert that no token was sent to is removed without a change, if the router normalises over the experts it chose. Where it does not
    (``norm_topk_prob`` false), the weights of those that stay grow, since they come from a softmax over all.

    Raises:
        ValueError: before anything changes: no mixture of a known kind, numbers outside it or given twice, of unequal count, or fewer than
            a token is sent to.
    """
    _keep(model, kept, dict(model.state_dict()))


def merge_experts(model: PreTrainedModel, kept: Sequence[Sequence[int]], used: Usage, *, align: bool = True) -> None:
    """:func:`drop_experts`, but each expert that goes is averaged into the one that stays whose mean output is nearest (L2; of equal ones
    the first).

    The average is weighted by tokens; where a group got none, the one that stays is left as it is. Its router row is kept as it is.

    Args:
        used: from :func:`usage` with ``outputs=True``.
        align: first reorder the inner channels of the expert that goes, so that their weights are most like those of the other (an
            assignment problem, for each expert about 0.04 s at 768 inner channels and 1 s at 3,072).
    Raises:
        ValueError: as :func:`drop_experts`; or ``used`` has no outputs, or is of another model.
    Source:
        Averages and their weights: Li et al. 2023 (M-SMoE), arXiv:2310.01334, which compares router logits instead. Comparing outputs: Chen et al.
        2024 (HC-SMoE), arXiv:2410.08589, which clusters all experts and not each with one that was chosen to stay.
    """
    mixtures, count = _mixtures(model), _count(model)
    if used.outputs is None or used.tokens.shape != (len(mixtures), count):
        raise ValueError(
            f"usage of {list(used.tokens.shape)} experts {'without' if used.outputs is None else 'with'} outputs; {len(mixtures)} mixtures of "
            f"{count}, with outputs=True, were expected"
        )
    kept = _checked(model, kept)
    state = dict(model.state_dict())
    for row, (name, mixture) in enumerate(mixtures.items()):
        distances = torch.cdist(used.outputs[row], used.outputs[row][kept[row]])
        nearest = [kept[row][place] for place in distances.argmin(dim=1).tolist()]
        for part in ("gate_up_proj", "down_proj"):
            state[f"{name}.{part}"] = state[f"{name}.{part}"].clone()
        for target in kept[row]:
            group = [target] + [each for each in range(count) if each not in kept[row] and nearest[each] == target]
            if len(group) > 1 and int(used.tokens[row][group].sum()):
                up, down = _average(mixture, group, (used.tokens[row][group] / used.tokens[row][group].sum()).tolist(), align)
                state[f"{name}.gate_up_proj"][target], state[f"{name}.down_proj"][target] = up, down
    _keep(model, kept, state)


def _average(mixture: nn.Module, group: list[int], shares: list[float], align: bool) -> tuple[Tensor, Tensor]:
    """The weighted average of experts, with their inner channels in the order of the first."""
    gate, up, down = (torch.zeros_like(each, dtype=torch.float64) for each in experts.parts(mixture, group[0]).values())
    first = _channels(mixture, group[0])
    for expert, share in zip(group, shares, strict=True):
        order = torch.arange(len(gate))
        if align and expert != group[0]:
            order = torch.from_numpy(linear_sum_assignment((first @ _channels(mixture, expert).mT).cpu(), maximize=True)[1])
        part = {name: each.double() for name, each in experts.parts(mixture, expert).items()}
        gate += share * part["gate_proj"][order]
        up += share * part["up_proj"][order]
        down += share * part["down_proj"][:, order]
    return torch.cat([gate, up]), down


def _channels(mixture: nn.Module, expert: int) -> Tensor:
    """All weights of each inner channel, in one row."""
    part = experts.parts(mixture, expert)
    return torch.cat([part["gate_proj"], part["up_proj"], part["down_proj"].mT], dim=1).float()


def _output(mixture: nn.Module, expert: int, states: Tensor) -> Tensor:
    return nn.functional.linear(experts.inner(mixture, expert, states), experts.parts(mixture, expert)["down_proj"])


def _keep(model: PreTrainedModel, kept: Sequence[Sequence[int]], state: dict[str, Tensor]) -> None:
    kept = _checked(model, kept)
    for name, mine in zip(_mixtures(model), kept, strict=True):
        for each in (f"{name}.gate_up_proj", f"{name}.down_proj", _router(name)):
            state[each] = state[each][torch.tensor(mine, device=state[each].device)]
    config = deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    for key in COUNTS:
        if key in text.to_dict():
            setattr(text, key, len(kept[0]))
    become(model, config, state)


def _mixtures(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The fused mixtures with a router of one row an expert, and nothing else that goes by expert."""
    found = experts.fused(model)
    state = model.state_dict()
    for name in found:
        router = _router(name)
        inside = [each for each in state if each.startswith(router.removesuffix("weight"))]
        if inside != [router] or len(state[router]) != experts.count(found[name]):
            raise ValueError(
                f"the router of {name} is {', '.join(inside) or 'not found'}; {router} alone, with a row for each expert, was expected"
            )
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no mixture whose experts are in gate_up_proj and down_proj; such as Mixtral and Qwen3-MoE work"
        )
    return found


def _router(mixture: str) -> str:
    return f"{mixture.rpartition('.')[0]}.gate.weight"


def _count(model: PreTrainedModel) -> int:
    return experts.count(next(iter(_mixtures(model).values())))


def _checked(model: PreTrainedModel, kept: Sequence[Sequence[int]]) -> list[list[int]]:
    """The lists, sorted."""
    mixtures, count = len(_mixtures(model)), _count(model)
    least = model.config.get_text_config(decoder=True).num_experts_per_tok
    if len(kept) != mixtures or len({len(each) for each in kept}) != 1 or len(kept[0]) < least:
        raise ValueError(
            f"{[len(each) for each in kept]} experts are kept; {mixtures} lists of one length were expected, {least} to {count}, "
            f"since a token is sent to {least}"
        )
    for mine in kept:
        if len(set(mine)) != len(mine) or not all(0 <= each < count for each in mine):
            raise ValueError(f"experts {list(mine)} of {count}: each is a number from 0 to {count - 1}, given once")
    return [sorted(each) for each in kept]
