"""The step ``quantize``: a function for each way to round, which imports what it is done with, so that a change to one leaves the artifacts of others valid.

Not here: any arithmetic, or where artifacts are kept.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from assay.schemas.rounding import BLOCK, Grid, Quantize

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from assay.ops.quantize.activations import Activations
    from assay.ops.quantize.allocate import Way as UnitWay
    from assay.ops.quantize.calibrated import Way
    from assay.ops.quantize.grid import Format
    from assay.ops.quantize.rtn import Rounded, Shrink

ROUNDS, BEAM = 2, 2  # of additive codebooks: twice as many take twice as long and lower the loss by 2 %
ELEMENTS = {"fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2", "mxfp8": "e4m3", "mxfp4": "e2m1", "nvfp4": "e2m1", "nf4": "nf4", "ternary": "ternary"}
BITS = {"mxfp4": 4, "nvfp4": 4, "nf4": 4, "ternary": 2}  # else 8, or as integers say


def entry(step: Quantize) -> str:
    """The name of the function below that does ``step``."""
    more = "_mixed" if step.mixed else "_clipped" if step.range == "output_mse" else ""
    return step.method + more


def format_of(grid: Grid, name: str | None = None) -> "Format":
    """The format that ``grid`` asks for, or another one by its name with the same groups where they are free."""
    from assay.ops.quantize.grid import Format

    if name is not None and name != grid.format:
        free = name.startswith("int") and grid.format.startswith("int")
        grid = Grid(format=name, group_size=grid.group_size if free else None, symmetric=grid.symmetric or not name.startswith("int"))  # type: ignore[arg-type]
    chosen, size = grid.format, grid.group_size
    assert size is not None
    rows = BLOCK if size == "block" else 1
    group = BLOCK if size == "block" else 0 if size == "tensor" else size
    assert isinstance(group, int)
    if chosen.startswith("int"):
        return Format("int", int(chosen.removeprefix("int")), group, symmetric=grid.symmetric)
    scale = "e8m0" if chosen.startswith("mx") else {"nvfp4": "e4m3", "nf4": "float32"}.get(chosen, "bfloat16")
    return Format(ELEMENTS[chosen], BITS.get(chosen, 8), group, rows, scale=scale, shared_exponent=grid.shared_exponent, nested=grid.nested)


class Work(NamedTuple):
    """What is being rounded: the checkpoint, its model, and the weights as they were."""

    parent: Path
    model: "PreTrainedModel"
    original: "Mapping[str, Tensor]"


def rtn(step: Quantize, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """Each weight to the nearest number."""
    from assay.ops.quantize.rtn import rtn

    work = _open(step, parent, windows)
    return _save(
        step, work, out, rtn(work.model, format_of(step), embeddings=step.embeddings, head=step.head, shrink=_range(step)), windows
    )


def rtn_clipped(step: Quantize, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """Each weight to the nearest number, in the ranges that err least in the layers' outputs."""
    from assay.ops.quantize.awq import awq
    from assay.ops.quantize.rtn import rtn

    work, format = _open(step, parent, windows), format_of(step)
    shrink = awq(work.model, _need(windows, step), format, kinds=()).shrink
    return _save(step, work, out, rtn(work.model, format, embeddings=step.embeddings, head=step.head, shrink=shrink), windows)


