"""Facts that say how hard a model is to quantize, as plain numbers: outliers of its activations, and what rounding did to its weights.

Not here: changing anything, or errors at the output of a model (``ops/evaluate``).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from assay.ops.models import structure
from assay.ops.quantize import elements
from assay.ops.quantize.activations import watch_inputs
from assay.ops.quantize.grid import Quantized, dequantize


class Massive(NamedTuple):
    """One massive activation: where it is, its value, and that over the standard deviation and over the median size of its states."""

    token: int
    channel: int
    value: float
    sigmas: float
    medians: float


class MassiveAt(NamedTuple):
    """Massive activations of the residual stream that enters block ``layer``: its window, and positions there from 0."""

    layer: int
    window: int
    positions: tuple[int, ...]
    channels: tuple[int, ...]
    largest: Massive


class Entering(NamedTuple):
    """The residual stream that enters a block: its largest activation, the window of that, and how many are massive in all windows."""

    largest: Massive
    window: int
    massive: int


class OutlierChannels(NamedTuple):
    """Channels whose largest size is above the bounds, that size over the median channel's at worst, and their share, 0 to 1."""

    channels: tuple[int, ...]
    worst: float
    share: float


def massive(states: Float[Tensor, "tokens channels"], *, above: float = 100.0, times_median: float = 1000.0) -> list[Massive]:
    """Activations both above ``above`` in size and ``times_median`` times the median size of all of ``states``, largest first.

    Args:
        states: of one layer and one text, since the median is theirs.
    Source:
        Sun et al. 2024, §2, arXiv:2402.17762.
    """
    size = states.double().abs()
    found = ((size > above) & (size > times_median * _median(size))).nonzero().tolist()
    return sorted(_described(states, found), key=lambda one: -abs(one.value))


def largest_activation(states: Float[Tensor, "tokens channels"]) -> Massive:
    """The activation of the largest size, massive or not; of equal ones the first.

    Args:
        states: of one layer and one text, as for :func:`massive`.
    """
    return _described(states, [divmod(int(states.abs().argmax()), states.shape[1])])[0]


def massive_activations(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows length"],
    *,
    real: Bool[Tensor, "windows length"] | None = None,
    above: float = 100.0,
    times_median: float = 1000.0,
) -> list[MassiveAt]:
    """:func:`massive` in the residual stream before each block, window by window; layers and windows without any are left out.

    Raises:
        ValueError: no window, or one without a real token.
    """
    found: list[MassiveAt] = []

    def take(layer: int, window: int, positions: list[int], states: Tensor) -> None:
        every = massive(states, above=above, times_median=times_median)
        if every:
            places = sorted({positions[one.token] for one in every})
            largest = every[0]._replace(token=positions[every[0].token])
            channels = sorted({one.channel for one in every})
            found.append(MassiveAt(layer, window, tuple(places), tuple(channels), largest))

    _watch_stream(model, windows, real, take)
    return sorted(found, key=lambda one: (one.layer, one.window))


def residual_stream(
    model: PreTrainedModel, windows: Int[Tensor, "windows length"], *, real: Bool[Tensor, "windows length"] | None = None
) -> dict[str, Entering]:
    """What enters each block, by the block's name: its largest activation over all windows, and how many are :func:`massive`.

    Raises:
        ValueError: no window, or one without a real token.
    """
    found: dict[int, Entering] = {}

    def take(layer: int, window: int, positions: list[int], states: Tensor) -> None:
        largest, known = largest_activation(states), found.get(layer)
        count = len(massive(states)) + (known.massive if known else 0)
        if known is None or abs(largest.value) > abs(known.largest.value):
            known = Entering(largest._replace(token=positions[largest.token]), window, count)
        found[layer] = known._replace(massive=count)

    _watch_stream(model, windows, real, take)
    path = structure.blocks_path(model)
    return {f"{path}.{layer}": found[layer] for layer in sorted(found)}


def largest_inputs(
    model: PreTrainedModel, windows: Int[Tensor, "windows length"], *, real: Bool[Tensor, "windows length"] | None = None
) -> dict[str, Float[Tensor, " channels"]]:
    """max |x| of each input channel of each linear layer of the blocks, over real tokens, float32."""
    found: dict[str, Tensor] = {}

    def take(name: str, values: Tensor) -> None:
        largest = values.abs().amax(dim=0)
        found[name] = torch.maximum(found[name], largest) if name in found else largest

    watch_inputs(model, list(structure.block_linears(model)), windows, take, real=real)
    return found


