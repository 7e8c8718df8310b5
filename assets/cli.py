"""The ``assay`` command. Each command is a few lines over the modules that do the work. Not here: that work.

Exit codes: 0 all is well; 1 something failed, is damaged or breaches a blocking budget; 2 the request was wrong; 130 interrupted.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import uuid4

import typer
from rich.console import Console
from rich.table import Table

from assay.assets.cli_claims import register as register_claims
from assay.assets.cli_planning import register as register_planning
from assay.assets.workspace import Workspace

app = typer.Typer(name="assay", help="Make language models smaller and faster, and know exactly what each change cost.", no_args_is_help=True,
                  add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")  # fmt: skip
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

ExperimentArgument = Annotated[str, typer.Argument(metavar="EXPERIMENT", help="A name (see `assay list`) or the path of a YAML file.")]
_context: dict[str, Any] = {}


class MistakeError(Exception):
    """A request that cannot be met, told in one line."""


def run_cli(workspace: Callable[[], Workspace], build: Callable[..., Any]) -> None:
    """Run the command line; mistakes of a user are told without a traceback."""
    from assay.schemas.load import ExperimentError
    from assay.warehouse.database import WarehouseError
    from assay.warehouse.errors import StoreError

    warnings.filterwarnings("ignore", module="dagster.*")
    _context.update(workspace=workspace, build=build)
    try:
        app(standalone_mode=True)
    except (MistakeError, ExperimentError, FileNotFoundError, StoreError, WarehouseError, ValueError) as error:
        if os.environ.get("ASSAY_TRACEBACK"):
            raise
        errors.print(f"[red]error[/] {_plain(error)}", soft_wrap=True)
        sys.exit(2)


def bench() -> Workspace:
    return _context["workspace"]()


def _plain(error: BaseException) -> str:
    return str(error).replace("[", "\\[") or type(error).__name__


register_planning(app, bench, console)
register_claims(app, bench, console)


@app.command("list")
def list_experiments() -> None:
    """The experiments that can be named, with their questions."""
    good, bad = bench().experiments()
    table = Table("experiment", "variants", "question", box=None)
    for experiment in good:
        table.add_row(experiment.name, str(len(experiment.variants)), experiment.question)
    console.print(table)
    for error in bad:
        errors.print(f"[red]error[/] {_plain(error)}", soft_wrap=True)
    if bad:
        raise typer.Exit(1)


@app.command()
def plan(experiment: ExperimentArgument, as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False) -> None:
    """What an experiment comes to: its nodes, which are cached, what each will cost. Builds nothing."""
    from assay.assets.ledger import Ledger
    from assay.assets.plan import missing
    from assay.assets.plan import plan as plan_items
    from assay.schemas.graph import build_graph

    graph = build_graph(bench().experiment(experiment))
    items = plan_items(Ledger(bench(), graph))
    if as_json:
        for item in items:
            told = {
                "key": "/".join(item.key.path),
                "kind": item.kind,
                "cached": item.cached,
                "digest": item.digest,
                "seconds": round(item.seconds, 3),
            }
            sys.stdout.write(json.dumps(told) + "\n")
        return
    table = Table("asset", "kind", "state", "seconds", box=None)
    table.columns[3].justify = "right"
    for item in items:
        state = f"[dim]cached {(item.digest or '')[:12]}[/]" if item.cached else "[yellow]to build[/]"
        table.add_row(" / ".join(item.key.path), item.kind, state, f"{item.seconds:.1f}")
    console.print(table)
    todo = missing(items)
    console.print(f"{len(graph.experiment.variants)} variants, {len(graph.nodes)} nodes; {len(items) - len(todo)} of {len(items)} items cached; "
                  f"about {sum(item.seconds for item in todo):.0f} s to build the rest (seconds are history where there is any)")  # fmt: skip


@app.command()
def run(
    experiment: ExperimentArgument,
    select: Annotated[
        list[str] | None, typer.Option("--select", "-s", help="Only these variants: a slug, a path, axis=option; * stands for anything.")
    ] = None,
    retime: Annotated[bool, typer.Option(help="Measure timings again although there are some of this machine.")] = False,
) -> None:
    """Materialize an experiment: what is in the store costs nothing, the rest is built, and the result is printed."""
    from assay.assets.progress import shown
    from assay.assets.run import execute, instance, prepare, tell_dagster
    from assay.assets.steps import interrupted
    from assay.schemas.graph import build_graph

    workspace = bench()
    study = workspace.experiment(experiment)
    graph = build_graph(study)
    work = prepare(workspace, graph, select=select or [], retime=retime)
    here = instance(workspace)
    tell_dagster(here, work.items)
    cached = len(work.items) - len(work.todo)
    console.print(f"[bold]{study.name}[/]  {study.question}")
    console.print(f"{len(study.variants)} variants on {study.base.name}; {cached} of {len(work.items)} items are in the store"
                  + (f", about {sum(item.seconds for item in work.todo):.0f} s for the rest" if work.todo else ""))  # fmt: skip
    success = True
    if work.keys:
        run_id = str(uuid4())
        with shown(here, run_id, work.todo, console):
            success = execute(_context["build"]([study], workspace, executor_name="in_process"), here, work, run_id=run_id, retime=retime)
    if interrupted.is_set():
        errors.print("interrupted; what was finished is kept, and running again goes on from there")
        raise typer.Exit(130)
    show_result(workspace, study)
    if not success:
        errors.print(
            "[red]something failed[/]; the rest is kept. `assay sql \"FROM measurement WHERE status = 'failed'\"` and the UI tell more; running again tries it again"
        )
        raise typer.Exit(1)


def show_result(workspace: Workspace, study: Any) -> None:
    """The experiment's table, and where everything is."""
    from assay.warehouse.database import connect
    from assay.warehouse.prompt import run_sql

    axes = ", ".join(f'"{axis}"' for axis in study.axes)
    columns = "size_bytes, kl_mean_nats, kl_p99_nats, top1_agreement, perplexity, decode_tok_s, acceptance_rate, tokens_per_round"
    run_sql(connect(workspace.facts.root), f'SELECT {axes}, {columns} FROM "{study.name}"')
    report = workspace.reports / f"{study.name}.html"
    console.print(f"report     {_near(report)}" if report.is_file() else "report     not written: something before it failed")
    console.print(f"warehouse  {_near(workspace.warehouse)}   (assay sql, or any DuckDB client)")
    console.print("ui         make ui   (or: assay ui)")


