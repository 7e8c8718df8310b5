"""Small models from nothing: a random Llama of a given shape, its size worked out before it is made, and next-token training.

Not here: the tokenizer, which is a base's own, or what is compared with what.
"""

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from assay.ops.evaluate.divergence import check_head, head_of
from assay.ops.prune import shapes
from assay.ops.train import passes
from assay.ops.train.batches import Batch, batch_of, digest, rows_at, split
from assay.ops.train.loop import Loss, Point, Progress, Settings, train
from assay.ops.train.losses import cross_entropy_sum, trainable_head
from assay.ops.train.overlap import states_of

STD = 0.02


class Shape(NamedTuple):
    """The shape of a Llama without biases."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = True  # embedding and head are one matrix

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.hidden // self.heads


def parameters(shape: Shape) -> int:
    """How many weights a model of ``shape`` has; a shared matrix counts once. See ``ops/prune/shapes.py``.

    Raises:
        ValueError: a shape that no model has.
    """
    _check(shape)
    family = shapes.Family(shape.vocabulary, shape.head_dim, shape.heads // shape.kv_heads, shape.tied)
    return shapes.parameters(shapes.Shape(shape.layers, shape.kv_heads, shape.ffn, shape.hidden), family)


def ffn_for(shape: Shape, budget: int, *, divisor: int = 1) -> Shape:
    """``shape`` with the largest FFN width, a multiple of ``divisor``, with which it has no more than ``budget`` weights.

    Raises:
        ValueError: the rest of the shape takes more than the budget; says how many weights it takes at the least.
    """
    least = parameters(shape._replace(ffn=divisor))
    each = 3 * shape.hidden * shape.layers * divisor
    steps = (budget - least) // each
    if steps < 0:
        raise ValueError(
            f"a budget of {budget:,} weights for {shape.layers} layers of width {shape.hidden} with a vocabulary of {shape.vocabulary:,}; they take at least "
            f"{least:,}, with an FFN of {divisor}. Fewer layers, a smaller width, or tied embeddings take less"
        )
    return shape._replace(ffn=divisor * (1 + steps))


def make(shape: Shape, *, seed: int = 0, length: int = 2048, special: dict[str, int | None] | None = None) -> PreTrainedModel:
    """A Llama of ``shape`` in float32 with random weights, by ``seed`` alone, and a plain config.

    Matrices and embedding are normal with a deviation of 0.02; those that write to the residual stream (``o_proj``, ``down_proj``) with that over
    √(2 · layers), so that the stream does not grow with depth, which is compared here.

    Args:
        length: the positions that the config says.
        special: of the tokenizer: ``bos_token_id``, ``eos_token_id``, ``pad_token_id``.
    Raises:
        ValueError: a shape that no model has.
    Source:
        The scale by depth: Radford et al. 2019 (GPT-2), §2.3.
    """
    _check(shape)
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **(special or {})}
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.ffn, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, max_position_embeddings=length,
        tie_word_embeddings=shape.tied, initializer_range=STD, **ids,
    )  # fmt: skip
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_(1 / math.sqrt(2 * shape.layers))
    return model.eval()


def learn(
    model: Any,
    windows: Int64[Tensor, "windows length"],
    held_out: Int64[Tensor, "held_out held_length"],
    *,
    settings: Settings,
    rows: int = 8,
    document_ends: Collection[int] = frozenset(),
    bf16: bool = False,
    vocabulary: int | None = None,
    state: Path | None = None,
    run: dict[str, Any] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[Point]:
    """Train ``model``, float32, in place, to say what comes next in the text, at every position of a window but its last.

    Args:
        held_out: text that is not trained on, for the evaluations.
        document_ends, bf16, vocabulary: see ``recover.recover``.
        state, run, progress: see ``loop.train``.
    Returns:
        The curve, with ``log_perplexity`` (nats a token) on ``held_out``.
    Raises:
        ValueError, DivergedError: see ``loop.train``.
    """
    device = model.device
    size = min(vocabulary or len(head_of(model).weight), len(head_of(model).weight))
    if max(int(windows.max()), int(held_out.max())) >= size:
        raise ValueError(f"the text has ids beyond the {size} of the model; is it of the same tokenizer?")
    check_head(model, head_of(model), windows[0].to(device))

    def batches(step: int) -> list[Batch]:
        return split(batch_of(windows, rows_at(step, rows=rows, windows=len(windows), seed=settings.seed), device), passes.FORWARD_TOKENS)

    def loss_of(batch: Batch) -> Loss:
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            states = passes.final_states(model, batch.ids, document_ends=document_ends)
        targets = batch.ids[:, 1:].flatten()
        with passes.rounded_products(bf16):
            found = cross_entropy_sum(targets, states[:, :-1].flatten(0, 1), trainable_head(model), vocabulary=size)
        return Loss(found, len(targets))

    def evaluate() -> dict[str, float]:
        states = states_of(model, held_out, document_ends=document_ends)[:, :-1].flatten(0, 1)
        targets = held_out[:, 1:].flatten().to(device)
        return {"log_perplexity": float(cross_entropy_sum(targets, states, head_of(model), vocabulary=size)) / len(targets)}

    told = {
        "rows": rows, "windows": list(windows.shape), "text": digest(windows), "vocabulary": size,
        "document_ends": sorted(document_ends), "bf16": bf16,
    }  # fmt: skip
    return train(model, batches, loss_of, settings, evaluate=evaluate, state=state, run={**told, **(run or {})}, progress=progress)


def _check(shape: Shape) -> None:
    wrong = [name for name in ("layers", "hidden", "ffn", "heads", "kv_heads", "vocabulary") if getattr(shape, name) < 1]
    if wrong:
        raise ValueError(f"{shape}: {wrong[0]} is below 1; whole numbers from 1 were expected")
    if shape.hidden % shape.heads or (shape.hidden // shape.heads) % 2:
        raise ValueError(
            f"a width of {shape.hidden} in {shape.heads} heads; an even number of channels a head was expected, which rotary positions pair"
        )
    if shape.heads % shape.kv_heads:
        raise ValueError(f"{shape.heads} query heads on {shape.kv_heads} key heads; a divisor of {shape.heads} was expected")
