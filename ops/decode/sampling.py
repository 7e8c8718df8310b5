"""From logits to a distribution, and from a distribution to a token.

The order of the steps is declared: a preset is a tuple of their names (:data:`ORDERS`), and a distribution is what folding over it leaves.
Not here: what a step does (``penalties``, ``filters``), or loops over tokens (``generate``, ``speculate``).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from assay.ops.decode import filters, penalties
from assay.ops.decode.filters import Candidates
from assay.ops.decode.penalties import Ids

Order = Literal["transformers", "vllm"]

# Each preset's steps, the first first. They differ in where min-p stands: after top-p it sees what that left, before it top-p sees what min-p left.
# transformers (5.24, ``GenerationMixin._get_logits_processor``) has no presence or frequency penalty, vLLM (``vllm/v1/sample/sampler.py``, where min-p
# is a processor that cannot change the argmax and so comes right after the temperature) no typical-p: what one lacks stands where the other has it.
ORDERS: dict[Order, tuple[str, ...]] = {
    "transformers": (
        "logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty", "temperature", "top_k", "top_p", "min_p", "typical_p",
    ),
    "vllm": (
        "logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty", "temperature", "min_p", "top_k", "top_p", "typical_p",
    ),
}  # fmt: skip


class History(NamedTuple):
    """The places (see ``penalties``) that the repetition penalty counts, and those that presence and frequency penalties count."""

    repetition: Int64[Tensor, " places"]
    others: Int64[Tensor, " other_places"]


NO_HISTORY = History(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))


@dataclass(frozen=True)
class Sampling:
    """How one request turns logits into a distribution; a draft and its target use the same one.

    Attributes:
        temperature: divides the logits; 0 is greedy: everything on the largest logit, the lowest id among equals. Penalties and bias come
            first, so they can change which one that is.
        top_k, top_p, min_p, typical_p: see ``filters``; 0, 1, 0 and 1 switch them off, and so does a top_p or typical_p above 1.
        repetition_penalty, presence_penalty, frequency_penalty: see ``penalties``; 1, 0 and 0 switch them off.
        logit_bias: pairs of an id and what is added to its logit; -inf forbids the token.
        count_prompt: whether the penalties count the prompt's tokens as well as the emitted ones. None is what both presets do: the
            repetition penalty does, presence and frequency do not.
        order: which of :data:`ORDERS` the steps come in.
    Raises:
        ValueError: a parameter is out of its range, or ``logit_bias`` names an id twice.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    count_prompt: bool | None = None
    order: Order = "transformers"

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} is no temperature; 0 is greedy, 1 leaves the model's distribution as it is")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} keeps no token; 0 switches the filter off, 1 is greedy")
        if not self.top_p > 0:
            raise ValueError(f"top_p={self.top_p} keeps no token; it is above 0, and 1 switches the filter off")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} is a share of the largest probability, between 0 (off) and 1")
        if not self.typical_p > 0:
            raise ValueError(f"typical_p={self.typical_p} keeps no token; it is above 0, and 1 switches the filter off")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} is no factor; it is above 0, and 1 switches it off")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} is no difference of logits; it is finite, and 0 switches it off")
        ids = [token for token, _ in self.logit_bias]
        if len(set(ids)) < len(ids):
            raise ValueError(f"logit_bias names an id twice: {sorted(ids)}; expected one value an id")
        if any(not value < math.inf for _, value in self.logit_bias):
            raise ValueError("logit_bias has a value that is NaN or +inf; expected a finite one, or -inf, which forbids the token")
        if self.order not in ORDERS:
            raise ValueError(f"order={self.order!r} is no order of the steps; there is {', '.join(ORDERS)}")

    @property
    def greedy(self) -> bool:
        """Whether the distribution is always one-hot, so that a request draws nothing."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def needs_history(self) -> bool:
        """Whether the distribution depends on what the text holds already, so that :meth:`probabilities` must be told it."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def probabilities(self, logits: Float[Tensor, "*batch vocab"], *, prompt: Ids = (), emitted: Ids = ()) -> Float[Tensor, "*batch vocab"]:
        """The distribution that the next token is drawn from.

        Args:
            logits: any float dtype; ``-inf`` marks a token that cannot come. With penalties, ``[vocab]`` or ``[n, vocab]``: the rows are
                consecutive places of one text, the last after all of ``emitted``, the one before after all but its last token, and so on.
            prompt, emitted: the ids that the text holds, without pads; only penalties look at them. A tensor is not converted at each call.
        Returns:
            float32, each row summing to 1.
        Raises:
            ValueError: a row holds NaN or +inf, or nothing but -inf; with penalties, more dimensions or fewer emitted tokens than the rows need.
        """
        return self._folded(logits, self._history(logits, prompt, emitted))

    def probabilities_of_rows(
        self, logits: Float[Tensor, "rows vocab"], prompts: Sequence[Ids], emitteds: Sequence[Ids]
    ) -> Float[Tensor, "rows vocab"]:
        """:meth:`probabilities` of rows that belong to different texts, each with its own history; a row has what it would have alone.

        Raises:
            ValueError: as there; or there is not one prompt and one list of emitted tokens a row.
        """
        return self._folded(logits, self._histories(logits, prompts, emitteds))

    def adjust(self, logits: Float[Tensor, "*batch vocab"], *, prompt: Ids = (), emitted: Ids = ()) -> Float[Tensor, "*batch vocab"]:
        """The logits after bias and penalties, for :meth:`probabilities` of the same arguments; what came, where there are none."""
        return self._adjusted(logits, self._history(logits, prompt, emitted))

    def draw(self, logits: Float[Tensor, " vocab"], generator: torch.Generator | None, *, prompt: Ids = (), emitted: Ids = ()) -> int:
        """:func:`sample` of :meth:`probabilities`; greedy, without making a distribution.

        Raises:
            ValueError: as both do.
        """
        if self.greedy:
            return int(largest(self.adjust(logits, prompt=prompt, emitted=emitted)))
        return sample(self.probabilities(logits, prompt=prompt, emitted=emitted), generator)

    def _history(self, logits: Tensor, prompt: Ids, emitted: Ids) -> History:
        if not self.needs_history:
            return NO_HISTORY
        if logits.ndim > 2:
            raise ValueError(
                f"logits of shape {tuple(logits.shape)} with penalties; expected [vocab] or [n, vocab], the consecutive places of one text. "
                "Rows of different texts go to probabilities_of_rows"
            )
        rows, vocabulary = (1, *logits.shape)[-2:]

        def places(with_prompt: bool) -> Tensor:
            before = prompt if with_prompt else ()
            return penalties.places_of_text(before, emitted, rows=rows, vocabulary=vocabulary, device=logits.device)

        return self._counted(places)

    def _histories(self, logits: Tensor, prompts: Sequence[Ids], emitteds: Sequence[Ids]) -> History:
        rows, vocabulary = logits.shape
        if not len(prompts) == len(emitteds) == rows:
            raise ValueError(
                f"{rows} rows of logits, {len(prompts)} prompts and {len(emitteds)} lists of emitted tokens; expected one each a row"
            )
        if not self.needs_history:
            return NO_HISTORY

        def places(with_prompt: bool) -> Tensor:
            histories = [[prompt, emitted] if with_prompt else [emitted] for prompt, emitted in zip(prompts, emitteds, strict=True)]
            return penalties.places_of_rows(histories, vocabulary, logits.device)

        return self._counted(places)

    def _counted(self, places: Callable[[bool], Tensor]) -> History:
        for_repetition, for_others = (True, False) if self.count_prompt is None else (self.count_prompt, self.count_prompt)
        repetition = places(for_repetition)
        return History(repetition, repetition if for_others == for_repetition else places(for_others))

    def _adjusted(self, logits: Tensor, history: History) -> Tensor:
        if not self.logit_bias and not self.needs_history:
            return logits
        rows = logits.reshape(-1, logits.shape[-1])
        for step in self._steps[0]:
            rows = ON_LOGITS[step](rows, self, history)
        return rows.view(logits.shape)

    def _folded(self, logits: Tensor, history: History) -> Tensor:
        logits = self._adjusted(logits, history)
        if self.greedy:
            return torch.zeros(logits.shape, dtype=torch.float32, device=logits.device).scatter_(-1, largest(logits).unsqueeze(-1), 1.0)
        p = tempered(logits.reshape(-1, logits.shape[-1]), self.temperature)
        if self._filters:
            left = Candidates(p)
            if self.top_k > 0 or self.top_p < 1:
                left = left._replace(ranked=left.ranks(self.top_k))
            for step in self._steps[1]:
                left = ON_PROBABILITIES[step](left, self)
            p = filters.remaining(left)
            p = p / p.sum(dim=-1, keepdim=True)
        return p.view(logits.shape)

    @property
    def _filters(self) -> bool:
        """Whether any filter is on."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.typical_p < 1

    @property
    def _steps(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Those before the temperature, which change logits, and those after it, which filter probabilities."""
        steps = ORDERS[self.order]
        at = steps.index("temperature")
        return steps[:at], steps[at + 1 :]


