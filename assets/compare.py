"""Two variants of an experiment beside each other, item by item: what differs, how surely, and how large a difference would have been found.

Not here: the pairing and its tests (``warehouse/views/paired.sql``), the bootstrap (``ops/evaluate/statistics.py``), printing (``cli.py``).
"""

from typing import NamedTuple

from duckdb import DuckDBPyConnection


class Comparison(NamedTuple):
    """One metric under one protocol. ``difference`` is variant − other over ``n`` items that both have; ``bootstrap`` its 95 % interval, of means alone."""

    suite: str
    protocol: str
    metric: str
    n: int
    difference: float
    low: float | None
    high: float | None
    bootstrap: tuple[float, float] | None
    p: float | None
    p_holm: float | None
    verdict: str


def compare(warehouse: DuckDBPyConnection, experiment: str, variant: str, other: str | None = None) -> list[Comparison]:
    """Every metric that two variants have on the same items, under the same protocol.

    Args:
        other: the base of the experiment when left out.
    Raises:
        ValueError: no such experiment or variant, the two are one, or they share no item.
    """
    from assay.ops.evaluate.statistics import bootstrap_mean
    from assay.warehouse.reads import base_of, paired, paired_differences

    try:
        other = base_of(warehouse, experiment) if other is None else other
        rows = paired(warehouse, experiment, variant, other)
    except KeyError as error:
        raise ValueError(error.args[0]) from error
    if variant == other:
        raise ValueError(f"{variant!r} is compared with itself; name two variants")
    if rows.is_empty():
        raise ValueError(
            f"{variant!r} and {other!r} have no items under one protocol and on one engine; measure both by a suite that stores items, such as "
            "divergence, choice or generation"
        )
    items = paired_differences(warehouse, experiment, variant, other)
    differences = {key: frame["difference"] for key, frame in items.group_by(["protocol_digest", "metric"])}
    found = []
    for row in rows.iter_rows(named=True):
        values = differences[row["protocol_digest"], row["metric"]]
        interval = bootstrap_mean(values.to_numpy()) if row["test"] == "paired_t" and row["n"] > 1 else None
        found.append(
            Comparison(
                row["suite"], row["protocol"] or row["suite"], row["metric"], row["n"], row["difference"], row["low"], row["high"],
                interval and (interval.low, interval.high), row["p"], row["p_holm"], verdict(row["finding"], row["detectable"], row["above_noise"], row["p"]),
            )
        )  # fmt: skip
    return found


def verdict(finding: str | None, detectable: float | None, above_noise: bool | None, p: float | None) -> str:
    """What was found, in words; where nothing was, how large a difference would have been."""
    if finding is None:
        return "one item says nothing"
    if finding != "none":
        return {"differs": "differs; neither direction is better"}.get(finding, finding)
    if above_noise is False and p is not None and p < 0.05:
        return "no difference found above the noise of measuring it twice"
    if detectable is None:
        return "no difference found; so few items would have shown none"
    if detectable == 0:
        return "no difference found: every item is equal"
    return f"no difference found; one of {detectable:.2g} would have been (4 times of 5)"
