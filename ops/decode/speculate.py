"""Speculative decoding of several prompts: draft, verify in one forward, take back what was rejected. Not here: the drafts, the rule (``verify``)."""

import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from assay.ops.decode.acceptance import Adaptive, overlap
from assay.ops.decode.constraints import Constraint, DeadEnd, apply_mask
from assay.ops.decode.drafts import NOTHING, Draft, Proposal
from assay.ops.decode.generate import GREEDY, emit, open_session, shared_size
from assay.ops.decode.request import Request, open_requests
from assay.ops.decode.runner import Runner, undisturbed
from assay.ops.decode.sampling import Sampling
from assay.ops.decode.session import Session, read_clock
from assay.ops.decode.verify import verify


class Speculated(NamedTuple):
    """New tokens, what each round proposed and kept, and the wall-clock seconds of the two phases of the batch that the text was part of.

    A round is one forward of the target after the prefill, and yields its accepted proposals and one more token (none more where an accepted proposal
    ends the text). The first token is the prefill's, so the rounds emitted ``len(tokens) - 1``. ``overlaps`` has, for each round and each of its
    proposals that was tested, Σ min(p, q): the chance of acceptance there, which for a determined proposal x is p(x). ``prefill_seconds`` includes the
    draft's reading of the prompts; ``decode_seconds`` is all the rest, drafting included.
    """

    tokens: list[int]
    rounds: int
    proposed: list[int]
    accepted: list[int]
    overlaps: list[list[float]]
    prefill_seconds: float
    decode_seconds: float


class Record(NamedTuple):
    """The rounds of one text so far."""

    proposed: list[int]
    accepted: list[int]
    overlaps: list[list[float]]


