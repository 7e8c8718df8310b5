"""The report of an experiment as one HTML file, and its tables as text. Reads views alone. Not here: the asset (``reports.py``)."""

import base64
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import polars as pl
from duckdb import DuckDBPyConnection
from jinja2 import Environment, FileSystemLoader, select_autoescape

from assay.assets.statements import told
from assay.assets.workspace import Workspace
from assay.schemas.experiment import Experiment
from assay.warehouse.database import connect
from assay.warehouse.prompt import shown as plain
from assay.warehouse.reads import by_slice, claims, devices, experiment_table, interaction, verdicts, work

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
PAGE = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=select_autoescape(), trim_blocks=True, lstrip_blocks=True)


def write_report(workspace: Workspace, experiment: Experiment) -> Path:
    """Write ``reports/<experiment>.html`` whole, and return it."""
    connection = connect(workspace.facts.root)
    table = experiment_table(connection, experiment=experiment.name)
    page = PAGE.get_template("report.html").render(
        name=experiment.name,
        question=experiment.question,
        base=experiment.base,
        table=cells(table.drop(BACKGROUND, strict=False)),
        pictures={title: base64.b64encode(each).decode() for title, each in pictures(connection, experiment.name).items()},
        size_against_kl=SIZE_AGAINST_KL,
        no_picture=NO_PICTURE,
        verdicts=cells(verdicts(connection, experiment=experiment.name)),
        work=cells(work(connection, experiment=experiment.name)),
        interaction=cells(interaction(connection, experiment=experiment.name)),
        slices=cells(pl.concat([by_slice(connection, experiment.name, metric) for metric in SLICED])),
        devices=cells(devices(connection)),
        claims=told(claims(connection, experiment=experiment.name).filter(pl.col("verdict") != "not measured")),
        protocols={
            name: json.dumps(protocol.model_dump(mode="json", exclude_none=True), indent=1)
            for name, protocol in experiment.protocols.items()
        },
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    file = workspace.reports / f"{experiment.name}.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{uuid4().hex}.tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(file)
    return file


def pictures(connection: DuckDBPyConnection, experiment: str) -> dict[str, bytes]:
    """The pictures that an experiment has facts for, as PNGs by title."""
    drawn = {
        SIZE_AGAINST_KL: frontier(experiment_table(connection, experiment)),
        "What each variant lost on each kind of work": lost_work(work(connection, experiment)),
        "What is solved at each temperature": by_temperature(connection, experiment),
    }
    return {title: png for title, png in drawn.items() if png}


def frontier(table: pl.DataFrame) -> bytes | None:
    """Size against mean KL of an experiment's variants, as a PNG; None where no variant has both."""
    from assay.ops.evaluate.plots import frontier_png

    wanted = table.filter(pl.col("size_bytes").is_not_null() & pl.col("kl_mean_nats").is_not_null())
    if not wanted.height:
        return None
    return frontier_png(wanted.select(pl.col("variant").alias("label"), "size_bytes", "kl_mean_nats").to_dicts())


def lost_work(rows: pl.DataFrame) -> bytes | None:
    """What each variant lost on each kind of work, as a PNG, of the first protocol of each suite; None where there is no such score.

    Args:
        rows: of the view ``work``.
    """
    from assay.ops.evaluate.plots_scores import work_png

    first = rows.group_by("suite").agg(pl.col("protocol").min())
    shown = rows.join(first, on=["suite", "protocol"], maintain_order="left").filter(pl.col("base_value").is_not_null())
    if not shown.height:
        return None
    found = pl.col("finding").is_in(["better", "worse", "differs"]).alias("found")
    return work_png(shown.select("variant", "work", "difference", "base_value", found).to_dicts())


def by_temperature(connection: DuckDBPyConnection, experiment: str) -> bytes | None:
    """pass@k against the temperature, as a PNG; None where fewer than two temperatures were measured."""
    from assay.ops.evaluate.plots_scores import temperature_png

    rows = [
        {
            "variant": row["variant"],
            "temperature": float(row["slice"].split("/")[0]),
            "k": int(row["slice"].split("/")[1]),
            "value": row["value"],
        }
        for row in by_slice(connection, experiment, "pass_at_k").to_dicts()
        if row["slice_kind"] == "temperature_k" and row["value"] is not None
    ]
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
