"""A few input columns kept in 16 bits, the others as codes: which columns, taking a weight apart, and computing with the parts.

Not here: rescaling the columns instead (``smooth.py``, ``awq.py``).
"""

import math
from fractions import Fraction
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from assay.ops.quantize.activations import Activations, quantize_activations
from assay.ops.quantize.grid import Format, Quantized, dequantize, quantize

INT8 = Format(bits=8, group_size=-1)


class Split(NamedTuple):
    """A weight [rows, cols] in two: ``rest`` has zeros in ``columns``, whose weights are ``kept`` in 16 bits."""

    rest: Quantized
    kept: Float[Tensor, "rows chosen"]
    columns: Int[Tensor, " chosen"]

    @property
    def shape(self) -> tuple[int, int]:
        return self.rest.shape

    @property
    def form(self) -> str:
        """How it is stored, in a few words."""
        return f"{self.rest.form} with columns in {str(self.kept.dtype).removeprefix('torch.')}"

    def dense(self) -> Float[Tensor, "rows cols"]:
        """The whole weight in float32: its kept columns are exactly those kept."""
        weight = dequantize(self.rest)
        weight[:, self.columns] = self.kept.float()
        return weight


def above(largest: Float[Tensor, " cols"], threshold: float = 6.0) -> Int[Tensor, " chosen"]:
    """The columns whose input is ever above ``threshold`` in size, ascending.

    Args:
        largest: max |x| of each input channel, as ``statistics.largest_inputs`` gives it.
    Source:
        Dettmers et al. 2022 (LLM.int8), §3.2, arXiv:2208.07339. Theirs looks at each batch anew; this set is fixed by calibration, so that
        it can be stored.
    """
    return (largest > threshold).nonzero()[:, 0]


def share(salience: Float[Tensor, " cols"], percent: str | int | Fraction) -> Int[Tensor, " chosen"]:
    """The ⌈cols · percent / 100⌉ columns of most salience, ascending; of equal ones the earlier.

    Args:
        salience: such as max |x| or mean |x| of the inputs, or the norm of the weight's columns as a control.
        percent: exact, such as ``"0.5"``.
    Raises:
        ValueError: not from 0 to 100, or a salience that is not finite.
    """
    part = Fraction(percent)
    if not 0 <= part <= 100:
        raise ValueError(f"{percent} percent of the columns cannot be kept; 0 to 100 can")
    if not salience.isfinite().all():
        raise ValueError(f"{int((~salience.isfinite()).sum())} of {len(salience)} columns have a salience that is NaN or infinite")
    count = math.ceil(len(salience) * part / 100)
    return salience.argsort(descending=True, stable=True)[:count].sort().values


def split(
    weight: Float[Tensor, "rows cols"], columns: Int[Tensor, " chosen"], format: Format = INT8, *, dtype: torch.dtype = torch.bfloat16
) -> Split:
    """Keep ``columns`` in ``dtype`` and round the others in ``format``; the ranges of their groups are without the columns kept.

    Raises:
        ValueError: a column that is not in the weight or given twice, or a format that does not fit.
    """
    every = columns.tolist()
    if len(set(every)) != len(every) or any(not 0 <= column < weight.shape[1] for column in every):
        raise ValueError(f"columns {every[:8]} of {weight.shape[1]}: each is a number from 0 to {weight.shape[1] - 1}, given once")
    rest = weight.float().clone()
    rest[:, columns] = 0
    return Split(quantize(rest, format), weight[:, columns].to(dtype), columns)


def multiply(values: Float[Tensor, "*tokens cols"], weight: Split, activations: Activations | None = None) -> Float[Tensor, "*tokens rows"]:
    """The product with a split weight, in float32: codes with rounded inputs, whose range leaves the kept channels out, and kept columns
    with exact ones.

    Args:
        activations: how the inputs of the rest are rounded; not at all when None.
    Source:
        Dettmers et al. 2022, eq. 8, arXiv:2208.07339.
    """
    inside = values.float().clone()
    inside[..., weight.columns] = 0
    if activations is not None:
        inside = quantize_activations(inside, activations)
    return inside @ dequantize(weight.rest).T + values.float()[..., weight.columns] @ weight.kept.float().T
