"""One answer from several samples: by majority, or the most probable. Not here: drawing them, what is right, pass@k (``ops/evaluate/pass_at_k.py``)."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from decimal import Decimal
from typing import Literal, NamedTuple

from assay.ops.data.arithmetic import NUMBER, as_number


class Vote(NamedTuple):
    """The answer that most samples have (None if none has one), how many do, and how many have an answer at all."""

    answer: Hashable | None
    votes: int
    voters: int


def plain(text: str) -> str | None:
    """``text`` without outer blanks, in one case and with single blanks inside; None for an empty one."""
    return " ".join(text.split()).casefold() or None


def last_number(text: str) -> Decimal | None:
    """The last number in ``text`` as an exact decimal, None if there is none: 1,234.50 and 1234.5 are the same answer, as are 18 and 18.0."""
    found = NUMBER.findall(text)
    return as_number(found[-1]) if found else None


def majority(texts: Sequence[str], normalise: Callable[[str], Hashable | None] = plain) -> Vote:
    """The answer of most samples; of equally frequent ones the one that came first.

    Args:
        texts: one a sample, in the order in which they were drawn.
        normalise: what makes two texts the same answer; a text for which it gives None has no vote.
    Source:
        Wang et al. 2022 (self-consistency), arXiv:2203.11171.
    """
    answers = [answer for answer in map(normalise, texts) if answer is not None]
    if not answers:
        return Vote(None, 0, 0)
    ((answer, votes),) = Counter(answers).most_common(1)  # of equal counts, Counter has the one that it met first
    return Vote(answer, votes, len(answers))


def majority_at_k(right: int, wrong: Sequence[int], k: int, *, silent: int = 0) -> float:
    """maj@k: the chance that a vote of k of the samples, taken without putting back and in any order, finds the right answer.

    Exact, over all choices: a vote is won by more votes than any other answer has, or with one chance in t where t answers have equally many, since
    any of them may have come first. As pass@k it takes n ≥ k samples and wastes none of them.

    Args:
        right: how many samples have the right answer.
        wrong: how many have each of the wrong ones.
        silent: how many have no answer, and so no vote.
    Raises:
        ValueError: a count is negative, or ``k`` is below 1 or above the number of samples.
    """
    samples = right + sum(wrong) + silent
    if min(right, silent, *wrong) < 0:
        raise ValueError(f"right={right}, wrong={list(wrong)}, silent={silent}; expected counts of samples, from 0 on")
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} with {samples} samples; expected k from 1 to the samples. Draw at least {max(k, 1)} samples")
    won = 0.0
    for votes in range(1, min(right, k) + 1):
        # others[used, tied]: ways to take `used` samples of the other answers, none with more votes, `tied` of them with as many.
        others = {(0, 0): 1}
        for count in wrong:
            grown: Counter[tuple[int, int]] = Counter()
            for (used, tied), ways in others.items():
                for taken in range(min(count, votes, k - votes - used) + 1):
                    grown[used + taken, tied + (taken == votes)] += ways * math.comb(count, taken)
            others = grown
        for (used, tied), ways in others.items():
            won += math.comb(right, votes) * ways * math.comb(silent, k - votes - used) / math.comb(samples, k) / (1 + tied)
    return won


def best_of_n(log_probs: Sequence[Sequence[float]], by: Literal["mean", "total"] = "mean") -> int:
    """The number of the sample with the largest mean or total log-probability; of equal ones the first.

    The total favours short samples, since each token takes something off; the mean does not.

    Args:
        log_probs: of each token of each sample, in nats.
    Raises:
        ValueError: there is no sample, one has no token, or a log-probability is NaN or above 0.
    """
    if not log_probs:
        raise ValueError("there is no sample to choose from; expected at least one")
    empty = [number for number, sample in enumerate(log_probs) if not sample]
    if empty:
        raise ValueError(
            f"sample {empty[0]} has no token, so it has no mean log-probability; expected at least one, if only the end of the text"
        )
    if any(not value <= 0 for sample in log_probs for value in sample):
        raise ValueError("a log-probability is NaN or above 0; expected the logarithm of a probability, in nats")
    scores = [math.fsum(sample) / (len(sample) if by == "mean" else 1) for sample in log_probs]
    return max(range(len(scores)), key=lambda number: scores[number])
