"""Prompts as ids, and answers to several of them side by side, each until a stop string or an end token. Not here: which prompts, or what an answer is worth."""

import json
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from assay.ops.decode.generate import shared_size, stack
from assay.ops.decode.request import Request, next_tokens
from assay.ops.decode.runner import Runner, undisturbed
from assay.ops.decode.samples import in_common
from assay.ops.decode.sampling import Sampling
from assay.ops.decode.session import Session, check_prompts


class Answer(NamedTuple):
    """``text`` ends before the first stop string; ``tokens`` counts all that were drawn, what ended it too; ``cut``: no more tokens were allowed."""

    text: str
    tokens: int
    cut: bool


def prompt_ids(tokenizer: Any, text: str, *, chat: bool = False) -> list[int]:
    """``text`` as ids, with the beginning-of-sequence token that the tokenizer puts before it, if it does.

    Args:
        chat: put it into the tokenizer's chat template, as what the user says; a template that writes that token itself gets no second one.
    Raises:
        ValueError: ``chat``, and the tokenizer has no template.
    """
    if not chat:
        return tokenizer(text)["input_ids"]
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; leave chat out, or take a base that has one")
    said = tokenizer.apply_chat_template([{"role": "user", "content": text.strip()}], tokenize=False, add_generation_prompt=True)
    begun = bool(tokenizer.bos_token) and said.startswith(tokenizer.bos_token)
    return tokenizer(said, add_special_tokens=not begun)["input_ids"]


def require_positions(checkpoint: Path, tokens: int, what: str) -> None:
    """Refuse a text that is longer than the model has positions for.

    Args:
        tokens: of the whole text, its answer included.
        what: it is called in the error.
    Raises:
        ValueError: the model's config says so.
    """
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    most = config.get("text_config", config).get("max_position_embeddings")
    if most is not None and tokens > most:
        raise ValueError(
            f"{what} is {tokens:,} tokens long with its answer, and the model has positions for {most:,} (max_position_embeddings)"
        )


@undisturbed
def draw_answers(
    runner: Runner,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    max_new_tokens: int,
    samples: int = 1,
    generator_of: Callable[[int, int], torch.Generator] | None = None,
    stops: Sequence[str] = (),
    eos_ids: Collection[int] = frozenset(),
    kv_format: str | None = None,
    rows: int = 16,
) -> list[list[Answer]]:
    """The answers [prompt][sample].

    The beginning that all prompts have in common is read once. A row whose answer has ended takes the next one, so that none waits for the longest. An
    answer is what its prompt and its generator make it: it does not depend on ``rows`` or on the others, but for rounding.

    Args:
        generator_of: a new generator for the sample of this number of the prompt of this number; greedy decoding needs none.
        stops: whole strings, any of which ends an answer wherever it occurs in its text.
        rows: the most answers side by side.
    Raises:
        TypeError: ``stops`` is one string, of which each character would be a stop.
        ValueError: a stop is empty, a prompt is empty or has foreign ids, or no token, sample or row is asked for. Nothing was computed then.
    """
    if isinstance(stops, str):
        raise TypeError(f"stops is the string {stops!r}; expected a list of whole strings: [{stops!r}]")
    if "" in stops:
        raise ValueError("an empty stop string ends every answer before it begins; expected strings of at least one character")
    if min(max_new_tokens, samples, rows) < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}, samples={samples}, rows={rows}; expected 1 or more of each")
    texts = check_prompts(prompts, runner.shape.vocabulary)
    size = shared_size(runner.shape.vocabulary, len(tokenizer))
    jobs = [(number, sample) for number in range(len(texts)) for sample in range(samples)]
    shared = in_common([text[:-1] for text in texts])  # at least one token is read of each prompt, for its logits
    width = min(rows, len(jobs))
    session = Session(runner, rows=width, capacity=max(map(len, texts)) + max_new_tokens, kv_format=kv_format)
    if shared:
        session.read([texts[0][:shared], *[[]] * (width - 1)])
        session.reorder([0] * width)
    tail = 4 * max(map(len, stops), default=0) + 4  # tokens that a stop string reaches back at most: a character has up to four bytes
    waiting = deque(range(len(jobs)))
    held: dict[int, tuple[int, Request]] = {}  # by row
    found: dict[int, Answer] = {}
    while waiting or held:
        back = [0] * width
        for row in range(width):
            if row not in held and waiting:
                number, sample = jobs[waiting[0]]
                generator = generator_of(number, sample) if generator_of else None
                held[row] = waiting.popleft(), Request(list(texts[number]), max_new_tokens, eos_ids, generator)
                back[row] = session.lengths[row] - shared
        session.rollback(back)
        lengths, going = session.lengths, sorted(held)
        read = session.read([held[row][1].text[lengths[row] :] if row in held else [] for row in range(width)])
        requests = [held[row][1] for row in going]
        for row, token in zip(going, next_tokens(stack([read[row] for row in going])[:, :size], requests, sampling), strict=True):
            job, request = held[row]
            request.add(token)
            if request.done or (stops and _first(tokenizer.decode(request.emitted[-tail:], skip_special_tokens=True), stops) is not None):
                found[job] = _answer(tokenizer, request, stops, eos_ids)
                del held[row]
    return [[found[at + sample] for sample in range(samples)] for at in range(0, len(jobs), samples)]


def _answer(tokenizer: Any, request: Request, stops: Sequence[str], eos_ids: Collection[int]) -> Answer:
    emitted = request.emitted
    text = tokenizer.decode(emitted, skip_special_tokens=True)
    end = _first(text, stops)
    return Answer(text[:end], len(emitted), end is None and emitted[-1] not in eos_ids)


def _first(text: str, stops: Sequence[str]) -> int | None:
    """Where the first of ``stops`` begins in ``text``; None if none occurs."""
    return min((at for at in (text.find(stop) for stop in stops) if at >= 0), default=None)
