"""The one place that reads the environment and joins experiments with a workspace: ``defs`` for Dagster, ``main`` for the command line.

ASSAY_HOME         where artifacts, facts and runs lie (else the nearest ``.assay`` at or above the working directory, else a new one there)
ASSAY_EXPERIMENTS  directories or files of experiments beside those of the repository, separated by ``:``
ASSAY_STORE        an fsspec URL of a shared store; the local one becomes its cache
ASSAY_FACTS        a directory of facts that machines share
ASSAY_EXECUTOR     in_process | multiprocess | k8s | ray | celery
ASSAY_NIGHTLY      1 switches the nightly schedule on

Read where they matter, and never from an experiment:

ASSAY_RUN_GENERATED_CODE  1 lets programs that a model has written run (ops/tasks/sandbox.py)
ASSAY_RUN_TASK_FILES      1 lets task files of one's own be read, which are code (ops/suites/lm_eval.py)

Importing this module imports neither torch nor transformers.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import dagster as dg

from assay.assets.workspace import Workspace
from assay.schemas.experiment import Experiment

OWN_EXPERIMENTS = Path(__file__).resolve().parent / "assets" / "experiments"


def workspace() -> Workspace:
    """The workspace that the environment names."""
    places = [Path(place).expanduser() for place in os.environ.get("ASSAY_EXPERIMENTS", "").split(os.pathsep) if place]
    facts = os.environ.get("ASSAY_FACTS")
    return Workspace(home(), (*places, OWN_EXPERIMENTS), os.environ.get("ASSAY_STORE") or None, Path(facts) if facts else None)


def home() -> Path:
    given = os.environ.get("ASSAY_HOME")
    if given:
        return Path(given).expanduser().absolute()
    here = Path.cwd()
    return next((place / ".assay" for place in (here, *here.parents) if (place / ".assay").is_dir()), here / ".assay")


def build(
    experiments: Sequence[Experiment], bench: Workspace, *, executor_name: str = "multiprocess", nightly_on: bool = False
) -> dg.Definitions:
    """Everything that Dagster is to know of ``experiments``."""
    from assay.assets.checkpoints import build_checkpoints
    from assay.assets.devices import build_devices
    from assay.assets.executors import executor
    from assay.assets.measurements import build_measurements
    from assay.assets.reports import build_reports
    from assay.assets.schedules import nightly
    from assay.schemas.graph import build_graph

    graphs = [build_graph(experiment) for experiment in experiments]
    assets = [asset for graph in graphs for build_some in (build_checkpoints, build_measurements) for asset in build_some(bench, graph)]
    everything = dg.define_asset_job(
        "everything", selection=dg.AssetSelection.all(), description="All experiments; the nightly run selects from it."
    )
    jobs = [
        dg.define_asset_job(each.name, selection=dg.AssetSelection.groups(each.name), description=each.question) for each in experiments
    ]
    return dg.Definitions(
        assets=[*assets, *build_devices(bench), *build_reports(bench, graphs)],
        jobs=[everything, *jobs],
        schedules=[nightly(bench, graphs, everything.name, on=nightly_on)],
        executor=executor(executor_name),
    )


@dg.definitions
def defs() -> dg.Definitions:
    """The experiments of the workspace; a file that cannot be one is told in the log and left out, so that the others stay usable."""
    bench = workspace()
    good, bad = bench.experiments()
    for error in bad:
        dg.get_dagster_logger("assay").error("left out: %s", error)
    name = os.environ.get("ASSAY_EXECUTOR", "multiprocess")
    return build(good, bench, executor_name=name, nightly_on=os.environ.get("ASSAY_NIGHTLY") == "1")


def main() -> None:
    """The ``assay`` command."""
    from assay.assets.cli import run_cli

    run_cli(workspace, build)
