"""Making every block of a model narrower: fewer heads, FFN channels, channels of the residual stream; what is left is a plain, smaller model.

Not here: which ones to keep (``width_scores.py``), how many (``shapes.py``), or whole blocks (``depth.py``).
"""

import math
from collections.abc import Sequence
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from assay.ops.models import structure
from assay.ops.models.norms import norm_offset
from assay.ops.prune.rebuild import become, differing

# What the last dimensions of a block's parameters run over: query heads, key-value heads, FFN channels, the hidden size; None is left as it is.
AXES: dict[str, tuple[str | None, ...]] = {
    "self_attn.q_proj.weight": ("query", "hidden"), "self_attn.q_proj.bias": ("query",),
    "self_attn.k_proj.weight": ("key", "hidden"), "self_attn.k_proj.bias": ("key",),
    "self_attn.v_proj.weight": ("key", "hidden"), "self_attn.v_proj.bias": ("key",),
    "self_attn.o_proj.weight": ("hidden", "query"), "self_attn.o_proj.bias": ("hidden",),
    "self_attn.q_norm.weight": (None,), "self_attn.k_norm.weight": (None,),  # of one head's size
    "mlp.gate_proj.weight": ("ffn", "hidden"), "mlp.gate_proj.bias": ("ffn",),
    "mlp.up_proj.weight": ("ffn", "hidden"), "mlp.up_proj.bias": ("ffn",),
    "mlp.down_proj.weight": ("hidden", "ffn"), "mlp.down_proj.bias": ("hidden",),
    "mlp.gate.weight": (None, "hidden"), "mlp.experts.gate_up_proj": (None, "hidden"), "mlp.experts.down_proj": ("hidden", None),
    **{f"{norm}.weight": ("hidden",) for norm in (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")},
}  # fmt: skip
# Models of which nothing but parameters, and the scale of the embedding, depends on the hidden size.
HIDDEN = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma3_text")


class Kept(NamedTuple):
    """What is kept, by numbers from 0 in any order; None keeps all. Every block keeps as many as any other.

    Attributes:
        kv_groups: of each block, key-value heads; their query heads stay with them.
        query_heads: of each block, query heads, as many in each key-value head that is kept.
        ffn: of each block, channels between up_proj and down_proj.
        hidden: channels of the residual stream, one list for the model.
    """

    kv_groups: Sequence[Sequence[int]] | None = None
    query_heads: Sequence[Sequence[int]] | None = None
    ffn: Sequence[Sequence[int]] | None = None
    hidden: Sequence[int] | None = None


@torch.no_grad()
def cut(model: PreTrainedModel, kept: Kept, *, correct_norms: bool = True) -> None:
    """Keep what ``kept`` says and remove the rest, in place; the config names every size, ``head_dim`` too, which stays as it is.

    An RMS norm of gain g divides by the root of the mean square over its n channels. With S the sum of squares, and m channels left of which the
    others were 0, it gives the same as before when

        g / √(S / n + ε) = g' / √(S / m + ε n / m)        with g' = g √(n / m)

    and ε n / m in the place of ε. A norm that multiplies by 1 + w gets w' = (1 + w) √(n / m) - 1. Models that norm their heads as well (Qwen 3,
    Gemma 3) have one ε for both, which stays: there the output grows by the share ε (n / m - 1) / (2 S / m) at most. An embedding that is
    multiplied by √hidden (Gemma) is multiplied by √(n / m) more; where it is the head as well, the last norm's gain is divided by that.

    Args:
        kept: such as :func:`~assay.ops.prune.width_scores.choose` gives.
        correct_norms: exact where the removed channels are 0. Where they are as large as those that stay, the mean square hardly changes, and False
            is nearer.
    Raises:
        ValueError: before anything changes: numbers outside the model, given twice, or of unequal count; query heads that leave the groups uneven;
            a parameter whose place is not known (named); FFN channels of experts; the hidden size of a family that is not in
            :data:`HIDDEN`; or a config that transformers does not take: in Llama and Gemma 3 the hidden size has to be a multiple of the
            number of query heads.
    Source:
        Muralidharan et al. 2024 (Minitron), §2, arXiv:2407.14679. Whole key-value groups and the correction of norms are ours.
    """
    sizes, places, indices, config = _planned(model, kept)
    path = f"{structure.blocks_path(model)}."
    state = {
        name: _pick(tensor, places[name], indices[int(name.removeprefix(path).split(".")[0]) if name.startswith(path) else 0])
        for name, tensor in model.state_dict().items()
    }
    if kept.hidden is not None:
        wider = int(sizes["hidden_size"]) / len(indices[0]["hidden"])
        _keep_scale(model, state, places, math.sqrt(wider), correct_norms)
        if correct_norms and not any(name.endswith("q_norm.weight") for name in places):
            config.get_text_config(decoder=True).rms_norm_eps *= wider
    become(model, config, state)


def require_possible(
    model: PreTrainedModel, *, kv_groups: int | None, query_heads: int | None, ffn: int | None, hidden: int | None
) -> None:
    """Refuse counts that no choice of parts could meet, before parts are ranked.

    Args:
        query_heads: in each key-value group.
    Raises:
        ValueError: as :func:`cut`.
    """
    sizes = structure.shape_numbers(model)
    layers, groups = int(sizes["layers"]), range(int(sizes["kv_heads"]) if kv_groups is None else kv_groups)
    each = int(sizes["heads"]) // int(sizes["kv_heads"])
    heads = None if query_heads is None else [[group * each + head for group in groups for head in range(query_heads)]] * layers
    first = Kept(
        None if kv_groups is None else [list(groups)] * layers, heads, None if ffn is None else [list(range(ffn))] * layers,
        None if hidden is None else list(range(hidden)),
    )  # fmt: skip
    differing(_planned(model, first)[3], {})


def _planned(
    model: PreTrainedModel, kept: Kept
) -> tuple[dict[str, int | bool], dict[str, tuple[str | None, ...]], list[dict[str, Tensor]], PreTrainedConfig]:
    """The sizes before, what the dimensions of every weight run over, what stays of each block, and the config of what is left but for its norms."""
    sizes, places = structure.shape_numbers(model), _places(model)
    if kept.ffn is not None:
        _require_plain_ffn(model)
    if kept.hidden is not None:
        _require_hidden(model)
    indices = _indices(kept, sizes)
    config, head_dim = deepcopy(model.config), int(sizes["head_dim"])
    text, counts = config.get_text_config(decoder=True), {axis: len(index) for axis, index in indices[0].items()}
    text.num_attention_heads, text.num_key_value_heads = counts["query"] // head_dim, counts["key"] // head_dim
    text.head_dim, text.hidden_size = head_dim, counts["hidden"]
    if kept.ffn is not None:
        text.intermediate_size = counts["ffn"]
    return sizes, places, indices, config


def _places(model: PreTrainedModel) -> dict[str, tuple[str | None, ...]]:
    """What the last dimensions of every weight run over; a weight of unknown place is refused."""
    path = structure.blocks_path(model)
    ends = {structure.embedding(model)[0], structure.head(model)[0]}
    found: dict[str, tuple[str | None, ...]] = {}
    for name, tensor in model.state_dict().items():
        if name.startswith(f"{path}."):
            axes = AXES.get(name.removeprefix(f"{path}.").partition(".")[2])
        elif name.rpartition(".")[0] in ends:
            axes = (None, "hidden") if tensor.ndim == 2 else (None,)
        else:
            axes = ("hidden",) if name.endswith("norm.weight") else None
        if axes is None:
            raise ValueError(
                f"{name} {list(tensor.shape)} of {type(model).__name__} is not known, so it cannot be cut with the rest; blocks of RMS norms, separate "
                "q, k, v, o and gate, up, down projections or fused experts work"
            )
        found[name] = axes
    head_dim = structure.shape_numbers(model)["head_dim"]
    for name in found:
        if name.endswith(("q_norm.weight", "k_norm.weight")) and len(model.get_parameter(name)) != head_dim:
            raise ValueError(
                f"{name} norms all heads at once, so that removing one changes the others; norms of one head ({head_dim}) work"
            )
    return found


def _require_plain_ffn(model: PreTrainedModel) -> None:
    for layer, block in enumerate(structure.blocks(model)):
        if "mlp.down_proj.weight" not in dict(block.named_parameters()):
            raise ValueError(
                f"block {layer} of {type(model).__name__} is a mixture of experts, whose FFN channels cannot be cut; whole experts can be dropped "
                "(ops/prune/experts.py)"
            )


def _require_hidden(model: PreTrainedModel) -> None:
    kind = model.config.get_text_config(decoder=True).model_type
    if kind not in HIDDEN:
        raise ValueError(
            f"what else depends on the hidden size of {type(model).__name__} is not known, so it cannot be cut; model types {', '.join(HIDDEN)} work"
        )


def _indices(kept: Kept, sizes: dict[str, int | bool]) -> list[dict[str, Tensor]]:
    """Of each block, what stays of each axis, sorted."""
    layers, heads, groups, head_dim = (int(sizes[name]) for name in ("layers", "heads", "kv_heads", "head_dim"))
    each = heads // groups
    kept_groups = _checked("kv_groups", kept.kv_groups, layers, groups)
    of_groups = [[group * each + head for group in block for head in range(each)] for block in kept_groups]
    kept_heads = of_groups if kept.query_heads is None else _checked("query_heads", kept.query_heads, layers, heads)
    for layer, (mine, block) in enumerate(zip(kept_heads, kept_groups, strict=True)):
        counts = {group: sum(head // each == group for head in mine) for group in range(groups)}
        if len({counts[group] for group in block}) != 1 or sum(counts[group] for group in block) != len(mine):
            raise ValueError(
                f"query heads {mine} of block {layer} leave {list(counts.values())} to its {groups} groups, of which {block} stay; "
                "as many in each group that stays, and none in others, were expected"
            )
    ffn = _checked("ffn", kept.ffn, layers, int(sizes["intermediate_size"]))
    (hidden,) = _checked("hidden", None if kept.hidden is None else [kept.hidden], 1, int(sizes["hidden_size"]))
    return [
        {
            "query": _rows(kept_heads[layer], head_dim), "key": _rows(kept_groups[layer], head_dim),
            "ffn": torch.tensor(ffn[layer]), "hidden": torch.tensor(hidden),
        }
        for layer in range(layers)
    ]  # fmt: skip


def _checked(what: str, lists: Sequence[Sequence[int]] | None, layers: int, size: int) -> list[list[int]]:
    """The lists, sorted; all numbers when there are none."""
    if lists is None:
        return [list(range(size))] * layers
    if len(lists) != layers or len({len(each) for each in lists}) != 1 or not lists[0]:
        raise ValueError(f"{what} has lists of {[len(each) for each in lists]} numbers; {layers} of one length, 1 to {size}, were expected")
    for each in lists:
        if len(set(each)) != len(each) or not all(0 <= number < size for number in each):
            wrong = sorted(number for number in set(each) if list(each).count(number) > 1 or not 0 <= number < size)
            raise ValueError(f"{what} has {wrong}; each number is from 0 to {size - 1} and given once")
    return [sorted(each) for each in lists]


def _rows(heads: list[int], head_dim: int) -> Tensor:
    return (torch.tensor(heads).unsqueeze(1) * head_dim + torch.arange(head_dim)).flatten()


def _pick(tensor: Tensor, axes: tuple[str | None, ...], indices: dict[str, Tensor]) -> Tensor:
    for dimension, axis in enumerate(axes, start=tensor.ndim - len(axes)):
        if axis is not None and len(indices[axis]) < tensor.shape[dimension]:
            tensor = tensor.index_select(dimension, indices[axis].to(tensor.device))
    return tensor


def _keep_scale(
    model: PreTrainedModel, state: dict[str, Tensor], places: dict[str, tuple[str | None, ...]], factor: float, correct_norms: bool
) -> None:
    """Let norms, and an embedding that is multiplied by √hidden, give what they gave; ``state`` holds cut weights, ``factor`` is √(old / new)."""
    name, embedding = structure.embedding(model)
    scaled, tied = hasattr(embedding, "embed_scale"), structure.is_tied(model)
    norms = [each for each, axes in places.items() if axes == ("hidden",) and each.endswith("norm.weight")]
    last = next(each for each in norms if not each.startswith(f"{structure.blocks_path(model)}."))
    offset = norm_offset(model.get_submodule(last.removesuffix(".weight")), last)
    for each in norms:
        gain = (factor if correct_norms else 1.0) / (factor if each == last and scaled and tied else 1.0)
        state[each] = (state[each] + offset) * gain - offset
    if scaled:
        ends = [name, structure.head(model)[0]] if tied else [name]
        state |= {f"{end}.weight": state[f"{end}.weight"] * factor for end in ends}