def rtn_mixed(step: Quantize, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """Each weight to the nearest number, in formats chosen by layer."""
    from assay.ops.quantize.rtn import rtn

    work = _open(step, parent, windows)
    formats, told = _mixed(step, work.model, _need(windows, step))
    return _save(step, work, out, rtn(work.model, formats, shrink=_range(step)), windows) | told


def hqq(step: Quantize, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """Zero points by half-quadratic splitting; reads no text."""
    from assay.ops.quantize.hqq import hqq
    from assay.ops.quantize.rtn import Rounded, choose, replace

    work, format = _open(step, parent, windows), format_of(step)
    layers = {name: hqq(weight.float(), format) for name, weight in choose(work.model, step.embeddings, step.head).items()}
    return _save(step, work, out, Rounded(layers, replace(work.model, layers, untie=step.head == "untie")), windows)


def gptq(step: Quantize, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """Each column to the nearest number, the error carried to the columns after it."""
    return _gptq(step, _open(step, parent, windows), format_of(step), _range(step), out, windows)


def gptq_clipped(step: Quantize, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """The same, in the ranges that err least in the layers' outputs."""
    from assay.ops.quantize.awq import awq

    work, format = _open(step, parent, windows), format_of(step)
    return _gptq(step, work, format, awq(work.model, _need(windows, step), format, kinds=()).shrink, out, windows)


def gptq_mixed(step: Quantize, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """The same, in formats chosen by layer: by what GPTQ does with each, on windows that it was not fitted to."""
    from functools import partial

    from assay.ops.models import dense
    from assay.ops.quantize.allocate import by_gptq

    work, ids = _open(step, parent, windows), _need(windows, step)
    assert step.mixed is not None and step.gptq is not None
    way = partial(
        by_gptq, work.model, ids[step.mixed.windows :], act_order=step.gptq.act_order, damping=step.gptq.damping_pct / 100,
        keep_zeros=hasattr(work.model.config, dense.PRUNED_KEY),
    )  # fmt: skip
    formats, told = _mixed(step, work.model, ids, way)
    return _gptq(step, work, formats, _range(step), out, windows) | told


def llm_int8(step: Quantize, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """Columns whose inputs are ever large stay in 16 bits, the others are rounded to nearest."""
    from assay.ops.quantize.outliers import above, split
    from assay.ops.quantize.rtn import Rounded, choose, replace
    from assay.ops.quantize.statistics import largest_inputs

    work = _open(step, parent, windows)
    largest = largest_inputs(work.model, _need(windows, step))
    chosen = choose(work.model, step.embeddings, step.head)
    layers = {name: split(weight, above(largest[name]), format_of(step)) for name, weight in chosen.items() if name in largest}
    kept = {name: len(each.columns) for name, each in layers.items() if len(each.columns)}
    return _save(step, work, out, Rounded(layers, replace(work.model, layers)), windows) | {"columns_kept": kept}


def e8(step: Quantize, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """Eight weights to a point of the E8 lattice."""
    from assay.ops.quantize.lattice import quantize, require_fit

    work = _open(step, parent, windows)
    _fitting(work.original, require_fit)
    return _along(step, work, lambda weight, hessian: quantize(weight, hessian=hessian, seed=seed), out, windows)


def additive(step: Quantize, parent: Path, out: Path, *, windows: "Tensor | None" = None, seed: int = 0) -> dict[str, Any]:
    """Eight weights to a sum of two code book entries."""
    from assay.ops.quantize.additive import quantize, require_fit

    work = _open(step, parent, windows)
    _fitting(work.original, require_fit)
    return _along(step, work, lambda weight, hessian: quantize(weight, hessian=hessian, seed=seed, rounds=ROUNDS, beam=BEAM), out, windows)


def _open(step: Quantize, parent: Path, windows: "Tensor | None") -> Work:
    """The checkpoint to round, after what can be told without rounding: that it is dense and finite, that there is text, and that the step fits it.

    Raises:
        ValueError: any of these is not so.
    """
    from assay.ops.models import experts
    from assay.ops.models.checkpoint import load_model
    from assay.ops.models.dense import check_finite, require_dense
    from assay.ops.quantize.grid import require_fit
    from assay.ops.quantize.rtn import choose

    require_dense(parent, "quantize", runtime=True)
    if step.calibrated:
        _need(windows, step)
    model = load_model(parent)
    check_finite(model.state_dict().items())
    mixtures = experts.fused(model)
    if step.inputs is not None and mixtures:
        raise ValueError(
            f"the inputs of experts ({next(iter(mixtures))}) cannot be rounded: they are computed together; leave out inputs, or take a dense model"
        )
    if step.method not in ("e8", "additive"):
        chosen = choose(model, step.embeddings, step.head)
        for format in [format_of(step)] if step.mixed is None else [format_of(step, name) for name in step.mixed.formats]:
            _fitting(chosen, lambda rows, cols, format=format: require_fit((rows, cols), format))
    return Work(parent, model, {name: weight.clone() for name, weight in experts.weights(model).items()})


def _save(step: Quantize, work: Work, out: Path, rounded: "Rounded", windows: "Tensor | None") -> dict[str, Any]:
    """Write the packed checkpoint, and beside it what rounding did to each layer (``layers.json``)."""
    from assay.ops.models.dense import read_config
    from assay.ops.quantize import by_layer
    from assay.ops.quantize.runtime import Runtime, runtime_of
    from assay.ops.quantize.write import save_packed

    activations = _activations(step, work.model, rounded, windows)
    runtime = Runtime(activations, runtime_of(read_config(work.parent)).online)
    stored = save_packed(work.model, work.parent, out, rounded.layers, runtime=runtime)
    errors = rounded.summary.get("output_error", {})
    both = ((name, weight, rounded.layers[name]) for name, weight in work.original.items() if name in rounded.layers)
    by_layer.write(out, {name: by_layer.harm(weight, packed, errors.get(name)) for name, weight, packed in both})
    return {"method": step.method, **{key: value for key, value in rounded.summary.items() if key != "output_error"}, **stored}


def _activations(step: Quantize, model: "PreTrainedModel", rounded: "Rounded", windows: "Tensor | None") -> "dict[str, Activations]":
    """How the inputs of each rounded layer of the blocks are rounded; a static range is that of the rounded model on the calibration text."""
    if step.inputs is None:
        return {}
    from assay.ops.models import structure
    from assay.ops.quantize.activations import calibrate
    from assay.ops.steps.inputs import activations_of

    how = activations_of(step.inputs)
    names = [name for name in structure.block_linears(model) if name in rounded.layers]
    return calibrate(model, names, _need(windows, step), how) if how.per == "tensor" else dict.fromkeys(names, how)


def _need(windows: "Tensor | None", step: Quantize) -> "Tensor":
    from assay.ops.steps.given import require_windows

    what = f"method {step.method} with range {step.range}" + (f" and inputs per {step.inputs.per}" if step.inputs else "")
    return require_windows(windows, f"{what} looks at text")


def _range(step: Quantize) -> "Shrink | None":
    """How much of its range a group keeps, where that needs no inputs."""
    from functools import partial

    from assay.ops.quantize import ranges

    if step.range == "mse":
        return ranges.mse
    return partial(ranges.percentile, keep=step.keep_permille / 1000) if step.range == "percentile" else None


def _gptq(
    step: Quantize, work: Work, formats: "Format | Mapping[str, Format]", shrink: Any, out: Path, windows: "Tensor | None"
) -> dict[str, Any]:
    """GPTQ in float32, then the embedding and the head to nearest where they are asked for."""
    import torch

    from assay.ops.models import dense
    from assay.ops.quantize.gptq import quantize_model
    from assay.ops.quantize.rtn import Rounded, choose, replace, round_each

    assert step.gptq is not None
    model, stored, ids = work.model, dense.stored_dtype(work.parent), _need(windows, step)
    ends = {name: weight for name, weight in choose(model, step.embeddings, step.head).items() if name not in work.original}
    rest = round_each(ends, dict.fromkeys(ends, format_of(step)))
    found = quantize_model(
        dense.move(model, torch.float32), ids, formats, act_order=step.gptq.act_order, damping=step.gptq.damping_pct / 100,
        shrink=1.0 if shrink is None else shrink, true_sequential=step.gptq.true_sequential, propagate=step.gptq.propagate,
        keep_zeros=hasattr(model.config, dense.PRUNED_KEY),
    )  # fmt: skip
    layers = {**found.layers, **rest}
    told = replace(dense.move(model, stored), layers, untie=step.head == "untie")
    return _save(step, work, out, Rounded(layers, {**found.summary, "skipped": told["skipped"]}), windows)


def _along(step: Quantize, work: Work, way: "Way", out: Path, windows: "Tensor | None") -> dict[str, Any]:
    """Every weight of the blocks by a way that looks at inputs, in float32."""
    import torch

    from assay.ops.models import dense
    from assay.ops.quantize.calibrated import round_along
    from assay.ops.quantize.rtn import Rounded, replace

    found = round_along(dense.move(work.model, torch.float32), _need(windows, step), way)
    told = replace(dense.move(work.model, dense.stored_dtype(work.parent)), found.layers)
    return _save(step, work, out, Rounded(found.layers, {**found.summary, "skipped": told["skipped"]}), windows)


def _fitting(weights: "Mapping[str, Tensor]", require: "Callable[[int, int], None]") -> None:
    """Ask of each weight, before any is rounded, whether its rows and columns fit; a note names the one that does not."""
    from assay.ops.quantize.grid import naming

    for name, weight in weights.items():
        rows, cols = weight.shape
        with naming(name, weight):
            require(rows, cols)


def _mixed(
    step: Quantize, model: "PreTrainedModel", ids: "Tensor", way: "Callable[[], UnitWay] | None" = None
) -> "tuple[dict[str, Format], dict[str, Any]]":
    """A format for each layer within the budget, and what was measured to choose it: with layers rounded by what ``way`` gives, or to nearest."""
    from assay.ops.quantize.allocate import allocate, sensitivities, to_nearest

    assert step.mixed is not None
    formats = [format_of(step, name) for name in step.mixed.formats]
    _affordable(model, formats, step.mixed.millibits / 1000)
    harm = sensitivities(model, ids[: step.mixed.windows], formats, way=to_nearest if way is None else way())
    chosen = allocate(harm, budget=step.mixed.millibits / 1000)
    return chosen.formats, {"mixed": chosen.summary}


def _affordable(model: "PreTrainedModel", formats: "Sequence[Format]", budget: float) -> None:
    """Refuse a budget that the smallest formats exceed, before anything is measured."""
    from assay.ops.models.experts import weights
    from assay.ops.quantize.grid import effective_bits

    shapes = [tuple(weight.shape) for weight in weights(model).values()]
    least = sum(min(effective_bits(format, *shape) for format in formats) * shape[0] * shape[1] for shape in shapes)
    least /= max(sum(rows * cols for rows, cols in shapes), 1)
    if least > budget + 1e-9:
        names = ", ".join(format.name for format in formats)
        raise ValueError(
            f"a budget of {budget:g} bits a weight is below the {least:.4g} that the smallest of {names} take; a larger budget works"
        )
