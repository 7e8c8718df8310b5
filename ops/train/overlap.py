"""How alike a student and its teacher speak on held-out text: what the points of a recovery curve are.

Not here: divergences token by token (``ops/evaluate/divergence.py``), or training.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from assay.ops.evaluate.divergence import Head, head_of, per_token
from assay.ops.train import passes


class Overlap(NamedTuple):
    """Averages over positions; nats, but for ``overlap`` and ``top1_agreement`` (0 to 1).

    ``overlap`` is Σ min(p, q) = 1 − TV, the share of proposals that exact verification is expected to accept; ``kl_nats`` is KL(teacher‖student).
    """

    overlap: float
    kl_nats: float
    top1_agreement: float
    log_perplexity: float  # of the student
    base_log_perplexity: float  # of the teacher


def overlap_with(
    teacher: Any,
    held_out: Int64[Tensor, "windows length"],
    *,
    vocabulary: int | None = None,
    document_ends: Collection[int] = frozenset(),
) -> Callable[[Any], Overlap]:
    """What measures a student against ``teacher`` on ``held_out``, at every position but each window's last; the teacher reads the text once."""
    known = states_of(teacher, held_out, document_ends=document_ends)
    return overlap_with_states(known, head_of(teacher), held_out, vocabulary=vocabulary, document_ends=document_ends)


def overlap_with_states(
    known: Float[Tensor, "windows length width"],
    head: Head,
    held_out: Int64[Tensor, "windows length"],
    *,
    vocabulary: int | None = None,
    document_ends: Collection[int] = frozenset(),
) -> Callable[..., Overlap]:
    """:func:`overlap_with` of a teacher whose final hidden states are known; the student's own can be given beside it, where they are."""
    base = known[:, :-1].flatten(0, 1).float()

    def measure(student: Any, given: Tensor | None = None) -> Overlap:
        own = head_of(student)
        size = shared_vocabulary(head, own, vocabulary)
        whole = states_of(student, held_out, document_ends=document_ends) if given is None else given
        states = whole[:, :-1].flatten(0, 1)
        found = per_token(base.to(states.device), head.cut(size), states, own.cut(size), held_out[:, 1:].flatten())
        mean = {name: float(value.double().mean()) for name, value in found._asdict().items()}
        return Overlap(1 - mean["tv"], mean["kl"], mean["agrees"], mean["nll"], mean["base_nll"])

    return measure


@torch.no_grad()
def states_of(
    model: Any,
    windows: Int64[Tensor, "windows length"],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    document_ends: Collection[int] = frozenset(),
) -> Float[Tensor, "windows length width"]:
    """The final hidden states of all windows, a few at a time, on ``device``; on the model's when None."""
    parts, kept = windows.split(max(1, passes.FORWARD_TOKENS // windows.shape[1])), device or model.device
    return torch.cat([passes.final_states(model, part.to(model.device), document_ends=document_ends).to(kept, dtype) for part in parts])


def shared_vocabulary(teacher: Head, student: Head, vocabulary: int | None = None) -> int:
    """The ids that both heads and the tokenizer have."""
    return min(len(teacher.weight), len(student.weight), vocabulary or len(student.weight))
