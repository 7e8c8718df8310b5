"""How likely one of k samples is right, from n samples a problem. Not here: drawing samples, judging them, votes over them (``ops/decode/votes.py``)."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class PassAtK(NamedTuple):
    """The mean over problems; the standard error is that of this mean over problems, None with fewer than two."""

    value: float
    standard_error: float | None
    problems: int


def pass_at_k(samples: int, right: int, k: int) -> float:
    """1 − C(n − c, k) / C(n, k): the chance that k of one problem's n samples, taken without putting back, have one of its c right ones.

    Unbiased, unlike 1 − (1 − c/n)^k. Exact integers, rounded once.

    Raises:
        ValueError: ``k`` is below 1 or above ``samples``, or ``right`` is not a count from 0 to ``samples``.
    Source:
        Chen et al. 2021, equation 1, arXiv:2107.03374.
    """
    for name, count in (("samples", samples), ("right", right), ("k", k)):
        if not isinstance(count, int) or isinstance(count, bool):
            raise ValueError(f"{name}={count!r} is no count; expected a whole number: how many, not whether or which share")
    if not 1 <= k <= samples:
        raise ValueError(
            f"k={k} with {samples} samples; expected k from 1 to the samples of each problem. Draw at least {max(k, 1)} samples"
        )
    if not 0 <= right <= samples:
        raise ValueError(f"{right} of {samples} samples are right; expected from 0 to {samples}")
    ways = math.comb(samples, k)
    return (ways - math.comb(samples - right, k)) / ways


def mean_pass_at_k(problems: Sequence[tuple[int, int]], k: int) -> PassAtK:
    """:func:`pass_at_k` of each problem, then the mean; counts are never pooled over problems, which would let an easy one stand for a hard one.

    Args:
        problems: samples and right ones of each.
    Raises:
        ValueError: there is no problem, or one of them has fewer than ``k`` samples; its number is told.
    """
    if not problems:
        raise ValueError("there is no problem to average over; expected at least one pair of samples and right ones")
    values = []
    for number, (samples, right) in enumerate(problems):
        try:
            values.append(pass_at_k(samples, right, k))
        except ValueError as error:
            error.add_note(f"in problem {number} of {len(problems)}")
            raise
    mean, count = math.fsum(values) / len(values), len(values)
    if count < 2:
        return PassAtK(mean, None, count)
    return PassAtK(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count), count)
