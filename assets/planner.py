"""What ``assay advise`` does: an advice of a base or of a published shape, told, and the file that settles it. Not here: any of the parts."""

from pathlib import Path
from typing import Any

from assay.assets.advice_text import Told, shape_told, shrink_flow, told
from assay.assets.advise import advise
from assay.assets.devices import machine, model_shapes
from assay.assets.footprints import decoder_of
from assay.assets.settle import settle_file
from assay.assets.workspace import Workspace
from assay.ops.cost.shape import Decoder


def plan_of_base(workspace: Workspace, *, write: Path | None, top: int, **asked: Any) -> tuple[list[Told], Path | None]:
    """The declared variants of a base, ranked; with ``write`` the experiment that measures what is missing, as a new file.

    Raises:
        ValueError: as :func:`advise` and :func:`settle_file`, or the file is there already or is no .yaml file.
    """
    if write is not None and (write.exists() or write.suffix not in (".yaml", ".yml")):
        raise ValueError(f"{write} {'is there already' if write.exists() else 'is no .yaml file'}; name a new file that ends in .yaml")
    advice = advise(workspace, **asked)
    if write is not None:
        text = settle_file(workspace, advice, write.absolute())
        write.parent.mkdir(parents=True, exist_ok=True)
        write.write_text(text, encoding="utf-8")
    return told(advice, top=top), write


def plan_of_shape(
    workspace: Workspace, *, shape: str, to: str | None, context: int, batch: int, device: str, memory_gib: float | None
) -> list[Told]:
    """A published model on a device, and the way from it to a smaller one.

    Raises:
        ValueError: an unknown shape, or one that is not smaller.
    """
    on = machine(workspace, device)
    memory = on.memory_bytes if memory_gib is None else memory_gib * 2**30
    name, large = _shape(shape)
    parts = shape_told(name, large, on, memory, context=context, batch=batch)
    if to is not None:
        other, small = _shape(to)
        if small.parameters >= large.parameters:
            raise ValueError(
                f"--to {to} has {small.parameters / 1e9:.1f} billion weights and --shape {shape} {large.parameters / 1e9:.1f}; name a smaller one"
            )
        parts.append(shrink_flow(name, large, other, small, on))
    return parts


def _shape(name: str) -> tuple[str, Decoder]:
    known = model_shapes()
    if name not in known:
        raise ValueError(f"no shape is called {name!r}; there are {', '.join(known)}")
    return known[name].name, decoder_of(known[name])
