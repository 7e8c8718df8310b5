"""What must run beside the weights of a checkpoint: rounded activations and online rotations, and how ``config.json`` says so.

It stands there under ``assay``; whoever opens the checkpoint by other means computes something else. Not here: doing either (``activations.py``,
``rotate.py``).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from assay.ops.models.dense import RUNTIME_KEY
from assay.ops.quantize.activations import Activations, attach
from assay.ops.quantize.rotate import Online
from assay.ops.quantize.rotate import attach as attach_online


class Runtime(NamedTuple):
    """``activations`` says how the inputs of layers are rounded, by name; ``online`` are the transforms that run before that."""

    activations: Mapping[str, Activations] = {}
    online: tuple[Online, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.activations) or bool(self.online)


def describe(runtime: Runtime) -> dict[str, Any]:
    """``runtime`` as JSON."""
    found: dict[str, Any] = {}
    if runtime.online:
        found["online"] = [each._asdict() for each in runtime.online]
    if runtime.activations:
        found["activations"] = {name: numbers(how) for name, how in runtime.activations.items()}
    return found


def runtime_of(config: Mapping[str, Any]) -> Runtime:
    """What ``config.json`` says must run beside the weights.

    Raises:
        ValueError: something that this version does not know.
    """
    said = config.get(RUNTIME_KEY) or {}
    unknown = sorted(set(said) - {"activations", "online"})
    if unknown:
        raise ValueError(f"config.json asks for {', '.join(unknown)} beside the weights; activations and online are known")
    activations = {
        name: Activations(**{key: _tensor(key, value) for key, value in how.items()}) for name, how in said.get("activations", {}).items()
    }
    return Runtime(activations, tuple(Online(**each) for each in said.get("online", ())))


def start(model: PreTrainedModel, runtime: Runtime) -> None:
    """Let ``model`` compute with ``runtime`` from now on; what it reads and writes as a checkpoint stays as it is."""
    attach_online(model, runtime.online)
    attach(model, runtime.activations)


def numbers(how: Activations) -> dict[str, Any]:
    """How one input is rounded, as JSON; two that round alike are equal."""
    return {key: float(value) if isinstance(value, torch.Tensor) else value for key, value in how._asdict().items() if value is not None}


def _tensor(key: str, value: Any) -> Any:
    return torch.tensor([value]) if key in ("scale", "zero") else value
