"""Low-rank adapters of the linear layers of the blocks: put in, trained by ``recover.py`` in place of the weights, and merged into them.

The adapters are those of ``peft``. Not here: adapters of embeddings, heads, or fused experts.
"""

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from assay.ops.models import structure


class Adapted(NamedTuple):
    """A model that has adapters, and what takes them out again."""

    model: PreTrainedModel
    tuner: Any  # peft's
    trained: tuple[str, ...]  # the parameters that required a gradient before


def adapt(model: PreTrainedModel, *, rank: int, alpha: int = 16, seed: int = 0) -> Adapted:
    """Give every linear layer of the blocks an adapter, in place: W x + (alpha / rank) · B A x, of which A and B alone are trained. B is 0 at first.

    Args:
        rank: rows of A and columns of B.
        seed: of A.
    Raises:
        ValueError: ``rank`` or ``alpha`` is below 1, the blocks have no linear layer, or the model has adapters already.
        ImportError: ``peft`` is not installed.
    Source:
        Hu et al. 2021, arXiv:2106.09685.
    """
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    names = list(structure.block_linears(model))
    if rank < 1 or alpha < 1:
        raise ValueError(f"adapters of rank {rank} and alpha {alpha}; whole numbers from 1 were expected")
    if _has_adapters(model):
        raise ValueError(f"{type(model).__name__} has adapters already; merge them first")
    if not names:
        raise ValueError(
            f"the blocks of {type(model).__name__} have no nn.Linear to adapt; weights that are none, such as fused experts, are trained whole"
        )
    trained = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=names, lora_dropout=0.0, bias="none")
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        tuner = LoraModel(model, config, "default")
    return Adapted(model, tuner, trained)


def merge(adapted: Adapted) -> None:
    """Add the adapters to the weights they belong to and take them out, in place: the model is again what it was, with other weights.

    They fit no other weights: a model that was quantized is trained and merged in its dequantized form and quantized again, with new scales, after.

    Raises:
        ValueError: they were merged before, or the sum is not finite.
    """
    if not _has_adapters(adapted.model):
        raise ValueError(
            f"the adapters of {type(adapted.model).__name__} were merged before, and merged twice they would count twice; adapt the model anew to go on"
        )
    adapted.tuner.merge_and_unload(safe_merge=True)
    for name, parameter in adapted.model.named_parameters():
        parameter.requires_grad_(name in adapted.trained)


def _has_adapters(model: PreTrainedModel) -> bool:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, BaseTunerLayer) for module in model.modules())
