"""What one decoded token reads and multiplies of a checkpoint: its matrices, as stored. Not here: all that is stored (``bytes.py``), or the time (``roofline.py``).

Read from the headers of the safetensors files; no weight is loaded.
"""

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from assay.ops.cost.bytes import CODES, EMBEDDING_OR_HEAD, Stored, elements_of, is_shared, kv_shape, stored_tensors

HEADS = ("lm_head", "embed_out")
TABLES = tuple(word for word in EMBEDDING_OR_HEAD if word not in HEADS)
COPIED = ("wpe", "embed_positions", "position_embedding")  # one row is added, nothing multiplied


class Reads(NamedTuple):
    """Weights that a token multiplies once each, the bytes in which they are stored, and what attention adds for each token of context."""

    block_parameters: int
    head_parameters: int
    weight_bytes: int
    attention_flops_per_context_token: int

    @property
    def matmul_parameters(self) -> int:
        return self.block_parameters + self.head_parameters


def reads(directory: Path) -> Reads:
    """Count them in the checkpoint in ``directory``: the matrices of the blocks with their scales and zero points, and the head, which of a tied model is
    the embedding. Of a mixture of experts only those that a token is sent to count.

    Raises:
        FileNotFoundError, ValueError: as :func:`assay.ops.cost.bytes.stored_tensors`.
    """
    config = json.loads((Path(directory) / "config.json").read_text())
    fields = config.get("text_config") or config
    tensors = stored_tensors(directory)
    head = next((words for words in (HEADS, TABLES) if any(_is(tensor, words) for tensor in tensors)), ())
    layers, _, head_dim = kv_shape(fields)
    block, outside, size = Fraction(0), 0, Fraction(0)
    for tensor in tensors:
        part = tensor.name.rpartition(".")[2]
        shared = is_shared(tensor.name)
        multiplied = part in CODES or (not part.startswith("weight_") and len(tensor.shape) >= 2)
        if not (shared or multiplied) or _is(tensor, COPIED):
            continue
        count = 0 if shared else elements_of(tensor, tensors) if part in CODES else math.prod(tensor.shape)
        if _is(tensor, head):
            outside, size = outside + count, size + tensor.size_bytes
        elif not _is(tensor, EMBEDDING_OR_HEAD):
            used = _used(tensor, fields)
            block, size = block + count * used, size + tensor.size_bytes * used
    return Reads(int(block), outside, int(size), 4 * layers * fields["num_attention_heads"] * head_dim)


def _is(tensor: Stored, words: tuple[str, ...]) -> bool:
    return any(word in tensor.name.split(".") for word in words)


def _used(tensor: Stored, fields: dict) -> Fraction:
    """The share of a tensor that one token reads: of experts as many as it is sent to."""
    experts = fields.get("num_local_experts") or fields.get("num_experts")
    chosen = fields.get("num_experts_per_tok")
    return Fraction(chosen, experts) if experts and chosen and "experts" in tensor.name.split(".") else Fraction(1)
