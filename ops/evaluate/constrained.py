"""How far a masked model is from the model given that its text is legal. Not here: what is legal (``ops/decode/constraints.py``), running a model.

Masking renormalises at each step over the tokens that may come next, so a legal text x comes with chance

    p_mask(x) = Π_t p(x_t | x_<t) / A_t(x),        A_t(x) = Σ_v allowed after x_<t  p(v | x_<t).

What a user means by "the model's answer, in this form" is the model's own distribution over the language L:

    p_cond(x) = p(x | x ∈ L) = p(x) / Z,           Z = Σ_{y ∈ L} p(y).

They differ because A_t looks one token ahead: a first token whose legal continuations are all unlikely is taken as often as if they were not. All of it
is in the weight w(x) = p(x) / p_mask(x) = Π_t A_t(x), with expectations under p_mask written E:

    Z = E[w]
    TV(p_mask, p_cond)     = ½ E|1 - w/Z|
    KL(p_mask ‖ p_cond)    = E[log(p_mask / p_cond)] = E[log(Z/w)] = log Z - E[log w]
    KL(p_cond ‖ p_mask)    = E[w/Z · log(w/Z)]
    E_cond[f]              = E[w f] / Z
    effective sample share = Z² / E[w²] = 1 / (1 + χ²(p_cond ‖ p_mask))

On a small language E is a sum over all of it; otherwise a mean over draws from p_mask, where Z is estimated by the mean weight (self-normalised). Then the
first divergence, log mean(w) - mean(log w), is never negative but too small on average where few draws carry the weight: the share says so.

Here x is a *sequence of tokens that ends with an end token*, and L holds every way to cut a legal text into tokens: the ways of one text are several x.
A draw that runs into a dead end is an outcome of p_mask with w = 0, since p_cond does not have it.

Source:
    Park et al. 2024, arXiv:2405.21047 (the two distributions); Kong 1992 (the effective sample size). The closed forms above are worked out here.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from assay.ops.decode.constraints import Constraint, DeadEnd
from assay.ops.decode.sampling import sample

Text = tuple[int, ...]
NextLogits = Callable[[Sequence[Text]], Tensor]
"""The logits [texts, vocab] of what comes after each text; the prompt before them is the caller's."""

END, DEAD_END, CUT = "end", "dead_end", "cut"
ROWS = 64  # texts per call of next_logits


class Language(NamedTuple):
    """A whole language. ``prefixes``: each unfinished text with the ids that may follow it, a text before those it begins."""

    texts: list[Text]
    prefixes: list[tuple[Text, tuple[int, ...]]]
    dead_ends: list[Text]


class Outcomes(NamedTuple):
    """What masked sampling gives: each text, how it ended, and log w of it (-inf for what is no legal text).

    ``chance`` is p_mask of each, where these are all outcomes; None where they are draws.
    """

    texts: list[Text]
    ended: list[str]
    log_weight: Float64[Tensor, " texts"]
    chance: Float64[Tensor, " texts"] | None

    def share(self, ended: str) -> float:
        """How much of p_mask ended like this."""
        here = torch.tensor([each == ended for each in self.ended], dtype=torch.float64)
        return float(here.mean() if self.chance is None else (here * self.chance).sum())


class Estimate(NamedTuple):
    """A number, None where it is infinite, and its standard error, None where it is exact or cannot be told."""

    value: float | None
    standard_error: float | None = None


class Distances(NamedTuple):
    """See the top of this module; divergences and ``log_legal_mass`` (log Z) in nats."""

    tv: Estimate
    kl: Estimate
    reverse_kl: Estimate
    log_legal_mass: Estimate
    effective_share: Estimate


def language(constraint: Constraint, *, max_tokens: int, limit: int) -> Language | None:
    """Every text of ``constraint``, or None if one is longer than ``max_tokens`` (end token included) or ``limit`` prefixes are not enough.

    No model is asked.
    """
    found = Language([], [], [])
    pending: list[tuple[Text, Constraint]] = [((), constraint.copy())]
    while pending and limit > 0:
        text, here = pending.pop()
        try:
            legal = tuple(here.allowed().nonzero().flatten().tolist())
        except DeadEnd:
            found.dead_ends.append(text)
            continue
        found.prefixes.append((text, legal))
        for token in reversed(legal):
            after = here.copy()
            after.advance(token)
            if after.finished:
                found.texts.append((*text, token))
            elif len(text) + 1 == max_tokens or len(found.prefixes) + len(pending) >= limit:
                return None
            else:
                pending.append(((*text, token), after))
    return found if limit > 0 else None


