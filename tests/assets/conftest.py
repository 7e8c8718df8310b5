"""A workspace of a test: a tiny base in a directory, a text beside the experiments, its own home."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from assay.assets.run import Work, execute, instance, prepare, tell_dagster
from assay.assets.workspace import Workspace
from assay.definitions import build
from assay.schemas.graph import build_graph

WORDS = "the quick brown fox jumps over 12 lazy dogs, and (then) it runs = away from 345 cats. "

TINY = """
name: tiny
question: Does a tiny model behave like a large one?
base: {path: base, dtype: float32}
axes:
  prune:
    none: []
    depth1: [{kind: prune_depth, layers: 1, calibration: {text: {path: text.txt}, windows: 2, length: 32}}]
  quantize:
    none: []
    int4: [{kind: quantize, format: int4, group_size: 32}]
  draft:
    none: []
    ngram: [{kind: draft, method: ngram, tokens: 3}]
    sibling: [{kind: draft, method: variant, variant: {quantize: int4}, tokens: 2}]
measure:
  - {suite: divergence, text: {path: text.txt}, tokens: 256, window: 64}
  - bytes
  - {suite: acceptance, text: {path: text.txt}, prompts: 2, prompt_tokens: 16, new_tokens: 12}
  - {suite: speed, text: {path: text.txt}, prompt_tokens: 16, prefill_tokens: 32, new_tokens: 6, repeats: 2}
budgets:
  - {metric: kl_mean_nats, at_most: 1.0e-9, for: {quantize: int4}}
"""

SMALL = """
name: small
base: {path: base, dtype: float32}
axes:
  quantize:
    none: []
    int8: [{kind: quantize, format: int8, group_size: 32}]
    int2: [{kind: quantize, format: int2, group_size: 32, symmetric: false}]
measure: [{suite: divergence, text: {path: text.txt}, tokens: 128, window: 64}, bytes]
"""


def lay_out(directory: Path, model: Any, save: Callable[[Any, Path], Path]) -> Path:
    """A base, a text and two experiments in ``directory``."""
    directory.mkdir()
    save(model, directory / "base")
    (directory / "text.txt").write_text(WORDS * 40)
    (directory / "tiny.yaml").write_text(TINY)
    (directory / "small.yaml").write_text(SMALL)
    return directory


def go(bench: Workspace, name: str, *, select: Sequence[str] = (), retime: bool = False) -> tuple[Work, bool]:
    """Run an experiment as `assay run` does, in this process: what it planned, and whether all succeeded."""
    study = bench.experiment(name)
    work = prepare(bench, build_graph(study), select=select, retime=retime)
    here = instance(bench)
    tell_dagster(here, work.items)
    success = True
    if work.keys:
        success = execute(build([study], bench, executor_name="in_process"), here, work, run_id=str(uuid4()), retime=retime, trigger="test")
    return work, success


@pytest.fixture(scope="session")
def run_experiment() -> Callable[..., tuple[Work, bool]]:
    return go


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run sets in the environment is put back."""
    for name in ("DAGSTER_HOME", "ASSAY_HOME", "DAGSTER_DISABLE_TELEMETRY", "ASSAY_EXPERIMENTS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.delenv(name)


@pytest.fixture
def place(tmp_path: Path, make_llama: Callable[..., Any], save_checkpoint_dir: Callable[[Any, Path], Path]) -> Path:
    return lay_out(tmp_path / "experiments", make_llama(layers=2), save_checkpoint_dir)


@pytest.fixture
def bench(place: Path, tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "home", (place,))


@pytest.fixture(scope="session")
def finished_once(
    tmp_path_factory: pytest.TempPathFactory, make_llama: Callable[..., Any], save_checkpoint_dir: Callable[[Any, Path], Path]
) -> Path:
    """A directory in which the experiment `tiny` has been run, for all tests; they work on copies (:func:`finished`)."""
    root = tmp_path_factory.mktemp("finished")
    place = lay_out(root / "experiments", make_llama(layers=2), save_checkpoint_dir)
    before = dict(os.environ)
    work, success = go(Workspace(root / "home", (place,)), "tiny")
    os.environ.clear()
    os.environ.update(before)
    assert success
    assert len(work.todo) == len(work.items)
    return root


@pytest.fixture
def finished(finished_once: Path, tmp_path: Path) -> Workspace:
    """A workspace of one's own in which `tiny` has been run."""
    shutil.copytree(finished_once, tmp_path / "copy", symlinks=True)
    return Workspace(tmp_path / "copy" / "home", (tmp_path / "copy" / "experiments",))
