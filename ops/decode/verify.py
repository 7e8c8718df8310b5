"""The rule that makes speculation exact: which proposals are kept and what follows them. Pure; not here: models, caches, loops."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from assay.ops.decode.sampling import sample, uniforms


class Verified(NamedTuple):
    """How many proposals are kept, from the first on, and the token that comes after them."""

    accepted: int
    next_token: int


def residual(p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
    """What is left of ``p`` once a token drawn from ``q`` was rejected: max(p - q, 0), renormalised.

    Where rounding leaves nothing (``p`` and ``q`` are the same distribution), it is ``p``.
    """
    left = (p.double() - q.double()).clamp(min=0)
    total = left.sum()
    return (left / total).to(p.dtype) if float(total) > 0 else p


def verify(
    p: Float[Tensor, "positions vocab"],
    q: Float[Tensor, "proposals vocab"] | None,
    proposals: Sequence[int],
    generator: torch.Generator | None,
) -> Verified:
    """Keep each proposal x with chance min(1, p(x) / q(x)) until one is rejected, so that what comes out is distributed as ``p``.

    After a rejection the next token is drawn from :func:`residual`; after the last acceptance, from the last row of ``p``. Where the outcome is certain
    nothing is drawn, so greedy verification needs no generator.

    Args:
        p: the target's distribution at each proposal's place and after the last one: one row more than there are proposals.
        q: the distribution that each proposal was *drawn* from; None for proposals that were determined (greedy, n-gram), whose q is one-hot: they are kept
            with chance p(x), and the residual is ``p`` without x.
    Raises:
        ValueError: the shapes do not fit, or a proposal has probability 0 in its own ``q``.
    Source:
        Leviathan et al. 2023, algorithm 1, arXiv:2211.17192; Chen et al. 2023, algorithm 2, arXiv:2302.01318.
    """
    count = len(proposals)
    if p.shape[0] != count + 1 or (q is not None and q.shape != (count, p.shape[1])):
        raise ValueError(
            f"p has shape {tuple(p.shape)} and q {tuple(q.shape) if q is not None else None} for {count} proposals; "
            f"expected ({count + 1}, vocabulary) and ({count}, vocabulary)"
        )
    if count == 0:
        return Verified(0, sample(p[0], generator))
    index = torch.tensor(list(proposals), device=p.device).unsqueeze(-1)
    wanted = p[:count].gather(-1, index).squeeze(-1).tolist()
    offered = q.gather(-1, index.to(q.device)).squeeze(-1).tolist() if q is not None else [1.0] * count
    for position, (target_chance, draft_chance) in enumerate(zip(wanted, offered, strict=True)):
        if not draft_chance > 0:
            raise ValueError(
                f"proposal {position} is token {proposals[position]}, which its draft gives probability {draft_chance}, so it cannot have been drawn; "
                "pass the distribution that it was drawn from, or q=None if it was determined"
            )
        if target_chance >= draft_chance or (target_chance > 0 and uniforms(1, generator)[0] * draft_chance < target_chance):
            continue
        row = p[position]
        if q is None:
            drawn_from = torch.zeros_like(row)
            drawn_from[proposals[position]] = 1.0
        else:
            drawn_from = q[position].to(row.device)
        return Verified(position, sample(residual(row, drawn_from), generator))
    return Verified(count, sample(p[count], generator))


def verify_siblings(p: Float[Tensor, " vocab"], siblings: Sequence[int], generator: torch.Generator | None) -> int:
    """Test several determined candidates for one place, one after another, so that what comes out is distributed as ``p``.

    Each candidate x is taken with the chance that what is left of ``p`` gives it; once rejected, it is left out and the rest renormalised, since the next
    candidate is tested in a world where x did not come. Without that step the candidates come out too often.

    Args:
        siblings: distinct tokens, in the order of their test.
    Returns:
        The token: one of ``siblings``, or a draw from what they leave.
    Raises:
        ValueError: a candidate is there twice.
    Source:
        Derived here; the verifier of EAGLE does the same for its determined candidates (github.com/SafeAILab/EAGLE, issues 171 and 183).
    """
    if len(set(siblings)) < len(siblings):
        raise ValueError(f"siblings={list(siblings)} has a token twice; candidates for one place are distinct")
    left = p.double().clone()
    for token in siblings:
        total, chance = float(left.sum()), float(left[token])
        if chance >= total or (chance > 0 and uniforms(1, generator)[0] * total < chance):
            return token
        left[token] = 0
    return sample(left, generator)