def enumerate_masked(whole: Language, next_logits: NextLogits, *, temperature: float, vocabulary: int) -> Outcomes:
    """All outcomes of masked sampling, with their chances: one forward a prefix.

    Args:
        temperature: divides the logits of the model, so that p is the model's distribution at this temperature.
        vocabulary: ids from here on are none of the tokenizer's and have no chance in p either.
    Raises:
        ValueError: the model gives all that is allowed somewhere no chance at all.
    """
    chances: dict[Text, tuple[float, float]] = {(): (0.0, 0.0)}  # log p_mask and log w so far
    for start in range(0, len(whole.prefixes), ROWS):
        part = whole.prefixes[start : start + ROWS]
        for (text, legal), logits in zip(part, next_logits([text for text, _ in part]), strict=True):
            log_masked, log_weight = chances[text]
            log_p, log_mass = masked(logits, torch.tensor(legal), temperature=temperature, vocabulary=vocabulary)
            for token, log_chance in zip(legal, log_p.tolist(), strict=True):
                chances[(*text, token)] = (log_masked + log_chance, log_weight + log_mass)
    texts = whole.texts + whole.dead_ends
    chance = torch.tensor([chances[text][0] for text in texts], dtype=torch.float64).exp()
    weights = [chances[text][1] for text in whole.texts] + [-math.inf] * len(whole.dead_ends)
    return Outcomes(texts, [END] * len(whole.texts) + [DEAD_END] * len(whole.dead_ends), torch.tensor(weights, dtype=torch.float64), chance)


def draw_masked(
    constraint: Constraint,
    next_logits: NextLogits,
    *,
    samples: int,
    max_tokens: int,
    temperature: float,
    vocabulary: int,
    seed: int,
) -> Outcomes:
    """``samples`` draws of masked sampling, each with a generator of its own, seeded ``seed``, ``seed + 1``, …

    Texts that are equal so far share a forward. See :func:`enumerate_masked`; a draw of ``max_tokens`` tokens without an end is cut.
    """
    generators = [torch.Generator().manual_seed(seed + index) for index in range(samples)]
    texts: list[Text] = [()] * samples
    ended = [CUT] * samples
    log_weight = [0.0] * samples
    states: dict[Text, Constraint] = {(): constraint.copy()}
    for _ in range(max_tokens):
        legal: dict[Text, Tensor] = {}
        for text, here in states.items():
            try:
                legal[text] = here.allowed().nonzero().flatten()
            except DeadEnd:
                for index, own in enumerate(texts):
                    ended[index] = DEAD_END if own == text else ended[index]
        steps = {}
        for part in _parts(sorted(legal)):
            for text, logits in zip(part, next_logits(part), strict=True):
                steps[text] = masked(logits, legal[text], temperature=temperature, vocabulary=vocabulary)
        after: dict[Text, Constraint] = {}
        for index, text in enumerate(texts):
            if text not in steps or ended[index] != CUT:
                continue
            log_p, log_mass = steps[text]
            token = int(legal[text][sample(log_p.exp(), generators[index])])
            texts[index], log_weight[index] = (*text, token), log_weight[index] + log_mass
            if texts[index] not in after:
                after[texts[index]] = states[text].copy()
                after[texts[index]].advance(token)
            if after[texts[index]].finished:
                ended[index] = END
        states = {text: here for text, here in after.items() if not here.finished}
        if not states:
            break
    weights = [weight if how == END else -math.inf for weight, how in zip(log_weight, ended, strict=True)]
    return Outcomes(texts, ended, torch.tensor(weights, dtype=torch.float64), None)


def greedy(constraint: Constraint | None, next_logits: NextLogits, *, eos_ids: frozenset[int], max_tokens: int, vocabulary: int) -> Text:
    """The likeliest token at each step, among those allowed if there is a constraint, up to and with an end token.

    Raises:
        DeadEnd: the constraint allows nothing somewhere.
    """
    text: Text = ()
    here = constraint.copy() if constraint else None
    while len(text) < max_tokens and not (text and text[-1] in eos_ids):
        logits = next_logits([text])[0][:vocabulary]
        if here:
            logits = logits.masked_fill(~here.allowed()[:vocabulary], -torch.inf)
        token = int(logits.argmax())
        text = (*text, token)
        if here:
            here.advance(token)
    return text


