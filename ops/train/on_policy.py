"""Rows that the student goes on with itself, beside rows of text: what a step of distillation reads.

Not here: the order of the windows (``batches.py``), or the losses.
"""

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from assay.ops.train.batches import Batch, generator, marked

Sample = Callable[[Any, Tensor, int, torch.Generator], Tensor]
"""(model, prompts [rows, n], new tokens, generator) → ids [rows, n + new tokens]: continuations sampled at temperature 1."""


class OnPolicy(NamedTuple):
    """How much of a run the student writes itself, and how."""

    pct: int = 0  # percent of the rows, counted over the run
    prefix: int | None = None  # tokens of a window that a sample goes on from; a quarter of the window when None
    eos_ids: Collection[int] = frozenset()  # what follows one of these in a sample counts for nothing
    sample: Sample | None = None  # another generator of samples than sample_with_cache


def with_samples(batch: Batch, step: int, student: Any, on_policy: OnPolicy, *, seed: int, vocabulary: int | None = None) -> Batch:
    """The batch of a step in which the declared share of rows keeps the beginning of its window and goes on as ``student`` samples.

    Args:
        vocabulary: ids beyond the first so many are never sampled.
    Raises:
        ValueError: a prefix that leaves nothing to sample.
    """
    own = marked(step, rows=len(batch.ids), pct=on_policy.pct).to(batch.ids.device)
    if not own.any():
        return batch
    length = batch.ids.shape[1]
    prefix = prefix_of(on_policy, length)
    sampler = on_policy.sample or default_sampler(vocabulary)
    ids, real = batch.ids.clone(), batch.real.clone()
    with _sampling(student):
        ids[own] = sampler(student, ids[own][:, :prefix], length - prefix, generator(seed, "sample", step, device=ids.device))
    real[own] = until_end(ids[own], prefix, on_policy.eos_ids)
    return batch._replace(ids=ids, real=real, text=batch.text & ~own)


def prefix_of(on_policy: OnPolicy, length: int) -> int:
    """How many tokens of a window of ``length`` a sample goes on from.

    Raises:
        ValueError: none, or so many that nothing is left to sample, when something is to be sampled.
    """
    prefix = max(1, length // 4) if on_policy.prefix is None else on_policy.prefix
    if on_policy.pct and not 1 <= prefix < length:
        raise ValueError(f"a prefix of {prefix} tokens in windows of {length}; 1 to {length - 1} leave something to sample")
    return prefix


def until_end(ids: Int64[Tensor, "rows length"], prefix: int, eos_ids: Collection[int]) -> Bool[Tensor, "rows length"]:
    """True up to the position that predicts a sampled end of sequence; from the end itself on nothing is predicted that a draft would propose."""
    ended = torch.isin(ids[:, prefix:], torch.tensor(sorted(eos_ids), dtype=ids.dtype, device=ids.device)).cumsum(dim=1) > 0
    return torch.cat([torch.ones_like(ids[:, :prefix], dtype=torch.bool), ~ended], dim=1)


def default_sampler(vocabulary: int | None = None) -> Sample:
    """:func:`sample_with_cache` over the first ``vocabulary`` ids."""
    return lambda model, prompts, new_tokens, random: sample_with_cache(model, prompts, new_tokens, random, vocabulary=vocabulary)


@torch.no_grad()
def sample_with_cache(
    model: Any, prompts: Int64[Tensor, "rows n"], new_tokens: int, random: torch.Generator, *, vocabulary: int | None = None
) -> Int64[Tensor, "rows length"]:
    """Continue every prompt by ``new_tokens`` tokens drawn from the model's own distributions, through transformers' cache.

    One generator serves the batch, since training data need no draw that is independent of the neighbours. Nothing stops at an end of sequence.
    """
    from transformers import DynamicCache

    accepted = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in accepted else "past_key_values"  # transformers renamed it and warns at the old name
    keep = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
    cache, found, read = DynamicCache(config=model.config), prompts, prompts
    for _ in range(new_tokens):
        logits = model(input_ids=read, use_cache=True, **{name: cache}, **keep).logits[:, -1, :vocabulary]
        read = torch.multinomial(logits.float().softmax(dim=-1), 1, generator=random)
        found = torch.cat([found, read], dim=1)
    return found


@contextmanager
def _sampling(model: Any) -> Iterator[None]:
    """The model in evaluation mode, without gradients, and as it was after."""
    was = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was)
