"""Prompts as ids, and several answers to each. Not here: writing them (``until.py``), which prompts, or what an answer is worth."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from assay.ops.decode.runner import Runner
from assay.ops.decode.sampling import Sampling
from assay.ops.decode.session import check_prompts
from assay.ops.models.dense import positions
from assay.ops.tasks.until import Asked, write_until


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
    most = positions(checkpoint)
    if most is not None and tokens > most:
        raise ValueError(
            f"{what} is {tokens:,} tokens long with its answer, and the model has positions for {most:,} (max_position_embeddings)"
        )


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
    """The answers [prompt][sample]; see :func:`write_until`.

    An answer is what its prompt and its generator make it: it does not depend on ``rows`` or on the others, but for rounding.

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
    asked = [
        Asked(text, max_new_tokens, tuple(stops), generator_of(number, sample) if generator_of else None)
        for number, text in enumerate(check_prompts(prompts, runner.shape.vocabulary))
        for sample in range(samples)
    ]
    written = write_until(runner, tokenizer, asked, sampling=sampling, eos_ids=eos_ids, batch=rows, kv_format=kv_format)
    answers = [Answer(each.text, len(each.tokens), each.cut) for each in written]
    return [answers[at : at + samples] for at in range(0, len(answers), samples)]
