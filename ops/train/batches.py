"""Which token windows a training step reads: a pure function of the step and the seed, so that a resumed run reads on where it was.

Not here: where token ids come from (``ops/data/tokens.py``), or what is done with a batch.
"""

import hashlib
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int64
from torch import Tensor


class Batch(NamedTuple):
    """Rows of token ids, and where the prediction that is made at a position counts. Padding stands at the end of a row or nowhere."""

    ids: Int64[Tensor, "rows length"]
    real: Bool[Tensor, "rows length"]
    text: Bool[Tensor, " rows"]  # False where a model wrote the row
    numbers: Int64[Tensor, " rows"]  # of the window that a row is, or began as


def batch_of(windows: Int64[Tensor, "windows length"], numbers: Int64[Tensor, " rows"], device: torch.device | str = "cpu") -> Batch:
    """The numbered windows, whole."""
    ids = windows[numbers.to(windows.device)].to(device)
    return Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.ones(len(ids), dtype=torch.bool, device=device), numbers)


def packed(ids: Int64[Tensor, " tokens"], length: int) -> Int64[Tensor, "windows length"]:
    """The stream cut into windows that lie one after another, each token in one of them; the last ``tokens mod length`` are left out.

    Raises:
        ValueError: there are fewer tokens than one window has.
    """
    count = len(ids) // length
    if not count:
        raise ValueError(f"{len(ids):,} tokens do not fill one window of {length}; take more text, or a shorter window")
    return ids[: count * length].reshape(count, length)


def rows_at(step: int, *, rows: int, windows: int, seed: int) -> Int64[Tensor, " rows"]:
    """The windows that a step reads. All windows are read once, in an order drawn for that pass, before any is read again.

    Args:
        step: from 0.
        rows: windows a step.
        windows: how many there are.
    """
    numbers = range(step * rows, (step + 1) * rows)
    return torch.tensor([order_of(windows, seed, number // windows)[number % windows] for number in numbers])


@lru_cache(maxsize=16)
def order_of(windows: int, seed: int, epoch: int) -> list[int]:
    """The order in which a pass, from 0, reads so many windows."""
    return torch.randperm(windows, generator=generator(seed, "order", epoch)).tolist()


def marked(step: int, *, rows: int, pct: int) -> Bool[Tensor, " rows"]:
    """Which rows of a step belong to the ``pct`` percent that are treated otherwise, evenly spread.

    Of the first n rows of a run exactly ⌊n · pct / 100⌋ are marked, in whole numbers.

    Raises:
        ValueError: ``pct`` is not between 0 and 100.
    """
    if not 0 <= pct <= 100:
        raise ValueError(f"{pct} percent of the rows; 0 to 100 was expected")
    numbers = range(step * rows, (step + 1) * rows)
    return torch.tensor([(number + 1) * pct // 100 > number * pct // 100 for number in numbers])


def split(batch: Batch, tokens: int) -> list[Batch]:
    """The batch in parts of at most ``tokens`` positions (but at least one row each), as even as whole rows allow."""
    rows, length = batch.ids.shape
    parts = -(-rows // max(1, tokens // length))
    return [Batch(*part) for part in zip(*(each.tensor_split(parts) for each in batch), strict=True)]


def digest(windows: Int64[Tensor, "windows length"]) -> str:
    """Which text these windows are: SHA-256 of their ids."""
    return hashlib.sha256(windows.cpu().contiguous().numpy().data).hexdigest()


def seed_of(*parts: int | str) -> int:
    """A seed of 63 bits for what ``parts`` name (a run's seed, a purpose, a step), unrelated to that of any other parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 1


def generator(*parts: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator seeded by :func:`seed_of`."""
    return torch.Generator(device=device).manual_seed(seed_of(*parts))
