"""Dynamic batch loading: which domain of text a step reads from goes by how far the model still is from its base there.

What the base's loss on a domain is, the curve of the run says at each evaluation beside the model's own, so a run that goes on from its state has
both. Not here: where the domains' text comes from (``ops/steps/domains.py``).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from assay.ops.evaluate.divergence import Head
from assay.ops.train.batches import digest, generator, order_of, rows_at
from assay.ops.train.loop import Point
from assay.ops.train.losses import cross_entropy_sum

# The metrics of a domain on its held-out windows, before its number: the model's loss, the base's, and the weight by which rows are drawn from then on.
LOSS, REFERENCE, WEIGHT = "log_perplexity_domain_", "base_log_perplexity_domain_", "weight_domain_"


class Domains(NamedTuple):
    """Domains by index, from 0, of the windows that are trained on and held out, and the share of the rows that each has at first."""

    windows: Int64[Tensor, " windows"]
    held_out: Int64[Tensor, " held_out"]
    shares: tuple[float, ...]  # in any unit, above 0


def identity(domains: Domains | None) -> Any:
    """What of the domains a run is, as JSON: windows in short, and shares."""
    return None if domains is None else [digest(domains.windows[None]), digest(domains.held_out[None]), domains.shares]


def reweighted(weights: Float64[Tensor, " domains"], losses: Sequence[float], references: Sequence[float]) -> Float64[Tensor, " domains"]:
    """w ∝ w · exp(max(loss − reference, 0)); they add up to 1. What is at its reference or below loses weight to the others and none of its own.

    Source:
        Xia et al. 2023 (Sheared LLaMA), §3.2, algorithm 1, arXiv:2310.06694. Unlike it, which takes the losses that a scaling law or a source model
        promises for the small model, the references here are the base's own, which a smaller model need never reach; weights change at the evaluations of
        the curve; and each row is drawn by itself.
    """
    excess = (torch.tensor(losses, dtype=torch.float64) - torch.tensor(references, dtype=torch.float64)).clamp(min=0)
    return (weights.log() + excess).softmax(dim=0)


def reader(
    domains: Domains | None, curve: Sequence[Point], *, windows: int, rows: int, seed: int
) -> Callable[[int], Int64[Tensor, " rows"]]:
    """Which windows a step reads: for each row a domain is drawn by the weights of the moment, then the next window of that domain in its order.

    Without domains it is ``batches.rows_at``. Each domain's windows are all read before one is read again. The weights follow from the evaluations in
    ``curve`` up to the step, so that a run that goes on reads what it would have read.

    Raises:
        ValueError: a domain without windows, or numbers that are not one a domain.
    """
    if domains is None:
        return partial(rows_at, rows=rows, windows=windows, seed=seed)
    members = [(domains.windows == domain).nonzero().flatten().tolist() for domain in range(len(domains.shares))]
    _require(members, domains, windows)
    plan: list[list[int]] = []  # the windows of each step so far
    read = [0] * len(members)

    def next_of(domain: int) -> int:
        size = len(members[domain])
        number, read[domain] = read[domain], read[domain] + 1
        return members[domain][order_of(size, seed + domain, number // size)[number % size]]

    def at(step: int) -> Tensor:
        for each in range(len(plan), step + 1):
            random = generator(seed, "domains", each)
            drawn = torch.multinomial(weights_at(domains, curve, each), rows, replacement=True, generator=random)
            plan.append([next_of(domain) for domain in drawn.tolist()])
        return torch.tensor(plan[step])

    return at


def weights_at(domains: Domains, curve: Sequence[Point], step: int) -> Float64[Tensor, " domains"]:
    """The weights by which a step, from 0, draws: :func:`reweighted` at each evaluation of training up to it."""
    count = range(len(domains.shares))
    weights = torch.tensor(domains.shares, dtype=torch.float64)
    weights = weights / weights.sum()
    for point in curve:
        if point.metrics and 0 < point.step <= step:
            losses, references = ([point.metrics[name + str(domain)] for domain in count] for name in (LOSS, REFERENCE))
            weights = reweighted(weights, losses, references)
    return weights


@torch.no_grad()
def losses_of(
    domains: Domains,
    held_out: Int64[Tensor, "windows length"],
    states: Float[Tensor, "windows length width"],
    head: Head,
    *,
    vocabulary: int,
    name: str = LOSS,
) -> dict[str, float]:
    """The loss on the held-out windows of each domain, nats a token, of a model with these final states: ``name`` and the domain's number → loss.

    Raises:
        ValueError: a domain without held-out windows.
    """
    found = {}
    for domain in range(len(domains.shares)):
        own = domains.held_out == domain
        if not own.any():
            raise ValueError(
                f"domain {domain} has no held-out window, so its loss cannot be told; at least one of each domain was expected"
            )
        targets = held_out[own][:, 1:].flatten().to(states.device)
        total = cross_entropy_sum(targets, states[own.to(states.device)][:, :-1].flatten(0, 1), head, vocabulary=vocabulary)
        found[f"{name}{domain}"] = float(total) / len(targets)
    return found


def with_weights(domains: Domains | None, curve: list[Point]) -> list[Point]:
    """``curve`` with the weights from each evaluation on among its metrics; as it is where there are no domains."""
    if domains is None:
        return curve
    return [
        point._replace(
            metrics={
                **point.metrics,
                **{f"{WEIGHT}{domain}": weight for domain, weight in enumerate(weights_at(domains, curve, point.step).tolist())},
            }
        )
        if point.metrics
        else point
        for point in curve
    ]


def _require(members: Sequence[Sequence[int]], domains: Domains, windows: int) -> None:
    if not all(share > 0 for share in domains.shares):
        raise ValueError(f"the shares of the domains are {list(domains.shares)}; numbers above 0 were expected")
    empty = [domain for domain, numbers in enumerate(members) if not numbers]
    if empty or sum(map(len, members)) != windows:
        raise ValueError(
            f"{len(members)} domains have {[len(each) for each in members]} of {windows} windows; each window in one of them, and at least one "
            "in each, was expected"
        )
