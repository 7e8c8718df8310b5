"""Texts written until a string, an end token or a length. Not here: one token (``ops/decode/request.py``), what a task asks for (``harness.py``)."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from assay.ops.decode.constraints import Constraint
from assay.ops.decode.generate import emit
from assay.ops.decode.request import Request
from assay.ops.decode.runner import Runner, undisturbed
from assay.ops.decode.samples import in_common
from assay.ops.decode.sampling import Sampling
from assay.ops.decode.session import Session
from assay.ops.decode.speculate import speculative_generate


class Asked(NamedTuple):
    """A prompt, the most new tokens, strings that end the text, and what its draws come from."""

    ids: list[int]
    limit: int
    stops: tuple[str, ...]
    generator: torch.Generator | None  # greedy decoding needs none


class Written(NamedTuple):
    """A text without its stop; ``cut`` where it had neither a stop nor an end token within its length."""

    text: str
    tokens: list[int]
    cut: bool


@undisturbed
def write_until(
    runner: Runner,
    tokenizer: Any,
    asked: Sequence[Asked],
    *,
    sampling: Sampling,
    eos_ids: Collection[int],
    batch: int,
    kv_format: str | None = None,
    drafting: Any = None,
) -> list[Written]:
    """Go on with each prompt; ``batch`` texts side by side, the next one beginning where one ends. A text does not depend on its neighbours.

    The beginning that all prompts have in common is read once, where nothing drafts.

    Args:
        drafting: a draft and how many tokens a round it proposes, as :func:`speculative_generate` takes them; None writes without one.
    """
    size = min(runner.shape.vocabulary, len(tokenizer))
    endings = [Ending(tokenizer, each.stops, size, eos_ids) for each in asked]
    if drafting is not None:
        _speculate(runner, asked, endings, drafting, sampling=sampling, eos_ids=eos_ids, batch=batch, kv_format=kv_format)
    else:
        _write(runner, asked, endings, sampling=sampling, eos_ids=eos_ids, batch=batch, kv_format=kv_format, size=size)
    return [Written(ending.text(), ending.tokens, not ending.finished) for ending in endings]


def _write(
    runner: Runner,
    asked: Sequence[Asked],
    endings: "Sequence[Ending]",
    *,
    sampling: Sampling,
    eos_ids: Collection[int],
    batch: int,
    kv_format: str | None,
    size: int,
) -> None:
    waiting = list(range(len(asked)))
    capacity = max((len(each.ids) + each.limit for each in asked), default=1)
    rows = min(batch, len(asked)) or 1
    session = Session(runner, rows=rows, capacity=capacity, kv_format=kv_format)
    shared = in_common([each.ids[:-1] for each in asked]) if asked else 0  # at least one token is read of each prompt, for its logits
    if shared:
        session.read([asked[0].ids[:shared], *[[]] * (rows - 1)])
        session.reorder([0] * rows)
    over = Request([0], 0)  # a row with nothing to write
    requests, mine = [over] * rows, [0] * rows
    while waiting or not all(request.done for request in requests):
        for row, request in enumerate(requests):
            if request.done and waiting:
                mine[row] = waiting.pop(0)
                session.rollback([(length - shared) * (other == row) for other, length in enumerate(session.lengths)])
                each = asked[mine[row]]
                requests[row] = Request(list(each.ids), each.limit, eos_ids, each.generator)
        going = [row for row, request in enumerate(requests) if not request.done]
        emit(session, requests, sampling, size)
        for row in going:
            endings[mine[row]].advance(requests[row].text[-1])
            if endings[mine[row]].finished:
                requests[row].limit = len(requests[row].emitted)


def _speculate(
    runner: Runner,
    asked: Sequence[Asked],
    endings: "Sequence[Ending]",
    drafting: Any,
    *,
    sampling: Sampling,
    eos_ids: Collection[int],
    batch: int,
    kv_format: str | None,
) -> None:
    """In batches of equal limits: a stop is a constraint that finishes, so that nothing is drafted behind it."""
    for limit in sorted({each.limit for each in asked}):
        numbers = [number for number, each in enumerate(asked) if each.limit == limit]
        for start in range(0, len(numbers), batch):
            some = numbers[start : start + batch]
            gamma = min(drafting.gamma, limit) if isinstance(drafting.gamma, int) else drafting.gamma
            generators = [each for each in (asked[number].generator for number in some) if each is not None]
            written = speculative_generate(
                runner, drafting.draft, [asked[number].ids for number in some], max_new_tokens=limit, gamma=gamma, sampling=sampling, eos_ids=eos_ids,
                generators=generators or None, kv_format=kv_format, vocabulary=endings[some[0]].size,
                constraints=[endings[number].copy() for number in some],
            )  # fmt: skip
            for number, each in zip(some, written, strict=True):
                for token in each.tokens:
                    endings[number].advance(token)


class Ending(Constraint):
    """A text that allows every token until one of ``stops`` stands in it, or an end token."""

    def __init__(self, tokenizer: Any, stops: tuple[str, ...], size: int, eos_ids: Collection[int], tokens: Sequence[int] = ()) -> None:
        self.tokenizer, self.stops, self.size, self.eos_ids, self.tokens = tokenizer, stops, size, eos_ids, list(tokens)
        # A token has at least one byte of a stop, and one more may hold the beginning of a character.
        self.reach = max((len(stop.encode()) for stop in stops), default=0) + 4

    @property
    def finished(self) -> bool:
        """Whether nothing more is to come."""
        if self.tokens and self.tokens[-1] in self.eos_ids:
            return True
        tail = self.tokenizer.decode(self.tokens[-self.reach :]) if self.stops else ""
        return any(stop in tail for stop in self.stops)

    def text(self) -> str:
        """What was written, without special tokens, up to the first stop."""
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        return text[: min((text.find(stop) for stop in self.stops if stop in text), default=len(text))]

    def allowed(self) -> torch.Tensor:
        """Every id of the tokenizer."""
        return torch.ones(self.size, dtype=torch.bool)

    def advance(self, token: int) -> None:
        """Add ``token``."""
        self.tokens.append(token)

    def rollback(self, tokens: int) -> None:
        """Take the last ``tokens`` back."""
        del self.tokens[len(self.tokens) - tokens :]

    def copy(self) -> "Ending":
        """The same text, which goes its own way."""
        return Ending(self.tokenizer, self.stops, self.size, self.eos_ids, self.tokens)
