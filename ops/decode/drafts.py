"""What proposes tokens: an n-gram of the text so far, or a smaller model. Not here: their verification (``speculate``)."""

from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from assay.ops.decode.sampling import Sampling, sample
from assay.ops.decode.session import Session, vocabulary_size


class Proposal(NamedTuple):
    """Tokens that may come next, in order, and the distribution that each was drawn from.

    ``probabilities`` is None where the tokens were not drawn but determined: each then stands for a one-hot distribution. It is never a softmax that the
    token was not drawn from; with one, the verified output would no longer be the target's.
    """

    tokens: list[int]
    probabilities: Float[Tensor, "count vocab"] | None


class Draft(Protocol):
    """Proposes continuations of one text at a time. A round is ``propose``, then ``settle``; ``begin`` forgets the text before."""

    def check(self, prompt: list[int]) -> None:
        """Refuse, before any work, a prompt that the draft cannot read."""
        ...

    def begin(self, prompt: list[int], *, vocabulary: int) -> None:
        """Read a new prompt. Distributions will be ``vocabulary`` wide and tokens below it, whatever the draft's own size."""
        ...

    def propose(self, tokens: list[int], count: int, *, sampling: Sampling, generator: torch.Generator | None) -> Proposal:
        """At most ``count`` tokens to follow ``tokens``, the whole text: the prompt and all that was emitted."""
        ...

    def settle(self, accepted: int) -> None:
        """Learn that the first ``accepted`` of the last proposal's tokens are in the text now, and the others are not."""
        ...


class NGramDraft:
    """Proposes what followed the last time that the text had its present ending (prompt lookup).

    The longest ending of at most ``n`` tokens that occurred before counts, at its most recent place. A continuation that runs into the end of the text
    goes on with its own tokens, so a text that repeats with a period of two is proposed further with that period.
    A round costs the same however long the text is: each token enters the index once, in ``n`` entries.

    Source:
        Saxena 2023, github.com/apoorvumang/prompt-lookup-decoding; Yang et al. 2023, arXiv:2304.04487. Unlike the first, prefers the most recent match.
    """

    def __init__(self, n: int = 3) -> None:
        if n < 1:
            raise ValueError(f"n={n} looks up no token; expected 1 or more")
        self.n = n
        self._followed_at: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def check(self, prompt: list[int]) -> None:
        """Every prompt can be read."""

    def begin(self, prompt: list[int], *, vocabulary: int) -> None:
        self._followed_at = {}
        self._indexed = 0
        self._index(prompt)

    def propose(self, tokens: list[int], count: int, *, sampling: Sampling, generator: torch.Generator | None) -> Proposal:
        self._index(tokens)
        for length in range(min(self.n, len(tokens)), 0, -1):
            start = self._followed_at.get(tuple(tokens[-length:]))
            if start is not None:
                found = tokens[start : start + count]
                period = len(tokens) - start
                while len(found) < count:
                    found.append(found[len(found) - period])
                return Proposal(found, None)
        return Proposal([], None)

    def settle(self, accepted: int) -> None:
        """Only the text counts, and a rejected token never gets there."""

    def _index(self, tokens: list[int]) -> None:
        """Enter the n-grams that something follows: all but those that end with the last token."""
        for follower in range(max(self._indexed, 1), len(tokens)):
            for length in range(1, min(self.n, follower) + 1):
                self._followed_at[tuple(tokens[follower - length : follower])] = follower
        self._indexed = max(self._indexed, len(tokens))


class ModelDraft:
    """Proposes what a smaller model with the target's tokenizer would say; it draws with the target's own sampling parameters.

    Its cache holds only tokens of the text: what was rejected is taken back. Where its vocabulary is wider than the target's, the ids beyond have
    probability 0; where it is narrower, it proposes nothing once the text has a token that it does not know.

    Args:
        model: a transformers causal LM in evaluation mode; may be the target itself.
        kv_format: how its keys and values are stored; None keeps the model's dtype.
    """

    def __init__(self, model: Any, kv_format: str | None = None) -> None:
        self.model = model
        self.kv_format = kv_format
        self.size = vocabulary_size(model)
        self._session: Session | None = None
        self._vocabulary = self.size
        self._proposed = 0
        self._known = True

    def check(self, prompt: list[int]) -> None:
        largest = max(prompt)
        if largest >= self.size:
            raise ValueError(
                f"the prompt has the id {largest}, outside the draft's vocabulary of {self.size}; "
                "a draft needs the target's tokenizer: choose one whose vocabulary covers the prompt, or decode without a draft"
            )
        Session(self.model, kv_format=self.kv_format, rollback=True)

    def begin(self, prompt: list[int], *, vocabulary: int) -> None:
        self.check(prompt)
        self._session = Session(self.model, kv_format=self.kv_format, rollback=True)
        self._vocabulary = vocabulary
        self._proposed = 0
        self._known = True
        self._session.read(prompt, keep=1)
        self._session.rollback(0)

    def propose(self, tokens: list[int], count: int, *, sampling: Sampling, generator: torch.Generator | None) -> Proposal:
        if self._session is None:
            raise ValueError("the draft has read no prompt; call begin first")
        if self._proposed:
            raise ValueError(
                f"the last proposal of {self._proposed} tokens is not settled, so the cache may hold rejected ones; call settle first"
            )
        unread = tokens[self._session.length :]
        if not unread:
            raise ValueError(
                f"the text has {len(tokens)} tokens and the draft has read {self._session.length}; expected a longer text; call begin"
            )
        self._known = self._known and max(unread) < self.size
        if not self._known or count < 1:
            return Proposal([], None)
        found: list[int] = []
        rows: list[Tensor] = []
        while len(found) < count:
            logits = self._session.read(unread, keep=1)[0, : self._vocabulary]
            row = sampling.probabilities(logits)
            found.append(sample(row, generator))
            rows.append(row)
            unread = found[-1:]
        self._proposed = count
        if sampling.greedy:
            return Proposal(found, None)
        drawn_from = torch.stack(rows)
        return Proposal(found, torch.nn.functional.pad(drawn_from, (0, self._vocabulary - drawn_from.shape[-1])))

    def settle(self, accepted: int) -> None:
        if self._session is None or self._proposed == 0:
            return
        # The last proposal was drawn but never read, so the cache has one row less than there are proposals.
        read = self._proposed - 1
        self._session.rollback(read - min(accepted, read))
        self._proposed = 0
