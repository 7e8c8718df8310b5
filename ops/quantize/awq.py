"""AWQ: scales of channels, and then ranges of groups, chosen by the error that rounding makes at the output of a module.

Not here: the rounding that follows, or the fold itself (``smooth.py``).
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from assay.ops.models import experts
from assay.ops.quantize.grid import Format, dequantize, groups, naming, quantize, require_fit
from assay.ops.quantize.sequential import Call, Stage, walk
from assay.ops.quantize.smooth import KINDS, NORMS, Pair, fold, pairs, tensors

STEPS = 20  # of α
UNCLIPPED = ("q_proj", "k_proj")  # their errors pass a softmax, which the error of the layer does not show
SMALLEST = 1e-4  # of a salience, relative to the largest


class Scaled(NamedTuple):
    """What the search found for one pair: ``alpha`` (None: no scale was better than 1), its scales, and mean squared errors of the output.

    ``error`` is that with the scales, ``unscaled`` that of rounding without; both over real tokens, in the output's unit squared.
    """

    alpha: float | None
    duo: bool
    scales: Float[Tensor, " scales"]
    error: float
    unscaled: float


class Awq(NamedTuple):
    """The scales that were folded, by pair; the share of each group's range to keep, by layer; and experts that no token reached."""

    pairs: dict[str, Scaled]
    shrink: dict[str, Float[Tensor, "blocks groups"]]
    unseen: tuple[str, ...]


@torch.no_grad()
def awq(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows length"],
    formats: Format | Mapping[str, Format],
    *,
    real: Bool[Tensor, "windows length"] | None = None,
    kinds: Collection[str] = KINDS,
    salience: Literal["activation", "weight"] = "activation",
    duo: Literal["off", "on", "both"] = "off",
    clip: bool = True,
    batch: int = 8,
) -> Awq:
    """Search the scales of each pair and fold them into the model, in place, and then the range of each layer; logits stay the same.

    Of each pair, with x̄ = mean |x| of a channel over real tokens and w̄ = mean over the rows of |w| relative to the largest of its row:

        s = x̄^α  or, duo,  x̄^α / w̄^(1 - α),    s ← s / √(max s · min s),    α = 0, 1/20, … 19/20

    and the s that makes ‖f(x; W) - f(x; Ŵ)‖² least, Ŵ = round(W s) / s, is kept if it is better than s = 1. f is all of self_attn for q, k
    and v, all of the MLP (or mixture) for gate and up, and the matrix alone for o and down. The weights are set back after each trial.

    Args:
        windows: token ids.
        formats: in which the weights will be rounded, one or by the name of the weight; a reader without a format is scaled and not
            rounded, and a pair without any is left.
        real: False at padding.
        kinds: of ``smooth.pairs``; v → o has one scale for the query heads that share a key-value head.
        salience: ``weight`` puts mean |w| of the column in the place of x̄: the control that shows what the activations are good for.
        clip: search ranges by :func:`output_mse` after the scales, of all layers but q and k.
        batch: windows a forward.
    Raises:
        ValueError: a format that does not fit (a note names the layer), no format at all, no window, or pairs that are not known.
    Source:
        Lin et al. 2023, §3.2, arXiv:2306.00978, and its published code for parents, normalization and clip; duo scaling is of a later
        library. Theirs compares o and down over the tokens, here by their Gram matrix XᵀX, which gives the same number over all of them.
        Theirs takes x̄ below 1e-4 as 1e-4 whatever the unit; here it is 1e-4 of the largest.
    """
    every, matrices = pairs(model, kinds), tensors(model)
    known = dict.fromkeys(experts.weights(model), formats) if isinstance(formats, Format) else dict(formats)
    _require(known, matrices)
    chosen = [pair for pair in every if any(name in known for name in pair.readers)]
    found: dict[str, Scaled] = {}
    shrink: dict[str, Tensor] = {}
    unseen: list[str] = []
    for stage in walk(model, windows, real=real, true_sequential=False, batch=batch):
        mine = [pair for pair in chosen if pair.name.startswith(f"{stage.name}.")]
        inputs = _Inputs(stage, grams={pair.readers[0] for pair in mine if pair.kind not in NORMS})
        unseen += [name for group in stage.groups for name in group if name not in inputs.count]
        for pair in mine:
            readers = {name: matrices[name] for name in pair.readers}
            calls = list(stage.calls(pair.parent)) if pair.kind in NORMS else []
            if pair.kind in NORMS:
                mean = _mean_input(calls)
            elif pair.readers[0] in inputs.count:
                mean = inputs.mean(pair.readers[0])
            else:
                continue
            if salience == "weight":
                mean = _columns(list(readers.values()), relative=False)
            found[pair.name] = _search(pair, readers, known, mean, calls, inputs, duo)
            fold(model, pair, found[pair.name].scales)
        if clip:
            after = _Inputs(stage, grams={name for name in stage.weights if name in known and not name.endswith(UNCLIPPED)})
            for name in after.grams:
                shrink[name] = output_mse(stage.weights[name], after.gram(name), known[name])
    return Awq(found, shrink, tuple(unseen))