def outlier_channels(largest: Float[Tensor, " channels"], *, above: float = 6.0, times_median: float = 0.0) -> OutlierChannels:
    """Channels whose largest size is above ``above`` and above ``times_median`` times that of the median channel.

    Args:
        largest: max |x| of each channel, as :func:`largest_inputs` gives it.
    Source:
        Dettmers et al. 2022 (LLM.int8), §4, arXiv:2208.07339, whose bound is 6; it also asks for a share of the layers and of the tokens.
    """
    size = largest.double().abs()
    median = float(size.median())
    channels = ((size > above) & (size > times_median * median)).nonzero()[:, 0].tolist()
    worst = float(size.max()) / median if median else (math.inf if float(size.max()) else 1.0)
    return OutlierChannels(tuple(channels), worst, len(channels) / len(size))


def snr_db(weight: Float[Tensor, "*shape"], rounded: Float[Tensor, "*shape"]) -> float:
    """10 log10 of ‖w‖² / ‖w - ŵ‖², in decibels: 6.02 more with each bit of an even step. Infinite if nothing changed, and
    -infinite if only ŵ is not 0.
    """
    signal = float(weight.double().square().sum())
    noise = float((weight.double() - rounded.double()).square().sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def largest_sigmas(weight: Float[Tensor, "*shape"]) -> float:
    """max |w| in root mean squares of w: a Gaussian matrix of 10⁶ weights has about 4.9. 0 for a matrix of zeros."""
    numbers = weight.double()
    deviation = float(numbers.square().mean().sqrt())
    return float(numbers.abs().max()) / deviation if deviation else 0.0


def clipped_share(weight: Float[Tensor, "rows cols"], quantized: Quantized) -> float:
    """The share of weights, 0 to 1, beyond the last code of their group by more than rounding explains.

    That is half a step beyond for integers and three values; of tables and small floats anything beyond their largest value.
    """
    format = quantized.format
    if format.element in ("int", "ternary"):
        low, high = (format.low, format.high) if format.element == "int" else (-1, 1)
        ends, half = torch.tensor([low, high], dtype=torch.int8), 0.5 / (high - low)
    else:
        largest = float(elements.LARGEST[format.element])
        ends, half = elements.encode(torch.tensor([-largest, largest]), format.element), 0.0
    first, last = (dequantize(quantized._replace(codes=code.expand_as(quantized.codes).contiguous())) for code in ends.to(weight.device))
    beyond = (half + 1e-5) * (last - first)
    numbers = weight.float()
    return float(((numbers < first - beyond) | (numbers > last + beyond)).double().mean())


def _watch_stream(
    model: PreTrainedModel, windows: Tensor, real: Tensor | None, take: Callable[[int, int, list[int], Tensor], None]
) -> None:
    """Hand ``take`` the layer, the window, the positions of its real tokens and the residual stream there [tokens, channels], window by window."""
    names = [f"{structure.blocks_path(model)}.{layer}" for layer in range(len(structure.blocks(model)))]
    if not len(windows):
        raise ValueError("no window was given; at least one window of one token is needed to measure activations")
    for window in range(len(windows)):
        mask = None if real is None else real[window : window + 1]
        positions = list(range(windows.shape[1])) if mask is None else mask[0].nonzero()[:, 0].tolist()

        def with_place(name: str, states: Tensor, window: int = window, positions: list[int] = positions) -> None:
            take(names.index(name), window, positions, states)

        watch_inputs(model, names, windows[window : window + 1], with_place, real=mask)


def _median(size: Tensor) -> float:
    return max(float(size.median()), torch.finfo(torch.float64).tiny)


def _described(states: Tensor, places: list[tuple[int, int]]) -> list[Massive]:
    """The activations at ``places``, with how they stand out of ``states``."""
    numbers = states.double()
    median, deviation = _median(numbers.abs()), max(float(numbers.std(correction=0)), torch.finfo(torch.float64).tiny)
    values = [(token, channel, float(numbers[token, channel])) for token, channel in places]
    return [Massive(token, channel, value, abs(value) / deviation, abs(value) / median) for token, channel, value in values]
