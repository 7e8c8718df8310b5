"""What speculation gains: closed forms, and statistics of recorded rounds. Not here: the loop that records them (``speculate``)."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor


def overlap(p: Float[Tensor, "*batch vocab"], q: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch"]:
    """The chance that a token drawn from ``q`` is accepted for ``p``: α = Σ min(p, q) = 1 - TV(p, q).

    Source:
        Leviathan et al. 2023, Theorem 3.5, arXiv:2211.17192.
    """
    return p.minimum(q).sum(dim=-1)


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens that a round of ``gamma`` proposals emits on average, if each is accepted with chance ``alpha`` on its own:

        E = 1 + α + … + α^γ = (1 - α^(γ+1)) / (1 - α)

    Raises:
        ValueError: ``alpha`` is outside 0 … 1 or ``gamma`` is negative.
    Source:
        Leviathan et al. 2023, equation 1, arXiv:2211.17192.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha} is no chance; expected a number between 0 and 1")
    if gamma < 0:
        raise ValueError(f"gamma={gamma} proposals a round is impossible; expected 0 or more")
    return float(sum(alpha**position for position in range(gamma + 1)))


def expected_speedup(alpha: float, gamma: int, cost: float) -> float:
    """How many times faster than plain decoding: ``expected_tokens / (gamma * cost + 1)``.

    It takes verifying ``gamma + 1`` positions to cost as much as one, which holds while decoding is bound by memory.

    Args:
        cost: time of one draft step over time of one target step.
    Source:
        Leviathan et al. 2023, Theorem 3.8, arXiv:2211.17192.
    """
    if not cost >= 0:
        raise ValueError(f"cost={cost} is no ratio of times; expected 0 or more")
    return expected_tokens(alpha, gamma) / (gamma * cost + 1)


def best_gamma(alpha: float, cost: float, most: int) -> int:
    """The number of proposals a round, 1 to ``most``, at which :func:`expected_speedup` is largest; the smaller one where two are equal.

    Raises:
        ValueError: ``most`` is below 1, or as :func:`expected_speedup` says.
    """
    if most < 1:
        raise ValueError(f"most={most} proposals a round leave no choice; expected 1 or more")
    return max(range(1, most + 1), key=lambda gamma: (expected_speedup(alpha, gamma, cost), -gamma))


@dataclass(frozen=True)
class Adaptive:
    """Chooses the number of proposals of each round by how many of the last rounds' were accepted.

    The choice depends on a text's own past rounds alone, which are over when it is made: so the next round is as exact with it as with any other, and
    no neighbour in a batch has a part in it.

    Attributes:
        cost: time of one draft step over time of one target step, measured before.
        most: the largest number it may choose.
        memory: rounds that it looks back.
        prior, weight: it begins as if ``weight`` proposals had been tested and the share ``prior`` of them accepted.
    """

    cost: float
    most: int = 8
    memory: int = 32
    prior: float = 0.7
    weight: float = 4.0

    def __post_init__(self) -> None:
        best_gamma(self.prior, self.cost, self.most)
        if self.memory < 1 or not self.weight > 0:
            raise ValueError(f"memory={self.memory} rounds and weight={self.weight}; expected 1 or more and a number above 0")

    def gamma(self, proposed: Sequence[int], accepted: Sequence[int]) -> int:
        """Proposals for the next round of a text whose rounds so far proposed and accepted these."""
        rounds = list(zip(proposed[-self.memory :], accepted[-self.memory :], strict=True))
        taken = sum(accepted for _, accepted in rounds)
        tested = sum(min(accepted + 1, proposed) for proposed, accepted in rounds)
        return best_gamma((taken + self.prior * self.weight) / (tested + self.weight), self.cost, self.most)


def acceptance_rate(proposed: Sequence[int], accepted: Sequence[int]) -> float | None:
    """Accepted proposals over all proposals, those behind a rejection included; None where nothing was proposed."""
    _check(proposed, accepted)
    total = sum(proposed)
    return sum(accepted) / total if total else None


def acceptance_by_position(proposed: Sequence[int], accepted: Sequence[int], gamma: int) -> list[tuple[int, int]]:
    """For each of the ``gamma`` positions of a round: how often it was reached, and how often accepted then.

    A proposal is reached if all before it were accepted; those behind a rejection were never tested, so they say nothing about their position.
    """
    _check(proposed, accepted)
    if proposed and max(proposed) > gamma:
        raise ValueError(f"a round has {max(proposed)} proposals, more than gamma={gamma}; pass the gamma that the rounds were made with")
    return [
        (
            sum(1 for offered, taken in zip(proposed, accepted, strict=True) if offered > position and taken >= position),
            sum(1 for taken in accepted if taken > position),
        )
        for position in range(gamma)
    ]


def acceptance_when_reached(proposed: Sequence[int], accepted: Sequence[int]) -> float | None:
    """The estimate of α: accepted proposals over those that were reached; None where nothing was proposed.

    Unlike :func:`acceptance_rate`, it does not fall with gamma when every position is accepted equally often.
    """
    positions = acceptance_by_position(proposed, accepted, max(proposed, default=0))
    reached = sum(reached for reached, _ in positions)
    return sum(taken for _, taken in positions) / reached if reached else None


def tokens_per_round(emitted: int, rounds: int) -> float | None:
    """Tokens that a target forward yields after the prefill, whose own token is not among ``emitted``; None without a round."""
    if emitted < 0 or rounds < 0:
        raise ValueError(f"emitted={emitted}, rounds={rounds}: both are counts, 0 or more")
    return emitted / rounds if rounds else None


def _check(proposed: Sequence[int], accepted: Sequence[int]) -> None:
    if len(proposed) != len(accepted):
        raise ValueError(f"{len(proposed)} rounds of proposals and {len(accepted)} of acceptances; both lists have one entry a round")
    wrong = [index for index, (offered, taken) in enumerate(zip(proposed, accepted, strict=True)) if not 0 <= taken <= offered]
    if wrong:
        raise ValueError(
            f"round {wrong[0]} accepts {accepted[wrong[0]]} of {proposed[wrong[0]]} proposals; expected between 0 and all of them"
        )
