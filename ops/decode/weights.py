"""The weights of a decoder as they are stored: packed integers stay integers. Not here: what runs them (``forward``, ``assay.kernels``).

Names are those of transformers' checkpoints of the families in ``architecture``.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoConfig

from assay.ops.decode.architecture import Architecture, architecture, require_family
from assay.ops.models.dense import read_config
from assay.ops.quantize.activations import Activations, quantize_activations
from assay.ops.quantize.layout import Packed
from assay.ops.quantize.read import read_weights, require_known
from assay.ops.quantize.rotate import Online
from assay.ops.quantize.runtime import Runtime, numbers, runtime_of


class Matrix(NamedTuple):
    """One linear map y = W x + b. ``weight`` is W [out, in] in a float dtype, or packed."""

    weight: Tensor | Packed
    bias: Float[Tensor, " out"] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.weight.shape
        return rows, cols

    @property
    def form(self) -> str:
        """How the weight is stored: ``bfloat16``, ``float32``, ``int4``, …"""
        return str(self.weight.dtype).removeprefix("torch.") if isinstance(self.weight, Tensor) else self.weight.form

    def dense(self, dtype: torch.dtype) -> Float[Tensor, "out in"]:
        """The weight in a float dtype; codes are multiplied out in float32 first."""
        return (self.weight if isinstance(self.weight, Tensor) else self.weight.dense()).to(dtype)


class Ready(NamedTuple):
    """What is done to an input before matrices read it: a rotation, then rounding."""

    online: Online | None = None
    activations: Activations | None = None

    @property
    def rounding(self) -> str:
        """What inputs are rounded to, for a runner's path."""
        return "" if self.activations is None else self.activations.format

    @property
    def rotation(self) -> str:
        """How they are rotated, for the path."""
        return "" if self.online is None else "online rotations"

    def __call__(self, values: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        values = values if self.online is None else self.online.turn(values)
        return values if self.activations is None else quantize_activations(values, self.activations)


class Before(NamedTuple):
    """The same for each of the four inputs of a block, and ``heads`` for queries and keys after the rotary embedding."""

    qkv: Ready = Ready()
    o: Ready = Ready()
    gate: Ready = Ready()
    down: Ready = Ready()
    heads: Ready = Ready()


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
    before: Before = Before()


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

    @property
    def inputs(self) -> list[str]:
        """What is done to inputs beside the products, for a runner's path."""
        every = [ready for block in self.blocks for ready in block.before]
        rounded = sorted({ready.rounding for ready in every} - {""})
        return [f"inputs rounded to {'+'.join(rounded)}"] * bool(rounded) + sorted({ready.rotation for ready in every} - {""})

    def matrices(self) -> list[Matrix]:
        """Every linear map that a token passes, the head included."""
        found = [matrix for block in self.blocks for matrix in (block.q, block.k, block.v, block.o)]
        found += [matrix for block in self.blocks for mlp in block.mlps for matrix in mlp]
        return [*found, self.head]


def open_weights(directory: Path) -> tuple[Architecture, Weights]:
    """Read a checkpoint: dense, or packed, whose codes are kept.

    Raises:
        FileNotFoundError: no checkpoint in ``directory``.
        ValueError: a family that the engine does not run, a quantization that it does not read, or weights missing or left over.
    """
    config = read_config(directory)
    require_family(config)
    require_known(directory)
    runtime = runtime_of(config)
    stored = read_weights(directory)
    shape = architecture(AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False))
    try:
        weights = assemble(shape, stored.dense, stored.packed)
        if runtime and shape.experts:
            raise ValueError("activations and online rotations of a mixture of experts are not run by the engine; without them it runs")
        blocks = (block._replace(before=_before(runtime, index)) for index, block in enumerate(weights.blocks))
        return shape, weights._replace(blocks=tuple(blocks)) if runtime else weights
    except ValueError as error:
        error.add_note(f"in {directory}")
        raise


