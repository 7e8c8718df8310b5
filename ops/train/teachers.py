"""What a teacher says of the windows, kept so that it is not run again: its final hidden states, or its most likely ids and their probabilities.

Not here: where these are stored, or a teacher that is run beside the student (``recover.py``).
"""

from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from assay.ops.evaluate.divergence import Head, head_of
from assay.ops.train import passes
from assay.ops.train.losses import CHUNK, chunked_sum
from assay.ops.train.overlap import states_of

Tail = Literal["renormalised", "bucket"]


class CachedStates(NamedTuple):
    """A teacher by its final hidden states, in any float dtype. Its full distributions follow, to the rounding of that dtype."""

    states: Float[Tensor, "windows length width"]  # of the windows trained on
    held_out: Float[Tensor, "held_out held_length width"]
    head: Head


class TopK(NamedTuple):
    """The ``k`` most likely ids at each position, by falling probability, and how likely the others are together; nats."""

    ids: Int32[Tensor, "*positions k"]
    log_probabilities: Float[Tensor, "*positions k"]
    log_tail: Float[Tensor, "*positions"]
    vocabulary: int  # the ids that were looked at


class CachedTopK(NamedTuple):
    """A teacher by its most likely ids; what the loss does with the rest is ``tail``, see :func:`top_k_sum`. Held-out text has its states in full."""

    top: TopK  # of the windows trained on
    held_out: Float[Tensor, "held_out held_length width"]
    head: Head
    tail: Tail = "bucket"


def teacher_states(
    model: Any,
    windows: Int64[Tensor, "windows length"],
    *,
    dtype: torch.dtype = torch.bfloat16,
    document_ends: Collection[int] = frozenset(),
) -> Float[Tensor, "windows length width"]:
    """The final hidden states of all windows, on the CPU: 2 · width bytes a position in bfloat16."""
    return states_of(model, windows, dtype=dtype, device="cpu", document_ends=document_ends)


def top_k_logits(
    model: Any,
    windows: Int64[Tensor, "windows length"],
    k: int,
    *,
    vocabulary: int | None = None,
    document_ends: Collection[int] = frozenset(),
) -> TopK:
    """The ``k`` most likely next ids at every position of all windows, on the CPU: 8 · k + 4 bytes a position.

    Args:
        vocabulary: only the first so many ids, over which probabilities add up to 1; all of the head when None.
    Raises:
        ValueError: ``k`` leaves no tail, or is below 1.
    """
    head, parts = head_of(model).cut(vocabulary or len(model.get_output_embeddings().weight)), []
    _require_k(k, len(head.weight))
    for part in windows.split(max(1, passes.FORWARD_TOKENS // windows.shape[1])):
        parts.append(top_k_of(states_of(model, part, document_ends=document_ends), head, k))
    tensors = (torch.cat([getattr(part, name) for part in parts]).cpu() for name in TopK._fields[:3])
    return TopK(*tensors, vocabulary=len(head.weight))


@torch.no_grad()
def top_k_of(states: Float[Tensor, "windows length width"], head: Head, k: int) -> TopK:
    """The ``k`` most likely ids of the distributions that ``head`` makes of ``states``.

    Raises:
        ValueError: see :func:`top_k_logits`.
    """
    _require_k(k, len(head.weight))
    flat, parts = states.flatten(0, 1), []
    for chunk in flat.split(CHUNK):
        logits = head.logits(chunk)
        total = logits.logsumexp(dim=-1, keepdim=True)
        values, ids = logits.topk(k, dim=-1)
        rest = logits.scatter_(-1, ids, -torch.inf).logsumexp(dim=-1)
        parts.append((ids.int(), values - total, rest - total.squeeze(-1)))
    ids, values, rest = (torch.cat(each).unflatten(0, states.shape[:2]) for each in zip(*parts, strict=True))
    return TopK(ids, values, rest, len(head.weight))


def top_k_sum(
    top: TopK,
    student: Float[Tensor, "tokens width"],
    student_head: Head,
    divergence: Callable[[Tensor, Tensor], Tensor],
    *,
    tail: Tail,
    chunk: int = CHUNK,
) -> Float[Tensor, ""]:
    """The sum over tokens of ``divergence`` between what is known of the teacher's distributions and the same of the student's.

    Both are biased, and by how much depends on the tail; a bucket never gives more than the full distributions would, since it only merges events.

    Args:
        top: one row a token.
        tail: ``bucket`` compares k + 1 events, the last of which is any other id: what the student puts there is learned, not how it is spread.
            ``renormalised`` compares the distributions given that one of the k ids comes: nothing is learned of how likely the others are.
    """
    ids, known = top.ids.long(), top.log_probabilities
    if tail == "bucket":
        known = torch.cat([known, top.log_tail.unsqueeze(-1)], dim=-1)

    def value(at: Tensor, logits: Tensor) -> Tensor:
        chosen = logits.gather(-1, ids[at])
        if tail == "bucket":
            rest = logits.scatter(-1, ids[at], -torch.inf).logsumexp(dim=-1, keepdim=True)
            chosen = torch.cat([chosen, rest], dim=-1)
        return divergence(known[at], chosen)

    tokens = torch.arange(len(student), device=student.device)
    return chunked_sum(student, student_head, lambda part: tokens[part], value, vocabulary=top.vocabulary, chunk=chunk)


def rows_of(top: TopK, rows: Tensor, device: torch.device) -> TopK:
    """The entries that ``rows``, an index of windows or a mask of positions, names."""
    ids, values, rest = (each[rows.to(each.device)].to(device) for each in top[:3])
    return TopK(ids, values, rest, top.vocabulary)


def _require_k(k: int, vocabulary: int) -> None:
    if not 1 <= k < vocabulary:
        raise ValueError(
            f"the {k} most likely of {vocabulary} ids; 1 to {vocabulary - 1} leave a tail, and all of them are what cached states are for"
        )
