"""A pruned model must be what its config says: checking that, and making a model anew from a config and the weights that are left.

Not here: which weights are left (``depth.py``, ``width.py``, ``experts.py``).
"""

from collections.abc import Mapping

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from assay.ops.models import structure
from assay.ops.models.dense import quiet


def differing(config: PreTrainedConfig, state: Mapping[str, Tensor]) -> list[str]:
    """The weights that a model of this config lacks, has beside those of ``state``, or has in another shape.

    They would be lost, or random, when it is reopened. The model is built without memory.

    Raises:
        ValueError: transformers does not take the config, such as that of a Llama whose hidden size is no multiple of its heads.
    """
    try:
        reopened = type(config).from_dict(config.to_dict())
    except StrictDataclassError as error:
        raise ValueError(f"the config of what is left cannot be reopened: {error.__cause__ or error}") from error
    with torch.device("meta"):
        rebuilt = AutoModelForCausalLM.from_config(reopened)
    mine = {name: tensor.shape for name, tensor in state.items()}
    theirs = {name: tensor.shape for name, tensor in rebuilt.state_dict().items()}
    return sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))


def become(model: PreTrainedModel, config: PreTrainedConfig, state: Mapping[str, Tensor]) -> None:
    """Turn ``model``, in place, into the one that ``config`` describes, with the weights of ``state``.

    Every size that a module keeps is then right. Weights of unchanged shape are shared, not copied. Hooks are dropped; the generation config stays.

    Raises:
        ValueError: before anything changes: ``state`` does not fit ``config``, transformers does not take it, or the head is tied in memory alone.
    """
    wrong = differing(config, state)
    if wrong:
        raise ValueError(
            f"{type(model).__name__} cannot be described by its config once it is cut; differing when rebuilt: {', '.join(wrong[:4])}. "
            "Models whose blocks are alike work"
        )
    if structure.is_tied(model) and not config.tie_word_embeddings:
        raise ValueError(
            f"the head of {type(model).__name__} is its embedding in memory, and its config says that it is not; "
            "structure.untie(model) gives it weights of its own"
        )
    with quiet():
        new = type(model).from_pretrained(
            None, config=config, state_dict=dict(state), dtype=model.dtype, attn_implementation=model.config._attn_implementation
        )
    new.generation_config = model.generation_config
    new.to(model.device).train(model.training)  # type: ignore[arg-type]
    vars(model).clear()
    vars(model).update(vars(new))
