"""Checkpoints of steps that change dense weights without rounding them: opened in float32, written as their parent was. Not here: any step."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from assay.ops.models.dense import RUNTIME_KEY, check_finite, load_dense, require_dense, save_checkpoint, stored_dtype
from assay.ops.quantize.runtime import Runtime, describe


def opened(parent: Path, what: str) -> tuple[PreTrainedModel, torch.dtype]:
    """The model of a dense checkpoint in float32, and the dtype that it is stored in.

    Raises:
        ValueError: ``what`` (a step) changes dense weights, but it is quantized, needs more than its weights to be run, or is not finite.
    """
    require_dense(parent, what)
    model = load_dense(parent, dtype=torch.float32)
    check_finite(model.state_dict().items())
    return model, stored_dtype(parent)


def written(model: PreTrainedModel, parent: Path, out: Path, runtime: Runtime | None = None) -> None:
    """Write ``model``, with what must run beside its weights."""
    if runtime:
        setattr(model.config, RUNTIME_KEY, describe(runtime))
    save_checkpoint(model, parent, out)
