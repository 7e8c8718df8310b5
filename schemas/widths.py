"""What a step asks of the widths of a model, and what it leaves of them. Needs a shape, no model. Not here: the order of steps (``fit.py``)."""

from collections.abc import Iterator, Mapping

from assay.schemas.base import Shape
from assay.schemas.pruning import Pack, PruneDepth, PruneExperts, PruneWeights, PruneWidth
from assay.schemas.rounding import BLOCK, GROUPS, Grid, Quantize, Rotate, Smooth
from assay.schemas.steps import WeightStep
from assay.schemas.training import Distill, Pretrain, PruneLearned
from assay.schemas.yaml import Path_, Problem

VECTOR = 8  # weights that e8 and additive round at once


def unfit(path: Path_, step: WeightStep, shape: Shape) -> Iterator[Problem]:
    """What of ``step`` a model of ``shape`` cannot meet."""
    match step:
        case Quantize() | Smooth():
            yield from _grouped(path, step, shape)
        case PruneDepth() if step.layers >= shape.layers:
            yield Problem((*path, "layers"), f"removes {step.layers} of the {shape.layers} layers", f"at most {shape.layers - 1}")
        case PruneDepth() if step.listed is not None and step.listed[-1] >= shape.layers:
            yield Problem((*path, "listed"), f"names block {step.listed[-1]} of {shape.layers}", f"blocks are 0 to {shape.layers - 1}")
        case PruneWidth():
            yield from _cut(path, step, shape)
        case PruneWeights():
            size = int((step.pattern or ":1").partition(":")[2])
            bad = _uneven(size, _columns(shape), "columns")
            if bad:
                yield Problem((*path, "pattern"), f"groups of {size} do not divide the {bad[0]}", "sparsity_pct takes any width")
            if step.quantize is not None:
                yield from _grouped((*path, "quantize"), step.quantize, shape)
        case PruneLearned():
            there = {"layers": shape.layers, "kv_groups": shape.kv_heads, "ffn": shape.intermediate_size, "hidden": shape.hidden_size}
            yield from _kept(path, step, there)
        case Pretrain() if step.parameters is not None and not ffn_within(step, shape.vocab_size):
            message = f"{step.parameters:,} weights are too few for this shape with a vocabulary of {shape.vocab_size:,}"
            yield Problem((*path, "parameters"), message, "fewer layers, a smaller hidden, or tied: true take less")
        case PruneDepth() | PruneExperts() | Pack() | Rotate() | Distill() | Pretrain():
            pass


