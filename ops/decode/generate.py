"""Plain decoding of several prompts: one token a forward and text. Not here: drafts and their verification (``speculate``), how a token is chosen
(``sampling``, ``request``)."""

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from assay.ops.decode.constraints import Constraint
from assay.ops.decode.request import Request, next_tokens, open_requests
from assay.ops.decode.runner import Runner, undisturbed
from assay.ops.decode.sampling import Sampling
from assay.ops.decode.session import Session, read_clock

GREEDY = Sampling()


class Generated(NamedTuple):
    """New tokens, the end-of-sequence token included, and the wall-clock seconds of the two phases of the batch that the text was part of.

    ``prefill_seconds`` ends with the first new token of every text, ``decode_seconds`` with the last of the longest. So a batch's rate is the sum of
    ``len(tokens) - 1`` over ``decode_seconds``.
    """

    tokens: list[int]
    prefill_seconds: float
    decode_seconds: float


@undisturbed
def generate(
    runner: Runner,
    prompts: "Sequence[Sequence[int]] | Tensor",
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eos_ids: Collection[int] = frozenset(),
    generators: Sequence[torch.Generator] | None = None,
    kv_format: str | None = None,
    vocabulary: int | None = None,
    constraints: Sequence[Constraint | None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Generated]:
    """Continue each prompt until an end-of-sequence token or ``max_new_tokens``; a text that has ended is read no further while others go on.

    Args:
        prompts: lists of ids, of any lengths; or [rows, tokens]. A padded batch goes through :func:`assay.ops.decode.session.strip_padding` first.
        sampling: how each request turns logits into a distribution; the default is greedy.
        eos_ids: any of these ends a text and is its last token.
        generators: one a prompt, advancing with each draw of its text alone. Greedy decoding needs none.
        kv_format: how keys and values are stored; None keeps the runner's own dtype.
        vocabulary: ids from here on cannot come: the tokenizer's size, where the head is padded beyond it.
        constraints: one a prompt (or None), each new; it masks the logits before anything else looks at them.
        clock: seconds, monotonic.
    Raises:
        ValueError: a parameter is out of range, a prompt is empty or has foreign ids, sampling has no generators; nothing was computed then.
        DeadEnd: a constraint lets nothing follow a text.
    """
    size = shared_size(runner.shape.vocabulary, vocabulary)
    requests = open_requests(
        prompts, size=runner.shape.vocabulary, sampling=sampling, max_new_tokens=max_new_tokens, eos_ids=eos_ids, generators=generators,
        constraints=constraints,
    )  # fmt: skip
    session = open_session(runner, requests, kv_format)
    begun = read_clock(clock, session.device)
    emit(session, requests, sampling, size)
    prefilled = read_clock(clock, session.device)
    while not all(request.done for request in requests):
        emit(session, requests, sampling, size)
    done = read_clock(clock, session.device)
    return [Generated(request.emitted, prefilled - begun, done - prefilled) for request in requests]


def open_session(runner: Runner, requests: Sequence[Request], kv_format: str | None) -> Session:
    """A session with a row and enough room for each request."""
    return Session(runner, rows=len(requests), capacity=max(request.start + request.limit for request in requests), kv_format=kv_format)


def emit(session: Session, requests: Sequence[Request], sampling: Sampling, size: int) -> None:
    """One more token of each text that has not ended, after reading what the session has not read of it."""
    lengths = session.lengths
    found = session.read([[] if request.done else request.text[read:] for request, read in zip(requests, lengths, strict=True)])
    going = [row for row, request in enumerate(requests) if not request.done]
    tokens = next_tokens(stack([found[row] for row in going])[:, :size], [requests[row] for row in going], sampling)
    for row, token in zip(going, tokens, strict=True):
        requests[row].add(token)


def stack(rows: Sequence[Float[Tensor, "1 vocab"]]) -> Float[Tensor, "rows vocab"]:
    """One row a text, as one tensor; a single one is not copied."""
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def shared_size(size: int, vocabulary: int | None) -> int:
    """How many ids can come: all ``size`` of the model, or the first ``vocabulary`` of them."""
    if vocabulary is None:
        return size
    if vocabulary < 1:
        raise ValueError(f"vocabulary={vocabulary} leaves no token; expected the tokenizer's size, or None for all {size} of the model")
    return min(size, vocabulary)
