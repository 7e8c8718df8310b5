"""The state of a training run on disk: weights, both moments of AdamW, how far it is. Safetensors and JSON alone; never a pickle.

A state is a directory ``step-…`` that appears by one rename, so a process killed at any moment leaves the one before it or the new one.
Not here: when to save (``loop.py``).
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TENSORS, FACTS = "state.safetensors", "state.json"
PARTS = ("parameter", "first", "second")  # of the name of a tensor: the weight, and the moments of its gradient


class Found(NamedTuple):
    """A saved state: tensors by ``part.name``, and what was said with them."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def save(directory: Path, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Put a state into ``directory``, and take the ones before it out.

    Args:
        facts: JSON without NaN.
    """
    directory.mkdir(parents=True, exist_ok=True)
    unfinished, final = directory / "unfinished", directory / f"step-{step:09d}"
    for leftover in (unfinished, final):
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished.mkdir()
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, unfinished / TENSORS)
    (unfinished / FACTS).write_text(json.dumps(dict(facts), allow_nan=False))
    for path in (unfinished / TENSORS, unfinished / FACTS, unfinished):
        _sync(path)
    unfinished.rename(final)
    _sync(directory)
    for other in directory.glob("step-*"):
        if other != final:
            shutil.rmtree(other, ignore_errors=True)


def load(directory: Path | None, *, expected: Mapping[str, Any], shapes: Mapping[str, torch.Size]) -> Found | None:
    """The newest state in ``directory``; None when there is none.

    Args:
        expected: what the run is; it has to be what the state was saved with.
        shapes: of the trained weights, by name.
    Raises:
        ValueError: the state is of another run: says what differs.
    """
    found = sorted(directory.glob("step-*")) if directory is not None and directory.is_dir() else []
    if not found:
        return None
    facts = json.loads((found[-1] / FACTS).read_text())
    known = json.loads(json.dumps(dict(expected)))  # as JSON gives it back
    before = facts["run"]
    differing = [
        f"{key} {known.get(key)!r} (there {before.get(key)!r})" for key in sorted({*known, *before}) if known.get(key) != before.get(key)
    ]
    tensors = load_file(found[-1] / TENSORS)
    wanted = {f"{part}.{name}": shape for name, shape in shapes.items() for part in PARTS}
    stored = {name: tensor.shape for name, tensor in tensors.items()}
    differing += [
        f"{name} {list(wanted.get(name, ())) or 'absent'} (there {list(stored.get(name, ())) or 'absent'})"
        for name in sorted({*wanted, *stored})
        if wanted.get(name) != stored.get(name)
    ]
    if differing:
        raise ValueError(
            f"{found[-1]} is the state of another run: {', '.join(differing[:4])}; expected the state of this one. Give each run a directory of its own, "
            "or remove this one to begin again"
        )
    return Found(tensors, facts)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
