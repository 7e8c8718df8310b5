"""Whether two greedy texts of one model differ by rounding or by a fault. Not here: the loops that made them, or counting over prompts."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from assay.ops.decode.generate import shared_size
from assay.ops.decode.session import Session, vocabulary_size


class Difference(NamedTuple):
    """The first place where a speculated text leaves the plain one.

    ``gap`` is by how much the model, reading one token a forward, prefers the plain text's token there. ``noise`` is the largest change of any logit, up to
    there, when the same text is read in blocks instead. Both in logits.
    """

    position: int
    gap: float
    noise: float

    @property
    def near_tie(self) -> bool:
        """Whether rounding explains the difference: two logits that each move by ``noise`` can change places if they are that close."""
        return self.gap <= 2 * self.noise


def first_difference(
    model: Any,
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
    size = shared_size(vocabulary_size(model), vocabulary)
    singly, in_blocks = Session(model, kv_format=kv_format), Session(model, kv_format=kv_format)
    # As both loops do: the prompt at once, then the emitted tokens, of which the last one before the difference decides it.
    row = singly.read(prompt, keep=1)[0, :size].float()
    in_blocks.read(prompt, keep=1)
    noise = 0.0
    for start in range(0, position, block):
        tokens = plain[start : min(start + block, position)]
        for token, other in zip(tokens, in_blocks.read(tokens, keep=len(tokens))[:, :size].float(), strict=True):
            row = singly.read([token], keep=1)[0, :size].float()
            noise = max(noise, float((row - other).abs().max()))
    gap = float(row[plain[position]] - row[speculated[position]]) if position < shared else math.inf
    return Difference(position, gap, noise)
