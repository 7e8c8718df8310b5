"""The command ``assay claims``. Not here: what a claim comes to (``warehouse/views/claims.sql``), its words (``statements.py``)."""

from collections.abc import Callable
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from assay.assets.workspace import Workspace

Verdict = Literal["supported", "refuted", "undecided", "not comparable", "not measured"]
STYLES = {"supported": "green", "refuted": "red", "undecided": "yellow"}


def register(app: typer.Typer, bench: Callable[[], Workspace], console: Console) -> None:
    """Give ``app`` the command."""

    @app.command()
    def claims(
        verdict: Annotated[
            Verdict | None, typer.Option(help="Only these: supported, refuted, undecided, 'not comparable', 'not measured'.")
        ] = None,
        experiment: Annotated[str | None, typer.Option(help="Only what this experiment decides, or would.")] = None,
        page: Annotated[bool, typer.Option("--page", help="Write claims.html anew too, and say where it is.")] = False,
    ) -> None:
        """What our facts make of each published statement: supported, refuted, undecided, or not measured yet."""
        from assay.assets.statements import counted, told, write_page
        from assay.warehouse.database import connect
        from assay.warehouse.reads import claims as read

        workspace = bench()
        warehouse = connect(workspace.facts.root)
        rows = read(warehouse, experiment=experiment, verdict=verdict)
        table = Table("claim", "verdict", "ours", "holds if", "where", "statement", box=None, pad_edge=False)
        for each in told(rows):
            style = STYLES.get(each.verdict, "dim")
            table.add_row(each.id, f"[{style}]{each.verdict}[/]", each.value, each.asked.rpartition(": ")[2], each.where, each.statement)
        console.print(table)
        console.print(", ".join(f"{count} {name}" for name, count in counted(rows).items() if count) or "no claim is that")
        if page:
            console.print(str(write_page(workspace, read(warehouse))))