@undisturbed
def speculative_generate(
    runner: Runner,
    draft: Draft,
    prompts: "Sequence[Sequence[int]] | Tensor",
    *,
    max_new_tokens: int,
    gamma: int | Adaptive,
    sampling: Sampling = GREEDY,
    eos_ids: Collection[int] = frozenset(),
    generators: Sequence[torch.Generator] | None = None,
    kv_format: str | None = None,
    vocabulary: int | None = None,
    constraints: Sequence[Constraint | None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Speculated]:
    """Continue each prompt as :func:`assay.ops.decode.generate.generate` does, in fewer forwards of the target.

    Greedy, the tokens are those of plain decoding, except where two logits tie to within the rounding by which a forward of several positions differs from
    several of one. Sampling, they have the target's distribution, but are other draws than plain decoding's with the same seed.

    A round proposes ``gamma`` tokens for each text, or fewer: never past an end-of-sequence token, never more than could still be emitted. Each text keeps
    what its own verification accepts; one forward of the target verifies all of them, and a text that has ended is read no further.

    Args:
        draft: proposes; it may serve one batch after another.
        gamma: the most proposals a round, at most ``max_new_tokens``; or :class:`Adaptive`, which chooses them text by text.
        kv_format: how the target stores keys and values, while verifying as well; a draft has its own.
        prompts, max_new_tokens, sampling, eos_ids, generators, vocabulary, constraints, clock: as for plain decoding; the draft draws with the same ones.
    Raises:
        ValueError: as plain decoding does; besides, ``gamma`` is out of its range, the draft lacks ids of the tokenizer or a prompt, or it breaks its
            contract.
    Source:
        Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318. Unlike both, the first token is the prefill's own.
    """
    size = shared_size(runner.shape.vocabulary, vocabulary)
    requests = open_requests(
        prompts, size=runner.shape.vocabulary, sampling=sampling, max_new_tokens=max_new_tokens, eos_ids=eos_ids, generators=generators,
        constraints=constraints,
    )  # fmt: skip
    if isinstance(gamma, int) and not 1 <= gamma <= max_new_tokens:
        raise ValueError(
            f"gamma={gamma} proposals a round with max_new_tokens={max_new_tokens}; expected 1 to that many, or decoding without a draft"
        )
    draft.check(requests, vocabulary=vocabulary)
    session = open_session(runner, requests, kv_format)

    begun = read_clock(clock, session.device)
    emit(session, requests, sampling, size)
    draft.begin(requests, vocabulary=size)
    prefilled = read_clock(clock, session.device)

    records = [Record([], [], []) for _ in requests]
    while not all(request.done for request in requests):
        counts = [_count(request, record, gamma) for request, record in zip(requests, records, strict=True)]
        proposals = [NOTHING for _ in requests]
        if any(counts):
            proposals = draft.propose(requests, counts, sampling=sampling)
            for proposal, count in zip(proposals, counts, strict=True):
                _check_proposal(proposal, count, size)
            proposals = [_cut_after(proposal, eos_ids) for proposal in proposals]
        kept = _verify_round(session, requests, proposals, sampling, size, records)
        draft.settle(kept)
    done = read_clock(clock, session.device)
    return [
        Speculated(request.emitted, len(record.proposed), *record, prefilled - begun, done - prefilled)
        for request, record in zip(requests, records, strict=True)
    ]


def _count(request: Request, record: Record, gamma: int | Adaptive) -> int:
    """How many proposals the next round of a text asks for; one place is left for the token that follows them."""
    wanted = gamma if isinstance(gamma, int) else gamma.gamma(record.proposed, record.accepted)
    return max(0, min(wanted, request.left - 1))


def _verify_round(
    session: Session, requests: Sequence[Request], proposals: Sequence[Proposal], sampling: Sampling, size: int, records: Sequence[Record]
) -> list[int]:
    """Verify each text's proposals in one forward, emit what comes of it, and take the rest back; how many were kept, a text."""
    seen = [_look_ahead(request, proposal) for request, proposal in zip(requests, proposals, strict=True)]
    ids = [[] if request.done else [request.text[-1], *ahead.proposal.tokens] for request, ahead in zip(requests, seen, strict=True)]
    logits = session.read(ids, keep=[len(new) for new in ids])
    kept, back = [0] * len(requests), [0] * len(requests)
    for row, (request, (proposal, masks, dead)) in enumerate(zip(requests, seen, strict=True)):
        if request.done:
            continue
        rows = logits[row][:, :size]
        if masks:
            rows = torch.cat([apply_mask(rows[: len(masks)], torch.stack(masks)[:, :size]), rows[len(masks) :]])
        emitted = request.emitted + proposal.tokens if sampling.needs_history else ()
        p = sampling.probabilities(rows, prompt=request.prompt_ids, emitted=emitted)
        kept[row], follower = verify(p, proposal.probabilities, proposal.tokens, request.generator)
        count = len(proposal.tokens)
        if dead is not None and kept[row] == count:
            raise dead
        records[row].proposed.append(count)
        records[row].accepted.append(kept[row])
        records[row].overlaps.append(_overlaps(p[:count], proposal)[: kept[row] + 1])
        for token in (*proposal.tokens[: kept[row]], follower):
            if not request.done:
                request.add(token)
        back[row] = count - kept[row]
    session.rollback(back)
    return kept


class Ahead(NamedTuple):
    """A proposal cut where a constraint says that nothing behind can be accepted, the masks of the places up to there, and what is wrong with the
    place behind its last token, if anything."""

    proposal: Proposal
    masks: list[Bool[Tensor, " head"]]
    dead: DeadEnd | None


def _look_ahead(request: Request, proposal: Proposal) -> Ahead:
    """What the constraint allows at each place of a proposal. A token that it does not allow stays the last: what it was drawn from counts."""
    if request.constraint is None or request.done:
        return Ahead(proposal, [], None)
    branch, masks = request.branch(), []
    assert branch.constraint is not None
    for place in range(len(proposal.tokens) + 1):
        if branch.done:
            break
        try:
            masks.append(branch.constraint.allowed())
        except DeadEnd as dead:
            return Ahead(_cut(proposal, place), masks, dead)
        if place < len(proposal.tokens):
            if not bool(masks[-1][proposal.tokens[place]]):
                return Ahead(_cut(proposal, place + 1), masks, None)
            branch.add(proposal.tokens[place])
    return Ahead(proposal, masks, None)


def _overlaps(p: Float[Tensor, "count vocab"], proposal: Proposal) -> list[float]:
    if not proposal.tokens:
        return []
    if proposal.probabilities is not None:
        return overlap(p, proposal.probabilities.to(p.device)).tolist()
    return p.gather(-1, torch.tensor(proposal.tokens, device=p.device).unsqueeze(-1)).squeeze(-1).tolist()


def _cut(proposal: Proposal, count: int) -> Proposal:
    """The first ``count`` tokens of a proposal."""
    rows = proposal.probabilities
    return Proposal(proposal.tokens[:count], None if rows is None else rows[:count])


def _cut_after(proposal: Proposal, eos_ids: Collection[int]) -> Proposal:
    """Drop what was proposed behind the first end-of-sequence token: it can never be emitted."""
    first = next((place for place, token in enumerate(proposal.tokens) if token in eos_ids), len(proposal.tokens))
    return _cut(proposal, first + 1)


def _check_proposal(proposal: Proposal, count: int, size: int) -> None:
    """Refuse what would corrupt the text silently; shapes are left to ``verify``."""
    if len(proposal.tokens) > count:
        raise ValueError(f"the draft proposed {len(proposal.tokens)} tokens where at most {count} were asked for")
    outside = [token for token in proposal.tokens if not 0 <= token < size]
    if outside:
        raise ValueError(
            f"the draft proposed the id {outside[0]}, outside the shared vocabulary of {size}; cut its logits to that size first"
        )
