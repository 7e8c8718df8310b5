"""One text being written: what was read, what may still come, and what it draws with. Not here: the loops that write several at once
(``generate``, ``speculate``), or how a distribution comes from logits (``sampling``)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from assay.ops.decode.constraints import Constraint, DeadEnd, apply_mask
from assay.ops.decode.penalties import Ids
from assay.ops.decode.sampling import Sampling, largest, require_generator, sample
from assay.ops.decode.session import check_prompts


@dataclass
class Request:
    """A prompt and its continuation, which no other request has any part in.

    Attributes:
        text: the prompt and all that was emitted.
        limit: the most tokens to emit.
        eos_ids: any of these ends the text and is its last token.
        generator: advances with each draw.
        constraint: the language that the emitted tokens stay in; it has read all of them.
        start: length of the prompt: all of ``text`` unless said.
        prompt_ids: the prompt as penalties take it, made once.
    """

    text: list[int]
    limit: int
    eos_ids: Collection[int] = frozenset()
    generator: torch.Generator | None = None
    constraint: Constraint | None = None
    start: int = -1
    prompt_ids: Ids = ()

    def __post_init__(self) -> None:
        if self.start < 0:
            self.start = len(self.text)
        if not len(self.prompt_ids):
            self.prompt_ids = torch.tensor(self.text[: self.start])

    @property
    def emitted(self) -> list[int]:
        return self.text[self.start :]

    @property
    def left(self) -> int:
        """How many tokens may still come."""
        return 0 if self.done else self.start + self.limit - len(self.text)

    @property
    def done(self) -> bool:
        """Whether the text has its last token."""
        count = len(self.text) - self.start
        over = self.constraint is not None and self.constraint.finished
        return count >= self.limit or over or (count > 0 and self.text[-1] in self.eos_ids)

    @property
    def stuck(self) -> bool:
        """Whether the constraint lets nothing follow."""
        if self.constraint is None or self.constraint.finished:
            return False
        try:
            self.constraint.allowed()
        except DeadEnd:
            return True
        return False

    def add(self, token: int) -> None:
        """Emit ``token``."""
        if self.constraint is not None:
            self.constraint.advance(token)
        self.text.append(token)

    def branch(self) -> "Request":
        """How the text may go on: tokens added to it are not added here. It draws with the same generator."""
        constraint = None if self.constraint is None else self.constraint.copy()
        return replace(self, text=list(self.text), constraint=constraint)


def open_requests(
    prompts: "Sequence[Sequence[int]] | Tensor",
    *,
    size: int,
    sampling: Sampling,
    max_new_tokens: int,
    eos_ids: Collection[int],
    generators: Sequence[torch.Generator] | None,
    constraints: Sequence[Constraint | None] | None,
) -> list[Request]:
    """One request a prompt; refuses before any work what could only fail later.

    Args:
        size: of the model's vocabulary.
    Raises:
        ValueError: no prompt, an empty one or one with foreign ids; no token asked for; not one generator or constraint a prompt, none where
            something is drawn, or one that two requests share, so that the draws of one would depend on the other.
    """
    found = check_prompts(prompts, size)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} asks for no token; expected 1 or more")
    if generators is None and not sampling.greedy:
        require_generator(None)
    for what, given in (("generators", generators), ("constraints", constraints)):
        if given is None:
            continue
        if len(given) != len(found):
            raise ValueError(f"{len(given)} {what} for {len(found)} prompts; expected one each")
        distinct = [id(one) for one in given if one is not None]
        if len(set(distinct)) < len(distinct):
            raise ValueError(f"two prompts share one of the {what}, so that one text would depend on its neighbours; give each its own")
    return [
        Request(
            prompt, max_new_tokens, eos_ids, generators[row] if generators else None, constraints[row] if constraints else None,
        )
        for row, prompt in enumerate(found)
    ]  # fmt: skip


def masked(logits: Float[Tensor, " vocab"], constraint: Constraint | None) -> Float[Tensor, " vocab"]:
    """``logits`` with -inf where the constraint allows no token; as they are without one."""
    if constraint is None:
        return logits
    return apply_mask(logits, constraint.allowed()[: len(logits)])


def distributions(logits: Float[Tensor, "rows vocab"], requests: Sequence[Request], sampling: Sampling) -> Float[Tensor, "rows vocab"]:
    """What the next token of each request is drawn from, each as if it were alone."""
    if any(request.constraint for request in requests):
        logits = torch.stack([masked(row, request.constraint) for row, request in zip(logits, requests, strict=True)])
    if not sampling.needs_history:
        return sampling.probabilities(logits)
    return sampling.probabilities_of_rows(logits, [request.prompt_ids for request in requests], [request.emitted for request in requests])


def next_tokens(logits: Float[Tensor, "rows vocab"], requests: Sequence[Request], sampling: Sampling) -> list[int]:
    """The token that follows each text: the largest logit, or a draw from :func:`distributions`."""
    if sampling.greedy and not sampling.needs_history and not any(request.constraint for request in requests):
        return largest(sampling.adjust(logits)).tolist()
    rows = distributions(logits, requests, sampling)
    return [sample(row, request.generator) for row, request in zip(rows, requests, strict=True)]
