"""The tensors that a rounded weight is stored as, by the suffix of their names, and back, bit for bit. Not here: bits in words (``pack.py``), or files.

Where compressed-tensors has the format the tensors are its own; what it lacks (normal floats, three values, e5m2, scales of blocks of integers) is stored
in the same way:

    weight_packed               integers below eight bits in words; e2m1 and nf4 two a byte; three values five a byte
    weight                      what takes a byte anyway: integers of eight bits with rounded activations, e4m3, e5m2
    weight_scale                bfloat16, float16 or float32; of e8m0 the exponent plus 127 as uint8; of NVFP4 e4m3
    weight_global_scale         NVFP4: what the scales are to be divided by
    weight_zero_point           packed down the columns; one of the whole tensor, or beside whole bytes, a byte each
    weight_shape                rows and columns, where they cannot be told from the packed tensor
    weight_g_idx                the group of each column, where groups are not contiguous
    weight_packed, weight_scale, weight_row_signs, weight_col_signs   of the E8 lattice: a 16-bit code for eight weights
    weight_packed, weight_codebooks, weight_scale                     of additive codebooks: a byte a codebook for eight weights
    weight_values, weight_indices   of 2:4 weights: two of each four (of int8 their codes), and where they were in four bits
    weight_kept, weight_columns the columns of a split weight that stay in 16 bits, and which they are
    weight_scale_codes, weight_scale_largest, weight_scale_mean   scales that are stored in eight bits themselves
"""

from collections.abc import Mapping
from typing import Any, assert_never

import torch
from torch import Tensor

from assay.ops.quantize import elements, semi_structured
from assay.ops.quantize.additive import Additive
from assay.ops.quantize.grid import Format, Nested, Quantized, Scales, unnest
from assay.ops.quantize.lattice import Lattice
from assay.ops.quantize.outliers import Split
from assay.ops.quantize.pack import pack, pack_nibbles, pack_trits, unpack, unpack_nibbles, unpack_trits
from assay.ops.quantize.semi_structured import SemiStructured, SemiStructuredCodes

LATTICE = ("weight_packed", "weight_scale", "weight_row_signs", "weight_col_signs")  # the parts of each, in order
ADDITIVE = ("weight_packed", "weight_codebooks", "weight_scale")

Packed = Quantized | Split | Lattice | Additive | SemiStructured | SemiStructuredCodes


def tensors(packed: Packed, *, whole_bytes: bool = False) -> dict[str, Tensor]:
    """What a weight is stored as.

    Args:
        whole_bytes: integers of eight bits as they are, not in words: the form that kernels with rounded activations read.
    """
    match packed:
        case Quantized():
            return _grid(packed, whole_bytes)
        case Lattice():
            parts = dict(zip(LATTICE, packed, strict=True))
            return {**parts, "weight_shape": torch.tensor(packed.shape, dtype=torch.int64)}
        case Additive():
            parts = dict(zip(ADDITIVE, packed, strict=True))
            return {**parts, "weight_shape": torch.tensor(packed.shape, dtype=torch.int64)}
        case SemiStructured():
            return semi_structured.tensors(packed)
        case SemiStructuredCodes(codes, shared, format, order):
            return {**semi_structured.tensors(codes), **_shared(shared, format, order, whole_bytes=True)}
        case Split():
            return {**_grid(packed.rest, whole_bytes), "weight_kept": packed.kept.contiguous(), "weight_columns": packed.columns}
        case _:
            assert_never(packed)


def kind_of(packed: Packed) -> dict[str, Any]:
    """What besides its tensors is needed to read a weight, as JSON: the same for all layers that are stored alike."""
    match packed:
        case Quantized():
            return {"kind": "grid", **packed.format._asdict()}
        case Split():
            return {"kind": "split", **packed.rest.format._asdict()}
        case Lattice():
            return {"kind": "lattice"}
        case Additive():
            return {"kind": "additive"}
        case SemiStructured():
            return {"kind": "2:4"}
        case SemiStructuredCodes():
            return {"kind": "2:4 grid", **packed.format._asdict()}
        case _:
            assert_never(packed)


def from_tensors(stored: Mapping[str, Tensor], kind: Mapping[str, Any]) -> Packed:
    """The weight that :func:`tensors` and :func:`kind_of` were given.

    Raises:
        ValueError: a tensor is missing, or a kind that is not known.
    """
    name, rest = kind["kind"], {key: value for key, value in kind.items() if key != "kind"}
    match name:
        case "grid":
            return read_grid(stored, Format(**rest))
        case "split":
            return Split(read_grid(stored, Format(**rest)), stored["weight_kept"], stored["weight_columns"])
        case "lattice":
            return Lattice(*(stored[part] for part in LATTICE))
        case "additive":
            return Additive(*(stored[part] for part in ADDITIVE))
        case "2:4":
            return semi_structured.from_tensors(stored)
        case "2:4 grid":
            codes = semi_structured.from_tensors(stored)
            whole = read_grid({**stored, "weight": semi_structured.unpack(codes)}, Format(**rest))
            return SemiStructuredCodes(codes, whole.shared, whole.format, whole.order)
        case _:
            raise ValueError(
                f"a weight of kind {name!r} is stored; grid, split, lattice, additive, 2:4 and 2:4 grid are known, and it may be of a newer version"
            )