ON_LOGITS: dict[str, Callable[[Tensor, Sampling, History], Tensor]] = {
    "logit_bias": lambda logits, asked, history: penalties.bias(logits, asked.logit_bias),
    "repetition_penalty": lambda logits, asked, history: penalties.penalise_repetition(
        logits, history.repetition, asked.repetition_penalty
    ),
    "frequency_penalty": lambda logits, asked, history: penalties.penalise_frequency(logits, history.others, asked.frequency_penalty),
    "presence_penalty": lambda logits, asked, history: penalties.penalise_presence(logits, history.others, asked.presence_penalty),
}
ON_PROBABILITIES: dict[str, Callable[[Candidates, Sampling], Candidates]] = {
    "top_k": lambda left, asked: filters.top_k(left, asked.top_k),
    "top_p": lambda left, asked: filters.top_p(left, asked.top_p),
    "min_p": lambda left, asked: filters.min_p(left, asked.min_p),
    "typical_p": lambda left, asked: filters.typical_p(left, asked.typical_p),
}


def probabilities(
    logits: Float[Tensor, "*batch vocab"], *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Float[Tensor, "*batch vocab"]:
    """:meth:`Sampling.probabilities` with these parameters, in the order of transformers.

    Raises:
        ValueError: a parameter is out of its range; a row holds NaN or +inf, or nothing but -inf.
    """
    return Sampling(temperature, top_k, top_p, min_p).probabilities(logits)


def largest(logits: Float[Tensor, "*batch vocab"]) -> Int64[Tensor, "*batch"]:
    """The id of the largest logit of each row, the lowest among equals.

    Raises:
        ValueError: a row holds NaN or +inf, or nothing but -inf.
    """
    if logits.device.type == "cpu":  # numpy takes a tenth of the time of torch, whose argmax is not vectorised there
        rows = logits.detach().float().numpy()
        found = rows.argmax(axis=-1)
        _require(bool(np.isfinite(np.take_along_axis(rows, found[..., None], axis=-1)).all()))
        return torch.as_tensor(found)
    found = logits.argmax(dim=-1)
    _require(bool(torch.isfinite(logits.gather(-1, found.unsqueeze(-1))).all()))
    return found


def tempered(logits: Float[Tensor, "*batch vocab"], temperature: float) -> Float[Tensor, "*batch vocab"]:
    """softmax(logits / ``temperature``) in float32; the largest logit is taken off first, so no temperature above 0, however small, overflows.

    Raises:
        ValueError: a row holds NaN or +inf, or nothing but -inf.
    """
    rows = logits.float()
    if temperature != 1:
        rows = (rows - rows.amax(dim=-1, keepdim=True)).div_(max(temperature, 1e-30))
    p = rows.softmax(dim=-1)
    _require(not bool(p[..., 0].isnan().any()))  # the sum over a row without a distribution is NaN, and with it all of the row
    return p


def _require(every_row_has_a_distribution: bool) -> None:
    if not every_row_has_a_distribution:
        raise ValueError(
            "a row of logits has NaN, +inf or only -inf, so it has no distribution; expected at least one finite logit and no NaN"
        )


def uniforms(count: int, generator: torch.Generator | None) -> list[float]:
    """``count`` numbers in [0, 1), the next of the request's ``generator``.

    Raises:
        ValueError: there is no generator: one that all requests shared would make a draw depend on its neighbours.
    """
    require_generator(generator)
    assert generator is not None
    return torch.rand(count, generator=generator, dtype=torch.float64, device=generator.device).tolist()


def sample(probs: Float[Tensor, " vocab"], generator: torch.Generator | None) -> int:
    """One token of ``probs``; a request has one ``generator``, which advances by one number with each draw.

    The number u in [0, 1) falls into one token's stretch of the cumulative sum (float64), so a draw costs one number whatever the vocabulary, and the
    same seed gives the same tokens whatever device the model is on. Where all mass is on one token, that one is returned and nothing is drawn.

    Args:
        probs: not negative; need not sum to 1.
    Raises:
        ValueError: there is something to draw and no generator, or no mass at all.
    """
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    total = float(cumulative[-1])
    if not total > 0:
        raise ValueError("the distribution has no mass, so no token can be drawn; expected at least one positive probability")
    if float(probs.amax()) == total:
        return int(largest(probs))
    (u,) = uniforms(1, generator)
    drawn = int(torch.searchsorted(cumulative, u * total, right=True))
    return drawn if drawn < probs.shape[-1] else int(probs.nonzero()[-1])  # u * total can round up to the total


def require_generator(generator: torch.Generator | None) -> None:
    """Raise ValueError where a draw is due and the request has no generator of its own."""
    if generator is None:
        raise ValueError(
            "sampling needs a generator of the request's own; got None. Pass torch.Generator().manual_seed(seed), or temperature=0"
        )
