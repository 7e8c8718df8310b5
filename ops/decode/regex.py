"""Regular expressions as values: reading a pattern, and what may follow a character. Not here: automata (``fsm``), the engine (``constraints``).

The characters are the Unicode scalar values.

Source:
    Brzozowski 1964, doi:10.1145/321239.321249; Owens, Reppy & Turon 2009, doi:10.1017/S0956796808007090.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

Ranges = tuple[tuple[int, int], ...]  # code points, both ends included, sorted and apart

EVERY: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))  # without the surrogates, which UTF-8 cannot write
MOST_REPEATS = 256

DIGIT: Ranges = ((48, 57),)
WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
SPACE: Ranges = ((9, 13), (32, 32))
NEWLINE: Ranges = ((10, 10),)


@dataclass(frozen=True)
class Chars:
    """One character out of ``ranges``; of none, the empty language."""

    ranges: Ranges


@dataclass(frozen=True)
class Cat:
    """``parts`` one after another; of none, the empty text."""

    parts: tuple["Regex", ...]


@dataclass(frozen=True)
class Alt:
    """Any of two or more ``options``."""

    options: frozenset["Regex"]


@dataclass(frozen=True)
class Star:
    """``inner`` any number of times."""

    inner: "Regex"


Regex = Chars | Cat | Alt | Star
NOTHING, EMPTY = Chars(()), Cat(())


def cuts_of(regex: Regex) -> Iterator[int]:
    """Where the code points fall into ranges that ``regex`` tells apart: each range's first, and the first after it."""
    match regex:
        case Chars(ranges):
            for low, high in ranges:
                yield from (low, high + 1)
        case Cat(parts):
            for part in parts:
                yield from cuts_of(part)
        case Alt(options):
            for option in options:
                yield from cuts_of(option)
        case Star(inner):
            yield from cuts_of(inner)


def nullable(regex: Regex) -> bool:
    """Whether the empty text matches."""
    match regex:
        case Chars():
            return False
        case Cat(parts):
            return all(map(nullable, parts))
        case Alt(options):
            return any(map(nullable, options))
        case Star():
            return True


def derivative(regex: Regex, code: int) -> Regex:
    """What may follow the character ``code`` in the texts of ``regex``."""
    match regex:
        case Chars(ranges):
            return EMPTY if any(low <= code <= high for low, high in ranges) else NOTHING
        case Cat(parts):
            found: list[Regex] = []
            for index, part in enumerate(parts):
                found.append(cat(derivative(part, code), *parts[index + 1 :]))
                if not nullable(part):
                    break
            return alt(*found)
        case Alt(options):
            return alt(*(derivative(option, code) for option in options))
        case Star(inner):
            return cat(derivative(inner, code), regex)


def cat(*parts: Regex) -> Regex:
    """One after another, flat and without empty texts."""
    flat = [inner for part in parts for inner in (part.parts if isinstance(part, Cat) else (part,))]
    return NOTHING if NOTHING in flat else flat[0] if len(flat) == 1 else Cat(tuple(flat))


def alt(*options: Regex) -> Regex:
    """Any of ``options``, flat, each once, in no order; that keeps the derivatives of an expression finitely many."""
    flat = {inner for option in options for inner in (option.options if isinstance(option, Alt) else (option,))} - {NOTHING}
    return next(iter(flat)) if len(flat) == 1 else Alt(frozenset(flat)) if flat else NOTHING


def star(inner: Regex) -> Regex:
    return EMPTY if inner in (NOTHING, EMPTY) else inner if isinstance(inner, Star) else Star(inner)


def union(*sets: Ranges) -> Ranges:
    found: list[tuple[int, int]] = []
    for low, high in sorted(pair for ranges in sets for pair in ranges):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def complement(ranges: Ranges) -> Ranges:
    """Every character that is in none of ``ranges``."""
    found, at = [], 0
    for low, high in (*union(ranges, ((0xD800, 0xDFFF),)), (0x110000, 0x110000)):
        if at < low:
            found.append((at, low - 1))
        at = high + 1
    return tuple(found)


CLASSES: dict[str, Ranges] = {"d": DIGIT, "w": WORD, "s": SPACE} | {
    letter: complement(ranges) for letter, ranges in (("D", DIGIT), ("W", WORD), ("S", SPACE))
}
CONTROLS = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11}
HEX = {"x": 2, "u": 4}


def parse(pattern: str) -> Regex:
    """The expression that ``pattern`` writes: literals, ``.`` (no line break), classes, ``* + ? {m,n}``, ``|``, groups, the escapes of JSON Schema.

    Classes of letters are ASCII. ``^`` and ``$`` may stand at the two ends and say nothing: the whole text is matched anyway. What other readers of
    regular expressions understand in different ways is refused.

    Raises:
        ValueError: it says what stands where, and what this subset has.
    """
    return _Parser(pattern).whole()


