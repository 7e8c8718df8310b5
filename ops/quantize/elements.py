"""The number types that codes stand for: integers, small floats, a normal-float table, three values. Not here: scales and groups (``grid.py``).

A code is a byte. Of ``int`` and ``ternary`` it is the number itself; of the others its bit pattern (``e4m3``, ``e5m2``, ``e2m1``) or its place in a table
(``nf4``), stored as int8.
"""

from functools import cache
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int8
from torch import Tensor

Element = Literal["int", "ternary", "e2m1", "nf4", "e4m3", "e5m2"]
ELEMENTS: tuple[str, ...] = get_args(Element)
FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # bits 0 to 2 of a code; bit 3 is the sign
LARGEST = {"e2m1": 6.0, "nf4": 1.0, "ternary": 1.0, "e4m3": 448.0, "e5m2": 57_344.0}
LARGEST_EXPONENT = {"e2m1": 2, "e4m3": 8, "e5m2": 15}
MANTISSA_BITS = {"e2m1": 1, "e4m3": 3, "e5m2": 2}
TABLES = ("e2m1", "nf4")  # whose codes are places in a table of sixteen
BITS = {"ternary": 2, "e2m1": 4, "nf4": 4, "e4m3": 8, "e5m2": 8}  # of a code in a byte or less; the bits of ``int`` are free


@cache
def nf4_values() -> tuple[float, ...]:
    """The sixteen values of NormalFloat4, ascending, -1 and 1 among them: quantiles of a normal distribution, eight negative, zero, seven positive.

    Source:
        Dettmers et al. 2023, §3 and appendix E, arXiv:2305.14314, where the outermost quantile is the mean of those of 1/32 and 1/30 of the mass.
    """
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    positive = torch.special.ndtri(torch.linspace(outermost, 0.5, 9, dtype=torch.float64)[:-1])
    negative = -torch.special.ndtri(torch.linspace(outermost, 0.5, 8, dtype=torch.float64)[:-1])
    every = torch.cat((positive, negative, torch.zeros(1, dtype=torch.float64))).sort().values
    return tuple((every / every.max()).float().tolist())


@cache
def table(element: str) -> tuple[float, ...]:
    """The value of each code 0, 1, … of a type whose codes are places in a table of sixteen: ``e2m1`` or ``nf4``."""
    return nf4_values() if element == "nf4" else (*E2M1_VALUES, *(-value for value in E2M1_VALUES))


def encode(numbers: Float[Tensor, "*shape"], element: str, *, low: int = -8, high: int = 7) -> Int8[Tensor, "*shape"]:
    """The code whose value is nearest to each number; ties go to the even code, and what is out of range to the last one.

    Args:
        low, high: the first and last code of ``int``.
    """
    if element == "int":
        return numbers.round().clamp_(low, high).to(torch.int8)
    if element == "ternary":
        return numbers.round().clamp_(-1, 1).to(torch.int8)
    if element in FLOAT8:
        largest = LARGEST[element]  # clamped here: whether a cast saturates or makes NaN differs between builds
        return numbers.float().clamp(-largest, largest).to(FLOAT8[element]).view(torch.int8)
    if element == "e2m1":
        size = numbers.abs()
        step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
        value = ((size / step).round_() * step).clamp_(max=6)
        places = torch.searchsorted(torch.tensor(E2M1_VALUES, device=numbers.device, dtype=value.dtype), value)
        return (places + 8 * numbers.signbit()).to(torch.int8)
    if element == "nf4":
        values = torch.tensor(nf4_values(), device=numbers.device, dtype=torch.float32)
        return torch.bucketize(numbers.float().contiguous(), (values[1:] + values[:-1]) / 2).to(torch.int8)
    raise ValueError(f"the element {element!r} is none of {', '.join(ELEMENTS)}")


def decode(codes: Int8[Tensor, "*shape"], element: str) -> Float[Tensor, "*shape"]:
    """The value of each code, in float32."""
    if element in ("int", "ternary"):
        return codes.float()
    if element in FLOAT8:
        return codes.view(FLOAT8[element]).float()
    return _table_on(element, codes.device)[codes.long()]


@cache
def _table_on(element: str, device: torch.device) -> Float[Tensor, " sixteen"]:
    """:func:`table` as a tensor, kept: where a CUDA graph is recorded nothing can be copied to the device."""
    with torch.inference_mode(False):
        return torch.tensor(table(element), device=device)
