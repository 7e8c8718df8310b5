"""Texts being read by one runner through its cache, with rollback. Not here: choosing tokens (``sampling``) or the loops over them."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from assay.ops.decode.runner import Runner

TOGETHER = 32  # tokens: a row that reads more has forwards of its own


class Session:
    """A runner, its cache, and the texts that this holds.

    A row that reads at most 32 tokens shares a forward with its neighbours. One that reads more, a prompt, is read by itself, in chunks that depend on
    nothing else: matrices of another size round differently, and so no neighbour changes what such a row computes.

    Args:
        rows: texts, read side by side.
        capacity: the most tokens that a text can have.
        kv_format: how keys and values are stored; None keeps the runner's own dtype.
        chunk: the most tokens of a row in one forward.
    Raises:
        ValueError: no row, no room, an unknown format, or a chunk of nothing.
    """

    def __init__(self, runner: Runner, *, rows: int = 1, capacity: int, kv_format: str | None = None, chunk: int = 512) -> None:
        if chunk < 1:
            raise ValueError(f"chunk={chunk} reads nothing; expected the most tokens a forward, 1 or more")
        self.runner = runner
        self.device = runner.device
        self.chunk = chunk
        self.cache = runner.cache(rows=rows, capacity=capacity, format=kv_format)

    @property
    def rows(self) -> int:
        return self.cache.rows

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text so far; those that were evicted from the cache count."""
        return list(self.cache.positions_next)

    def read(self, ids: Sequence[Sequence[int]], keep: int | Sequence[int] = 1) -> list[Float[Tensor, "keep vocab"]]:
        """Append new tokens to each text and return the float32 logits of the last of them.

        Args:
            ids: of each row; none for a row that waits, which gets an empty tensor.
            keep: of how many tokens a row the logits are wanted; one number is for every row that reads any.
        Raises:
            ValueError: not one list a row, a row has no room or fewer tokens than it is to keep. Nothing has changed then.
        """
        if len(ids) != self.rows:
            raise ValueError(
                f"tokens for {len(ids)} rows in a session of {self.rows}; expected a list for each, empty for a row that waits"
            )
        wanted = [keep if new else 0 for new in ids] if isinstance(keep, int) else list(keep)
        self.cache.require_room(ids)
        for row, (new, most) in enumerate(zip(ids, wanted, strict=True)):
            if not 0 <= most <= len(new):
                raise ValueError(f"row {row} reads {len(new)} tokens, and the logits of {most} are wanted; expected 0 to all of them")
        found = [torch.empty(0, self.runner.shape.vocabulary, device=self.device) for _ in ids]
        short = [bool(new) and len(new) <= min(TOGETHER, self.chunk) for new in ids]
        for row, new in enumerate(ids):
            if new and not short[row]:
                found[row] = self._prefill(row, new, wanted[row])
        if any(short):
            kept = [most if one else 0 for most, one in zip(wanted, short, strict=True)]
            logits = self._forward([new if one else [] for new, one in zip(ids, short, strict=True)], kept)
            for row, part in enumerate(logits.split(kept)):
                if short[row]:
                    found[row] = part
        return found

    def rollback(self, counts: Sequence[int]) -> None:
        """Take the last tokens of each text back, as if they had never been read."""
        self.cache.rollback(counts)

    def reorder(self, sources: Sequence[int]) -> None:
        """Row i goes on as a copy of what row ``sources[i]`` was."""
        self.cache.reorder(sources)

    def _prefill(self, row: int, ids: Sequence[int], keep: int) -> Tensor:
        def alone(value: Sequence[int]) -> list[Sequence[int]]:
            return [value if index == row else [] for index in range(self.rows)]

        parts = []
        for start in range(0, len(ids), self.chunk):
            part = ids[start : start + self.chunk]
            kept = max(0, start + len(part) - max(start, len(ids) - keep))  # of the last `keep` of all, those in this chunk
            parts.append(self._forward(alone(part), [kept * (index == row) for index in range(self.rows)]))
        return torch.cat(parts)

    def _forward(self, ids: Sequence[Sequence[int]], keep: Sequence[int]) -> Tensor:
        return self.runner.forward(self.cache, self.cache.append(ids, keep=keep))


def strip_padding(ids: Int[Tensor, "rows width"], attention_mask: Int[Tensor, "rows width"]) -> list[list[int]]:
    """The texts of a padded batch. Pads, left or right, are no tokens: they enter no cache and move no position.

    Raises:
        ValueError: a mask that has something else than 0 and 1, a hole, or a row with nothing in it.
    """
    texts = []
    for row, (tokens, mask) in enumerate(zip(ids.tolist(), attention_mask.tolist(), strict=True)):
        inside = [index for index, one in enumerate(mask) if one]
        if not inside or set(mask) - {0, 1} or inside[-1] - inside[0] + 1 != len(inside):
            raise ValueError(
                f"row {row} has the attention mask {mask}; expected ones for one stretch of at least one token, zeros for pads"
            )
        texts.append(tokens[inside[0] : inside[-1] + 1])
    return texts


def check_prompts(prompts: "Sequence[Sequence[int]] | Tensor", size: int) -> list[list[int]]:
    """Prompts as lists of ids; a tensor [rows, tokens] is a batch without padding.

    Raises:
        ValueError: there is none, one is empty, or one has an id outside 0 … ``size`` - 1.
    """
    if isinstance(prompts, Tensor):
        if prompts.ndim != 2:
            raise ValueError(f"prompts of shape {tuple(prompts.shape)}; expected [rows, tokens], or a list of lists of ids")
        prompts = prompts.tolist()
    if not len(prompts):
        raise ValueError("no prompt; expected at least one list of ids")
    return [check_prompt(prompt, size) for prompt in prompts]


def check_prompt(prompt_ids: "Sequence[int] | Tensor", size: int) -> list[int]:
    """One prompt as a list of ids.

    Raises:
        ValueError: it is empty, a batch of several, or has an id outside 0 … ``size`` - 1.
    """
    if isinstance(prompt_ids, Tensor):
        if prompt_ids.ndim == 2 and prompt_ids.shape[0] != 1:
            raise ValueError(f"a batch of {prompt_ids.shape[0]} prompts; expected one, as shape [1, tokens] or a list of ids")
        prompt_ids = prompt_ids.flatten().tolist()
    if any(isinstance(token, list | tuple) for token in prompt_ids):
        raise ValueError("a list of lists where one prompt was expected, a list of ids")
    ids = [int(token) for token in prompt_ids]
    if not ids:
        raise ValueError("the prompt has no tokens; expected at least one, for instance the tokenizer's beginning-of-sequence id")
    outside = [token for token in ids if not 0 <= token < size]
    if outside:
        raise ValueError(f"the prompt has the id {outside[0]}, outside the model's vocabulary of {size}; was it made by another tokenizer?")
    return ids


def read_clock(clock: Callable[[], float], device: torch.device) -> float:
    """The time once everything queued on ``device`` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock()
