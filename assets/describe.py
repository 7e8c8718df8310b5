"""What a node is in a line that a person can read. Not here: keys, tags and routes (``labels.py``)."""

from assay.schemas.graph import Node
from assay.schemas.pruning import WIDTHS, Pack, PruneDepth, PruneExperts, PruneWeights, PruneWidth
from assay.schemas.rounding import Grid, Quantize, Rotate, Smooth
from assay.schemas.steps import Draft, DraftModel, Kv
from assay.schemas.training import Distill, Pretrain, PruneLearned


def describe(node: Node) -> str:
    """One line a person can read: what the last step does."""
    step = node.step
    if node.base is not None:
        source = node.base.hub or node.base.path or (node.base.package and f"{node.base.package.file} of {node.base.package.name}")
        return f"The base {node.base.name} ({source}), saved once as {node.base.dtype}." + (f" {node.base.note}" if node.base.note else "")
    if isinstance(step, PruneDepth | PruneWidth | PruneExperts | PruneWeights):
        return _describe_pruning(step)
    if isinstance(step, Distill | Pretrain | PruneLearned):
        return _describe_training(step)
    if isinstance(step, Pack):
        return f"{step.pattern} weights stored as what is left of them and where it was."
    if isinstance(step, Quantize):
        return _describe_rounding(step)
    if isinstance(step, Smooth):
        how = "SmoothQuant" if step.method == "smoothquant" else f"AWQ, for {step.format}, by the size of {step.salience}"
        return f"Channels scaled between layers ({how}); the logits stay."
    if isinstance(step, Rotate):
        names = {"hadamard": "a Hadamard matrix", "random": "random orthogonal matrices", "spinquant": "matrices learned by SpinQuant"}
        online = f", and at run time before {', '.join(step.online)}" if step.online else ""
        return f"Hidden states turned by {names[step.method]}{online}; the logits stay."
    if isinstance(step, Kv):
        return f"Run with keys and values stored as {step.format}."
    if isinstance(step, DraftModel):
        return _describe_model(step, node)
    assert isinstance(step, Draft)
    source = (
        "n-grams of the text so far"
        if step.method == "ngram"
        else f"the {'model' if step.made else 'variant'} {'/'.join(node.draft.path) if node.draft else ''}"
    )
    return f"Run speculatively: {step.tokens} tokens a round proposed by {source}, verified exactly."


def _groups(grid: Grid) -> str:
    named = {-1: "one scale a row", "tensor": "one scale a weight", "block": "one scale a block"}
    return named.get(grid.group_size or 0, f"groups of {grid.group_size}")


def _describe_rounding(step: Quantize) -> str:
    grid = _groups(step)
    what = step.format if step.mixed is None else f"{', '.join(step.mixed.formats)} within {step.mixed.millibits / 1000} bits"
    zero = f", {'symmetric' if step.symmetric else 'asymmetric'}" if what.startswith("int") else ""
    inputs = f"; inputs to {step.inputs.format} a {step.inputs.per}" if step.inputs else ""
    known = {"e8": "the E8 lattice, two bits", "additive": "sums of code book entries, two bits"}
    return f"Weights rounded to {known.get(step.method) or f'{what} ({step.method.upper()}, {grid}{zero})'}{inputs}."


def _describe_model(step: DraftModel, node: Node) -> str:
    target = "/".join(node.parent.path) if node.parent else ""
    start = f"The first {step.early_exit} layers of {target}" if node.draft is None else f"A copy of {'/'.join(node.draft.path)}"
    if step.distill is None:
        return f"{start}, under its own norm and head, as a draft."
    how, given = step.distill.loss.replace("_", " "), step.distill
    packed = f", then rounded to {given.quantize.format}" if given.quantize else ""
    return f"{start}, trained toward {target} on {given.tokens:,} tokens by {how} ({given.on_policy_pct} % on its own samples){packed}."


def _describe_pruning(step: PruneDepth | PruneWidth | PruneExperts | PruneWeights) -> str:
    if isinstance(step, PruneDepth) and step.listed is not None:
        return f"Without the blocks {', '.join(map(str, step.listed))} (from 0)."
    if isinstance(step, PruneDepth):
        return f"Without {step.layers} layers, chosen by {step.score.replace('_', ' ')}."
    if isinstance(step, PruneExperts):
        return f"{step.experts} experts of each mixture kept, by {step.method.replace('_', ' ')}."
    if isinstance(step, PruneWeights):
        share = f"{step.sparsity_pct} % of the" if step.pattern is None else f"All but {step.pattern.replace(':', ' of each ')}"
        joint = f", and the others rounded to {step.quantize.format} ({_groups(step.quantize)}) in the same loop" if step.quantize else ""
        return f"{share} weights of the blocks set to zero, by {step.method}{joint}."
    kept = ", ".join(f"{name.replace('_', ' ')} {getattr(step, name)}" for name in WIDTHS if getattr(step, name) is not None)
    heads = (
        ""
        if step.kv_groups is None and step.heads_per_group is None
        else f"; of the heads those go that have the {step.cut} by {step.heads_by}"
    )
    return f"Widths cut to {kept}{heads}."


def _describe_training(step: Distill | Pretrain | PruneLearned) -> str:
    if isinstance(step, Pretrain):
        size = f"an FFN of {step.ffn}" if step.ffn else f"at most {step.parameters:,} weights"
        return f"{step.layers} layers of width {step.hidden} with {size}, from nothing, trained on {step.tokens:,} tokens."
    if isinstance(step, PruneLearned):
        left = ", ".join(
            f"{name.replace('_', ' ')} {getattr(step, name)}" for name in ("layers", "kv_groups", "ffn", "hidden") if getattr(step, name)
        )
        return f"Cut to {left} by gates that were trained on {step.tokens:,} tokens."
    how = "next tokens" if step.loss == "cross_entropy" else f"the base by {step.loss.replace('_', ' ')}"
    lora = f", adapters of rank {step.lora.rank} alone" if step.lora else ""
    return f"Trained on {step.tokens:,} tokens toward {how}{lora}."
