"""What every run of training is, from its spec: how many steps, on which windows, with which settings, and what it has to say. Not here: any training."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from assay.ops.models.device import device
from assay.schemas.texts import Text
from assay.schemas.training import Training

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from assay.ops.train.loop import Point, Progress, Settings

    Windows = Callable[[Text, int, int], Tensor]

HELD_OUT_TOKENS = 4096  # that a student is evaluated on while it is trained
STOP_ABOVE = 3.0  # times the lowest loss so far: a run that rises so far has diverged
CURVE = "curve.json"  # beside the weights that a run made: what it was on the way
CURVE_POINTS, EVALUATED_EACH = 60, 5  # about so many points has a curve, and each so many of them an evaluation


class Running(NamedTuple):
    """How a run is begun, gone on from and followed: its seed, and ``state``, ``run`` and ``progress`` of ``ops/train/loop.py``."""

    seed: int = 0
    state: Path | None = None
    run: dict[str, Any] | None = None
    progress: "Callable[[Progress], None] | None" = None

    @property
    def followed(self) -> dict[str, Any]:
        """What ``loop.train``, and all that calls it, takes of it by name."""
        return {"state": self.state, "run": self.run, "progress": self.progress}


def steps_of(asked: Training) -> int:
    """Updates of the weights: whole ones, so rounded up."""
    return -(-asked.tokens // (asked.batch * asked.length))


def texts_of(asked: Training, windows: "Windows") -> "tuple[Tensor, Tensor]":
    """The windows to read, and those behind them in the text, which are held out."""
    count = steps_of(asked) * asked.batch
    ids = windows(asked.text, count + HELD_OUT_TOKENS // asked.length + 1, asked.length)
    return ids[:count], ids[count:]


def settings_of(asked: Training, seed: int) -> "Settings":
    """How the run is optimized and how often it is looked at."""
    from assay.ops.train.loop import Settings

    steps = steps_of(asked)
    record = max(1, steps // CURVE_POINTS)
    return Settings(
        steps=steps, learning_rate=asked.learning_rate, warmup_steps=steps * asked.warmup_pct // 100, record_every=record,
        evaluate_every=EVALUATED_EACH * record, stop_above=STOP_ABOVE, seed=seed,
    )  # fmt: skip


def load_teacher(directory: Path) -> "PreTrainedModel":
    """A model that teaches, on the device: as it is stored where that is fast, in float32 on a CPU."""
    import torch

    from assay.ops.models.checkpoint import load_model

    where = device()
    return load_model(directory, dtype=None if where == "cuda" else torch.float32, device=where).requires_grad_(False)


def told_of(asked: Training, points: "Sequence[Point]", held_out: "Tensor", *, bf16: bool = False) -> dict[str, Any]:
    """What every run has to say, as JSON: steps, tokens, the dtype in which blocks multiplied, and the curve."""
    return {
        "steps": steps_of(asked), "tokens": points[-1].tokens, "held_out_tokens": held_out.numel(),
        "products": "bfloat16" if bf16 else "float32", "curve": [point._asdict() for point in points],
    }  # fmt: skip


def with_curve(out: Path, told: dict[str, Any]) -> dict[str, Any]:
    """``told``, kept beside the weights in ``out`` for the suite ``recovery``."""
    (out / CURVE).write_text(json.dumps(told, allow_nan=False))
    return told