def stored_bytes(packed: Packed) -> int:
    """Bytes of codes, scales and zero points as they are stored; shapes, which every format could do without, are not counted."""
    return nbytes(tensors(packed))


def nbytes(parts: Mapping[str, Tensor]) -> int:
    """The same of what :func:`tensors` gave."""
    return sum(tensor.nbytes for name, tensor in parts.items() if name != "weight_shape")


def _grid(quantized: Quantized, whole_bytes: bool) -> dict[str, Tensor]:
    codes, shared, format, order = quantized
    found: dict[str, Tensor] = {}
    if format.element in elements.FLOAT8:
        found["weight"] = codes.view(elements.FLOAT8[format.element])
    elif format.element == "int" and format.bits == 8 and whole_bytes:
        found["weight"] = codes
    else:
        found["weight_packed"] = _pack(codes, format)
        found["weight_shape"] = torch.tensor(codes.shape, dtype=torch.int64)
    if format.element in elements.TABLES and codes.shape[1] % 2 == 0:
        del found["weight_shape"]
    return {name: tensor.contiguous() for name, tensor in found.items()} | _shared(shared, format, order, whole_bytes="weight" in found)


def _shared(shared: Scales, format: Format, order: Tensor | None, *, whole_bytes: bool) -> dict[str, Tensor]:
    """What codes share; zero points lie a byte each beside whole bytes, else packed as the codes are."""
    found: dict[str, Tensor] = {}
    if shared.nested is not None:
        found["weight_scale_codes"] = shared.nested.codes.view(torch.uint8)
        found["weight_scale_largest"], found["weight_scale_mean"] = shared.nested.largest, shared.nested.mean
    else:
        scales = shared.scales
        found["weight_scale"] = (scales.log2() + 127).round().to(torch.uint8) if format.scale == "e8m0" else scales
    if format.group_size == 0:
        found["weight_scale"] = found["weight_scale"].reshape(1)  # as compressed-tensors has it, and the zero point with it
    if shared.factor is not None:
        found["weight_global_scale"] = shared.factor
    if shared.zeros is not None:
        whole = whole_bytes or format.group_size == 0
        zeros = shared.zeros.reshape(1) if format.group_size == 0 else shared.zeros
        found["weight_zero_point"] = zeros if whole else pack(zeros, bits=format.bits, along_rows=True)
    if order is not None:
        found["weight_g_idx"] = order.to(torch.int32)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def read_grid(stored: Mapping[str, Tensor], format: Format) -> Quantized:
    """A weight of codes on a grid.

    Raises:
        ValueError: a tensor is missing.
    """
    missing = [name for name in ("weight_scale",) if name not in stored and not format.nested]
    if missing or not ("weight" in stored or "weight_packed" in stored):
        raise ValueError(
            f"a weight in {format.name} needs {', '.join(missing) or 'weight or weight_packed'}; it has {', '.join(sorted(stored))}"
        )
    shape = tuple(stored["weight_shape"].tolist()) if "weight_shape" in stored else None
    codes = stored["weight"].view(torch.int8) if "weight" in stored else _unpack(stored["weight_packed"], format, shape)
    rows, cols = codes.shape
    size = {0: cols, -1: cols}.get(format.group_size, format.group_size)
    blocks = (1 if format.group_size == 0 else rows // format.block_rows, cols // size)
    nested = None
    if format.nested:
        nested = Nested(stored["weight_scale_codes"].view(torch.int8), stored["weight_scale_largest"], stored["weight_scale_mean"])
        scales = unnest(nested, blocks)
    else:
        scales = stored["weight_scale"].reshape(blocks)
        if format.scale == "e8m0":
            scales = torch.ldexp(torch.ones(blocks), scales.to(torch.int32) - 127)
    zeros = stored.get("weight_zero_point")
    if zeros is not None and "weight" not in stored and format.group_size != 0:
        zeros = unpack(zeros, bits=format.bits, shape=blocks, along_rows=True)
    if zeros is not None:
        zeros = zeros.reshape(blocks).contiguous()
    return Quantized(codes, Scales(scales, zeros, stored.get("weight_global_scale"), nested), format, stored.get("weight_g_idx"))


def _pack(codes: Tensor, format: Format) -> Tensor:
    if format.element == "ternary":
        return pack_trits(codes)
    return pack_nibbles(codes) if format.element in elements.TABLES else pack(codes, bits=format.bits)


def _unpack(packed: Tensor, format: Format, shape: tuple[int, ...] | None) -> Tensor:
    if format.element in elements.TABLES:
        return unpack_nibbles(packed, shape[1] if shape else 2 * packed.shape[1])
    if shape is None:
        raise ValueError(f"a weight in {format.name} needs weight_shape to be unpacked")
    rows, cols = shape
    return unpack_trits(packed, cols) if format.element == "ternary" else unpack(packed, bits=format.bits, shape=(rows, cols))
