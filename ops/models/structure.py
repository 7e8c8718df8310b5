"""Where the parts of a causal language model are: blocks, their linear layers, embedding, head, and what a pass reached of them.

Everything is found from the model itself, and coverage is counted over *parameters*, never over module classes: experts of a mixture are
3-D parameters, which a search for ``nn.Linear`` does not see. Not here: opening or saving a model (``ops/models/dense.py``).
"""

from collections.abc import Collection, Iterator
from typing import NamedTuple, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

M = TypeVar("M", bound=nn.Module)


class Coverage(NamedTuple):
    """What a pass reached of the weights outside embedding and head. ``missed`` names the rest, with its share below."""

    reached: int
    total: int
    missed: tuple[str, ...]

    @property
    def share(self) -> float:
        """Reached weights per weight, 0 to 1."""
        return self.reached / self.total if self.total else 0.0


def blocks_path(model: PreTrainedModel) -> str:
    """The dotted name of the list of decoder blocks, such as ``model.layers``.

    Raises:
        ValueError: no list of modules, or more than one, has as many entries as the config has layers.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    found = [name for name, module in lists.items() if len(module) == count and not any(name.startswith(f"{outer}.") for outer in lists)]
    if len(found) != 1:
        raise ValueError(
            f"{type(model).__name__} has {len(found)} lists of {count} blocks ({', '.join(found) or 'none'}); exactly one was expected. "
            "Decoder-only models that keep their blocks in one nn.ModuleList work"
        )
    return found[0]


def blocks(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder blocks, first to last."""
    found = model.get_submodule(blocks_path(model))
    assert isinstance(found, nn.ModuleList)
    return found


def block_linears(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear layers inside the blocks, by full name, in the model's order."""
    prefix = blocks_path(model)
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear) and name.startswith(f"{prefix}.")}


def embedding(model: PreTrainedModel) -> tuple[str, nn.Embedding]:
    """The input embedding and its name."""
    return _named(model, model.get_input_embeddings(), nn.Embedding, "input embedding")


def head(model: PreTrainedModel) -> tuple[str, nn.Linear]:
    """The output head and its name."""
    return _named(model, model.get_output_embeddings(), nn.Linear, "output head")


def is_tied(model: PreTrainedModel) -> bool:
    """Whether embedding and head are one tensor in memory, whatever the config says."""
    return storage(embedding(model)[1].weight) == storage(head(model)[1].weight)


def untie(model: PreTrainedModel) -> None:
    """Give the head a copy of the embedding it shares, here and in the config, so that either can change alone."""
    if not is_tied(model):
        return
    module = head(model)[1]
    module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=module.weight.requires_grad)
    for config in (model.config, model.config.get_text_config(decoder=True)):
        config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}


def storage(tensor: Tensor) -> int:
    """The address of the tensor's memory: equal for parameters that share it."""
    return tensor.untyped_storage().data_ptr()


def matrices(model: PreTrainedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """The weights that compression is about: parameters of two or more dimensions outside embedding and head, shared ones once."""
    seen = {storage(embedding(model)[1].weight), storage(head(model)[1].weight)}
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and storage(parameter) not in seen:
            seen.add(storage(parameter))
            yield name, parameter


def coverage(model: PreTrainedModel, reached: Collection[str]) -> Coverage:
    """How much of :func:`matrices` the parameters named in ``reached`` are, counted in weights."""
    sizes = {name: parameter.numel() for name, parameter in matrices(model)}
    return Coverage(
        reached=sum(size for name, size in sizes.items() if name in reached),
        total=sum(sizes.values()),
        missed=tuple(name for name in sizes if name not in reached),
    )


def require_coverage(model: PreTrainedModel, reached: Collection[str], *, at_least: float = 0.95) -> Coverage:
    """:func:`coverage`, refused when the pass left too much of the model as it was.

    Raises:
        ValueError: the share is below ``at_least`` (0 to 1); names the numbers and the largest parameters missed.
    """
    found = coverage(model, reached)
    if found.share < at_least:
        sizes = dict(matrices(model))
        largest = sorted(found.missed, key=lambda name: -sizes[name].numel())[:3]
        shown = ", ".join(f"{name} {list(sizes[name].shape)}" for name in largest)
        raise ValueError(
            f"the pass reaches {found.reached:,} of {found.total:,} weights outside embedding and head ({found.share:.1%}); "
            f"at least {at_least:.0%} was expected. Missed, largest first: {shown}. "
            "Weights that are not in nn.Linear layers, such as fused experts, need a method that reads them"
        )
    return found


def shape_numbers(model: PreTrainedModel) -> dict[str, int | bool]:
    """The widths that steps and costs are worked out from; ``tied`` as it is in memory."""
    config = model.config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    return {
        "layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "vocab_size": embedding(model)[1].weight.shape[0],
        "tied": is_tied(model),
    }


def _named(model: PreTrainedModel, found: object, kind: type[M], what: str) -> tuple[str, M]:
    if not isinstance(found, kind):
        raise ValueError(f"the {what} of {type(model).__name__} is {type(found).__name__}; {kind.__name__} was expected")
    return next(name for name, module in model.named_modules() if module is found), found