def output_mse(
    weight: Float[Tensor, "rows cols"], gram: Float[Tensor, "cols cols"], format: Format, *, least: float = 0.5, steps: int = 20
) -> Float[Tensor, "blocks groups"]:
    """The share of each group's range that makes the error of the group's part of the output least, from 1 down to ``least``; of equal ones
    the largest.

    The error of a group is e G eᵀ with e = ŵ - w and G the part of XᵀX that its columns see.

    Args:
        gram: XᵀX of what the layer reads, up to a factor.
        steps: one step is (1 - least) / steps.
    Raises:
        ValueError: no step, ``least`` not inside 0 to 1, or a format that does not fit.
    Source:
        Lin et al. 2023, §3 and published code, arXiv:2306.00978, which takes at most 512 tokens in place of XᵀX of all.
    """
    if steps < 1 or not 0 < least < 1:
        raise ValueError(f"steps={steps} from 1 to least={least} is no search; at least one step, to a share above 0 and below 1, is")
    require_fit(weight.shape, format)
    plain, weight = format._replace(nested=False), weight.float()
    each = groups(weight, plain).shape[-1]
    parts = torch.stack([gram[at : at + each, at : at + each].float() for at in range(0, len(gram), each)])
    best = torch.ones_like(groups(weight, plain).amax(dim=(1, 3)))
    lowest = torch.full_like(best, torch.inf)
    for step in range(steps + 1):
        shrink = torch.full_like(best, 1 - (1 - least) * step / steps)
        error = groups(dequantize(quantize(weight, plain, shrink=shrink)) - weight, plain)
        columns = error.permute(2, 0, 1, 3).flatten(1, 2)  # groups, rows, columns
        total = ((columns @ parts) * columns).sum(dim=-1).view(len(parts), len(best), -1).sum(dim=-1).T
        better = total < lowest
        best, lowest = torch.where(better, shrink, best), torch.where(better, total, lowest)
    return best


def scales_of(
    salience: Float[Tensor, " scales"], alpha: float, weights: Float[Tensor, " scales"] | None = None
) -> Float[Tensor, " scales"]:
    """``salience``^α, over ``weights``^(1 - α) if given, with √(max · min) = 1: positive and finite whatever comes, float32.

    Channels of no salience count as 1e-4 of the largest; with none at all the scales are 1.
    """
    scales = _positive(salience).pow(alpha)
    if weights is not None:
        scales = scales / _positive(weights).pow(1 - alpha)
    return scales / (scales.max() * scales.min()).sqrt()


def _positive(values: Tensor) -> Tensor:
    values = values.float().abs()
    largest = values.max()
    return (values / largest).clamp(min=SMALLEST) if largest > 0 else torch.ones_like(values)


