"""What the tests of schemas share: registries of small bases, and a good experiment that each test spoils or reads."""

from collections.abc import Callable
from pathlib import Path

import pytest

from assay.schemas.base import Base, Shape
from assay.schemas.experiment import Experiment
from assay.schemas.load import Registries, parse_experiment
from assay.schemas.protocols import Acceptance, Bytes, Divergence, Speed

# 4 layers; 64 and 128 columns, so that groups of 32 and 64 divide both.
SHAPE = Shape(layers=4, hidden_size=64, intermediate_size=128, heads=4, kv_heads=2, head_dim=16, vocab_size=128, tied=False)


@pytest.fixture
def good() -> str:
    return (Path(__file__).parent / "good.yaml").read_text(encoding="utf-8")


@pytest.fixture
def registries() -> Registries:
    bases = {
        "tiny": Base(name="tiny", path="tiny", shape=SHAPE),
        "tied": Base(name="tied", path="tied", shape=SHAPE.model_copy(update={"tied": True})),
        "sibling": Base(name="sibling", path="sibling", shape=SHAPE.model_copy(update={"layers": 2})),
        "stranger": Base(name="stranger", path="stranger", shape=SHAPE.model_copy(update={"vocab_size": 256})),
        "unseen": Base(name="unseen", hub="org/unseen", revision="0" * 40),
    }
    protocols = {"divergence": Divergence(), "bytes": Bytes(), "acceptance": Acceptance(), "speed": Speed(), "speed_batch": Speed(batch=8)}
    return Registries(bases, protocols, frozenset({"wikipedia", "wikipedia_train"}), reserved=frozenset({"scorecard", "measurement"}))


@pytest.fixture
def parse(registries: Registries, tmp_path: Path) -> Callable[[str], Experiment]:
    return lambda text: parse_experiment(text, tmp_path / "experiment.yaml", registries)
