"""Which weights are zero: how many are to be, which of them by a score, whether zeros are kept, and what share they are.

Not here: a score itself (``magnitude.py``, ``wanda.py``, ``sparsegpt.py``), or how zeros are stored (``ops/quantize/semi_structured.py``).
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedModel

from assay.ops.models import experts, structure
from assay.ops.quantize.grid import Quantized, largest_divisor, naming

Scope = Literal["layer", "row"]


class Sparsity(NamedTuple):
    """How much becomes zero: a percentage of each comparison group, or all but ``n`` of each ``m`` weights in a row of the matrix.

    Of a group of k weights, k · ``sparsity_pct`` // 100 become zero. With a pattern the percentage is 0 and the groups are ``m`` consecutive weights along
    the inputs: 2:4 keeps 2 of 4.
    """

    sparsity_pct: int = 0
    n: int = 0
    m: int = 0

    @classmethod
    def of_pattern(cls, name: str) -> "Sparsity":
        """A pattern by its name, such as ``2:4``."""
        n, m = map(int, name.split(":"))
        return cls(n=n, m=m)

    @property
    def name(self) -> str:
        """Such as ``50%`` or ``2:4``."""
        return f"{self.n}:{self.m}" if self.m else f"{self.sparsity_pct}%"

    def zeros(self, weights: int) -> int:
        """How many of a group of ``weights`` become zero."""
        return weights * (self.m - self.n) // self.m if self.m else weights * self.sparsity_pct // 100


class Realised(NamedTuple):
    """What share of the weights is zero, 0 to 1, over all and by layer, and which layers do not keep to the pattern that was asked about."""

    zeros: int
    weights: int
    layers: dict[str, float]
    broken: tuple[str, ...] = ()

    @property
    def share(self) -> float:
        return self.zeros / self.weights if self.weights else 0.0


class Pruned(NamedTuple):
    """What pruning a model came to, what to say about the pass, and the codes of each layer if it was rounded on the way."""

    realised: Realised
    summary: dict[str, Any]
    layers: Mapping[str, Quantized]


def require_valid(sparsity: Sparsity) -> None:
    """Refuse a sparsity that removes nothing or everything, or says two things.

    Raises:
        ValueError: neither or both of a percentage and a pattern, a percentage outside 1 to 99, or a pattern that keeps none or all.
    """
    pct, n, m = sparsity
    if (n or m) and pct:
        raise ValueError(f"sparsity_pct={pct} and the pattern {n}:{m} say two things; give one of them")
    if (n or m) and not 0 < n < m:
        raise ValueError(f"the pattern {n}:{m} does not keep some of each group; n of m with 0 < n < m, such as 2:4, does")
    if not (n or m) and not 0 < pct < 100:
        raise ValueError(f"sparsity_pct={pct} is outside 1 to 99; or give a pattern n:m")


def require_fit(shape: tuple[int, ...], sparsity: Sparsity) -> None:
    """Refuse a sparsity that is not valid, or a pattern whose groups do not fill the rows of a weight of ``shape`` [rows, cols].

    Raises:
        ValueError: says what would work.
    """
    require_valid(sparsity)
    n, m, cols = sparsity.n, sparsity.m, shape[1]
    if m and cols % m:
        fits = largest_divisor(cols, at_most=m)
        works = f"groups of {fits} do, and so does a percentage" if fits > 1 else "a percentage does"
        raise ValueError(
            f"the pattern {n}:{m} needs groups of {m} along the {cols} columns (inputs) of the weight, which {m} does not divide; {works}"
        )


def smallest(scores: Float[Tensor, "groups weights"], count: int) -> Bool[Tensor, "groups weights"]:
    """True at exactly the ``count`` smallest of each group; of equal ones at the earliest.

    Raises:
        ValueError: a score is NaN, or ``count`` is more than a group has.
    """
    if not 0 <= count <= scores.shape[1]:
        raise ValueError(f"cannot choose {count} of {scores.shape[1]} weights; 0 to all of them can be chosen")
    if scores.isnan().any():
        raise ValueError(
            f"{int(scores.isnan().sum()):,} of {scores.numel():,} scores are NaN, so nothing can be ranked; finite weights and inputs can"
        )
    if not count or not scores.numel():
        return torch.zeros_like(scores, dtype=torch.bool)
    last = scores.kthvalue(count, dim=1, keepdim=True).values
    chosen, tied = scores < last, scores == last
    return chosen | (tied & (tied.cumsum(dim=1) <= count - chosen.sum(dim=1, keepdim=True)))


def select(scores: Float[Tensor, "rows cols"], sparsity: Sparsity, scope: Scope = "layer") -> Bool[Tensor, "rows cols"]:
    """True at the weights of a matrix that become zero: those of least score in each comparison group; of equal ones the earliest.

    Args:
        scores: of each weight; lower goes first.
        scope: who is compared, with a percentage: the whole ``layer``, or each output ``row`` for itself. A pattern compares its groups in any case.
    Raises:
        ValueError: the sparsity does not fit, or a score is NaN.
    """
    require_fit(tuple(scores.shape), sparsity)
    rows, cols = scores.shape
    width = sparsity.m or (cols if scope == "row" else rows * cols)
    return smallest(scores.reshape(-1, width), sparsity.zeros(width)).view(rows, cols)


def prunable(model: PreTrainedModel, sparsity: Sparsity) -> dict[str, Tensor]:
    """The matrices that are pruned, name → view [out, in]: linear layers of the blocks and every expert, checked before any is changed.

    Raises:
        ValueError: they are less than 95 % of the weights outside embedding and head; or the sparsity does not fit one, which a note names.
    """
    views = experts.weights(model)
    structure.require_coverage(model, experts.parameters(model, set(views)))
    for name, weight in views.items():
        with naming(name, weight):
            require_fit(tuple(weight.shape), sparsity)
    return views


def zeros_of(model: PreTrainedModel) -> dict[str, Bool[Tensor, "out in"]]:
    """Which weights of the blocks are exactly zero, by layer: the mask that later steps keep.

    A weight that nothing pruned but that is 0 all the same counts as well, and so is kept at 0.
    """
    return {name: weight == 0 for name, weight in experts.weights(model).items()}


def require_kept(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Refuse masks of which something came back. More zeros than before are no fault.

    Args:
        before, after: as :func:`zeros_of` gives them, or weights.
    Raises:
        ValueError: a layer is missing, has another shape, or has weights that were zero and are not; names it and counts them.
    """
    for name, mask in before.items():
        if name not in after or after[name].shape != mask.shape:
            found = f"is {list(after[name].shape)}" if name in after else "is missing"
            raise ValueError(
                f"{name} was {list(mask.shape)} when its zeros were noted, and {found} now; a step that keeps shapes and names was expected"
            )
        kept = after[name] if after[name].dtype == torch.bool else after[name] == 0
        zero = mask if mask.dtype == torch.bool else mask == 0
        back = int((zero.to(kept.device) & ~kept).sum())
        if back:
            raise ValueError(
                f"{back:,} of the {int(zero.sum()):,} pruned weights of {name} came back; a step that keeps zeros was expected"
            )


def realised(weights: Mapping[str, Tensor], pattern: Sparsity | None = None) -> Realised:
    """The zeros of each matrix, counted, and whether each keeps to ``pattern`` if that is n:m.

    Args:
        weights: name → [out, in], such as ``experts.weights`` gives.
    """
    zeros = {name: int((weight == 0).sum()) for name, weight in weights.items()}
    broken = tuple(name for name, weight in weights.items() if pattern is not None and pattern.m and not holds(weight, pattern))
    layers = {name: zeros[name] / weight.numel() for name, weight in weights.items()}
    return Realised(sum(zeros.values()), sum(weight.numel() for weight in weights.values()), layers, broken)


def holds(weight: Float[Tensor, "rows cols"], pattern: Sparsity) -> bool:
    """Whether no group of ``m`` consecutive weights along a row has more than ``n`` that are not zero."""
    if weight.shape[1] % pattern.m:
        return False
    return bool(((weight != 0).reshape(-1, pattern.m).sum(dim=1) <= pattern.n).all())
