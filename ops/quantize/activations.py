"""What layers read, and rounding it: statistics gathered over real tokens, and fake quantization of the inputs of linear layers.

Not here: rounding of weights (``grid.py``), or of keys and values that are kept (``ops/kv``).
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from assay.ops.quantize import elements

BATCH = 4  # windows a forward
BITS = {"int8": 8, "int4": 4}
FORMATS = ("int8", "int4", "fp8_e4m3")


class Activations(NamedTuple):
    """How the input of a layer is rounded.

    Per ``token`` each token's range is measured as it comes; per ``tensor`` it is ``scale`` (and ``zero``) of calibration.

    ``clip`` is the share of the range that is kept, 0 to 1. fp8 is symmetric.
    """

    format: Literal["int8", "int4", "fp8_e4m3"] = "int8"
    per: Literal["token", "tensor"] = "token"
    symmetric: bool = True
    clip: float = 1.0
    scale: Tensor | None = None
    zero: Tensor | None = None


def quantize_activations(values: Float[Tensor, "*tokens channels"], how: Activations) -> Float[Tensor, "*tokens channels"]:
    """``values`` as they are after rounding, in their own dtype; the arithmetic is float32.

    With c cutting off at the first and last code of b bits, -2^(b-1) and 2^(b-1) - 1, and max and min of a token or of calibration, times
    ``clip``:

        symmetric integers    s = max|x| / ((2^b - 1) / 2)             x̂ = s c(round(x / s))
        asymmetric integers   s = (max(x, 0) - min(x, 0)) / (2^b - 1) z = round(-2^(b-1) - min(x, 0) / s) x̂ = s (c(round(x / s) + z) - z)
        fp8 e4m3              s = max|x| / 448                         x̂ = s e4m3(clamp(x / s, ±448))

    A token of zeros stays zeros; NaN stays NaN, and only in its own token.

    Raises:
        ValueError: :func:`require_valid`.
    Source:
        Per token and static: Xiao et al. 2022 (SmoothQuant), §2, arXiv:2211.10438. The clip: Ashkboos et al. 2024 (QuaRot), §4,
        arXiv:2404.00456. The symmetric step spreads all 2^b codes, as ``grid.fit`` does for weights; theirs leaves one unused.
    """
    require_valid(how)
    numbers = values.float()
    if how.per == "tensor":
        assert how.scale is not None
        scale, zero = how.scale.float(), how.zero
    else:
        scale, zero = _scale(numbers.amin(dim=-1, keepdim=True), numbers.amax(dim=-1, keepdim=True), how)
    if how.format == "fp8_e4m3":
        return (elements.decode(elements.encode(numbers / scale, "e4m3"), "e4m3") * scale).to(values.dtype)
    half = 2 ** (BITS[how.format] - 1)
    offset = 0.0 if zero is None else zero
    return ((((numbers / scale).round_() + offset).clamp_(-half, half - 1) - offset) * scale).to(values.dtype)


def require_valid(how: Activations) -> None:
    """Refuse what cannot be computed.

    Raises:
        ValueError: an unknown format, a clip outside 0 to 1, an asymmetric float, or a static range without its scale (or zero).
    """
    if how.format not in FORMATS or how.per not in ("token", "tensor"):
        raise ValueError(f"activations in {how.format!r} per {how.per!r} are not known; {', '.join(FORMATS)} per token or tensor are")
    if not 0 < how.clip <= 1:
        raise ValueError(f"clip={how.clip} is no share of the range; above 0 and at most 1 is")
    if how.format == "fp8_e4m3" and not how.symmetric:
        raise ValueError("fp8_e4m3 has a sign and no zero point; symmetric=True, or int8 with symmetric=False, works")
    if how.per == "tensor" and (how.scale is None or (not how.symmetric and how.zero is None)):
        missing = "scale" if how.scale is None else "zero"
        raise ValueError(f"activations per tensor have no {missing}; calibrate() measures it, and per='token' needs none")


def calibrate(
    model: PreTrainedModel,
    names: Collection[str],
    windows: Int[Tensor, "windows length"],
    how: Activations,
    *,
    real: Bool[Tensor, "windows length"] | None = None,
    keep: float = 1.0,
) -> dict[str, Activations]:
    """``how`` per tensor, with the range that each layer's input has over the real tokens of ``windows``.

    Args:
        keep: the quantile of |x| that the range ends at, to within 1 % of its value; 1 is the largest.
    Raises:
        ValueError: no window, a name that is no linear layer, or an input that is not finite.
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep} is no share of the activations; above 0 and at most 1 is")
    how = how._replace(per="tensor", scale=torch.ones(1), zero=None if how.symmetric else torch.zeros(1))
    require_valid(how)
    least, most, counts = {}, {}, {}

    def take(name: str, values: Tensor) -> None:
        if not values.isfinite().all():
            raise ValueError(f"the input of {name} has values that are NaN or infinite; finite ones have a range")
        least[name] = min(least.get(name, 0.0), float(values.min()))
        most[name] = max(most.get(name, 0.0), float(values.max()))
        if keep < 1:  # bfloat16 has 2^15 sizes, in the order of their bits
            sizes = values.abs().bfloat16().view(torch.int16).flatten().long()
            counts[name] = counts.get(name, 0) + torch.bincount(sizes, minlength=2**15)

    linears(model, names)
    watch_inputs(model, names, windows, take, real=real)
    found = {}
    for name in names:
        ends = torch.tensor([least[name]]), torch.tensor([most[name]])
        largest = max(-least[name], most[name])
        share = 1.0
        if keep < 1 and largest > 0:
            below = counts[name].cumsum(0)
            place = int(torch.searchsorted(below, torch.tensor(keep * int(below[-1])).ceil().long()))
            share = min(1.0, float(torch.tensor(place, dtype=torch.int16).view(torch.bfloat16)) / largest) or 1.0
        scale, zero = _scale(ends[0] * share, ends[1] * share, how)
        found[name] = how._replace(scale=scale, zero=zero)
    return found


