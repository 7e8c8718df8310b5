"""The sizes a model can be cut to: how many parameters each has, which of them meet a budget, and which of those promise most.

Numbers alone, no model. Not here: what matters inside a model (``width_scores.py``), or cutting it (``width.py``, ``depth.py``).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

MOST = 1_000_000  # shapes that are looked at


class Shape(NamedTuple):
    """What a search varies: blocks, key-value groups, FFN channels, hidden size."""

    layers: int
    kv_groups: int
    ffn: int
    hidden: int


class Family(NamedTuple):
    """What it leaves as it is.

    Attributes:
        heads_per_group: query heads that share a key-value head.
        tied: the head is the embedding.
        norms: RMS norms of a block over the hidden size: 2, or 4 in Gemma 3.
        qkv_bias, o_bias, ffn_bias: whether these linear layers have biases; Qwen 2 has the first alone.
        head_norms: queries and keys have a norm of head_dim each, as in Qwen 3 and Gemma 3.
        whole_heads: the hidden size has to be a multiple of the number of query heads. transformers opens no other Llama or Gemma 3, though nothing
            in the computation asks for it; Mistral and Qwen may do without.
    """

    vocab: int
    head_dim: int
    heads_per_group: int
    tied: bool
    norms: int = 2
    qkv_bias: bool = False
    o_bias: bool = False
    ffn_bias: bool = False
    head_norms: bool = False
    whole_heads: bool = True


DIVISORS = Shape(layers=1, kv_groups=1, ffn=64, hidden=64)


class Candidate(NamedTuple):
    """A shape, its parameters, and the score it was ranked by."""

    shape: Shape
    parameters: int
    score: float


def parameters(shape: Shape, family: Family) -> int:
    """How many parameters a dense model of this shape has, a tied head counted once.

    With d the head size, k groups of r query heads, f channels and h hidden, a block has 2 (r + 1) k d h of attention, 3 f h of FFN, its
    norms and biases.
    """
    layers, groups, ffn, hidden = shape
    query, key = family.heads_per_group * groups * family.head_dim, groups * family.head_dim
    block = 2 * (query + key) * hidden + 3 * ffn * hidden + family.norms * hidden + 2 * family.head_dim * family.head_norms
    block += family.qkv_bias * (query + 2 * key) + family.o_bias * hidden + family.ffn_bias * (2 * ffn + hidden)
    return family.vocab * hidden * (1 if family.tied else 2) + layers * block + hidden


def search(
    full: Shape,
    family: Family,
    score: Callable[[Shape], float],
    *,
    parameters_at_most: int,
    divisors: Shape = DIVISORS,
    width_cut_pct: int = 40,
    depth_cut_pct: int = 20,
    best: int = 10,
) -> list[Candidate]:
    """The shapes of the highest score among those that meet the budget, best first; of equal scores the one with more parameters, then the larger.

    Args:
        full: the shape before; a size that is not cut may stay though its divisor does not divide it.
        score: how good a shape promises to be, higher is better, such as :func:`retained` gives.
        parameters_at_most: the budget. One of ``B`` bytes at ``b`` bits a weight is ``8 B // b``.
        divisors: what each size must be a multiple of.
        width_cut_pct, depth_cut_pct: the most of groups, channels and hidden, and of blocks, that may go; whole percents.
        best: how many are returned, or fewer when fewer meet the budget.
    Raises:
        ValueError: nothing meets the budget (says what the smallest needs), more than a million shapes, or a percent outside 0 to 99.
    Source:
        Muralidharan et al. 2024 (Minitron), arXiv:2407.14679, which trains the best few for a while and keeps the winner; the default
        percents are those of NVIDIA Model Optimizer.
    """
    for name, percent in (("width_cut_pct", width_cut_pct), ("depth_cut_pct", depth_cut_pct)):
        if not 0 <= percent < 100:
            raise ValueError(f"{name}={percent} is not between 0 and 99")
    limits = Shape(depth_cut_pct, width_cut_pct, width_cut_pct, width_cut_pct)
    sizes = [_sizes(*each) for each in zip(full, divisors, limits, strict=True)]
    count = len(sizes[0]) * len(sizes[1]) * len(sizes[2]) * len(sizes[3])
    if count > MOST:
        raise ValueError(
            f"divisors {tuple(divisors)} leave {count:,} shapes of {tuple(full)}; {MOST:,} at most are looked at, so take larger divisors"
        )
    shapes = [Shape(*each) for each in itertools.product(*sizes)]
    if family.whole_heads:  # the shape before is taken as it is
        shapes = [shape for shape in shapes if shape.hidden % (shape.kv_groups * family.heads_per_group) == 0 or shape == full]
    fitting = [(shape, size) for shape in shapes if (size := parameters(shape, family)) <= parameters_at_most]
    if not fitting:
        smallest = min(shapes, key=lambda shape: parameters(shape, family))
        raise ValueError(
            f"no shape has at most {parameters_at_most:,} parameters: the smallest within {width_cut_pct} % of width and {depth_cut_pct} % of depth, "
            f"{tuple(smallest)}, has {parameters(smallest, family):,}; raise the budget or the percents"
        )
    found = [Candidate(shape, size, score(shape)) for shape, size in fitting]
    return sorted(found, key=lambda each: (each.score, each.parameters, each.shape), reverse=True)[:best]


def retained(
    layers: Sequence[float], kv_groups: Sequence[float], ffn: Sequence[float], hidden: Sequence[float]
) -> Callable[[Shape], float]:
    """A score for :func:`search`: the share of each axis's importance that its best parts hold, multiplied over the four axes; 1 for the
    full shape.

    A guess that costs nothing, and ours: that losses multiply is assumed, and importances of different axes are not compared.

    Args:
        layers, kv_groups, ffn, hidden: the importance of each part, 0 or more, such as means over the blocks.
    Raises:
        ValueError: an importance below 0, or an axis without any.
    """
    shares = []
    for name, values in zip(Shape._fields, (layers, kv_groups, ffn, hidden), strict=True):
        if min(values) < 0 or sum(values) <= 0:
            raise ValueError(f"importance of {name} is from {min(values)} to {max(values)}; numbers of 0 or more, not all 0, were expected")
        sums = list(itertools.accumulate(sorted(values, reverse=True), initial=0.0))
        shares.append([each / sums[-1] for each in sums])
    return lambda shape: shares[0][shape.layers] * shares[1][shape.kv_groups] * shares[2][shape.ffn] * shares[3][shape.hidden]


def _sizes(full: int, divisor: int, cut_pct: int) -> list[int]:
    """Multiples of the divisor that leave at least 100 - ``cut_pct`` percent, and the full size."""
    least = -(-full * (100 - cut_pct) // 100)
    first = -(-least // divisor) * divisor
    return sorted({*range(first, full, divisor), full})
