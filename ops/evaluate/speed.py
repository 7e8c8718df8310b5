"""Prefill and decode rates of a model, apart, with and without a draft. Not here: how times are taken (``timing.py``) or the decoding loops.

The end of a text is ignored: every run emits the number of tokens asked for, so that all variants do the same work.
"""

import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from assay.ops.evaluate.timing import Times, interleave_times, measure_times, synchronise


class Decode(NamedTuple):
    """Emitted tokens after the prefill's own, per second of decoding, and per second of prefill and decoding together."""

    tokens: int
    decode_tok_s: float
    end_to_end_tok_s: float


class Rate(NamedTuple):
    """Tokens/s at the median time, and the times it comes from."""

    tok_s: float
    standard_error: float | None
    times: Times


def count_decode(
    rows: Sequence[Sequence[int]], *, eos_ids: Collection[int] = frozenset(), prefill_seconds: float, decode_seconds: float
) -> Decode:
    """Count what was emitted: of each row the tokens up to and with its first end-of-sequence token, but for the first, which the prefill made.

    Args:
        rows: the new tokens of each row of a batch, the prefill's first; what a batch computes for a row that has ended is not counted.
    """
    tokens = 0
    for row in rows:
        end = next((index + 1 for index, token in enumerate(row) if token in eos_ids), len(row))
        tokens += max(end - 1, 0)
    return Decode(tokens, tokens / decode_seconds, tokens / (prefill_seconds + decode_seconds))


def rate(tokens: int, times: Times) -> Rate:
    """``tokens`` over the median of ``times``; its standard error to first order."""
    spread = times.spread
    return Rate(tokens / times.median, None if spread is None else tokens * spread / times.median**2, times)


def prefill_speed(model: Any, ids: Int64[Tensor, "batch tokens"], *, make_cache: Callable[[], Any], repeats: int, warmup: int = 1) -> Rate:
    """Prompt tokens/s, a fresh cache each time, and the head on the last position only."""
    step = _Stepper(model)

    def once() -> None:
        step(ids, make_cache())

    return rate(ids.numel(), measure_times(once, repeats=repeats, warmup=warmup))


@torch.inference_mode()
def batch_decode(
    model: Any, ids: Int64[Tensor, "batch tokens"], *, new_tokens: int, cache: Any, clock: Callable[[], float] = time.perf_counter
) -> tuple[Int64[Tensor, "batch new_tokens"], float]:
    """``new_tokens`` greedy tokens of each row of equally long prompts, and the seconds that all but the first of them took."""
    step = _Stepper(model)
    tokens = [step(ids, cache).argmax(dim=-1, keepdim=True)]
    synchronise()
    begin = clock()
    for _ in range(new_tokens - 1):
        tokens.append(step(tokens[-1], cache).argmax(dim=-1, keepdim=True))
    synchronise()
    return torch.cat(tokens, dim=1), clock() - begin


def decode_speeds(runs: Mapping[str, Callable[[], tuple[int, float]]], *, repeats: int, warmup: int = 1) -> dict[str, Rate]:
    """Decode rates of several ways to decode, by name, the repeats taking turns.

    Args:
        runs: each decodes once and returns (tokens after the prefill's own, seconds that they took).
    """
    counts: dict[str, int] = {}

    def seconds(name: str) -> float:
        counts[name], taken = runs[name]()
        return taken

    times = interleave_times({name: partial(seconds, name) for name in runs}, repeats=repeats, warmup=warmup)
    return {name: rate(counts[name], times[name]) for name in runs}


class _Stepper:
    """One forward through a cache: logits of the last position."""

    def __init__(self, model: Any) -> None:
        self.model = model
        accepted = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in accepted else "past_key_values"  # renamed in transformers 5
        self.keep = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}

    @torch.inference_mode()
    def __call__(self, ids: Tensor, cache: Any) -> Tensor:
        return self.model(input_ids=ids, use_cache=True, **{self.cache_name: cache}, **self.keep).logits[:, -1]
