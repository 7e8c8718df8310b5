"""SparseGPT: removing weights column after column, each error made up for by the columns that follow; and rounding what stays in the same loop.

Also the rule that it approximates, optimal brain surgery, for small matrices. Not here: the Hessian, its factor, or the walk (``ops/quantize``).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from assay.ops.prune.masks import Pruned, Sparsity, prunable, realised, require_fit, require_kept, select
from assay.ops.quantize import grid
from assay.ops.quantize.gptq import ESCALATIONS, Factor, factorize
from assay.ops.quantize.grid import Format, Quantized, Scales, largest_divisor, naming
from assay.ops.quantize.hessian import full_precision, gather
from assay.ops.quantize.sequential import walk

BLOCK = 128  # columns whose weights a percentage compares
STRIP = 32  # columns that are brought up to date one by one


class Solved(NamedTuple):
    """A pruned weight; its output error tr((w - ŵ) H (w - ŵ)ᵀ); the damping used; whether no damping helped; and its codes if it was rounded."""

    weight: Float[Tensor, "rows cols"]
    error: float
    damping: float
    fallback: bool
    quantized: Quantized | None = None


class Surgery(NamedTuple):
    """A row of weights with one more of them removed, and the inverse Hessian of those that are left (0 in the removed ones' rows and columns)."""

    weight: Float[Tensor, " cols"]
    inverse: Float[Tensor, "cols cols"]


@torch.no_grad()
def sparsegpt(
    weight: Float[Tensor, "rows cols"],
    hessian: Float[Tensor, "cols cols"],
    sparsity: Sparsity | Bool[Tensor, "rows cols"],
    *,
    format: Format | None = None,
    damping: float = 0.01,
    block: int = BLOCK,
) -> Solved:
    """Set weights to zero so that the *output* on the inputs behind ``hessian`` changes little: those to the right make up for each.

    With H = R Rᵀ, R upper triangular, d_j = 1 / R_jj is the diagonal of the upper Cholesky factor of H⁻¹, and removing w'_j costs (w'_j / d_j)². The
    columns go from left to right. A percentage takes the weights of least cost in each block of columns, over all rows, when the block is reached; n:m
    takes m - n of each m weights of a row when their first column is reached. Both see the weights as they are by then. Weights that are zero already
    stay so and count first; those of a column without input cost nothing.

    Args:
        hessian: 2 XᵀX, or a multiple.
        sparsity: how much of each block is to be zero; or which weights (True), besides those that are.
        format: round the weights that stay. As in ``gptq`` a group's scales are of its columns as they are when it is reached, without what is known to be
            removed by then; nested scales, and those of whole rows or of the whole tensor, are taken before the first column.
        damping: share of the mean of the diagonal that is added to the diagonal; ten times as much if the factorization fails, and so on.
        block: columns that a percentage compares. Made smaller where groups do not fill it, or larger than one group of m. With a given mask or n:m of no
            influence on the result but its rounding.
    Returns:
        The weight in float32. If no damping tried makes H positive definite: weights removed by the diagonal of H alone, the others as they were, and
        ``fallback``.
    Raises:
        ValueError: H is zero, not finite or of another width; or a sparsity or format that does not fit.
    Source:
        Frantar & Alistarh 2023, §3, arXiv:2301.00774. Theirs removes columns without input whatever the percentage, here they are the first to go; theirs
        rounds on scales of whole rows. R in the place of H⁻¹, and the error from it, are those of ``gptq.py``.
    """
    rows, cols = weight.shape
    _require((rows, cols), sparsity, format)
    if hessian.shape != (cols, cols):
        raise ValueError(f"the Hessian is {list(hessian.shape)} and the weight {[rows, cols]}; {[cols, cols]} was expected")
    with full_precision():
        return _solve(weight, hessian, factorize(hessian.float(), damping), sparsity, format, damping, block)


@torch.no_grad()
def prune_model(
    model: PreTrainedModel,
    windows: Int[Tensor, "windows length"],
    sparsity: Sparsity,
    *,
    format: Format | None = None,
    real: Bool[Tensor, "windows length"] | None = None,
    damping: float = 0.01,
    block: int = BLOCK,
    true_sequential: bool = True,
    propagate: bool = True,
    batch: int = 8,
) -> Pruned:
    """Prune the weights of the blocks by :func:`sparsegpt`, in place, and round what stays if a ``format`` is given.

    Args:
        windows: token ids to calibrate on: many times as many as the widest input, or the weights follow the text. Of SmolLM2-135M at 50 % the mean KL is
            1.16 with 2,048 tokens and 0.89 with 12,288; Wanda, which changes no weight that stays, has 0.91 and 0.88.
        real: False at padding.
        format, damping, block: see :func:`sparsegpt`.
        true_sequential, propagate, batch: see ``sequential.walk``. The paper's code prunes all layers of a block on the block as it was, True does not.
    Returns:
        What became zero; a summary: ``tokens`` (real ones), ``fallbacks`` (no damping helped), ``unrouted`` (experts that saw no token, pruned by |w|),
        ``damping`` where more than asked was needed, ``output_error`` by name, ‖X (w - ŵ)ᵀ‖² / ‖X wᵀ‖² on the calibration inputs; and the codes.
    Raises:
        ValueError: before anything is changed: what does not fit a weight (a note names it), no window, or too small a share of the model is reached. On
            the way: an input is not finite.
    """
    weights = prunable(model, sparsity)
    for name, weight in weights.items():
        with naming(name, weight):
            _require((weight.shape[0], weight.shape[1]), sparsity, format)
    layers: dict[str, Quantized] = {}
    errors: dict[str, float] = {}
    unrouted, fallbacks, dampings = [], [], {}
    for stage in walk(model, windows, real=real, true_sequential=true_sequential, propagate=propagate, batch=batch):
        hessians = gather(stage)
        for group in stage.groups:
            with full_precision(), naming(group[0], stage.weights[group[0]]):
                hessian = hessians[group].matrix() if group in hessians else None
                factor = None if hessian is None else factorize(hessian, damping)
                for name in group:
                    weight = stage.weights[name].float()
                    if hessian is None:
                        solved = _by_cost(weight, weight.abs(), sparsity, format)
                        unrouted.append(name)
                    else:
                        solved = _solve(weight, hessian, factor, sparsity, format, damping, block)
                        errors[name] = solved.error / max(float(((weight @ hessian) * weight).sum()), 1e-30)
                        fallbacks += [name] if solved.fallback else []
                        dampings |= {name: solved.damping} if solved.damping != damping else {}
                    stage.weights[name].copy_(solved.weight)
                    if solved.quantized is not None:
                        layers[name] = solved.quantized
    summary = {
        "tokens": int(windows.numel() if real is None else real.sum()), "fallbacks": fallbacks, "unrouted": unrouted, "damping": dampings,
        "output_error": errors,
    }  # fmt: skip
    return Pruned(realised(weights, sparsity), summary, {name: layers[name] for name in weights if name in layers})


def obs_scores(weight: Float[Tensor, "rows cols"], hessian: Float[Tensor, "cols cols"]) -> Float[Tensor, "rows cols"]:
    """What the output error of a row would grow by if one of its weights alone were removed and all others made up for it: w² / (2 [H⁻¹]_jj).

    With H = 2 XᵀX / tokens that is a mean squared error a token. For small matrices, as the reference of what costs little.

    Raises:
        torch.linalg.LinAlgError: H is singular.
    Source:
        Hassibi & Stork 1992, eq. 5 (optimal brain surgeon).
    """
    return weight.square() / (2 * torch.linalg.inv(hessian).diagonal())


def obs_step(weight: Float[Tensor, " cols"], inverse: Float[Tensor, "cols cols"], column: int) -> Surgery:
    """Remove one weight of a row, change all others so that the output error is least, and take its column out of the inverse Hessian.

    One weight after the other, in any order, this gives the least error that any weights in the places left can give.

    Args:
        inverse: H⁻¹ of the weights that are left.
    Raises:
        ValueError: ``column`` is removed already.
    Source:
        Hassibi & Stork 1992, eq. 5; the inverse by Gaussian elimination, Frantar & Alistarh 2022, §4, arXiv:2208.11580.
    """
    pivot = inverse[column, column]
    if not pivot > 0:
        raise ValueError(f"column {column} has no place in the inverse Hessian (its diagonal is {float(pivot)}): it is removed already")
    changed = weight - weight[column] / pivot * inverse[column]
    left = inverse - torch.outer(inverse[:, column], inverse[column]) / pivot
    changed[column], left[column], left[:, column] = 0, 0, 0
    return Surgery(changed, left)


def _require(shape: tuple[int, int], sparsity: Sparsity | Tensor, format: Format | None) -> None:
    if format is not None:
        grid.require_fit(shape, format)
    if not isinstance(sparsity, Sparsity):
        if tuple(sparsity.shape) != shape:
            raise ValueError(f"the mask is {list(sparsity.shape)} and the weight {list(shape)}; one of the same shape was expected")
        return
    require_fit(shape, sparsity)
    m, size = max(sparsity.m, 1), 0 if format is None else format.group_size
    if STRIP % m:
        raise ValueError(
            f"the pattern {sparsity.name} has groups of {m}, which do not divide the {STRIP} columns solved at a time; 4 and 8 do"
        )
    if size > 0 and size % m:
        raise ValueError(
            f"groups of {m} ({sparsity.name}) cross the borders of scales for {size} weights; a group_size that {m} divides works"
        )


def _solve(
    weight: Tensor, hessian: Tensor, factor: Factor | None, sparsity: Sparsity | Tensor, format: Format | None, damping: float, block: int
) -> Solved:
    weight = weight.float()
    if factor is not None:
        return _Loop(weight, factor, factor.pivots.masked_fill(hessian.diagonal() <= 0, 0), sparsity, format, block).run()
    found = _by_cost(weight, weight.square() * hessian.diagonal(), sparsity, format)
    lost = weight - found.weight
    return found._replace(error=float(((lost @ hessian.float()) * lost).sum()), damping=damping * 10 ** (ESCALATIONS - 1))


def _by_cost(weight: Tensor, cost: Tensor, sparsity: Sparsity | Tensor, format: Format | None) -> Solved:
    """Remove by a cost alone and round to nearest: nothing makes up for anything. Its error is not known here."""
    zeros = select(cost.masked_fill(weight == 0, -torch.inf), sparsity) if isinstance(sparsity, Sparsity) else sparsity
    pruned = weight.masked_fill(zeros, 0)
    if format is None:
        return Solved(pruned, 0.0, 0.0, True)
    quantized = grid.quantize(pruned, format)
    return Solved(_dequantized(quantized, zeros), 0.0, 0.0, True, quantized)


def _dequantized(quantized: Quantized, zeros: Tensor) -> Tensor:
    """The rounded weight, in which what was removed is exactly zero, or a refusal."""
    weight = grid.dequantize(quantized)
    require_kept({f"the weight in {quantized.form}": zeros}, {f"the weight in {quantized.form}": weight})
    return weight


class _Loop:
    """The columns from left to right. All is transposed, so that a column lies in one piece: ``weight`` has ŵ in the columns that are done and w in the
    others, ``lost`` w - ŵ, and ``zeros`` the mask as far as it is known."""

    def __init__(
        self, weight: Tensor, factor: Factor, costs: Tensor, sparsity: Sparsity | Tensor, format: Format | None, block: int
    ) -> None:
        self.sparsity = sparsity if isinstance(sparsity, Sparsity) else None
        known = weight == 0 if isinstance(sparsity, Sparsity) else (weight == 0) | sparsity
        self.weight, self.zeros = (each.T.clone(memory_format=torch.contiguous_format) for each in (weight, known))
        self.lost = torch.zeros_like(self.weight)
        self.factor, self.costs = factor, costs[:, None]
        self.rounding = None if format is None else _Rounding(weight.masked_fill(known, 0), format)
        self.m = self.sparsity.m if self.sparsity else 0
        self.block, self.strip = _widths(block, self.m, self.rounding.group_size if self.rounding else 0)

    def run(self) -> Solved:
        cols = len(self.weight)
        missed = sum(self._prune(low, min(low + self.block, cols)) for low in range(0, cols, self.block))
        error = max(float(missed - self.factor.added @ self.lost.square().sum(dim=1)), 0.0)
        quantized = self.rounding.quantized() if self.rounding else None
        weight = self.weight.T.contiguous() if quantized is None else _dequantized(quantized, self.zeros.T)
        return Solved(weight, error, self.factor.damping, False, quantized)

    def _now(self, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Columns as they are once those before ``low`` are done, and what an error in each takes from the others: unit lower triangular."""
        here, feedback = slice(low, high), self.factor.feedback
        eye = torch.eye(high - low, device=feedback.device)
        system = torch.linalg.solve_triangular(feedback[here, here], eye, upper=False, unitriangular=True)
        return self.weight[here] + system @ (feedback[here, :low] @ self.lost[:low]), system

    def _prune(self, low: int, high: int) -> Tensor:
        """Do the columns of a block; returns Σ (w' - ŵ)² / d²."""
        values, system = self._now(low, high)
        errors, zeros, width = torch.empty_like(values), self.zeros[low:high], high - low
        if not self.m:
            self._choose(values, low, high)
        for start in range(0, width, self.strip):
            end = min(start + self.strip, width)
            if self.rounding:
                self._take_scales(self.rounding, low + start, values[start:])
            for column in range(start, end):
                if self.m and column % self.m == 0:
                    self._choose(values[column : column + self.m], low + column, low + column + self.m)
                kept = values[column].masked_fill(zeros[column], 0)
                if self.rounding:
                    kept = self.rounding.column(low + column, kept)
                torch.sub(values[column], kept, out=errors[column])
                values[column] = kept
                values[column + 1 : end].addr_(system[column + 1 : end, column], errors[column], alpha=-1)
            values[end:].addmm_(system[end:, start:end], errors[start:end], alpha=-1)
        torch.sub(self.weight[low:high], values, out=self.lost[low:high])
        self.weight[low:high] = values
        return self.factor.pivots[low:high] @ errors.square_().sum(dim=1)

    def _choose(self, values: Tensor, low: int, high: int) -> None:
        """Take the weights of least cost into the mask: of all these columns, or of each group of m."""
        if self.sparsity:
            zeros = self.zeros[low:high]
            cost = (values.square() * self.costs[low:high]).masked_fill_(zeros, -torch.inf)
            zeros |= select(cost.T, self.sparsity).T

    def _take_scales(self, rounding: "_Rounding", column: int, values: Tensor) -> None:
        """Where a group of scales begins, take them from its columns as they are now: those of the block, or those beyond it too."""
        size = rounding.group_size
        if size and column % size == 0:
            values = values[:size] if size <= len(values) else self._now(column, column + size)[0]
            rounding.take(values.masked_fill(self.zeros[column : column + size], 0).T)


class _Rounding:
    """Codes, one column after the other. ``group_size`` is 0 where all scales are taken at once, of a ``weight`` without what is known to be removed."""

    def __init__(self, weight: Tensor, format: Format) -> None:
        cols = weight.shape[1]
        self.format, self.alone = format, format._replace(group_size=-1, nested=False)
        at_once = format.nested or format.group_size in (0, -1, cols)
        self.group_size, self.span = 0 if at_once else format.group_size, format.group_size if format.group_size > 0 else cols
        whole = grid.fit(weight, format) if at_once or format.scale == "e4m3" else None
        self.factor = None if whole is None else whole.factor
        self.whole = whole if at_once else None
        self.scales = _split(self.whole) if self.whole else []
        self.codes: list[Tensor] = []

    def take(self, columns: Tensor) -> None:
        """The scales of the next group."""
        self.scales.append(grid.fit(columns.contiguous(), self.alone, factor=self.factor))

    def column(self, index: int, values: Tensor) -> Tensor:
        """Round a column: what it comes to."""
        shared = self.scales[index // self.span]
        self.codes.append(grid.encode(values[:, None], shared, self.alone))
        return grid.decode(self.codes[-1], shared, self.alone)[:, 0]

    def quantized(self) -> Quantized:
        codes, shared = torch.cat(self.codes, dim=1), self.whole
        if shared is None:
            zeros = [each.zeros for each in self.scales if each.zeros is not None]
            shared = Scales(
                torch.cat([each.scales for each in self.scales], dim=1), torch.cat(zeros, dim=1) if zeros else None, self.factor
            )
        return Quantized(codes, shared, self.format)


def _split(shared: Scales) -> list[Scales]:
    """The scales of each group for itself."""
    zeros = [None] * shared.scales.shape[1] if shared.zeros is None else shared.zeros.split(1, dim=1)
    return [Scales(scales, zero, shared.factor) for scales, zero in zip(shared.scales.split(1, dim=1), zeros, strict=True)]


def _widths(block: int, m: int, group_size: int) -> tuple[int, int]:
    """Columns of a block and of a strip, such that groups of m, and of scales, begin with a strip and are not cut by a block, or fill whole blocks."""
    m = max(m, 1)
    if group_size > block:
        return m * largest_divisor(group_size // m, at_most=max(block // m, 1)), STRIP
    step = group_size or m
    strip = m * largest_divisor(group_size // m, at_most=STRIP // m) if group_size else STRIP
    return step * max(block // step, 1), strip
