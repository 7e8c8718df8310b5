"""A small reference for constrained decoding: regular expression → DFA over characters → which tokens may come next.

A DFA reads characters; :class:`TokenFsm` reads the bytes of tokens, which may end inside a character. Slow and plain: it checks the engine of
``constraints``, and says of small languages whether they are finite and which texts they hold. Not here: reading patterns (``regex``), or anything
that a model waits for.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from assay.ops.decode.constraints import DeadEnd, check_ids, refused
from assay.ops.decode.regex import NOTHING, Regex, cuts_of, derivative, nullable, parse

MOST_STATES = 1000


class Dfa(NamedTuple):
    """State 0 is the start. ``moves[state]``: (low, high, next state) by code point, sorted. Every state but a start of an empty language can reach
    an accepting one."""

    moves: tuple[tuple[tuple[int, int, int], ...], ...]
    accepting: frozenset[int]

    def step(self, state: int, code: int) -> int | None:
        """The state after the character ``code``, or None where no text goes on like this."""
        return next((target for low, high, target in self.moves[state] if low <= code <= high), None)

    def accepts(self, text: str) -> bool:
        """Whether the whole of ``text`` is in the language."""
        state: int | None = 0
        for character in text:
            if state is None or (state := self.step(state, ord(character))) is None:
                return False
        return state in self.accepting

    @property
    def empty(self) -> bool:
        """Whether no text is in the language."""
        return not self.accepting

    @property
    def finite(self) -> bool:
        """Whether the language has finitely many texts: no state can be reached from itself."""
        return self._can_end(len(self.moves)) == set()

    def strings(self, max_length: int | None = None) -> Iterator[str]:
        """The texts of at most ``max_length`` characters, shorter ones first, then by code point.

        Raises:
            ValueError: the language is infinite and ``max_length`` is None.
        """
        if max_length is None and not self.finite:
            raise ValueError("the language is infinite; say up to which length its texts are wanted: max_length=...")
        longest = len(self.moves) - 1 if max_length is None else max_length
        ends = [self._can_end(length) for length in range(longest + 1)]

        def of_length(state: int, text: str) -> Iterator[str]:
            if len(text) == length:
                yield text
                return
            for low, high, target in self.moves[state]:
                if target in ends[length - len(text) - 1]:
                    for code in range(low, high + 1):
                        yield from of_length(target, text + chr(code))

        for length in range(longest + 1):
            if 0 in ends[length]:
                yield from of_length(0, "")

    def _can_end(self, length: int) -> set[int]:
        """The states from which exactly ``length`` characters lead to acceptance."""
        found = set(self.accepting)
        for _ in range(length):
            found = {state for state, moves in enumerate(self.moves) if any(target in found for _, _, target in moves)}
        return found


def compile_regex(pattern: str) -> Dfa:
    """The DFA of the texts that match ``pattern`` as a whole.

    Raises:
        ValueError: ``pattern`` is malformed, uses what this subset lacks (it says what), or needs more than 1000 states.
    """
    start = parse(pattern)
    cuts = sorted({0, 0xD800, 0xE000, 0x110000, *cuts_of(start)})
    atoms = [(low, high - 1) for low, high in pairwise(cuts) if low != 0xD800]
    known: dict[Regex, int] = {start: 0}
    pending, moves = [start], []
    for state in pending:  # grows while it is read
        here: list[tuple[int, int, int]] = []
        for low, high in atoms:
            target = derivative(state, low)
            if target == NOTHING:
                continue
            if target not in known:
                if len(known) == MOST_STATES:
                    raise ValueError(f"the pattern {pattern!r} needs more than {MOST_STATES} states; this reference is for small languages")
                known[target] = len(known)
                pending.append(target)
            if here and here[-1][1] == low - 1 and here[-1][2] == known[target]:
                low = here.pop()[0]
            here.append((low, high, known[target]))
        moves.append(here)
    return _live(moves, {index for state, index in known.items() if nullable(state)})


def _live(moves: list[list[tuple[int, int, int]]], accepting: set[int]) -> Dfa:
    """Without the states that lead nowhere, except the start."""
    sources: dict[int, set[int]] = {}
    for state, here in enumerate(moves):
        for _, _, target in here:
            sources.setdefault(target, set()).add(state)
    live, pending = set(accepting), list(accepting)
    while pending:
        for source in sources.get(pending.pop(), set()) - live:
            live.add(source)
            pending.append(source)
    order = {state: index for index, state in enumerate(sorted(live | {0}))}
    kept = tuple(tuple((low, high, order[target]) for low, high, target in moves[state] if target in live) for state in order)
    return Dfa(kept, frozenset(order[state] for state in accepting))


class TokenFsm:
    """The :class:`~assay.ops.decode.constraints.Constraint` of a DFA over a vocabulary, walked byte by byte.

    A state is a DFA state and the bytes of a character that is not complete yet. Such bytes may come if some character that begins with them may.

    Args:
        pieces: the bytes of each id; None for an id that is no text (special tokens).
        head_size: how many logits the model has; ids beyond ``pieces`` are never allowed.
    Raises:
        DeadEnd: the language is empty.
        ValueError: see :func:`~assay.ops.decode.constraints.check_ids`.
    """

    def __init__(self, dfa: Dfa, pieces: Sequence[bytes | None], *, head_size: int, eos_ids: Collection[int]) -> None:
        self.dfa, self.pieces, self.head_size, self.eos_ids = dfa, pieces, head_size, check_ids(eos_ids, head_size)
        if dfa.empty:
            raise DeadEnd("the language is empty: no text is allowed, not even the empty one")
        self.states: list[tuple[int, bytes]] = [(0, b"")]
        self._finished = False

    @property
    def finished(self) -> bool:
        return self._finished

    def allowed(self) -> Bool[Tensor, " vocab"]:
        if self._finished:
            raise ValueError("the text is finished, so no token may come")
        mask = torch.tensor([self._after(token) is not None or self._ends(token) for token in range(self.head_size)])
        if not bool(mask.any()):
            raise DeadEnd(f"no token leads on after {len(self.states) - 1} tokens, and the text may not end there")
        return mask

    def advance(self, token: int) -> None:
        state = self._after(token)
        if self._finished or (state is None and not self._ends(token)):
            raise refused(token, "the text is finished" if self._finished else "no text of the language goes on like this")
        if state is None:
            self._finished = True
        else:
            self.states.append(state)

    def rollback(self, tokens: int) -> None:
        held = len(self.states) - 1 + self._finished
        if not 0 <= tokens <= held:
            raise ValueError(f"cannot take {tokens} tokens back from a text of {held}")
        self.states = self.states[: len(self.states) - tokens + (self._finished and tokens > 0)]
        self._finished = self._finished and not tokens

    def copy(self) -> "TokenFsm":
        made = TokenFsm(self.dfa, self.pieces, head_size=self.head_size, eos_ids=self.eos_ids)
        made.states, made._finished = list(self.states), self._finished
        return made

    def _ends(self, token: int) -> bool:
        state, pending = self.states[-1]
        return token in self.eos_ids and not pending and state in self.dfa.accepting

    def _after(self, token: int) -> tuple[int, bytes] | None:
        piece = self.pieces[token] if 0 <= token < min(len(self.pieces), self.head_size) and token not in self.eos_ids else None
        if not piece:
            return None
        state, pending = self.states[-1]
        for byte in piece:
            pending += bytes([byte])
            begun = characters_from(pending)
            if begun is None:
                return None
            low, high, whole = begun
            if whole:
                found = self.dfa.step(state, low)
                if found is None:
                    return None
                state, pending = found, b""
            elif not any(first <= high and low <= last for first, last, _ in self.dfa.moves[state]):
                return None
        return state, pending


def characters_from(begun: bytes) -> tuple[int, int, bool] | None:
    """The lowest and highest code point whose UTF-8 begins with ``begun``, and whether that is all of it; None if no character begins so."""
    lead = begun[0]
    length = 1 if lead < 0x80 else 0 if lead < 0xC2 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4 if lead < 0xF5 else 0
    if not length or len(begun) > length or any(byte & 0xC0 != 0x80 for byte in begun[1:]):
        return None
    low = lead if length == 1 else lead & (0x7F >> length)
    for byte in begun[1:]:
        low = low << 6 | byte & 0x3F
    missing = 6 * (length - len(begun))
    low, high = low << missing, (low + 1 << missing) - 1
    low, high = max(low, (0, 0, 0x80, 0x800, 0x10000)[length]), min(high, 0x10FFFF)
    return (low, high, missing == 0) if low <= high else None
