"""Checkpoints of steps that change dense weights without rounding them: opened in float32, written as their parent was. Not here: any step."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from assay.ops.models.dense import check_finite, load_dense, require_dense, save_checkpoint, stored_dtype


def opened(parent: Path, what: str) -> tuple[PreTrainedModel, torch.dtype]:
    """The model of a dense checkpoint in float32, and the dtype that it is stored in.

    Raises:
        ValueError: ``what`` (a step) changes dense weights, but it is quantized, needs more than its weights to be run, or is not finite.
    """
    require_dense(parent, what)
    model = load_dense(parent, dtype=torch.float32)
    check_finite(model.state_dict().items())
    return model, stored_dtype(parent)


def written(model: PreTrainedModel, parent: Path, out: Path) -> None:
    """Write ``model`` with the tokenizer of its parent."""
    save_checkpoint(model, parent, out)
