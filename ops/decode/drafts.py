"""What proposes tokens: an n-gram of the text so far, or a smaller model. Not here: their verification (``speculate``)."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from assay.ops.decode.generate import open_session, stack
from assay.ops.decode.request import Request, distributions
from assay.ops.decode.runner import Runner
from assay.ops.decode.sampling import Sampling, sample
from assay.ops.decode.session import Session


class Proposal(NamedTuple):
    """Tokens that may come next, in order, and the distribution that each was drawn from.

    ``probabilities`` is None where the tokens were not drawn but determined: each then stands for a one-hot distribution. It is never a softmax that the
    token was not drawn from; with one, the verified output would no longer be the target's.
    """

    tokens: list[int]
    probabilities: Float[Tensor, "count vocab"] | None


NOTHING = Proposal([], None)


class Draft(Protocol):
    """Proposes continuations of several texts. A round is ``propose``, then ``settle``; ``begin`` forgets the texts before."""

    def check(self, requests: Sequence[Request], *, vocabulary: int | None) -> None:
        """Refuse, before any work, prompts that the draft cannot read, and a ``vocabulary`` (the tokenizer's size, if said) that it lacks."""
        ...

    def begin(self, requests: Sequence[Request], *, vocabulary: int) -> None:
        """Read new prompts. Distributions will be ``vocabulary`` wide and tokens below it, whatever the draft's own size."""
        ...

    def propose(self, requests: Sequence[Request], counts: Sequence[int], *, sampling: Sampling) -> list[Proposal]:
        """For each text at most so many tokens to follow it; where the count is 0, none. Draws are made with each request's own generator."""
        ...

    def settle(self, accepted: Sequence[int]) -> None:
        """Learn how many of the last proposal's tokens, from the first on, are in each text now; the others are not."""
        ...


class NGramDraft:
    """Proposes what followed the last time that a text had its present ending (prompt lookup).

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
        self._indexes: list[_Index] = []

    def check(self, requests: Sequence[Request], *, vocabulary: int | None) -> None:
        """Every prompt can be read."""

    def begin(self, requests: Sequence[Request], *, vocabulary: int) -> None:
        self._indexes = [_Index(self.n) for _ in requests]
        for index, request in zip(self._indexes, requests, strict=True):
            index.grow(request.text)

    def propose(self, requests: Sequence[Request], counts: Sequence[int], *, sampling: Sampling) -> list[Proposal]:
        rows = zip(self._indexes, requests, counts, strict=True)
        return [Proposal(index.continuation(request.text, count), None) if count else NOTHING for index, request, count in rows]

    def settle(self, accepted: Sequence[int]) -> None:
        """Only the text counts, and a rejected token never gets there."""


class _Index:
    """Where each n-gram of one text was last followed by something."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._followed_at: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def grow(self, tokens: list[int]) -> None:
        """Enter the n-grams that something follows: all but those that end with the last token."""
        for follower in range(max(self._indexed, 1), len(tokens)):
            for length in range(1, min(self.n, follower) + 1):
                self._followed_at[tuple(tokens[follower - length : follower])] = follower
        self._indexed = max(self._indexed, len(tokens))

    def continuation(self, tokens: list[int], count: int) -> list[int]:
        self.grow(tokens)
        for length in range(min(self.n, len(tokens)), 0, -1):
            start = self._followed_at.get(tuple(tokens[-length:]))
            if start is not None:
                found = tokens[start : start + count]
                period = len(tokens) - start
                while len(found) < count:
                    found.append(found[len(found) - period])
                return found
        return []


class ModelDraft:
    """Proposes what a smaller model with the target's tokenizer would say; it draws with the target's own sampling parameters.

    All texts share its forwards. Its cache holds only tokens of the texts: what was rejected is taken back. Where its vocabulary is wider than the
    target's, the ids beyond have probability 0; where it is narrower, it proposes nothing once a text has a token that it does not know.

    Args:
        runner: may be the target itself.
        kv_format: how its keys and values are stored; None keeps the runner's dtype.
    """

    def __init__(self, runner: Runner, kv_format: str | None = None) -> None:
        self.runner = runner
        self.kv_format = kv_format
        self.size = runner.shape.vocabulary
        self._session: Session | None = None
        self._vocabulary = self.size
        self._proposed: list[int] = []
        self._known: list[bool] = []

    def check(self, requests: Sequence[Request], *, vocabulary: int | None) -> None:
        if vocabulary is not None and self.size < vocabulary:
            raise ValueError(
                f"the draft knows {self.size} ids and the tokenizer has {vocabulary}; a draft needs the target's tokenizer: choose a model that "
                "was trained with it, or decode without a draft"
            )
        for row, request in enumerate(requests):
            largest = max(request.text[: request.start])
            if largest >= self.size:
                raise ValueError(
                    f"prompt {row} has the id {largest}, outside the draft's vocabulary of {self.size}; "
                    "a draft needs the target's tokenizer: choose one whose vocabulary covers the prompt, or decode without a draft"
                )

    def begin(self, requests: Sequence[Request], *, vocabulary: int) -> None:
        self.check(requests, vocabulary=None)
        self._session = open_session(self.runner, requests, self.kv_format)
        self._vocabulary = vocabulary
        self._proposed = [0] * len(requests)
        self._known = [True] * len(requests)
        self._session.read([request.text[: request.start] for request in requests], keep=0)

    def propose(self, requests: Sequence[Request], counts: Sequence[int], *, sampling: Sampling) -> list[Proposal]:
        if self._session is None:
            raise ValueError("the draft has read no prompt; call begin first")
        if any(self._proposed):
            raise ValueError(
                f"the last proposals of {self._proposed} tokens are not settled, so the cache may hold rejected ones; call settle first"
            )
        branches = [request.branch() for request in requests]
        unread = [
            self._unread(row, branch) if count and not branch.stuck else []
            for row, (branch, count) in enumerate(zip(branches, counts, strict=True))
        ]
        drawn_from: list[list[Tensor]] = [[] for _ in requests]
        while any(unread):
            going = [row for row, ids in enumerate(unread) if ids]
            logits = self._session.read(unread)
            kept = stack([logits[row] for row in going])[:, : self._vocabulary]
            unread = [[] for _ in requests]
            for row, chances in zip(going, distributions(kept, [branches[row] for row in going], sampling), strict=True):
                branch = branches[row]
                branch.add(sample(chances, branch.generator))
                drawn_from[row].append(chances)
                if len(drawn_from[row]) < counts[row] and not branch.done and not branch.stuck:
                    unread[row] = branch.text[-1:]
        self._proposed = [len(rows) for rows in drawn_from]
        return [
            self._proposal(branch.text[len(request.text) :], rows, sampling)
            for request, branch, rows in zip(requests, branches, drawn_from, strict=True)
        ]

    def settle(self, accepted: Sequence[int]) -> None:
        if self._session is None or not any(self._proposed):
            return
        # The last proposal was drawn but never read, so the cache has one token less than there are proposals.
        read = [max(count - 1, 0) for count in self._proposed]
        self._session.rollback([count - min(taken, count) for count, taken in zip(read, accepted, strict=True)])
        self._proposed = [0] * len(read)

    def _unread(self, row: int, request: Request) -> list[int]:
        """What the text of a row got since the draft last looked; nothing once it has a token that the draft does not know."""
        assert self._session is not None
        read = self._session.lengths[row]
        unread = request.text[read:]
        if not unread:
            raise ValueError(f"text {row} has {len(request.text)} tokens and the draft has read {read}; expected a longer text; call begin")
        self._known[row] = self._known[row] and max(unread) < self.size
        return unread if self._known[row] else []

    def _proposal(self, tokens: list[int], rows: list[Tensor], sampling: Sampling) -> Proposal:
        if not tokens or sampling.greedy:
            return Proposal(tokens, None)
        drawn_from = torch.stack(rows)
        return Proposal(tokens, torch.nn.functional.pad(drawn_from, (0, self._vocabulary - drawn_from.shape[-1])))
