"""Turning a model inside without changing what it computes, so that no channel stands out when it is rounded: QuaRot's and SpinQuant's rotations.

The residual stream is turned by R1 and each head's values by R2, both folded into the weights. What a nonlinearity or the rotary embedding keeps from being
folded runs at inference and is named by :class:`Online`. Not here: the transforms (``hadamard.py``), learning a rotation (``spin.py``), or rounding.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from assay.ops.models import structure
from assay.ops.models.norms import norm_offset
from assay.ops.quantize import hadamard

Kind = Literal["hadamard", "random"]
Turn = Callable[[Tensor], Tensor]  # of the last dimension
Changes = dict[str, list[Turn]]  # of each parameter, by name, in order
PLACES = ("down", "heads", "qk")
NORMS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate", "mlp.experts.gate_up_proj"),
}  # and who reads them
WRITERS = ("self_attn.o_proj", "mlp.down_proj", "mlp.experts.down_proj")
UNTURNED = ("self_attn.q_norm.weight", "self_attn.k_norm.weight", *(f"{each}.bias" for readers in NORMS.values() for each in readers))


class Online(NamedTuple):
    """A Hadamard transform that has to run at inference, in each block.

    ``module`` ends the names of the modules. Their input ("input"), or their queries and keys after the rotary embedding ("after_rope"), is turned by the
    normalised matrix of ``size``, over channels that lie ``stride`` apart: of a width of groups · size · stride, each run of size · stride by itself.
    """

    module: str
    where: Literal["input", "after_rope"]
    size: int
    stride: int = 1

    def turn(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """The transform of the last dimension; it undoes itself."""
        channels = x.reshape(*x.shape[:-1], -1, self.size, self.stride).mT
        return hadamard.transform(channels).mT.reshape(x.shape)


class Removable(Protocol):
    """What :func:`attach` gives."""

    def remove(self) -> None:
        """Take the transform off again."""


def rotate(
    model: PreTrainedModel,
    *,
    kind: Kind = "hadamard",
    seed: int = 0,
    online: Collection[str] = (),
    untie: bool = False,
    residual: Float[Tensor, "hidden hidden"] | None = None,
    values: Sequence[Float[Tensor, "head_dim head_dim"]] | None = None,
) -> tuple[Online, ...]:
    """Fold rotations into the weights of ``model``, in place; with the transforms that are returned (:func:`attach`), its logits stay what they were.

    With h the residual stream, g a norm's gain (set to 1), r = R1 and v = R2, all in float64 and rounded once:

        embedding E R1       q, k, gate, up, router W diag(g) R1       v R2ᵀ W diag(g) R1       o R1ᵀ W R2       down R1ᵀ W       head W diag(g) R1

    Args:
        kind: R1 is a Hadamard matrix with random signs and R2 one without, or both are drawn uniformly, R2 anew for each block.
        online: ``down`` turns the input of down_proj; ``heads`` turns across heads before o_proj, or, where the number of heads has no Hadamard matrix,
            its whole input at once, which leaves no work to R2; ``qk`` turns queries and keys after the rotary embedding, for a cache of rounded keys.
        untie: give a tied head its own weights, which it needs: the last norm's gain goes into it and not into the embedding.
        residual, values: R1, and R2 of each block, such as learned ones, in place of those of ``kind``.
    Returns:
        The transforms that have to run at inference; none without ``online``.
    Raises:
        ValueError: before anything changes: a tied head, a size without a Hadamard matrix, or a part that a rotation cannot pass exactly (named).
    Source:
        Ashkboos et al. 2024 (QuaRot), §4, arXiv:2404.00456; Liu et al. 2024 (SpinQuant), §3, arXiv:2405.16406. Unlike the first, no mean is taken off the
        embedding, which only a LayerNorm would need.
    """
    unknown = sorted(set(online) - set(PLACES))
    if unknown:
        raise ValueError(f"no transform runs at {', '.join(unknown)}; {', '.join(PLACES)} are known")
    if structure.is_tied(model) and not untie:
        raise ValueError(
            f"the head of {type(model).__name__} is its embedding, which cannot take the gain of the last norm; with untie=True the head gets "
            f"{structure.head(model)[1].weight.numel():,} weights of its own"
        )
    _require_known(model)
    sizes = structure.shape_numbers(model)
    hidden, head_dim, layers = int(sizes["hidden_size"]), int(sizes["head_dim"]), int(sizes["layers"])
    transforms = online_transforms(model, online)
    if residual is None and kind == "hadamard":
        hadamard.core(hidden)
        stream: Turn = partial(hadamard.transform, signs=hadamard.random_signs(hidden, seed).to(model.device))
    else:
        stream = _by(hadamard.random_orthogonal(hidden, seed) if residual is None else residual)
    if values is not None:
        if len(values) != layers:
            raise ValueError(f"{len(values)} rotations of values for {layers} blocks; one each was expected")
        heads: Sequence[Turn] | None = [_by(each) for each in values]
    elif any(each.module == "self_attn.o_proj" and each.stride == 1 for each in transforms):
        heads = None
    elif kind == "hadamard":
        hadamard.core(head_dim)
        heads = [hadamard.transform] * layers
    else:
        heads = [_by(hadamard.random_orthogonal(head_dim, seed + 1 + layer)) for layer in range(layers)]
    changes = plan(model, stream, heads, transforms)
    structure.untie(model)
    with torch.no_grad():
        for name, steps in changes.items():
            parameter = model.get_parameter(name)
            parameter.copy_(apply(steps, parameter.double()))
    return transforms


def attach(model: PreTrainedModel, transforms: Collection[Online]) -> list[Removable]:
    """Run ``transforms`` in a model of transformers, until each of what is returned is removed.

    Inputs are turned by hooks before the module. Queries and keys are turned by an attention function, registered beside the one in use and calling it, on
    its way in: a cache holds keys as they were, and one that rounds them turns them itself (``Online.turn``) before, and back after.

    Raises:
        ValueError: no module has the name, or the attention is ``eager``, which is no function that can be wrapped.
    """
    handles: list[Removable] = []
    for each in transforms:
        if each.where == "after_rope":
            handles.append(_TurnedAttention(model, each))
            continue
        modules = [module for name, module in model.named_modules() if name.endswith(f".{each.module}")]
        if not modules:
            raise ValueError(
                f"no module of {type(model).__name__} is named {each.module}, where a transform of size {each.size} has to run"
            )
        handles += [module.register_forward_pre_hook(partial(_turn_input, each)) for module in modules]
    return handles


def online_transforms(model: PreTrainedModel, places: Collection[str]) -> tuple[Online, ...]:
    """What runs at inference for ``places`` (of :data:`PLACES`) in this model. See :func:`rotate`."""
    sizes = structure.shape_numbers(model)
    heads, head_dim = int(sizes["heads"]), int(sizes["head_dim"])
    found = []
    if "down" in places:
        down = dict(structure.blocks(model)[0].named_modules()).get("mlp.down_proj")
        if not isinstance(down, nn.Linear):
            raise ValueError(
                f"down_proj of {type(model).__name__} is no module of its own (experts are computed together), so nothing can turn its input; "
                "leave out down"
            )
        found.append(Online("mlp.down_proj", "input", down.in_features))
    if "heads" in places:
        across = hadamard.has_matrix(heads)
        found.append(Online("self_attn.o_proj", "input", heads if across else heads * head_dim, head_dim if across else 1))
    if "qk" in places:
        found.append(Online("self_attn", "after_rope", head_dim))
    for each in found:
        hadamard.core(each.size)
    return tuple(found)


def plan(model: PreTrainedModel, stream: Turn, heads: Sequence[Turn] | None, transforms: Collection[Online] = ()) -> Changes:
    """What :func:`rotate` does to each parameter; nothing is changed, and every step can be differentiated.

    Raises:
        ValueError: a parameter is none that a rotation is known to pass, or a norm is no RMS norm; both named.
    """
    _require_known(model)
    sizes = structure.shape_numbers(model)
    head_dim, changes = int(sizes["head_dim"]), defaultdict[str, list[Turn]](list)
    changes[f"{structure.embedding(model)[0]}.weight"] = [stream]
    found = norms(model)
    for name, offset in found.items():
        changes[name] = [partial(_constant, 1 - offset)]
    *_, last = found
    readers = {f"{structure.head(model)[0]}.weight": last}
    parameters = dict(model.named_parameters())
    for layer, block in enumerate(structure.blocks(model)):
        prefix = f"{structure.blocks_path(model)}.{layer}."
        readers |= {f"{prefix}{each}": f"{prefix}{norm}.weight" for norm, names in NORMS.items() for each in _parameters(block, names)}
        for name in _parameters(block, WRITERS):
            changes[prefix + name].append(partial(_rows, stream) if not name.endswith("bias") else stream)
        if heads:
            for name in _parameters(block, ("self_attn.v_proj",), bias=True):
                changes[prefix + name].append(partial(_head_rows, heads[layer], head_dim))
            changes[f"{prefix}self_attn.o_proj.weight"].append(partial(_head_columns, heads[layer], head_dim))
        for each in transforms:
            if each.where == "input":
                changes[f"{prefix}{each.module}.weight"].append(each.turn)
    for name, norm in readers.items():
        gain = parameters[norm].detach().double() + found[norm]
        changes[name] = [partial(_scaled, gain), stream, *changes[name]]
    return dict(changes)


def apply(changes: Sequence[Turn], parameter: Tensor) -> Tensor:
    """A parameter after its changes, in their order."""
    for change in changes:
        parameter = change(parameter)
    return parameter


def norms(model: PreTrainedModel) -> dict[str, float]:
    """The gains of the norms of the residual stream, by parameter name, the last norm's last; each multiplies by its offset (0, or 1) plus the gain.

    Raises:
        ValueError: a norm does something else, such as taking off a mean.
    """
    path = structure.blocks_path(model)
    inside = [f"{path}.{layer}.{norm}" for layer in range(len(structure.blocks(model))) for norm in NORMS]
    (last,) = _outside(model)
    offsets: dict[type, float] = {}
    found = {}
    for name in (*inside, last.removesuffix(".weight")):
        norm = model.get_submodule(name)
        if type(norm) not in offsets:
            offsets[type(norm)] = norm_offset(norm, name)
        found[f"{name}.weight"] = offsets[type(norm)]
    return found


def _require_known(model: PreTrainedModel) -> None:
    """Refuse a model with a parameter whose place in it is not known, or without one that is needed."""
    known = {f"{norm}.weight" for norm in NORMS} | set(UNTURNED)
    hidden = structure.embedding(model)[1].weight.shape[1]
    for index, block in enumerate(structure.blocks(model)):
        names = {name for name, _ in block.named_parameters()}
        readers, writers = _parameters(block, sum(NORMS.values(), ())), _parameters(block, WRITERS)
        foreign = sorted(names - known - {*readers, *writers})
        lacking = sorted({*(f"{norm}.weight" for norm in NORMS), "self_attn.v_proj.weight", "self_attn.o_proj.weight"} - names)
        if foreign or lacking:
            sandwich = any("layernorm" in name for name in foreign) and not lacking
            raise ValueError(
                f"block {index} of {type(model).__name__} cannot be turned exactly: "
                + (f"{', '.join(foreign)} not expected" if foreign else f"{', '.join(lacking)} not found")
                + (
                    "; the gain of a norm after attention or MLP acts on channels of the residual stream, and no weight behind it can take it"
                    if sandwich
                    else ""
                )
                + ". Blocks of two RMS norms before separate q, k, v, o and (experts') gate, up, down projections work"
            )
        for name in (*readers, *writers):
            shape = block.get_parameter(name).shape
            if shape[-1 if name in readers or len(shape) == 1 else -2] != hidden:
                raise ValueError(
                    f"{name} of block {index} has the shape {list(shape)}; [.., outputs, inputs] with {hidden} of the stream was expected"
                )
    if len(_outside(model)) != 1:
        raise ValueError(
            f"{', '.join(_outside(model)) or 'nothing'} lies outside the blocks of {type(model).__name__}; one last norm was expected"
        )
    if getattr(model.config.get_text_config(decoder=True), "clip_qkv", None) is not None:
        raise ValueError("clip_qkv cuts values channel by channel, which no rotation passes; a model without it works")


def _outside(model: PreTrainedModel) -> list[str]:
    """Parameters outside blocks, embedding and head."""
    path, ends = structure.blocks_path(model), (structure.embedding(model)[0], structure.head(model)[0])
    return [name for name, _ in model.named_parameters() if not name.startswith((f"{path}.", *(f"{end}." for end in ends)))]


def _parameters(block: nn.Module, modules: Collection[str], *, bias: bool = False) -> list[str]:
    """Of the modules (or parameters) that a block has, the names of its parameters; biases of writers, and of others if asked for."""
    kinds = {f"{each}.weight" for each in modules} | set(modules)
    kinds |= {f"{each}.bias" for each in modules if bias or each in WRITERS}
    return [name for name, _ in block.named_parameters() if name in kinds]


def _by(matrix: Tensor) -> Turn:
    return lambda x: x @ matrix.to(x)


def _constant(value: float, x: Tensor) -> Tensor:
    return torch.full_like(x, value)


def _scaled(gain: Tensor, x: Tensor) -> Tensor:
    return x * gain.to(x)


def _rows(turn: Turn, x: Tensor) -> Tensor:
    return turn(x.mT).mT


def _head_rows(turn: Turn, head_dim: int, x: Tensor) -> Tensor:
    heads = x.reshape(-1, head_dim, *x.shape[1:])
    return (turn(heads) if x.ndim == 1 else turn(heads.mT).mT).reshape(x.shape)


def _head_columns(turn: Turn, head_dim: int, x: Tensor) -> Tensor:
    return turn(x.reshape(len(x), -1, head_dim)).reshape(x.shape)


def _turn_input(transform: Online, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (transform.turn(args[0]), *args[1:])


class _TurnedAttention:
    """The attention function of a model, with queries and keys turned first, until removed."""

    def __init__(self, model: PreTrainedModel, transform: Online):
        self.model, self.before = model, str(model.config._attn_implementation)
        inner = ALL_ATTENTION_FUNCTIONS.get(self.before)
        if inner is None:
            raise ValueError(
                f"queries and keys cannot be turned under attn_implementation={self.before!r}; "
                f"load the model with one of {', '.join(ALL_ATTENTION_FUNCTIONS.valid_keys())}"
            )

        def attention(module: nn.Module, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
            return inner(module, transform.turn(query), transform.turn(key), *args, **kwargs)

        name = f"turned{transform.size}_{self.before}"  # says all that the function does: the registry is one for all models
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[self.before])
        model.set_attn_implementation(name)

    def remove(self) -> None:
        self.model.set_attn_implementation(self.before)
