"""The published statements as they lie in ``claims/*.sql``, one a file, and the view ``claims`` that puts them together.

Not here: the statements and their queries (``claims/``), the verdict and the columns of the view (``views/claims.sql``).
"""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent / "claims"
KINDS = ("exact", "measured", "larger", "planned")
DIRECTIONS = ("above", "at_least", "below", "at_most", "between")
KEYS = ("id", "statement", "published", "source", "kind", "metric", "direction", "threshold", "experiment", "note")
_LINE = re.compile(r"-- ([a-z]+): (\S.*)")


class Claim(NamedTuple):
    """One statement: what was published, what decides it, and the query that asks our facts."""

    id: str
    statement: str
    published: str
    source: str
    kind: str  # exact: computed; measured: by an experiment; larger: by a larger model or a GPU; planned: by what is not built yet
    metric: str
    direction: str
    threshold: float
    upto: float | None  # the upper end, of direction between
    experiment: str
    note: str | None
    query: str


def parse(text: str, name: str) -> Claim:
    """The claim that a file says: header lines ``-- key: value``, then one SELECT.

    Raises:
        ValueError: a key that is missing, twice, unknown or has a wrong value; the message names the file.
    """
    said: dict[str, str] = {}
    lines = text.splitlines()
    while lines and lines[0].startswith("--"):
        line = lines.pop(0)
        found = _LINE.fullmatch(line)
        if found is None or found[1] not in KEYS or found[1] in said:
            raise ValueError(f"claims/{name}: got the line {line!r}; expected -- key: value, each key once, of {', '.join(KEYS)}")
        said[found[1]] = found[2].strip()
    missing = [key for key in KEYS if key not in said and key != "note"]
    if missing:
        raise ValueError(f"claims/{name}: its header has no {', '.join(missing)}")
    for key, known in (("kind", KINDS), ("direction", DIRECTIONS)):
        if said[key] not in known:
            raise ValueError(f"claims/{name}: {key} is {said[key]!r}; expected one of {', '.join(known)}")
    try:
        bounds = [float(each) for each in said.pop("threshold").split()]
    except ValueError:
        bounds = []
    if len(bounds) != (2 if said["direction"] == "between" else 1) or bounds != sorted(bounds):
        raise ValueError(f"claims/{name}: threshold takes one number, and with direction: between two of them, the lower first")
    query = "\n".join(lines).strip().removesuffix(";")
    return Claim(**{"note": None, **said}, threshold=bounds[0], upto=bounds[1] if len(bounds) == 2 else None, query=query)  # type: ignore[arg-type]


@cache
def claims() -> tuple[Claim, ...]:
    """Every claim, by file name.

    Raises:
        ValueError: as :func:`parse`, or a file that is not called as its claim.
    """
    found = []
    for path in sorted(HERE.glob("*.sql")):
        found.append(parse(path.read_text(encoding="utf-8"), path.name))
        if found[-1].id != path.stem:
            raise ValueError(
                f"claims/{path.name}: its id is {found[-1].id!r}; expected {path.stem!r}, or the file called {found[-1].id}.sql"
            )
    return tuple(found)


@cache
def claims_view(frame: str) -> str:
    """The statements of ``frame``, which is ``views/claims.sql``, with the headers and queries of all claims put in."""
    declared = ", ".join(f"({', '.join(_literal(each) for each in claim[:-1])})" for claim in claims())
    answers = "\n".join(f"UNION ALL BY NAME SELECT {_literal(each.id)} AS id, * FROM ({each.query}) AS {each.id}" for each in claims())
    parts = {"declared": declared, "answers": answers}
    return re.sub(r"\{(declared|answers)\}", lambda found: parts[found[1]], frame)


def _literal(value: str | float | None) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return "NULL" if value is None else str(value)
