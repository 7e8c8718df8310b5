"""Beam search: the continuations of one prompt with the best length-normalised log-probability. Not here: the model that is read, sampling."""

import math
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple, Protocol, get_args

import torch
from jaxtyping import Float
from torch import Tensor

# When a search ends before the longest text, once as many texts have ended as there are beams (transformers' early_stopping):
# - full: at once (True);
# - heuristic: when no running text, scored as if it ended where it is, beats the worst ended one (False); a length penalty above 0 can make it
#   beat that one later, so this may miss it;
# - bound: when none could beat it with the length that is best for it (never).
Stop = Literal["full", "heuristic", "bound"]


class Reader(Protocol):
    """Rows of text being read by a model; a row is there from the first call on."""

    def read(self, ids: Sequence[Sequence[int]], keep: int = 1) -> list[Tensor]:
        """Append to each row its list of new tokens, which may be empty; per row the logits ``[keep, vocab]`` of its last tokens."""
        ...

    def reorder(self, sources: Sequence[int]) -> None:
        """Make row i a copy of what row ``sources[i]`` was."""
        ...


class Beam(NamedTuple):
    """A continuation, its end-of-sequence token included; ``score`` is its ``log_prob`` (nats) over its length to the power of the penalty."""

    tokens: list[int]
    log_prob: float
    score: float
    ended: bool  # by an end-of-sequence token, and not by the longest length


class Running(NamedTuple):
    """A continuation that goes on, and the row that it was read in."""

    tokens: list[int]
    log_prob: float
    row: int


def beam_search(
    reader: Reader,
    prompt: Sequence[int],
    *,
    beams: int,
    max_new_tokens: int,
    eos_ids: Collection[int] = frozenset(),
    length_penalty: float = 1.0,
    stop: Stop = "heuristic",
) -> list[Beam]:
    """At most ``beams`` continuations, the best score first.

        score = Σ log p(token) / length^length_penalty

    In each step the running texts are continued by every token, and the best max(2, 1 + eos) · beams of all are looked at, so that enough go on
    where some end: those that end count if they are among the best ``beams``, the best ``beams`` of those that do not run on. Of equal ones the
    earlier beam and then the lower id comes first.

    Args:
        reader: has ``beams`` rows, all empty; the prompt is read once, in the first.
        eos_ids: any of these ends a text.
        length_penalty: 0 favours short texts, since each token takes something off; 1 is the mean log-probability; larger favours long ones.
        stop: see :data:`Stop`.
    Raises:
        ValueError: a parameter is out of its range, the prompt is empty, or a row of logits has no distribution.
    Source:
        As transformers 5.24 searches (Graves 2012, arXiv:1211.3711; length penalty after Wu et al. 2016, arXiv:1609.08144, with its simpler norm);
        unlike there, what has probability 0 is never looked at, and ties have a rule.
    """
    if beams < 1 or max_new_tokens < 1:
        raise ValueError(f"beams={beams}, max_new_tokens={max_new_tokens}; expected at least 1 each. One beam is greedy decoding")
    if stop not in get_args(Stop):
        raise ValueError(f"stop={stop!r} is no rule for ending a search; there is {', '.join(get_args(Stop))}")
    if not math.isfinite(length_penalty):
        raise ValueError(
            f"length_penalty={length_penalty} is no power; expected a finite number, of which 0 leaves the log-probability as it is"
        )
    if not prompt:
        raise ValueError("the prompt has no tokens; expected at least one, for instance the tokenizer's beginning-of-sequence id")
    ended: list[Beam] = []
    running = [Running([], 0.0, 0)]
    logits = reader.read([list(prompt), *[[]] * (beams - 1)])
    for length in range(1, max_new_tokens + 1):
        rows = torch.stack([logits[row][-1] for row in range(len(running))])
        best = _continuations(rows, running, max(2, 1 + len(eos_ids)) * beams)
        ends = [length == max_new_tokens or each.tokens[-1] in eos_ids for each in best]
        ended += [
            Beam(each.tokens, each.log_prob, each.log_prob / length**length_penalty, each.tokens[-1] in eos_ids)
            for each, over in zip(best[:beams], ends, strict=False)
            if over
        ]
        ended = sorted(ended, key=lambda beam: -beam.score)[:beams]
        running = [each for each, over in zip(best, ends, strict=True) if not over][:beams]
        if not running or (len(ended) == beams and _is_over(stop, ended[-1], running[0], length, max_new_tokens, length_penalty)):
            break
        spare = beams - len(running)
        reader.reorder([each.row for each in running] + [0] * spare)
        logits = reader.read([each.tokens[-1:] for each in running] + [[]] * spare)
    return ended


def _is_over(stop: Stop, worst: Beam, best: Running, length: int, longest: int, length_penalty: float) -> bool:
    """Whether the ``best`` running text is not to be waited for, now that as many texts have ended as there are beams."""
    if stop == "full":
        return True
    # A log-probability is not positive and only falls, so the longest text scores best where the penalty is positive, else the shortest.
    hoped = longest if stop == "bound" and length_penalty > 0 else length
    return best.log_prob / hoped**length_penalty <= worst.score


def _continuations(logits: Float[Tensor, "live vocab"], running: Sequence[Running], count: int) -> list[Running]:
    """The ``count`` likeliest of all texts that are a running one and a token more, the likeliest first; none with probability 0."""
    log_p = logits.float().log_softmax(dim=-1)
    if bool(log_p.isnan().any()):
        raise ValueError(
            "a row of logits has NaN, +inf or only -inf, so it has no distribution; expected at least one finite logit and no NaN"
        )
    totals = (
        log_p.double() + torch.tensor([each.log_prob for each in running], dtype=torch.float64, device=log_p.device).unsqueeze(-1)
    ).flatten()
    least = totals.topk(min(count, len(totals))).values[-1]
    found = ((totals >= least) & (totals > -math.inf)).nonzero().flatten()  # in the order of rows and ids, which a stable sort keeps
    values, order = totals[found].sort(descending=True, stable=True)
    vocab = logits.shape[-1]
    return [
        Running([*running[at // vocab].tokens, at % vocab], value, at // vocab)
        for value, at in zip(values[:count].tolist(), found[order][:count].tolist(), strict=True)
    ]