def _near(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


@app.command()
def report(experiment: ExperimentArgument) -> None:
    """Write the report of an experiment from the facts that there are, and say where it is."""
    from assay.assets.report import write_report

    workspace = bench()
    console.print(_near(write_report(workspace, workspace.experiment(experiment)).file))


@app.command()
def sql(
    query: Annotated[str | None, typer.Argument(help="A query; without one a prompt opens.")] = None,
    format: Annotated[
        Literal["table", "csv", "json", "markdown"], typer.Option("--format", "-f", help="table, csv, json or markdown.")
    ] = "table",
) -> None:
    """Query the facts: one query, or a prompt with completion. Read-only, and open to use while a run writes."""
    from assay.warehouse.database import connect
    from assay.warehouse.prompt import prompt, run_sql

    workspace = bench()
    if query is None and not sys.stdin.isatty():
        query = sys.stdin.read()
    if query is not None:
        run_sql(connect(workspace.facts.root), query, format=format)
        return
    prompt(lambda: connect(workspace.facts.root), history=workspace.home / "sql_history")


@app.command()
def compare(
    experiment: Annotated[str, typer.Argument(help="The name of an experiment that has facts.")],
    variant: Annotated[str, typer.Argument(help="A variant of it.")],
    other: Annotated[str | None, typer.Argument(help="The variant beside it.", show_default="the base")] = None,
) -> None:
    """Is one variant better than another? Each metric on the same items: difference, interval, test, and what would have been found."""
    from assay.assets.compare import compare as compare_variants
    from assay.warehouse.database import connect
    from assay.warehouse.prompt import shown

    rows = compare_variants(connect(bench().facts.root), experiment, variant, other)
    table = Table("protocol", "metric", "items", "difference", "95 % interval", "bootstrap", "p", "p (Holm)", "finding", box=None)
    for at in (2, 3, 6, 7):
        table.columns[at].justify = "right"
    for row in rows:
        interval = "—" if row.low is None else f"{shown(row.low)} … {shown(row.high)}"
        drawn = f"{shown(row.bootstrap[0])} … {shown(row.bootstrap[1])}" if row.bootstrap else "—"
        numbers = (shown(row.n), shown(row.difference), interval, drawn, shown(row.p), shown(row.p_holm))
        table.add_row(row.protocol, row.metric, *numbers, row.verdict)
    console.print(table)


@app.command()
def verify(
    set_aside: Annotated[
        bool, typer.Option(help="Put damaged artifacts into quarantine; they are built again when they are asked for.")
    ] = False,
) -> None:
    """Compare every artifact of the store with its digests."""
    workspace = bench()
    problems = list(workspace.store.verify(quarantine=set_aside))
    for problem in problems:
        errors.print(f"[red]damaged[/] {problem}", soft_wrap=True)
    console.print(f"{len(workspace.store.artifacts())} artifacts, {workspace.store.size() / 2**20:,.0f} MiB, {len(problems)} problems")
    if problems:
        raise typer.Exit(1)


@app.command()
def gc(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    keep_days: Annotated[int, typer.Option(min=0, help="Keep what is younger than so many days.")] = 0,
) -> None:
    """Remove artifacts that no experiment reaches, after showing what and how much. Facts stay."""
    from assay.assets.ledger import Ledger
    from assay.assets.plan import plan as plan_items
    from assay.schemas.graph import build_graph
    from assay.warehouse.gc import collect, plan_gc

    workspace = bench()
    good, bad = workspace.experiments()
    if bad:
        raise MistakeError(
            "what an experiment that cannot be read needs would be removed too; mend or remove it first:\n" + "\n".join(map(str, bad))
        )
    items = [item for experiment in good for item in plan_items(Ledger(workspace, build_graph(experiment)))]
    keys = {action.key for item in items for action in item.actions}
    found = plan_gc(workspace.store, keys, keep_days=keep_days)
    for row in found.rows:
        console.print(f"  {row.what:10} {row.name[:16]:16} {row.kind:14} {row.size_bytes / 2**20:9,.1f} MiB  {row.why}", soft_wrap=True)
    console.print(f"{len(found.rows)} things that no experiment reaches, {found.size_bytes / 2**20:,.1f} MiB")
    if found.rows and (yes or (sys.stdin.isatty() and typer.confirm("remove them?"))):
        collect(found)
        console.print("removed")
    elif found.rows and not yes:
        console.print("nothing was removed; say --yes to remove them")


@app.command()
def schema() -> None:
    """The JSON Schema of an experiment, for completion in an editor."""
    from assay.schemas.json_schema import experiment_json_schema

    sys.stdout.write(json.dumps(experiment_json_schema(), indent=2) + "\n")


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Its name: lower-case letters, digits, underscores.")],
    directory: Annotated[Path, typer.Option("--dir", help="Where to write NAME.yaml.")] = Path(),
) -> None:
    """Write a commented experiment file to start from."""
    from assay.assets.registry import HERE
    from assay.schemas.load import parse_experiment

    file = _new_file(directory, name)
    text = (HERE / "template.yaml").read_text().replace("name: my_experiment", f"name: {name}")
    parse_experiment(text, file, bench().registries)
    _write(file, text)


