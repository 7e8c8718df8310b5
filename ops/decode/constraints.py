"""Which tokens may come next, so that a text stays in a language: what a constraint is, the engine behind it, and the mask on logits.

A language is a regular expression or a JSON Schema; the engine is llguidance (MIT), which reads the tokenizer itself. What is constrained is the
*sequence of tokens*: every way to cut a legal text into tokens is legal (the engine's habit of allowing only the usual cut where one text is left is
off), and a text is over only when an end token says so. Not here: choosing a token (``sampling``), the reference that checks all this (``fsm``), how
far a masked model is from the model given the language (``ops/evaluate/constrained.py``).
"""

import json
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

# json.dumps writes these; the first stands between items, the second behind a key.
SEPARATORS = (", ", ": ")
GRAMMAR = '%llguidance {"no_forcing": true}\nstart: '


class DeadEnd(ValueError):  # noqa: N818 (it is a state of a text)
    """Nothing may come next: no token leads on, and the text so far may not end either."""


class Constraint(Protocol):
    """A language being written, one token at a time."""

    @property
    def finished(self) -> bool:
        """Whether an end token was the last one; then nothing can be added."""
        ...

    def allowed(self) -> Bool[Tensor, " vocab"]:
        """Which ids may come next, as wide as the model's head: end tokens exactly where the text may end, no id beyond the tokenizer, and
        no special token as text.

        Raises:
            DeadEnd: none may.
            ValueError: the text is finished.
        """
        ...

    def advance(self, token: int) -> None:
        """Add ``token``.

        Raises:
            ValueError: it is not allowed, or the text is finished; nothing has changed then.
        """
        ...

    def rollback(self, tokens: int) -> None:
        """Take the last ``tokens`` tokens back, an end token included.

        Raises:
            ValueError: there are not so many.
        """
        ...

    def copy(self) -> "Constraint":
        """The same language and text; from here on the two go their own ways, as beams do."""
        ...


