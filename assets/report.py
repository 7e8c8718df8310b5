"""The report of an experiment as one HTML file, and its tables as text. Reads views alone. Not here: the asset (``reports.py``)."""

import base64
import json
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from assay.assets.pages import publish
from assay.assets.statements import told
from assay.assets.workspace import Workspace
from assay.schemas.experiment import Experiment
from assay.warehouse.database import connect
from assay.warehouse.prompt import shown as plain
from assay.warehouse.reads import by_slice, claims, devices, experiment_table, interaction, scorecard_protocol, verdicts, work

BACKGROUND = (
    "base",
    "device",
    "recorded_at",
    "divergence_status",
    "divergence_protocol",
    "speed_protocol",
    "acceptance_protocol",
)  # told below
SLICED = ("kl_mean_nats", "acceptance_rate", "entropy_mean_nats", "tail_mass", "pass_at_1", "pass_at_k", "majority_at_k")
SIZE_AGAINST_KL = "Size against mean KL"
NO_PICTURE = (
    "No variant has both a size and a mean KL, so there is no picture of one against the other; measure bytes and divergence to have it."
)


class Report(NamedTuple):
    """Where the page is, the experiment's table, and the pictures that it has facts for, as PNGs by title."""

    file: Path
    table: pl.DataFrame
    pictures: dict[str, bytes]


def write_report(workspace: Workspace, experiment: Experiment) -> Report:
    """Write ``reports/<experiment>.html`` whole."""
    name, connection = experiment.name, connect(workspace.facts.root)
    table, lost = experiment_table(connection, name), work(connection, name)
    slices = {metric: by_slice(connection, name, metric) for metric in SLICED}
    drawn = {
        SIZE_AGAINST_KL: frontier(table),
        "What each variant lost on each kind of work": lost_work(lost, scorecard_protocol(connection, name)),
        "What is solved at each temperature": by_temperature(slices["pass_at_k"]),
    }
    pictures = {title: png for title, png in drawn.items() if png}
    file = publish(
        workspace,
        name,
        "report.html",
        name=name,
        question=experiment.question,
        base=experiment.base,
        table=cells(table.drop(BACKGROUND, strict=False)),
        pictures={title: base64.b64encode(each).decode() for title, each in pictures.items()},
        size_against_kl=SIZE_AGAINST_KL,
        no_picture=NO_PICTURE,
        verdicts=cells(verdicts(connection, experiment=name)),
        work=cells(lost),
        interaction=cells(interaction(connection, experiment=name)),
        slices=cells(pl.concat(slices.values())),
        devices=cells(devices(connection)),
        claims=told(claims(connection, experiment=name).filter(pl.col("verdict") != "not measured")),
        protocols={
            called: json.dumps(protocol.model_dump(mode="json", exclude_none=True), indent=1)
            for called, protocol in experiment.protocols.items()
        },
    )
    return Report(file, table, pictures)


def frontier(table: pl.DataFrame) -> bytes | None:
    """Size against mean KL of an experiment's variants, as a PNG; None where no variant has both."""
    from assay.ops.evaluate.plots import frontier_png

    wanted = table.filter(pl.col("size_bytes").is_not_null() & pl.col("kl_mean_nats").is_not_null())
    if not wanted.height:
        return None
    return frontier_png(wanted.select(pl.col("variant").alias("label"), "size_bytes", "kl_mean_nats").to_dicts())


def lost_work(rows: pl.DataFrame, shown: pl.DataFrame) -> bytes | None:
    """What each variant lost on each kind of work, as a PNG; None where there is no such score.

    Args:
        rows: of the view ``work``.
        shown: of the view ``scorecard_protocol``, which says under which protocol each suite is shown.
    """
    from assay.ops.evaluate.plots_scores import work_png

    rows = rows.join(shown.select("suite", "protocol"), on=["suite", "protocol"], maintain_order="left")
    rows = rows.filter(pl.col("base_value").is_not_null())
    if not rows.height:
        return None
    found = pl.col("finding").is_in(["better", "worse", "differs"]).alias("found")
    return work_png(rows.select("variant", "work", "difference", "base_value", found).to_dicts())


def by_temperature(slices: pl.DataFrame) -> bytes | None:
    """pass@k against the temperature, as a PNG; None where fewer than two temperatures were measured.

    Args:
        slices: of pass@k, as ``reads.by_slice`` gives them.
    """
    from assay.ops.evaluate.plots_scores import temperature_png

    rows = []
    for row in slices.to_dicts():
        if row["slice_kind"] == "temperature_k" and row["value"] is not None:
            temperature, k = row["slice"].split("/")
            rows.append({"variant": row["variant"], "temperature": float(temperature), "k": int(k), "value": row["value"]})
    return temperature_png(rows) if len({row["temperature"] for row in rows}) > 1 else None


def cells(table: pl.DataFrame) -> dict[str, Any]:
    """Columns, their alignment and every value as text; columns that are empty throughout, and digests, are left out."""
    kept = [name for name in table.columns if table[name].null_count() < table.height and not name.endswith("_digest")]
    return {
        "columns": [(name.replace("_", " "), table[name].dtype.is_numeric()) for name in kept],
        "rows": [[shown(name, value) for name, value in zip(kept, row, strict=True)] for row in table.select(kept).iter_rows()],
    }


def shown(column: str, value: Any) -> str:
    """A value as a person reads it; sizes in MiB."""
    if column.endswith("size_bytes") and isinstance(value, int | float) and value >= 2**20:
        return f"{value / 2**20:,.1f} MiB"
    return str(value.date()) if isinstance(value, datetime) else plain(value)


def markdown_table(table: pl.DataFrame, *, rows: int = 200) -> str:
    """``table`` as markdown, at most ``rows`` rows of it."""
    told = cells(table.head(rows))
    head = "| " + " | ".join(name for name, _ in told["columns"]) + " |"
    rule = "|" + "|".join("---:" if numeric else "---" for _, numeric in told["columns"]) + "|"
    body = ["| " + " | ".join(value.replace("|", "\\|") for value in row) + " |" for row in told["rows"]]
    more = [f"\n… and {table.height - rows} more"] if table.height > rows else []
    return "\n".join([head, rule, *body, *more])
