"""Prefill and decode rates of a model, apart, with and without a draft. Not here: how times are taken (``timing.py``) or the decoding loops.

The end of a text is ignored: every run emits the number of tokens asked for, so that all variants do the same work.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from assay.ops.decode.runner import Runner
from assay.ops.decode.session import Session
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


def prefill_speed(runner: Runner, prompts: Sequence[Sequence[int]], *, kv_format: str | None, repeats: int, warmup: int = 1) -> Rate:
    """Prompt tokens/s, a fresh cache each time, and the head on the last position of each prompt only."""
    capacity = max(map(len, prompts))

    def once() -> None:
        Session(runner, rows=len(prompts), capacity=capacity, kv_format=kv_format).read(prompts)

    return rate(sum(map(len, prompts)), measure_times(once, repeats=repeats, warmup=warmup))


def emitted(texts: Sequence[Any]) -> tuple[int, float]:
    """Tokens after the prefill's own, and the seconds that they took, of a batch of generated texts."""
    return sum(len(each.tokens) - 1 for each in texts), texts[0].decode_seconds


class TimedDraft:
    """A draft, and the ``seconds`` that its proposals have taken since :meth:`reset`."""

    def __init__(self, draft: Any) -> None:
        self._draft = draft
        self.seconds = 0.0

    def reset(self) -> None:
        self.seconds = 0.0

    def propose(self, *arguments: Any, **named: Any) -> Any:
        synchronise()
        begun = time.perf_counter()
        found = self._draft.propose(*arguments, **named)
        synchronise()
        self.seconds += time.perf_counter() - begun
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)


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
