"""Checkpoints of steps that change dense weights without rounding them: opened in float32, written as their parent was. Not here: any step."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from assay.ops.models.dense import RUNTIME_KEY, load_dense, require_dense, save_checkpoint, stored_dtype
from assay.ops.quantize.runtime import Runtime, describe


def opened(parent: Path) -> tuple[PreTrainedModel, torch.dtype]:
    """The model of a dense checkpoint in float32, and the dtype that it is stored in.

    Raises:
        ValueError: it is quantized, or needs more than its weights to be run.
    """
    require_dense(parent, "this step")
    return load_dense(parent, dtype=torch.float32), stored_dtype(parent)


def written(model: PreTrainedModel, parent: Path, out: Path, runtime: Runtime | None = None) -> None:
    """Write ``model``, with what must run beside its weights."""
    if runtime:
        setattr(model.config, RUNTIME_KEY, describe(runtime))
    save_checkpoint(model, parent, out)
