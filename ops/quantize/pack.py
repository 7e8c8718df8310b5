"""Rounded weights as files: the pack-quantized format of compressed-tensors, written through its library.

Not here: rounding (``grid.py``), or opening a checkpoint (``ops/models/checkpoint.py``).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.base import compress_module
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStatus
from jaxtyping import Int8, Int32
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from assay.ops.models import structure
from assay.ops.models.dense import check_finite, write_tokenizer, write_weights
from assay.ops.quantize.grid import Quantized, dequantize

FORMAT = "pack-quantized"


def pack(codes: Int8[Tensor, "rows cols"], *, bits: int, along_rows: bool = False) -> Int32[Tensor, "packed_rows packed_cols"]:
    """Signed codes of ``bits`` bits side by side in 32-bit words, ⌈cols·bits/32⌉ a row, nothing between them.

    Args:
        along_rows: pack down the columns instead, as the format does for zero points.
    """
    return pack_to_int32(codes, bits, packed_dim=0 if along_rows else 1)


def unpack(
    packed: Int32[Tensor, "packed_rows packed_cols"], *, bits: int, shape: tuple[int, int], along_rows: bool = False
) -> Int8[Tensor, "rows cols"]:
    """The codes that :func:`pack` was given, of ``shape``."""
    if along_rows:  # turned here: of a single row of words, the library's own turn has strides that its view of bytes refuses
        turned = packed.T.clone(memory_format=torch.contiguous_format)
        return unpack_from_int32(turned, bits, torch.Size(shape[::-1])).T
    return unpack_from_int32(packed, bits, torch.Size(shape))


def stored_bytes(quantized: Quantized, *, bits: int) -> int:
    """Bytes of packed codes, scales and packed zero points: what bits per weight are counted from."""
    codes, scales, zeros = quantized
    rows, cols = codes.shape
    words = rows * -(-cols * bits // 32) + (0 if zeros is None else -(-rows * bits // 32) * zeros.shape[1])
    return 4 * words + scales.nbytes


@torch.no_grad()
def save_packed(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | Path | None,
    directory: Path,
    layers: Mapping[str, Quantized],
    *,
    bits: int,
    group_size: int,
    symmetric: bool,
) -> dict[str, Any]:
    """Write ``model`` with the named layers packed; the same input gives the same bytes. The model itself is left packed, unfit to run.

    Args:
        tokenizer: to be saved, or the directory of a checkpoint whose tokenizer files are copied unchanged, or none.
        layers: codes by module name, all of the same ``bits``, ``group_size`` and ``symmetric``.
    Returns:
        ``bits_per_weight`` of the packed layers (codes, scales and zero points), their weights and bytes, and how the file opens.
    Raises:
        ValueError: a tensor that would be written is not finite (named).
    """
    modules = {name: model.get_submodule(name) for name in layers}
    scheme = QuantizationScheme(
        targets=sorted({type(module).__name__ for module in modules.values()}),
        weights=QuantizationArgs(
            num_bits=bits, type="int", symmetric=symmetric, strategy="channel" if group_size == -1 else "group",  # type: ignore[arg-type]
            group_size=None if group_size == -1 else group_size,
        ),
    )  # fmt: skip
    tied = structure.is_tied(model)
    head_name = structure.head(model)[0]
    whole = {f"{name}.weight" for name in layers}
    check_finite((name, tensor) for name, tensor in model.state_dict().items() if name not in whole)
    check_finite((f"{name}.weight_scale", quantized.scales) for name, quantized in layers.items())
    for module in modules.values():
        module.quantization_scheme = scheme  # type: ignore[assignment]
        module.quantization_status = QuantizationStatus.FROZEN  # type: ignore[assignment]
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format=FORMAT)
    for name, module in modules.items():
        quantized = layers[name]
        zeros = torch.zeros_like(quantized.scales, dtype=torch.int8) if quantized.zeros is None else quantized.zeros
        # The library rounds w / s again: in float32 and on exact multiples of s that returns the very codes.
        module.weight = nn.Parameter(dequantize(quantized), requires_grad=False)
        module.weight_scale = nn.Parameter(quantized.scales.float(), requires_grad=False)
        module.weight_zero_point = nn.Parameter(zeros, requires_grad=False)
        compress_module(module, FORMAT)  # type: ignore[arg-type]
        module.weight_scale = nn.Parameter(quantized.scales, requires_grad=False)
    assert compressor.quantization_config is not None
    compressor.quantization_config.quantization_status = QuantizationStatus.COMPRESSED
    state = model.state_dict()
    if tied and structure.embedding(model)[0] in layers:
        state.pop(f"{head_name}.weight", None)  # one tensor, stored once: packed under the embedding's name
    write_tokenizer(tokenizer, directory)
    write_weights(model, directory, state)
    compressor.update_config(str(directory))
    plain = symmetric and all(isinstance(module, nn.Linear) for module in modules.values())
    (Path(directory) / "README.md").write_text(_readme(bits, group_size, symmetric, plain))
    weights = sum(quantized.codes.numel() for quantized in layers.values())
    packed = sum(stored_bytes(quantized, bits=bits) for quantized in layers.values())
    return {"bits_per_weight": 8 * packed / weights, "packed_weights": weights, "packed_bytes": packed, "opens_plainly": plain}


def _readme(bits: int, group_size: int, symmetric: bool, plain: bool) -> str:
    groups = "one scale a row" if group_size == -1 else f"one scale for {group_size} weights of a row"
    kind = "symmetric" if symmetric else "asymmetric, with an integer zero point"
    dequantized = (
        "AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16,\n"
        "                                     quantization_config=CompressedTensorsConfig(dequantize=True))"
    )
    if plain:
        how = f"""```python
AutoModelForCausalLM.from_pretrained(directory)
```

opens it; compressed-tensors unpacks the weights at the first forward pass. To have dense weights at once:

```python
{dequantized}
```
"""
    else:
        why = "packed zero points" if not symmetric else "a packed embedding"
        how = f"""transformers 5.24 with compressed-tensors 0.20 does not open {why} by a plain `from_pretrained`; this opens it, dequantized:

```python
{dequantized}
```
"""
    return f"""# A packed checkpoint

Integers of {bits} bits, {kind}, {groups} in bfloat16, in the `pack-quantized` format of compressed-tensors.
A weight is scale × (code − zero point). The layers left as they were are in `config.json` under `quantization_config.ignore`.

{how}
In bfloat16 every way gives the same weights, bit for bit. With `dequantize=True` and `dtype=torch.float32` the products are still rounded
to bfloat16, the dtype of the scales; a plain `from_pretrained` in float32 keeps them exact.
"""
