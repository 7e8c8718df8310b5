"""Which tokens each filter keeps of a distribution. Not here: their order, temperature and the draw (``sampling``), or penalties (``penalties``).

Tokens are ranked by probability, equal ones by id, the lower first. Top-k, top-p and min-p each keep the first so many of this ranking, so all
three together are one number a row, found in the ranked probabilities of which the first thousand nearly always suffice, and one cut at the end.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

# A sum of float32 probabilities that comes this close to top_p has reached it, so that 0.5 + 0.35 reaches 0.85 on every machine.
TIE = 1e-6
AT_FIRST = 1024  # ranks that are looked at before all of them


class Candidates(NamedTuple):
    """Distributions, and the part of each that filters have left.

    ``p`` need not sum to 1. ``ranked`` has its largest values, the largest first: all of them, the first so many, or None where nothing has asked for
    them yet. ``kept`` says how many of the ranking are still in, at most as many as ``ranked`` has; None is all of ``p``.
    """

    p: Float[Tensor, "rows vocab"]
    ranked: Float[Tensor, "rows count"] | None = None
    kept: Int64[Tensor, " rows"] | None = None

    def ranks(self, count: int) -> Float[Tensor, "rows ranks"]:
        """The ranks that there are, or if there are none at least the first ``count``."""
        if self.ranked is not None:
            return self.ranked
        # Not on a CPU, looking whether the first ranks suffice costs more than sorting all.
        vocab = self.p.shape[-1]
        return largest_first(self.p, min(max(count, AT_FIRST), vocab) if self.p.device.type == "cpu" else vocab)

    def extended(self) -> "Candidates":
        """The same with all ranks."""
        whole = self.ranked is not None and self.ranked.shape[-1] == self.p.shape[-1]
        return self if whole else self._replace(ranked=largest_first(self.p, self.p.shape[-1]))


def top_k(found: Candidates, k: int) -> Candidates:
    """Keep the first ``k``, so ties never make it keep more; 0 keeps all.

    Source:
        Fan et al. 2018, arXiv:1805.04833.
    """
    if not 0 < k < found.p.shape[-1]:
        return found
    if found.kept is not None:
        return found._replace(kept=found.kept.clamp(max=k))
    ranked = found.ranks(k)
    if ranked.shape[-1] < k:
        return top_k(found.extended(), k)
    return Candidates(found.p, ranked, torch.full(found.p.shape[:1], k, device=found.p.device))


def top_p(found: Candidates, mass: float) -> Candidates:
    """Keep the first that together reach ``mass`` of what is left; 1 or more keeps all.

    A token stays while the sum of those before it is below ``mass``: the one that crosses stays, one that comes after an exact hit
    (within ``TIE``) goes.

    Source:
        Holtzman et al. 2020, arXiv:1904.09751.
    """
    if mass >= 1:
        return found
    ranked = found.ranks(AT_FIRST)
    sums = ranked.cumsum(dim=-1, dtype=torch.float64)
    if found.kept is None:
        total = found.p.sum(dim=-1, keepdim=True, dtype=torch.float64)
        if ranked.shape[-1] < found.p.shape[-1] and bool((sums[:, -1:] < mass * total).any()):
            return top_p(found.extended(), mass)
    else:
        total = sums.gather(-1, found.kept.unsqueeze(-1) - 1)
    # Those that were cut off come behind the whole of the sum, so this counts none of them.
    return Candidates(found.p, ranked, (sums[:, :-1] < (mass - TIE) * total).sum(dim=-1) + 1)


def min_p(found: Candidates, share: float) -> Candidates:
    """Keep those with at least ``share`` times the largest probability; 0 keeps all.

    Source:
        Nguyen et al. 2024, arXiv:2407.01082.
    """
    if share <= 0:
        return found
    ranked, kept = found.ranked, found.kept
    if ranked is not None:
        enough = (ranked >= share * ranked[:, :1]).sum(dim=-1)
        if kept is not None:
            return found._replace(kept=torch.minimum(kept, enough))
        if ranked.shape[-1] == found.p.shape[-1] or not bool((enough == ranked.shape[-1]).any()):
            return found._replace(kept=enough)
    return Candidates(at_least(found.p, share * found.p.amax(dim=-1, keepdim=True)))


def typical_p(found: Candidates, mass: float) -> Candidates:
    """Keep those whose surprise is nearest to the entropy and that together reach ``mass`` of what is left; 1 or more keeps all.

    They are ranked by |−log p − H|, equal ones by id, and end as those of :func:`top_p` do. The likeliest token may go.

    Source:
        Meister et al. 2023, arXiv:2202.00666. Unlike transformers', it keeps no more tokens where several are as far from H as the last.
    """
    if mass >= 1:
        return found
    left = remaining(found)
    p = left / left.sum(dim=-1, keepdim=True)
    vocab = p.shape[-1]
    surprise = p.log().clamp_(min=torch.finfo(p.dtype).min).neg_()  # finite where p is 0, so that p · surprise is 0 there
    distance = (surprise - (p * surprise).sum(dim=-1, keepdim=True)).abs_()
    # One whole number a token, the distance's bits before the id, so that ordering numbers ranks tokens and leaves no tie.
    keys = (distance.view(torch.int32).to(torch.int64) << 32).bitwise_or_(torch.arange(vocab, device=p.device))
    for count in (AT_FIRST, vocab) if keys.device.type == "cpu" and vocab > AT_FIRST else (vocab,):
        order = _smallest_first(keys, count)
        sums = p.gather(-1, order & 0xFFFFFFFF).cumsum(dim=-1, dtype=torch.float64)
        if count == vocab or bool((sums[:, -1] >= mass).all()):
            break
    last = (sums[:, :-1] < mass - TIE).sum(dim=-1, keepdim=True)
    return Candidates(left * (keys <= order.gather(-1, last)))


def remaining(found: Candidates) -> Float[Tensor, "rows vocab"]:
    """``p`` with zeros in the place of what was filtered out; not renormalised."""
    if found.kept is None:
        return found.p
    last = found.ranks(AT_FIRST).gather(-1, found.kept.unsqueeze(-1) - 1)
    return (cut_by_comparing if found.p.device.type == "cpu" else cut_by_counting)(found.p, last, found.kept)


def at_least(p: Float[Tensor, "rows vocab"], least: Float[Tensor, "rows 1"]) -> Float[Tensor, "rows vocab"]:
    """``p`` with zeros in the place of what is below ``least``; on a CPU numpy compares in a tenth of torch's time."""
    if p.device.type != "cpu":
        return p * (p >= least)
    values = p.detach().numpy()
    return torch.from_numpy(values * (values >= least.numpy()))


