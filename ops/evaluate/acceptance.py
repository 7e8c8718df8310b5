"""Speculated against plain text, and what rounds of several prompts come to. Not here: decoding (``ops/decode``)."""

import math
from collections.abc import Sequence


def differing(plain: Sequence[int], speculated: Sequence[int]) -> int:
    """How many positions differ; those that only one text has count as differing."""
    shared = min(len(plain), len(speculated))
    return sum(one != other for one, other in zip(plain, speculated, strict=False)) + max(len(plain), len(speculated)) - shared


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
