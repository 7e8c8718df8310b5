"""Which smaller shapes of a model to try: sizes by ``shapes.py``, ranked by what this model's parts do on a text.

Not here: cutting, or the training that decides between candidates.
"""

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from assay.ops.models import structure
from assay.ops.prune.depth import block_influence
from assay.ops.prune.shapes import DIVISORS, Candidate, Family, Shape, retained, search
from assay.ops.prune.width_scores import group_scores, importance


def candidates(
    model: PreTrainedModel, windows: Int[Tensor, "windows length"], parameters_at_most: int, *, best: int, divisors: Shape = DIVISORS
) -> list[Candidate]:
    """The ``best`` shapes of at most so many weights, by the share of importance that their parts hold.

    Layers by Block Influence, the rest by activations, as means over the blocks.

    Raises:
        ValueError: a mixture of experts, or no shape meets the budget.
    """
    sizes = structure.shape_numbers(model)
    found = importance(model, windows)
    if found.ffn is None:
        raise ValueError(f"{type(model).__name__} is a mixture of experts, whose FFN is not cut; models with one FFN a block work")
    layers = block_influence(model, windows)
    groups = group_scores(found.heads, int(sizes["kv_heads"])).mean(dim=0)
    score = retained(layers.tolist(), groups.tolist(), found.ffn.mean(dim=0).tolist(), found.hidden.tolist())
    full = Shape(int(sizes["layers"]), int(sizes["kv_heads"]), int(sizes["intermediate_size"]), int(sizes["hidden_size"]))
    return search(full, family_of(model), score, parameters_at_most=parameters_at_most, divisors=divisors, best=best)


def family_of(model: PreTrainedModel) -> Family:
    """What of ``model`` a search leaves as it is, read off its weights."""
    sizes, block = structure.shape_numbers(model), structure.blocks(model)[0]
    names = {name for name, _ in block.named_parameters()}
    hidden = int(sizes["hidden_size"])
    norms = sum(parameter.shape == torch.Size([hidden]) and name.endswith("norm.weight") for name, parameter in block.named_parameters())
    return Family(
        vocab=int(sizes["vocab_size"]), head_dim=int(sizes["head_dim"]), heads_per_group=int(sizes["heads"]) // int(sizes["kv_heads"]),
        tied=bool(sizes["tied"]), norms=norms, qkv_bias="self_attn.q_proj.bias" in names, o_bias="self_attn.o_proj.bias" in names,
        ffn_bias="mlp.down_proj.bias" in names, head_norms="self_attn.q_norm.weight" in names,
        whole_heads=model.config.get_text_config(decoder=True).model_type in ("llama", "gemma3_text"),
    )  # fmt: skip
