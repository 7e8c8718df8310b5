"""The one file that joins a step spec to the op that does it: specs in, checkpoints out.

One function per step kind, named as the kind, with its op imported inside: what a step is done with is exactly what its function imports,
so a change to one op leaves the artifacts of the others valid. Not here: any arithmetic, or where artifacts are kept.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

from assay.schemas.base import Base
from assay.schemas.steps import Calibration, PruneDepth, Quantize, WeightStep

if TYPE_CHECKING:
    from torch import Tensor

    Windows = Callable[[Calibration], Tensor] | Tensor | None


def apply(step: WeightStep, parent: Path, out: Path, *, windows: "Windows" = None, seed: int = 0) -> dict[str, Any]:
    """Do ``step`` to the checkpoint in ``parent`` and write a complete checkpoint into ``out``.

    Args:
        out: an existing, empty directory.
        windows: token ids [windows, length] to calibrate on, or what gives them for a calibration spec; only steps that look at text need it.
        seed: of whatever is drawn at random; the steps so far draw nothing.
    Returns:
        What the step has to say for the manifest, as JSON: what was removed and why, or how many bits and of what.
    Raises:
        ValueError: ``out`` is not an empty directory, the parent does not fit the step, or a weight is not finite.
    """
    require_empty(out)
    match step:
        case PruneDepth():
            return prune_depth(step, parent, out, windows=windows, seed=seed)
        case Quantize():
            return quantize(step, parent, out, windows=windows, seed=seed)
        case _:
            assert_never(step)


def prune_depth(step: PruneDepth, parent: Path, out: Path, *, windows: "Windows" = None, seed: int = 0) -> dict[str, Any]:
    """Score the blocks in float32, take ``step.layers`` of them out, and save in the dtype of the parent."""
    import torch

    from assay.ops.models import dense
    from assay.ops.prune import depth

    dense.require_dense(parent, "prune_depth")
    if windows is None:
        raise ValueError(f"prune_depth scores blocks by {step.score} on text; give windows, token ids of shape [windows, length]")
    ids = windows(step.calibration) if callable(windows) else windows
    stored = dense.stored_dtype(parent)
    model = dense.load_dense(parent, dtype=torch.float32)
    if step.score == "block_influence":
        scores = depth.block_influence(model, ids)
        removed = depth.lowest(scores, step.layers)
    else:
        scores = depth.angular_distances(model, ids, step.layers)
        start = depth.best_run(scores)
        removed = list(range(start, start + step.layers))
    before = model.config.get_text_config(decoder=True).num_hidden_layers
    depth.drop_layers(model, removed)
    dense.save_checkpoint(dense.move(model, stored), parent, out)  # to float32 and back changes no bit
    return {"score": step.score, "scores": scores.tolist(), "removed": removed, "layers_before": before, "tokens": ids.numel()}


def quantize(step: Quantize, parent: Path, out: Path, *, windows: "Windows" = None, seed: int = 0) -> dict[str, Any]:
    """Round the weights to nearest and save them packed; reads no text."""
    from assay.ops.models import dense
    from assay.ops.quantize import pack, rtn

    dense.require_dense(parent, "quantize")
    bits = int(step.format.removeprefix("int"))
    model = dense.load_dense(parent)
    rounded = rtn.rtn(model, bits=bits, group_size=step.group_size, symmetric=step.symmetric, embeddings=step.embeddings, head=step.head)
    stored = pack.save_packed(model, parent, out, rounded.layers, bits=bits, group_size=step.group_size, symmetric=step.symmetric)
    return {"method": step.method, **rounded.summary, **stored}


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
