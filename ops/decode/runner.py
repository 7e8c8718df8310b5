"""What every way of running a decoder offers to the loops. Not here: one of them (``forward``; the native one is in ``assay.kernels``)."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from assay.ops.decode.architecture import Architecture
from assay.ops.decode.cache import Cache, Step

Loop = TypeVar("Loop", bound=Callable[..., Any])


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


def undisturbed(loop: Loop) -> Loop:
    """Keep torch to one thread while ``loop``, whose first argument is a runner, runs one that ``has_threads`` of its own.

    The loop works on single rows between two steps, which one thread does as fast; torch's others would go on spinning into the next step, on the cores
    that the runner's threads need.
    """

    @wraps(loop)
    def alone(runner: Runner, *arguments: Any, **named: Any) -> Any:
        before = torch.get_num_threads()
        if before == 1 or not getattr(runner, "has_threads", False):
            return loop(runner, *arguments, **named)
        torch.set_num_threads(1)
        try:
            return loop(runner, *arguments, **named)
        finally:
            torch.set_num_threads(before)

    return alone  # type: ignore[return-value]
