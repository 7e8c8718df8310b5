"""A packed checkpoint as it is stored, of compressed-tensors or in our own layout: dense tensors, and weights that stay packed. Not here: what runs them."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from compressed_tensors.utils.match import match_name
from safetensors import safe_open
from torch import Tensor

from assay.ops.models.dense import read_config, weight_files
from assay.ops.quantize.grid import Format
from assay.ops.quantize.layout import Packed, from_tensors, read_grid
from assay.ops.quantize.write import OWN

NAMES = {"bfloat16", "float16", "float32"}


class Stored(NamedTuple):
    """The tensors of a checkpoint by name, and its packed weights by the name of their layer."""

    dense: dict[str, Tensor]
    packed: dict[str, Packed]


def read_weights(directory: Path) -> Stored:
    """Everything that a checkpoint stores.

    Raises:
        FileNotFoundError: no checkpoint in ``directory``.
        ValueError: a quantization that is not known here.
    """
    require_known(directory)
    tensors: dict[str, Tensor] = {}
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    quantization = read_config(directory).get("quantization_config")
    if not quantization:
        return Stored(tensors, {})
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        parts[layer][part] = tensor
    own = quantization.get("quant_method") == OWN
    scaled = [layer for layer, found in parts.items() if any(part.startswith("weight_scale") for part in found)]
    layers = {layer: parts[layer] for layer in (quantization["layers"] if own else scaled) if layer in parts}  # an early exit has fewer
    packed, used = {}, set()
    for layer, found in layers.items():
        mine = {part: tensor for part, tensor in found.items() if part == "weight" or part.startswith("weight_")}
        if own:
            packed[layer] = from_tensors(mine, quantization["kinds"][quantization["layers"][layer]])
        else:
            packed[layer] = read_grid(mine, _format(quantization, layer, found))
        used |= {f"{layer}.{part}" for part in (*mine, "input_scale", "input_zero_point")}
    return Stored({name: tensor for name, tensor in tensors.items() if name not in used}, packed)


def require_known(directory: Path) -> None:
    """Refuse a quantization that cannot be read, by its config alone.

    Raises:
        FileNotFoundError: no checkpoint in ``directory``.
        ValueError: names the quantization and those that are known.
    """
    quantization = read_config(directory).get("quantization_config")
    if quantization and quantization.get("quant_method") not in ("compressed-tensors", OWN):
        raise ValueError(
            f"{directory} is quantized by {quantization.get('quant_method')!r}; dense and compressed-tensors checkpoints, and those in Assay's own layout, "
            "can be opened. Dequantize it with its own library and save it again"
        )
    for group in (quantization or {}).get("config_groups", {}).values():
        weights = group.get("weights") or {}
        if weights.get("type") not in ("int", "float") or (weights["type"] == "float" and weights.get("num_bits") not in (4, 8)):
            raise ValueError(
                f"{directory} stores weights as {weights.get('type')} of {weights.get('num_bits')} bits; integers of 2 to 8 bits, float8 and float4 are known"
            )


def _format(quantization: Mapping[str, Any], layer: str, found: Mapping[str, Tensor]) -> Format:
    """The format of a layer by the group that names it, or else by the one that names its class."""
    groups = list(quantization["config_groups"].values())
    named = [group for group in groups if any(match_name(layer, target) for target in group["targets"])]
    weights = (named or groups)[0]["weights"]
    bits, size = weights["num_bits"], weights.get("group_size")
    scale = found["weight_scale"]
    dtype = str(scale.dtype).removeprefix("torch.")
    rows_each = 1
    if weights["strategy"] == "block":
        rows_each, size = weights["block_structure"]
    group = {"channel": -1, "tensor": 0}.get(weights["strategy"], size or -1)
    if weights["type"] == "int":
        return Format("int", bits, group, symmetric=weights["symmetric"], scale=dtype if dtype in NAMES else "bfloat16")
    element = "e2m1" if bits == 4 else "e4m3"
    stored = "e8m0" if dtype == "uint8" else "e4m3" if dtype == "float8_e4m3fn" else dtype
    return Format(element, bits, group, rows_each, scale=stored)
