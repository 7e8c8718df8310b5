"""Any checkpoint of ours as a model with dense weights: normal ones as they are, quantized ones dequantized exactly.

Not here: writing quantized checkpoints (``ops/quantize/write.py``) or changing weights.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from assay.ops.models.dense import from_state, load_dense, load_tokenizer, read_config, save_checkpoint, stored_dtype, weights_path
from assay.ops.models.experts import fuse
from assay.ops.quantize.read import read_weights
from assay.ops.quantize.runtime import runtime_of, start

__all__ = ["load_model", "load_tokenizer", "save_checkpoint", "weights_path"]


def load_model(directory: Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> PreTrainedModel:
    """Open a checkpoint for evaluation: eval mode, SDPA attention, silent, safetensors only, no code from the checkpoint.

    Packed integers are dequantized in float32 and rounded once, to ``dtype``. That equals a plain ``from_pretrained`` wherever that can
    open the file; ``CompressedTensorsConfig(dequantize=True)`` instead multiplies in the dtype of the scales, so in float32 it is off by
    a bfloat16 rounding.

    Args:
        dtype: of the weights in memory; what the checkpoint was made in when None.
    Raises:
        FileNotFoundError: no config or no safetensors in ``directory``.
        ValueError: weights missing, left over or of another shape; or a quantization that is not compressed-tensors.
    """
    said = read_config(directory)
    if not said.get("quantization_config"):
        return _begin(load_dense(directory, dtype=dtype, device=device), said)
    dtype = dtype or stored_dtype(directory)
    stored = read_weights(Path(directory))
    weights = {layer: weight.dense().to(dtype) for layer, weight in stored.packed.items()}
    state = stored.dense | fuse(weights) | {f"{layer}.weight": weight for layer, weight in weights.items() if ".experts." not in layer}
    return _begin(from_state(directory, state, dtype=dtype, device=device), said)


def _begin(model: PreTrainedModel, said: dict[str, Any]) -> PreTrainedModel:
    """Let ``model`` run what the config of its checkpoint says must run beside the weights; most need nothing."""
    start(model, runtime_of(said))
    return model