def weights_of(model: Any) -> tuple[Architecture, Weights]:
    """The same of a transformers model in memory, whose tensors are shared, not copied."""
    config = model.config.get_text_config(decoder=True)
    shape = architecture(config)
    return shape, assemble(shape, {name: tensor.detach() for name, tensor in model.state_dict().items()}, {})


def assemble(shape: Architecture, stored: Mapping[str, Tensor], packed: Mapping[str, Packed]) -> Weights:
    """Put the stored tensors, and the packed weights by the names of their layers, where they belong, each once.

    Raises:
        ValueError: some are missing, or left over.
    """
    unused = {*stored, *packed}

    def take(name: str) -> Tensor:
        if name not in stored:
            raise ValueError(f"{name} is missing; the checkpoint holds {len(stored)} tensors, such as {', '.join(sorted(stored)[:3])}")
        unused.discard(name)
        return stored[name]

    def matrix(name: str) -> Matrix:
        bias = take(f"{name}.bias") if f"{name}.bias" in stored else None
        if name not in packed:
            return Matrix(take(f"{name}.weight"), bias)
        unused.discard(name)
        return Matrix(packed[name], bias)

    embedding = matrix("model.embed_tokens")
    blocks = tuple(_block(shape, f"model.layers.{index}", take, matrix, {*stored, *packed}) for index in range(len(shape.layers)))
    norm = take("model.norm.weight")
    own_head = "lm_head.weight" in stored or "lm_head" in packed
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
    shape: Architecture, prefix: str, take: Callable[[str], Tensor], matrix: Callable[[str], Matrix], names: Collection[str]
) -> Block:
    attention = f"{prefix}.self_attn"
    router, mlps = None, ()
    if not shape.experts:
        mlps = (Mlp(*(matrix(f"{prefix}.mlp.{part}_proj") for part in ("gate", "up", "down"))),)
    elif f"{prefix}.mlp.experts.0.gate_proj" in names:  # one by one, as we pack them
        router, parts = take(f"{prefix}.mlp.gate.weight"), ("gate_proj", "up_proj", "down_proj")
        mlps = tuple(Mlp(*(matrix(f"{prefix}.mlp.experts.{expert}.{part}") for part in parts)) for expert in range(shape.experts))
    elif f"{prefix}.mlp.experts.gate_up_proj" in names:  # as transformers keeps them in memory
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


def _before(runtime: Runtime, index: int) -> Before:
    """What runs before the matrices of block ``index``; those that read one input round it alike."""
    prefix = f"model.layers.{index}"
    turns = {(each.module, each.where): each for each in runtime.online}
    known = {"self_attn.o_proj": "o", "mlp.down_proj": "down"}
    unknown = [each.module for each in runtime.online if each.where == "input" and each.module not in known]
    if unknown:
        raise ValueError(f"a rotation before {unknown[0]} is asked for; the engine runs those before {' and '.join(known)}, and of heads")

    def ready(*names: str) -> Ready:
        rounded = [runtime.activations.get(f"{prefix}.{name}") for name in names]
        first, *others = (each and numbers(each) for each in rounded)
        if any(each != first for each in others):
            raise ValueError(f"{', '.join(names)} of {prefix} read one input and round it differently; the engine rounds it once")
        return Ready(turns.get((names[0], "input")), rounded[0])

    return Before(
        ready("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ready("self_attn.o_proj"), ready("mlp.gate_proj", "mlp.up_proj"),
        ready("mlp.down_proj"), Ready(turns.get(("self_attn", "after_rope"))),
    )  # fmt: skip


def _same(one: Matrix, other: Matrix) -> bool:
    """Whether two dense matrices are one tensor, in memory or by value."""
    if not isinstance(one.weight, Tensor) or not isinstance(other.weight, Tensor):
        return False
    return one.weight.data_ptr() == other.weight.data_ptr() or one.weight.equal(other.weight)
