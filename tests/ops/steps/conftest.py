"""What the tests of weight steps share: a parent with widths for every format, and a step done with the model that it left in memory kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

LENGTH = 24


class Made(NamedTuple):
    """A step that was done: where it wrote, what it said, and what the model that it wrote computes of ``ids``, in the dtype that is stored."""

    out: Path
    summary: dict[str, Any]
    logits: Any


@pytest.fixture(scope="session")
def ids() -> Any:
    import torch

    return torch.arange(3, 3 + LENGTH).unsqueeze(0)


@pytest.fixture(scope="session")
def windows() -> Any:
    import torch

    return torch.randint(3, 128, (6, 32), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def saved(tmp_path_factory, save_checkpoint_dir) -> Callable[[Any], Path]:
    """A model as a parent in bfloat16."""
    return lambda model: save_checkpoint_dir(model.bfloat16(), tmp_path_factory.mktemp("parents") / "parent")


@pytest.fixture(scope="session")
def wide(make_llama, saved) -> Path:
    """128 wide, so that groups of 128 and blocks of 128 × 128 divide every weight."""
    return saved(make_llama(hidden=128, ffn=256, layers=1, kv_heads=4))


@pytest.fixture(scope="session")
def small(make_llama, saved) -> Path:
    """64 wide, two blocks."""
    return saved(make_llama(layers=2))


@pytest.fixture
def done(tmp_path, windows, ids, monkeypatch) -> Callable[..., Made]:
    """``done(step, parent)``: the step by ``apply``, and the logits of the model in memory at the time that it was written."""
    import torch

    from assay.ops.apply import apply
    from assay.ops.quantize import write
    from assay.ops.quantize.runtime import start

    seen: list[Any] = []
    save = write.save_packed

    def watched(model: Any, *arguments: Any, **named: Any) -> Any:
        told = save(model, *arguments, **named)
        with torch.no_grad():
            if named.get("runtime") is not None:
                start(model, named["runtime"]._replace(online=()))  # transforms of the parent run already
            seen.append(model(ids).logits)
        return told

    monkeypatch.setattr(write, "save_packed", watched)

    def do(step: Any, parent: Path, name: str = "out", **more: Any) -> Made:
        out = tmp_path / name
        out.mkdir()
        seen.clear()
        summary = apply(step, parent, out, **{"windows": windows, **more})
        return Made(out, summary, seen[0] if seen else None)

    return do


@pytest.fixture(scope="session")
def engine(ids) -> Callable[[Path], Any]:
    """Logits [tokens, vocabulary] of ``ids`` by the engine, in float32."""

    def read(directory: Path) -> Any:
        from assay.kernels.engine import open_runner
        from assay.ops.decode.session import Session

        session = Session(open_runner(directory), capacity=LENGTH)
        return session.read([ids[0].tolist()], keep=LENGTH)[0]

    return read


@pytest.fixture(scope="session")
def close() -> Callable[[Any, Any], bool]:
    """Whether logits differ by no more than sums in another order do: 5e-5 of the largest."""
    return lambda one, other: float((one - other).abs().max()) <= 5e-5 * float(other.abs().max()) + 1e-6
