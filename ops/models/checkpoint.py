"""Any checkpoint of ours as a model with dense weights: normal ones as they are, quantized ones dequantized exactly.

Not here: writing quantized checkpoints (``ops/quantize/pack.py``) or changing weights.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig, GenerationConfig, PreTrainedModel
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
    weight_files,
    weights_path,
)
from assay.ops.quantize.grid import Quantized, dequantize
from assay.ops.quantize.pack import unpack

__all__ = ["load_model", "load_tokenizer", "save_checkpoint", "weights_path"]

_PARTS = ("packed", "scale", "zero_point", "shape")  # what a packed weight is stored as


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
    quantization = read_config(directory).get("quantization_config")
    if not quantization:
        return load_dense(directory, dtype=dtype, device=device)
    if quantization.get("quant_method") != "compressed-tensors":
        raise ValueError(
            f"{directory} is quantized by {quantization.get('quant_method')!r}; dense and compressed-tensors checkpoints can be opened. "
            "Dequantize it with its own library and save it again"
        )
    opened = _load_packed if _is_packed(quantization) else _load_by_library
    return move(opened(Path(directory), quantization, dtype), device=device).eval()


def _is_packed(quantization: dict[str, Any]) -> bool:
    groups = quantization["config_groups"].values()
    return quantization.get("format") == "pack-quantized" and all(
        group["weights"]["type"] == "int" and group["weights"].get("actorder") is None for group in groups
    )


def _load_packed(directory: Path, quantization: dict[str, Any], dtype: torch.dtype | None) -> PreTrainedModel:
    widths = {group["weights"]["num_bits"] for group in quantization["config_groups"].values()}
    if len(widths) != 1:
        raise ValueError(f"{directory} is packed in {sorted(widths)} bits; checkpoints of one width can be opened")
    bits = widths.pop()
    stored: dict[str, Tensor] = {}
    for path in weight_files(directory):
        stored |= load_file(path)
    config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    dtype = dtype or stored_dtype(directory)
    delattr(config, "quantization_config")
    packed = {name.removesuffix("_packed") for name in stored if name.endswith(".weight_packed")}
    state = {name: tensor for name, tensor in stored.items() if _weight_of(name) not in packed}
    for weight in sorted(packed):
        rows, cols = stored[f"{weight}_shape"].tolist()
        zeros = stored.get(f"{weight}_zero_point")
        scales = stored[f"{weight}_scale"]
        codes = unpack(stored[f"{weight}_packed"], bits=bits, shape=(rows, cols))
        if zeros is not None:
            zeros = unpack(zeros, bits=bits, shape=(rows, scales.shape[1]), along_rows=True)
        state[weight] = dequantize(Quantized(codes, scales, zeros)).to(dtype)
    with quiet():
        model, info = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(  # type: ignore[union-attr]
            None, config=config, state_dict=state, dtype=dtype, attn_implementation="sdpa", output_loading_info=True,
            ignore_mismatched_sizes=True,
        )  # fmt: skip
        if (directory / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    require_complete(info, directory)
    return model


def _weight_of(name: str) -> str:
    """``….weight`` of ``….weight_scale`` and the other stored parts; other names as they are."""
    return next((name.removesuffix(f"_{part}") for part in _PARTS if name.endswith(f".weight_{part}")), name)


def _load_by_library(directory: Path, quantization: dict[str, Any], dtype: torch.dtype | None) -> PreTrainedModel:
    weight_files(directory)
    with quiet():
        model, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            directory, dtype=dtype or "auto", quantization_config=CompressedTensorsConfig(dequantize=True), attn_implementation="sdpa",
            use_safetensors=True, local_files_only=True, trust_remote_code=False, output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    require_complete(info, directory)
    return model
