"""What the tests of schemas share: registries of small bases, and a good experiment that each test spoils or reads."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import strategies as st

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


def step(kind: str, **given: object) -> str:
    """A step as it is written, with all that it is given, in one order: two texts are equal where the steps are."""
    return json.dumps({"kind": kind, **dict(sorted(given.items()))})


# Few letters, so that names meet: also those that the graph makes up for the steps within an option.
NAMES = st.one_of(
    st.from_regex(r"[ab0]{1,2}(_[ab1]{1,2}){0,1}", fullmatch=True), st.sampled_from(["a_step1", "a_step1x", "a_step2", "step1", "b_step1"])
)


@st.composite
def written_experiments(draw: st.DrawFn) -> dict[str, dict[str, list[str]]]:
    """The axes of a possible experiment, each step as text: pruning by one score an axis, so that no two variants have the same steps."""
    steps_of = {
        "prune": st.lists(
            st.sampled_from([step("prune_depth", layers=n, score="block_influence") for n in (1, 2)]), min_size=1, max_size=3
        ),
        "again": st.lists(st.sampled_from([step("prune_depth", layers=n, score="angular") for n in (1, 2)]), min_size=1, max_size=2),
        "quantize": st.sampled_from([[step("quantize", format=f, group_size=-1)] for f in ("int8", "int4", "int2")]),
        "kv": st.sampled_from([[step("kv", format=f)] for f in ("int8", "fp8_e4m3")]),
    }
    kinds = [kind for kind in steps_of if draw(st.booleans())] or ["prune"]
    axes: dict[str, dict[str, list[str]]] = {}
    names = draw(st.lists(NAMES, min_size=12, max_size=12, unique=True))
    for kind in kinds:
        lists = draw(st.lists(steps_of[kind], min_size=1, max_size=2, unique_by=tuple))
        axes[f"{kind}_axis"] = {"none": [], **{names.pop(): steps for steps in lists}}
    drafts = {}
    for tokens in range(1, draw(st.integers(0, 2)) + 1):
        variant = {axis: draw(st.sampled_from(sorted(options))) for axis, options in axes.items() if draw(st.booleans())}
        drafts[names.pop()] = [step("draft", method="variant", variant=variant, tokens=tokens)]
    if draw(st.booleans()):
        drafts[names.pop()] = [step("draft", method="variant", base="sibling", tokens=3)]
    return {**axes, "draft_axis": {"none": [], **drafts}} if drafts else axes


@pytest.fixture(scope="session")
def written() -> st.SearchStrategy[dict[str, dict[str, list[str]]]]:
    return written_experiments()


@pytest.fixture
def build(parse: Callable[[str], Experiment]) -> Callable[..., Experiment]:
    """An experiment with axes as ``written`` draws them."""

    def build(axes: dict[str, dict[str, list[str]]], **more: object) -> Experiment:
        steps = {
            axis: {option: [json.loads(text) for text in texts] for option, texts in options.items()} for axis, options in axes.items()
        }
        return parse(yaml.safe_dump({"name": "x", "base": "unseen", "measure": ["bytes"], "axes": steps, **more}, sort_keys=False))

    return build
