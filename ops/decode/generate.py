"""Plain decoding: one token a forward. Not here: drafts and their verification (``speculate``), how a token is chosen (``sampling``)."""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from assay.ops.decode.sampling import Sampling, require_generator, sample
from assay.ops.decode.session import Session, check_prompt, read_clock, vocabulary_size


class Generated(NamedTuple):
    """New tokens, the end-of-sequence token included, and the wall-clock seconds of the two phases.

    ``prefill_seconds`` ends with the first new token; ``decode_seconds`` is the time of all others, so a rate is ``(len(tokens) - 1) / decode_seconds``.
    """

    tokens: list[int]
    prefill_seconds: float
    decode_seconds: float


def generate(
    model: Any,
    prompt_ids: Int[Tensor, "1 tokens"] | Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    eos_ids: Collection[int] = frozenset(),
    generator: torch.Generator | None = None,
    kv_format: str | None = None,
    vocabulary: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Generated:
    """Continue one prompt until an end-of-sequence token or ``max_new_tokens``.

    Args:
        model: a transformers causal LM in evaluation mode.
        temperature, top_k, top_p, min_p: see :func:`assay.ops.decode.sampling.probabilities`; the default is greedy.
        eos_ids: any of these ends the text and is its last token.
        generator: the request's own; it advances with each draw. Greedy decoding needs none.
        kv_format: how keys and values are stored; None keeps the model's dtype.
        vocabulary: ids from here on cannot come: the tokenizer's size, where the head is padded beyond it.
        clock: seconds, monotonic.
    Raises:
        ValueError: a parameter is out of range, the prompt is empty or has foreign ids, sampling has no generator, the model is in training mode.
    """
    sampling = Sampling(temperature, top_k, top_p, min_p)
    check_request(sampling, max_new_tokens=max_new_tokens, generator=generator)
    size = shared_size(vocabulary_size(model), vocabulary)
    prompt = check_prompt(prompt_ids, vocabulary_size(model))
    session = Session(model, kv_format=kv_format)

    begun = read_clock(clock, session.device)
    tokens = [next_token(session.read(prompt, keep=1)[0, :size], sampling, generator)]
    prefilled = read_clock(clock, session.device)
    while len(tokens) < max_new_tokens and tokens[-1] not in eos_ids:
        tokens.append(next_token(session.read(tokens[-1:], keep=1)[0, :size], sampling, generator))
    return Generated(tokens, prefilled - begun, read_clock(clock, session.device) - prefilled)


def next_token(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """The token that follows: the largest of ``logits [vocab]``, or a draw."""
    return sample(sampling.probabilities(logits), generator)


def check_request(sampling: Sampling, *, max_new_tokens: int, generator: torch.Generator | None) -> None:
    """Refuse before any work what could only fail later."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} asks for no token; expected 1 or more")
    if not sampling.greedy:
        require_generator(generator)


def shared_size(size: int, vocabulary: int | None) -> int:
    """How many ids can come: all ``size`` of the model, or the first ``vocabulary`` of them."""
    if vocabulary is None:
        return size
    if vocabulary < 1:
        raise ValueError(f"vocabulary={vocabulary} leaves no token; expected the tokenizer's size, or None for all {size} of the model")
    return min(size, vocabulary)
