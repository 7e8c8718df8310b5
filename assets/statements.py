"""The claims as a person reads them: rows of text, and the page ``claims.html``. Not here: the asset (``claims.py``), verdicts (``views/claims.sql``)."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from assay.assets.pages import publish
from assay.assets.workspace import Workspace

VERDICTS = ("supported", "refuted", "undecided", "not comparable", "not measured")
SUBJECTS = {
    "s": "Sampling",
    "d": "Speculation",
    "q": "Quantization after training",
    "a": "Quantization in training",
    "e": "Evaluation",
    "k": "Keys and values",
    "p": "Pruning and recovery",
    "c": "Cost",
}  # by the letter that an id begins with
BOUNDS = {"above": "above", "at_least": "at least", "below": "below", "at_most": "at most"}


class Told(NamedTuple):
    """One row of ``claims`` in words."""

    id: str
    statement: str
    published: str
    source: str
    asked: str  # what has to hold of what
    value: str  # with its interval
    verdict: str
    where: str  # experiment, base and n; of what is not measured the experiment that would decide
    detail: str
    note: str


def told(rows: pl.DataFrame) -> list[Told]:
    """The rows of the view ``claims`` in words, in their order."""
    return [_told(row) for row in rows.to_dicts()]


def counted(rows: pl.DataFrame) -> dict[str, int]:
    """How many claims came out each way; one that several experiments judge counts once for each."""
    found = Counter(rows["verdict"])
    return {verdict: found[verdict] for verdict in VERDICTS}


def write_page(workspace: Workspace, rows: pl.DataFrame) -> Path:
    """Write ``reports/claims.html`` of all rows of the view ``claims``, and return it."""
    subjects = [(name, told(rows.filter(pl.col("id").str.starts_with(letter)))) for letter, name in SUBJECTS.items()]
    return publish(workspace, "claims", "claims.html", subjects=subjects, counts=counted(rows))


def _told(row: dict[str, Any]) -> Told:
    bound = (
        f"{row['threshold']:g} to {row['upto']:g}" if row["direction"] == "between" else f"{BOUNDS[row['direction']]} {row['threshold']:g}"
    )
    if row["value"] is None:
        value, where = "", f"would be decided by: {row['experiment']}"
    else:
        value = f"{row['value']:.4g}"
        if row["low"] is None:
            value += " (error unknown)"
        elif row["low"] != row["high"]:
            value += f" ({row['low']:.4g} to {row['high']:.4g})"
        where = " · ".join(str(part) for part in (row["experiment"], row["base"], row["n"] is not None and f"n = {row['n']}") if part)
    detail = "; ".join(part for part in (row["reason"], row["detail"]) if part)
    return Told(
        row["id"], row["statement"], row["published"], row["source"], f"{row['metric']}: {bound}", value, row["verdict"], where, detail, row["note"] or ""
    )  # fmt: skip