def attach(model: nn.Module, chosen: Mapping[str, Activations]) -> list[RemovableHandle]:
    """Round the input of each named linear layer from now on; ``remove()`` of each handle ends it.

    Raises:
        ValueError: a name that is no linear layer, or :func:`require_valid`; nothing is attached then.
    """
    modules = linears(model, chosen)
    for how in chosen.values():
        require_valid(how)

    def rounding(how: Activations) -> Callable[..., Any]:
        return lambda _module, arguments: (quantize_activations(arguments[0], how), *arguments[1:])

    return [module.register_forward_pre_hook(rounding(chosen[name])) for name, module in modules.items()]


def linears(model: nn.Module, names: Collection[str]) -> dict[str, nn.Linear]:
    """The linear layers of these names.

    Raises:
        ValueError: a name that is none.
    """
    every = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    unknown = [name for name in names if name not in every]
    if unknown:
        raise ValueError(f"{unknown[0]} is no nn.Linear of {type(model).__name__}; such as {', '.join(list(every)[:3])} are")
    return {name: every[name] for name in names}


@torch.inference_mode()
def watch_inputs(
    model: PreTrainedModel,
    names: Collection[str],
    windows: Int[Tensor, "windows length"],
    take: Callable[[str, Tensor], None],
    *,
    real: Bool[Tensor, "windows length"] | None = None,
) -> None:
    """Run the body of the model over the windows and hand ``take`` what each named module reads at real tokens: float32 [tokens, channels].

    Args:
        names: modules whose first argument has one row a token; of a module that is no part of the model's body nothing comes.
        real: False at padding, on either side; all tokens count when None.
    Raises:
        ValueError: no window, a window without a real token, or a model in training.
    """
    if not windows.numel():
        raise ValueError(f"windows has shape {list(windows.shape)}; at least one window of one token is needed to measure activations")
    if real is not None and not real.any(dim=1).all():
        raise ValueError("a window has no real token; leave it out")
    if model.training:
        raise ValueError(f"{type(model).__name__} is in training mode, where dropout changes activations; call model.eval() first")
    mask = torch.ones_like(windows, dtype=torch.bool) if real is None else real
    now = mask

    def watching(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, arguments: tuple[Any, ...], others: dict[str, Any]) -> None:
            values = arguments[0] if arguments else others["hidden_states"]
            take(name, values.reshape(-1, values.shape[-1])[now.flatten()].float())

        return hook

    handles = [model.get_submodule(name).register_forward_pre_hook(watching(name), with_kwargs=True) for name in names]
    try:
        for at in range(0, len(windows), BATCH):
            now = mask[at : at + BATCH].to(model.device)
            places = (now.long().cumsum(dim=1) - 1).clamp(min=0)
            padding = {} if bool(now.all()) else {"attention_mask": now.long(), "position_ids": places}
            model.base_model(input_ids=windows[at : at + BATCH].to(model.device), use_cache=False, **padding)
    finally:
        for handle in handles:
            handle.remove()


def _scale(least: Tensor, most: Tensor, how: Activations) -> tuple[Tensor, Tensor | None]:
    """Step and zero point of a range; the step is above 0."""
    tiny = torch.finfo(torch.float32).tiny
    least, most = least.clamp(max=0) * how.clip, most.clamp(min=0) * how.clip
    if how.format == "fp8_e4m3":
        return (torch.maximum(-least, most) / 448).clamp(min=tiny), None
    bits = BITS[how.format]
    if how.symmetric:
        return (torch.maximum(-least, most) / ((2**bits - 1) / 2)).clamp(min=tiny), None
    scale = ((most - least) / (2**bits - 1)).clamp(min=tiny)
    return scale, (-(2 ** (bits - 1)) - least / scale).round_()
