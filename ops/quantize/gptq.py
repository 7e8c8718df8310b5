"""GPTQ: rounding column after column, each error made up for by the columns that follow, as the layer's inputs ask.

Not here: the walk through a model (``sequential.py``), the Hessian (``hessian.py``), or rounding to nearest (``grid.py``).
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from assay.ops.models import experts, structure
from assay.ops.quantize import elements, grid
from assay.ops.quantize.grid import Format, Quantized, Scales
from assay.ops.quantize.hessian import cholesky, full_precision, gather
from assay.ops.quantize.rtn import Rounded
from assay.ops.quantize.sequential import walk

ActOrder = Literal["none", "static", "index"]
Shrink = Callable[[Tensor, Format], Tensor | float] | Tensor | float
ESCALATIONS = 4  # dampings tried, each ten times the one before


class Solved(NamedTuple):
    """A rounded weight; its output error tr((w - ŵ) H (w - ŵ)ᵀ); the damping that was used; and whether rounding to nearest had to do."""

    quantized: Quantized
    error: float
    damping: float
    fallback: bool


def gptq(
    weight: Float[Tensor, "rows cols"],
    hessian: Float[Tensor, "cols cols"],
    format: Format,
    *,
    act_order: ActOrder = "none",
    damping: float = 0.01,
    block: int = 32,
    shrink: Shrink = 1.0,
    keep_zeros: bool = False,
) -> Solved:
    """Round a weight in ``format`` so that its *output* on the inputs behind ``hessian`` changes little.

    With H = R Rᵀ, R upper triangular, the best that column j can do about the errors of the columns before it is

        w'_j = w_j + Σ_{i<j} (w_i - ŵ_i) R_ij / R_jj        ŵ_j = nearest to w'_j

    Args:
        hessian: 2 XᵀX, or a multiple.
        act_order: ``none`` goes from left to right, and takes a group's scales from its columns as they are when it is reached. ``static`` takes the
            columns in order of falling H_jj, with scales of the unchanged weight. ``index`` takes that order too, and groups the columns in it, so that
            the group of each column is stored (``Quantized.order``), unless a row is one group. Scales that are nested or of the whole tensor are
            taken before the first column in any case.
        damping: share of the mean of the diagonal that is added to the diagonal; ten times as much if the factorization fails, and so on.
        block: columns rounded one by one before a matrix product brings the others up to date. Of no influence on the result but its rounding.
        shrink: of each group's range; or how to find it from the columns of a group.
        keep_zeros: weights that are 0 stay so (a pruned weight's mask); what they would have made up for goes on to the columns after them.
    Returns:
        The codes and what they cost. If no damping tried makes H positive definite, the weight rounded to nearest, and ``fallback``.
    Raises:
        ValueError: H is zero, not finite or of another width; or a format that does not fit.
    Source:
        Frantar et al. 2023, arXiv:2210.17323, in the form of Chee et al. 2023, §4.2, arXiv:2307.13304, who show both to be one: R takes one Cholesky
        factorization of the reversed matrix, where the inverse and its factor take three. Columns that are always zero keep out of the mean of the
        diagonal and are rounded to nearest; the original sets them to zero. Blocks halve recursively, rather than being 128 wide.
    """
    return gptq_together(
        [weight], hessian, format, act_order=act_order, damping=damping, block=block, shrinks=[shrink], keep_zeros=keep_zeros
    )[0]


@torch.no_grad()
def gptq_together(
    weights: Sequence[Tensor],
    hessian: Float[Tensor, "cols cols"],
    format: Format,
    *,
    act_order: ActOrder = "none",
    damping: float = 0.01,
    block: int = 32,
    shrinks: Sequence[Shrink] | None = None,
    keep_zeros: bool = False,
) -> list[Solved]:
    """:func:`gptq` of several weights that read one input, at the cost of one factorization and one loop: rows do not depend on each other."""
    shrinks = shrinks or [1.0] * len(weights)
    weights = [weight.float() for weight in weights]
    for weight in weights:
        _check(weight, hessian, format, act_order)
    order = None if act_order == "none" else hessian.diagonal().argsort(descending=True, stable=True)
    with full_precision():
        factor = factorize(hessian.float() if order is None else hessian.float()[order][:, order], damping)
        if factor is None:
            return [_fallback(weight, hessian, format, shrink, damping) for weight, shrink in zip(weights, shrinks, strict=True)]
        rounding = _Rounding(weights, format, shrinks, order, act_order, block, keep_zeros)
        _solve(rounding, factor.feedback, block)
    errors = rounding.errors(factor)
    return [Solved(rounding.quantized(part), error, factor.damping, False) for part, error in enumerate(errors)]


class Factor(NamedTuple):
    """Of H = R Rᵀ: R / diag R transposed, less its diagonal of ones; squares of diag R in the unit of H; and the rest that H was given to be positive."""

    feedback: Float[Tensor, "cols cols"]
    pivots: Float[Tensor, " cols"]
    added: Float[Tensor, " cols"]
    damping: float


def _check(weight: Tensor, hessian: Tensor, format: Format, act_order: str) -> None:
    rows, cols = weight.shape
    grid.require_fit((rows, cols), format)
    if hessian.shape != (cols, cols):
        raise ValueError(f"the Hessian is {list(hessian.shape)} and the weight {[rows, cols]}; {[cols, cols]} was expected")
    if act_order == "index" and format.block_rows != 1 and format.group_size > 0:
        raise ValueError(f"act_order: index with blocks of {format.block_rows} rows cannot be stored; static or none can")


def factorize(hessian: Float[Tensor, "cols cols"], damping: float) -> Factor | None:
    """R of H and its damping, which grows until there is one; None where none tried is enough. Columns without input count as independent."""
    diagonal = hessian.diagonal()
    if not diagonal.isfinite().all():  # they bound the others
        raise ValueError("the Hessian is not finite: the layer's inputs overflow or are NaN; run the model in float32 or bfloat16")
    dead = diagonal <= 0
    if dead.all():
        raise ValueError(
            "the Hessian is zero: no token reached this layer, or only zeros; calibrate on text that reaches it, or use a method that reads none"
        )
    mean = diagonal[~dead].mean()
    scaled = hessian.flip(0, 1).div_(mean)
    scaled[dead.flip(0)], scaled[:, dead.flip(0)] = 0, 0
    before: Tensor | float = 0.0
    for _ in range(ESCALATIONS):
        added = torch.where(dead, 1.0, damping)
        scaled.diagonal().add_((added - before).flip(0))
        lower = cholesky(scaled)
        if lower is not None:
            feedback = lower.T.flip(0, 1).contiguous()  # R, transposed
            roots = feedback.diagonal().clone()
            feedback /= roots[:, None]
            feedback.diagonal().zero_()
            return Factor(feedback, roots.square() * mean, added * mean, damping)
        before, damping = added, damping * 10
    return None


def _fallback(weight: Tensor, hessian: Tensor, format: Format, shrink: Shrink, damping: float) -> Solved:
    quantized = grid.quantize(weight, format, shrink=shrink(weight, format) if callable(shrink) else shrink)
    lost = weight - grid.dequantize(quantized)
    return Solved(quantized, float(((lost @ hessian.float()) * lost).sum()), damping * 10 ** (ESCALATIONS - 1), True)


class _Rounding:
    """Weights below each other, transposed, so that a column of theirs lies in one piece; columns in the order in which they are rounded.

    ``values`` are w', the columns with what they make up for, and ``lost`` is w; once rounded, to ``codes``, they are w' - ŵ and w - ŵ. ``fixed`` stay 0.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        format: Format,
        shrinks: Sequence[Shrink],
        order: Int[Tensor, " cols"] | None,
        act_order: str,
        block: int,
        keep_zeros: bool,
    ) -> None:
        whole = (weights[0] if len(weights) == 1 else torch.cat(list(weights))).T
        cols = len(whole)
        self.format, self.order, self.act_order, self.shrinks = format, order, act_order, shrinks
        self.values = whole.clone(memory_format=torch.contiguous_format) if order is None else whole[order]
        self.lost, self.codes = self.values.clone(), torch.empty_like(self.values, dtype=torch.int8)
        self.fixed = self.values == 0 if keep_zeros else None
        self.scratch = self.values.new_empty(block + 1, whole.shape[1])
        ends = torch.tensor([len(weight) for weight in weights]).cumsum(0).tolist()
        self.parts = [slice(end - len(weight), end) for end, weight in zip(ends, weights, strict=True)]
        self.group_size = format.group_size if format.group_size > 0 else cols
        self.at_once = act_order == "static" or format.nested or format.group_size == 0  # all scales before the first column
        columns = torch.arange(cols) if order is None or act_order == "index" else order.cpu()
        self.group_of: list[int] = (columns // self.group_size).tolist()
        self.scales: list[list[Scales]] = [[] for _ in weights]
        self.steps: list[Tensor] = []
        self.zeros: list[Tensor] = []
        if self.at_once:
            grouped = weights if act_order != "index" or order is None else [weight[:, order] for weight in weights]
            self._take([grid.fit(weight, format, shrink=_at(s, weight, format)) for weight, s in zip(grouped, shrinks, strict=True)])
        else:
            self.factors = [grid.fit(weight, format).factor if format.scale == "e4m3" else None for weight in weights]

    def begin(self, group: int, feedback: Float[Tensor, "cols cols"]) -> None:
        """Take the scales of a group from its columns as they would be if none of them lost anything from here on.

        ``values`` has what they make up for by now, v_j = w_j + Σ_{i before the group}; that such columns x of the group still differ from w adds to it:
        x_j = v_j + Σ_{k<j in the group} (w_k - x_k) F_jk, a triangular system. The paper's loop, which changes all columns to come, has x at hand.
        """
        here = slice(group * self.group_size, (group + 1) * self.group_size)
        changed = self.lost[here]
        if group:
            system = torch.linalg.solve_triangular(
                feedback[here, here], torch.eye(self.group_size, device=feedback.device), upper=False, unitriangular=True
            )
            changed = torch.addmm(changed, system, self.values[here] - changed)
            if self.fixed is not None:
                changed.masked_fill_(self.fixed[here], 0)
        alone, found = self.format._replace(group_size=-1), []
        for part, shrink, factor in zip(self.parts, self.shrinks, self.factors, strict=True):
            columns = changed[:, part].T
            if not callable(shrink) and self.format.element != "ternary":  # scales are of the extremes, which pass for the group
                columns = torch.stack((columns.amin(dim=1), columns.amax(dim=1)), dim=1)
            columns = columns.contiguous()
            found.append(grid.fit(columns, alone, shrink=_at(shrink, columns, alone, group), factor=factor))
        self._take(found)

    def _take(self, found: list[Scales]) -> None:
        for kept, scales in zip(self.scales, found, strict=True):
            kept.append(scales)
        self.steps += self._by_row([scales.effective for scales in found])
        self.zeros += self._by_row([scales.zeros.float() for scales in found if scales.zeros is not None])

    def _by_row(self, shared: Sequence[Tensor]) -> list[Tensor]:
        """What the blocks of each weight have, [blocks, groups], as a vector over the rows of all a group."""
        rows = [part.stop - part.start for part in self.parts]
        wide = [each.repeat_interleave(count // len(each), dim=0) for each, count in zip(shared, rows, strict=bool(shared))]
        return list(torch.cat(wide).T.contiguous().unbind(0)) if wide else []

    def quantized(self, part: int) -> Quantized:
        """One of the weights as it was rounded, columns in their own order."""
        codes, kept, order = self.codes[:, self.parts[part]], self.scales[part], None
        if self.order is not None:
            place = self.order.argsort()
            codes = codes[place]
            if self.act_order == "index" and self.format.group_size > 0:
                order = place // self.group_size
        shared = kept[0]
        if len(kept) > 1:
            zeros = [each.zeros for each in kept if each.zeros is not None]
            shared = Scales(torch.cat([each.scales for each in kept], dim=1), torch.cat(zeros, dim=1) if zeros else None, shared.factor)
        return Quantized(codes.T.contiguous(), shared, self.format, order)

    def errors(self, factor: Factor) -> list[float]:
        """tr(D H Dᵀ) of each weight and the H that was given, from D (H + added) Dᵀ = Σ_j (w'_j - ŵ_j)² R_jj²."""
        found = []
        for part in self.parts:
            missed, lost = (torch.linalg.vector_norm(each[:, part], dim=1).square() for each in (self.values, self.lost))
            found.append(max(float(factor.pivots @ missed - factor.added @ lost), 0.0))
        return found


def _solve(rounding: _Rounding, feedback: Float[Tensor, "cols cols"], block: int) -> None:
    """Halve the columns until few are left, at the borders of groups while there are any; then bring the right half up to date by one product."""
    values, lost, size = rounding.values, rounding.lost, rounding.group_size

    def solve(low: int, high: int) -> None:
        width = high - low
        grouped = not rounding.at_once
        if grouped and width == size:
            rounding.begin(low // size, feedback)
        if width <= block and (not grouped or width <= size):
            _columns(rounding, feedback, low, high)
            return
        unit = size if grouped and width > size else block
        middle = low + unit * (-(-width // unit) // 2)
        solve(low, middle)
        values[middle:high].addmm_(feedback[middle:high, low:middle], lost[low:middle])
        solve(middle, high)

    solve(0, len(values))


def _columns(rounding: _Rounding, feedback: Tensor, low: int, high: int) -> None:
    """Round columns one by one. What each makes up for is one product with the errors of the block: ``feedback`` is 0 from the column itself on."""
    format, here = rounding.format, slice(low, high)
    first, last = (-1, 1) if format.element == "ternary" else (format.low, format.high)
    integers = format.element in ("int", "ternary")
    lost, numbers = rounding.lost[here], rounding.scratch[: high - low]
    errors, rounded = lost.T, rounding.scratch[-1]
    rows = zip(
        rounding.group_of[here],
        rounding.values[here].unbind(0),
        numbers.unbind(0),
        lost.unbind(0),
        feedback[here, here].unbind(0),
        repeat(None, high - low) if rounding.fixed is None else rounding.fixed[here].unbind(0),
        strict=True,
    )
    for group, value, number, error, weights, fixed in rows:
        step = rounding.steps[group]
        value.addmv_(errors, weights)
        torch.div(value, step, out=number)
        if fixed is not None:
            number.masked_fill_(fixed, 0)
        level = number
        if not integers:
            number.copy_(elements.encode(number, format.element))
            level = elements.decode(number.to(torch.int8), format.element)
        elif rounding.zeros:
            number.round_().add_(rounding.zeros[group]).clamp_(first, last)
            level = torch.sub(number, rounding.zeros[group], out=rounded)
        else:
            number.round_().clamp_(first, last)
        value.addcmul_(level, step, value=-1)
        error.addcmul_(level, step, value=-1)
    rounding.codes[here] = numbers.to(torch.int8)


def _named(shrink: Any, name: str) -> Shrink:
    return shrink.get(name, 1.0) if isinstance(shrink, Mapping) else shrink


def _at(shrink: Shrink, weight: Tensor, format: Format, group: int | None = None) -> Any:
    if callable(shrink):
        return shrink(weight, format)
    return shrink[:, group : group + 1] if isinstance(shrink, Tensor) and group is not None else shrink


@torch.no_grad()
def quantize_model(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows length"],
    formats: Format | Mapping[str, Format],
    *,
    real: Tensor | None = None,
    act_order: ActOrder = "static",
    damping: float = 0.01,
    shrink: Callable[[Tensor, Format], Tensor | float] | Mapping[str, Tensor] | float = 1.0,
    true_sequential: bool = True,
    propagate: bool = True,
    batch: int = 8,
    keep_zeros: bool = False,
) -> Rounded:
    """Round the weights of the blocks by :func:`gptq`, in place; the model then computes with the rounded weights.

    Args:
        windows: token ids to calibrate on.
        formats: of every weight, or by name; a name without one is left as it is.
        real: False at padding.
        shrink: how much of its range a group keeps, by name or of all, or how to find it; see ``ranges.py``.
        act_order, damping, keep_zeros: see :func:`gptq`. true_sequential, propagate, batch: see ``sequential.walk``.
    Returns:
        The codes by name, and a summary: ``tokens`` (real ones), ``coverage``, ``fallbacks`` (rounded to nearest since no damping helped), ``unrouted``
        (experts that saw no token, rounded to nearest), ``damping`` where more than asked was needed, and ``output_error``: by name
        ‖X (w - ŵ)ᵀ‖² / ‖X wᵀ‖² on the calibration inputs.
    Raises:
        ValueError: an unknown name, a format that does not fit (before anything is changed), or too small a share of the model for one format.
    """
    views = experts.weight_views(model)
    chosen = dict.fromkeys(views, formats) if isinstance(formats, Format) else dict(formats)
    unknown = sorted(chosen.keys() - views.keys())
    if unknown:
        raise ValueError(f"no weight of the blocks is called {', '.join(unknown[:3])}; they are called such as {next(iter(views))}")
    for name, format in chosen.items():
        with grid.naming(name, views[name].weight):
            grid.require_fit(tuple(views[name].weight.shape), format)
    reached = experts.parameters(model, set(chosen))
    found = structure.require_coverage(model, reached) if isinstance(formats, Format) else structure.coverage(model, reached)
    layers: dict[str, Quantized] = {}
    errors: dict[str, float] = {}
    unrouted, fallbacks, dampings = [], [], {}
    for stage in walk(model, windows, real=real, true_sequential=true_sequential, propagate=propagate, batch=batch):
        hessians = gather(stage)
        for group in stage.groups:
            for names in _alike(group, chosen):
                weights, format = [stage.weights[name] for name in names], chosen[names[0]]
                if group not in hessians:
                    for name, weight in zip(names, weights, strict=True):
                        layers[name] = grid.quantize(weight, format, shrink=_at(_named(shrink, name), weight, format))
                    unrouted += names
                else:
                    hessian = hessians[group].matrix()
                    solved = gptq_together(
                        weights, hessian, format, act_order=act_order, damping=damping, keep_zeros=keep_zeros,
                        shrinks=[_named(shrink, name) for name in names],
                    )  # fmt: skip
                    for name, weight, each in zip(names, weights, solved, strict=True):
                        layers[name], wide = each.quantized, weight.float()
                        errors[name] = each.error / max(float(((wide @ hessian) * wide).sum()), 1e-30)
                        fallbacks += [name] if each.fallback else []
                        dampings |= {name: each.damping} if each.damping != damping else {}
                for name, weight in zip(names, weights, strict=True):
                    weight.copy_(grid.dequantize(layers[name]))
    summary = {
        "tokens": int(windows.numel() if real is None else real.sum()), "quantized_layers": len(layers), "coverage": found.share,
        "formats": sorted({f"{each.format.name} g{each.format.group_size}" for each in layers.values()}),
        "fallbacks": fallbacks, "unrouted": unrouted, "damping": dampings, "output_error": errors,
    }  # fmt: skip
    return Rounded({name: layers[name] for name in views if name in layers}, summary)


def _alike(group: Sequence[str], formats: Mapping[str, Format]) -> list[list[str]]:
    """The names of a group that have one format together, and can be rounded so."""
    found: dict[Format, list[str]] = {}
    for name in group:
        if name in formats:
            found.setdefault(formats[name], []).append(name)
    return list(found.values())
