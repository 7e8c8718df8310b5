"""The second moment of what a layer reads, H = 2 XᵀX / tokens: the curvature of its squared output error; and its factor.

Not here: what is done with it (``gptq.py``).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor

from assay.ops.quantize.sequential import Group, Stage

PART = 384  # columns a product: only those on and above the diagonal of parts are formed


class Hessian:
    """A running mean over tokens in float32, of inputs that come in parts of any size."""

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self.tokens = 0
        self._mean = torch.zeros(width, width, device=device)

    @torch.no_grad()
    def add(self, inputs: Float[Tensor, "tokens in"]) -> None:
        """Take in more tokens, each as much as any before it."""
        if not len(inputs):
            return
        total, width, inputs = self.tokens + len(inputs), inputs.shape[1], inputs.float()
        part = -(-width // -(-width // PART))
        with full_precision():
            for row in range(0, width, part):
                rows = inputs[:, row : row + part].T
                self._mean[row : row + part, row:].addmm_(rows, inputs[:, row:], beta=self.tokens / total, alpha=2 / total)
        self.tokens = total

    def matrix(self) -> Float[Tensor, "in in"]:
        """H, symmetric.

        Raises:
            ValueError: no token was added, or only zeros.
        """
        if not self.tokens:
            raise ValueError("no token reached this layer, so its Hessian is unknown; run the model on text before, or round to nearest")
        return self._mean.triu() + self._mean.triu(1).T


def gather(stage: Stage) -> dict[Group, Hessian]:
    """The Hessian of each group of a stage; an expert to which no token was routed has none."""
    found: dict[Group, Hessian] = {}
    for group, inputs in stage.inputs():
        if group not in found:
            found[group] = Hessian(inputs.shape[1], inputs.device)
        found[group].add(inputs)
    return found


def cholesky(matrix: Float[Tensor, "cols cols"], part: int = 768) -> Float[Tensor, "cols cols"] | None:
    """The lower factor, or None if there is none. In parts, since LAPACK alone takes twice as long from a thousand columns on."""
    if len(matrix) <= part:
        lower, info = torch.linalg.cholesky_ex(matrix)
        return None if info or not lower.diagonal().isfinite().all() else lower
    lower = matrix.tril()
    for low in range(0, len(lower), part):
        here, below = slice(low, low + part), slice(low + part, None)
        lower[low:, here].addmm_(lower[low:, :low], lower[here, :low].T, alpha=-1)
        factor = cholesky(lower[here, here], part)
        if factor is None:
            return None
        lower[here, here] = factor
        lower[below, here] = torch.linalg.solve_triangular(factor.T, lower[below, here], upper=True, left=False)
    return lower


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of float32 in float32 inside, whatever the program has allowed (TF32, bfloat16)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