class _Inputs:
    """What the layers of a stage read: number of tokens, Σ|x|, and XᵀX of those in ``grams``; layers that read one input share them."""

    def __init__(self, stage: Stage, grams: Collection[str]) -> None:
        self.count: dict[str, int] = {}
        self.sums: dict[str, Tensor] = {}
        self.grams: dict[str, Tensor] = {}
        for group, taken in stage.inputs():
            values = taken.float()
            total = values.abs().sum(dim=0)
            wanted = [name for name in group if name in grams]
            gram = values.T @ values if wanted else None
            new = group[0] not in self.count
            for name in group:
                self.count[name] = len(values) + self.count.get(name, 0)
                self.sums[name] = total if new else self.sums[name] + total
            if gram is not None:
                shared = gram if new else self.grams[wanted[0]].add_(gram)
                self.grams.update(dict.fromkeys(wanted, shared))

    def mean(self, name: str) -> Tensor:
        return self.sums[name] / self.count[name]

    def gram(self, name: str) -> Tensor:
        return self.grams[name] / self.count[name]


def _search(
    pair: Pair, readers: dict[str, Tensor], formats: Mapping[str, Format], mean: Tensor, calls: list[Call], inputs: _Inputs, duo: str
) -> Scaled:
    """The scales of least error among all trials, and none."""
    original = {name: weight.clone() for name, weight in readers.items()}
    reference = [call.output().float() for call in calls]

    def error(scales: Tensor) -> float:
        spread = pair.spread(scales)
        rounded = {
            name: dequantize(quantize(weight.float() * spread, formats[name])) / spread if name in formats else weight
            for name, weight in original.items()
        }
        if not calls:
            (name,) = readers
            change = rounded[name] - original[name].float()
            return float(((change @ inputs.gram(name)) * change).sum() / len(change))
        with _trial(readers, original, rounded):
            differences = [(call.output().float() - before).square() for call, before in zip(calls, reference, strict=True)]
        return float(sum(float(each.sum(dtype=torch.float64)) for each in differences) / sum(each.numel() for each in differences))

    salience = pair.gather(mean, "mean")
    weights = pair.gather(_columns(list(original.values()), relative=True), "mean")
    unscaled = error(torch.ones_like(salience))
    best = Scaled(None, False, torch.ones_like(salience), unscaled, unscaled)
    for with_weights in {"off": (False,), "on": (True,), "both": (False, True)}[duo]:
        for step in range(STEPS):
            scales = scales_of(salience, step / STEPS, weights if with_weights else None)
            found = error(scales)
            if found < best.error:
                best = Scaled(step / STEPS, with_weights, scales, found, unscaled)
    return best


@contextmanager
def _trial(readers: dict[str, Tensor], original: dict[str, Tensor], rounded: dict[str, Tensor]) -> Iterator[None]:
    try:
        for name, weight in readers.items():
            weight.copy_(rounded[name])
        yield
    finally:
        for name, weight in readers.items():
            weight.copy_(original[name])


def _columns(weights: list[Tensor], *, relative: bool) -> Float[Tensor, " channels"]:
    """mean |w| of each column over the rows of all, each row relative to its largest if asked."""
    rows = torch.cat([weight.float().abs() for weight in weights])
    if relative:
        rows = rows / rows.amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return rows.mean(dim=0)


def _mean_input(calls: list[Call]) -> Float[Tensor, " channels"]:
    """mean |x| of what a module is given, over real tokens."""
    sums, count = torch.zeros(1), 0
    for call in calls:
        values = call.args[0] if call.args else call.kwargs["hidden_states"]
        values = values.reshape(-1, values.shape[-1])
        values = (values if call.real is None else values[call.real.flatten()]).float().abs()
        sums, count = sums.to(values.device) + values.sum(dim=0), count + len(values)
    return sums / count


def _require(formats: Mapping[str, Format], matrices: Mapping[str, Tensor]) -> None:
    unknown = [name for name in formats if name not in matrices]
    if unknown or not formats:
        raise ValueError(
            f"{unknown[0] if unknown else 'no weight'} has a format and is not in the blocks; such as {next(iter(matrices))} are"
        )
    for name, format in formats.items():
        with naming(name, matrices[name]):
            require_fit(tuple(matrices[name].shape), format)
