"""The one file that joins a step spec to the op that does it: specs in, checkpoints out.

One function per step kind, named as the kind, with its op imported inside: what a step is done with is exactly what its function imports,
so a change to one op leaves the artifacts of the others valid. Not here: any arithmetic, or where artifacts are kept.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from assay.ops.steps import (
    distill,
    pack,
    pretrain,
    prune_depth,
    prune_experts,
    prune_learned,
    prune_weights,
    prune_width,
    quantize,
    rotate,
    smooth,
)  # fmt: skip
from assay.ops.steps.training import Running
from assay.schemas.base import Base
from assay.schemas.pruning import Pack, PruneDepth, PruneExperts, PruneWeights, PruneWidth
from assay.schemas.rounding import Quantize, Rotate, Smooth
from assay.schemas.steps import DraftModel, RewriteStep, TrainedStep, WeightStep
from assay.schemas.texts import Calibration
from assay.schemas.training import Distill, Pretrain, PruneLearned

if TYPE_CHECKING:
    from torch import Tensor

    from assay.ops.steps.training import Windows as Texts

    Windows = Callable[[Calibration], Tensor] | Tensor | None

WAYS = {
    "prune_depth": prune_depth, "prune_width": prune_width, "prune_experts": prune_experts, "prune_weights": prune_weights,
    "pack": pack, "smooth": smooth, "rotate": rotate, "quantize": quantize,
}  # by the kind of step  # fmt: skip


def apply(step: RewriteStep, parent: Path, out: Path, *, windows: "Windows" = None, seed: int = 0) -> dict[str, Any]:
    """Do ``step`` to the checkpoint in ``parent`` and write a complete checkpoint into ``out``.

    Args:
        out: an existing, empty directory.
        windows: token ids [windows, length] to calibrate on, or what gives them for a calibration spec; only steps that look at text need it.
        seed: of whatever is drawn at random.
    Returns:
        What the step has to say for the manifest, as JSON: what was removed and why, or how many bits and of what.
    Raises:
        ValueError: ``out`` is not an empty directory, the parent does not fit the step, or a weight is not finite.
    """
    require_empty(out)
    calibration = getattr(step, "calibration", None)
    given = None if calibration is None else windows(calibration) if callable(windows) else windows
    told = getattr(WAYS[step.kind], _way(step))(step, parent, out, windows=given, seed=seed)
    _require_zeros(step, parent, out)
    return told


def train(
    step: TrainedStep,
    parent: Path,
    out: Path,
    *,
    windows: "Texts",
    teacher: Path,
    said: Path | None = None,
    running: Running = Running(),  # noqa: B008
) -> dict[str, Any]:
    """Do a step that trains, as :func:`apply` does one that does not.

    Args:
        windows: (text, windows, length) → token ids [windows, length].
        teacher: the base; ``said``: what it says of the text, where that is kept (``ops/steps/distill.py``).
    """
    require_empty(out)
    match step:
        case Distill():
            return distill.distill(step, parent, teacher, out, windows=windows, said=said, running=running)
        case PruneLearned():
            return prune_learned.prune_learned(step, parent, out, windows=windows, running=running)
        case Pretrain():
            return pretrain.pretrain(step, parent, out, windows=windows, running=running)
        case _:
            assert_never(step)


def _require_zeros(step: RewriteStep, parent: Path, out: Path) -> None:
    """Refuse a result in which weights that were pruned before ``step`` are no longer zero. Blocks may go, whole."""
    from assay.ops.models.dense import PRUNED_KEY, read_config

    if PRUNED_KEY not in read_config(parent) or isinstance(step, PruneDepth):
        return
    from assay.ops.models.checkpoint import load_model
    from assay.ops.models.experts import weights
    from assay.ops.prune.masks import require_kept, zeros_of

    require_kept(zeros_of(load_model(parent)), weights(load_model(out)))


def maker(step: WeightStep) -> str:
    """The function that does ``step``, as module:name: what its fingerprint is taken of."""
    return f"assay.ops.steps.{step.kind}:{step.kind if isinstance(step, TrainedStep) else _way(step)}"


def _way(step: RewriteStep) -> str:
    """The name of the function that does ``step`` in the module of its kind: of the score, search or rounding that it is done with."""
    match step:
        case Quantize():
            return quantize.entry(step)
        case PruneWeights():
            return step.method if step.quantize is None else f"{step.method}_rounded"
        case PruneDepth():
            return step.score if step.score in ("perplexity", "random", "listed") else step.kind
        case Smooth() | Rotate():
            return step.method if step.method in ("awq", "spinquant") else step.kind
        case PruneWidth() | PruneExperts() | Pack():
            return step.kind
        case _:
            assert_never(step)


def early_exit_draft(step: DraftModel, target: Path, out: Path) -> dict[str, Any]:
    """Write the first ``step.early_exit`` blocks of ``target`` as a checkpoint; of a packed target, packed."""
    from assay.ops.models.early_exit import write_early_exit

    require_empty(out)
    assert step.early_exit is not None
    return write_early_exit(target, out, step.early_exit)


def train_draft(
    step: DraftModel,
    target: Path,
    draft: Path | None,
    out: Path,
    *,
    windows: "Texts",
    running: Running = Running(),  # noqa: B008
) -> dict[str, Any]:
    """Train a copy of ``draft``, or of the first blocks of ``target``, toward ``target``, and write it as a checkpoint, packed if that is asked.

    Args:
        draft: a dense checkpoint; None with ``step.early_exit``.
        out: an existing, empty directory.
        windows: (text, windows, length) → token ids [windows, length].
    Returns:
        Steps, tokens, the curve, and how much draft and target overlap on held-out text: before, after, and as stored.
    Raises:
        ValueError: the two have different tokenizers, ``draft`` is quantized, or training diverged.
    """
    import tempfile

    import torch

    from assay.ops.models import checkpoint, dense
    from assay.ops.models.device import device
    from assay.ops.models.early_exit import early_exit
    from assay.ops.steps.quantize import hqq, rtn
    from assay.ops.steps.training import load_teacher, settings_of, texts_of, told_of
    from assay.ops.train.draft import distill, eos_of, require_same_tokens
    from assay.ops.train.overlap import overlap_with

    require_empty(out)
    asked, where = step.distill, device()
    assert asked is not None
    tokenizer, start = checkpoint.load_tokenizer(target), draft or target
    if draft is not None:
        dense.require_dense(draft, "distill")
        require_same_tokens(tokenizer, checkpoint.load_tokenizer(draft))
    teacher = load_teacher(target)
    student = checkpoint.load_model(start, dtype=torch.float32, device=where)
    if step.early_exit is not None:
        student = early_exit(student, step.early_exit)
    read, held_out = texts_of(asked, windows)
    points = distill(
        student, teacher, read, held_out, loss=asked.loss, temperature=asked.temperature, on_policy_pct=asked.on_policy_pct, rows=asked.batch,
        settings=settings_of(asked, running.seed), vocabulary=len(tokenizer), eos_ids=eos_of(student), **running.followed,
    )  # fmt: skip
    stored = dense.stored_dtype(start)
    with tempfile.TemporaryDirectory() as temporary:
        trained = out if asked.quantize is None else Path(temporary)
        dense.save_checkpoint(dense.move(student, stored, "cpu"), start, trained)
        packed = (
            {}
            if asked.quantize is None
            else {"rtn": rtn, "hqq": hqq}[asked.quantize.method](asked.quantize, trained, out, seed=running.seed)
        )
    measure = overlap_with(teacher, held_out, vocabulary=len(tokenizer))
    written = measure(checkpoint.load_model(out, dtype=torch.float32, device=where))
    return {
        **told_of(asked, points, held_out), "layers": student.config.get_text_config(decoder=True).num_hidden_layers, "before": points[0].metrics,
        "after": points[-1].metrics, "stored": written._asdict(), **({"packed": packed} if packed else {}),
    }  # fmt: skip


def import_base(base: Base, out: Path) -> dict[str, Any]:
    """Import ``base`` into ``out``, an existing, empty directory, as a normal checkpoint in ``base.dtype``.

    Raises:
        ValueError: ``out`` is not empty; the source cannot be opened; or it has another shape than ``base.shape`` states.
    """
    require_empty(out)
    if base.hub is not None:
        found = import_hub_base(base, out)
    elif base.path is not None:
        found = import_path_base(base, out)
    else:
        found = import_package_base(base, out)
    stated = base.shape.model_dump() if base.shape else {}
    wrong = [f"{key} {value} (it is {found[key]})" for key, value in stated.items() if found[key] != value]
    if wrong:
        raise ValueError(f"base {base.name} states {', '.join(wrong)}; correct its shape, or leave it out")
    return found


def import_hub_base(base: Base, out: Path) -> dict[str, Any]:
    """A hub id at a commit."""
    import torch

    from assay.ops.models.bases import import_hub

    assert base.hub is not None and base.revision is not None
    return import_hub(base.hub, base.revision, dtype=getattr(torch, base.dtype), out=out)


def import_path_base(base: Base, out: Path) -> dict[str, Any]:
    """A local directory, or a GGUF file."""
    import torch

    from assay.ops.models.bases import import_directory, import_gguf

    assert base.path is not None
    path = Path(base.path).expanduser()
    return (import_gguf if path.suffix == ".gguf" else import_directory)(path, dtype=getattr(torch, base.dtype), out=out)


def import_package_base(base: Base, out: Path) -> dict[str, Any]:
    """A GGUF file inside an installed package."""
    import torch

    from assay.ops.models.bases import import_gguf, packaged_file

    assert base.package is not None
    path = packaged_file(base.package.name, base.package.version, base.package.file)
    return import_gguf(path, dtype=getattr(torch, base.dtype), out=out)


def require_empty(out: Path) -> None:
    """Refuse anything but an existing, empty directory."""
    if not out.is_dir() or any(out.iterdir()):
        raise ValueError(f"{out} is {'not empty' if out.is_dir() else 'no directory'}; an existing, empty directory was expected")
