"""Rounded inputs, as a step says them and as ops take them. Not here: any step."""

from assay.ops.quantize.activations import Activations
from assay.schemas.rounding import Inputs


def activations_of(inputs: Inputs) -> Activations:
    """How inputs are rounded; a static range is still to be measured."""
    return Activations(inputs.format, inputs.per, inputs.symmetric, inputs.clip_pct / 100)
