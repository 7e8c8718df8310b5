"""A model's own beginning as a smaller model: its first blocks under its own final norm and head, which makes a draft that needs no training.

Not here: choosing blocks (``ops/prune/depth.py``), or training what is left (``ops/train/draft.py``).
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from assay.ops.models import structure
from assay.ops.models.dense import RUNTIME_KEY, read_config, weight_files, write_tokenizer
from assay.ops.prune.depth import drop_layers

WEIGHTS = "model.safetensors"


def early_exit(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Keep the first ``layers`` blocks, in place; embedding, final norm and head stay. With all of them nothing changes.

    Raises:
        ValueError: ``layers`` is not between 1 and the number of blocks.
    Source:
        The static form of Elhoushi et al. 2024 (LayerSkip), arXiv:2404.16710, without their training for early exits.
    """
    total = len(structure.blocks(model))
    if not 1 <= layers <= total:
        raise ValueError(
            f"the first {layers} blocks of a model of {total}; 1 to {total} can be taken, and fewer than all make a smaller model"
        )
    drop_layers(model, range(layers, total))
    return model


def write_early_exit(parent: Path, out: Path, layers: int) -> dict[str, Any]:
    """Write the first ``layers`` blocks of a checkpoint as a checkpoint, stored tensors bit for bit: a packed one stays packed.

    Args:
        out: an existing directory.
    Returns:
        ``layers``, ``layers_before``, and the tensors that were kept.
    Raises:
        FileNotFoundError: ``parent`` is no checkpoint.
        ValueError: ``layers`` is out of range, or a config that cannot describe what is left.
    """
    stored = read_config(parent)
    files = weight_files(parent)
    config = AutoConfig.from_pretrained(parent, local_files_only=True, trust_remote_code=False)
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    with torch.device("meta"):  # the architecture alone: where its blocks are, and what its config says of fewer
        model = AutoModelForCausalLM.from_config(config)
    path, before = structure.blocks_path(model), len(structure.blocks(model))
    early_exit(model, layers)
    gone = tuple(f"{path}.{index}." for index in range(layers, before))
    kept = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            kept |= {name: opened.get_tensor(name) for name in opened.keys() if not name.startswith(gone)}  # noqa: SIM118
    cut = {**model.config.to_dict(), **{key: stored[key] for key in ("architectures", "dtype", "quantization_config") if key in stored}}
    rounded = cut.get(RUNTIME_KEY, {}).get("activations")
    if rounded:
        cut[RUNTIME_KEY]["activations"] = {name: how for name, how in rounded.items() if not name.startswith(gone)}
    (out / "config.json").write_text(json.dumps(cut, indent=2, sort_keys=True))
    weights = out / (files[0].name if len(files) == 1 else WEIGHTS)  # the name says who can open it
    save_file(kept, weights, metadata={"format": "pt"})
    weights.chmod((out / "config.json").stat().st_mode)
    write_tokenizer(parent, out)
    if (parent / "generation_config.json").is_file():
        (out / "generation_config.json").write_bytes((parent / "generation_config.json").read_bytes())
    return {"layers": layers, "layers_before": before, "tensors": len(kept)}
