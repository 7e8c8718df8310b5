"""Runs an experiment from the command line: what the store lacks goes through Dagster, what it has is only recorded. Not here: showing it."""

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from shutil import copyfile

import dagster as dg
import psutil

from assay.assets import labels
from assay.assets.ledger import Ledger
from assay.assets.measurements import RETIME
from assay.assets.plan import Item, missing, plan
from assay.assets.record import Recorder
from assay.assets.steps import interrupted
from assay.assets.workspace import Workspace
from assay.schemas.experiment import Experiment, Variant
from assay.schemas.graph import Graph, Node
from assay.schemas.metrics import TIMED_SUITES

SETTINGS = Path(__file__).parent / "deploy" / "local" / "dagster.yaml"
DATA_VERSION = "dagster/data_version"
PROCESS = "assay/process"


@dataclass(frozen=True)
class Work:
    """What is to be done: every item asked for, those to build, and whether reports are to be written."""

    ledger: Ledger
    items: Sequence[Item]
    todo: Sequence[Item]
    reports: Sequence[dg.AssetKey]

    @property
    def keys(self) -> list[dg.AssetKey]:
        return [*(item.key for item in self.todo), *self.reports]


def prepare(workspace: Workspace, graph: Graph, *, select: Sequence[str] = (), retime: bool = False) -> Work:
    """Plan what ``select`` names (all, if nothing), and record what the store has of it.

    Raises:
        ValueError: a pattern of ``select`` fits no variant.
    """
    ledger = Ledger(workspace, graph)
    items = plan(ledger)
    if select:
        wanted = needed(graph, chosen(graph.experiment, graph, select))
        items = [item for item in items if item.node.path in wanted[0] and (item.variant is None or item.variant.slug in wanted[1])]
    todo = missing(items)
    if retime:
        todo += [item for item in items if item.cached and item.kind in TIMED_SUITES]
    fresh = workspace.warehouse.is_file() and (workspace.reports / f"{graph.experiment.name}.html").is_file()
    reports = [] if fresh and not todo else [labels.report_key(graph.experiment), labels.SNAPSHOT_KEY, labels.CLAIMS_KEY]
    record_cached(ledger, items)
    return Work(ledger, items, todo, reports)


def chosen(experiment: Experiment, graph: Graph, select: Sequence[str]) -> list[Variant]:
    """The variants that the patterns name: a slug, a path below the experiment, or ``axis=option``; ``*`` stands for anything."""
    found: dict[str, Variant] = {}
    for pattern in select:
        fitting = [variant for variant in experiment.variants if _fits(pattern, variant, graph.ends[variant.slug])]
        if not fitting:
            known = ", ".join(variant.slug for variant in experiment.variants[:8])
            raise ValueError(
                f"--select {pattern} fits no variant; name slugs such as {known}, paths such as depth4/int4, or axis=option; * stands for anything"
            )
        found.update({variant.slug: variant for variant in fitting})
    return list(found.values())


def _fits(pattern: str, variant: Variant, node: Node) -> bool:
    axis, equals, option = pattern.partition("=")
    if equals:
        return any(fnmatch(a, axis) and fnmatch(o, option) for a, o in variant.options)
    return fnmatch(variant.slug, pattern) or fnmatch("/".join(node.path), pattern)


def needed(graph: Graph, variants: Iterable[Variant]) -> tuple[set[tuple[str, ...]], set[str]]:
    """The paths of every node that ``variants`` stand on, drafts and the base included, and the slugs of the variants."""
    slugs = {variant.slug for variant in variants}
    open_nodes, paths = [graph.base, *(graph.ends[slug] for slug in slugs)], set()
    while open_nodes:
        node = open_nodes.pop()
        if node.path not in paths:
            paths.add(node.path)
            open_nodes += [parent for parent in (node.parent, node.draft) if parent]
    return paths, slugs


