"""The step ``rotate``: hidden states turned by matrices that the weights take in. Not here: any arithmetic."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.schemas.rounding import Rotate

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from assay.ops.quantize.runtime import Runtime


def rotate(step: Rotate, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """By a Hadamard matrix with random signs, or by random orthogonal matrices."""
    from assay.ops.models.dense import move
    from assay.ops.quantize.rotate import rotate
    from assay.ops.quantize.runtime import Runtime
    from assay.ops.steps.whole import opened

    model, stored = opened(parent, step.kind)
    kind = "random" if step.method == "random" else "hadamard"
    transforms = rotate(model, kind=kind, seed=seed, online=_places(step), untie=True)
    _write(move(model, stored), parent, out, Runtime(online=transforms))
    return {"method": step.method, "online": [each._asdict() for each in transforms]}


def spinquant(step: Rotate, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """By matrices that are learned, with the inputs of layers rounded meanwhile."""
    from assay.ops.models.dense import move
    from assay.ops.quantize.rotate import rotate
    from assay.ops.quantize.runtime import Runtime
    from assay.ops.quantize.spin import learn
    from assay.ops.steps.given import require_windows
    from assay.ops.steps.inputs import activations_of
    from assay.ops.steps.whole import opened

    assert step.inputs is not None
    ids = require_windows(windows, "spinquant learns on text")
    model, stored = opened(parent, step.kind)
    found = learn(model, ids, steps=step.steps, seed=seed, activations=activations_of(step.inputs), online=_places(step))
    transforms = rotate(model, seed=seed, online=_places(step), untie=True, residual=found.residual, values=list(found.values))
    _write(move(model, stored), parent, out, Runtime(online=transforms))
    return {"method": step.method, "online": [each._asdict() for each in transforms], "losses": found.losses}


def _places(step: Rotate) -> tuple[str, ...]:
    """Where transforms go on at run time, in the words of ``ops/quantize/rotate.py``."""
    return tuple("heads" if place == "o" else place for place in step.online)


def _write(model: "PreTrainedModel", parent: Path, out: Path, runtime: "Runtime") -> None:
    """Write ``model`` and what must run beside its weights, if anything; then these go by a name under which nothing opens them without it."""
    from assay.ops.models.dense import OWN_FILE, RUNTIME_KEY, weight_files
    from assay.ops.quantize.runtime import describe
    from assay.ops.steps.whole import written

    if runtime:
        setattr(model.config, RUNTIME_KEY, describe(runtime))
    written(model, parent, out)
    for file in weight_files(out) if runtime else ():  # one, or shards
        file.rename(out / file.name.replace("model", OWN_FILE.split(".")[0], 1))
        (out / "model.safetensors.index.json").unlink(missing_ok=True)
