"""Several continuations of each prompt, under several ways of sampling, with what prompts share read once. Not here: one continuation a prompt
(``generate``), what is made of several (``votes``, ``ops/evaluate/pass_at_k.py``)."""

from collections.abc import Callable, Collection, Sequence

import torch

from assay.ops.decode.generate import shared_size, stack
from assay.ops.decode.request import Request, next_tokens
from assay.ops.decode.runner import Runner, undisturbed
from assay.ops.decode.sampling import Sampling
from assay.ops.decode.session import Session, check_prompts

ROWS = 48  # texts side by side
Ways = Sequence[tuple[Sampling, int]]


@undisturbed
def draw_samples(
    runner: Runner,
    prompts: Sequence[Sequence[int]],
    asked: Ways,
    *,
    max_new_tokens: int,
    generator_of: Callable[[int, int], torch.Generator],
    stop_ids: Collection[int] = frozenset(),
    kv_format: str | None = None,
    vocabulary: int | None = None,
    rows: int = ROWS,
) -> list[list[list[list[int]]]]:
    """The new tokens of each sample, as [prompt][way of sampling][sample]; a token of ``stop_ids`` is the last of its sample.

    The beginning that all prompts have in common is read once, the rest of a prompt once for all samples that go on from it side by side. A sample is
    what its prompt, its way of sampling and its generator make it: it does not depend on the others, but for rounding.

    Args:
        asked: ways of sampling, each with the number of its samples.
        generator_of: a new generator for the sample of this number of the prompt of this number; every way of sampling has its own, in the same state.
        kv_format: how keys and values are stored; None keeps the runner's own dtype.
        vocabulary: ids from here on cannot come: the tokenizer's size, where the head is padded beyond it.
        rows: the most samples side by side.
    Raises:
        ValueError: a prompt is empty or has foreign ids; no token, no sample or no row is asked for. Nothing was computed then.
    """
    size = shared_size(runner.shape.vocabulary, vocabulary)
    texts = check_prompts(prompts, runner.shape.vocabulary)
    counts = [count for _, count in asked]
    if not asked or min(max_new_tokens, rows, *counts) < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}, rows={rows}, samples={counts}; expected 1 or more of each")
    jobs = [(way, sample) for way, count in enumerate(counts) for sample in range(count)]
    parts = -(-len(jobs) // rows)
    chunks = [jobs[len(jobs) * part // parts : len(jobs) * (part + 1) // parts] for part in range(parts)]
    width = max(map(len, chunks))
    session = Session(runner, rows=width, capacity=max(map(len, texts)) + max_new_tokens, kv_format=kv_format)
    shared = in_common([text[:-1] for text in texts])  # at least one token is read of each prompt, for its logits
    if shared:
        _read_first(session, texts[0][:shared])
    found: list[list[list[list[int]]]] = []
    for number, text in enumerate(texts):
        samples: list[list[list[int]]] = [[] for _ in asked]
        for chunk in chunks:
            logits = _read_first(session, text[shared:])[:, :size]
            requests = [Request(list(text), max_new_tokens, stop_ids, generator_of(number, sample)) for _, sample in chunk]
            _add(logits.expand(len(chunk), -1), list(range(len(chunk))), requests, chunk, asked)
            while any(not request.done for request in requests):
                going = [row for row, request in enumerate(requests) if not request.done]
                read = session.read([[] if request.done else request.text[-1:] for request in requests] + [[]] * (width - len(chunk)))
                _add(stack([read[row] for row in going])[:, :size], going, requests, chunk, asked)
            session.rollback([length - shared for length in session.lengths])
            for (way, _), request in zip(chunk, requests, strict=True):
                samples[way].append(request.emitted)
        found.append(samples)
    return found


def in_common(texts: Sequence[list[int]]) -> int:
    """How many first tokens all ``texts`` have in common."""
    first, last = min(texts), max(texts)  # what lies between these two begins as both do
    same = zip(first, last, strict=False)
    return next((place for place, (one, other) in enumerate(same) if one != other), min(len(first), len(last)))


def _read_first(session: Session, ids: Sequence[int]) -> torch.Tensor:
    """Read ``ids`` in the first row and copy it to all; the logits [1, vocab] of the last one."""
    logits = session.read([ids, *[[]] * (session.rows - 1)])[0]
    session.reorder([0] * session.rows)
    return logits


def _add(logits: torch.Tensor, going: Sequence[int], requests: Sequence[Request], chunk: Sequence[tuple[int, int]], asked: Ways) -> None:
    """One more token of each request that goes on, those of one way of sampling together."""
    for way in sorted({chunk[row][0] for row in going}):
        at = [index for index, row in enumerate(going) if chunk[row][0] == way]
        some = [requests[going[index]] for index in at]
        for request, token in zip(some, next_tokens(logits[at], some, asked[way][0]), strict=True):
            request.add(token)