def masked(logits: Float[Tensor, " vocab"], legal: Tensor, *, temperature: float, vocabulary: int) -> tuple[Tensor, float]:
    """log p_mask of each id of ``legal``, and log A, the log of the mass that the model gives them together; float64."""
    log_p = (logits[:vocabulary].double() / temperature).log_softmax(dim=-1)[legal]
    log_mass = float(log_p.logsumexp(dim=-1))
    if not math.isfinite(log_mass):
        raise ValueError(f"the model gives the {len(legal)} allowed tokens no chance (log {log_mass}), so no text can be drawn among them")
    return log_p - log_mass, log_mass


def distances(outcomes: Outcomes) -> Distances:
    """p_mask against p_cond, exactly where ``outcomes`` are all there are, otherwise estimated; standard errors by the delta method.

    Raises:
        ValueError: no outcome is a legal text, so that there is no p_cond to compare with.
    """
    chance, log_weight = outcomes.chance, outcomes.log_weight
    if not bool((log_weight > -math.inf).any()):
        raise ValueError(f"none of {len(log_weight)} outcomes is a legal text that ended, so nothing can be compared; allow longer texts")
    share = torch.full_like(log_weight, 1 / len(log_weight)) if chance is None else chance
    log_z = float((share.log() + log_weight).logsumexp(dim=-1))
    ratio = (log_weight - log_z).exp()  # p_cond / p_mask
    log_ratio = log_weight - log_z
    off = (1 - ratio).abs()
    tv, kl = float((share * off).sum()) / 2, float((share * -log_ratio)[share > 0].sum())
    information = torch.where(ratio > 0, ratio * log_ratio, 0.0)
    reverse, second = float((share * information).sum()), float((share * ratio.square()).sum())
    if chance is not None:
        return Distances(*(Estimate(value if math.isfinite(value) else None) for value in (tv, kl, reverse, log_z, 1 / second)))
    # Each draw's influence on the estimate, the mean weight's error included.
    toward = float((share * (ratio - 1).sign() * ratio).sum())
    influences = (
        (off - 2 * tv) / 2 - toward * (ratio - 1) / 2,
        -log_ratio - kl + (ratio - 1),
        information - reverse - (1 + reverse) * (ratio - 1),
        ratio - 1,
        (2 * (ratio - 1) - (ratio.square() / second - 1)) / second,
    )
    return Distances(
        *(_estimate(value, influence) for value, influence in zip((tv, kl, reverse, log_z, 1 / second), influences, strict=True))
    )


def expectations(outcomes: Outcomes, quality: Float64[Tensor, " texts"]) -> tuple[Estimate, Estimate]:
    """The mean of ``quality`` of the texts under p_mask and under p_cond.

    Args:
        quality: of each outcome; of one that is no legal text, what it is worth to a user of masked sampling (0, mostly).
    """
    share = torch.full_like(quality, 1 / len(quality)) if outcomes.chance is None else outcomes.chance
    weight = share * (outcomes.log_weight - outcomes.log_weight.max()).exp()
    weight = weight / weight.sum()
    under_mask, under_condition = float((share * quality).sum()), float((weight * quality).sum())
    if outcomes.chance is not None:
        return Estimate(under_mask), Estimate(under_condition)
    ratio = weight * len(weight)
    return _estimate(under_mask, quality - under_mask), _estimate(under_condition, ratio * (quality - under_condition))


def says(text: str, expected: str) -> bool:
    """Whether ``text`` has ``expected`` as whole words; a single letter also in its case, since "a" is no answer A."""
    flags = 0 if len(expected) == 1 else re.IGNORECASE
    return re.search(rf"(?<!\w){re.escape(expected)}(?!\w)", text, flags) is not None


def _estimate(value: float, influence: Tensor) -> Estimate:
    """``value`` with the standard error of a mean of ``influence``; none with fewer than two draws."""
    if not math.isfinite(value):
        return Estimate(None)
    return Estimate(value, float(influence.std() / math.sqrt(len(influence))) if len(influence) > 1 else None)


def _parts(texts: list[Text]) -> list[list[Text]]:
    return [texts[start : start + ROWS] for start in range(0, len(texts), ROWS)]
