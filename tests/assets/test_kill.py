"""A run that is killed at any moment loses nothing, doubles nothing and leaves nothing half done."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from assay.assets.workspace import Workspace


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kill_script", Path(__file__).parents[1] / "kill.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_killed_at_random_moments_a_plain_run_completes(bench: Workspace):
    kill = script()
    alive = kill.kill_at_random("small", home=bench.home, places=bench.experiment_places, kills=5, longest=14.0, seed=1)
    assert alive >= 2  # or nothing was tested
    assert kill.faults("small", home=bench.home, places=bench.experiment_places) == []