@app.command()
def shapes(
    name: Annotated[str, typer.Argument(help="The name of the experiment to write.")],
    base: Annotated[str, typer.Option(help="A base by its name in assets/bases.yaml, or {path: …} as in a file.")],
    parameters: Annotated[int, typer.Option(min=1, help="Weights at most; of B bytes at b bits each, 8 B / b.")],
    best: Annotated[int, typer.Option(min=1, max=50, help="How many candidates.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="That each is trained on.")] = 32_768,
    directory: Annotated[Path, typer.Option("--dir", help="Where to write NAME.yaml.")] = Path(),
) -> None:
    """Search for a smaller shape: write an experiment whose variants are the candidates that promise most within a budget of weights."""
    from assay.assets.search import search_file
    from assay.schemas.load import parse_experiment

    workspace, file = bench(), _new_file(directory, name)
    try:
        text = search_file(workspace, file, base, parameters=parameters, best=best, tokens=tokens)
    except ValueError as error:
        raise MistakeError(str(error)) from error
    parse_experiment(text, file, workspace.registries)
    _write(file, text)


def _new_file(directory: Path, name: str) -> Path:
    """Where an experiment called ``name`` is to be written; refuses a file that is there."""
    file = directory / f"{name}.yaml"
    if file.exists():
        raise MistakeError(f"{file} is there already; choose another name, or remove it first")
    return file


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    console.print(f"{file}\n  assay plan {file}\n  assay run {file}")


@app.command()
def ui(
    port: Annotated[int, typer.Option(min=1, max=65535)] = 3000,
    host: Annotated[str, typer.Option(help="Loopback unless you say otherwise.")] = "127.0.0.1",
) -> None:
    """Open the Dagster UI on the graph of every experiment. Stops with Ctrl-C."""
    from assay.assets.run import SETTINGS, set_up

    workspace = bench()
    set_up(workspace)
    _, bad = workspace.experiments()
    for error in bad:
        errors.print(f"[yellow]left out[/] {_plain(error)}", soft_wrap=True)
    console.print(f"http://{host}:{port}  (DAGSTER_HOME {_near(workspace.dagster_home)})")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    program = str(Path(sys.executable).parent / "dagster")
    os.execv(program, [program, "dev", "-w", str(SETTINGS.with_name("workspace.yaml")), "-h", host, "-p", str(port)])


@app.command("free-slots")
def free_slots_command() -> None:
    """Close runs whose process died and free the pool slots that they held (`assay run` does so by itself)."""
    from assay.assets.run import set_up

    workspace = bench()
    set_up(workspace)
    import dagster as dg

    from assay.assets.run import free_slots

    closed = free_slots(dg.DagsterInstance.get())
    console.print(f"{len(closed)} dead runs closed" + "".join(f"\n  {each}" for each in closed))
