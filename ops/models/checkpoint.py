"""Any checkpoint of ours as a model with dense weights: normal ones as they are, quantized ones dequantized exactly.

Not here: writing quantized checkpoints (``ops/quantize/write.py``) or changing weights.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from assay.ops.models.dense import (
    load_dense,
    load_tokenizer,
    move,
    quiet,
    read_config,
    require_complete,
    save_checkpoint,
    stored_dtype,
    weights_path,
)
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
    directory, dtype = Path(directory), dtype or stored_dtype(directory)
    stored = read_weights(directory)
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    delattr(config, "quantization_config")
    weights = {layer: weight.dense().to(dtype) for layer, weight in stored.packed.items()}
    state = stored.dense | fuse(weights) | {f"{layer}.weight": weight for layer, weight in weights.items() if ".experts." not in layer}
    with quiet():
        model, info = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(  # type: ignore[union-attr]
            None, config=config, state_dict=state, dtype=dtype, attn_implementation="sdpa", output_loading_info=True,
            ignore_mismatched_sizes=True,
        )  # fmt: skip
        if (directory / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    require_complete(info, directory)
    return _begin(move(model, device=device).eval(), said)


def _begin(model: PreTrainedModel, said: dict[str, Any]) -> PreTrainedModel:
    """Let ``model`` run what the config of its checkpoint says must run beside the weights; most need nothing."""
    start(model, runtime_of(said))
    return model
