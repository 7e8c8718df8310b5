"""Whether two greedy texts of one model differ by rounding or by a fault. Not here: the loops that made them, or counting over prompts."""

import math
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import NamedTuple

from torch import Tensor

from assay.ops.decode.generate import shared_size
from assay.ops.decode.runner import Runner
from assay.ops.decode.session import Session


class Difference(NamedTuple):
    """The first place where a speculated text leaves the plain one.

    ``gap`` is by how much the model, reading one token a forward, prefers the plain text's token there. ``noise`` is the largest change of any logit, up to
    there, when the same text is read in blocks instead, in each of several ways. Both in logits.
    """

    position: int
    gap: float
    noise: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference: two logits that each move by ``noise`` can change places if they are that close."""
        return self.gap <= 2 * self.noise


def first_difference(
    runner: Runner,
    prompt: Sequence[int],
    plain: Sequence[int],
    speculated: Sequence[int],
    *,
    block: int,
    kv_format: str | None = None,
    vocabulary: int | None = None,
) -> Difference | None:
    """Where two greedy continuations of ``prompt`` part, and how close the decision was; None if they are the same.

    A forward of several positions rounds otherwise than several of one. With a cache in the model's own dtype that moves logits by 1e-4 or less in float32.
    With a quantized cache it moves a stored value to the next code now and then, which moves the next layers' values to other codes: then two correct runs
    differ by about as much as quantization itself does, and greedy texts do part. No fixed tolerance fits both, so the noise is measured, on the text that
    the two share, without a draft and without any rollback: a fault of either cannot hide in it.

    Args:
        block: positions a forward in the second reading: gamma + 1.
        kv_format, vocabulary: as the texts were made.
    Returns:
        ``gap`` is infinite where one text merely ends before the other.
    """
    shared = min(len(plain), len(speculated))
    position = next((index for index in range(shared) if plain[index] != speculated[index]), shared)
    if position == len(plain) == len(speculated):
        return None
    size = shared_size(runner.shape.vocabulary, vocabulary)

    def read(lengths: Iterable[int]) -> list[Tensor]:
        """The logits after each of the shared tokens, read in blocks of these lengths; as both loops do, the prompt at once and first."""
        session, start = Session(runner, capacity=len(prompt) + len(plain), kv_format=kv_format), 0
        rows = [session.read([prompt])[0][0, :size]]
        for length in lengths:
            tokens = plain[start : min(start + length, position)]
            if not tokens:
                break
            rows += list(session.read([tokens], keep=len(tokens))[0][:, :size])
            start += length
        return rows

    singly = read(repeat(1))
    row, noise = singly[-1], 0.0
    # A round accepts any number of tokens, so blocks begin anywhere: every first length, then whole blocks; and every smaller block.
    ways = [chain([first], repeat(block)) for first in range(1, block + 1)] + [repeat(length) for length in range(2, block)]
    for lengths in ways if position else ():
        noise = max(noise, max(float((one - other).abs().max()) for one, other in zip(singly, read(lengths), strict=True)))
    gap = float(row[plain[position]] - row[speculated[position]]) if position < shared else math.inf
    return Difference(position, gap, noise)