def record_cached(ledger: Ledger, items: Sequence[Item]) -> None:
    """Write the facts that are in the store and not (or no longer) among the facts: a killed run loses none, a copied store brings its own."""
    recorder = Recorder(ledger)
    recorder.declare()
    ended = {variant.slug: variant for variant in ledger.experiment.variants if ledger.digest(ledger.graph.ends[variant.slug])}
    recorder.variants(ended.values())
    for item in items:
        if item.digest is None:
            continue
        if item.protocol is None:
            recorder.node(item.node)
        elif item.variant is not None and item.action is not None and not ledger.workspace.facts.exists("measurement", item.action.key):
            recorder.measurement(item.node, item.protocol, item.action.key, item.digest)


def instance(workspace: Workspace) -> dg.DagsterInstance:
    """The Dagster instance of the workspace, set up by itself; slots that killed runs held are freed."""
    set_up(workspace)
    found = dg.DagsterInstance.get()
    free_slots(found)
    return found


def set_up(workspace: Workspace) -> None:
    """Make ``DAGSTER_HOME`` with our settings (a file that a person changed stays as it is) and point this process at it."""
    home = workspace.dagster_home
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "dagster.yaml").exists():
        copyfile(SETTINGS, home / "dagster.yaml")
    os.environ["DAGSTER_HOME"] = str(home)
    os.environ["ASSAY_HOME"] = str(workspace.home)
    os.environ["DAGSTER_DISABLE_TELEMETRY"] = "yes"


def free_slots(of: dg.DagsterInstance) -> list[str]:
    """Close the runs whose process on this machine is dead, and free the pool slots that they held; their ids."""
    under_way = dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.CANCELING])
    dead = [run for run in of.get_runs(under_way) if PROCESS in run.tags and not _alive(run.tags[PROCESS])]
    for run in dead:
        of.report_run_failed(run, message="Its process died. What it had finished is in the store.")
        of.event_log_storage.free_concurrency_slots_for_run(run.run_id)
    return [run.run_id for run in dead]


def this_process() -> str:
    """Host, process id and the time it started: an id alone is used again."""
    return f"{socket.gethostname()}-{os.getpid()}-{int(psutil.Process().create_time())}"


def _alive(process: str) -> bool:
    host, pid, started = process.rsplit("-", 2)
    if host != socket.gethostname():
        return True  # not ours to judge
    try:
        return abs(psutil.Process(int(pid)).create_time() - int(started)) < 2
    except psutil.Error:
        return False


def tell_dagster(of: dg.DagsterInstance, items: Sequence[Item]) -> int:
    """Record cached items that this instance has not seen with their digest (a shared or copied store): how many there were."""
    known = of.get_latest_materialization_events([item.key for item in items if item.cached])
    told = 0
    for item in items:
        event = known.get(item.key)
        materialized = event.asset_materialization if event else None
        if item.digest is None or (materialized and (materialized.tags or {}).get(DATA_VERSION) == item.digest):
            continue
        of.report_runless_asset_event(
            dg.AssetMaterialization(
                item.key, metadata={"cached": True, "digest": item.digest, "seconds": item.seconds}, tags={DATA_VERSION: item.digest}
            )
        )
        told += 1
    return told


def execute(
    definitions: dg.Definitions, of: dg.DagsterInstance, work: Work, *, run_id: str, retime: bool = False, trigger: str = "cli"
) -> bool:
    """Run ``work`` in this process; what fails leaves the rest standing. Whether all of it succeeded."""
    tags = {
        "assay/trigger": trigger,
        PROCESS: this_process(),
        "assay/experiment": work.ledger.experiment.name,
        **({RETIME: "true"} if retime else {}),
    }
    quiet = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
    job = definitions.resolve_implicit_global_asset_job_def()
    result = job.execute_in_process(
        instance=of, asset_selection=work.keys, run_config=quiet, tags=tags, raise_on_error=False, run_id=run_id
    )
    for event in result.all_events:  # an interrupt that met Dagster's own code and not a step's
        error = event.step_failure_data.error if event.is_step_failure else None
        if error is not None and "Interrupted" in str(error.cls_name):
            interrupted.set()
    return result.success