def apply_mask(logits: Float[Tensor, "*batch vocab"], allowed: Bool[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
    """``logits`` with -inf where a token is not ``allowed``: before temperature, penalties and filters, so that these see legal tokens alone.

    Raises:
        DeadEnd: a row allows nothing. A flat row of very negative numbers would sample free text instead.
    """
    if not bool(allowed.any(dim=-1).all()):
        raise DeadEnd("a row of the mask allows no token, so there is nothing to sample; expected at least one, be it the end token")
    return torch.where(allowed.to(logits.device), logits, -torch.inf)


class EngineConstraint:
    """A :class:`Constraint` kept by llguidance; made by :func:`from_regex` and :func:`from_json_schema`.

    End tokens never reach the engine: it forgets those that come after the only possible end, and a rollback would be off by one. Nor do ids from
    ``vocabulary`` on, which would break it for good.
    """

    def __init__(self, matcher: Any, *, vocabulary: int, head_size: int, eos_ids: Collection[int]) -> None:
        self._matcher, self.vocabulary, self.head_size, self.eos_ids = matcher, vocabulary, head_size, frozenset(eos_ids)
        self._length, self._finished = 0, False

    @property
    def finished(self) -> bool:
        return self._finished

    def allowed(self) -> Bool[Tensor, " vocab"]:
        if self._finished:
            raise ValueError("the text is finished, so no token may come; look at `finished` before asking, or roll back")
        # On a copy, since a matcher that finds no token stays broken, and a beam may still step back from a dead end.
        matcher = self._matcher.deep_copy()
        bits = matcher.compute_bitmask()
        if matcher.is_error() and not matcher.get_error().startswith("NoExtension"):
            said = matcher.get_error().split("\n<state>")[0]
            raise ValueError(f"the engine gave up after {self._length} tokens ({said}); a simpler language would work")
        mask = np.zeros(self.head_size, np.bool_)
        if not matcher.is_error():
            size = min(self.vocabulary, self.head_size)
            mask[:size] = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")[:size]
        ends = self._matcher.is_accepting()
        for token in self.eos_ids:
            mask[token] = ends
        if not mask.any():
            raise DeadEnd(
                f"no token leads on after {self._length} tokens and the text may not end there: the tokenizer cannot write the rest"
            )
        return torch.from_numpy(mask)

    def advance(self, token: int) -> None:
        if self._finished:
            raise refused(token, "the text is finished")
        if token in self.eos_ids:
            if not self._matcher.is_accepting():
                raise refused(token, f"the text may not end after {self._length} tokens")
            self._finished = True
            return
        if (
            not 0 <= token < min(self.vocabulary, self.head_size)
            or self._matcher.validate_tokens([token]) != 1
            or not self._matcher.consume_token(token)
        ):
            raise refused(token, f"the language has no text that goes on like this after {self._length} tokens")
        self._length += 1

    def rollback(self, tokens: int) -> None:
        held = self._length + self._finished
        if not 0 <= tokens <= held:
            raise ValueError(f"cannot take {tokens} tokens back from a text of {held}")
        if tokens and self._finished:
            self._finished, tokens = False, tokens - 1
        if tokens:
            self._matcher.rollback(tokens)
            self._length -= tokens

    def copy(self) -> "EngineConstraint":
        made = EngineConstraint(self._matcher.deep_copy(), vocabulary=self.vocabulary, head_size=self.head_size, eos_ids=self.eos_ids)
        made._length, made._finished = self._length, self._finished
        return made


def from_regex(tokenizer: Any, pattern: str, *, head_size: int, eos_ids: Collection[int]) -> EngineConstraint:
    """Texts that match ``pattern`` as a whole.

    Args:
        tokenizer: a fast tokenizer of transformers.
        pattern: of Rust's ``regex``, without look-around and back-references; ``\\d``, ``\\w`` and ``\\s`` are ASCII, ``.`` is no line break.
        head_size: how many logits the model has; at least the ids in ``eos_ids``.
        eos_ids: any of these ends the text, and is no text itself.
    Raises:
        DeadEnd: no text matches, or none that this tokenizer can begin.
        ValueError: the pattern is malformed or needs what the engine lacks, the tokenizer is not a fast one, or there is no end token.
    """
    from llguidance import regex_to_lark

    return _compile(tokenizer, f"/{regex_to_lark(pattern, use_ascii='dws')}/", f"the pattern {pattern!r}", head_size, eos_ids)


def from_json_schema(
    tokenizer: Any,
    schema: Mapping[str, Any],
    *,
    head_size: int,
    eos_ids: Collection[int],
    separators: tuple[str, str] | None = SEPARATORS,
) -> EngineConstraint:
    """JSON texts that ``schema`` admits; see :func:`from_regex`. Keys come in the schema's order; a keyword that the engine lacks is an error.

    Args:
        separators: between items and behind keys, as ``json.dumps`` takes them, and no other white space; None is any white space anywhere between.
    """
    given = schema.get("x-guidance", {})
    if separators is None:
        options = {"whitespace_flexible": True}
    else:
        options = {"whitespace_flexible": False, "item_separator": separators[0], "key_separator": separators[1]}
    text = json.dumps({**schema, "x-guidance": {**options, **given}})
    return _compile(tokenizer, f"%json {text}", f"the schema {json.dumps(schema)}", head_size, eos_ids)


def check_ids(eos_ids: Collection[int], head_size: int) -> frozenset[int]:
    """The end tokens, once they are known to be ids of the head.

    Raises:
        ValueError: there are none, or one is outside the head.
    """
    outside = [token for token in eos_ids if not 0 <= token < head_size]
    if outside or not eos_ids:
        raise ValueError(
            f"eos_ids={sorted(eos_ids)} for a head of {head_size} ids; expected one or more of them, or a constrained text could never end"
        )
    return frozenset(eos_ids)


def refused(token: int, why: str) -> ValueError:
    """The error of a token that is not allowed."""
    return ValueError(f"token {token} is not allowed: {why}; choose among allowed()")


def _compile(tokenizer: Any, rule: str, what: str, head_size: int, eos_ids: Collection[int]) -> EngineConstraint:
    from llguidance import LLMatcher

    known = _engine_tokenizer(tokenizer, len(tokenizer), check_ids(eos_ids, head_size))
    matcher = LLMatcher(known, GRAMMAR + rule, log_level=0)
    if matcher.is_error():
        said = matcher.get_error().split("\n<state>")[0].split("\n\n")[0].strip()
        kind = DeadEnd if "nsatisfiable" in said else ValueError
        raise kind(f"{what} cannot be followed: {said}")
    made = EngineConstraint(matcher, vocabulary=known.vocab_size, head_size=head_size, eos_ids=eos_ids)
    try:
        made.allowed()
    except DeadEnd:
        raise DeadEnd(f"{what} admits no text that this tokenizer could begin; expected a language with at least one") from None
    return made


@lru_cache(maxsize=4)
def _engine_tokenizer(tokenizer: Any, size: int, eos_ids: frozenset[int]) -> Any:
    """What the engine keeps of a tokenizer (half a second for 49,152 tokens); ``size`` is part of the key, since tokens can be added."""
    from llguidance.hf import from_tokenizer

    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{type(tokenizer).__name__} is not a fast tokenizer, and the engine reads no other; load it with AutoTokenizer")
    return from_tokenizer(tokenizer, eos_token=sorted(eos_ids))
