"""Dynamic batch loading: which domain of text a step reads from goes by how far the model still is from a reference there.

Not here: where the domains' text comes from, or the reference losses, which are a model's own measured on the same held-out windows.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from assay.ops.evaluate.divergence import head_of
from assay.ops.train.batches import generator, order_of
from assay.ops.train.loop import Point
from assay.ops.train.losses import cross_entropy_sum
from assay.ops.train.overlap import states_of


class Domains(NamedTuple):
    """Domains by index, from 0, of the windows that are trained on and held out; what each weighs at first, and what its loss is to come to."""

    windows: Int64[Tensor, " windows"]
    held_out: Int64[Tensor, " held_out"]
    references: tuple[float, ...]  # nats a token
    weights: tuple[float, ...] | None = None  # all alike when None


def reweighted(weights: Float64[Tensor, " domains"], losses: Sequence[float], references: Sequence[float]) -> Float64[Tensor, " domains"]:
    """w ∝ w · exp(max(loss − reference, 0)); they add up to 1. What is at its reference or below loses weight to the others and none of its own.

    Source:
        Xia et al. 2023 (Sheared LLaMA), §3.2, algorithm 1, arXiv:2310.06694.
    """
    excess = (torch.tensor(losses, dtype=torch.float64) - torch.tensor(references, dtype=torch.float64)).clamp(min=0)
    return (weights.log() + excess).softmax(dim=0)


def reader(domains: Domains, curve: Sequence[Point], *, windows: int, rows: int, seed: int) -> Callable[[int], Int64[Tensor, " rows"]]:
    """Which windows a step reads: for each row a domain is drawn by the weights of the moment, then the next window of that domain in its order.

    Each domain's windows are all read before one is read again. The weights follow from the evaluations in ``curve`` up to the step, so that a run that
    goes on reads what it would have read.

    Raises:
        ValueError: a domain without windows, or numbers that are not one a domain.
    """
    members = [(domains.windows == domain).nonzero().flatten().tolist() for domain in range(len(domains.references))]
    weights = torch.tensor(domains.weights or [1.0] * len(members), dtype=torch.float64)
    _require(members, weights, windows)
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
    count = len(domains.references)
    weights = torch.tensor(domains.weights or [1.0] * count, dtype=torch.float64)
    weights = weights / weights.sum()
    for point in curve:
        if point.metrics and 0 < point.step <= step:
            weights = reweighted(weights, [point.metrics[name_of(domain)] for domain in range(count)], domains.references)
    return weights


def losses_with(
    domains: Domains, held_out: Int64[Tensor, "windows length"], *, vocabulary: int, document_ends: Collection[int] = frozenset()
) -> Callable[[Any], dict[str, float]]:
    """What measures the loss of a model on the held-out windows of each domain, nats a token, by :func:`name_of`.

    Raises:
        ValueError: a domain without held-out windows.
    """
    parts = [held_out[domains.held_out == domain] for domain in range(len(domains.references))]
    empty = [domain for domain, part in enumerate(parts) if not len(part)]
    if empty:
        raise ValueError(f"domain {empty[0]} has no held-out window, so its loss cannot be told; at least one of each domain was expected")

    def measure(model: Any) -> dict[str, float]:
        found = {}
        for domain, part in enumerate(parts):
            states = states_of(model, part, document_ends=document_ends)[:, :-1].flatten(0, 1)
            targets = part[:, 1:].flatten().to(states.device)
            found[name_of(domain)] = float(cross_entropy_sum(targets, states, head_of(model), vocabulary=vocabulary)) / len(targets)
        return found

    return measure


def name_of(domain: int) -> str:
    """The metric that a domain's held-out loss is."""
    return f"log_perplexity_domain_{domain}"


def _require(members: Sequence[Sequence[int]], weights: Tensor, windows: int) -> None:
    if len(weights) != len(members) or not (weights > 0).all():
        raise ValueError(f"weights {weights.tolist()} of {len(members)} domains; one above 0 for each was expected")
    empty = [domain for domain, numbers in enumerate(members) if not numbers]
    if empty or sum(map(len, members)) != windows:
        raise ValueError(
            f"{len(members)} domains have {[len(each) for each in members]} of {windows} windows; each window in one of them, and at least one "
            "in each, was expected"
        )
