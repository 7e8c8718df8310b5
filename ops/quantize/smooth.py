"""Moving scales of channels between what produces a vector and what reads it: the model computes the same, and is easier to round.

Here: the pairs of a model, the exact fold, and SmoothQuant's scales. Not here: scales found by trying the rounding (``awq.py``).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from assay.ops.models import experts, structure
from assay.ops.models.norms import norm_offset
from assay.ops.quantize.activations import watch_inputs
from assay.ops.quantize.sequential import walk

Kind = Literal["norm_qkv", "v_o", "norm_mlp", "up_down"]
KINDS: tuple[Kind, ...] = get_args(Kind)
NORMS: tuple[Kind, ...] = ("norm_qkv", "norm_mlp")
SMALLEST = 1e-5  # of SmoothQuant's scales


class Pair(NamedTuple):
    """A ``producer`` (a norm or a matrix) and all the matrices that read its channels, by name (a router by its module).

    ``parent`` is the module that reads the channels as a whole. Each scale serves ``repeats`` runs of ``run`` input channels: those of the
    query heads of one key-value head; (1, 1) is one scale an input channel.
    """

    name: str
    kind: Kind
    producer: str
    readers: tuple[str, ...]
    parent: str
    repeats: int = 1
    run: int = 1

    def spread(self, scales: Float[Tensor, " scales"]) -> Float[Tensor, " channels"]:
        """One value an input channel of the readers."""
        return scales.view(-1, 1, self.run).expand(-1, self.repeats, -1).reshape(-1)

    def gather(self, values: Float[Tensor, " channels"], how: Literal["max", "mean"]) -> Float[Tensor, " scales"]:
        """One value a scale, of the input channels that share it."""
        shared = values.view(-1, self.repeats, self.run)
        return (shared.amax(dim=1) if how == "max" else shared.mean(dim=1)).reshape(-1)


def pairs(model: PreTrainedModel, kinds: Collection[str] = KINDS) -> list[Pair]:
    """The pairs of these kinds that can be folded exactly, block by block in the order of the computation.

    A norm is listed with every matrix of the module after it but the one that gives its output: q, k and v; or gate and up, and of a
    mixture those of all experts, of shared ones, and the router. v → o has one scale for each channel of a key-value head. Up → down is a
    pair for each expert.

    Raises:
        ValueError: an unknown kind, or a block whose parts are not named as in Llama, Mistral, Qwen, Gemma and Mixtral.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise ValueError(f"the pair {unknown[0]!r} is not known; {', '.join(KINDS)} are")
    matrices = tensors(model)
    found: list[Pair] = []
    for index, block in enumerate(structure.blocks(model)):
        name = f"{structure.blocks_path(model)}.{index}"
        before = "pre_feedforward_layernorm" if hasattr(block, "pre_feedforward_layernorm") else "post_attention_layernorm"
        missing = [
            part for part in ("self_attn", "mlp", "input_layernorm", before) if not isinstance(getattr(block, part, None), nn.Module)
        ]
        if missing:
            raise ValueError(
                f"{name} of {type(model).__name__} has no {' and no '.join(missing)}, so what reads its norms is not known; "
                "blocks of a norm, self_attn, a norm and mlp work, as in Llama, Mistral, Qwen, Gemma and Mixtral"
            )
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        found += [
            _norm(f"{name}.norm_qkv", "norm_qkv", f"{name}.input_layernorm", attention, "o_proj", matrices),
            *_value(model, attention, matrices),
            _norm(f"{name}.norm_mlp", "norm_mlp", f"{name}.{before}", mlp, "down_proj", matrices),
        ]
        for down in [each for each in matrices if each.startswith(f"{mlp}.") and each.endswith(".down_proj")]:
            up = f"{down.removesuffix('.down_proj')}.up_proj"
            if up in matrices:
                found.append(Pair(f"{down.removesuffix('.down_proj')}.up_down", "up_down", up, (down,), down))
    return [pair for pair in found if pair.kind in kinds]


def tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Every matrix of the blocks as a view [out, in] by name: ``experts.weights``, and routers by the name of their module."""
    found = experts.weights(model)
    reached = experts.parameters(model, set(found))
    prefix = structure.blocks_path(model)
    others = {
        name.removesuffix(".weight"): parameter.detach()
        for name, parameter in model.named_parameters()
        if name.startswith(f"{prefix}.") and parameter.ndim >= 2 and name not in reached
    }
    return found | others


@torch.no_grad()
def fold(model: PreTrainedModel, pair: Pair, scales: Float[Tensor, " scales"]) -> None:
    """Divide what the producer gives by ``scales`` and multiply what the readers make of it, in place: the model computes the same.

    A norm that multiplies by 1 + w gets w' = (1 + w) / s - 1. Biases of the producer are divided too.

    Raises:
        ValueError: scales that are not positive and finite or of another number, or a norm whose gain is neither w nor 1 + w.
    """
    if not (scales.isfinite() & (scales > 0)).all():
        raise ValueError(
            f"{pair.name}: {int((~(scales.isfinite() & (scales > 0))).sum())} of {len(scales)} scales are not positive and finite"
        )
    matrices = tensors(model)
    scales = scales.double()
    spread = pair.spread(scales)
    readers = [matrices[name] for name in pair.readers]
    if any(reader.shape[-1] != len(spread) for reader in readers):
        raise ValueError(f"{pair.name}: {len(scales)} scales do not fit readers of {readers[0].shape[-1]} channels")
    if pair.producer in matrices:
        rows = matrices[pair.producer]
        rows.copy_(rows.double() / scales[:, None])
    else:
        gain = model.get_submodule(pair.producer).get_parameter("weight")
        offset = norm_offset(model.get_submodule(pair.producer), pair.producer, centred=True)
        gain.copy_((offset + gain.double()) / scales - offset)
    bias = dict(model.named_parameters()).get(f"{pair.producer}.bias")
    if bias is not None:
        bias.copy_(bias.double() / scales)
    for reader in readers:
        reader.copy_(reader.double() * spread)


@torch.no_grad()
def channel_maxima(
    model: PreTrainedModel,
    chosen: Sequence[Pair],
    windows: Int[Tensor, "windows length"],
    *,
    real: Bool[Tensor, "windows length"] | None = None,
) -> dict[str, Float[Tensor, " scales"]]:
    """max |x| of what the readers of each pair read, over real tokens, by the pair's name. An expert that no token reached has none."""
    watched = {(pair.parent if pair.kind in NORMS else pair.readers[0]): pair for pair in chosen}
    modules = dict(model.named_modules())
    found: dict[str, Tensor] = {}

    def take(name: str, values: Tensor) -> None:
        largest = watched[name].gather(values.abs().amax(dim=0), "max")
        pair = watched[name].name
        found[pair] = torch.maximum(found[pair], largest) if pair in found else largest

    watch_inputs(model, [name for name in watched if name in modules], windows, take, real=real)
    if any(name not in modules for name in watched):  # experts
        for stage in walk(model, windows, real=real, true_sequential=False):
            for group, values in stage.inputs():
                for name in group:
                    if name in watched and name not in modules:
                        take(name, values.float())
    return found


@torch.no_grad()
def smooth(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows length"],
    *,
    alpha: float | Mapping[str, float] = 0.5,
    kinds: Collection[str] = NORMS,
    real: Bool[Tensor, "windows length"] | None = None,
) -> dict[str, Float[Tensor, " scales"]]:
    """SmoothQuant: move the outliers of activations into the weights that read them, in place; logits stay the same.

        s_j = max|X_j|^α / max|W_j|^(1 - α), at least 1e-5

    over real tokens, and over the rows of all readers. A channel that is always 0, or that nobody reads, keeps s = 1.

    Args:
        windows: token ids.
        alpha: 0 (all difficulty stays in the activations) to 1 (all of it moves), for all pairs, or by the name or the kind of a pair.
        kinds: of :func:`pairs`; a pair of an expert that no token reached is left.
        real: False at padding.
    Returns:
        The scales by the name of their pair, float32.
    Raises:
        ValueError: α missing or outside 0 to 1, no window, or a model whose pairs are not known; the model is unchanged then.
    Source:
        Xiao et al. 2022, eq. 4 and §4.2, arXiv:2211.10438. Theirs gives a channel of zeros the scale 1e-5, and its norm a gain of 10⁵.
    """
    chosen = pairs(model, kinds)
    strengths = {pair.name: _alpha(alpha, pair) for pair in chosen}
    maxima = channel_maxima(model, chosen, windows, real=real)
    matrices = tensors(model)
    found: dict[str, Tensor] = {}
    for pair in chosen:
        if pair.name not in maxima:
            continue
        inputs = maxima[pair.name]
        columns = torch.stack([matrices[name].float().abs().amax(dim=0) for name in pair.readers]).amax(dim=0)
        weights = pair.gather(columns, "max")
        strength = strengths[pair.name]
        scales = (inputs.pow(strength) / weights.pow(1 - strength)).clamp(min=SMALLEST)
        found[pair.name] = torch.where((inputs > 0) & (weights > 0), scales, 1.0)
    for pair in chosen:
        if pair.name in found:
            fold(model, pair, found[pair.name])
    return found


def _alpha(alpha: float | Mapping[str, float], pair: Pair) -> float:
    found = alpha.get(pair.name, alpha.get(pair.kind)) if isinstance(alpha, Mapping) else alpha
    if found is None or not 0 <= found <= 1:
        what = "is missing" if found is None else f"is {found}"
        raise ValueError(f"alpha of {pair.name} {what}; a number from 0 to 1 for all, or by name or kind ({', '.join(KINDS)}), works")
    return float(found)


def _norm(name: str, kind: Kind, norm: str, parent: str, output: str, matrices: Mapping[str, Tensor]) -> Pair:
    readers = tuple(each for each in matrices if each.startswith(f"{parent}.") and not each.endswith(f".{output}"))
    widths = {matrices[each].shape[-1] if matrices[each].ndim == 2 else 0 for each in readers}
    if len(widths) != 1 or 0 in widths:
        shapes = ", ".join(f"{each} {list(matrices[each].shape)}" for each in readers[:4]) or "none"
        raise ValueError(f"the readers of {norm} have no one width: {shapes}; matrices [out, in] of one width work")
    return Pair(name, kind, norm, readers, parent)


def _value(model: PreTrainedModel, attention: str, matrices: Mapping[str, Tensor]) -> list[Pair]:
    """v → o, where there are these two and the heads of o are those of v, each some times."""
    value, output = f"{attention}.v_proj", f"{attention}.o_proj"
    width = structure.shape_numbers(model)["head_dim"]
    if value not in matrices or output not in matrices:
        return []
    rows, channels = matrices[value].shape[0], matrices[output].shape[1]
    if rows % width or channels % rows:
        return []
    return [Pair(f"{attention.removesuffix('.self_attn')}.v_o", "v_o", value, (output,), output, channels // rows, width)]
