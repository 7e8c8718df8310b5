"""Which tokens are scored in which window, and windows as padded batches. Not here: what is computed on them (``ops/evaluate/divergence.py``)."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor


class Window(NamedTuple):
    """Tokens ``start`` to ``stop`` (exclusive); those from ``first`` on are targets, predicted from what precedes them in the window."""

    start: int
    stop: int
    first: int


class Batch(NamedTuple):
    """Windows padded to one length, and where in it the scored predictions stand.

    ``rows[i], columns[i]`` is the position whose output predicts ``targets[i]``, the token with index ``at[i]`` in the stream.
    """

    ids: Int64[Tensor, "windows length"]
    mask: Int64[Tensor, "windows length"]
    rows: Int64[Tensor, " scored"]
    columns: Int64[Tensor, " scored"]
    targets: Int64[Tensor, " scored"]
    at: Int64[Tensor, " scored"]


def windows(count: int, window: int, stride: int) -> list[Window]:
    """Cover ``count`` tokens so that each of the ``count - 1`` targets is scored exactly once.

    The first window scores all its targets, each later one only those that no window before it reached, with at least ``window - stride`` tokens of
    context. The last window ends at the last token and may be shorter.

    Raises:
        ValueError: fewer than 2 tokens, or a stride that is not in 1 … window - 1 (a token would never be scored).
    """
    if count < 2:
        raise ValueError(f"{count} tokens have no target; at least 2 are needed")
    if not 1 <= stride < window:
        raise ValueError(f"stride={stride} must be at least 1 and below window={window}, or the first token of a window is never scored")
    found, first = [], 1
    for start in range(0, count, stride):
        stop = min(start + window, count)
        found.append(Window(start, stop, first))
        if stop == count:
            return found
        first = stop
    raise AssertionError("unreachable: the last start below count reaches count")


def perplexity(nll: Sequence[float] | Tensor) -> float:
    """exp of the mean negative log-likelihood (nats) over all targets: total over count, never a mean of window means."""
    total, count = math.fsum(map(float, nll)), len(nll)
    return math.exp(total / count)


def bos_of(tokenizer: Any, rule: Literal["tokenizer", "never"]) -> int | None:
    """The id to put before each window: the tokenizer's BOS if the rule is ``tokenizer`` and it adds one by itself, else None."""
    if rule == "never" or tokenizer.bos_token_id is None:
        return None
    return tokenizer.bos_token_id if tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id] else None


def batches(
    ids: Int64[Tensor, " tokens"],
    cover: Sequence[Window],
    *,
    batch: int,
    bos: int | None = None,
    pad: int = 0,
    side: Literal["left", "right"] = "right",
) -> Iterator[Batch]:
    """``batch`` windows at a time, shorter ones padded at ``side``; with ``bos``, exactly one before each window."""
    for begin in range(0, len(cover), batch):
        group = cover[begin : begin + batch]
        pieces = [ids[window.start : window.stop] for window in group]
        fronts = [int(bos is not None and int(piece[0]) != bos) for piece in pieces]
        length = max(len(piece) + front for piece, front in zip(pieces, fronts, strict=True))
        padded, mask = torch.full((len(group), length), pad), torch.zeros(len(group), length, dtype=torch.int64)
        rows, columns, at = [], [], []
        for row, (window, piece, front) in enumerate(zip(group, pieces, fronts, strict=True)):
            shift = length - len(piece) - front if side == "left" else 0
            if bos is not None and front:
                padded[row, shift] = bos
            padded[row, shift + front : shift + front + len(piece)] = piece
            mask[row, shift : shift + front + len(piece)] = 1
            scored = torch.arange(window.first, window.stop)
            rows.append(torch.full_like(scored, row))
            columns.append(scored - 1 - window.start + front + shift)
            at.append(scored)
        index = torch.cat(at)
        yield Batch(padded, mask, torch.cat(rows), torch.cat(columns), ids[index], index)
