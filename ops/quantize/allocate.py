"""A format for each layer within a budget of bits: what each would do to the model's output, measured, and the choice of the least sum.

Not here: how a weight is rounded (``grid.py``), or rounding the model once the formats are chosen (``rtn.py``, ``gptq.py``).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import eye_array, kron
from torch import Tensor, nn
from transformers import PreTrainedModel

from assay.ops.evaluate.divergence import BLOCK, Head, check_head, final_hidden, head_of
from assay.ops.models import experts, structure
from assay.ops.quantize.gptq import ActOrder, gptq_together
from assay.ops.quantize.grid import Format, quantize, require_fit
from assay.ops.quantize.hessian import gather
from assay.ops.quantize.layout import Packed, stored_bytes
from assay.ops.quantize.sequential import walk

Way = Callable[[Sequence[str], Sequence[Tensor], Format], Sequence[Packed]]  # what the weights of a unit are stored as, by their names

TRACED = 8  # tokens of the forward that shows which weights read one input
LARGEST_COST = (
    1e4  # what the largest KL is scaled to, so that the solver's tolerances, which are absolute, are small beside any that counts
)


class Unit(NamedTuple):
    """Weights that take one format together; ``kl`` (nats per token) and ``bits`` (as stored, of all of them) have an entry a format."""

    names: tuple[str, ...]
    weights: int
    kl: tuple[float, ...]
    bits: tuple[int, ...]

    @property
    def label(self) -> str:
        """Such as ``model.layers.0.mlp.gate_proj+up_proj``."""
        first, *more = self.names
        return "+".join([first, *(name.rpartition(".")[2] for name in more)])


class Harm(NamedTuple):
    """What each format would do to each unit of a model, if it alone were rounded."""

    formats: tuple[Format, ...]
    units: tuple[Unit, ...]


class Chosen(NamedTuple):
    """The format of each layer by name, and what to say about the choice, as JSON."""

    formats: dict[str, Format]
    summary: dict[str, Any]


def to_nearest(names: Sequence[str], weights: Sequence[Tensor], format: Format) -> list[Packed]:
    """Each weight rounded to nearest."""
    return [quantize(weight, format) for weight in weights]


@torch.no_grad()
def by_gptq(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows length"],
    *,
    act_order: ActOrder = "static",
    damping: float = 0.01,
    keep_zeros: bool = False,
) -> Way:
    """Each unit rounded by GPTQ on the inputs that the unrounded model gives it; of experts that no token reached, to nearest.

    Keeps the Hessian of each input of ``model``: 4 · width² bytes of each, of all blocks at once.
    """
    with _in_float32(model):
        hessians = {
            group: found.matrix() for stage in walk(model, windows, true_sequential=False) for group, found in gather(stage).items()
        }

    def rounded(names: Sequence[str], weights: Sequence[Tensor], format: Format) -> list[Packed]:
        hessian = hessians.get(tuple(names))
        if hessian is None:
            return to_nearest(names, weights, format)
        solved = gptq_together(weights, hessian, format, act_order=act_order, damping=damping, keep_zeros=keep_zeros)
        return [each.quantized for each in solved]

    return rounded


@torch.no_grad()
def sensitivities(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows length"],
    formats: Sequence[Format],
    *,
    way: Way = to_nearest,
    together: bool = True,
    batch: int = 2,
    chunk: int = 128,
) -> Harm:
    """Mean KL(model‖model with one unit rounded) of the next-token distributions, over all positions of ``windows``.

    The model computes in float32 meanwhile, and is afterwards as it was. Only the blocks from the unit's own on are run anew; what enters each block is
    kept, and so are the model's own distributions, of ``batch`` windows at a time: 4 · batch · length · (vocabulary + layers · hidden) bytes.

    Args:
        windows: token ids without padding.
        formats: at least two, each once.
        way: how a unit is rounded: as it will be when the formats are chosen. It is asked once a unit, format and ``batch`` windows.
        together: layers that read one input (q, k and v; gate and up; of each expert too) are one unit, since engines store them as one matrix.
        batch: windows a forward.
        chunk: positions whose logits exist at a time.
    Raises:
        ValueError: formats that do not fit a layer, before anything is run; no window; a model in training mode; or a KL that is not finite.
    Source:
        Cai et al. 2020 (ZeroQ), §3.2, arXiv:2001.00281. Unlike there, a unit may be several layers, the texts are real, and the KL is that of each token.
    """
    formats = _require(model, formats)
    units = [
        (stage.block, names)
        for stage in walk(model, windows[:1, :TRACED], true_sequential=False)
        for group in stage.groups
        for names in ([group] if together else [(name,) for name in group])
    ]
    sums, bits = torch.zeros(len(units), len(formats), dtype=torch.float64), np.zeros((len(units), len(formats)), dtype=np.int64)
    with _in_float32(model):
        weights, head = experts.weights(model), head_of(model)
        check_head(model, head, windows[0].to(model.device))
        for at in range(0, len(windows), batch):
            ids = windows[at : at + batch].to(model.device)
            states, final = _states(model, ids)
            log_p = _log_probabilities(final, head, chunk)
            for row, (block, names) in enumerate(units):
                for column, format in enumerate(formats):
                    with _rounded(names, [weights[name] for name in names], format, way) as stored, _starting(model, block, states[block]):
                        sums[row, column] += _kl_sum(log_p, _final(model, ids), head, chunk)
                        bits[row, column] = 8 * stored
    kl = sums / windows.numel()
    for row, column in (~kl.isfinite()).nonzero().tolist():
        raise ValueError(
            f"the KL with {', '.join(units[row][1])} rounded to {formats[column].name} is {float(kl[row, column])}, and no number can be weighed "
            "against it; leave that format out"
        )
    sizes = {name: weight.numel() for name, weight in experts.weights(model).items()}
    return Harm(
        formats,
        tuple(
            Unit(names, sum(sizes[name] for name in names), tuple(kl[row].tolist()), tuple(bits[row].tolist()))
            for row, (_, names) in enumerate(units)
        ),
    )


def allocate(harm: Harm, *, budget: float) -> Chosen:
    """The format of each unit with the least sum of KLs whose bits are within the budget: exactly, as a multiple-choice knapsack.

        minimise Σ_u KL_u(f_u)   with   Σ_u bits_u(f_u) ≤ budget · Σ_u weights_u

    The sum is the KL that the model would have if units did not act on each other: a prediction, to be held against a measurement.

    Args:
        budget: mean bits of a weight over all units, scales and zero points included. Above what the largest formats take it binds nothing, and each unit
            has its least harmful one.
    Returns:
        Of the summary: ``bits`` is the mean reached, ``predicted_kl_nats`` the sum, ``units`` counts them by format, ``uniform`` has each format that
        would be within the budget for all, ``chosen`` and ``sensitivities`` (nats per token) are by unit, and ``binds`` says whether the budget did.
    Raises:
        ValueError: a budget below the bits of the smallest formats, or no units.
    Source:
        The choice by integer programming: Yao et al. 2021 (HAWQ-V3), §3.4, arXiv:2011.10680. Solved by HiGHS, through SciPy.
    """
    if not harm.units:
        raise ValueError("there is no unit to choose a format for; sensitivities() finds those of a model")
    labels = _labels(harm.formats)
    kl, bits = np.array([unit.kl for unit in harm.units]), np.array([unit.bits for unit in harm.units], dtype=np.int64)
    weights = sum(unit.weights for unit in harm.units)
    limit, smallest = math.floor(round(budget * weights, 3)), int(bits.min(axis=1).sum())
    if smallest > limit:
        raise ValueError(
            f"a budget of {budget:g} bits a weight is below the {smallest / weights:.4g} that the smallest of {', '.join(labels)} take, scales "
            "included; a larger budget or a smaller format works"
        )
    chosen = _knapsack(kl, bits, limit)
    rows = np.arange(len(chosen))
    totals = bits.sum(axis=0)
    names = [unit.label for unit in harm.units]
    summary = {
        "budget_bits": budget,
        "binds": int(bits[rows, kl.argmin(axis=1)].sum()) > limit,
        "bits": int(bits[rows, chosen].sum()) / weights,
        "predicted_kl_nats": math.fsum(kl[rows, chosen]),
        "units": dict(Counter(labels[each] for each in sorted(chosen.tolist()))),
        "uniform": {
            label: {"bits": int(total) / weights, "predicted_kl_nats": math.fsum(column)}
            for label, total, column in zip(labels, totals, kl.T, strict=True)
            if total <= limit
        },
        "chosen": {name: labels[each] for name, each in zip(names, chosen.tolist(), strict=True)},
        "sensitivities": {name: dict(zip(labels, unit.kl, strict=True)) for name, unit in zip(names, harm.units, strict=True)},
    }
    formats = {name: harm.formats[each] for unit, each in zip(harm.units, chosen.tolist(), strict=True) for name in unit.names}
    return Chosen(formats, summary)


def _knapsack(kl: np.ndarray, bits: np.ndarray, limit: int) -> np.ndarray:
    """The column of each row with the least sum of ``kl`` whose sum of ``bits`` is at most ``limit``."""
    units, formats = kl.shape
    step = int(np.gcd.reduce(bits, axis=None))  # the solver's tolerance is absolute: small whole numbers stay whole
    largest = float(np.abs(kl).max())
    found = milp(
        (kl * (LARGEST_COST / largest) if largest else kl).ravel(),
        integrality=np.ones(kl.size),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(kron(eye_array(units), np.ones((1, formats))), 1, 1),
            LinearConstraint(bits.reshape(1, -1) // step, ub=limit // step),
        ],
        options={"mip_rel_gap": 0.0},
    )
    if not found.success:
        raise RuntimeError(f"HiGHS did not solve the choice of {units} units among {formats} formats: {found.message}")
    return found.x.reshape(units, formats).argmax(axis=1)


def _require(model: PreTrainedModel, formats: Sequence[Format]) -> tuple[Format, ...]:
    if len(formats) < 2 or len(set(formats)) < len(formats):
        raise ValueError(
            f"got {', '.join(format.name for format in formats) or 'no format'}; at least two formats, each once, were expected to choose among"
        )
    for name, weight in experts.weights(model).items():
        for format in formats:
            try:
                require_fit(tuple(weight.shape), format)
            except ValueError as error:
                error.add_note(f"{format.name} for {name} ({list(weight.shape)})")
                raise
    return tuple(formats)


def _labels(formats: Sequence[Format]) -> list[str]:
    """Formats by name; where that is not enough with their groups, or with everything."""
    ways = (
        [format.name for format in formats],
        [f"{format.name} g{format.group_size}" for format in formats],
        [" ".join(map(str, format)) for format in formats],
    )
    return next(way for way in ways if len(set(way)) == len(way))


@contextmanager
def _in_float32(model: PreTrainedModel) -> Iterator[None]:
    """The parameters in float32 inside; afterwards they are the very tensors that they were. Buffers, which know their own dtype, are left."""
    before = [(parameter, parameter.data) for parameter in model.parameters()]
    try:
        for parameter, data in before:
            parameter.data = data.float()
        yield
    finally:
        for parameter, data in before:
            parameter.data = data


@contextmanager
def _rounded(names: Sequence[str], weights: Sequence[Tensor], format: Format, way: Way) -> Iterator[int]:
    """The weights rounded inside; gives the bytes that they are stored in."""
    before = [(weight, weight.clone()) for weight in weights]
    try:
        stored = 0
        for (weight, _), packed in zip(before, way(names, weights, format), strict=True):
            weight.copy_(packed.dense())
            stored += stored_bytes(packed)
        yield stored
    finally:
        for weight, original in before:
            weight.copy_(original)


@contextmanager
def _starting(model: PreTrainedModel, index: int, states: Tensor) -> Iterator[None]:
    """The model runs from block ``index`` on inside, which is given ``states`` whatever the text."""
    skipped: list[nn.Module] = list(structure.blocks(model))[:index]
    for block in skipped:
        block.forward = lambda *_, **__: states
    try:
        yield
    finally:
        for block in skipped:
            del block.forward  # the class's own shows again


def _states(model: PreTrainedModel, ids: Int[Tensor, "windows length"]) -> tuple[list[Tensor], Float[Tensor, "tokens hidden"]]:
    """What enters each block, and what the head is given."""
    entering: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering.append(args[0] if args else kwargs["hidden_states"])

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in structure.blocks(model)]
    try:
        return entering, _final(model, ids)
    finally:
        for handle in handles:
            handle.remove()


def _final(model: PreTrainedModel, ids: Int[Tensor, "windows length"]) -> Float[Tensor, "tokens hidden"]:
    return final_hidden(model, ids, torch.ones_like(ids)).flatten(0, 1)


def _log_probabilities(hidden: Float[Tensor, "tokens hidden"], head: Head, chunk: int) -> Float[Tensor, "tokens vocab"]:
    found = torch.empty(len(hidden), len(head.weight), device=hidden.device)
    for states, part in zip(hidden.split(chunk), found.split(chunk), strict=True):
        part -= head.logits(states, part).logsumexp(dim=-1, keepdim=True)
    return found


def _kl_sum(log_p: Float[Tensor, "tokens vocab"], hidden: Float[Tensor, "tokens hidden"], head: Head, chunk: int) -> float:
    """Σ over tokens of KL(p‖q), nats; Σ (q - p), which is 0, cancels the rounding of the normalisers (see ``divergence.per_token``)."""
    buffer = torch.empty(min(chunk, len(hidden)), len(head.weight), device=hidden.device)
    rows = max(1, BLOCK // len(head.weight)) if hidden.device.type == "cpu" else chunk
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for states, expected in zip(hidden.split(chunk), log_p.split(chunk), strict=True):
        logits = head.logits(states, buffer[: len(states)])
        for log_q, log_p_of in zip(logits.split(rows), expected.split(rows), strict=True):
            log_q = log_q.log_softmax(dim=-1)
            p, ratio = log_p_of.exp(), log_p_of - log_q
            total += (torch.linalg.vecdot(p, ratio) + log_q.exp_().sub_(p).sum(dim=-1)).sum(dtype=torch.float64)
    return float(total)
