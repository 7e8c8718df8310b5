"""Speculation against plain decoding: where tokens differ, and what rounds of several prompts come to. Not here: decoding (``ops/decode``)."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

NEAR_TIE = 1e-4  # logits: a smaller gap between the two largest may be decided by rounding


class Difference(NamedTuple):
    """How a speculated text differs from the plain one. ``near_tie``: at the first difference the two best logits were closer than ``NEAR_TIE``."""

    first: int | None
    differing: int
    compared: int
    near_tie: bool


def compare_tokens(plain: Sequence[int], speculated: Sequence[int], gap_at: Callable[[int], float]) -> Difference:
    """Compare token by token; positions that only one text has count as differing.

    After a near tie both texts are right and go on differently, so nothing behind it is compared and nothing counts as differing.

    Args:
        gap_at: the gap between the two largest logits of the target at a position of the plain text; asked for at the first difference only.
    """
    longest = max(len(plain), len(speculated))
    differing = [index for index in range(longest) if index >= len(plain) or index >= len(speculated) or plain[index] != speculated[index]]
    if not differing:
        return Difference(None, 0, longest, False)
    first = differing[0]
    if first < min(len(plain), len(speculated)) and gap_at(first) < NEAR_TIE:
        return Difference(first, 0, first, True)
    return Difference(first, len(differing), longest, False)


def ratio(parts: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    """(Σ numerators / Σ denominators, its standard error over the parts): prompts are independent, rounds of one prompt are not.

    None where the denominators sum to 0; no standard error with fewer than two parts that have any.
    """
    parts = [part for part in parts if part[1]]
    total = sum(denominator for _, denominator in parts)
    if not total:
        return None, None
    value = sum(numerator for numerator, _ in parts) / total
    if len(parts) < 2:
        return value, None
    residual = sum((numerator - value * denominator) ** 2 for numerator, denominator in parts)
    return value, math.sqrt(residual * len(parts) / (len(parts) - 1)) / total
