"""The weights of a decoder as they are stored: packed integers stay integers. Not here: what runs them (``forward``, ``assay.kernels``).

Names are those of transformers' checkpoints of the families in ``architecture``.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from assay.ops.decode.architecture import Architecture, architecture, require_family
from assay.ops.models.dense import read_config, weight_files
from assay.ops.quantize.grid import Quantized, dequantize
from assay.ops.quantize.pack import unpack


class Matrix(NamedTuple):
    """One linear map y = W x + b. ``weight`` is W [out, in] in a float dtype, or its ``bits``-bit codes with scales [out, groups]."""

    weight: Tensor | Quantized
    bias: Float[Tensor, " out"] | None = None
    bits: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = (self.weight.codes if isinstance(self.weight, Quantized) else self.weight).shape
        return rows, cols

    @property
    def form(self) -> str:
        """How the weight is stored: ``bfloat16``, ``float32``, ``int4``, …"""
        return f"int{self.bits}" if isinstance(self.weight, Quantized) else str(self.weight.dtype).removeprefix("torch.")

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        """The weight in a float dtype; codes are multiplied out in float32 first."""
        return (dequantize(self.weight) if isinstance(self.weight, Quantized) else self.weight).to(dtype)


class Mlp(NamedTuple):
    """down(activation(gate x) * up x)."""

    gate: Matrix
    up: Matrix
    down: Matrix


class Block(NamedTuple):
    """One block. ``mlps`` has one entry, or one an expert with the ``router`` [experts, hidden] that chooses among them."""

    attention_norm: Tensor
    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix
    q_norm: Tensor | None
    k_norm: Tensor | None
    after_attention_norm: Tensor | None
    mlp_norm: Tensor
    after_mlp_norm: Tensor | None
    router: Tensor | None
    mlps: tuple[Mlp, ...]


class Weights(NamedTuple):
    """A whole decoder. A tied head is the same object as the embedding."""

    embedding: Matrix
    blocks: tuple[Block, ...]
    norm: Tensor
    head: Matrix

    @property
    def forms(self) -> str:
        """The forms of the linear maps, most weights first, such as ``int4+bfloat16``."""
        sizes: dict[str, int] = {}
        for matrix in self.matrices():
            sizes[matrix.form] = sizes.get(matrix.form, 0) + matrix.shape[0] * matrix.shape[1]
        return "+".join(sorted(sizes, key=lambda form: (-sizes[form], form)))

    def matrices(self) -> list[Matrix]:
        """Every linear map that a token passes, the head included."""
        found = [matrix for block in self.blocks for matrix in (block.q, block.k, block.v, block.o)]
        found += [matrix for block in self.blocks for mlp in block.mlps for matrix in mlp]
        return [*found, self.head]


def open_weights(directory: Path) -> tuple[Architecture, Weights]:
    """Read a checkpoint of ours: dense, or packed by ``ops/quantize/pack.py``, whose integers are kept.

    Raises:
        FileNotFoundError: no checkpoint in ``directory``.
        ValueError: a family that the engine does not run, a quantization that it does not read, or weights missing or left over.
    """
    config = read_config(directory)
    require_family(config)
    bits = _bits(config.get("quantization_config"), directory)
    stored: dict[str, Tensor] = {}
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            stored |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    shape = architecture(AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False))
    try:
        return shape, assemble(shape, stored, bits=bits)
    except ValueError as error:
        error.add_note(f"in {directory}")
        raise


def weights_of(model: Any) -> tuple[Architecture, Weights]:
    """The same of a transformers model in memory, whose tensors are shared, not copied."""
    config = model.config.get_text_config(decoder=True)
    shape = architecture(config)
    return shape, assemble(shape, {name: tensor.detach() for name, tensor in model.state_dict().items()}, bits=None)


def assemble(shape: Architecture, stored: Mapping[str, Tensor], *, bits: int | None) -> Weights:
    """Put the stored tensors where they belong, each once.

    Args:
        bits: of the packed ones.
    Raises:
        ValueError: some are missing, or left over.
    """
    unused = set(stored)

    def take(name: str) -> Tensor:
        if name not in stored:
            raise ValueError(f"{name} is missing; the checkpoint holds {len(stored)} tensors, such as {', '.join(sorted(stored)[:3])}")
        unused.discard(name)
        return stored[name]

    def matrix(name: str) -> Matrix:
        bias = take(f"{name}.bias") if f"{name}.bias" in stored else None
        if f"{name}.weight_packed" not in stored:
            return Matrix(take(f"{name}.weight"), bias)
        assert bits is not None
        rows, cols = take(f"{name}.weight_shape").tolist()
        scales = take(f"{name}.weight_scale")
        codes = unpack(take(f"{name}.weight_packed"), bits=bits, shape=(rows, cols))
        zeros = None
        if f"{name}.weight_zero_point" in stored:
            zeros = unpack(take(f"{name}.weight_zero_point"), bits=bits, shape=(rows, scales.shape[1]), along_rows=True)
        return Matrix(Quantized(codes, scales, zeros), bias, bits)

    embedding = matrix("model.embed_tokens")
    blocks = tuple(_block(shape, f"model.layers.{index}", take, matrix, stored) for index in range(len(shape.layers)))
    norm = take("model.norm.weight")
    own_head = "lm_head.weight" in stored or "lm_head.weight_packed" in stored
    if not shape.tied and not own_head:
        raise ValueError("lm_head.weight is missing, and the config does not tie the head to the embedding")
    head = embedding
    if own_head:
        found = matrix("lm_head")
        head = embedding if shape.tied and _same(found, embedding) else found
    left = sorted(name for name in unused if not name.endswith("rotary_emb.inv_freq"))
    if left:
        raise ValueError(f"{len(left)} tensors belong to no part of a {shape.family} decoder: {', '.join(left[:3])}")
    return Weights(embedding, blocks, norm, head)


def _block(
    shape: Architecture, prefix: str, take: Callable[[str], Tensor], matrix: Callable[[str], Matrix], stored: Mapping[str, Tensor]
) -> Block:
    attention = f"{prefix}.self_attn"
    router, mlps = None, ()
    if not shape.experts:
        mlps = (Mlp(*(matrix(f"{prefix}.mlp.{part}_proj") for part in ("gate", "up", "down"))),)
    elif f"{prefix}.mlp.experts.gate_up_proj" in stored:  # as transformers keeps them in memory
        router = take(f"{prefix}.mlp.gate.weight")
        both, down = take(f"{prefix}.mlp.experts.gate_up_proj"), take(f"{prefix}.mlp.experts.down_proj")
        mlps = tuple(Mlp(*map(Matrix, (*both[expert].chunk(2), down[expert]))) for expert in range(shape.experts))
    else:
        moe = f"{prefix}.block_sparse_moe"
        router = take(f"{moe}.gate.weight")
        mlps = tuple(Mlp(*(matrix(f"{moe}.experts.{expert}.{part}") for part in ("w1", "w3", "w2"))) for expert in range(shape.experts))
    after = "pre_feedforward_layernorm" if shape.sandwich else "post_attention_layernorm"
    return Block(
        attention_norm=take(f"{prefix}.input_layernorm.weight"),
        q=matrix(f"{attention}.q_proj"),
        k=matrix(f"{attention}.k_proj"),
        v=matrix(f"{attention}.v_proj"),
        o=matrix(f"{attention}.o_proj"),
        q_norm=take(f"{attention}.q_norm.weight") if shape.qk_norm else None,
        k_norm=take(f"{attention}.k_norm.weight") if shape.qk_norm else None,
        after_attention_norm=take(f"{prefix}.post_attention_layernorm.weight") if shape.sandwich else None,
        mlp_norm=take(f"{prefix}.{after}.weight"),
        after_mlp_norm=take(f"{prefix}.post_feedforward_layernorm.weight") if shape.sandwich else None,
        router=router,
        mlps=mlps,
    )


def _same(one: Matrix, other: Matrix) -> bool:
    """Whether two dense matrices are one tensor, in memory or by value."""
    if isinstance(one.weight, Quantized) or isinstance(other.weight, Quantized):
        return False
    return one.weight.data_ptr() == other.weight.data_ptr() or one.weight.equal(other.weight)


def _bits(quantization: dict[str, Any] | None, directory: Path) -> int | None:
    if not quantization:
        return None
    groups = quantization.get("config_groups", {}).values()
    widths = {group["weights"]["num_bits"] for group in groups}
    ordered = any(group["weights"].get("actorder") for group in groups)
    if quantization.get("format") != "pack-quantized" or len(widths) != 1 or ordered:
        raise ValueError(
            f"{directory} is quantized as {quantization.get('quant_method')}/{quantization.get('format')} in {sorted(widths)} bits; the engine runs "
            "dense checkpoints and pack-quantized ones of one width without activation order"
        )
    return widths.pop()
