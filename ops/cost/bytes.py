"""How many bytes a checkpoint stores and a token of context takes. Not here: what they cost in time.

Read from the headers of the safetensors files; no weight is loaded.
"""

import json
import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "int8": 1}
EMBEDDING_OR_HEAD = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings", "shared")
CODES = ("weight_packed", "weight_values")  # weights themselves; the values of 2:4 are half of them
RANGES = ("input_scale", "input_zero_point", "output_scale")  # of activations


class Stored(NamedTuple):
    """One tensor of a file: ``begin`` and ``end`` are offsets behind the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    file: Path
    data: int  # where the data of the file begin

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin


class ArtifactBytes(NamedTuple):
    """Bytes as stored, split by what they are, and how many weights they hold."""

    size_bytes: int  # the sum of the next four
    code_bytes: int  # weights of linears in blocks, integer codes where quantized
    scale_bytes: int  # scales and zero points of quantized linears in blocks
    embedding_bytes: int  # embeddings and head, with their scales if quantized
    other_bytes: int  # norms, biases, shapes of packed tensors
    weights: int  # numbers that the tensors stand for, scales and zero points not counted
    quantized_weights: int  # of quantized tensors, wherever they are
    quantized_bytes: int  # of those: codes, scales and zero points
    bits_per_weight: float
    quantized_bits_per_weight: float | None  # None where nothing is quantized


def stored_tensors(directory: Path) -> list[Stored]:
    """The tensors of a checkpoint, each name and each storage once; shards that the index does not name are not part of it.

    Raises:
        FileNotFoundError: no safetensors file.
        ValueError: a file is cut short or is no safetensors file.
    """
    index = Path(directory) / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({Path(directory) / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{directory} has no *.safetensors file; expected a checkpoint directory")
    tensors: dict[str, Stored] = {}
    storages: set[tuple[Path, int, int]] = set()
    for file in files:
        for tensor in _header(file):
            storage = (tensor.file, tensor.begin, tensor.end)
            if tensor.name not in tensors and (storage not in storages or not tensor.size_bytes):
                tensors[tensor.name] = tensor
                storages.add(storage)
    return list(tensors.values())


def artifact_bytes(directory: Path) -> ArtifactBytes:
    """What the tensors of the checkpoint in ``directory`` take on disk; headers of files and tokenizers are not counted.

    A tied head is stored once and counted once; zeros of a pruned dense tensor cost what other values cost. Bits per weight are over all tensors,
    scales, zero points and norms included, and over the quantized tensors alone.
    """
    tensors = stored_tensors(directory)
    packed = {tensor.name.rpartition(".")[0] for tensor in tensors if is_shared(tensor.name)}
    sums = dict.fromkeys(("code", "scale", "embedding", "other"), 0)
    weights = quantized_weights = quantized_bytes = 0
    for tensor in tensors:
        module, _, part = tensor.name.rpartition(".")
        quantized = module in packed
        outside = any(word in module.split(".") for word in EMBEDDING_OR_HEAD)
        is_scale = part in RANGES or is_shared(tensor.name)
        is_shape = quantized and part == "weight_shape"
        is_weight = not is_scale and not is_shape
        elements = elements_of(tensor, tensors) if part in CODES else math.prod(tensor.shape)
        weights += elements * is_weight
        if quantized and (part in ("weight", *CODES) or is_shared(tensor.name)):
            quantized_bytes += tensor.size_bytes
            quantized_weights += elements * is_weight
        if outside:
            kind = "embedding"
        elif is_scale:
            kind = "scale"
        elif part in CODES or (is_weight and len(tensor.shape) >= 2):
            kind = "code"
        else:
            kind = "other"
        sums[kind] += tensor.size_bytes
    size = sum(sums.values())
    return ArtifactBytes(
        size, sums["code"], sums["scale"], sums["embedding"], sums["other"], weights, quantized_weights, quantized_bytes,
        8 * size / weights if weights else 0.0, 8 * quantized_bytes / quantized_weights if quantized_weights else None,
    )  # fmt: skip


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, store: str, *, scale_bytes: int = 2) -> int:
    """Bytes that one more token of context takes in the KV cache: 2 · layers · kv_heads · (head_dim · bytes + scale).

    Args:
        store: ``float32``, ``bfloat16``, ``float16``, ``fp8_e4m3`` (unit scale, none stored) or ``int8`` (one scale per token and head, for keys and
            for values).
        scale_bytes: of one int8 scale; our cache keeps them in bfloat16.
    Raises:
        ValueError: a store that is not known.
    """
    if store not in DTYPE_BYTES:
        raise ValueError(f"KV store {store!r} is not known; there are {', '.join(DTYPE_BYTES)}")
    return 2 * layers * kv_heads * (head_dim * DTYPE_BYTES[store] + (scale_bytes if store == "int8" else 0))


def kv_shape(config: Any) -> tuple[int, int, int]:
    """(layers, kv_heads, head_dim) of a transformers config or of its JSON object; layers are those that keep keys and values.

    Source: the names that transformers gives these fields; where ``num_key_value_heads`` or ``head_dim`` is missing, all heads and hidden / heads.
    """
    fields = config if isinstance(config, dict) else config.get_text_config().to_dict()
    fields = fields.get("text_config") or fields
    heads = fields["num_attention_heads"]
    types = fields.get("layer_types")
    layers = sum("attention" in kind and "linear" not in kind for kind in types) if types else fields["num_hidden_layers"]
    return layers, fields.get("num_key_value_heads") or heads, fields.get("head_dim") or fields["hidden_size"] // heads


def is_shared(name: str) -> bool:
    """Whether a tensor is what the codes of a weight share: scales, zero points, signs, code books, columns kept apart."""
    part = name.rpartition(".")[2]
    return part.startswith("weight_") and part not in (*CODES, "weight_shape")


def elements_of(tensor: Stored, tensors: list[Stored]) -> int:
    """Weights in a packed tensor: its ``weight_shape`` says so; without one a byte holds two, and a value of 2:4 stands for itself and a zero."""
    if tensor.name.endswith("weight_values"):
        return 2 * math.prod(tensor.shape)
    name = f"{tensor.name.removesuffix('_packed')}_shape"
    shape = next((other for other in tensors if other.name == name), None)
    if shape is None and tensor.dtype == "U8":
        return 2 * math.prod(tensor.shape)
    if shape is None or shape.dtype not in ("I64", "I32"):
        raise ValueError(f"{tensor.name} in {tensor.file} is packed, but {name} does not say how many weights it holds")
    with shape.file.open("rb") as stream:
        stream.seek(shape.data + shape.begin)
        values = struct.unpack(f"<{math.prod(shape.shape)}{'q' if shape.dtype == 'I64' else 'i'}", stream.read(shape.size_bytes))
    return math.prod(values)


def _header(file: Path) -> list[Stored]:
    size = file.stat().st_size if file.is_file() else 0
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise ValueError(f"{file} is no whole safetensors file: its header would end at byte {8 + length}, the file has {size}")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    found = []
    for name, entry in header.items():
        begin, stop = entry["data_offsets"]
        found.append(Stored(name, entry["dtype"], tuple(entry["shape"]), begin, stop, file, 8 + length))
    end = 8 + length + max((tensor.end for tensor in found), default=0)
    if end > size:
        raise ValueError(f"{file} is cut short: its tensors end at byte {end}, the file has {size}")
    return found
