"""Speculative decoding of one prompt: draft, verify in one forward, take back what was rejected. Not here: the drafts, the rule (``verify``)."""

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from assay.ops.decode.drafts import Draft, Proposal
from assay.ops.decode.generate import check_request, next_token, shared_size
from assay.ops.decode.sampling import Sampling
from assay.ops.decode.session import Session, check_prompt, read_clock, vocabulary_size
from assay.ops.decode.verify import verify


class Speculated(NamedTuple):
    """New tokens, what each round proposed and kept, and the wall-clock seconds of the two phases.

    A round is one forward of the target after the prefill, and yields its accepted proposals and one more token (none more where an accepted proposal
    ends the text). The first token is the prefill's, so the rounds emitted ``len(tokens) - 1``. ``prefill_seconds`` includes the draft's reading of
    the prompt; ``decode_seconds`` is all the rest, drafting included.
    """

    tokens: list[int]
    rounds: int
    proposed: list[int]
    accepted: list[int]
    prefill_seconds: float
    decode_seconds: float


def speculative_generate(
    target: Any,
    draft: Draft,
    prompt_ids: Int[Tensor, "1 tokens"] | Sequence[int],
    *,
    max_new_tokens: int,
    gamma: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    eos_ids: Collection[int] = frozenset(),
    generator: torch.Generator | None = None,
    kv_format: str | None = None,
    vocabulary: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Speculated:
    """Continue one prompt as :func:`assay.ops.decode.generate.generate` does, in fewer forwards of the target.

    Greedy, the tokens are those of plain decoding, except where two logits tie to within the rounding by which a forward of several positions differs from
    several of one. Sampling, they have the target's distribution, but are other draws than plain decoding's with the same seed.

    A round proposes ``gamma`` tokens, or fewer: never past an end-of-sequence token, never more than could still be emitted.

    Args:
        target: a transformers causal LM in evaluation mode.
        draft: proposes; it may serve one text after another, one at a time.
        gamma: the most proposals a round.
        kv_format: how the target stores keys and values, while verifying as well; a draft has its own.
        temperature, top_k, top_p, min_p, eos_ids, generator, vocabulary, clock: as for plain decoding; the draft draws with the same ones.
    Raises:
        ValueError: as plain decoding does; besides, ``gamma`` is below 1, the prompt has an id that the draft does not know, or the draft breaks its
            contract.
    Source:
        Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318. Unlike both, the first token is the prefill's own.
    """
    sampling = Sampling(temperature, top_k, top_p, min_p)
    check_request(sampling, max_new_tokens=max_new_tokens, generator=generator)
    if gamma < 1:
        raise ValueError(f"gamma={gamma} proposes nothing; expected 1 or more proposals a round, or decode without a draft")
    size = shared_size(vocabulary_size(target), vocabulary)
    prompt = check_prompt(prompt_ids, vocabulary_size(target))
    session = Session(target, kv_format=kv_format, rollback=True)
    draft.check(prompt)

    begun = read_clock(clock, session.device)
    text = [*prompt, next_token(session.read(prompt, keep=1)[0, :size], sampling, generator)]
    session.rollback(0)
    draft.begin(prompt, vocabulary=size)
    prefilled = read_clock(clock, session.device)

    end = len(prompt) + max_new_tokens
    proposed: list[int] = []
    accepted: list[int] = []
    while len(text) < end and text[-1] not in eos_ids:
        # One place is left for the token that follows the proposals.
        count = min(gamma, end - len(text) - 1)
        proposal = draft.propose(text, count, sampling=sampling, generator=generator) if count else Proposal([], None)
        _check_proposal(proposal, count, size)
        proposal = _cut_after(proposal, eos_ids)
        p = sampling.probabilities(session.read([text[-1], *proposal.tokens], keep=len(proposal.tokens) + 1)[:, :size])
        kept, follower = verify(p, proposal.probabilities, proposal.tokens, generator)
        session.rollback(len(proposal.tokens) - kept)
        draft.settle(kept)
        text += proposal.tokens[:kept]
        if text[-1] not in eos_ids:
            text.append(follower)
        proposed.append(len(proposal.tokens))
        accepted.append(kept)
    done = read_clock(clock, session.device)
    return Speculated(text[len(prompt) :], len(proposed), proposed, accepted, prefilled - begun, done - prefilled)


def _cut_after(proposal: Proposal, eos_ids: Collection[int]) -> Proposal:
    """Drop what was proposed behind the first end-of-sequence token: it can never be emitted."""
    for position, token in enumerate(proposal.tokens[:-1]):
        if token in eos_ids:
            rows = proposal.probabilities
            return Proposal(proposal.tokens[: position + 1], None if rows is None else rows[: position + 1])
    return proposal


def _check_proposal(proposal: Proposal, count: int, size: int) -> None:
    """Refuse what would corrupt the text silently; shapes are left to ``verify``."""
    if len(proposal.tokens) > count:
        raise ValueError(f"the draft proposed {len(proposal.tokens)} tokens where at most {count} were asked for")
    outside = [token for token in proposal.tokens if not 0 <= token < size]
    if outside:
        raise ValueError(
            f"the draft proposed the id {outside[0]}, outside the shared vocabulary of {size}; cut its logits to that size first"
        )