def left(step: WeightStep, shape: Shape) -> Shape:
    """The shape after ``step``, which fits."""
    match step:
        case PruneDepth():
            return shape.model_copy(update={"layers": shape.layers - step.layers})
        case PruneWidth():
            groups, each = step.kv_groups or shape.kv_heads, step.heads_per_group or shape.heads // shape.kv_heads
            cut = {"heads": groups * each, "kv_heads": groups, "intermediate_size": step.ffn, "hidden_size": step.hidden}
            return shape.model_copy(update={name: size for name, size in cut.items() if size is not None})
        case PruneLearned():
            groups = step.kv_groups or shape.kv_heads
            cut = {"layers": step.layers, "heads": groups * (shape.heads // shape.kv_heads), "kv_heads": groups}
            cut |= {"intermediate_size": step.ffn, "hidden_size": step.hidden}
            return shape.model_copy(update={name: size for name, size in cut.items() if size is not None})
        case Pretrain():
            sizes = {"layers": step.layers, "hidden_size": step.hidden, "heads": step.heads, "kv_heads": step.kv_heads, "tied": step.tied}
            inner = {"head_dim": step.hidden // step.heads, "intermediate_size": step.ffn or ffn_within(step, shape.vocab_size)}
            return shape.model_copy(update=sizes | inner)
        case Rotate() | Quantize() if isinstance(step, Rotate) or step.head == "untie":
            return shape.model_copy(update={"tied": False})
        case _:
            return shape


def _cut(path: Path_, step: PruneWidth, shape: Shape) -> Iterator[Problem]:
    each = shape.heads // shape.kv_heads
    there = {"kv_groups": shape.kv_heads, "heads_per_group": each, "ffn": shape.intermediate_size, "hidden": shape.hidden_size}
    yield from _kept(path, step, there)


def _kept(path: Path_, step: PruneWidth | PruneLearned, there: Mapping[str, int]) -> Iterator[Problem]:
    """More is kept than there is, or everything."""
    for name, size in there.items():
        kept = getattr(step, name)
        if kept is not None and kept > size:
            yield Problem((*path, name), f"keeps {kept} where there are {size}", f"at most {size}")
    if all(getattr(step, name) in (None, size) for name, size in there.items()):
        yield Problem(path, "keeps all that there is, so it cuts nothing", "name a smaller number")


def ffn_within(step: Pretrain, vocabulary: int) -> int:
    """The largest FFN width, a multiple of 8, with which the model has no more than ``step.parameters`` weights; 0 where there is none.

    As ``ops/train/scratch.py`` counts them, which needs torch.
    """
    assert step.parameters is not None
    hidden, ends = step.hidden, vocabulary * step.hidden * (1 if step.tied else 2) + step.hidden
    block = 2 * hidden * hidden + 2 * hidden * step.kv_heads * (hidden // step.heads) + 2 * hidden
    return max(0, (step.parameters - ends - step.layers * block) // (3 * hidden * step.layers * 8)) * 8


def _columns(shape: Shape) -> dict[str, int]:
    return {
        "q_proj, k_proj, v_proj, gate_proj and up_proj": shape.hidden_size,
        "o_proj": shape.heads * shape.head_dim,
        "down_proj": shape.intermediate_size,
    }


def _uneven(size: object, sizes: Mapping[str, int], what: str) -> list[str]:
    """The widths that ``size`` does not divide, in words; -1 divides all."""
    return [f"{number} {what} of {name}" for name, number in sizes.items() if isinstance(size, int) and number % size]


def _grouped(path: Path_, step: Grid, shape: Shape) -> Iterator[Problem]:
    """A group, a block or a vector that does not divide a layer."""

    def uneven(size: object) -> list[str]:
        return _uneven(size, _columns(shape), "columns")

    size, mixed = step.group_size, step.mixed if isinstance(step, Quantize) else None
    method = step.method if isinstance(step, Quantize | Smooth) else None
    if mixed is not None:
        sizes = {name: size if name.startswith("int") else GROUPS[name] for name in mixed.formats}
        name = next((name for name, each in sizes.items() if uneven(each)), None)
        if name is not None:
            message = f"{name} has groups of {sizes[name]}, which do not divide the {uneven(sizes[name])[0]}"
            yield Problem((*path, "mixed", "formats"), message, "leave it out, or say another group_size for integers")
    elif method in ("e8", "additive"):
        if uneven(VECTOR):
            message = f"{method} rounds {VECTOR} weights at once, which do not divide the {uneven(VECTOR)[0]}"
            yield Problem((*path, "method"), message, "rtn and gptq take any width")
    elif size == "block":
        bad = uneven(BLOCK) + _uneven(BLOCK, _rows(step, shape), "rows")
        if bad:
            yield Problem((*path, "group_size"), f"blocks of {BLOCK} do not divide the {bad[0]}", "-1, which is one scale a row, would")
    elif method != "smoothquant" and uneven(size):
        fitting = [str(each) for each in (32, 64, 128, 256, 512) if not uneven(each)]
        remedy = f"{' or '.join(fitting) or 'none of the usual sizes'} would, and -1 is one group a row"
        yield Problem((*path, "group_size"), f"{size} does not divide the {uneven(size)[0]}", remedy)
    if isinstance(step, Quantize):
        yield from _ends(path, step, shape)


def _rows(step: Grid, shape: Shape) -> dict[str, int]:
    """The rows of what is rounded."""
    rows = {
        "q_proj": shape.heads * shape.head_dim,
        "k_proj and v_proj": shape.kv_heads * shape.head_dim,
        "gate_proj and up_proj": shape.intermediate_size,
        "o_proj and down_proj": shape.hidden_size,
    }
    if isinstance(step, Quantize) and (step.embeddings, step.head) != ("skip", "skip"):
        rows["embedding and head"] = shape.vocab_size
    return rows


def _ends(path: Path_, step: Quantize, shape: Shape) -> Iterator[Problem]:
    """What is asked of embedding and head, against whether they are one tensor."""
    if shape.tied and step.head == "quantize" and step.embeddings == "skip":
        message = "the head of this base is its embedding, which is skipped"
        yield Problem((*path, "head"), message, "say embeddings: quantize too, or head: untie")
    if shape.tied and step.embeddings == "quantize" and step.head == "skip":
        message = "the embedding of this base is its head, which is skipped"
        yield Problem((*path, "embeddings"), message, "say head: quantize too, or head: untie")
    if not shape.tied and step.head == "untie":
        yield Problem((*path, "head"), "the head of this base is not tied", "say head: quantize")