class _Parser:
    def __init__(self, pattern: str) -> None:
        self.pattern, self.at = pattern, 0

    def whole(self) -> Regex:
        self.take("^")
        found = self.alternatives()
        self.take("$")
        if self.at < len(self.pattern):
            raise self.wrong("a group is closed that was not opened" if self.peek() == ")" else "nothing may follow here")
        return found

    def alternatives(self) -> Regex:
        options = [self.sequence()]
        while self.take("|"):
            options.append(self.sequence())
        return alt(*options)

    def sequence(self) -> Regex:
        parts: list[Regex] = []
        while self.at < len(self.pattern) and self.peek() not in "|)" and not (self.peek() == "$" and self.at == len(self.pattern) - 1):
            parts.append(self.repeated(self.atom()))
        return cat(*parts)

    def repeated(self, inner: Regex) -> Regex:
        if self.take("*"):
            found = star(inner)
        elif self.take("+"):
            found = cat(inner, star(inner))
        elif self.take("?"):
            found = alt(inner, EMPTY)
        elif self.take("{"):
            least = self.number()
            most = (self.number() if self.peek() != "}" else None) if self.take(",") else least
            if not self.take("}") or (most is not None and most < least) or max(least, most or 0) > MOST_REPEATS:
                raise self.wrong(f"a count is {{m}}, {{m,}} or {{m,n}} with m <= n <= {MOST_REPEATS}")
            optional = star(inner) if most is None else reduce(lambda rest, _: alt(cat(inner, rest), EMPTY), range(most - least), EMPTY)
            found = cat(*[inner] * least, optional)
        else:
            return inner
        if self.peek() in ("*", "+", "?", "{"):
            raise self.wrong("lazy, possessive and doubled repeats are not in this subset; put the inner one in a group")
        return found

    def atom(self) -> Regex:
        character = self.peek()
        if self.take("("):
            if self.take("?") and not self.take(":"):
                raise self.wrong("of the groups that begin with '(?', this subset has only '(?:'")
            found = self.alternatives()
            if not self.take(")"):
                raise self.wrong("a group is not closed")
            return found
        if self.take("["):
            return Chars(self.char_class())
        if self.take("."):
            return Chars(complement(NEWLINE))
        if character in "*+?{^$":
            raise self.wrong(f"{character!r} has nothing to act on; write '\\{character}' for the character itself")
        return Chars(self.character())

    def character(self) -> Ranges:
        """One character or escape."""
        if not self.take("\\"):
            self.at += 1
            return self.single(ord(self.pattern[self.at - 1]))
        letter = self.peek()
        self.at += 1
        if letter in CLASSES:
            return CLASSES[letter]
        if letter in CONTROLS:
            return self.single(CONTROLS[letter])
        if letter in HEX:
            digits = self.pattern[self.at : self.at + HEX[letter]]
            if len(digits) == HEX[letter] and all(digit in "0123456789abcdefABCDEF" for digit in digits):
                self.at += len(digits)
                return self.single(int(digits, 16))
        elif letter and letter.isascii() and not letter.isalnum():
            return self.single(ord(letter))
        raise self.wrong(
            f"no such escape: this subset has {' '.join(chr(92) + known for known in (*CLASSES, *CONTROLS, 'xHH', 'uHHHH'))} and punctuation"
        )

    def char_class(self) -> Ranges:
        inverted, found = self.take("^"), list[Ranges]()
        while not self.take("]"):
            if self.at == len(self.pattern) or self.peek() == "[" or self.pattern[self.at : self.at + 2] in ("&&", "~~", "--"):
                raise self.wrong("a class is closed by ']' and has no classes or set operations inside; write '\\[', '\\&', '\\~' or '\\-'")
            first = self.character()
            if self.peek() == "-" and self.pattern[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                last = self.character()
                if len(first) != 1 or len(last) != 1 or first[0][0] != first[0][1] or last[0][0] != last[0][1] or first > last:
                    raise self.wrong("a range goes from one character to another that is not before it")
                first = ((first[0][0], last[0][0]),)
            found.append(first)
        if not found:
            raise self.wrong("a class has at least one character; write '\\]' for a bracket")
        return complement(union(*found)) if inverted else union(*found)

    def number(self) -> int:
        begun = self.at
        while self.peek() in "0123456789" and self.peek():
            self.at += 1
        if begun == self.at:
            raise self.wrong("expected a count")
        return int(self.pattern[begun : self.at])

    def single(self, code: int) -> Ranges:
        if 0xD800 <= code <= 0xDFFF:
            raise self.wrong("a surrogate is no character")
        return ((code, code),)

    def peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def take(self, character: str) -> bool:
        found = self.peek() == character
        self.at += found
        return found

    def wrong(self, why: str) -> ValueError:
        return ValueError(f"the pattern {self.pattern!r} cannot be read at character {self.at}: {why}")