def cut_by_counting(
    p: Float[Tensor, "rows vocab"], last: Float[Tensor, "rows 1"], kept: Int64[Tensor, " rows"]
) -> Float[Tensor, "rows vocab"]:
    """What is above ``last``, and of what equals it the lowest ids until there are ``kept``; without waiting for a device."""
    above, equal = p > last, p == last
    room = kept.unsqueeze(-1) - above.sum(dim=-1, keepdim=True)
    return p * (above | (equal & (equal.cumsum(dim=-1) <= room)))


def cut_by_comparing(
    p: Float[Tensor, "rows vocab"], last: Float[Tensor, "rows 1"], kept: Int64[Tensor, " rows"]
) -> Float[Tensor, "rows vocab"]:
    """Equal to :func:`cut_by_counting`, in a fifth of the time on a CPU: numpy compares faster, and ids count only in rows with a tie."""
    values, least = p.detach().numpy(), last.numpy()
    inside = values >= least
    for row, count in enumerate(kept.tolist()):
        surplus = int(np.count_nonzero(inside[row])) - count
        if surplus and least[row] > 0:
            inside[row, np.flatnonzero(values[row] == least[row])[-surplus:]] = False
    return torch.from_numpy(values * inside)


def largest_first(p: Float[Tensor, "rows vocab"], count: int) -> Float[Tensor, "rows count"]:
    """The ``count`` largest values of each row, descending; on a CPU by numpy, which takes a tenth of torch's time."""
    if p.device.type != "cpu":
        return p.topk(count, dim=-1).values
    values, at = p.detach().numpy(), p.shape[-1] - count
    # Of rows that are mostly zeros (after a filter, or under a grammar) the partition takes ten times as long as a sort.
    quick = at > 0 and np.count_nonzero(values) > count * len(values)
    found = np.partition(values, at, axis=-1)[:, at:] if quick else values
    return torch.from_numpy(np.sort(found, axis=-1)[:, : -count - 1 : -1].copy())


def _smallest_first(keys: Int64[Tensor, "rows vocab"], count: int) -> Int64[Tensor, "rows count"]:
    if keys.device.type != "cpu":
        return keys.topk(count, dim=-1, largest=False).values
    values = keys.numpy()
    found = np.partition(values, count - 1, axis=-1)[:, :count] if count < values.shape[-1] else values
    return torch.from_numpy(np.sort(found, axis=-1))
