"""The commands ``assay device`` and ``assay advise``: a few lines over the modules that do the work. Not here: that work, or other commands (``cli.py``)."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from assay.assets.workspace import Workspace


def register(app: typer.Typer, bench: Callable[[], Workspace], console: Console) -> None:
    """Add the two commands to ``app``."""

    @app.command()
    def device(measure: Annotated[bool, typer.Option("--measure", help="Measure again although there are constants.")] = False) -> None:
        """What this device does when it does one thing: bandwidths, rates of products, the time to start. Measures them once."""
        from assay.assets.advice_text import constants_told
        from assay.assets.devices import machine_here, measure_here, measured_constants

        workspace = bench()
        rows = measured_constants(workspace)
        if measure or not rows:
            measure_here(workspace)
            rows = measured_constants(workspace)
        table = Table("constant", "dtype", "size", "value", "unit", "spread", "threads", "status", "measured", box=None)
        for each in rows:
            spread, when = "" if each.spread is None else f"{each.spread:.2g}", f"{each.measured_at:%Y-%m-%d %H:%M}"
            table.add_row(
                each.constant, each.dtype, each.size, f"{each.value:.4g}", each.unit, spread, str(each.threads), each.status, when
            )
        console.print(table)
        here = machine_here(rows)
        console.print(f"{here.name}: {here.source}")
        for sentence in constants_told(here):
            console.print(sentence)

    @app.command()
    def advise(
        base: Annotated[str | None, typer.Option(help="The base whose declared variants are ranked.")] = None,
        goal: Annotated[Literal["latency", "throughput", "memory"], typer.Option(help="latency, throughput or memory.")] = "latency",
        context: Annotated[int, typer.Option(min=1, help="Tokens of context of each text.")] = 1024,
        batch: Annotated[int, typer.Option(min=1, help="Texts at once; for throughput the most.")] = 1,
        on: Annotated[str, typer.Option("--device", help="here (measured), or a name of assets/devices.yaml, such as h200.")] = "here",
        memory: Annotated[float | None, typer.Option(min=0.001, help="GiB that may be used; the device's own if left out.")] = None,
        at_most_kl: Annotated[float | None, typer.Option(min=0, help="Leave out variants with a larger mean KL, in nats.")] = None,
        shape: Annotated[str | None, typer.Option(help="In the place of a base: a published shape, such as 70b.")] = None,
        to: Annotated[str | None, typer.Option(help="With --shape: the smaller shape that is wanted.")] = None,
        top: Annotated[int, typer.Option(min=1, help="Rows of the ranking that are shown.")] = 20,
        write: Annotated[Path | None, typer.Option(help="Write the experiment that measures what is missing to this .yaml file.")] = None,
    ) -> None:
        """Which variant serves a goal best: ranked by predicted cost, filtered by measured quality, with what is not known yet."""
        from assay.assets.planner import plan_of_base, plan_of_shape

        if (base is None) == (shape is None):
            raise ValueError(
                "advise needs one of --base and --shape; --base ranks declared variants, --shape reckons with a model that is not here"
            )
        if shape is not None and (write is not None or at_most_kl is not None):
            raise ValueError("--write and --at-most-kl are for the declared variants of a --base; a --shape has none")
        if shape is None and to is not None:
            raise ValueError("--to is for --shape: the smaller shape that is wanted")
        asked: dict[str, Any] = {"context": context, "batch": batch, "device": on, "memory_gib": memory}
        workspace, written = bench(), None
        if base is not None:
            parts, written = plan_of_base(workspace, base=base, goal=goal, at_most_kl=at_most_kl, write=write, top=top, **asked)
        else:
            parts = plan_of_shape(workspace, shape=str(shape), to=to, **asked)
        for part in parts:
            table = Table(*part.columns, title=part.title, title_justify="left", box=None)
            for row in part.rows:
                table.add_row(*row)
            console.print(table)
            for sentence in part.sentences:
                console.print(f"- {sentence}", soft_wrap=True)
        if written is not None:
            console.print(f"{written}\n  assay plan {written}\n  assay run {written}")
