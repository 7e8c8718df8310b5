"""What every way of running a decoder offers to the loops. Not here: one of them (``forward``; the native one is in ``assay.kernels``)."""

from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from assay.ops.decode.architecture import Architecture
from assay.ops.decode.cache import Cache, Step


class Runner(Protocol):
    """A decoder with its weights.

    Attributes:
        path: how it computes, stored with each timing, such as ``torch float32, bfloat16 weights``.
    """

    shape: Architecture
    device: torch.device
    path: str

    def cache(self, *, rows: int, capacity: int, format: str | None = None) -> Cache:
        """An empty cache that :meth:`forward` can write; see :class:`Cache`."""
        ...

    def forward(self, cache: Cache, step: Step) -> Float[Tensor, "kept vocab"]:
        """Read the tokens of ``step``, which ``cache.append`` made: store their keys and values, and return the float32 logits of ``step.keep``."""
        ...
