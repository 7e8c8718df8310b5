"""A model with packed weights as a checkpoint: in compressed-tensors wherever it has the formats, else in our own layout. Not here: opening one (``read.py``).

Our own layout has the same tensors under the same names (``layout.py``); its ``quantization_config`` has the method ``assay`` and says the format of each
layer. What must run beside the weights, such as rounded activations, is in ``config.json`` under ``assay``.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from compressed_tensors.config import CompressionFormat
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, QuantizationStatus
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from assay.ops.models import structure
from assay.ops.models.dense import OWN_FILE, RUNTIME_KEY, check_finite, keep_greedy, quiet, write_tokenizer
from assay.ops.quantize.activations import Activations
from assay.ops.quantize.grid import Format, Quantized
from assay.ops.quantize.layout import Packed, kind_of, nbytes, tensors
from assay.ops.quantize.runtime import Runtime, describe
from assay.ops.quantize.semi_structured import SemiStructuredCodes

OWN = "assay"  # the method of our own layout
PLAIN = """```python
AutoModelForCausalLM.from_pretrained(directory)
```

opens it; compressed-tensors unpacks the weights at the first forward pass.
"""
DTYPES = """In bfloat16 every way gives the same weights, bit for bit. With `dequantize=True` and `dtype=torch.float32` the products are still rounded
to bfloat16, the dtype of the scales; a plain `from_pretrained` in float32 keeps them exact.
"""
ROUNDED = """A plain `from_pretrained` rounds activations as Assay does; in bfloat16 it also computes their scales in bfloat16, in float32 exactly. The
formats mxfp4, mxfp8 and nvfp4 it opens in bfloat16 alone.
"""


class Scheme(NamedTuple):
    """What compressed-tensors calls a format: the name of its compressor and the arguments of its weights."""

    format: str
    weights: dict[str, Any]


def scheme_of(format: Format, *, rounds_inputs: bool = False) -> Scheme | None:
    """``format`` in the words of compressed-tensors; None where it has none, as for groups of columns that are not contiguous (since 0.20).

    Args:
        rounds_inputs: activations are rounded as well, which it stores in another way.
    """
    strategy = {-1: "channel", 0: "tensor"}.get(format.group_size, "group")
    size = format.group_size if format.group_size > 0 else None
    if format.block_rows > 1:
        strategy, size = "block", None
    weights: dict[str, Any] = {"num_bits": format.bits, "symmetric": format.symmetric, "strategy": strategy, "group_size": size}
    if format.element == "int" and strategy != "block":
        whole = format.bits == 8 and rounds_inputs
        return Scheme("int-quantized" if whole else "pack-quantized", {**weights, "type": "int"})
    if format.element == "e4m3" and format.scale == "e8m0" and size == 32:
        return Scheme("mxfp8-quantized", {**weights, "type": "float", "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"})
    if format.element == "e4m3" and format.scale != "e8m0":
        if strategy == "block":
            weights["block_structure"] = [format.block_rows, format.group_size]
        return Scheme("float-quantized" if rounds_inputs else "naive-quantized", {**weights, "type": "float"})
    if format.element == "e2m1" and format.scale == "e4m3" and size == 16:
        kinds = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
        return Scheme("nvfp4-pack-quantized", {**weights, "type": "float", "strategy": "tensor_group", **kinds})
    if format.element == "e2m1" and format.scale == "e8m0" and size == 32:
        return Scheme("mxfp4-pack-quantized", {**weights, "type": "float", "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"})
    return None


@torch.no_grad()
def save_packed(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | Path | None,
    directory: Path,
    layers: Mapping[str, Packed],
    *,
    runtime: Runtime | None = None,
) -> dict[str, Any]:
    """Write ``model`` with the named layers packed; the same input gives the same bytes. The model is left as it is.

    Args:
        tokenizer: to be saved, or the directory of a checkpoint whose tokenizer files are copied unchanged, or none.
        layers: what the weights are stored as, by module name (of an expert: see ``ops/models/experts.py``).
        runtime: what must run beside the weights.
    Returns:
        ``bits_per_weight`` of the packed layers (codes, scales and zero points), their weights and bytes, and how the file opens.
    Raises:
        ValueError: a tensor that would be written is not finite (named).
    """
    runtime = runtime or Runtime()
    state = _dense_state(model, layers)
    check_finite(state.items())
    packed: dict[str, Tensor] = {}
    size = 0
    for name, weight in layers.items():
        rounded = runtime.activations.get(name)
        parts = tensors(weight, whole_bytes=rounded is not None and rounded.format == "int8")
        packed |= {f"{name}.{part}": tensor for part, tensor in parts.items()}
        size += nbytes(parts)
        if rounded is not None and rounded.scale is not None:
            packed[f"{name}.input_scale"] = rounded.scale.clone()  # layers may share one
    check_finite((name, tensor) for name, tensor in packed.items() if tensor.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2))
    config = _config(model, layers, runtime)
    write_tokenizer(tokenizer, directory)
    _write(model, directory, state | packed, config, runtime)
    weights = sum(weight.shape[0] * weight.shape[1] for weight in layers.values())
    plain = _opens_plainly(model, layers, config)
    (Path(directory) / "README.md").write_text(_readme(layers, config, runtime, plain))
    return {
        "bits_per_weight": 8 * size / weights, "packed_weights": weights, "packed_bytes": size, "layout": config["quant_method"], "opens_plainly": plain,
    }  # fmt: skip


def _dense_state(model: PreTrainedModel, layers: Mapping[str, Packed]) -> dict[str, Tensor]:
    """What stays dense, each storage once, under the names of the model in memory."""
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    gone = {f"{name}.weight" for name in layers}
    fused = {name.rpartition(".experts.")[0] + ".experts." for name in layers if ".experts." in name}
    for name, tensor in model.state_dict().items():
        expert = any(name.startswith(prefix) for prefix in fused)
        if name in gone or expert or structure.storage(tensor) in seen:
            seen.add(structure.storage(tensor))
            continue
        seen.add(structure.storage(tensor))
        state[name] = tensor.contiguous()
    return state


def _config(model: PreTrainedModel, layers: Mapping[str, Packed], runtime: Runtime) -> dict[str, Any]:
    modules = dict(model.named_modules())
    by_scheme: dict[str, list[str]] = defaultdict(list)
    schemes: dict[str, Scheme] = {}
    inputs: dict[str, QuantizationArgs | None] = {}
    for name, weight in layers.items():
        rounded = runtime.activations.get(name)
        if not isinstance(weight, Quantized) or weight.order is not None:
            return _own_config(layers)
        found = scheme_of(weight.format, rounds_inputs=rounded is not None)
        if found is None or name not in modules or runtime.online or (rounded and not _sayable(rounded)):
            return _own_config(layers)
        key = f"{found} {rounded and _inputs(rounded)}"
        by_scheme[key].append(name)
        schemes[key], inputs[key] = found, _inputs(rounded) if rounded else None
    kinds = {type(modules[name]) for name in layers}
    others = [name for name, module in modules.items() if type(module) in kinds and name not in layers]
    groups = {}
    for index, (key, names) in enumerate(by_scheme.items()):
        targets = sorted({type(modules[name]).__name__ for name in names}) if len(by_scheme) == 1 else names
        weights, format = QuantizationArgs(**schemes[key].weights), CompressionFormat(schemes[key].format)
        groups[f"group_{index}"] = QuantizationScheme(targets=targets, weights=weights, input_activations=inputs[key], format=format)
    formats = {scheme.format for scheme in schemes.values()}
    config = QuantizationConfig(
        config_groups=groups, format=formats.pop() if len(formats) == 1 else "mixed-precision",
        quantization_status=QuantizationStatus.COMPRESSED, ignore=others,
    )  # fmt: skip
    return config.model_dump(mode="json")


def _sayable(how: Activations) -> bool:
    """Whether compressed-tensors has words for it: it keeps the whole range of every token, and zero points of static ranges are not written."""
    return how.clip == 1 and (how.per == "token" or how.symmetric)


def _inputs(how: Activations) -> QuantizationArgs:
    kind = "float" if how.format.startswith("fp8") else "int"
    bits = 4 if how.format == "int4" else 8
    return QuantizationArgs(num_bits=bits, type=kind, symmetric=how.symmetric, strategy=how.per, dynamic=how.per == "token")  # type: ignore[arg-type]


def _own_config(layers: Mapping[str, Packed]) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = []
    places = {}
    for name, packed in layers.items():
        kind = kind_of(packed)
        if kind not in kinds:
            kinds.append(kind)
        places[name] = kinds.index(kind)
    return {"quant_method": OWN, "kinds": kinds, "layers": places}


def _write(model: PreTrainedModel, directory: Path, state: dict[str, Tensor], quantization: dict[str, Any], runtime: Runtime) -> None:
    directory = Path(directory)
    with quiet():
        model.config.save_pretrained(directory)
        if model.generation_config is not None:
            keep_greedy(model)
            model.generation_config.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = [type(model).__name__]
    config["quantization_config"] = quantization
    if runtime:
        config[RUNTIME_KEY] = describe(runtime)
    (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    weights = directory / (OWN_FILE if quantization["quant_method"] == OWN else "model.safetensors")
    save_file(state, weights, metadata={"format": "pt"})
    weights.chmod((directory / "config.json").stat().st_mode)


def _opens_plainly(model: PreTrainedModel, layers: Mapping[str, Packed], config: dict[str, Any]) -> bool:
    """Whether ``AutoModelForCausalLM.from_pretrained(directory)`` opens it as it is meant, as far as transformers 5.24 goes (tested)."""
    if config["quant_method"] == OWN:
        return False
    modules = dict(model.named_modules())
    linear = all(isinstance(modules.get(name), nn.Linear) for name in layers)
    kinds = [(group["format"], group["weights"]) for group in config["config_groups"].values()]
    packed_zeros = any(kind == "pack-quantized" and not weights["symmetric"] and weights["strategy"] != "tensor" for kind, weights in kinds)
    return linear and not packed_zeros


def _readme(layers: Mapping[str, Packed], config: dict[str, Any], runtime: Runtime, plain: bool) -> str:
    kinds = sorted({_said(weight) for weight in layers.values()})
    own = config["quant_method"] == OWN
    layout = "our own layout" if own else f"the `{config['format']}` format of compressed-tensors"
    several = not own and len(config["config_groups"]) > 1
    dequantized = """```python
AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16,
                                     quantization_config=CompressedTensorsConfig(dequantize=True))
```
"""
    if own:
        how = [
            "Only Assay opens it: `assay.ops.models.checkpoint.load_model(directory)` gives a transformers model with dense weights.\n",
            f"Its weights are in `{OWN_FILE}`, so that transformers, which would begin with random ones, finds none.\n",
        ]
    elif plain:
        how = [PLAIN]
    else:
        what = "transformers 5.24 with compressed-tensors 0.20 does not open packed zero points or a packed embedding by a plain `from_pretrained`"
        how = [f"{what}.\n" if several else f"{what}; this\nopens it, dequantized:\n\n{dequantized}"]
    if several and not plain:
        how += [
            "Nor does `dequantize=True`, which knows one format a checkpoint; `assay.ops.models.checkpoint.load_model(directory)` opens it.\n"
        ]
    elif several:
        how += ["`dequantize=True` does not, since it knows one format a checkpoint.\n"]
    elif plain and runtime:
        how += [f"The weights alone, without rounded activations:\n\n{dequantized}"]
    elif plain:
        how += [f"To have dense weights at once:\n\n{dequantized}", DTYPES]
    if runtime.activations and not own:
        how += [ROUNDED if plain else "Activations are to be rounded too, which only Assay does then.\n"]
    if runtime:
        how += [f"What runs beside the weights (rounded activations, rotations) is in `config.json` under `{RUNTIME_KEY}`.\n"]
    lines, explained = "".join(f"- {kind}\n" for kind in kinds), "\n".join(how)
    return f"""# A packed checkpoint

Weights in {layout}:

{lines}
A weight is (the value of its code − its zero point) × its scale. The layers left as they were are in `config.json` under
`quantization_config`.

{explained}"""


def _said(packed: Packed) -> str:
    """How a weight is stored, in a sentence."""
    if isinstance(packed, SemiStructuredCodes):
        return f"2:4 of {_said(packed.quantized())}"
    if not isinstance(packed, Quantized):
        return packed.form
    format = packed.format
    shares = {-1: "one scale a row", 0: "one scale for the whole weight"}.get(
        format.group_size, f"one scale for {format.group_size} weights of a row"
    )
    if format.block_rows > 1:
        shares = f"one scale for each block of {format.block_rows} × {format.group_size}"
    zero = "" if format.symmetric else ", with an integer zero point"
    return f"{format.name}, {shares} ({format.scale}{', itself in eight bits' if format.nested else ''}){zero}"
